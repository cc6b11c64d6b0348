"""Replay: the failures of a job that really ran, through the simulator.

What goes in is when which host was lost and came back, how long each stage of a recovery typically takes, and the time
of a step. What comes out is how many steps the job should have done in its time and where the rest of the time should
have gone, to be held against what it did; and the same for every other policy to the same failures. The measured
goodput and the measured sums are never an input.

    python lab/benchmarks/replay.py shared
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from meshmend.cli.terminal import plain, print_line, print_table, terminal
from meshmend.errors import ParameterError
from meshmend.launch.hosts import Hosts
from meshmend.topology import Mesh, name_shape
from meshmend_lab.availability.assumptions import Assumptions
from meshmend_lab.availability.history import FailureEvent
from meshmend_lab.availability.job import TimeSpent, simulate_run
from meshmend_lab.availability.policies import POLICIES, FaultTolerant, Policy, SubMesh, make_policies
from meshmend_lab.availability.throughput import Throughput
from recorded_job import DETECT, TRAINING, RecordedJob, RunAccount, read_record

PLAN, AGAIN = "plan", "steps done again"


@dataclass(frozen=True)
class ReplayedPolicy:
    """What a policy gives for the failures of a job. `work` is relative to the whole machine without any failure."""

    name: str
    run: RunAccount
    work: float


@dataclass(frozen=True)
class Replay:
    """A job beside its simulation: `predicted` is the policy that it ran under, and one of `policies`."""

    job: RecordedJob
    assumptions: Assumptions
    policies: tuple[ReplayedPolicy, ...]

    @property
    def predicted(self) -> RunAccount:
        """What the simulator predicts for the job as it ran."""
        return next(one.run for one in self.policies if one.name == FaultTolerant.name)

    @property
    def goodput_error(self) -> float:
        """By how much the predicted goodput is above the measured one, relative to that."""
        return self.predicted.goodput / self.job.measured.goodput - 1


def replay(job: RecordedJob, kinds: Sequence[type[Policy]] = POLICIES, **others: Any) -> Replay:
    """Simulate the failures of a job under each policy. `others` are assumptions that no timeline can tell."""
    assumptions = assume(job, **others)
    # A step's time is measured, so nothing needs to be planned.
    policies = make_policies(assumptions, Throughput(assumptions), kinds)
    failures = sorted(
        FailureEvent(one.at_s / 3600, 0, one.host, (job.until_s if one.away_s is None else one.away_s) / 3600)
        for one in job.failures
    )
    hours, start_h = job.until_s / 3600, math.fsum(job.first_start_s.values()) / 3600
    found = []
    for policy in policies:
        # What a spare takes, or a slice, is assumed; those that go on with what is left take hosts back as the job did.
        regrow_h = math.fsum(job.returns_s.values()) / 3600 if isinstance(policy, (SubMesh, FaultTolerant)) else None
        spent = simulate_run(policy, failures, hours, first_start_h=start_h, regrow_h=regrow_h)
        found.append(ReplayedPolicy(policy.name, _as_run(job, policy, spent), spent.useful_h / hours))
    return Replay(job, assumptions, tuple(found))


def assume(job: RecordedJob, **others: Any) -> Assumptions:
    """Return the assumptions of a job's replay.

    Repairs take as long as they did, also the quick ones: a mean of an hour, and each failure's factor is its hours.
    """
    mesh = Mesh(job.shape, wrap=job.wrap or False)
    n_hosts = mesh.size // math.prod(job.host)
    for one in job.failures:
        if not 0 <= one.host < n_hosts:
            raise ParameterError(f"Host {one.host} was lost, but {mesh} has hosts 0 to {n_hosts - 1} only.")
    whole_s = step_time(job.step_s, mesh.size)
    restart_s = math.fsum(seconds for stage, seconds in job.stages_s.items() if stage not in (DETECT, PLAN))
    never_min = 1 + 2 * job.until_s / 60
    return Assumptions(
        mesh,
        **{
            "host": job.host,
            "board": None,
            "mtbf_chip_h": math.inf,
            "mtbf_host_h": math.inf,
            "repair_host_h": 1.0,
            "quick_repair_h": 1.0,
            "checkpoint_min": min(job.checkpoint_steps * whole_s / 60, never_min),
            "save_s": job.checkpoint_s,
            "copies_s": job.steps_again * whole_s,
            "detect_s": job.stages_s.get(DETECT, 0.0),
            "replan_s": job.stages_s.get(PLAN, 0.0),
            "restart_s": restart_s,
            "compute_s": whole_s,
            "payload_bytes": 0.0,
            "grow": "at-once",
            **others,
        },
    )


def step_time(step_s: Mapping[int, float], chips: int) -> float:
    """Return the time of a step on so many chips: as measured, or from the nearest number that was.

    The global batch stays the same, so fewer chips take longer.

    >>> step_time({16: 1.0, 8: 1.5}, 16), step_time({16: 1.0, 8: 1.5}, 4)
    (1.0, 3.0)
    """
    nearest = min(step_s, key=lambda known: (abs(known - chips), known))
    return step_s[nearest] * nearest / chips


def _as_run(job: RecordedJob, policy: Policy, spent: TimeSpent) -> RunAccount:
    """Return a simulated run as a timeline's account has it: by the clock, with the stages of recoveries."""
    training_s, data_s, steps = 0.0, 0.0, 0.0
    for chips, hours in spent.kept_h.items():
        done = hours * 3600 / step_time(job.step_s, chips)
        waited = min(done * job.data_s, hours * 3600)
        steps, data_s, training_s = steps + done, data_s + waited, training_s + hours * 3600 - waited
    starts = spent.interruptions + spent.regrowths
    stages = _stages(job, policy, spent)
    parts = {
        **stages,
        "checkpoint": spent.saving_h * 3600,
        "data": data_s,
        "waiting": spent.waiting_h * 3600,
    }
    # What is left of the clock's time was trained and thrown away.
    again_s = max(0.0, job.until_s - training_s - math.fsum(parts.values()))
    # The first start brings one step; a later one brings those, too, whose end nobody could record.
    return RunAccount(
        steps + 1 + starts * job.steps_on_start,
        {TRAINING: training_s, **parts, AGAIN: parts.get(AGAIN, 0.0) + again_s},
        starts,
    )


