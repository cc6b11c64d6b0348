"""What an operator wants to hear of a job: hosts that are lost, a job that waits for hosts, one that trains again.

The agent of each host writes these events into the host's timeline. It lives on when its worker dies, and hears from
the store what has happened; from the worker's own lines it knows when the first step is done again. So each event is
written by every host that lives through it, with the same `id`: a reader that knows the id counts it once, and needs
only one of them to have survived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from meshmend.launch.hosts import Hosts, name_hosts
from meshmend.launch.member import Place
from meshmend.launch.membership import Message
from meshmend.launch.story import Tail
from meshmend.launch.timeline import Event, Timeline

LOST, RECOVERED, BELOW_MINIMUM, QUARANTINED = "host lost", "recovered", "below minimum", "quarantined"
KINDS = (LOST, RECOVERED, BELOW_MINIMUM, QUARANTINED)
"""Events with an `id` and a `text` for people."""
LOOK_S = 1.0
"""Interval at which an agent looks for its worker's steps."""


class AgentLog:
    """Writes a host's events, from what the store says and what the worker has written. `close` it at the end."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        hosts: tuple[int, int],
        machine: str = "",
        report: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._timeline = timeline
        self._least, self._most = hosts
        self._machine = Hosts.read(machine) if machine else None
        self._report = report
        self._tail = None if timeline.path is None else Tail(timeline.path, remember=False)
        self._place: Place | None = None
        self._placed_at = 0.0
        self._step, self._step_at = 0, 0.0
        self._interrupted: tuple[int, float, tuple[int, ...]] | None = None
        """The last step before the round ended, when it was done and by which hosts; None while the job trains."""
        self._lost: set[int] = set()
        """Hosts that were lost since then."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if self._tail is not None:
            self._tail.read()  # of an earlier job in this folder
            threading.Thread(target=self._follow, name="meshmend-events", daemon=True).start()

    def start_round(self, place: Place) -> None:
        """Record that a round starts."""
        with self._lock:
            if self._place is not None and place.number == self._place.number + 1:
                self._note_missing({*place.hosts, *place.cut_off})
            self._place, self._placed_at = place, time.time()
            self._timeline.facts["launch"] = place.number
            self._timeline.note(
                "round",
                number=place.number,
                hosts=list(place.hosts),
                cut_off=list(place.cut_off),
                least=self._least,
                most=self._most,
            )

    def hear(self, message: Message) -> None:
        """Record what the store says, if it is worth it."""
        with self._lock:
            if message["say"] == "stop" and self._place is not None:
                self.look()
                if self._step_at > self._placed_at:
                    self._interrupted, self._lost = (self._step, self._step_at, self._place.hosts), set()
                if message["lost"] is not None:
                    self._note_lost(int(message["lost"]), str(message["why"]))
            elif message["say"] == "short":
                self._note_missing(message["hosts"])
                self._note_short(sorted(message["hosts"]), int(message["least"]))
                self._report("short", **{name: message[name] for name in ("hosts", "least", "number")})

    def look(self) -> None:
        """Read what the worker has written since the last time."""
        with self._lock:
            for event in self._tail.read() if self._tail is not None else ():
                if "attempt" in event:
                    self._timeline.facts["attempt"] = event["attempt"]
                if event["event"] == "step" and isinstance(event.get("step"), int):
                    self._step, self._step_at = event["step"], event["at"]
                    if self._interrupted is not None and self._step_at > self._placed_at:
                        self._note_recovered()

    def close(self) -> None:
        """Read the worker's last lines, and end."""
        self._closed.set()
        self.look()

    def _follow(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look()

    def _note(self, kind: str, key: str, text: str, **facts: Any) -> Event:
        round_name = self._place.name if self._place is not None else ""
        text = f"{self._timeline.facts.get('job', 'job')}: {text}"
        return self._timeline.note(kind, id=f"{round_name}/{key}", text=text, **facts)

    def _note_missing(self, here: Iterable[int]) -> None:
        """Record the loss of hosts that died while the others were between two rounds: the store names only one."""
        if self._place is not None:
            for host in sorted({*self._place.hosts} - {*here} - self._lost):
                self._note_lost(host, f"host {host} is lost: it did not come to the next round")

    def _note_lost(self, host: int, why: str) -> None:
        self._lost.add(host)
        chips = [] if self._machine is None else [list(chip) for chip in self._machine.chips(host)]
        text = f"{why} (after step {self._step}{f', {len(chips)} chips' if chips else ''})"
        self._note(LOST, f"{LOST} {host}", text, step=self._step, lost=[host], chips=chips, why=why)

    def _note_short(self, here: list[int], least: int) -> None:
        text = f"the job waits after step {self._step}: it needs {least} hosts, and has {name_hosts(here)}"
        text += ", which no cables join" * (len(here) >= least)
        self._note(BELOW_MINIMUM, BELOW_MINIMUM, text, step=self._step, hosts=here, least=least)

    def _note_recovered(self) -> None:
        assert self._interrupted is not None  # noqa: S101  # its caller has seen to it
        assert self._place is not None  # noqa: S101  # so has whoever interrupted it
        step, since, before = self._interrupted
        hosts = self._place.hosts
        seconds = self._step_at - since
        text = f"training again on {name_hosts(hosts)}: step {self._step} is done, {seconds:.1f} s after step {step}"
        self._note(
            RECOVERED,
            RECOVERED,
            text,
            at=since,
            seconds=seconds,
            step=self._step,
            hosts=list(hosts),
            lost=sorted({*before} - {*hosts}),
            joined=sorted({*hosts} - {*before}),
        )
        self._interrupted, self._lost = None, set()
