"""Hardware between tiles: each shard gets its part of the links."""

from __future__ import annotations

from meshmend.cost import Hardware, between_tiles
from meshmend.topology import Mesh, cut_into_tiles


def test_a_shard_gets_its_part_of_the_links() -> None:
    lab = Hardware("lab", 12e9, step_latency_s=1e-6, hop_latency_s=1e-6, links_at_once=1, sources=(("x", "y"),))
    tiling = cut_into_tiles(Mesh("8x9", failed=["4,4"]), "4x3")
    tiles = between_tiles(lab, tiling)
    assert (tiles.link_bytes_per_s, tiles.hop_latency_s, tiles.step_latency_s) == (4e9, 4e-6, 1e-6)
    assert (tiles.links_at_once, tiles.name) == (1, "lab between 4x3 tiles")
    assert dict(tiles.sources)["x"] == "y"
    assert between_tiles(lab, cut_into_tiles(Mesh("4x4"), "1x1")) is lab
