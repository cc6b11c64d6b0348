"""Where a process is: the whole machine, its own chip in it, and the hardware that plans are made for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmend.cost import Hardware, find_hardware
from meshmend.errors import Coordinate, MeshError, ParameterError
from meshmend.machines import Machine
from meshmend.machines.read import as_machine
from meshmend.planning import PlanFunction, plan
from meshmend.topology import Mesh, parse_chip, parse_wrap
from meshmend.torch.plans import Plans, bound_keywords

LOOPBACK, NETWORK = "gloo-loopback", "ethernet-10g"
"""What a group is planned for where nobody says its hardware: processes of one machine, or hosts on a network."""


@dataclass(frozen=True)
class MeshOptions:
    """Where this process's chip is: `init_process_group("cpu:meshmend", pg_options=MeshOptions("4x4"))`.

    `shape` and `wrap` describe the whole machine. In their place, `machine` or the file that describes it also brings
    failed and slow cables, and `chip` may be a name that it has. Options that are not given come from the environment:
    MESHMEND_SHAPE (as 4x4), MESHMEND_WRAP, MESHMEND_MACHINE (a file), MESHMEND_CHIP (as 1,2) and GLOO_SOCKET_IFNAME for
    `interface`, which the laboratory sets. Without a chip, rank r is on the r-th live chip in row-major order;
    MESHMEND_FAILED (as "2x2@2,2 5,7") says which ones of a shape are not live.

    Plans are made for `hardware`: a preset's name, a file of `measure`, or your own. The default is the machine's, else
    the preset "gloo-loopback" where `interface` is "lo" and "ethernet-10g" where it is not; see `measure`. `plan` makes
    the plans of all-reduces, as in `functools.partial(meshmend.plan, cache=PlanCache())`.
    """

    shape: Sequence[int] | str | None = None
    chip: Sequence[int] | str | None = None
    machine: Machine | Path | str | None = None
    wrap: bool | Sequence[bool] | None = None
    hardware: str | Hardware | None = None
    plan: PlanFunction = plan
    interface: str | None = None

    def position(self, rank: int | None = None, size: int | None = None) -> tuple[Mesh, Coordinate]:
        """Return the whole machine and this process's chip in it, that of `rank` of `size` where nobody says it."""
        described, chip = self._machine(), self.chip or os.environ.get("MESHMEND_CHIP")
        whole = self._mesh() if described is None else described.mesh
        if chip is None:
            if rank is None:
                raise MeshError("Say which chip this process is: chip=(1, 2), or MESHMEND_CHIP=1,2.")
            failed = os.environ.get("MESHMEND_FAILED", "").split() if described is None else []
            return whole, _chip_of_rank(rank, size, whole.fail(*failed))
        if isinstance(chip, str) and re.fullmatch(r"\d+(,\d+)*", chip):
            chip = parse_chip(chip)
        if isinstance(chip, str):
            if described is None:
                raise MeshError(f"{chip!r} is the name of a chip: give the machine that has it, as machine=.")
            chip = described.coordinate(chip)
        position = tuple(int(x) for x in chip)
        try:
            whole.rank(position)
        except MeshError as error:
            if described is None:
                raise
            raise MeshError(
                f"{described.file}: {error} A process that runs on it needs a description of the machine as it is now."
            ) from None
        return whole, position

    def plans(self) -> Plans:
        """Return what plans for the hardware: as given, else as bound to `plan`, else the machine's, else a preset."""
        given, bound, machine = self.hardware, bound_keywords(self.plan).get("hardware"), self._machine()
        if given is not None and bound is not None and find_hardware(given) != find_hardware(bound):
            names = f"{find_hardware(given).name}, but {find_hardware(bound).name}"
            raise ParameterError(f"hardware is {names} is bound to plan: say it once.")
        known = given or bound or (None if machine is None else machine.hardware)
        return Plans(self.plan, hardware=known or (LOOPBACK if self.is_loopback else NETWORK))

    def socket_interface(self) -> str | None:
        """Return the network interface, None where Gloo finds one."""
        return self.interface or os.environ.get("GLOO_SOCKET_IFNAME")

    @property
    def is_loopback(self) -> bool:
        """Whether the members are processes of one machine."""
        return self.socket_interface() == "lo"

    def _machine(self) -> Machine | None:
        """Return the machine as given, or the one that the environment names where no shape is given either."""
        machine = self.machine
        if machine is None:
            machine = os.environ.get("MESHMEND_MACHINE") if self.shape is None else None
            return None if machine is None else as_machine(machine)
        if self.shape is not None or self.wrap:
            said = "wrap" if self.shape is None else "shape"
            raise MeshError(f"A machine already says its shape and which axes wrap: leave out {said}.")
        return as_machine(machine)

    def _mesh(self) -> Mesh:
        """Return the mesh of the shape, as given or as in the environment."""
        shape, wrap = self.shape or os.environ.get("MESHMEND_SHAPE"), self.wrap
        if shape is None:
            raise MeshError(
                "Nobody says which mesh this process's chip is in. Pass its shape, as in "
                'pg_options=meshmend.torch.MeshOptions("4x4") or MeshProcessGroup("4x4", chip=(1, 2)), or set '
                "MESHMEND_SHAPE=4x4 (or MESHMEND_MACHINE, a file)."
            )
        text = os.environ.get("MESHMEND_WRAP")
        if wrap is None and text is not None:
            wrap = parse_wrap(text, Mesh(shape).n_axes, given=f"MESHMEND_WRAP is {text!r},")
        return Mesh(shape, wrap=wrap or False)


def _chip_of_rank(rank: int, size: int | None, live: Mesh) -> Coordinate:
    """Return the chip of a rank where nobody says it: live chips in row-major order, as torchrun numbers processes."""
    if size != live.n_chips:
        raise MeshError(
            f"Expected a process for each of the {live.n_chips} live chips of {live}, got {size}: "
            "the ranks do not say which chip each is on. Set MESHMEND_FAILED to the chips that have no process (as in "
            "'2x2@2,2 5,7'), or say each one's chip with MeshOptions(…, chip=(1, 2)) or MESHMEND_CHIP=1,2."
        )
    return live.chip(rank)
