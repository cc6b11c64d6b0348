"""Forecasts for a mesh of tiles, against SimGrid with the messages of all shards over the chips' own links."""

from __future__ import annotations

import numpy as np
import pytest

import meshmend as mm
from meshmend.cost import between_tiles, predict
from meshmend.cost.paths import TransferPaths
from meshmend.topology import Mesh, Tiling, cut_into_tiles
from meshmend_lab import simgrid

needs_simgrid = pytest.mark.skipif(
    not simgrid.is_available(), reason="no Python here can import simgrid: apt-get install python3-simgrid"
)
CASES = [
    (Mesh("8x8", failed=["2x2@2,2"]), "2x2"),
    (Mesh("8x8", failed=["2x2@2,2"]), "4x2"),
    (Mesh("9x9", failed=["3,3", "4,4"]), "2x2"),
    (Mesh("4x4x4", failed=["1,1,1"]), "2x2x1"),
]


def of_all_shards(schedule: mm.Schedule, tiling: Tiling) -> mm.Schedule:
    """The plan as chips see it: each transfer between tiles, once for each place in them."""
    one_by_one = schedule.expanded()
    n = tiling.chips_per_tile
    return mm.Schedule(
        tiling.chips,
        total_chunks=schedule.total_chunks,
        step=np.repeat(one_by_one.step, n),
        src=tiling.ranks[one_by_one.src].ravel(),
        dst=tiling.ranks[one_by_one.dst].ravel(),
        first_chunk=np.repeat(one_by_one.first_chunk, n),
        n_chunks=np.repeat(one_by_one.n_chunks, n),
        op=np.repeat(one_by_one.op, n),
        owners=tiling.ranks[schedule.owners, 0],
    )


@needs_simgrid
@pytest.mark.parametrize(("payload", "hardware"), [(1e8, "tpu-v4"), (1e5, "tpu-v4-xla")])
@pytest.mark.parametrize(("mesh", "side"), CASES, ids=str)
def test_simgrid_agrees_on_the_time_of_a_plan(mesh: Mesh, side: str, payload: float, hardware: str) -> None:
    tiling = cut_into_tiles(mesh, side)
    schedule = mm.plan(tiling.tiles, "weave", chunks=2 * tiling.tiles.n_chips)
    chips = of_all_shards(schedule, tiling)
    paths = TransferPaths.of(chips)
    assert len(paths.far_hops) == 0 or paths.far_hops.max() <= tiling.hops, "straight from place to place"
    simulated = simgrid.simulate(chips, payload, hardware).sum()
    forecast = predict(schedule, payload, between_tiles(hardware, tiling))
    assert forecast.seconds == pytest.approx(simulated, rel=0.01)
