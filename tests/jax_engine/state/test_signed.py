"""Copies and checkpoints that somebody else has made: a job with a secret takes only what is signed with it.

The stranger of these tests can read and write every file, knows meshmend, and does not know the secret.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_engine.restart_cases import Started, assert_is_step
from meshmend.errors import RestartError
from meshmend.jax.state.disk.orbax import STATE, SavedArrays
from meshmend.launch.signing import FILE_KEY, KEY_ENDS, checksum, file_key, hand_over_key, is_signed, signature

SECRET = "only the job knows this"  # noqa: S105


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the job a secret, or another one, or none."""
    monkeypatch.delenv(FILE_KEY, raising=False)
    monkeypatch.delenv(KEY_ENDS, raising=False)

    def give(text: str) -> None:
        monkeypatch.setenv(FILE_KEY, "")  # which is restored at the end
        hand_over_key(text)

    return give


def begin(folder: Path, **options: Any) -> Started:
    return Started(memory=folder / "memory", disk=folder / "disk", disk_every=2, **options)


def run(folder: Path, *steps: int) -> None:
    """Run a job that is killed after these steps."""
    job = begin(folder)
    job.restore()
    job.keep(*steps)
    job.crash()


def forge_memory(folder: Path) -> None:
    """Add 1 to the step of each copy, and sign it as a job without a secret does."""
    for path in [path for path in (folder / "memory").iterdir() if path.name != "lock"]:
        magic, line, rest = path.read_bytes().split(b"\n", 2)
        length = int(line.split()[0])
        facts = json.loads(rest[:length])
        facts["step"] += 1
        header = json.dumps(facts).encode()
        words = f"{len(header)} {hashlib.sha256(header).hexdigest()} -\n".encode()
        path.unlink()
        path.with_name(f"{facts['attempt']:06d}-{facts['step']:012d}").write_bytes(
            magic + b"\n" + words + header + rest[length:]
        )


def forge_checkpoint(folder: Path, step: int, values: Any) -> None:
    """Put other numbers into a checkpoint, with checksums that are right for whoever has no secret."""
    at = folder / "disk" / str(step)
    path = at / "meshmend" / "metadata"
    facts = json.loads(json.loads(path.read_text())["facts"])
    saved = SavedArrays(at / STATE)
    for number, (name, *_) in enumerate(facts["arrays"]):
        array = saved.array(name)
        new = np.full(array.shape, values, array.dtype.numpy_dtype)
        array.write(new).result()
        data = np.ascontiguousarray(new).reshape(-1).view(np.uint8).data
        facts["checksums"][number] = [checksum(b"", data)] * len(facts["checksums"][number])
    text = json.dumps(facts)
    path.write_text(json.dumps({"facts": text, "checksum": hashlib.sha256(text.encode()).hexdigest()}))


def test_the_jobs_own_copies_and_checkpoints_are_taken(tmp_path: Path, secret: Any) -> None:
    secret(SECRET)
    run(tmp_path, 1, 2, 3)
    job = begin(tmp_path)
    assert_is_step(job, job.restore(), 3)
    job.crash()
    shutil.rmtree(tmp_path / "memory")
    job = begin(tmp_path)
    assert_is_step(job, job.restore(), 2)
    job.crash()


def test_forged_copies_are_taken_only_where_there_is_no_secret(tmp_path: Path, secret: Any) -> None:
    secret(SECRET)
    run(tmp_path, 1, 2, 3)
    forge_memory(tmp_path)
    job = begin(tmp_path)
    with pytest.warns(RuntimeWarning, match="is not signed with this job's secret"):
        assert_is_step(job, job.restore(), 2)  # from disk
    job.crash()
    shutil.rmtree(tmp_path)
    secret("")
    run(tmp_path, 1, 2, 3)
    forge_memory(tmp_path)
    job = begin(tmp_path)
    assert job.restore().step == 4, "the forgery works, or this test shows nothing"
    job.crash()


@pytest.mark.parametrize("text", [SECRET, ""], ids=["with a secret", "without"])
def test_a_forged_checkpoint_is_taken_only_where_there_is_no_secret(tmp_path: Path, secret: Any, text: str) -> None:
    secret(text)
    run(tmp_path, 1, 2, 3, 4)
    shutil.rmtree(tmp_path / "memory")
    forge_checkpoint(tmp_path, 4, values=7)
    job = begin(tmp_path)
    if text:
        with pytest.warns(RuntimeWarning, match="step 4 in .* is not signed with this job's secret"):
            assert_is_step(job, job.restore(), 2)
    else:
        found = job.restore()
        assert (found.step, float(np.asarray(found.params["out"])[0])) == (4, 7.0)
    job.crash()


def test_other_numbers_under_the_jobs_own_index_are_found(tmp_path: Path, secret: Any) -> None:
    secret(SECRET)
    run(tmp_path, 1, 2, 3, 4)
    shutil.rmtree(tmp_path / "memory")
    index = tmp_path / "disk/4/meshmend/metadata"
    signed = index.read_bytes()
    forge_checkpoint(tmp_path, 4, values=7)
    index.write_bytes(signed)
    job = begin(tmp_path)
    with pytest.warns(RuntimeWarning, match="checksum mismatch"):
        assert_is_step(job, job.restore(), 2)
    job.crash()


@pytest.mark.parametrize("before", ["", "another secret"], ids=["none", "another"])
def test_a_job_that_gets_a_secret_says_how_to_go_on(tmp_path: Path, secret: Any, before: str) -> None:
    secret(before)
    run(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "memory")
    secret(SECRET)
    job = begin(tmp_path)
    with pytest.raises(RestartError, match=r"give this job that one, or begin a new job in a new folder with Job\("):
        job.restore()
    again = Started(memory=tmp_path / "new", disk=tmp_path / "new disk", start_from=tmp_path / "disk" / "2")
    found = again.restore()
    assert found.step == 0
    assert np.array_equal(found.params["out"], again.values(2)[0]["out"])
    again.crash()


def test_a_secret_that_ends_with_the_run_signs_nothing_that_outlives_it(
    tmp_path: Path, secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENDS, "1")
    secret("drawn for this run")
    run(tmp_path, 1, 2, 3)
    secret("drawn for the next run")
    shutil.rmtree(tmp_path / "memory")
    job = begin(tmp_path)
    assert_is_step(job, job.restore(), 2)
    job.crash()


def test_a_signature_is_of_one_kind_of_file_and_one_secret(secret: Any) -> None:
    secret(SECRET)
    key = file_key()
    made = signature(key, "checkpoint", b"facts")
    assert is_signed(key, "checkpoint", b"facts", made)
    assert not is_signed(key, "copy in memory", b"facts", made)
    assert not is_signed(key, "checkpoint", b"other facts", made)
    assert not is_signed(key, "checkpoint", b"facts", "")
    assert not is_signed(key, "checkpoint", b"facts", "ü")
    secret("another")
    assert not is_signed(file_key(), "checkpoint", b"facts", made)
    assert SECRET.encode() not in key
