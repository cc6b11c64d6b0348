"""`meshmend compare`: every planner side by side, on the mesh as it is and on the full one, against the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshmend.cli.common import mesh_facts, print_json, told_errors
from meshmend.cli.options import HoleOptions, JsonOption, PayloadOption, PriceOptions, ShapeArgument
from meshmend.cli.pricing import forecast_facts, hardware_facts
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.study.compare import Comparison, PlannerResult, compare
from meshmend.study.plot import PAYLOADS, plot
from meshmend.topology import Mesh


def command(
    shape: ShapeArgument,
    payload: PayloadOption,
    holes: HoleOptions,
    price: PriceOptions,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", metavar="F", help="Draw time against payload, 1 KB to 10 GB: .png, .svg.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare every planner that can serve a mesh, with the full mesh beside it.

    Example: meshmend compare 32x32 --fail 4x2@6,8 --payload 102MB --hardware tpu-v3 --plot times.png
    """
    with told_errors(json):
        mesh = holes.mesh(shape)
        chosen = price.read_hardware()
        payload_bytes, how = parse_bytes(payload), price.read_mode()
        payloads = PAYLOADS if plot_to is not None else ()
        found: list[Comparison] = []
        with Console(stderr=True).status("") as status:
            for one in (mesh,) if mesh.is_full else (mesh, Mesh(mesh.shape, wrap=mesh.wrap)):

                def tell(name: str, one: Mesh = one) -> None:
                    status.update(f"{name} on {one} …")

                found.append(compare(one, payload_bytes, chosen, mode=how, payloads=payloads, on_planner=tell))
        this, full = found[0], found[1] if len(found) > 1 else None
        if plot_to is not None:
            plot(this, full, plot_to)
        if json:
            print_json(
                {
                    "payload_bytes": payload_bytes,
                    "hardware": hardware_facts(chosen),
                    "mode": how,
                    "mesh": _facts(this),
                    "full_mesh": None if full is None else _facts(full),
                }
            )
        else:
            _show(this, full)
            if plot_to is not None:
                Console().print(f"Drawn to {plot_to}.", highlight=False)


def _facts(comparison: Comparison) -> dict[str, Any]:
    return {
        **mesh_facts(comparison.mesh),
        "bound": comparison.bound.units,
        "bound_seconds": comparison.bound_seconds,
        "bound_why": comparison.bound.why,
        "planners": [_entry_facts(entry) for entry in comparison.entries],
    }


def _entry_facts(entry: PlannerResult) -> dict[str, Any]:
    if entry.forecast is None:
        return {"planner": entry.planner, "why_not": entry.why_not}
    return {
        "planner": entry.planner,
        "why_not": None,
        "steps": entry.steps,
        "chunks": entry.chunks,
        "transfers": entry.transfers,
        "plan_seconds": entry.plan_seconds,
        **forecast_facts(entry.forecast),
    }


def _show(this: Comparison, full: Comparison | None) -> None:
    title = f"{this.mesh}, {name_bytes(this.payload_bytes)} a chip, {this.mode}, {this.hardware}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("planner", style="cyan", no_wrap=True)
    for name in ("steps", "time" if full is None else "holed", "× bound"):
        table.add_column(name, justify="right")
    if full is not None:
        for name in ("full", "× bound", "holed / full"):
            table.add_column(name, justify="right")
    beside = {entry.planner: entry for entry in full.entries} if full is not None else {}
    for entry in this.entries:
        if entry.forecast is None and (entry.planner not in beside or beside[entry.planner].forecast is None):
            continue
        table.add_row(entry.planner, *_cells(entry, beside.get(entry.planner)))
    least = ["", name_seconds(this.bound_seconds), "1.000"]
    if full is not None:
        least += [name_seconds(full.bound_seconds), "1.000", f"{this.bound_seconds / full.bound_seconds:.3f}"]
    table.add_row("bound", *least, style="dim")
    console = Console()
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"[dim]bound[/]  {this.bound}", highlight=False, soft_wrap=True)
    for entry in this.entries:
        if entry.why_not is not None:
            console.print(f"[dim]{entry.planner}[/]  {entry.why_not}", highlight=False, soft_wrap=True)


def _cells(entry: PlannerResult, beside: PlannerResult | None) -> list[str]:
    here = entry.forecast
    cells = ["–", "–", "–"]
    if here is not None:
        cells = [f"{entry.steps:,}", name_seconds(here.seconds), f"{here.ratio_to_bound:.3f}"]
    if beside is None:
        return cells
    there = beside.forecast
    if there is None:
        return [*cells, "–", "–", "–"]
    ratio = "–" if here is None or not there.seconds else f"{here.seconds / there.seconds:.3f}"
    return [*cells, name_seconds(there.seconds), f"{there.ratio_to_bound:.3f}", ratio]
