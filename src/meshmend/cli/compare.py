"""`meshmend compare`: every planner side by side, on the given mesh and on the full one, against the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from meshmend.cli.common import exit_on_error, mesh_facts, print_json
from meshmend.cli.options import (
    CollectiveOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    OptionalPlanArgument,
    PayloadOption,
    PriceOptions,
    given_options,
    is_file,
    load_plan,
)
from meshmend.cli.outputs import check_plot
from meshmend.cli.pricing import forecast_facts, hardware_facts
from meshmend.cli.terminal import plain, print_line, print_table, terminal, working
from meshmend.cost.units import name_bytes, name_seconds, parse_bytes
from meshmend.planning import UpdatePlan, UpdateWay, update_plans
from meshmend.planning.proven import read_collective
from meshmend.schedule import Collective
from meshmend.study.compare import COLUMNS, Comparison, PlannerResult, compare
from meshmend.study.plot import PAYLOADS, plot
from meshmend.topology import Mesh


def command(
    payload: PayloadOption,
    plan_of: OptionalPlanArgument = None,
    *,
    machine: MachineOptions,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    holes: HoleOptions,
    price: PriceOptions,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", metavar="F", help="Plot time against payload, 1 KB to 10 GB: .png, .svg.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Also price a weight update: with a turn, in two phases, or replicated.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare every planner that can serve a mesh, and the same on the full mesh, with its slow cables.

    A saved plan is proven, and compared with the planners for its collective on its mesh. With --update, a training
    step's exchange is priced in each way that the optimizer's state can be kept, by the plans that it would run.

    Example: meshmend compare 32x32 --fail 4x2@6,8 --payload 102MB --hardware tpu-v3 --plot times.png
    """
    with exit_on_error(json):
        check_plot("--plot", plot_to)
        named = [] if collective == Collective.ALL_REDUCE else ["--collective"]
        saved = None
        if plan_of is not None and is_file(plan_of):
            saved = load_plan(plan_of, *given_options(holes, machine), *named)
        wanted = read_collective(collective) if saved is None else saved.collective
        mesh = machine.mesh(plan_of, holes) if saved is None else saved.mesh
        chosen = price.read_hardware(machine)
        payload_bytes, how = parse_bytes(payload), price.read_mode()
        payloads = PAYLOADS if plot_to is not None else ()
        found: list[Comparison] = []
        whole = mesh.whole
        with working(f"planning {mesh}", json) as working_on:
            for one in (mesh,) if mesh.is_full else (mesh, whole):

                def tell(name: str, one: Mesh = one) -> None:
                    working_on(f"{name} on {one}")

                found.append(
                    compare(
                        one,
                        payload_bytes,
                        chosen,
                        collective=wanted,
                        mode=how,
                        payloads=payloads,
                        on_planner=tell,
                        saved=saved if one is mesh else None,
                    )
                )
            working_on(f"weight update on {mesh}")
            ways = update_plans(mesh, payload_bytes, chosen) if update else ()
        this, full = found[0], found[1] if len(found) > 1 else None
        if plot_to is not None:
            plot(this, full, plot_to)
        if json:
            print_json(
                {
                    "collective": str(wanted),
                    "payload_bytes": payload_bytes,
                    "hardware": hardware_facts(chosen),
                    "mode": how,
                    "mesh": _facts(this),
                    "full_mesh": None if full is None else _facts(full),
                    **({"update": [_way_facts(way) for way in ways]} if update else {}),
                }
            )
        else:
            _show(this, full)
            if ways:
                _show_update(ways, this)
            if plot_to is not None:
                print_line(f"Drawn to {plain(plot_to)}.")


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
        **entry.figures,
        "plan_seconds": entry.plan_seconds,
        **forecast_facts(entry.forecast),
    }


