"""A job's events as HTTP requests: a host is lost, a chip is quarantined, the job waits, it trains again.

The sender reads the timelines in the shared folder, from a thread of a process that trains nothing: a dead or slow
endpoint costs the job nothing, and whichever host wrote an event down may die. Any number of senders may be started
for one folder, say one per host: a lock lets one of them send, and the next takes over when that one dies. What has
been sent is recorded in the folder, so each event goes out once. Only a sender that is killed between the answer and
the record, or a file system without locks, repeats one; then its `id` is the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from meshmend.launch.events import KINDS, LOST
from meshmend.launch.places import WEBHOOK_EXAMPLE, check_url
from meshmend.launch.timeline import Event
from meshmend.launch.watching import Watch

LOOK_S = 1.0
"""Interval at which the folder is read."""
POST_S = 10.0
"""How long an endpoint may take to answer."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""Interval before an event is sent again: it doubles each time, up to the last."""
REFUSED_TRIES = 3
"""An event that the endpoint itself refuses (an answer of 4xx) so many times is dropped: others wait behind it."""
KEEP_S = 86400.0
MAX_WAITING = 1000
"""Events that could not be sent are kept for a day, and at most so many of them, the newest."""
MAX_RECORDED = 10_000
"""Events that are remembered as sent."""
FINISH_S = 15.0
"""How long the events of a job that is over may take."""
MAX_TEXT = 2000


def message_of(event: Event) -> dict[str, Any] | None:
    """Return what is sent for an event of a timeline, None for all others. Every field is always there."""
    try:
        kind, hosts = event["event"], event.get("lost" if event["event"] == LOST else "hosts", [])
        seconds = None if event.get("seconds") is None else float(event["seconds"])
        message = {
            "id": str(event["id"]),
            "kind": kind,
            "job": str(event.get("job", "job")),
            "hosts": [int(host) for host in hosts],
            "chips": [[int(x) for x in chip] for chip in event.get("chips", [])],
            "step": int(event.get("step", 0)),
            "attempt": int(event.get("attempt", 0)),
            "time": float(event["at"]) + (seconds or 0.0),
            "seconds": seconds,
            "text": str(event["text"])[:MAX_TEXT],
        }
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return message if kind in KINDS else None


