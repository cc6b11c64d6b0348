"""A machine: the mesh that a description amounts to, with the names that its operator knows."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from meshmend.errors import Coordinate, LayoutError, MachineError, MeshError, name_chip
from meshmend.machines.description import Chip, Description
from meshmend.machines.grid import Grid
from meshmend.machines.layout import SLACK_CHIPS, check_connected, find_layout, neighbours
from meshmend.topology import Cable, Mesh


@dataclass(frozen=True)
class Machine:
    """A mesh or torus with what has failed and what is slow, as read from a description. Made by `read_machine`.

    `chips` has the chips that the description names, by coordinate, failed ones included. `notes` says what was
    assumed and what was not understood. `hardware` is the preset that fits.
    """

    mesh: Mesh
    format: str
    file: str
    chips: Mapping[Coordinate, Chip]
    hardware: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def hardware_through_xla(self) -> str | None:
        """The preset that fits where XLA drives the chips, as it does in a job; see `through_xla`."""
        return None if self.hardware is None else through_xla(self.hardware)

    def name(self, chip: Coordinate) -> str:
        """Return a chip's coordinate with the name that its operator knows."""
        known = self.chips.get(chip)
        return name_chip(chip) if known is None or _is_unnamed(chip, known) else f"{name_chip(chip)} {known.name}"

    def host(self, chip: Coordinate) -> str | None:
        """Return the host or board of a chip."""
        known = self.chips.get(chip)
        return None if known is None else known.host

    def coordinate(self, name: str) -> Coordinate:
        """Return the coordinate of the chip with that name; what a tool adds in brackets may be left out."""
        known = {at: chip.name for at, chip in self.chips.items()}
        hits = [at for at, full in known.items() if name in (full, full.partition(" (")[0])]
        if len(hits) == 1:
            return hits[0]
        if hits:
            listed = ", ".join(f"{known[at]} at {name_chip(at)}" for at in hits[:4])
            raise MachineError(
                f"{self.file}: {len(hits)} chips are named {name!r}: {listed}. Give the coordinate of the one.",
                file=self.file,
                got=name,
            )
        near = difflib.get_close_matches(name, known.values(), 3, 0.4) or sorted(known.values())[:3]
        listed = f"Its chips are named {', '.join(near)}, …" if near else "It names no chips"
        raise MachineError(
            f"{self.file}: no chip is named {name[:80]!r}. {listed}. Write a name as this file does, or a coordinate.",
            file=self.file,
            expected="the name of a chip",
            got=name[:80],
        )

    @property
    def n_named(self) -> int:
        """Number of chips that have a name besides their coordinate."""
        return sum(not _is_unnamed(at, chip) for at, chip in self.chips.items())

    @property
    def failed_chips(self) -> list[Coordinate]:
        """Coordinates of the failed chips."""
        return [tuple(coordinate) for coordinate in np.argwhere(~self.mesh.live).tolist()]


def _is_unnamed(at: Coordinate, chip: Chip) -> bool:
    """Return whether a chip is known by its host alone; its coordinate then stands for its name."""
    return chip.name == ",".join(map(str, at))


def through_xla(hardware: str) -> str:
    """Return the preset of the same hardware as XLA drives it: TPUs have one, others are as they are.

    >>> through_xla("tpu-v6e"), through_xla("tpu-v6e-xla"), through_xla("tenstorrent-t3000")
    ('tpu-v6e-xla', 'tpu-v6e-xla', 'tenstorrent-t3000')
    """
    return f"{hardware}-xla" if re.fullmatch(r"tpu-v\w+", hardware) else hardware


Coordinates = dict[str, Coordinate]


def machine_of(found: Description, intended: Description | None = None) -> Machine:
    """Return the machine that a description amounts to; with `intended`, what is missing of that one."""
    try:
        if intended is None:
            return _alone(found)[0]
        if not intended.chips and not intended.lists_cables:
            _check_same_grid(found, intended.grids)
            return _alone(_narrowed(found, intended))[0]
        return _minus(intended, found)
    except LayoutError as error:
        raise LayoutError(f"{found.file}: {error}", error.why) from None
    except MeshError as error:
        raise MachineError(f"{found.file}: {error}", file=found.file) from None


