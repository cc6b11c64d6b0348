"""What is said of a wrong schedule: the whole message, and the same facts as fields."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from meshmend import Collective, Mesh, Op, Schedule, routing, verify
from meshmend.errors import CollisionError, DeadPathError, RoutingError, VerificationError, WrongSumError
from meshmend.schedule.faults import raise_wrong_sum

LINE = Mesh("1x4")
Facts = tuple[Any, ...]
"""Step, source, destination, chunk, expected and got."""


def rows(*moves: tuple[int, int, int, Op], mesh: Mesh = LINE, **more: Any) -> Schedule:
    """A schedule of (step, source, destination, op), over one chunk unless more is said."""
    step, src, dst, op = zip(*moves, strict=True)
    columns: dict[str, Any] = {"total_chunks": 1, "owners": [0]} | more
    return Schedule(mesh, step=step, src=src, dst=dst, op=op, **columns)


def told(schedule: Schedule, error: type[VerificationError], **arguments: Any) -> tuple[str, Facts]:
    with pytest.raises(error) as caught:
        verify(schedule, **arguments)
    e = caught.value
    return str(e), (e.step, e.src, e.dst, e.chunk, e.expected, e.got)


R, C = Op.REDUCE, Op.COPY
SUM = ((0, 0, 1, R), (1, 1, 2, R), (2, 2, 3, R))
BACK = ((3, 3, 2, C), (4, 2, 1, C), (5, 1, 0, C))
METHODS: tuple[Any, ...] = ("exact", "fingerprint")


@pytest.mark.parametrize("method", METHODS)
def test_a_contribution_that_is_counted_twice(method: Any) -> None:
    # Chip 0 is added to chip 1 a second time, in step 1; chip 2 then brings both on.
    doubled = rows((0, 0, 1, R), (1, 0, 1, R), (2, 1, 2, R), (3, 2, 3, R), (4, 3, 2, C), (5, 2, 1, C), (6, 1, 0, C))
    assert told(doubled, WrongSumError, method=method) == (
        "Chip (0,0) ends with a wrong chunk 0: expected the contribution of (0,0) once, got it twice. Step 1 counts it "
        "twice: it adds (0,0) to (0,1), and both hold it.",
        (1, (0, 0), (0, 0), 0, "the contribution of (0,0) once", "twice"),
    )


@pytest.mark.parametrize(("times", "got"), [(8, "256 times"), (9, "512 times"), (10, "999 times or more")])
def test_counts_stop_where_nobody_cares(times: int, got: str) -> None:
    # After n exchanges each of the two chips holds either contribution 2ⁿ⁻¹ times; then the one adds to the other.
    both = [(n, src, 1 - src, R) for n in range(times) for src in (0, 1)]
    _, facts = told(rows(*both, (times, 0, 1, R), (times + 1, 1, 0, C), mesh=Mesh("1x2")), WrongSumError)
    assert facts[-1] == got


@pytest.mark.parametrize("method", METHODS)
def test_contributions_that_are_missing(method: Any) -> None:
    # In step 2 chip 3 is overwritten by the sum instead of adding to it.
    lost = rows((0, 0, 1, R), (1, 1, 2, R), (2, 2, 3, C), *BACK)
    assert told(lost, WrongSumError, method=method) == (
        "Chip (0,0) ends with a wrong chunk 0: expected the contribution of (0,3) once, got it not at all. The last "
        "write there is step 5, a COPY from (0,1).",
        (5, (0, 1), (0, 0), 0, "the contribution of (0,3) once", "not at all"),
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_chip_that_never_receives_the_sum(method: Any) -> None:
    # Chunks 0 and 1 are right everywhere, chunk 2 is not brought back to chip 0.
    columns: dict[str, Any] = {"total_chunks": 3, "owners": [3, 3, 3], "n_chunks": [3, 3, 3, 3, 3, 2]}
    assert told(rows(*SUM, *BACK, **columns), WrongSumError, method=method) == (
        "Chip (0,0) ends with a wrong chunk 2: expected the contribution of (0,1) once, got it not at all (2 other "
        "contributions are wrong too). No step ever writes this chunk there.",
        (None, None, (0, 0), 2, "the contribution of (0,1) once", "not at all"),
    )


@pytest.mark.parametrize("method", METHODS)
def test_another_chips_value_in_an_all_gather(method: Any) -> None:
    gather = rows(
        (0, 0, 1, C), (1, 1, 2, C), (2, 2, 3, C), (3, 2, 3, R),
        total_chunks=2, owners=[0, 1], n_chunks=[1, 1, 1, 1], collective=Collective.ALL_GATHER,
    )  # fmt: skip
    assert told(gather, WrongSumError, method=method) == (
        "Chip (0,3) ends with a wrong chunk 0: expected the contribution of (0,0) once, got it twice. Step 3 counts it "
        "twice: it adds (0,2) to (0,3), and both hold it.",
        (3, (0, 2), (0, 3), 0, "the contribution of (0,0) once", "twice"),
    )
    wrong_owner = rows((0, 0, 1, C), (1, 1, 2, C), (2, 2, 3, C), owners=[1], collective=Collective.ALL_GATHER)
    message, facts = told(wrong_owner, WrongSumError, method=method)
    assert message == (
        "Chip (0,0) ends with a wrong chunk 0: expected the contribution of (0,0) not at all, got it once (1 other "
        "contributions are wrong too). No step ever writes this chunk there."
    )
    assert facts == (None, None, (0, 0), 0, "the contribution of (0,0) not at all", "once")


@pytest.mark.parametrize("method", METHODS)
def test_a_reduce_scatter_is_wrong_only_at_owners(method: Any) -> None:
    scatter: dict[str, Any] = {"total_chunks": 2, "n_chunks": 2, "collective": Collective.REDUCE_SCATTER}
    verify(rows(*SUM, owners=[3, 3], **scatter), method=method)
    message, facts = told(rows(*SUM, owners=[3, 2], **scatter), WrongSumError, method=method)
    assert message == (
        "Chip (0,2) ends with a wrong chunk 1: expected the contribution of (0,3) once, got it not at all. The last "
        "write there is step 1, a REDUCE from (0,1)."
    )
    assert facts == (1, (0, 1), (0, 2), 1, "the contribution of (0,3) once", "not at all")


@pytest.mark.parametrize("method", METHODS)
def test_two_writes_of_one_chunk(method: Any) -> None:
    clash = rows(
        (0, 0, 1, R), (1, 3, 2, R), (1, 1, 2, C), (2, 2, 3, C),
        total_chunks=5, first_chunk=[0, 3, 1, 0], n_chunks=[5, 2, 3, 5], owners=[3] * 5,
    )  # fmt: skip
    assert told(clash, CollisionError, method=method) == (
        "Step 1 writes chunk 3 of chip (0,2) twice, from (0,3) and from (0,1). A step may write a chunk of a chip "
        "once: move one of the transfers to another step.",
        (1, (0, 3), (0, 2), 3, "one write", "two writes"),
    )


def test_more_writes_than_there_are_chunks_to_write() -> None:
    # Eight transfers of both chunks in one step: two chips have four cells, so the first three must collide.
    crowd = rows(*[(0, 0, 1, C)] * 8, mesh=Mesh("1x2"), total_chunks=2, n_chunks=2, owners=[0, 0])
    message, facts = told(crowd, CollisionError)
    assert message.startswith("Step 0 writes chunk 0 of chip (0,1) twice, from (0,0) and from (0,0).")
    assert facts[:4] == (0, (0, 0), (0, 1), 0)


def test_a_transfer_to_a_failed_chip() -> None:
    whole = rows(*SUM, *BACK, owners=[3])
    assert told(whole, DeadPathError, mesh=LINE.fail("0,3")) == (
        "Step 2 sends chunk 0 over (0,2)→(0,3), but chip (0,3) has failed. Plan again with failed=[(0, 3)].",
        (2, (0, 2), (0, 3), 0, "a live path", "chip (0,3) has failed"),
    )
    # The sender may be the one that is lost; the first chunk of the run is named.
    late = rows(*SUM, *BACK, total_chunks=3, n_chunks=[3, 3, 3, 3, 3, 3], owners=[3] * 3)
    message, _ = told(late, DeadPathError, mesh=LINE.fail("0,0"))
    assert (
        message == "Step 0 sends chunk 0 over (0,0)→(0,1), but chip (0,0) has failed. Plan again with failed=[(0, 0)]."
    )


def test_a_transfer_over_a_failed_cable() -> None:
    whole = rows(*SUM, *BACK, owners=[3])
    cut = Mesh("1x4", failed_cables=["0,1-0,2"])
    assert told(whole, DeadPathError, mesh=cut) == (
        "Step 1 sends chunk 0 over (0,1)→(0,2), but no live path joins them. The survivors are not connected.",
        (1, (0, 1), (0, 2), 0, "a live path", "no live path joins them"),
    )


def test_a_right_chunk_has_no_fault() -> None:
    with pytest.raises(AssertionError, match=r"^two counts of the same chunk disagree: this is a bug in meshmend$"):
        raise_wrong_sum(rows(*SUM, *BACK), 0, 0)


# Over a line of four, chip 0 sends to chip 3 in step 2: east is direction 2, so its links are 2, 4 + 2 and 8 + 2.
FAR = rows((0, 1, 0, R), (1, 2, 0, R), (2, 0, 3, R), (3, 3, 0, C), (4, 3, 1, C), (5, 3, 2, C), owners=[3])


def routed(links: list[int], flow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the router answer with these links for one flow, and truly for all others."""
    true = routing.trace

    def trace(mesh: Mesh, src: Any, dst: Any) -> routing.Trace:
        found = true(mesh, src, dst)
        others = found.flow != flow
        columns = ([flow] * len(links), range(len(links)), links, [0] * len(links))
        kept = (found.flow, found.hop, found.link, found.channel)
        return routing.Trace(
            *(np.append(old[others], new).astype(np.int64) for old, new in zip(kept, columns, strict=True))
        )

    monkeypatch.setattr(routing, "trace", trace)


