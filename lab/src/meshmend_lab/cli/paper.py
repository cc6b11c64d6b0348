"""`meshmend lab paper`: the paper's tables 1 and 2, beside ours."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any

import typer
from rich.text import Text

from meshmend.cli.common import print_json
from meshmend.cli.options import JsonOption
from meshmend.cli.terminal import print_rows, terminal, working
from meshmend.cost.hardware import hardware_facts
from meshmend.cost.units import name_rate, name_seconds, parse_seconds
from meshmend_lab.paper.reproduce import CaseResult, Reproduction, Timed, reproduce


def command(
    resnet_compute: Annotated[
        str | None,
        typer.Option("--resnet-compute", metavar="TIME", help="Compute time of a ResNet-50 step, 32 images per chip."),
    ] = None,
    bert_compute: Annotated[
        str | None,
        typer.Option("--bert-compute", metavar="TIME", help="Compute time of a BERT step, 8 sequences per chip."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the paper's tables beside ours: fitted to its full meshes, predicted for its holed ones.

    Example: meshmend lab paper --resnet-compute 29.5ms
    """
    with working("planning", json) as working_on:
        found = reproduce(
            resnet_compute_s=None if resnet_compute is None else parse_seconds(resnet_compute),
            bert_compute_s=None if bert_compute is None else parse_seconds(bert_compute),
            on_plan=working_on,
        )
    if json:
        print_json(
            {
                "fitted_hardware": hardware_facts(found.hardware)["hardware"],
                "inputs": [{"name": name, "value": value, "source": why} for name, value, why in found.inputs],
                "cases": [_facts(outcome) for outcome in found.outcomes],
            }
        )
    else:
        _show(found)


def _facts(outcome: CaseResult) -> dict[str, Any]:
    case = outcome.case
    return {
        "model": case.model,
        "mesh": case.shape,
        "chips": case.chips,
        "chips_holed": case.chips_holed,
        "payload_bytes": outcome.payload_bytes,
        "compute_seconds": outcome.compute_s,
        "paper": {
            "overhead_full": case.overhead,
            "overhead_holed": case.overhead_holed,
            "allreduce_ratio": case.ratio,
            "relative_efficiency": case.efficiency,
            "minutes_full": case.minutes,
            "minutes_holed": case.minutes_holed,
            "allreduce_seconds_full": outcome.implied_s,
        },
        "ours": {
            "overhead_full": outcome.overhead,
            "overhead_holed": outcome.overhead_holed,
            "allreduce_ratio": outcome.ratio,
            "relative_efficiency": outcome.efficiency,
            "minutes_holed": outcome.minutes_holed,
            "allreduce_seconds_full": outcome.full.seconds,
            "allreduce_seconds_holed": outcome.holed.seconds,
            "full": _timed_facts(outcome.full),
            "holed": _timed_facts(outcome.holed),
        },
        "residual": outcome.residual,
        "no_slower_than_paper": outcome.ratio <= case.ratio,
    }


def _timed_facts(timed: Timed) -> dict[str, Any]:
    return {"orientation": timed.orientation, "segments": timed.segments, "steps": timed.steps}


def _show(found: Reproduction) -> None:
    for title, columns in _TABLES.items():
        print_rows(
            found.outcomes,
            [("case", lambda one: one.case.name), *columns],
            title=title,
            words=[heading for heading, _ in columns],
        )
    hardware = found.hardware
    terminal().print(
        f"Fitted to the full-mesh columns only: {name_rate(hardware.link_bytes_per_s)} per link, "
        f"{name_seconds(hardware.step_latency_s)} per step "
        f"(and {name_seconds(hardware.hop_latency_s)} per hop, given).\n",
        soft_wrap=True,
    )
    print_rows(
        found.inputs,
        [("input", itemgetter(0)), ("value", itemgetter(1)), ("source", itemgetter(2))],
        title="Inputs",
        words=("value",),
        wrapped="source",
    )


def _ratio(one: CaseResult) -> Text:
    return Text(f"{one.ratio:.2f}", style="green" if one.ratio <= one.case.ratio else "red")


_TABLES: dict[str, list[tuple[str, Callable[[CaseResult], object]]]] = {
    "Table 2: all-reduce, fraction of a step": [
        ("full: paper", lambda one: f"{one.case.overhead:.1%}"),
        ("ours", lambda one: f"{one.overhead:.1%}"),
        ("holed: paper", lambda one: f"{one.case.overhead_holed:.1%}"),
        ("ours", lambda one: f"{one.overhead_holed:.1%}"),
        ("holed/full: paper", lambda one: f"{one.case.ratio:.2f}"),
        ("ours", _ratio),
    ],
    "\nTable 1: end to end, minutes": [
        ("full: paper", lambda one: f"{one.case.minutes:.2f}"),
        ("holed: paper", lambda one: f"{one.case.minutes_holed:.2f}"),
        ("ours", lambda one: f"{one.minutes_holed:.2f}"),
        ("relative efficiency: paper", lambda one: f"{one.case.efficiency:.3f}"),
        ("ours", lambda one: f"{one.efficiency:.3f}"),
    ],
    "\nThe fit, and the schedules": [
        ("all-reduce, full: implied", lambda one: name_seconds(one.implied_s)),
        ("fitted", lambda one: name_seconds(one.full.seconds)),
        ("residual", lambda one: f"{one.residual:+.1%}"),
        ("full: row-pairs by", lambda one: f"{one.full.orientation} × {one.full.segments}"),
        ("holed: row-pairs by", lambda one: f"{one.holed.orientation} × {one.holed.segments}"),
        ("time", lambda one: name_seconds(one.holed.seconds)),
    ],
}
