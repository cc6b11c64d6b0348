"""`meshmend availability --replay`: a job that ran beside what the simulator predicts for its failures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.table import Table

from meshmend.availability.answers import FaultTolerant
from meshmend.availability.job import require_simpy
from meshmend.availability.replay import TRAINING, RecordedJob, Replay, RunAccount, replay
from meshmend.cli.options import MachineOptions
from meshmend.cli.studies import StudyOptions
from meshmend.cli.terminal import plain, print_line, print_table, terminal
from meshmend.cli.watch import duration
from meshmend.errors import ParameterError
from meshmend.launch.hosts import Hosts
from meshmend.launch.record import read_record
from meshmend.topology import name_shape, parse_shape

TOLD_BY_NO_TIMELINE = {
    "spares": "spares",
    "swap_seconds": "swap_s",
    "spare_cubes": "spare_cubes",
    "ocs_seconds": "ocs_s",
    "elastic_seconds": "elastic_s",
    "replace_slice": "replace_h",
}
"""Options that a replay still needs, and the assumptions that they are."""
SHAPES = {"cube": "cube", "slice_shape": "slice_shape"}
LEAST_SHARE = 0.0005
"""Causes that took less of the time than this, measured and predicted, are not listed."""


def replay_folder(folder: Path, shape: str | None, machine: MachineOptions, options: StudyOptions) -> Replay:
    """Replay the job in a folder; options that its timelines answer are refused."""
    require_simpy()
    if machine.machine is not None:
        raise ParameterError("--replay reads from the timelines what machine it was: leave out --machine.")
    for field in dataclasses.fields(StudyOptions):
        may = {*TOLD_BY_NO_TIMELINE, *SHAPES} | ({"host"} if shape is not None else set())
        if field.name not in may and getattr(options, field.name) != field.default:
            why = "goes with SHAPE" if field.name == "host" else "is for studies: a replay takes it from the timelines"
            raise ParameterError(f"--{field.name.replace('_', '-')} {why}. Leave it out.")
    others: dict[str, Any] = {theirs: getattr(options, ours) for ours, theirs in TOLD_BY_NO_TIMELINE.items()}
    for ours, theirs in SHAPES.items():
        text = getattr(options, ours)
        others[theirs] = () if text is None else parse_shape(text)
    given = None if shape is None else Hosts.of(shape, options.host)
    return replay(read_record(folder, given), **others)


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
        "answers": [{"answer": one.name, "work": one.work, **_run_facts(one.run)} for one in found.answers],
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
    console.print("The same failures under every answer", style="bold", soft_wrap=True)
    print_table(_answers(found))
    for note in (
        "Given to the simulator: when which host was lost and came back, the first start, the median of each stage of "
        "a recovery, the median step on each number of chips, and how often and how long it saves. All else is "
        "predicted.",
        "goodput: time in steps that count. work: relative to the whole machine without failures. Other answers lose "
        "the same hosts for as long as they were away; their own times are assumptions (--help).",
    ):
        print_line((note, "dim"))


def _title(folder: Path, job: RecordedJob) -> str:
    lost = sum(one.at_s > 0 and one.away_s != 0 for one in job.failures)
    hosts = f"{lost} loss{'es' * (lost != 1)} of a host"
    return (
        f"{plain(folder)}: {name_shape(job.shape)} in hosts of {name_shape(job.host)}, {duration(job.until_s)}, {hosts}"
    )


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
    table.add_column("answer", style="cyan", no_wrap=True)
    for name in ("goodput, %", "work, %", "steps", "stops", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.answers:
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
