import heapq
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import routing
from meshmend.cost import Hardware, StepDemand, find_hardware, predict
from meshmend.errors import ParameterError
from meshmend.planning import Auto, RowPairs, plan
from meshmend.schedule import Op, Schedule
from meshmend.topology import Mesh
from strategies import plans, tree_plans

SLOW = Hardware("slow", link_bytes_per_s=1e6, step_latency_s=3e-3, hop_latency_s=1e-3)
LINE = Mesh("1x4")


def line_schedule(*transfers: tuple[int, int, int, int, int]) -> Schedule:
    """Transfers (step, src, dst, first chunk, chunks) on a line of four chips, four chunks."""
    step, src, dst, first, count = (list(column) for column in zip(*transfers, strict=True))
    return Schedule(
        LINE, total_chunks=4, step=step, src=src, dst=dst, first_chunk=first, n_chunks=count, op=0, owners=[0] * 4
    )


def test_ring_has_the_closed_form() -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "hamiltonian")
    chips, payload = 60, 5e6
    step = SLOW.step_latency_s + SLOW.hop_latency_s + payload / (2 * chips) / SLOW.link_bytes_per_s
    for mode in ("lock-step", "asynchronous"):
        assert predict(schedule, payload, SLOW, mode=mode).seconds == pytest.approx(2 * (chips - 1) * step, rel=1e-9)


def test_two_flows_share_a_link() -> None:
    # Both flows cross 1→2; alone, each would take one second.
    both = line_schedule((0, 0, 2, 0, 1), (0, 1, 2, 1, 1))
    alone = line_schedule((0, 0, 2, 0, 1))
    hardware = Hardware("own", 1.0)
    assert predict(alone, 4.0, hardware).seconds == 1
    assert predict(both, 4.0, hardware).seconds == 2
    assert predict(both, 4.0, hardware).busiest_link_load == 0.5
    assert str(predict(both, 4.0, hardware).busiest_links[0]) == "(0,1)→(0,2)"


def test_long_paths_wait_longer_but_do_not_hold_up_short_ones() -> None:
    # One chunk over three hops, two chunks over one hop that shares no link with it.
    schedule = line_schedule((0, 0, 3, 0, 1), (0, 3, 2, 2, 2))
    by_bytes = Hardware("own", 1.0, hop_latency_s=0.1)
    by_hops = Hardware("own", 1.0, hop_latency_s=10.0)
    assert predict(schedule, 4.0, by_bytes).seconds == pytest.approx(0.1 + 2)
    assert predict(schedule, 4.0, by_hops).seconds == pytest.approx(30 + 1)


def test_a_chip_that_drives_one_link_sends_one_after_the_other() -> None:
    mesh = Mesh("1x3")
    schedule = Schedule(mesh, total_chunks=2, step=[0, 0], src=[1, 1], dst=[0, 2], op=[0, 0], owners=[0, 0])
    assert predict(schedule, 2.0, Hardware("all", 1.0)).seconds == 1
    assert predict(schedule, 2.0, Hardware("one", 1.0, links_at_once=1)).seconds == 2
    gathering = Schedule(
        mesh, total_chunks=2, step=[0, 0], src=[0, 2], dst=[1, 1], first_chunk=[0, 1], op=[0, 0], owners=[0, 0]
    )
    assert predict(gathering, 2.0, Hardware("one", 1.0, links_at_once=1)).seconds == 2


def test_asynchronous_waits_for_data_only() -> None:
    # A slow transfer at one end of the line; at the other a chain that never meets it.
    schedule = line_schedule((0, 0, 1, 0, 3), (0, 3, 2, 3, 1), (1, 2, 1, 3, 1))
    hardware = Hardware("own", 1.0)
    assert predict(schedule, 4.0, hardware).seconds == 4
    assert predict(schedule, 4.0, hardware, mode="asynchronous").seconds == 3


def test_asynchronous_queues_at_links() -> None:
    # Both are ready at once, and the link takes them one after the other; the far one in two hops.
    schedule = line_schedule((0, 1, 2, 0, 2), (0, 0, 2, 2, 1))
    assert predict(schedule, 4.0, Hardware("own", 1.0), mode="asynchronous").seconds == 3


