"""How much hosts keep of what all have: all of it, or as much as memory and time allow, and what a job says of it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jax_engine.restart_cases import Started, begin
from meshmend.errors import RestartError
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.memory import placement, redundancy
from meshmend.jax.state.memory.copies import KEPT
from meshmend.jax.state.memory.redundancy import CHECKED_COPIES, Room, choose_blocks, copy_bytes

N_HOSTS, N_COPIES, MOST = 8, 2, 4
AMPLE = 1 << 40


@pytest.fixture(params=[False, True], ids=["replicated", "sharded"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StateLayout:
    """A state on eight hosts of two chips each."""
    monkeypatch.setattr(placement, "hosts_of_chips", lambda _: [chip // 2 for chip in range(16)])
    # Large enough that no rounding of its shares matters.
    return begin({"w": np.zeros((100, 100), np.float32)}, optax.adam(0.1), "4x4", request.param)[2]


def rooms(free: int, *, held: int = 0, machines: int = N_HOSTS) -> list[Room]:
    """What hosts have, some of which may share a machine's memory."""
    return [Room(free, held, f"machine {host % machines}") for host in range(N_HOSTS)]


def fewest(layout: StateLayout, allowed: float) -> int:
    """The fewest blocks with which a host keeps no more than is allowed, by trying all."""
    return next((n for n in range(1, MOST) if sum(copy_bytes(layout, n)) <= allowed), MOST)


def test_where_there_is_room_every_host_keeps_all_that_is_replicated(layout: StateLayout) -> None:
    assert choose_blocks(layout, rooms(AMPLE), N_COPIES) == 1


def test_redundancy_takes_at_most_half_of_the_room(layout: StateLayout) -> None:
    whole = sum(copy_bytes(layout))
    for allowed in (whole * percent // 100 for percent in (55, 65, 75, 85, 95, 102)):
        assert choose_blocks(layout, rooms(2 * N_COPIES * allowed), N_COPIES) == fewest(layout, allowed)
    assert choose_blocks(layout, rooms(2 * N_COPIES * (whole - 1)), N_COPIES) > 1


def test_virtual_hosts_share_the_room_of_their_machine(layout: StateLayout) -> None:
    whole = sum(copy_bytes(layout))
    assert choose_blocks(layout, rooms(3 * 2 * N_COPIES * whole, machines=1), N_COPIES) > 1
    assert choose_blocks(layout, rooms(2 * N_COPIES * whole * N_HOSTS, machines=1), N_COPIES) == 1


def test_copies_of_an_earlier_run_make_room_one_by_one(layout: StateLayout) -> None:
    whole = sum(copy_bytes(layout))
    assert choose_blocks(layout, rooms(N_COPIES * whole, held=N_COPIES * whole), N_COPIES) == 1


def test_on_cpu_redundancy_does_not_put_more_than_a_minute_of_training_at_risk(
    layout: StateLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take 3 % of the time, so a copy that takes 1.8 s to write comes once per minute."""
    for percent in (20, 30, 45, 55, 65, 75, 85, 95, 105, 200):
        written_in_time = sum(copy_bytes(layout)) * percent // 100
        monkeypatch.setattr(redundancy, "LARGEST_ON_CPU_BYTES", written_in_time)
        assert choose_blocks(layout, rooms(AMPLE), N_COPIES) == fewest(layout, written_in_time)


def test_the_smallest_room_counts(layout: StateLayout) -> None:
    small = rooms(AMPLE)[1:] + rooms(2 * N_COPIES * sum(copy_bytes(layout)) - 1)[:1]
    assert choose_blocks(layout, small, N_COPIES) > 1


def test_what_the_job_cannot_do_without_may_take_all_of_the_room(layout: StateLayout) -> None:
    least = N_COPIES * sum(copy_bytes(layout, MOST))
    assert choose_blocks(layout, rooms(least), N_COPIES) == MOST
    few = rooms(AMPLE)
    few[3] = few[3]._replace(free=least - 1)
    with pytest.raises(
        RestartError, match=r"process 3 has room for .* MB\. Make the folder larger .*memory_every=0\)\."
    ):
        choose_blocks(layout, few, N_COPIES)


@pytest.mark.parametrize(("untrusted", "n_copies"), [(None, KEPT), ([], CHECKED_COPIES)])
def test_a_job_with_checks_needs_room_for_more_copies(
    untrusted: list[tuple[int, int]] | None, n_copies: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[int]()

    def choose(layout: StateLayout, rooms: list[Room], n_copies: int) -> int:
        asked.append(n_copies)
        return 1

    monkeypatch.setattr("meshmend.jax.state.keeper.choose_blocks", choose)
    job = Started(memory=tmp_path / "memory", untrusted=untrusted)
    job.restore()
    job.crash()
    assert asked == [n_copies]


def test_a_device_with_little_memory_cuts_less(layout: StateLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, _ = copy_bytes(layout)
    monkeypatch.setattr(redundancy, "LARGEST_SHARE_OF_DEVICE", 1.0)

    class Device:
        platform = layout.fabric.platform

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": shares // 4}  # two chips cut half of it each

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert choose_blocks(layout, rooms(AMPLE), N_COPIES) == 2


@pytest.mark.parametrize(
    ("free", "sharded", "said"),
    [
        (AMPLE, False, "the failure of any 7 of 8 hosts at once: each keeps the whole state"),
        (0, False, "the failure of any 3 of 8 hosts at once: each keeps one of 2 parts of the whole state"),
        (
            AMPLE,
            True,
            "the failure of any 1 of 8 hosts at once: each keeps the replicated arrays, its own shards and those of 1 "
            "other host",
        ),
    ],
)
def test_a_job_says_at_its_start_what_it_can_lose(
    free: int, sharded: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placement, "hosts_of_chips", lambda _: [chip // 2 for chip in range(16)])
    job = Started(sharded=sharded, shape="4x4", memory=tmp_path / "memory")
    n_blocks = 1 if free else 2
    monkeypatch.setattr("meshmend.jax.state.keeper.choose_blocks", lambda *_: n_blocks)
    job.restore()
    (event,) = job.events("restore")
    assert event["survives"] == said
    job.crash()
