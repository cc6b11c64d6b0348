"""A file's lock: one process at a time, not without end, and no obstacle where the file system has none."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmend.files import locked

HOLDER = """
import sys, time
from pathlib import Path
from meshmend.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
    time.sleep(0.3)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps the lock until it is told to let go."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "list.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_a_lock_is_waited_for_but_not_without_end(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    with pytest.raises(TimeoutError, match=r"kept its lock for 0\.2 s.*list\.json"), locked(path, timeout_s=0.2):
        pass
    assert holder.stdin is not None
    began = time.monotonic()
    holder.stdin.write(b"\n")
    holder.stdin.flush()
    with locked(path):
        assert time.monotonic() - began >= 0.3


def test_the_lock_of_a_process_that_is_killed_is_free(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    holder.kill()
    with locked(tmp_path / "list.json", timeout_s=10):
        pass


def test_without_locks_of_the_file_system_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / "deep" / "list.json"), locked(tmp_path / "deep" / "list.json"):
        pass
