"""The journal of a lab: what it consists of, written before it is built, so that it can always be removed.

One file per lab. The process that builds the lab claims it atomically, and records its progress in it. A lock beside
it is held while namespaces are created or removed; it outlives its holder as long as one of the holder's commands
still runs. Files are written atomically, and are on disk before the next thing is created.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from meshmend.errors import MeshmendError
from meshmend.topology import Mesh
from meshmend_lab.errors import LabError
from meshmend_lab.mesh.delay import delay_seconds

FOLDER = Path("/run/meshmend")
MAX_BYTES = 2**20
PATIENCE_S = 60.0
"""How long the last command of a killed process may take to end."""

Stage = Literal["building", "changing", "up"]
RATE = re.compile(r"[1-9]\d{0,5}[kmg]bit", re.ASCII)


@dataclass(frozen=True)
class Journal:
    """The record of a lab. `token` distinguishes labs of the same name; `temporary` ones end with their process."""

    name: str
    mesh: Mesh
    rate: str
    stage: Stage = "building"
    temporary: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    pid: int = field(default_factory=os.getpid)
    started: int = field(default_factory=lambda: _start_of(os.getpid()))
    delay: str | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return journal_path(self.name)

    @property
    def process_lives(self) -> bool:
        """Whether the process that wrote this still runs; a later process with the same id does not count."""
        return self.started == _start_of(self.pid)

    def claim(self) -> None:
        """Write the file; raise FileExistsError if there is one."""
        self._write(claim=True)

    def write(self) -> None:
        """Replace the file."""
        self._write(claim=False)

    def _write(self, claim: bool) -> None:
        facts: dict[str, Any] = {
            **self.mesh.to_dict(),
            **{name: getattr(self, name) for name in ("rate", "stage", "temporary", "token", "pid", "started")},
            "delay": self.delay,
        }
        _make_folder()
        partial = FOLDER / f".{self.name}.{secrets.token_hex(4)}.part"
        try:
            with partial.open("x", encoding="utf-8") as file:
                json.dump(facts, file)
                file.flush()
                os.fsync(file.fileno())
            if claim:
                self.path.hardlink_to(partial)
            else:
                partial.replace(self.path)
            folder = os.open(FOLDER, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except FileExistsError:
            raise
        except OSError as error:
            raise LabError(f"The journal {self.path} cannot be written: {error.strerror or error}.") from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, name: str) -> Self | None:
        """Return the journal of a lab, None if there is none. Raise `LabError` if it is damaged."""
        path = journal_path(name)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            facts = json.loads(data)
            mesh = Mesh.from_dict(facts)
            keys = ("rate", "stage", "temporary", "token", "pid", "started", "delay")
            found = cls(name, mesh, *(facts[key] for key in keys))
            found._check()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, MeshmendError) as error:
            why = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
            raise LabError(
                f"The journal of lab {name!r}, {path}, is damaged ({why}). Remove what is left of the lab: "
                f"meshmend lab mesh down {name}"
            ) from error
        return found

    def _check(self) -> None:
        # Of any type yet.
        rate, temporary, token, delay = (vars(self)[name] for name in ("rate", "temporary", "token", "delay"))
        right = (
            isinstance(rate, str)
            and RATE.fullmatch(rate)
            and self.stage in ("building", "changing", "up")
            and isinstance(temporary, bool)
            and isinstance(token, str)
            and all(type(number) is int and number > 0 for number in (self.pid, self.started))
            and (delay is None or (isinstance(delay, str) and delay_seconds(delay)))
        )
        if not right:
            raise ValueError("a value is invalid")


def journal_path(name: str) -> Path:
    """Return where the journal of a lab is."""
    return FOLDER / f"{name}.json"


def machine_folder(name: str) -> Path:
    """Return where the machine file of a lab is."""
    return FOLDER / name


def journal_names() -> list[str]:
    """Return the names that have a journal, readable or not."""
    try:
        return sorted(path.stem for path in FOLDER.iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        return []


def forget(name: str) -> None:
    """Remove a lab's journal, its machine file and its temporary files."""
    try:
        folder = machine_folder(name)
        for file in folder.iterdir() if folder.is_dir() else ():
            file.unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()
        journal_path(name).unlink(missing_ok=True)
        for partial in FOLDER.iterdir():
            if partial.name.startswith(f".{name}.") and partial.suffix == ".part":
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise LabError(f"{journal_path(name)} cannot be removed: {error.strerror or error}.") from error


@contextlib.contextmanager
def locked(name: str, *, patience_s: float = PATIENCE_S) -> Iterator[int]:
    """Hold the lock of a lab; the value is its descriptor. Raise `TimeoutError` if another process keeps it."""
    _make_folder()
    path, until = FOLDER / f"{name}.lock", time.monotonic() + patience_s
    try:
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have removed the file meanwhile; then this is no longer the lock.
                with contextlib.suppress(FileNotFoundError):
                    if os.fstat(lock).st_ino == path.stat().st_ino:
                        break
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(lock)
                    raise TimeoutError(name) from None
                time.sleep(0.02)
            os.close(lock)
    except TimeoutError:
        raise
    except OSError as error:
        raise LabError(f"The lock {path} cannot be taken: {error.strerror or error}.") from error
    try:
        yield lock
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(lock)


def _make_folder() -> None:
    try:
        FOLDER.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise LabError(f"The folder {FOLDER} for journals cannot be created: {error.strerror or error}.") from error


def _start_of(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if there is no such process, or it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if words[0] in "ZX" else int(words[19])
    except (OSError, IndexError, ValueError):
        return 0
