"""An all-reduce as an engine of the machine needs it: per chip and step, what goes where and what to do on arrival.

Chips are named as the machine's runtime names them, by device number, and neighbours also by their Ethernet direction
and channels. The form is JSON, described by `chip_programs.schema.json` here and docs/tenstorrent.md; who runs
it needs nothing of meshmend.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from meshmend.errors import MachineError, ScheduleError, name_chip
from meshmend.schedule.collective import Collective, Op
from meshmend.schedule.schedule import Schedule
from meshmend.schedule.verify import ensure_proven
from meshmend_lab.tenstorrent.numbered import NumberedMachine

FORMAT, VERSION = "meshmend chip programs", 1
DIRECTIONS = ("S", "N", "E", "W")
"""Of a 2-D mesh, in the order of `Mesh.neighbours`: to the next row and the one before, then to the next column."""
OPS = {Op.REDUCE: "add", Op.COPY: "copy"}
MOST_TRANSFERS = 2**18
"""More would be a file of more than 50 MB."""


def chip_programs(schedule: Schedule, machine: NumberedMachine) -> dict[str, Any]:
    """Return an all-reduce between neighbours as one program per device of a machine, ready to be written as JSON.

    The schedule is one for the machine's mesh, or for less of it; it is proven first. Raises `MachineError` if the
    machine's description has no device numbers, and `ScheduleError` if the schedule has no such form.

    >>> import meshmend as mm
    >>> pair = mm.Mesh("1x2")
    >>> machine = NumberedMachine(pair, "two chips", "mine", {}, devices={(0, 0): 4, (0, 1): 5})
    >>> programs = chip_programs(mm.plan(pair, mm.planning.Weave(chunks=1)), machine)
    >>> programs["chips"][0]["program"][0]
    {'step': 0, 'sends': [], 'receives': [{'from': 5, 'direction': 'E', 'first_chunk': 0, 'chunks': 1, 'op': 'add'}]}
    """
    _check(schedule, machine)
    ensure_proven(schedule)
    mesh = schedule.mesh
    device = [machine.devices[mesh.chip(rank)] for rank in range(mesh.n_chips)]
    toward: list[dict[int, str]] = [
        {int(far): name for far, name in zip(row, DIRECTIONS, strict=True) if far >= 0} for row in mesh.neighbours
    ]
    steps: list[dict[int, dict[str, Any]]] = [{} for _ in device]

    def at(rank: int, step: int) -> dict[str, Any]:
        return steps[rank].setdefault(step, {"step": step, "sends": [], "receives": []})

    columns = (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op)
    for step, src, dst, first, n, op in zip(*(column.tolist() for column in columns), strict=True):
        if dst not in toward[src]:
            raise ScheduleError(
                f"Step {step} sends from {name_chip(mesh.chip(src))} to {name_chip(mesh.chip(dst))}, which are not "
                f"neighbours. Plan with --neighbours-only, or with --planner weave."
            )
        run = {"first_chunk": first, "chunks": n}
        at(src, step)["sends"].append({"to": device[dst], "direction": toward[src][dst], **run})
        at(dst, step)["receives"].append({"from": device[src], "direction": toward[dst][src], **run, "op": OPS[Op(op)]})
    return {
        "format": FORMAT,
        "version": VERSION,
        "collective": str(schedule.collective),
        "planner": schedule.planner,
        "mesh": str(mesh),
        "machine": machine.file,
        "chunks": schedule.total_chunks,
        "steps": schedule.n_steps,
        "chips": [
            {
                "device": device[rank],
                "at": list(mesh.chip(rank)),
                "neighbours": [
                    {
                        "device": device[far],
                        "direction": name,
                        "channels": _channels(machine, mesh.chip(rank), mesh.chip(far)),
                    }
                    for far, name in toward[rank].items()
                ],
                "program": [steps[rank][step] for step in sorted(steps[rank])],
            }
            for rank in range(mesh.n_chips)
        ],
    }


def chip_programs_schema() -> dict[str, Any]:
    """Return the JSON schema of `chip_programs`.

    >>> chip_programs_schema()["properties"]["format"]["const"]
    'meshmend chip programs'
    """
    text = resources.files("meshmend_lab.tenstorrent").joinpath("chip_programs.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _check(schedule: Schedule, machine: NumberedMachine) -> None:
    mesh = schedule.mesh
    if not machine.devices:
        raise MachineError(
            f"{machine.file}: a {machine.format} has no device numbers, which programs name chips by. Expected a "
            f"Tenstorrent cluster descriptor.",
            file=machine.file,
            expected="a Tenstorrent cluster descriptor",
            got=machine.format,
        )
    if (mesh.shape, mesh.wrap) != (machine.mesh.shape, machine.mesh.wrap) or (mesh.live & ~machine.mesh.live).any():
        raise MachineError(
            f"{machine.file} is {machine.mesh}, but the plan is for {mesh}. Plan with --machine {machine.file}.",
            file=machine.file,
            expected=str(machine.mesh),
            got=str(mesh),
        )
    if mesh.n_axes != 2:
        raise MachineError(
            f"{machine.file} is read as {mesh}: north, east, south and west are directions of two axes. Read it as a "
            f"2-D mesh.",
            file=machine.file,
            expected="two axes",
            got=str(mesh.n_axes),
        )
    if schedule.collective is not Collective.ALL_REDUCE:
        raise ScheduleError(f"The plan is for {schedule.collective}; programs are written for an all-reduce.")
    if schedule.n_transfers > MOST_TRANSFERS:
        raise ScheduleError(
            f"The plan has {schedule.n_transfers:,} transfers; programs are written for at most {MOST_TRANSFERS:,}. "
            "Plan with fewer chunks, as in --planner weave:chunks=64."
        )


def _channels(machine: NumberedMachine, here: tuple[int, ...], there: tuple[int, ...]) -> list[list[int]]:
    """Return the channels between two neighbours, each by its number here and there."""
    ends = machine.channels.get((min(here, there), max(here, there)), ())
    return [list(end if here < there else end[::-1]) for end in ends]