@pytest.mark.parametrize(
    "links",
    [
        pytest.param([2, 10], id="jumps"),
        pytest.param([2, 6, 11], id="ends elsewhere"),
        pytest.param([2, 6, 10, 14], id="leaves the mesh"),
        pytest.param([0], id="takes a cable that is not there"),
    ],
)
def test_a_router_is_not_believed(links: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    verify(FAR)
    # Flows are the pairs of ranks in order: (0, 3), (2, 0), (3, 0), (3, 1).
    routed(links, 0, monkeypatch)
    why = "no live path joins them" if links == [2, 6, 11] else "its route uses a failed chip or cable"
    more = " The survivors are not connected." if links == [2, 6, 11] else ""
    assert told(FAR, DeadPathError) == (
        f"Step 2 sends chunk 0 over (0,0)→(0,3), but {why}.{more}",
        (2, (0, 0), (0, 3), 0, "a live path", why),
    )


def test_a_flow_without_a_route_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    routed([], 3, monkeypatch)
    message, facts = told(FAR, DeadPathError)
    assert message.startswith("Step 4 sends chunk 0 over (0,3)→(0,1), but no live path joins them.")
    assert facts[:4] == (4, (0, 3), (0, 1), 0)


def test_what_cannot_be_routed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: Any) -> NoReturn:
        raise RoutingError("Too far.")

    monkeypatch.setattr(routing, "trace", trace)
    message, facts = told(FAR, VerificationError)
    assert message == "Transfers between chips that are not neighbours have no routes. Too far."
    assert facts == (None,) * 6


def test_what_is_said_of_another_machine() -> None:
    whole = rows(*SUM, *BACK, owners=[3])
    assert told(whole, VerificationError, mesh=Mesh("4x1"))[0] == (
        "The schedule is for 1x4, which is not the same machine as 4x1."
    )
    assert told(whole, VerificationError, mesh=Mesh("1x4", wrap=True))[0] == (
        "The schedule is for 1x4, which is not the same machine as 1x4 wrapped on axis 1."
    )
    fewer = Schedule(
        LINE.fail("0,0"),
        total_chunks=1,
        step=[0, 1, 2, 3],
        src=[0, 1, 2, 1],
        dst=[1, 2, 1, 0],
        op=[0, 0, 1, 1],
        owners=[2],
    )
    assert told(fewer, VerificationError, mesh=LINE)[0] == (
        "The schedule serves 3 chips, but Mesh(1x4: 4 chips) has other survivors. Plan again."
    )
