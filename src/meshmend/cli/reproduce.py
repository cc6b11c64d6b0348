"""`meshmend reproduce`: the paper's tables 1 and 2, beside ours."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from meshmend.cli.common import exit_on_error, print_json
from meshmend.cli.options import JsonOption
from meshmend.cli.pricing import hardware_facts
from meshmend.cli.terminal import print_table, terminal, working
from meshmend.cost.units import name_rate, name_seconds, parse_seconds
from meshmend.study.reproduce import CaseResult, Reproduction, Timed, reproduce


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

    Example: meshmend reproduce --resnet-compute 29.5ms
    """
    with exit_on_error(json):
        with working("planning", json) as working_on:
            found = reproduce(
                resnet_compute_s=None if resnet_compute is None else parse_seconds(resnet_compute),
                bert_compute_s=None if bert_compute is None else parse_seconds(bert_compute),
                on_plan=working_on,
            )
        if json:
            print_json(
                {
                    "fitted_hardware": hardware_facts(found.hardware),
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
    console = terminal()
    for table in (_table_2(found), _table_1(found), _table_fit(found)):
        print_table(table)
    hardware = found.hardware
    console.print(
        f"Fitted to the full-mesh columns only: {name_rate(hardware.link_bytes_per_s)} per link, "
        f"{name_seconds(hardware.step_latency_s)} per step "
        f"(and {name_seconds(hardware.hop_latency_s)} per hop, given).\n",
        soft_wrap=True,
    )
    inputs = _table("Inputs", "input", "value", "source")
    for row in found.inputs:
        inputs.add_row(*row)
    print_table(inputs)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(
            column,
            style="cyan" if number == 0 else None,
            no_wrap=number == 0,
            min_width=24 if column == "source" else None,
        )
    return table


def _table_2(found: Reproduction) -> Table:
    table = _table(
        "Table 2: all-reduce, fraction of a step",
        "case",
        "full: paper",
        "ours",
        "holed: paper",
        "ours",
        "holed/full: paper",
        "ours",
    )
    for outcome in found.outcomes:
        case, better = outcome.case, outcome.ratio <= outcome.case.ratio
        table.add_row(
            case.name,
            f"{case.overhead:.1%}",
            f"{outcome.overhead:.1%}",
            f"{case.overhead_holed:.1%}",
            f"{outcome.overhead_holed:.1%}",
            f"{case.ratio:.2f}",
            Text(f"{outcome.ratio:.2f}", style="green" if better else "red"),
        )
    return table


def _table_1(found: Reproduction) -> Table:
    table = _table(
        "\nTable 1: end to end, minutes",
        "case",
        "full: paper",
        "holed: paper",
        "ours",
        "relative efficiency: paper",
        "ours",
    )
    for outcome in found.outcomes:
        case = outcome.case
        table.add_row(
            case.name,
            f"{case.minutes:.2f}",
            f"{case.minutes_holed:.2f}",
            f"{outcome.minutes_holed:.2f}",
            f"{case.efficiency:.3f}",
            f"{outcome.efficiency:.3f}",
        )
    return table


def _table_fit(found: Reproduction) -> Table:
    table = _table(
        "\nThe fit, and the schedules",
        "case",
        "all-reduce, full: implied",
        "fitted",
        "residual",
        "full: row-pairs by",
        "holed: row-pairs by",
        "time",
    )
    for outcome in found.outcomes:
        table.add_row(
            outcome.case.name,
            name_seconds(outcome.implied_s),
            name_seconds(outcome.full.seconds),
            f"{outcome.residual:+.1%}",
            f"{outcome.full.orientation} × {outcome.full.segments}",
            f"{outcome.holed.orientation} × {outcome.holed.segments}",
            name_seconds(outcome.holed.seconds),
        )
    return table
