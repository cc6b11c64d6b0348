"""Hardware as a mesh of tiles sees it: what a chip's shard gets of the links between two tiles."""

from __future__ import annotations

import dataclasses

from meshmend.cost.hardware import Hardware, find_hardware
from meshmend.topology import Tiling


def between_tiles(hardware: str | Hardware, tiling: Tiling) -> Hardware:
    """Return the hardware to plan and predict with on `tiling.tiles`, for a payload that is one chip's shard.

    Corresponding chips of neighbouring tiles all exchange their shards at once, over the same links: a link is
    shared by as many messages as a tile is long, and each message crosses as many links. The longest way counts for
    the latency of all. `links_at_once` stays: where a chip runs one permute at a time, it does so here too. Where every
    pair of chips is one hop apart (`is_switched`), tiles share nothing, and the hardware is what it was.

    >>> from meshmend.topology import Mesh, cut_into_tiles
    >>> print(between_tiles("tpu-v4", cut_into_tiles(Mesh("8x8"), "2x2")))
    tpu-v4 between 2x2 tiles: 25 GB/s per link, 0 s per step, 2 µs per hop, all links at once
    """
    chosen = find_hardware(hardware)
    if tiling.chips_per_tile == 1 or chosen.is_switched:
        return chosen
    side = "x".join(map(str, tiling.side))
    shared = (
        ("link_bytes_per_s", f"a chip's part of {chosen.name}'s, between tiles of {side} chips"),
        ("hop_latency_s", f"{tiling.hops} hops of {chosen.name}, from a tile to the next"),
    )
    kept = tuple((name, source) for name, source in chosen.sources if name not in dict(shared))
    return dataclasses.replace(
        chosen,
        name=f"{chosen.name} between {side} tiles",
        link_bytes_per_s=chosen.link_bytes_per_s * float(tiling.link_share),
        hop_latency_s=chosen.hop_latency_s * tiling.hops,
        sources=shared + kept,
    )
