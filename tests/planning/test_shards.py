"""Shards in a group's order, and broadcasts: proven, run on the NumPy reference engine, and counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend.numpy as mmn
from meshmend import Mesh
from meshmend.errors import ParameterError
from meshmend.planning import plan_broadcast, plan_shards

MESHES = [Mesh("1x2"), Mesh("2x2", failed=["1,1"]), Mesh("4x4", failed=["2x2@2,2"]), Mesh("3x4", wrap=True)]


@settings(max_examples=20)
@given(st.sampled_from(MESHES), st.sampled_from([1, 10**5, 10**7]), st.randoms(use_true_random=False))
def test_every_rank_owns_the_shard_of_its_member(mesh: Mesh, payload_bytes: int, random: object) -> None:
    n = mesh.n_chips
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    for collective in ("all-gather", "reduce-scatter"):
        made = plan_shards(mesh, collective, order=order, payload_bytes=payload_bytes, hardware="gloo-loopback")
        assert made.is_proven
        assert made.total_chunks % n == 0
        per_chip = made.total_chunks // n
        assert made.owners.tolist() == [order.index(shard) for shard in range(n) for _ in range(per_chip)]
        data = np.arange(n * made.total_chunks).reshape(n, made.total_chunks)
        result = mmn.run(made, data)
        for rank in range(n):
            own = slice(order[rank] * per_chip, (order[rank] + 1) * per_chip)
            if collective == "reduce-scatter":
                assert result[rank, own].tolist() == data[:, own].sum(axis=0).tolist()
            else:
                gathered = [
                    data[order.index(shard), shard * per_chip + i] for shard in range(n) for i in range(per_chip)
                ]
                assert result[rank].tolist() == gathered


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_broadcast_gives_everybody_the_roots_payload(mesh: Mesh) -> None:
    for root in {0, mesh.n_chips // 2, mesh.n_chips - 1}:
        made = plan_broadcast(mesh, root, payload_bytes=10**6, hardware="gloo-loopback")
        assert made.is_proven
        # Every chip but the root receives every chunk, and receives it once.
        received = np.bincount(made.dst, weights=made.n_chunks, minlength=mesh.n_chips)
        assert received.tolist() == [0 if rank == root else made.total_chunks for rank in range(mesh.n_chips)]
        data = np.arange(mesh.n_chips * made.total_chunks).reshape(mesh.n_chips, -1)
        assert (mmn.run(made, data) == data[root]).all()


def test_what_is_no_order_or_root_is_refused() -> None:
    with pytest.raises(ParameterError, match="each shard from 0 to 3 once"):
        plan_shards(Mesh("2x2"), "all-gather", order=[0, 1, 2, 2])
    with pytest.raises(ParameterError, match="from 0 to 3: got 4"):
        plan_broadcast(Mesh("2x2"), 4)
