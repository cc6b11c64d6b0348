"""A job under a real Slurm whose nodes are killed: it goes on without them, and Slurm brings them back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshmend_lab.bench.restart import HostKill, Run
from meshmend_lab.bench.trainee import TrainingJob
from slurm_lab import SlurmJob, SlurmLab, unsupported_reason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unsupported_reason() != "", reason=f"no Slurm cluster: {unsupported_reason()}"),
]


class SlurmRun(Run):
    """The restart campaign's job, with Slurm's nodes as its hosts."""

    lab: SlurmLab

    def hosts(self, command: Sequence[str]) -> Any:
        return SlurmJob(self.lab, command, self.folder, shape=self.job.shape, host=self.job.host, least=2)


def test_three_nodes_die_and_come_back(tmp_path: Path) -> None:
    job = TrainingJob(str(tmp_path / "job"), steps=400, planner="row-pairs", pause_on_hole_s=1.0)
    run = SlurmRun(job, patience_s=240)
    with SlurmLab(4, tmp_path / "slurm") as lab:
        run.lab = lab
        # `go` checks that no step is missing, that each sample is used once per epoch, and that no step is lost.
        failures = run.go([HostKill((0,)), HostKill((2,)), HostKill((3,))], random.Random(0))
    assert [failure.hosts for failure in failures] == [(0,), (2,), (3,)]
    assert [failure.source for failure in failures] == ["memory"] * 3
    assert [failure.lost_steps for failure in failures] == [0, 0, 0]
