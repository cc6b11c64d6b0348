"""A record beside the job's name that a copy in memory was complete: what it says outlives all copies.

A job whose hosts come back without their memory, before there is a checkpoint, would otherwise take itself for new.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshmend.buckets import Folder, SharedFile
from meshmend.launch.hosts import ranges_of

LONGEST = 1 << 20
"""Of a record's bytes; 2,000 hosts in no order take 20 kB."""


class Record:
    """The record in a folder that all hosts share: an offer of the copy, without its parts (`candidates.Source`)."""

    def __init__(self, folder: Folder) -> None:
        self.file = SharedFile(folder, "kept.json")
        self._written = ""
        self._writer = threading.Thread()

    def write(self, offer: dict[str, Any], hosts: Sequence[int]) -> None:
        """Record a copy that all of these hosts have written, the first time; nothing waits for the disk."""
        if not self._written and not self._writer.is_alive():
            text = json.dumps(offer | {"parts": [], "hosts": ranges_of(hosts)})
            self._writer = threading.Thread(target=self._write, args=(text,), name="meshmend-record", daemon=True)
            self._writer.start()

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the next copy tries again
            self.file.change(lambda: text)
            self._written = text

    def read(self) -> list[dict[str, Any]]:
        """Return what was recorded, nothing for a new job; raise `OSError` if that cannot be found out."""
        try:
            offer = json.loads(self.file.read(LONGEST)[0])
            return [{"attempt": int(offer["attempt"]), "step": int(offer["step"]), **offer}]
        except FileNotFoundError:
            return []
        except (ValueError, LookupError, TypeError) as error:
            raise OSError(f"{self.file.path} is damaged: {error}") from error