def lock_step_oracle(schedule: Schedule, payload: float, hardware: Hardware) -> float:
    """Plain loops over steps, links and chips: whichever is kept busy longest, from each moment it is first asked."""
    total = 0.0
    chunk_s = payload / schedule.total_chunks / hardware.link_bytes_per_s
    for step in range(schedule.n_steps):
        jobs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for row in np.flatnonzero(schedule.step == step):
            src, dst = int(schedule.src[row]), int(schedule.dst[row])
            links = routing.trace(schedule.mesh, [src], [dst]).link.tolist()
            begins, lasts = len(links) * hardware.hop_latency_s, float(schedule.n_chunks[row]) * chunk_s
            for link in links:
                jobs["link", link].append((begins, lasts))
            if hardware.links_at_once is not None:
                jobs["sender", src].append((begins, lasts / hardware.links_at_once))
                jobs["receiver", dst].append((begins, lasts / hardware.links_at_once))
        longest = 0.0
        for queue in jobs.values():
            clock = 0.0
            for begins, lasts in sorted(queue):
                clock = max(clock, begins) + lasts
            longest = max(longest, clock)
        total += hardware.step_latency_s + longest
    return total


@settings(max_examples=20, deadline=None)
@given(plans(), st.sampled_from([1.0, 1e4, 1e7]), st.sampled_from([None, 1, 2]))
def test_lock_step_is_the_slowest_queue_of_each_step(
    schedule: Schedule, payload: float, links_at_once: int | None
) -> None:
    if schedule.n_transfers > 3000:
        return
    hardware = Hardware("own", 1e6, step_latency_s=1e-4, hop_latency_s=1e-3, links_at_once=links_at_once)
    expected = lock_step_oracle(schedule, payload, hardware)
    assert predict(schedule, payload, hardware).seconds == pytest.approx(expected, rel=1e-9)


def asynchronous_oracle(schedule: Schedule, payload: float, hardware: Hardware) -> float:
    """Simulate events in order of time, for schedules between neighbours: a transfer starts once its link's
    earlier steps are served and every earlier arrival of its chunks at its source is in."""
    chunk_s = payload / schedule.total_chunks / hardware.link_bytes_per_s
    n = schedule.n_transfers
    link = schedule.mesh.link(schedule.src, schedule.dst).tolist()
    writes: dict[tuple[int, int], list[int]] = defaultdict(list)
    needs: list[set[int]] = []
    for row in range(n):
        chunks = range(int(schedule.first_chunk[row]), int(schedule.first_chunk[row] + schedule.n_chunks[row]))
        src, dst, step = int(schedule.src[row]), int(schedule.dst[row]), int(schedule.step[row])
        needs.append({w for c in chunks for w in writes[src, c] if schedule.step[w] < step})
        for c in chunks:
            writes[dst, c].append(row)
    queues: dict[int, list[int]] = defaultdict(list)
    for row in range(n):
        queues[link[row]].append(row)
    arrived: dict[int, float] = {}
    free: dict[int, float] = defaultdict(float)
    events: list[tuple[float, int]] = []
    waiting = {key: list(rows) for key, rows in queues.items()}

    def start_what_can() -> None:
        for key, rows in waiting.items():
            while rows and all(w in arrived for w in needs[rows[0]]):
                row = rows.pop(0)
                release = max((arrived[w] for w in needs[row]), default=0.0) + hardware.step_latency_s
                begin = max(release, free[key])
                lasts = float(schedule.n_chunks[row]) * chunk_s
                free[key] = begin + lasts
                heapq.heappush(events, (begin + lasts + hardware.hop_latency_s, row))

    clock = 0.0
    start_what_can()
    while events:
        clock, row = heapq.heappop(events)
        arrived[row] = clock
        start_what_can()
    assert len(arrived) == n
    return clock


@settings(max_examples=40, deadline=None)
@given(tree_plans(), st.sampled_from([1.0, 1e4, 1e7]))
def test_asynchronous_follows_the_dependency_graph(schedule: Schedule, payload: float) -> None:
    links = schedule.step.astype(np.int64) * schedule.mesh.n_link_slots + schedule.mesh.link(schedule.src, schedule.dst)
    if len(np.unique(links)) < schedule.n_transfers:
        return  # the order within a step is by arrival there, which the plain queues of the oracle do not know
    expected = asynchronous_oracle(schedule, payload, SLOW)
    assert predict(schedule, payload, SLOW, mode="asynchronous").seconds == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(tree_plans(), st.sampled_from([1.0, 1e4, 1e7]))
