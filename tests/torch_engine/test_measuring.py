"""`mmt.measure`: members agree on what they have measured and plan for it, and the fit finds what made the times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshmend import Mesh
from meshmend.cost import find_hardware
from meshmend.cost.fitting import TimedLoop

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

import meshmend.torch as mmt  # noqa: E402
from meshmend.errors import ParameterError  # noqa: E402
from meshmend.torch.measuring import _longer, _loop, fit  # noqa: E402
from meshmend.torch.slow import lanes_of  # noqa: E402
from torch_engine.processes import free_port, measure_together  # noqa: E402

MESH = Mesh("2x3", failed=["1,2"])


def times(start: float, message: float, byte: float, cores: int, shares_bytes: bool) -> list[TimedLoop]:
    """Loops on a 2x3 mesh, as cores take them that handle so many seconds of messages at once."""
    found = []
    for lanes, messages in ((1, 6.0), (3, 14.0)):
        for size in (256, 2**20):
            for steps in (2, 100):
                moved = messages * size * byte / cores if shares_bytes else size * byte
                seconds = start + steps * (messages * message / cores + moved)
                found.append(TimedLoop(steps, lanes, size, seconds, messages))
    return found


def test_the_fit_finds_cores_that_are_shared_and_links_that_are_not() -> None:
    cores = len(os.sched_getaffinity(0))
    mesh = Mesh("2x3")
    loopback = fit(times(9e-3, 2e-4, 1e-9, cores, True), mesh, n_hosts=1, is_loopback=False)
    assert (loopback.is_switched, loopback.shared_cores, loopback.links_at_once) == (True, cores, None)
    assert loopback.start_s == pytest.approx(9e-3, rel=1e-6)
    assert loopback.message_s == pytest.approx(2e-4, rel=1e-6)
    assert loopback.link_bytes_per_s == pytest.approx(2.5e9, rel=1e-6)  # of what is received in place
    lab = fit(times(9e-3, 2e-4, 1 / 5e6, cores, False), mesh, n_hosts=1, is_loopback=False)
    assert (lab.is_switched, lab.shared_cores, lab.links_at_once) == (False, cores, None)
    assert lab.link_bytes_per_s == pytest.approx(5e6, rel=1e-6)
    # Hosts of their own: a chip pays for its own messages, and drives two of three links at once.
    alone = [TimedLoop(s, n, b, 1e-3 + s * (3e-5 + n * 1e-5 + n * b / min(n, 2) / 1e9), 9.0) for s in (2, 99)
             for n in (1, 2, 3) for b in (256, 2**20)]  # fmt: skip
    hosts = fit(alone, mesh, n_hosts=6, is_loopback=False)
    assert (hosts.is_switched, hosts.shared_cores, hosts.links_at_once) == (False, None, 2)
    assert hosts.link_bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert hosts.step_latency_s == pytest.approx(3e-5, rel=1e-6)


def test_bytes_that_an_idle_link_sends_at_once_do_not_count() -> None:
    def seconds(steps: int, size: int) -> float:
        return 3e-3 + steps * 4e-4 + max(steps * size - 2**15, 0) / 5e6

    loops = []
    for lanes in (1, 2):
        loops += [TimedLoop(steps, lanes, 256, seconds(steps, 256), 4.0 * lanes) for steps in (2, 200)]
        few, many = (TimedLoop(steps, lanes, 2**16, seconds(steps, 2**16), 4.0 * lanes) for steps in (2, 10))
        loops.append(_longer(few, many))
    found = fit(loops, Mesh("2x2"), n_hosts=1, is_loopback=False)
    assert found.link_bytes_per_s == pytest.approx(5e6, rel=0.02)
    assert found.start_s == pytest.approx(3e-3, rel=0.02)


@pytest.mark.parametrize("mesh", [Mesh("2x3"), MESH, Mesh("3x3", wrap=True), Mesh("4")], ids=repr)
def test_a_loop_uses_each_cable_once_at_most_and_sends_on_what_came_before(mesh: Mesh) -> None:
    lanes = lanes_of(mesh, thirds=False)
    for lane in lanes:
        ends = [rank for pair in lane for rank in pair]
        assert len(ends) == len(set(ends))
        assert all(b in mesh.neighbours[a] for a, b in lane)
    schedule = _loop(mesh, lanes, 5)
    came: dict[int, set[tuple[int, int]]] = {}
    for step, src, dst, chunk in zip(schedule.step, schedule.src, schedule.dst, schedule.first_chunk, strict=True):
        assert step == 0 or (int(src), int(chunk)) in came[int(step) - 1]
        came.setdefault(int(step), set()).add((int(dst), int(chunk)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter loops: what is tested is that they end in agreement, not how precise they are."""
    for name, value in {"TARGET_S": 0.02, "REPEAT": 2, "LONGEST": 2**18}.items():
        monkeypatch.setattr(f"meshmend.torch.measuring.{name}", value)


@pytest.mark.usefixtures("quick", "compiler")
def test_all_members_plan_for_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    found = measure_together(MESH, f"tcp://127.0.0.1:{free_port()}", "lo", file)
    for before, hardware, planned_for, total in found:
        assert before == find_hardware("gloo-loopback")
        assert hardware == planned_for == found[0][1]
        assert total == [10.0]
    hardware = found[0][1]
    assert (hardware.is_switched, hardware.shared_cores) == (True, len(os.sched_getaffinity(0)))
    # A step of one message or two: on a busy machine their times do not say which of both costs what.
    assert 1e-6 < hardware.step_latency_s + hardware.message_s < 0.1
    assert find_hardware(str(file)) == hardware
    assert json.loads(file.read_text())["measured"]["mesh"] == str(MESH)


def test_only_groups_of_the_backend_are_measured() -> None:
    with pytest.raises(ParameterError, match="measure needs a default group of the meshmend backend"):
        mmt.measure()
