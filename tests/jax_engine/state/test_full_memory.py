"""A host's memory that is really full: a tmpfs without a free page, as the kernel has it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jax_engine.restart_cases import Started, assert_is_step
from meshmend.errors import RestartError

BYTES = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root, and a kernel that lets it")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take every page that is free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bavail == 0, "the oracle: nothing is free"
    return ballast


def test_copies_go_on_in_full_memory_because_they_use_that_of_older_ones(small: Path) -> None:
    job = Started(memory=small / "copies")
    job.restore()
    job.keep(1, 2, 3)
    job.keeper._mirror.wait()  # type: ignore[union-attr]
    fill(small)
    job.keep(4, 5)
    job.crash()
    again = Started(memory=small / "copies")
    assert_is_step(again, again.restore(), 5)


def test_a_first_copy_without_room_names_the_folder_and_what_to_do(small: Path) -> None:
    job = Started(memory=small / "copies")
    job.restore()
    assert job.keeper._mirror is not None
    gave_up: list[BaseException] = []
    job.keeper._mirror.on_failure = gave_up.append  # which ends the process
    ballast = fill(small)
    expected = (
        r"copies cannot keep a copy of step 1: No space left on device\. .*name another folder by MESHMEND_MEMORY"
    )
    with pytest.raises(RestartError, match=expected):  # noqa: PT012
        job.keep(1)
        job.keeper._mirror.wait()
    assert [str(error).partition(":")[0] for error in gave_up] == [f"{small}/copies cannot keep a copy of step 1"]
    ballast.unlink()
    job.keeper.memory.lock.release()
    again = Started(memory=small / "copies")
    assert again.restore().source == "start", "no part of the copy is taken for one"
    again.keep(2)
    again.crash()
    third = Started(memory=small / "copies")
    assert_is_step(third, third.restore(), 2)