def _show(this: Comparison, full: Comparison | None) -> None:
    title = f"{this.collective} on {this.mesh}, {name_bytes(this.payload_bytes)} per chip, {this.mode}, {this.hardware}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("planner", style="cyan", no_wrap=True)
    for name in (*_headings(), "time" if full is None else "holed", "× bound"):
        table.add_column(name, justify="right")
    if full is not None:
        for name in ("full", "× bound", "holed / full"):
            table.add_column(name, justify="right")
    beside = {entry.planner: entry for entry in full.entries} if full is not None else {}
    for entry in this.entries:
        if entry.forecast is None and (entry.planner not in beside or beside[entry.planner].forecast is None):
            continue
        table.add_row(plain(entry.planner), *_cells(entry, beside.get(entry.planner)))
    least = [*("" for _ in _headings()), name_seconds(this.bound_seconds), "1.000"]
    if full is not None:
        least += [name_seconds(full.bound_seconds), "1.000", f"{this.bound_seconds / full.bound_seconds:.3f}"]
    table.add_row("bound", *least, style="dim")
    console = terminal()
    console.print(title, style="bold", soft_wrap=True)
    print_table(table)
    console.print()
    print_table(_gaps(this))
    console.print()
    print_line(("bound", "dim"), f"  {this.bound}")
    for entry in this.entries:
        if entry.why_not is not None:
            print_line((plain(entry.planner), "dim"), f"  {plain(entry.why_not)}")


def _way_facts(way: UpdatePlan) -> dict[str, Any]:
    return {
        "way": str(way.way),
        "plans": [{"planner": s.planner, "collective": str(s.collective), "steps": s.n_steps} for s in way.schedules],
        "seconds": way.seconds,
        "state_share": way.state_share,
    }


def _show_update(ways: tuple[UpdatePlan, ...], comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("weight update", style="cyan", no_wrap=True)
    for name in ("time", "× all-reduce", "state per chip"):
        table.add_column(name, justify="right")
    table.add_column("plans", min_width=24)
    all_reduce_s = next(way.seconds for way in ways if way.way is UpdateWay.REPLICATED)
    for way in ways:
        table.add_row(
            str(way.way),
            name_seconds(way.seconds),
            f"{way.seconds / all_reduce_s:.3f}" if all_reduce_s else "–",
            "all" if way.way is UpdateWay.REPLICATED else f"≤ {way.state_share:.2%}",
            ", ".join(f"{plain(s.planner)} {s.collective}" for s in way.schedules),
        )
    console = terminal()
    console.print()
    console.print(
        f"weight update on {comparison.mesh}, {name_bytes(comparison.payload_bytes)} of gradients per chip, lock-step",
        style="bold",
        soft_wrap=True,
    )
    print_table(table)


def _headings() -> list[str]:
    return [column.heading for column in COLUMNS if column.heading is not None]


def _cells(entry: PlannerResult, beside: PlannerResult | None) -> list[str]:
    here = entry.forecast
    shown = [column for column in COLUMNS if column.heading is not None]
    cells = ["–"] * (len(shown) + 2)
    if here is not None:
        figures = [column.write(entry.figures[column.key]) for column in shown]
        cells = [*figures, name_seconds(here.seconds), f"{here.ratio_to_bound:.3f}"]
    if beside is None:
        return cells
    there = beside.forecast
    if there is None:
        return [*cells, "–", "–", "–"]
    ratio = "–" if here is None or not there.seconds else f"{here.seconds / there.seconds:.3f}"
    return [*cells, name_seconds(there.seconds), f"{there.ratio_to_bound:.3f}", ratio]


def _gaps(comparison: Comparison) -> Table:
    """Return the shares of each plan's time, by what they are spent on."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    entries = [(entry, entry.forecast.gap.parts) for entry in comparison.entries if entry.forecast is not None]
    table.add_column("time by cause", style="cyan", no_wrap=True)
    for name in entries[0][1] if entries else ():
        table.add_column(name, justify="right")
    for entry, parts in entries:
        total = sum(parts.values())
        table.add_row(plain(entry.planner), *(f"{seconds / total:.0%}" if total else "–" for seconds in parts.values()))
    return table
