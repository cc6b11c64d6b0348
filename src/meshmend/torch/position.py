"""Where a process is: the whole machine, its own chip in it, and the hardware that plans are made for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from meshmend.cost import Hardware, find_hardware
from meshmend.errors import Coordinate, MeshError, ParameterError
from meshmend.machines import Machine
from meshmend.machines.read import as_machine
from meshmend.planning import PlanFunction
from meshmend.topology import Mesh, name_shape
from meshmend.torch.plans import bound_keywords

LOOPBACK, NETWORK = "gloo-loopback", "ethernet-10g"
"""What a group is planned for where nobody says its hardware: processes of one machine, or hosts on a network."""


def find_position(
    shape: Sequence[int] | str | None,
    chip: Sequence[int] | str | None,
    machine: Machine | Path | str | None,
    wrap: bool | Sequence[bool],
) -> tuple[Mesh, Coordinate]:
    """Return the whole machine and the coordinate of this process's chip in it."""
    if chip is None:
        raise MeshError("Say which chip this process is, as in chip=(0, 3).")
    if machine is None:
        if shape is None:
            raise MeshError("Say which mesh the chip is in: shape='4x8', or machine= with the machine's description.")
        if isinstance(chip, str):
            raise MeshError(f"{chip!r} is the name of a chip: give the machine that has it, as machine=.")
        whole, position = Mesh(shape, wrap=wrap), tuple(int(x) for x in chip)
        whole.rank(position)
        return whole, position
    if shape is not None or wrap is not False:
        said = "wrap" if shape is None else "shape"
        raise MeshError(f"A machine already says its shape and which axes wrap: leave out {said}.")
    described = as_machine(machine)
    whole = described.mesh
    position = described.coordinate(chip) if isinstance(chip, str) else tuple(int(x) for x in chip)
    try:
        whole.rank(position)
    except MeshError as error:
        raise MeshError(
            f"{described.file}: {error} A process that runs on it needs a description of the machine as it is now."
        ) from None
    return whole, position


def chip_of_rank(
    rank: int, size: int | None, shape: Sequence[int] | str | None, machine: Machine | Path | str | None
) -> Coordinate:
    """Return the chip of a rank where nobody says it: live chips in row-major order, as torchrun numbers processes."""
    if machine is not None:
        live = as_machine(machine).mesh
    else:
        live = Mesh(shape or (), failed=os.environ.get("MESHMEND_FAILED", "").split())
    if size != live.n_chips:
        raise MeshError(
            f"Expected a process for each of the {live.n_chips} live chips of {live}, got {size}: "
            "the ranks do not say which chip each is on. Set MESHMEND_FAILED to the chips that have no process (as in "
            "'2x2@2,2 5,7'), or say each one's chip with MeshOptions(…, chip=(1, 2)) or MESHMEND_CHIP=1,2."
        )
    return live.chip(rank)


def choose_hardware(
    hardware: str | Hardware | None,
    machine: Machine | Path | str | None,
    plan: PlanFunction,
    *,
    is_loopback: bool,
) -> Hardware:
    """Return what plans are made for: as given, else as bound to `plan`, else the machine's, else a preset."""
    bound = bound_keywords(plan).get("hardware")
    if hardware is not None and bound is not None and find_hardware(hardware) != find_hardware(bound):
        names = f"{find_hardware(hardware).name}, but {find_hardware(bound).name}"
        raise ParameterError(f"hardware is {names} is bound to plan: say it once.")
    known = hardware or bound or (None if machine is None else as_machine(machine).hardware)
    return find_hardware(known or (LOOPBACK if is_loopback else NETWORK))


def describe_machine(whole: Mesh) -> str:
    """Describe a machine such that two that differ in any chip, cable or rate have different texts."""
    if whole.is_full and not whole.has_slow_cables:
        return name_shape(whole.shape)
    exact = repr((whole.holes, whole.failed_cables, sorted(whole.cable_rates.items())))
    return f"{whole} [{hashlib.sha256(exact.encode()).hexdigest()[:12]}]"