def _stages(job: RecordedJob, policy: Policy, spent: TimeSpent) -> dict[str, float]:
    """Split the simulated time in starts among stages, in the proportions in which they were given."""
    start_s = policy.start_h * 3600
    left_out = (DETECT,) if isinstance(policy, FaultTolerant) else (DETECT, PLAN)
    usual = {stage: seconds for stage, seconds in job.stages_s.items() if stage not in left_out}
    total = math.fsum(usual.values())
    weights = dict.fromkeys((*job.first_start_s, *job.stages_s, *job.returns_s), 0.0)
    for stage, seconds in job.first_start_s.items():
        weights[stage] += seconds
    weights[DETECT] = weights.get(DETECT, 0.0) + spent.interruptions * job.stages_s.get(DETECT, 0.0)
    regrown = job.returns_s if isinstance(policy, (SubMesh, FaultTolerant)) else {}
    restarts = spent.interruptions + (0 if regrown else spent.regrowths)
    for stage, seconds in usual.items():
        weights[stage] += restarts * start_s * (seconds / total if total else 0.0)
    for stage, seconds in regrown.items():
        weights[stage] += spent.regrowths * seconds
    whole = math.fsum(weights.values())
    return {stage: spent.restarting_h * 3600 * (one / whole if whole else 0.0) for stage, one in weights.items()}


LEAST_SHARE = 0.0005
"""Causes that took less of the time than this, measured and predicted, are not listed."""


def replay_facts(folder: Path, found: Replay) -> dict[str, Any]:
    """Return the JSON description of a replay."""
    job = found.job
    return {
        "replay": str(folder),
        "mesh": name_shape(job.shape),
        "host": name_shape(job.host),
        "seconds": job.until_s,
        "inputs": {
            "failures": [dataclasses.asdict(one) for one in job.failures],
            "first_start_s": dict(job.first_start_s),
            "median_stages_s": dict(job.stages_s),
            "median_stages_of_returns_s": dict(job.returns_s),
            "step_s_by_chips": {str(chips): seconds for chips, seconds in sorted(job.step_s.items())},
            "data_s_per_step": job.data_s,
            "steps_between_checkpoints": job.checkpoint_steps if math.isfinite(job.checkpoint_steps) else None,
            "checkpoint_s": job.checkpoint_s,
            "steps_done_again_per_failure": job.steps_again,
            "steps_per_recovery": job.steps_on_start,
        },
        "measured": _run_facts(job.measured),
        "predicted": _run_facts(found.predicted),
        "goodput_error": found.goodput_error,
        "steps_error": found.predicted.steps / job.measured.steps - 1,
        "policies": [{"policy": one.name, "work": one.work, **_run_facts(one.run)} for one in found.policies],
    }


