"""`meshmend compare`: every planner side by side, on the given mesh and on the full one, against the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshmend.cli.common import forecast_facts, mesh_facts, print_json
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
from meshmend.cli.terminal import plain, print_line, print_rows, terminal, working
from meshmend.cost.hardware import hardware_facts
from meshmend.cost.units import format_bytes, name_seconds, parse_bytes
from meshmend.planning.compare import COLUMNS, Comparison, PlannerResult, compare
from meshmend.planning.proven import read_collective
from meshmend.schedule import Collective
from meshmend.topology import Mesh

BOUND = "bound"
"""The last row of the table."""


def command(
    plan_of: OptionalPlanArgument = None,
    *,
    machine: MachineOptions,
    holes: HoleOptions,
    collective: CollectiveOption = Collective.ALL_REDUCE,
    payload: PayloadOption,
    price: PriceOptions,
    json: JsonOption = False,
) -> None:
    """Compare every planner that can serve a mesh, and the same on the full mesh, with its slow cables.

    A saved plan is proven, and compared with the planners for its collective on its mesh.

    Example: meshmend compare 32x32 --fail 4x2@6,8 --payload 102MB --hardware tpu-v3
    """
    saved = None
    if plan_of is not None and is_file(plan_of):
        saved = load_plan(plan_of, *given_options(holes, machine, collective=collective))
    wanted = read_collective(collective) if saved is None else saved.collective
    mesh = machine.mesh(plan_of, holes) if saved is None else saved.mesh
    chosen = price.read_hardware(machine)
    payload_bytes, how = parse_bytes(payload), price.read_mode()
    with working(f"planning {mesh}", json) as tell:

        def compared(one: Mesh) -> Comparison:
            return compare(
                one,
                payload_bytes,
                chosen,
                collective=wanted,
                mode=how,
                on_planner=lambda name: tell(f"{name} on {one}"),
                saved=saved if one is mesh else None,
            )

        this = compared(mesh)
        full = None if mesh.is_full else compared(mesh.whole)
    facts: dict[str, Any] = {
        "collective": str(wanted),
        "payload_bytes": payload_bytes,
        "hardware": hardware_facts(chosen)["hardware"],
        "mode": how,
        "mesh": _facts(this),
        "full_mesh": None if full is None else _facts(full),
    }
    if json:
        print_json(facts)
        return
    _show(this, facts["mesh"], facts["full_mesh"])


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
        return {"planner": entry.planner, "unsupported_reason": entry.unsupported_reason}
    return {
        "planner": entry.planner,
        "unsupported_reason": None,
        **entry.figures,
        "plan_seconds": entry.plan_seconds,
        **forecast_facts(entry.forecast),
    }


def _show(this: Comparison, here: dict[str, Any], there: dict[str, Any] | None) -> None:
    rows = {row["planner"]: row for row in _with_bound(here)}
    beside = {} if there is None else {row["planner"]: row for row in _with_bound(there)}

    def ratio(name: str) -> str | None:
        mine, full = rows[name].get("seconds"), beside.get(name, {}).get("seconds")
        return f"{mine / full:.3f}" if mine is not None and full else None

    def figure(of: dict[str, dict[str, Any]], key: str, write: Callable[[Any], str]) -> Callable[[str], object]:
        def shown(name: str) -> object:
            value = of.get(name, {}).get(key)
            return value if value in (None, "") else write(value)  # None if the planner has none, "" for the bound

        return shown

    columns: list[tuple[str, Callable[[str], object]]] = [("planner", str)]
    columns += [(one.heading, figure(rows, one.key, one.write)) for one in COLUMNS if one.heading is not None]
    for heading, of in (("time" if there is None else "holed", rows), *((("full", beside),) if beside else ())):
        columns.append((heading, figure(of, "seconds", name_seconds)))
        columns.append(("× bound", figure(of, "ratio_to_bound", "{:.3f}".format)))
    columns += [] if there is None else [("holed / full", ratio)]
    planned = [name for name in rows if "seconds" in rows[name] or "seconds" in beside.get(name, {})]
    console = terminal()
    title = (
        f"{this.collective} on {this.mesh}, {format_bytes(this.payload_bytes)} per chip, {this.mode}, {this.hardware}"
    )
    console.print(title, style="bold", soft_wrap=True)
    print_rows(planned, columns, style=lambda name: "dim" if name == BOUND else None)
    console.print()
    timed = [row for row in here["planners"] if row["unsupported_reason"] is None]
    parts = list(timed[0]["gap"]) if timed else []
    shares = [(part.replace("_", " "), lambda row, part=part: _share(row["gap"], part)) for part in parts]
    print_rows(timed, [("time by cause", lambda row: row["planner"]), *shares])
    console.print()
    print_line((BOUND, "dim"), f"  {this.bound}")
    for row in here["planners"]:
        if row["unsupported_reason"] is not None:
            print_line((plain(row["planner"]), "dim"), f"  {plain(row['unsupported_reason'])}")


def _with_bound(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a mesh, the last of them that of the bound."""
    nothing = {column.key: "" for column in COLUMNS}
    return [*facts["planners"], {"planner": BOUND, **nothing, "seconds": facts["bound_seconds"], "ratio_to_bound": 1.0}]


def _share(gap: dict[str, float], part: str) -> str | None:
    """Return a part of the time in per cent; rounding errors below 0 are 0."""
    total = sum(gap.values())
    return f"{round(100 * gap[part] / total)}%" if total else None
