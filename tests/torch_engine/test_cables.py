"""Dead cables: what answers say, what members tell each other, and that all plan alike from the same call on."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh, PlanError, plan
from meshmend.errors import DisagreementError, LostChipError
from meshmend.topology import Cable, name_cable

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402

from meshmend.launch.cables import (  # noqa: E402
    ANSWERS,
    MISSES,
    TOLD_BYTES,
    CableHealth,
    CableWatch,
    address_of,
    answering,
    tell,
    told,
)
from meshmend.torch.membership import with_rates  # noqa: E402
from meshmend.torch.mesh_group import MeshGroup  # noqa: E402
from meshmend.torch.plans import Plans  # noqa: E402
from torch_engine.processes import remembered  # noqa: E402
from torch_engine.threads import Group, on_every_thread  # noqa: E402

PATIENCE = timedelta(seconds=30)


class Known(CableWatch):
    """A watch that asks nobody: the cables that a test calls dead, and those that it calls answering."""

    dead: frozenset[Cable] = frozenset()  # type: ignore[assignment]  # in place of a property
    answering: frozenset[Cable] = frozenset()  # type: ignore[assignment]


def cables_of(mesh: Mesh) -> list[Cable]:
    return [(mesh.chip(a), mesh.chip(b)) for a, b in mesh.cables.tolist()]


def group_of(mesh: Mesh, rank: int, group: Group, watch: CableWatch, plans: Plans | None = None) -> MeshGroup:
    return MeshGroup(
        mesh,
        [mesh.chip(r) for r in range(mesh.n_chips)],
        group,  # type: ignore[arg-type]  # it has all that a channel needs
        plans or Plans(remembered, hardware="gloo-loopback"),
        PATIENCE,
        watch=watch,
        with_rates=lambda rates: with_rates(mesh, rates),
    )


@given(st.lists(st.booleans(), max_size=60))
def test_a_cable_is_dead_after_misses_in_a_row_and_back_after_many_answers(answers: list[bool]) -> None:
    health, other = CableHealth((0, 1)), (0, 0)
    for answered in answers:
        health.note({other: answered, (1, 1): True})
    # Said anew, from the runs of equal answers: those before the first answer do not count.
    counted = answers[answers.index(True) :] if True in answers else []
    is_dead = False
    for answered, run in groupby(counted):
        length = len(list(run))
        if not answered and length >= MISSES:
            is_dead = True
        if answered and length >= ANSWERS:
            is_dead = False
    assert health.dead == ({((0, 0), (0, 1))} if is_dead else set())


RATES = st.sampled_from([Fraction(0), Fraction(1, 16), Fraction(1, 4), Fraction(1, 2)])


@given(st.lists(st.dictionaries(st.sampled_from(cables_of(Mesh("5x5"))), RATES, max_size=8), max_size=6))
def test_what_is_told_is_understood(known: list[dict[Cable, Fraction]]) -> None:
    words = [tell({name_cable(cable): rate for cable, rate in rates.items()}) for rates in known]
    assert {len(word) for word in words} <= {TOLD_BYTES}
    lowest = sorted(((name_cable(cable), rate) for rates in known for cable, rate in rates.items()), reverse=True)
    assert told(words) == dict(lowest)


def test_what_does_not_fit_is_left_out_and_no_name_is_torn() -> None:
    far = [((10**6 + i, 10**6), (10**6 + i + 1, 10**6)) for i in range(100)]
    word = tell({name_cable(cable): Fraction(0) for cable in far})
    assert len(word) == TOLD_BYTES
    found = told([word])
    assert 0 < len(found) < 100
    assert found.keys() <= {*map(name_cable, far)}


MESHES = [Mesh("2x2"), Mesh("2x3"), Mesh("3x3"), Mesh("1x4", wrap=True), Mesh("3x3", failed=["1,1"])]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_members_plan_alike_whoever_notices_what_and_when(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    n_calls = data.draw(st.integers(1, 4))
    # Before each call, some members have found some of their own cables dead, or alive again.
    news = [
        [
            data.draw(st.frozensets(st.sampled_from([c for c in cables_of(mesh) if mesh.chip(rank) in c]), max_size=2))
            for rank in range(mesh.n_chips)
        ]
        for _ in range(n_calls)
    ]
    sizes = [data.draw(st.sampled_from([1, 7, 300])) for _ in range(n_calls)]

    def main(rank: int, group: Group) -> Any:
        watch = Known(mesh.chip(rank))
        own = group_of(mesh, rank, group, watch)
        found = []
        for now, size in zip(news, sizes, strict=True):
            watch.dead = now[rank]
            payload = torch.full((size,), float(rank + 1))
            own.all_reduce([payload], dist.ReduceOp.SUM)
            found.append((own.mesh, payload.unique().tolist()))
        shards = torch.zeros(2 * mesh.n_chips)
        own.all_gather([shards], [torch.full((2,), float(rank))], None)
        return found, shards.tolist()

    total = sum(range(1, mesh.n_chips + 1))
    for found, shards in on_every_thread(mesh.n_chips, main):
        assert shards == [float(rank) for rank in range(mesh.n_chips) for _ in range(2)]
        for now, (planned_for, summed) in zip(news, found, strict=True):
            left = mesh.with_failures(failed_cables=set().union(*now))
            assert planned_for == (left if left.is_connected else mesh)
            assert summed == [total]


def test_tensors_of_several_dtypes_are_summed_once_each_when_news_comes_between() -> None:
    mesh, cable = Mesh("2x2"), ((0, 0), (0, 1))

    def main(rank: int, group: Group) -> Any:
        watch = Known(mesh.chip(rank))
        own = group_of(mesh, rank, group, watch)
        real, whole = torch.ones(5), torch.ones(5, dtype=torch.int64)
        send = group.send

        def then_news(*given: Any) -> Any:
            # After the first payload has moved: its messages have larger tags than those of an agreement.
            if rank == 0 and (real != 1).any():
                watch.dead = frozenset({cable})
            return send(*given)

        group.send = then_news  # type: ignore[assignment,method-assign]
        own.all_reduce([real, whole], dist.ReduceOp.SUM)
        return real.tolist(), whole.tolist(), own.mesh

    for real, whole, planned_for in on_every_thread(4, main):
        assert (real, whole) == ([4.0] * 5, [4] * 5)
        assert planned_for == mesh.with_failures(failed_cables=[cable])


def test_a_member_that_plans_around_another_cable_is_refused_before_anything_is_summed() -> None:
    mesh, cable = Mesh("3x3"), ((0, 0), (0, 1))
    weave = partial(plan, planner="weave", chunks=9)

    def main(rank: int, group: Group) -> Any:
        watch = Known(mesh.chip(rank))
        own = group_of(mesh, rank, group, watch, Plans(weave, hardware="gloo-loopback"))
        if rank == 4:  # hears the news, and draws its own conclusions
            own._with_rates = lambda _: mesh
        watch.dead = frozenset({cable} if rank == 0 else ())
        payload = torch.full((300,), float(rank))
        with pytest.raises(DisagreementError):
            own.all_reduce([payload], dist.ReduceOp.SUM)
        return payload.unique().tolist()

    assert on_every_thread(9, main) == [[float(rank)] for rank in range(9)]


def test_where_no_plan_avoids_the_cable_it_stays() -> None:
    mesh, cable = Mesh("4x4"), ((0, 0), (0, 1))
    ring = Plans(partial(plan, planner="hamiltonian"), hardware="gloo-loopback")
    try:
        ring.get(mesh.with_failures(failed_cables=[cable]), 1000)
    except PlanError:
        pass
    else:
        pytest.fail("choose a planner that needs this cable")

    def main(rank: int, group: Group) -> Any:
        watch = Known(mesh.chip(rank))
        own = group_of(mesh, rank, group, watch, ring)
        watch.dead = frozenset({cable} if rank == 1 else ())
        sums = []
        for _ in range(2):
            payload = torch.full((300,), float(rank))
            own.all_reduce([payload], dist.ReduceOp.SUM)
            sums += payload.unique().tolist()
        return own.mesh, sums

    assert on_every_thread(16, main) == [(mesh, [120.0, 120.0])] * 16


def test_an_error_names_the_cable_and_what_to_do() -> None:
    mesh, cable = Mesh("1x2"), ((0, 0), (0, 1))

    def main(rank: int, group: Group) -> Any:
        watch = Known(mesh.chip(rank))
        own = group_of(mesh, rank, group, watch)
        if rank == 1:
            return None
        watch.dead = frozenset({cable})
        with pytest.raises(LostChipError) as caught:
            own.all_reduce([torch.ones(3)], dist.ReduceOp.SUM, timedelta(seconds=0.2))
        return str(caught.value)

    said = on_every_thread(2, main)[0]
    assert "cable 0,0-0,1 does not answer any more, so renew the routes around it, or start again without it" in said


def test_loopback_answers_and_an_address_without_a_host_does_not() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("no-such-port0") == address_of(None) == ""
    # 192.0.2.0/24 is for documentation (RFC 5737).
    assert answering(["127.0.0.1", "192.0.2.7"]) == {"127.0.0.1"}