class Webhook:
    """Sends the events of the job in a folder to a URL, from a thread, inside the `with` block.

    The block's end waits until everything is sent, for `finish_s` at most. Events from before the first sender ever
    was started for this folder and URL are not sent. `tell` is called with a line for people when the endpoint stops
    to take events, and when it takes them again.
    """

    def __init__(
        self,
        folder: str | Path,
        url: str,
        *,
        tell: Callable[[str], None] = lambda _: None,
        post_s: float = POST_S,
        finish_s: float = FINISH_S,
    ) -> None:
        self.url = check_url(url, "--webhook", WEBHOOK_EXAMPLE)
        self.where = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        """The URL without its path."""
        self.n_sent = 0
        self.problem = ""
        """Why the last request failed, empty if it did not."""
        self._tell = tell
        self._post_s, self._finish_s = post_s, finish_s
        self._watch = Watch(folder, self._hear)
        name = hashlib.sha256(url.encode()).hexdigest()[:12]
        self._record = self._watch.folder / f"webhook-{name}.json"
        self._lock: int | None = None
        self._since = time.time()
        self._sent: dict[str, float] = {}
        self._waiting: dict[str, dict[str, Any]] = {}
        self._refused: dict[str, int] = {}
        self._closing = threading.Event()
        self._until = float("inf")
        self._thread = threading.Thread(target=self._run, name="meshmend-webhook", daemon=True)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __enter__(self) -> Self:
        self._claim()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._until = time.monotonic() + self._finish_s
        self._closing.set()
        self._thread.join(self._finish_s + 1.0)
        if self._lock is not None and (left := len(self._waiting)):
            self._tell(
                f"{left} event{'s' * (left != 1)} could not be sent to {self.where} "
                f"({self.problem or 'it has not answered yet'}); "
                f"`meshmend watch {self._watch.folder} --webhook URL` with the same URL sends what is left"
            )
        self._tell = lambda _: None
        if self._lock is not None and not self._thread.is_alive():
            os.close(self._lock)

    @property
    def is_sender(self) -> bool:
        """Whether this one sends; otherwise it stands by for another one, which does."""
        return self._lock is not None

    @property
    def n_waiting(self) -> int:
        """Events that are still to be sent."""
        return len(self._waiting)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            is_last = self._closing.is_set()
            if not self._has_work():
                if is_last:
                    return
                self._closing.wait(LOOK_S)
                continue
            if self._send(min(self._waiting.values(), key=_time)):
                retry_s = FIRST_RETRY_S
                continue
            if time.monotonic() + FIRST_RETRY_S > self._until:
                return
            if is_last:
                time.sleep(FIRST_RETRY_S)
            else:
                self._closing.wait(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _has_work(self) -> bool:
        """Read what is new in the folder, unless another one sends; return whether there is something to send."""
        try:
            if self._lock is None and not self._claim():
                return False
            self._watch.read()
            self._forget_old()
            return bool(self._waiting)
        except OSError as error:  # the folder may come back
            self.problem = str(error)
            return False

    def _hear(self, event: Event) -> None:
        message = message_of(event)
        if message is not None and message["id"] not in self._sent and message["time"] >= self._since:
            self._waiting.setdefault(message["id"], message)

    def _forget_old(self) -> None:
        oldest = time.time() - KEEP_S
        for message in sorted(self._waiting.values(), key=_time):
            if message["time"] < oldest or len(self._waiting) > MAX_WAITING:
                del self._waiting[message["id"]]

    def _claim(self) -> bool:
        """Become the sender, unless another one is; then take over what the one before has sent."""
        handle = os.open(self._record.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:
            pass  # a file system without locks: an event that is sent twice is better than one that is not sent
        self._lock = handle
        if not self._read_record():
            self._write_record()
        return True

    def _read_record(self) -> bool:
        """Take over what was sent before; return whether there is such a record, and an intact one."""
        try:
            found = json.loads(self._record.read_bytes())
            self._since, self._sent = float(found["since"]), {str(k): float(v) for k, v in found["sent"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _write_record(self) -> None:
        draft = self._record.with_suffix(".draft")
        draft.write_text(json.dumps({"since": self._since, "sent": self._sent}))
        draft.replace(self._record)

    def _send(self, message: dict[str, Any]) -> bool:
        """Send one event; return whether the next one is due at once."""
        why, is_refused = self._post(message)
        if why and not self.problem:
            self._tell(f"{self.where} does not take events: {why}. They are kept, and sent again")
        elif self.problem and not why:
            self._tell(f"{self.where} takes events again")
        self.problem = why
        key = message["id"]
        if is_refused:
            self._refused[key] = self._refused.get(key, 0) + 1
        if why and self._refused.get(key, 0) < REFUSED_TRIES:
            return False
        if why:
            self._tell(f"an event is dropped, {self.where} refuses it ({why}): {message['text']}")
        self.n_sent += not why
        del self._waiting[key]
        self._refused.pop(key, None)
        self._sent[key] = message["time"]
        while len(self._sent) > MAX_RECORDED:
            forgotten = next(iter(self._sent))
            self._since = max(self._since, self._sent.pop(forgotten) + 1e-6)
        try:
            self._write_record()
        except OSError as error:
            self._tell(f"what was sent cannot be recorded in {self._record}: {error.strerror}")
        return True

    def _post(self, message: dict[str, Any]) -> tuple[str, bool]:
        """Post a message; return why that failed, empty if it did not, and whether the endpoint refuses this one."""
        request = urllib.request.Request(  # noqa: S310  # http or https, as check_url has seen
            self.url,
            data=json.dumps(message).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "meshmend"},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=self._post_s):
                return "", False
        except urllib.error.HTTPError as error:
            error.close()
            is_refused = 400 <= error.code < 500 and error.code not in (408, 429)
            return f"it answers {error.code}", is_refused
        except urllib.error.URLError as error:
            return str(getattr(error.reason, "strerror", None) or error.reason), False
        except (OSError, HTTPException, ValueError) as error:
            return str(error) or type(error).__name__, False


def _time(message: dict[str, Any]) -> float:
    return float(message["time"])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects of a POST would arrive as a GET, without the event."""

    def redirect_request(self, *_: Any) -> None:
        return None