def test_waiting_for_less_is_never_slower(schedule: Schedule, payload: float) -> None:
    lock_step = predict(schedule, payload, SLOW).seconds
    assert predict(schedule, payload, SLOW, mode="asynchronous").seconds <= lock_step * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["lock-step", "asynchronous"])
def test_phases_sum_to_the_whole(mode: str) -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", segments=2)
    forecast = predict(schedule, 1e6, "tpu-v3", mode=mode)  # type: ignore[arg-type]
    assert sum(forecast.by_phase.values()) == pytest.approx(forecast.seconds)
    assert list(forecast.by_phase) == [phase.name for phase in schedule.phases]
    assert all(seconds > 0 for seconds in forecast.by_phase.values())


def test_one_profile_serves_many_payloads() -> None:
    schedule = plan(Mesh("8x8"), "row-pairs")
    demand = StepDemand(schedule)
    for payload in (1e3, 1e6, 1e9):
        for name in ("ideal", "tpu-v3", "tpu-v3-xla"):
            assert demand.seconds(payload, find_hardware(name)) == pytest.approx(
                predict(schedule, payload, name).seconds
            )


def test_nothing_to_do_takes_no_time() -> None:
    alone = Schedule(Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    for mode in ("lock-step", "asynchronous"):
        forecast = predict(alone, 1e6, SLOW, mode=mode)
        assert (forecast.seconds, forecast.bound_seconds, forecast.ratio_to_bound) == (0, 0, 1)
        assert forecast.busiest_links == ()


def test_empty_payload_costs_its_latency() -> None:
    schedule = RowPairs().plan(Mesh("4x4"))
    assert predict(schedule, 0, "ideal").seconds == 0
    assert predict(schedule, 0, SLOW).seconds > schedule.n_steps * SLOW.step_latency_s


@pytest.mark.parametrize("payload", [-1.0, float("nan"), float("inf")])
def test_senseless_payloads_are_refused(payload: float) -> None:
    with pytest.raises(ParameterError, match="expected a number of bytes, 0 or more"):
        predict(RowPairs().plan(Mesh("4x4")), payload)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ParameterError, match="mode is 'fast', expected one of: lock-step, asynchronous"):
        predict(RowPairs().plan(Mesh("4x4")), 1.0, mode="fast")  # type: ignore[arg-type]


def test_runs_of_chunks_that_overlap_are_followed() -> None:
    # The second transfer sends chunks that arrived in two runs; it waits for the later one.
    mesh = Mesh("1x3")
    schedule = Schedule(
        mesh,
        total_chunks=4,
        step=[0, 0, 1],
        src=[0, 2, 1],
        dst=[1, 1, 0],
        first_chunk=[0, 1, 0],
        n_chunks=[1, 3, 4],
        op=[Op.REDUCE, Op.REDUCE, Op.COPY],
        owners=[0] * 4,
    )
    assert predict(schedule, 4.0, Hardware("own", 1.0), mode="asynchronous").seconds == 3 + 4


@pytest.mark.parametrize("mode", ["lock-step", "asynchronous"])
def test_phases_of_one_name_are_summed(mode: str) -> None:
    ring = plan(Mesh("4x4"), "hamiltonian")
    twins = ring.replace(phase_names=("ring", "ring"))
    whole, named = (predict(schedule, 1e6, SLOW, mode=mode) for schedule in (twins, ring))  # type: ignore[arg-type]
    assert whole.seconds == pytest.approx(named.seconds, rel=1e-12)
    assert whole.by_phase == {"ring": pytest.approx(named.seconds, rel=1e-12)}


def test_planning_and_predicting_assume_the_same_machine() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    choice = Auto(1e8, "tpu-v3").choose(mesh)
    assert predict(choice.schedule, 1e8).seconds == pytest.approx(choice.seconds, rel=1e-12)
    assert predict(choice.schedule, 1e8).hardware.name == "tpu-v3"
