"""Copies in memory and checkpoints that an earlier version has written: a job of this one goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from golden.make import STEP, unpack
from jax_engine.restart_cases import Started, assert_is_step


@pytest.mark.parametrize("kind", ["copy", "checkpoint"])
def test_a_job_goes_on_from_what_an_earlier_version_has_kept(kind: str, tmp_path: Path) -> None:
    folder = unpack(kind, tmp_path / kind)
    options: dict[str, Any] = {"memory": folder}
    if kind == "checkpoint":
        options = {"memory_every": 0, "disk": folder, "disk_every": 1}
    job = Started(sharded=True, **options)
    found = job.restore()
    assert_is_step(job, found, STEP)
    assert found.source == {"copy": "memory", "checkpoint": "disk"}[kind]
    # And what this version keeps beside it is found after it.
    job.keep(STEP + 1)
    job.keeper.close()
    again = Started(sharded=True, **options)
    assert_is_step(again, again.restore(), STEP + 1)
