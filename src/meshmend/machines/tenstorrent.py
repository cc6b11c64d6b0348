"""Tenstorrent cluster descriptors: the YAML that UMD writes about the chips that it finds.

Schema: `docs/yaml_schemas/cluster_descriptor.yaml` of tenstorrent/tt-umd. Every Ethernet channel that trained is one
entry of `ethernet_connections`; what failed is not there. Boards say which product it is, and so which grid to expect.
"""

from __future__ import annotations

import itertools

from meshmend.machines.description import Chip, Description
from meshmend.machines.entries import Entry
from meshmend.machines.grid import Grid

FORMAT = "Tenstorrent cluster descriptor"
_BOARDS = [Grid.of(shape, (False, False)) for shape in ((1, 2), (2, 2), (2, 4))]
_GALAXY = [Grid.of((4, 8), wrap) for wrap in itertools.product((False, True), repeat=2)]
PRODUCTS = {"n300": _BOARDS, "p150": [*_BOARDS, Grid.of((2, 4), (False, True))]}
PRODUCTS |= dict.fromkeys(("ubb", "ubb_wormhole", "ubb_blackhole", "galaxy"), _GALAXY)
"""What boards of a kind are cabled into, as in the mesh graph descriptors of tt-metal (`n300_2x2`, `t3k`, `p150_x2`,
`p150_x4`, `p150_x8`, `single_galaxy` and its torus variants). A T3000 is four n300 boards."""
CHIPS_PER_BOARD = {"n300": 2}
HARDWARE = {"n300": "tenstorrent-t3000"} | dict.fromkeys(
    ("ubb", "ubb_wormhole", "galaxy"), "tenstorrent-wormhole-galaxy"
)
HARDWARE |= {"ubb_blackhole": "tenstorrent-blackhole-galaxy", "p150": "tenstorrent-blackhole-galaxy"}


def read(root: Entry) -> Description:
    """Return what a cluster descriptor says."""
    found = Description(FORMAT, root.file)
    ids = root.get("chip_unique_ids")
    unique = {} if ids is None else {chip: entry.whole() for chip, entry in ids.items()}
    boards, kinds = _boards(root)
    coordinates = _coordinates(root)
    key_of: dict[object, str] = {}
    for chip, arch in root.need("arch").items():
        arch.text()
        if not isinstance(chip, int) or isinstance(chip, bool):
            arch.refuse("a chip's number as the key", repr(chip)[:40])
        key_of[chip] = str(unique[chip]) if chip in unique else f"chip {chip}"
        named = Chip(f"chip {chip}", boards.get(chip), coordinate=coordinates.get(chip), device=chip)
        found.add_chip(key_of[chip], named)
    used: set[tuple[object, int]] = set()
    for row in root.rows("ethernet_connections"):
        ends = [_end(end, key_of) for end in row.rows()]
        if len(ends) != 2:
            row.refuse("two ends of a channel", f"{len(ends)}")
        (a, a_channel), (b, b_channel) = ends
        if a == b:
            found.notes.append(f"A channel joins {found.chips[a].name} to itself; it was left out.")
            continue
        if {(a, a_channel), (b, b_channel)} & used:
            row.refuse("each channel of a chip once", "one that another cable has")
        used |= {(a, a_channel), (b, b_channel)}
        found.add_channel(a, b, ends=(a_channel, b_channel))
    away = root.get("ethernet_connections_to_remote_devices")
    n_away = 0 if away is None else sum(1 for _ in away.rows())
    if n_away:
        found.notes.append(
            f"{n_away} channels lead to chips of other machines; they are not part of this mesh. A physical system "
            f"descriptor describes several machines together."
        )
    _product(found, kinds)
    return found


def _end(end: Entry, key_of: dict[object, str]) -> tuple[str, int]:
    chip = end.need("chip")
    if chip.whole() not in key_of:
        chip.refuse("a chip that `arch` lists")
    return key_of[chip.value], end.need("chan").whole(most=63)


def _boards(root: Entry) -> tuple[dict[object, str], list[str]]:
    """Return the board of each chip, and the kinds of all boards."""
    of_chip: dict[object, str] = {}
    kinds: list[str] = []
    for board in root.rows("boards"):
        fields: dict[str, Entry] = {}
        for part in board.rows():
            fields.update({str(key): entry for key, entry in part.items()})
        kind = fields["board_type"].text(64) if "board_type" in fields else "board"
        kinds.append(kind)
        name = f"{kind} {fields['board_id'].text(64)}" if "board_id" in fields else kind
        for chip in fields["chips"].rows() if "chips" in fields else ():
            of_chip[chip.whole()] = name
    return of_chip, kinds


def _coordinates(root: Entry) -> dict[object, tuple[int, ...]]:
    """Return coordinates where there are any: x, y, rack, shelf; only within one shelf are they a place in the mesh."""
    found: dict[object, tuple[int, ...]] = {}
    shelves = set()
    for chip, entry in root.items("chips"):
        x, y, *shelf = (part.whole(most=2**16) for part in entry.rows()) if len(entry.value or ()) == 4 else (0, 0, -1)
        shelves.add(tuple(shelf))
        found[chip] = (y, x)
    return found if len(shelves) == 1 and (-1,) not in shelves else {}


def _product(found: Description, kinds: list[str]) -> None:
    known = set(kinds)
    if len(known) != 1 or (kind := next(iter(known))) not in PRODUCTS:
        if known:
            found.notes.append(f"No product with boards of kind {', '.join(sorted(known)[:4])} is known here.")
        return
    found.grids = PRODUCTS[kind]
    found.least_chips = CHIPS_PER_BOARD.get(kind, 1) * len(kinds)
    found.hardware = HARDWARE[kind]
