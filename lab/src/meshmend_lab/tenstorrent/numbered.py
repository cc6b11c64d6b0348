"""Machines with the numbers that their runtime has for chips and channels, as a cluster descriptor lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshmend.errors import Coordinate
from meshmend.machines import Machine, machine_of
from meshmend.machines.description import Description
from meshmend.machines.read import read_description
from meshmend.topology import Cable


@dataclass(frozen=True)
class NumberedMachine(Machine):
    """A machine whose live chips and channels have numbers.

    `devices` are the numbers by which the machine's runtime knows its live chips. `channels` are those of each live
    cable, by their number at its first and at its second end. Both are empty where the description has none.
    """

    devices: Mapping[Coordinate, int] = dataclasses.field(default_factory=dict)
    channels: Mapping[Cable, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)


def read_numbered(file: Path | str, *, intended: Path | str | None = None) -> NumberedMachine:
    """Return the machine that a file describes; `intended` as for `read_machine`."""
    return numbered(read_description(file), None if intended is None else read_description(intended))


def numbered(found: Description, intended: Description | None = None) -> NumberedMachine:
    """Return the machine that a description amounts to, with the numbers that the description of today has."""
    machine = machine_of(found, intended)
    mesh = machine.mesh
    # A machine names its chips as the description of the whole one does, and both descriptions have the same keys.
    named = found if intended is None or not intended.chips else intended
    key_of = {chip.name: key for key, chip in named.chips.items()}
    keys = {at: key_of[chip.name] for at, chip in machine.chips.items() if mesh.live[at]}
    live = {key: at for at, key in keys.items() if key in found.chips}
    devices = {at: device for key, at in live.items() if (device := found.chips[key].device) is not None}
    joined = {tuple(sorted((mesh.chip(a), mesh.chip(b)))) for a, b in mesh.cables.tolist()}
    channels: dict[Cable, tuple[tuple[int, int], ...]] = {}
    for (a, b), ends in found.channel_ends.items():
        if a in live and b in live:
            one, other = live[a], live[b]
            if (min(one, other), max(one, other)) in joined:
                straight = ends if one < other else [end[::-1] for end in ends]
                channels[min(one, other), max(one, other)] = tuple(sorted(straight))
    return NumberedMachine(**vars(machine), devices=devices, channels=channels)
