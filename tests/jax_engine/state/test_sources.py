"""What a restarted job goes on from: the newest state that is whole, wherever it is, and whatever else is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_engine.restart_cases import Started, arrays_on_disk, assert_is_step, finish_save
from meshmend.errors import RestartError
from meshmend.files import with_timeout
from meshmend.jax.state.candidates import Source, rank_sources
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.keeper import Keeper
from meshmend.jax.state.memory.folders import FolderLock, default_folder, delete_stale

# Orbax reads many arrays at once; when one of them fails, the others' results come to an event loop that has ended.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def on_disk(folder: Path, *steps: int, **options: Any) -> dict[str, Any]:
    """Save steps on disk alone; return the options that a job restores them with."""
    options = {"memory_every": 0, "disk": folder, "disk_every": 1, **options}
    job = Started(**options)
    job.restore()
    job.keep(*steps)
    job.keeper.close()
    return options


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["flipped", "flipped near its end", "truncated", "deleted", "facts"])
def test_a_damaged_newest_checkpoint_is_found_and_the_older_one_is_used(what: str, tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=30_000).astype(np.float32)}
    options = on_disk(tmp_path, 1, 2, weights=weights)
    if what == "facts":
        flip(tmp_path / "2" / "meshmend" / "metadata", 0.5)
    elif "flipped" in what:
        flip(arrays_on_disk(tmp_path, 2)[0], 0.8 if "end" in what else 0.35)
    else:
        for path in arrays_on_disk(tmp_path, 2):
            path.unlink() if what == "deleted" else path.write_bytes(path.read_bytes()[:50])
    job = Started(**options)
    with pytest.warns(RuntimeWarning, match="Resuming from disk at step 1; skipped: .*2.* is damaged"):
        assert_is_step(job, job.restore(), 1)
    # The damaged one is out of the way, and what is saved in its place is really there.
    job.keep(2)
    job.keeper.close()
    assert [event["step"] for event in job.events("saved")] == [2]
    assert (tmp_path / "abandoned" / "2").is_dir()
    last = Started(**options)
    assert_is_step(last, last.restore(), 2)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_dtype_of_which_there_is_no_element(sharded: bool, tmp_path: Path) -> None:
    weights = {"w": np.arange(5.0, dtype=np.float32), "none": jnp.zeros((0, 3), jnp.bfloat16)}
    for step in (0, 1):
        job = Started(weights, sharded=sharded, memory=tmp_path)
        found = job.restore()
        assert found.step == step
        if not step:
            job.keep(1)
        job.crash()
    assert_is_step(job, found, 1)
    assert (found.params["none"].shape, found.params["none"].dtype) == ((0, 3), jnp.bfloat16)


def test_a_damaged_checkpoint_does_not_block_memory(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_every": 2}
    job = Started(**options)
    job.restore()
    job.keep(1, 2, 3, 4)
    job.keeper._mirror.wait()  # type: ignore[union-attr]
    finish_save(job)
    # As if the process ended here. The copies of step 4 are lost with a host; on disk that step is damaged.
    job.keeper.memory.lock.release()
    (tmp_path / "memory" / f"{1:06d}-{4:012d}").unlink()
    for path in arrays_on_disk(tmp_path / "disk", 4):
        path.write_bytes(path.read_bytes()[:50])
    again = Started(**options)
    with pytest.warns(RuntimeWarning, match="Resuming from memory at step 3; skipped: .*step 4"):
        found = again.restore()
    assert found.source == "memory"
    assert_is_step(again, found, 3)


def test_a_damaged_copy_in_memory_does_not_block_the_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_every": 2}
    job = Started(**options)
    job.restore()
    job.keep(2, 3)
    job.keeper._mirror.wait()  # type: ignore[union-attr]
    finish_save(job)
    job.keeper.memory.lock.release()
    for path in (tmp_path / "memory").glob("000001-*"):
        flip(path, 0.99)
    again = Started(**options)
    with pytest.warns(RuntimeWarning, match="state checksum mismatch"):
        found = again.restore()
    assert found.source == "disk"
    assert_is_step(again, found, 2)


def test_if_nothing_is_whole_the_job_does_not_start_over(tmp_path: Path) -> None:
    options = on_disk(tmp_path, 1)
    for path in arrays_on_disk(tmp_path, 1):
        path.write_bytes(b"")
    with pytest.raises(RestartError, match=r"(?s)can be restored:\n- host 0: .*step 1 .*--start-over"):
        Started(**options).restore()
    assert (tmp_path / "1").is_dir()


def test_after_going_back_steps_are_really_saved(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    on_disk(disk, 10)
    # A later attempt is at step 3, in memory.
    other = Started(memory=memory)
    other.restore()
    other.keeper._mirror.attempt = 2  # type: ignore[union-attr]
    other.keep(3)
    other.keeper.close()
    job = Started(memory=memory, disk=disk, disk_every=1)
    assert_is_step(job, job.restore(), 3)
    assert job.keeper.attempt == 3
    assert not (disk / "10").exists()
    job.keep(4, 5)
    job.keeper.close()
    assert [event["step"] for event in job.events("saved")] == [4, 5]
    again = Started(memory_every=0, disk=disk, disk_every=1)
    assert_is_step(again, again.restore(), 5)


def test_saved_is_said_only_of_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Started(memory_every=0, disk=tmp_path, disk_every=1)
    job.restore()
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", lambda *_, **__: False)
    job.keep(1)
    assert job.keeper.checkpoints._saving.wait(60)  # type: ignore[union-attr]
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", lambda *_, **__: True)
    with pytest.warns(RuntimeWarning, match="Step 1 is not saved on disk: .*Orbax did not save step 1.* continues"):
        job.keep(2)
    assert not job.events("saved")
    assert [event["step"] for event in job.events("not saved")] == [1]
    with pytest.raises(RestartError, match=r"2/meshmend/metadata is damaged: .*No such file"):
        job.keeper.close()
    assert not job.events("saved")


def test_a_dead_disk_does_not_make_memory_useless(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_every": 2}
    job = Started(**options)
    job.restore()
    job.keep(1)
    job.keeper.close()
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("stands for a dead mount")
    again = Started(**options)
    with pytest.warns(RuntimeWarning, match="unreachable") as warned:
        found = again.restore()
    assert found.source == "memory"
    assert_is_step(again, found, 1)
    assert len({str(warning.message) for warning in warned}) == len(warned)
    again.keep(2)
    with pytest.warns(RuntimeWarning, match="Step 2 is not saved on disk: .*Not a directory"):
        finish_save(again)
    assert [event["step"] for event in again.events("not saved")] == [2]
    # The disk is back: from then on it is used again.
    (tmp_path / "disk").unlink()
    again.keep(3, 4)
    again.keeper.close()
    assert [event["step"] for event in again.events("saved")] == [4]


def test_a_hung_disk_does_not_make_memory_useless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_timeout_s": 0.2}
    job = Started(**options)
    job.restore()
    job.keep(1)
    job.keeper.close()
    back = threading.Event()
    monkeypatch.setattr(Disk, "steps", lambda _: back.wait() and [])
    monkeypatch.setattr(Disk, "hold_claim", lambda *_: back.wait() and None)
    again = Started(**options)
    begun = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"unreachable: no answer within 0.2 s"):
        assert_is_step(again, again.restore(), 1)
    assert time.monotonic() - begun < 60
    back.set()


def test_a_dead_disk_and_no_memory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("stands for a dead mount")
    with pytest.raises(RestartError, match=r"is unreachable: .*Not a directory"):
        Started(memory=tmp_path / "memory", disk=tmp_path / "disk").restore()


def test_within_gives_back_results_errors_and_its_time() -> None:
    assert with_timeout(60, lambda a, b: a + b, 2, 3) == 5
    assert with_timeout(60, lambda: None) is None
    with pytest.raises(KeyError, match="x"):
        with_timeout(60, {}.__getitem__, "x")
    stop = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        with_timeout(0.05, stop.wait)
    stop.set()


def test_each_job_and_host_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path))
    names = ["jobA", "jobB", "a/b", "a_b", "..", ".", "", "a" * 300, "a" * 301, "ä"]
    folders = {default_folder(job, host) for job in names for host in range(2)}
    assert len(folders) == 2 * len(names)
    assert {folder.parent.parent.resolve() for folder in folders} == {tmp_path.resolve()}
    assert all(len(folder.resolve().relative_to(tmp_path.resolve()).parts) == 2 for folder in folders)
    monkeypatch.delenv("MESHMEND_MEMORY")
    assert default_folder("jobA", 1) == Path(f"/dev/shm/meshmend-{os.getuid()}/jobA/host-1")  # noqa: S108


def test_another_job_does_not_go_on_from_this_ones_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path))
    one = Started(job="one")
    one.restore()
    one.keep(500)
    one.keeper.close()
    assert Started(job="other").restore().source == "start"
    again = Started(job="one")
    assert_is_step(again, again.restore(), 500)


def test_two_writers_of_one_folder_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderLock.take, "__kwdefaults__", {"timeout_s": 0.0})
    code = (
        "import sys; from pathlib import Path; from meshmend.jax.state.memory.folders import FolderLock\n"
        f"lock = FolderLock(Path({str(tmp_path)!r})); lock.take(); print('held', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RestartError, match=f"in use by process {other.pid}.*MESHMEND_JOB"):
            Started(memory=tmp_path).restore()
        other.communicate("")
    # It has ended: its lock went with it.
    first = Started(memory=tmp_path)
    first.restore()
    with pytest.raises(RestartError, match=f"in use by process {os.getpid()}"):
        Started(memory=tmp_path).restore()
    first.keep(1)
    first.keeper.close()
    again = Started(memory=tmp_path)
    assert_is_step(again, again.restore(), 1)


def test_a_stale_copy_of_the_same_attempt_and_step_is_not_mixed_in(tmp_path: Path) -> None:
    # Process 1 was on another mesh in another part of the job, and counted the same attempt and step.
    copies = []
    for number, shape in enumerate(("2x2", "2x4")):
        job = Started(shape=shape, sharded=True, memory=tmp_path / str(number))
        job.restore()
        job.keep(5)
        job.keeper.close()
        copies.append(job.keeper.memory.read()[0])
    here = Started(sharded=True, memory=tmp_path / "0")
    here.restore()
    layout = here.layout
    sources = rank_sources([[copy.offer(layout.copy_identity) for copy in held] for held in copies])
    assert [(source.attempt, source.step, source.is_whole) for source in sources] == [(1, 5, True), (1, 5, True)]
    for source in sources:
        (process,) = set(source.senders(source.all_slices()).values())
        assert [copy.generation == source.generation for copy in copies[process]] == [True]
        assert [copy.generation == source.generation for copy in copies[1 - process]] == [False]


def test_processes_provide_about_as_many_parts_each() -> None:
    source = Source(1, 5, "memory", "one", n_parts=8, slices=(8, 8), holders={part: [] for part in range(8)})
    hosts = {0: (0, 1, 6, 7), 1: (2, 3, 0, 1), 2: (4, 5, 2, 3)}  # host 3 is lost, host 0 has kept its parts
    for process, parts in hosts.items():
        for part in parts:
            source.holders[part].append(process)
    assert source.is_whole
    senders = source.senders(source.all_slices())
    assert all(part in hosts[process] for (part, _), process in senders.items())
    assert sorted(Counter(senders.values()).values()) == [21, 21, 22]  # of 8 parts with 8 slices
    # What is damaged on one host is provided by another, if one has it.
    left = source.without({0: [0], 2: [2]})
    assert left.is_whole
    assert {*left.senders([(part, which) for part in (0, 2) for which in range(8)]).values()} == {1}
    assert not source.without({0: [6]}).is_whole


def test_a_layout_for_another_fabric_is_refused() -> None:
    """Such as that of a step which was compiled for the loss of a host."""
    here, other = Started(memory_every=0), Started(shape="2x3", memory_every=0)
    with pytest.raises(RestartError, match=r"The layout is for Fabric\(Mesh\(2x3.*fabric is Fabric\(Mesh\(2x2"):
        Keeper(here.session, other.layout, memory_every=0)


def test_a_state_of_another_optimizer_than_the_layouts_is_refused() -> None:
    job = Started(memory_every=0)
    other = Started(optimizer=optax.sgd(0.1, momentum=0.9), memory_every=0)
    with pytest.raises(RestartError, match=r"not of the layout.*Make both with the same train step"):
        job.keeper.restore(job.params, other.state)


def test_copies_go_when_the_last_step_is_on_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_every": 2}
    job = Started(**options)
    job.restore()
    job.keep(1, 2, 3)
    job.keeper.close()
    assert (tmp_path / "memory").is_dir()  # step 3 is nowhere else
    again = Started(**options)
    assert_is_step(again, again.restore(), 3)
    again.keep(4)
    again.keeper.close()
    assert not (tmp_path / "memory").exists()
    last = Started(**options)
    assert_is_step(last, last.restore(), 4)


def test_copies_that_nobody_wrote_to_for_a_week_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path))
    for name in ("old", "running", "young"):
        job = Started(job=name)
        job.restore()
        job.keep(1)
        job.keeper.close()
    lock = FolderLock(default_folder("running", 0))
    lock.take()
    for name, days in (("old", 7.1), ("running", 30), ("young", 6.9)):
        folder = default_folder(name, 0)
        for path in [*folder.iterdir(), folder]:
            os.utime(path, times=(time.time() - days * 86400,) * 2)
    # Not ours to remove.
    (tmp_path / "file").write_text("x")
    (tmp_path / "elsewhere" / "data").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "host-0").symlink_to(tmp_path / "elsewhere" / "data")
    job = Started(job="new")
    job.restore()
    assert [Path(event["folder"]).parent.name for event in job.events("forgot")] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere", "file", "linked", "new", "running", "young",
    ]  # fmt: skip
    assert delete_stale(default_folder("new", 0)) == []
    lock.release()


@pytest.mark.parametrize(
    ("mode", "owner", "why"), [(0o770, None, "other users"), (0o700, 12345, "belongs to user 12345")]
)
def test_a_folder_that_others_can_write_to_is_refused(mode: int, owner: int | None, why: str, tmp_path: Path) -> None:
    folder = tmp_path / "host-0"
    folder.mkdir()
    folder.chmod(mode)
    if owner is not None:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, owner, -1)
    with pytest.raises(RestartError, match=why):
        FolderLock(folder).take(timeout_s=0.0)
    assert not list(folder.iterdir())