def _run_facts(run: RunAccount) -> dict[str, Any]:
    badput = {cause: seconds for cause, seconds in run.spent_s.items() if cause != TRAINING}
    return {
        "steps": run.steps,
        "goodput": run.goodput,
        "training_s": run.spent_s[TRAINING],
        "badput_s": badput,
        "stops": run.stops,
    }


def show_replay(folder: Path, found: Replay) -> None:
    """Show a replay on the terminal."""
    job, console = found.job, terminal()
    console.print(_title(folder, job), style="bold", soft_wrap=True)
    print_table(_beside(job, found.predicted))
    console.print()
    console.print("The same failures under every policy", style="bold", soft_wrap=True)
    print_table(_answers(found))
    for note in (
        "Given to the simulator: when which host was lost and came back, the first start, the median of each stage of "
        "a recovery, the median step on each number of chips, and how often and how long it saves. All else is "
        "predicted.",
        "goodput: time in steps that count. work: relative to the whole machine without failures. Other policies lose "
        "the same hosts for as long as they were away; their own times are assumptions (--help).",
    ):
        print_line((note, "dim"))


def _title(folder: Path, job: RecordedJob) -> str:
    lost = sum(one.at_s > 0 and one.away_s != 0 for one in job.failures)
    hosts = f"{lost} failure{'s' * (lost != 1)} of a host"
    return f"{plain(folder)}: {name_shape(job.shape)} in hosts of {name_shape(job.host)}, {job.until_s:,.0f} s, {hosts}"


def _beside(job: RecordedJob, predicted: RunAccount) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="cyan", no_wrap=True)
    for name in ("measured", "predicted", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    was = job.measured
    table.add_row("steps", f"{was.steps:,.0f}", f"{predicted.steps:,.0f}", _difference(was.steps, predicted.steps))
    goodputs = was.goodput, predicted.goodput
    table.add_row(
        "goodput", *(f"{one:.2%}".replace("%", " %") for one in goodputs), _difference(*goodputs), style="bold"
    )
    for cause in dict.fromkeys((*was.spent_s, *predicted.spent_s)):
        seconds = was.spent_s.get(cause, 0.0), predicted.spent_s.get(cause, 0.0)
        if max(seconds) > LEAST_SHARE * job.until_s:
            table.add_row(cause, *(f"{one:,.1f} s" for one in seconds), _difference(*seconds))
    return table


def _answers(found: Replay) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("policy", style="cyan", no_wrap=True)
    for name in ("goodput, %", "work, %", "steps", "stops", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.policies:
        table.add_row(
            one.name,
            f"{100 * one.run.goodput:.2f}",
            f"{100 * one.work:.2f}",
            f"{one.run.steps:,.0f}",
            str(one.run.stops),
            f"{one.run.spent_s['waiting']:,.0f} s",
            style="bold" if one.name == FaultTolerant.name else None,
        )
    return table


def _difference(measured: float, predicted: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured else "–"


ASSUMED = {"spares": int, "swap_s": float, "spare_cubes": int, "ocs_s": float, "elastic_s": float, "replace_h": float}
"""Assumptions that no timeline can tell, and their types."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the shared folder of a job that ran under `meshmend run`")
    parser.add_argument("--mesh", metavar="SHAPE", help="what it ran on, if the timelines do not say: 8x8")
    parser.add_argument("--host", metavar="SHAPE", default="2x2", help="the chips of a host; with --mesh")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, kind in ASSUMED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="an assumption of meshmend lab availability")
    words = parser.parse_args()
    given = None if words.mesh is None else Hosts.of(words.mesh, words.host)
    others = {name: getattr(words, name) for name in ASSUMED if getattr(words, name) is not None}
    found = replay(read_record(words.folder, given), **others)
    if words.json:
        print(json.dumps(replay_facts(words.folder, found), indent=2))
    else:
        show_replay(words.folder, found)


if __name__ == "__main__":
    main()
