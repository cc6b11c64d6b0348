"""Whom the collectives of compiled code join: chips of one tile, corresponding chips of two tiles, or others.

On a fabric of tiles only the planned permutes may leave a tile, each between chips in the same place. This reads
compiled HLO, in which devices are numbered as in the flat `fabric.jax_mesh.devices`.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

INSIDE = "inside a tile"
STRAIGHT = "tile to tile"
ACROSS = "across tiles"

_KINDS = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-broadcast|collective-permute)(?:-start)?\("


def reach_of_collectives(hlo: str, devices_per_tile: int) -> Counter[tuple[str, str]]:
    """Count the collectives in compiled code by kind and by reach: "inside a tile", "tile to tile" or "across tiles".

    "tile to tile" is a permute of which every pair is two chips in the same place of two tiles. An asynchronous pair
    counts once, and so does the body of a loop.

    >>> line = "  x = f32[8] collective-permute(y), channel_id=1, source_target_pairs={{0,4},{1,5}}"
    >>> reach_of_collectives(line, devices_per_tile=4)
    Counter({('collective-permute', 'tile to tile'): 1})
    """
    found: Counter[tuple[str, str]] = Counter()
    for line in hlo.splitlines():
        kind = re.search(_KINDS, line)
        if kind is None:
            continue
        if kind[1] == "collective-permute":
            reach = _reach_of_pairs(line, devices_per_tile)
        else:
            tiles = [{device // devices_per_tile for device in group} for group in _groups(line)]
            reach = INSIDE if tiles and all(len(tile) == 1 for tile in tiles) else ACROSS
        found[kind[1], reach] += 1
    return found


def _reach_of_pairs(line: str, devices_per_tile: int) -> str:
    listed = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    pairs = [divmod(int(device), devices_per_tile) for device in re.findall(r"\d+", listed[1] if listed else "")]
    ends = list(zip(pairs[::2], pairs[1::2], strict=True))
    if all(a[0] == b[0] for a, b in ends):
        return INSIDE
    return STRAIGHT if all(a[0] != b[0] and a[1] == b[1] for a, b in ends) else ACROSS


def _groups(line: str) -> list[list[int]]:
    """Return the groups of devices that a collective joins, from any of the forms in which XLA writes them."""
    explicit = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if explicit:
        return [[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", explicit[1])]
    named = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line)
    if named:
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        joined = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[3])]
        kept = [axis for axis in range(len(sizes)) if axis not in joined]
        order = np.arange(int(np.prod(list(sizes.values())))) if named[2] is None else _ids(named[2])
        ids = order.reshape(list(sizes.values())).transpose(kept + joined)
        return _as_lists(ids, int(np.prod([list(sizes.values())[axis] for axis in joined])))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    if iota is None:
        raise ValueError(f"Unknown form of replica groups: {line.strip()[:300]}")
    return _as_lists(_ids(iota[2]), int(iota[1]))


def _ids(text: str) -> NDArray[np.int64]:
    """Read a list of devices: as it is, or as [6,2]T(1,0), which is 0 to 11 in six rows, transposed."""
    short = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", text)
    if short is None:
        return np.array([int(device) for device in text.split(",")])
    shape = [int(n) for n in short[1].split(",")]
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    return (ids.transpose([int(axis) for axis in short[2].split(",")]) if short[2] else ids).ravel()


def _as_lists(ids: NDArray[np.int64], size: int) -> list[list[int]]:
    groups: list[list[int]] = ids.reshape(-1, size).tolist()
    return groups