def _check_same_grid(found: Description, intended: Sequence[Grid] | None) -> None:
    """Refuse another grid than that of a description which has its own: its places would be those of another mesh."""
    if found.lists_cables or not found.grids or not intended:
        return
    mine, theirs = found.grids[0], intended[0]
    if mine != theirs:
        raise MachineError(
            f"{found.file} says that it is {mine}, got {theirs} as what was intended. Leave that out, or correct the "
            f"file.",
            file=found.file,
            expected=str(mine),
            got=str(theirs),
        )


def _narrowed(found: Description, intended: Description) -> Description:
    """Return the description with the grid and the channels that were intended."""
    return dataclasses.replace(
        found,
        grids=intended.grids,
        channels=intended.channels or found.channels,
        hardware=found.hardware or intended.hardware,
        notes=[*intended.notes, *found.notes],
    )


def _alone(found: Description) -> tuple[Machine, Coordinates]:
    notes = list(found.notes)
    if not found.lists_cables:
        (grid,) = found.grids or [Grid((1,), (False,))]
        coordinates = {key: chip.coordinate for key, chip in found.chips.items() if chip.coordinate is not None}
        failed, cables, rates = list(found.failed_coordinates), list(found.failed_cables), dict(found.rates)
    else:
        grid, coordinates, notes = _placed(found)
        live = {coordinate for key, coordinate in coordinates.items() if not found.chips[key].failed}
        failed = [coordinate for coordinate in map(grid.coordinate, range(grid.size)) if coordinate not in live]
        cables, rates, more = _observed_cables(found, grid, coordinates)
        notes += more
    mesh = Mesh(grid.shape, wrap=grid.wrap, failed=failed, failed_cables=cables, cable_rates=rates)
    chips = {coordinate: found.chips[key] for key, coordinate in coordinates.items()}
    return Machine(mesh, found.format, found.file, chips, found.hardware, tuple(notes)), coordinates


def _placed(found: Description) -> tuple[Grid, Coordinates, list[str]]:
    """Return where the chips are: by their coordinates where they agree with the cables, else by the cables."""
    notes = list(found.notes)
    keys = list(found.chips)
    check_connected([found.chips[key].name for key in keys], neighbours(keys, found.cables))
    grids = found.grids
    if grids is not None:
        fitting = [grid for grid in grids if grid.size >= max(len(keys), found.least_chips)]
        if not fitting:
            raise MachineError(
                f"{found.file}: expected at most {max(grid.size for grid in grids)} chips ({grids[-1]}), got "
                f"{len(keys)}.",
                file=found.file,
            )
        grids = fitting
        direct = _by_coordinates(found, fitting)
        if direct is not None:
            return *direct, notes
        if all(chip.coordinate is not None for chip in found.chips.values()):
            notes.append("The chips' coordinates do not settle the layout; it was found from the cables.")
    layout = find_layout(keys, found.cables, grids)
    if layout.extra:
        listed = ", ".join(f"{found.chips[a].name} – {found.chips[b].name}" for a, b in layout.extra[:6])
        notes.append(
            f"{len(layout.extra)} cables join chips that are not neighbours in {layout.grid}, and are not used: "
            f"{listed}{' and others' * (len(layout.extra) > 6)}."
        )
    return layout.grid, dict(layout.coordinate_of), notes


def _by_coordinates(found: Description, grids: Sequence[Grid]) -> tuple[Grid, Coordinates] | None:
    """Return the layout that coordinates give, if it spans the only grid that fits and every cable joins neighbours."""
    given = {key: chip.coordinate for key, chip in found.chips.items() if chip.coordinate is not None}
    if len(given) < len(found.chips) or len(set(given.values())) < len(given):
        return None
    low = [min(axis) for axis in zip(*given.values(), strict=True)]
    coordinates = {
        key: tuple(x - least for x, least in zip(coordinate, low, strict=True)) for key, coordinate in given.items()
    }
    box = tuple(max(axis) + 1 for axis in zip(*coordinates.values(), strict=True))
    # A machine of the next size that has lost some chips may have the same coordinates.
    near_size = max(min(grid.size for grid in grids), len(given) + SLACK_CHIPS)
    same = [grid for grid in grids if grid.size <= near_size]
    if len(same) != 1 or same[0].shape != box:
        return None
    position = {same[0].coordinate(p): p for p in range(same[0].size)}
    fits = all(same[0].near[position[coordinates[a]]] >> position[coordinates[b]] & 1 for a, b in found.cables)
    return (same[0], coordinates) if fits else None


