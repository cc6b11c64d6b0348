"""Simulated jobs keep what is promised, say the same on every run, and tell the story of what went wrong."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshmend
from meshmend.jax.state.memory import copies
from meshmend_lab.cli import app
from meshmend_lab.simulation import SimulatedJob, draw, replay, shrink
from meshmend_lab.simulation.campaign import run
from meshmend_lab.simulation.coverage import unexplained, untaken
from meshmend_lab.simulation.faults import EFFECTS
from meshmend_lab.simulation.plan import FATAL, KINDS, Fault
from meshmend_lab.simulation.referee import Violation

FIXED = [68, 117, 126, 151, 277, 321, 374, 408, 1796065416]
"""Seeds that have found something, in the product or in the simulation."""
FIXED_OF_MORE = [16995, 1071, 1866, 2221, 2862, 4763, 9388, 9805, 9921, 11885, 13881, 14210]
"""The same, with 70 faults each."""


@pytest.mark.parametrize(
    ("seed", "n_faults"), [*((seed, 50) for seed in FIXED), *((seed, 70) for seed in FIXED_OF_MORE)]
)
def test_what_a_seed_has_found_stays_mended(seed: int, n_faults: int) -> None:
    outcome = SimulatedJob(draw(seed, n_faults=n_faults)).run()
    assert outcome.violation is None
    assert outcome.over is not None


def fresh_seed() -> int:
    """Return where the seeds begin that belong to this version of the sources: others after each change of them."""
    sources = sorted(Path(meshmend.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return 10**6 + int(digest[:8], 16)


@pytest.mark.parametrize("seconds", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_no_job_breaks_a_promise(seconds: float) -> None:
    """So many seconds of the first seeds, and as many of seeds that no version before has taken."""
    n_faults: Counter[str] = Counter()
    for first in (0, fresh_seed()):
        until = time.process_time() + seconds
        for outcome in run(first, first + 10**6):
            again = f"meshmend lab simulate --replay {outcome.seed}"
            assert outcome.violation is None, f"{outcome.violation}\n{again}"
            n_faults += outcome.n_faults
            if time.process_time() > until:
                break
    assert n_faults.total() > 1000
    assert not {*KINDS} - {*n_faults}, "these faults have never come"


def test_every_kind_of_fault_does_something() -> None:
    assert {*KINDS, *FATAL} == {*EFFECTS}


def test_a_seed_gives_the_same_job_on_every_run() -> None:
    stories: list[list[str]] = [[], []]
    for story in stories:
        replay(draw(5), story.append)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 100


def test_a_job_without_faults_takes_no_second_round() -> None:
    lines: list[str] = []
    outcome = replay(draw(3, n_faults=1), lines.append)
    assert outcome.violation is None
    plan = draw(3, n_faults=1)
    calm = SimulatedJob(type(plan)(**{**vars(plan), "faults": (), "last_moments": 0.0}), lines.append).run()
    assert calm.over == {"ok": True, "why": "all hosts have finished"}
    assert not any("round 2" in line for line in lines[lines.index(lines[-1]) :])


def test_a_violation_is_told_with_few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here two copies are kept of which one is not complete, as before a committed one was kept through a restart."""
    monkeypatch.setattr(copies, "KEPT", 1)
    found = next(outcome for outcome in run(0, 50) if outcome.violation is not None)
    plan = draw(found.seed)
    fewer = shrink(plan, within_s=20.0)
    assert len(fewer.faults) < max(2, len(plan.faults) // 4)
    lines: list[str] = []
    outcome = replay(fewer, lines.append)
    assert outcome.violation is not None
    assert found.violation is not None
    assert outcome.violation.kind == found.violation.kind
    assert lines[-1].startswith("VIOLATED: removed too early")
    assert all("  " in line for line in lines[1:-1]), "time, who and what"


def test_a_fault_reads_as_a_sentence() -> None:
    assert str(Fault(1.0, "host killed", (3,), 2.0, 0.5)) == "host killed (host 3), for 2.0 s"
    assert str(Fault(1.0, "store paused", (3,), 2.0, 0.5)) == "store paused, for 2.0 s"


def test_the_command_counts_replays_and_goes_on_where_it_stopped() -> None:
    done = CliRunner().invoke(app, ["simulate", "--seeds", "0:6", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["jobs"], facts["violations"], facts["seeds"]) == (6, {}, [0, 6])
    assert facts["faults"] == sum(facts["faults_by_kind"].values())
    told = CliRunner().invoke(app, ["simulate", "--replay", "3"])
    assert told.exit_code == 0, told.output
    assert told.output.startswith("seed 3: ")
    wrong = CliRunner().invoke(app, ["simulate", "--seeds", "7"])
    assert wrong.exit_code
    assert "expected the first seed and the one after the last" in wrong.output


@pytest.mark.slow
def test_a_job_of_a_whole_pod_keeps_what_is_promised() -> None:
    outcome = SimulatedJob(draw(1, n_hosts=2240, n_faults=10)).run()
    assert outcome.violation is None
    assert outcome.over is not None


@pytest.mark.slow
def test_every_branch_of_the_decisions_is_taken_or_has_a_reason() -> None:
    """Three hundred jobs take most of them, and three more what is rare."""
    rare = [draw(593), draw(9805, n_faults=70), draw(16995, n_faults=70)]
    assert not unexplained(untaken([*map(draw, range(300)), *rare]))


def test_a_violation_reaches_the_process_that_counts() -> None:
    """Jobs may run in other processes, which send what came of them."""
    found = copy.copy(Violation("begins at 0", "round 3 begins anew"))  # made again as pickle does
    assert (found.kind, str(found)) == ("begins at 0", "begins at 0: round 3 begins anew")