def _observed_cables(
    found: Description, grid: Grid, coordinates: Coordinates, whole_of: Mapping[tuple[str, str], int] | None = None
) -> tuple[list[Cable], dict[Cable, Fraction], list[str]]:
    """Return the cables that are missing and the rates of those that have lost channels."""
    key_at = {coordinate: key for key, coordinate in coordinates.items() if not found.chips[key].failed}
    counts = Counter(found.cables.values())
    usual = found.channels or max(counts, key=lambda n: (counts[n], n), default=1)
    missing: list[Cable] = []
    rates: dict[Cable, Fraction] = {}
    wider = 0
    full = Mesh(grid.shape, wrap=grid.wrap)
    for a, b in full.cables.tolist():
        ends = (full.chip(a), full.chip(b))
        if not (ends[0] in key_at and ends[1] in key_at):
            continue
        first, second = sorted((key_at[ends[0]], key_at[ends[1]]))
        channels = found.cables.get((first, second), 0)
        whole = usual if whole_of is None else whole_of.get((first, second), usual)
        cable = (min(ends), max(ends))
        if channels == 0:
            missing.append(cable)
        elif channels < whole:
            rates[cable] = Fraction(channels, whole)
        wider += channels > whole
    notes = []
    if wider:
        notes.append(f"{wider} cables have more than the usual {usual} channels; they are planned with as the others.")
    return missing, rates, notes


def _minus(intended: Description, found: Description) -> Machine:
    """Return the intended machine without what is not found, or has failed."""
    whole, coordinates = _alone(intended)
    _check_same_grid(found, [Grid.of(whole.mesh.shape, whole.mesh.wrap)])
    notes = [*whole.notes, *found.notes]
    failed, cables, rates = list(whole.failed_chips), list(whole.mesh.failed_cables), dict(whole.mesh.whole.cable_rates)
    here = Coordinates()
    if found.chips:
        here = {key: coordinates[key] for key in found.chips if key in coordinates}
        strange = [chip.name for key, chip in found.chips.items() if key not in coordinates]
        if strange:
            theirs = ", ".join([chip.name for chip in intended.chips.values()][:4])
            raise MachineError(
                f"{found.file}: expected chips of {intended.file} ({theirs}, …), got {', '.join(strange[:4])}, which "
                f"it does not have. Chips are matched by the ids that their tool gives them: both files come from the "
                f"same tool and machine, or {intended.file} has only a shape. If parts were replaced, describe the "
                f"machine again while it is whole.",
                file=found.file,
            )
        failed += [at for key, at in coordinates.items() if key not in found.chips or found.chips[key].failed]
        grid = Grid.of(whole.mesh.shape, whole.mesh.wrap)
        if found.lists_cables:
            lost, slow, more = _observed_cables(found, grid, here, intended.cables if intended.lists_cables else None)
            cables, rates, notes = cables + lost, {**rates, **slow}, notes + more + _moved(found, intended, grid, here)
        else:
            failed, cables, rates = failed + found.failed_coordinates, cables + found.failed_cables, rates | found.rates
    mesh = Mesh(whole.mesh.shape, wrap=whole.mesh.wrap, failed=failed, failed_cables=cables, cable_rates=rates)
    hardware = found.hardware or intended.hardware
    chips = {**whole.chips, **{at: found.chips[key] for key, at in here.items() if found.chips[key].ports}}
    return Machine(mesh, found.format, found.file, chips, hardware, tuple(notes))


def _moved(found: Description, intended: Description, grid: Grid, coordinates: Coordinates) -> list[str]:
    """Return a note on cables that were not intended and join no neighbours: somebody has plugged them in elsewhere."""
    number = {grid.coordinate(position): position for position in range(grid.size)}
    new = [(a, b) for a, b in found.cables if (a, b) not in intended.cables and intended.lists_cables]
    far = [(a, b) for a, b in new if not grid.near[number[coordinates[a]]] >> number[coordinates[b]] & 1]
    if not far:
        return []
    listed = ", ".join(f"{found.chips[a].name} – {found.chips[b].name}" for a, b in far[:6])
    return [
        f"{len(far)} cables are not in {intended.file} and join chips that are not neighbours; they are not used: "
        f"{listed}{' and others' * (len(far) > 6)}. Is this the same machine, cabled as it was?"
    ]
