"""Measuring: the fit finds what the times were made of, and a measurement is read as any other hardware."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import meshmend as mm
import meshmend.jax as mmj
from meshmend.cost import Hardware, find_hardware
from meshmend.cost.fitting import TimedLoop
from meshmend.errors import ParameterError
from meshmend.jax.engine.fabric import HARDWARE
from meshmend.jax.engine.measure import MOST_STEPS, TARGET_S, _many_steps, _share_network, fit
from meshmend.jax.session import initialize_alone
from meshmend.jax.session.hardware import with_hardware
from meshmend.jax.train.plan import hardware_of
from meshmend.schedule.lanes import count_lanes


def times(start: float, step: float, message: float, rate: float, width: int, lanes: int = 4) -> list[TimedLoop]:
    """What loops would take on hardware of these numbers, by the formula on the page, one loop at a time."""
    found = []
    for n in range(1, lanes + 1):
        for message_bytes in (1024, 2**24):
            for steps in (0, 2, 50):
                bytes_s = message_bytes * n / min(n, width) / rate
                found.append(TimedLoop(steps, n, message_bytes, start + steps * (step + n * message + bytes_s)))
    return found


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_fit_finds_the_numbers_that_times_were_made_of(width: int) -> None:
    fabric = mmj.discover(jax.devices()[:16], shape="4x4")
    on_tpu = replace(fabric, hardware="tpu-v6e-xla")
    found = fit(times(3e-5, 4e-6, 2e-6, 9e10, width), on_tpu, 4, platform="tpu")
    assert found.link_bytes_per_s == pytest.approx(9e10, rel=1e-3)
    assert found.message_s == pytest.approx(2e-6, rel=1e-3)
    assert found.start_s == pytest.approx(3e-5, rel=1e-3)
    # A hop's microsecond is the preset's: it is a part of what a step was seen to take.
    assert found.step_latency_s + found.hop_latency_s == pytest.approx(4e-6, rel=1e-3)
    assert found.hop_latency_s == pytest.approx(1e-6)
    assert found.links_at_once == (None if width == 4 else width)
    assert found.runs_lanes
    assert not found.is_switched


@pytest.mark.parametrize("nothing", [1e-4, 2e-3, 3e-2])
@pytest.mark.parametrize("each", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_a_busy_machine_does_not_make_a_measurement_long(nothing: float, each: float) -> None:
    """A run of nothing may have been held up, so that a few steps take no longer: once that meant 20,000 steps."""
    taken = []

    def run(n: int) -> float:
        taken.append(1e-4 + n * each)
        return taken[-1]

    found = _many_steps(run, nothing)
    assert sum(taken) < 8 * TARGET_S + 4 * nothing
    assert found == MOST_STEPS or TARGET_S / 2 < run(found) < 3 * TARGET_S


def test_noise_of_a_tenth_changes_the_numbers_by_about_as_much() -> None:
    fabric = mmj.discover(jax.devices()[:16], shape="4x4")
    rng = np.random.default_rng(0)
    noisy = [
        replace(loop, seconds=loop.seconds * rng.uniform(0.95, 1.05)) for loop in times(1e-3, 1e-3, 3e-3, 8e7, width=1)
    ]
    found = fit(noisy, fabric, 4, platform="cpu", is_switched=True)
    assert found.link_bytes_per_s == pytest.approx(8e7, rel=0.15)
    assert found.message_s == pytest.approx(3e-3, rel=0.25)
    assert (found.links_at_once, found.is_switched) == (1, True)


def test_a_measurement_is_hardware_like_any_other(tmp_path: Path) -> None:
    fabric = mmj.discover(jax.devices()[:6], shape="2x3")
    file = tmp_path / "measured.json"
    found = mmj.measure(fabric, file=file)
    assert find_hardware(str(file)) == found
    facts = json.loads(file.read_text())["measured"]
    assert (facts["device_kind"], facts["chips"], facts["processes"]) == ("cpu", 6, 1)
    assert facts["versions"]["jax"] == jax.__version__
    assert all(loop["seconds"] > 0 for loop in facts["loops"])
    schedule = mm.plan(fabric.mesh, payload_bytes=4096, hardware=str(file))
    # Priced by hand from the lanes: every permute of a loop runs in each of its steps.
    expected = found.start_s
    for loop in count_lanes(schedule):
        moved = loop.chunks * 4096 / schedule.total_chunks
        each = found.step_latency_s + loop.lanes * found.message_s + moved / found.link_bytes_per_s
        expected += loop.n_steps * each
    assert mm.predict(schedule, 4096, found).seconds == pytest.approx(expected, rel=1e-9)


def test_tiles_are_measured_as_their_chips_and_one_chip_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.jax.engine.measure.TARGET_S", 0.002)  # whatever the numbers: they are not looked at
    fabric = mmj.discover(jax.devices()[:8], shape="2x4")
    assert isinstance(mmj.measure(mmj.tile(fabric, "2x2")), Hardware)
    with pytest.raises(ParameterError, match=r"Nothing can be measured on .*: no cable joins two chips"):
        mmj.measure(mmj.discover(jax.devices()[:1], shape="1x1"))


def test_virtual_devices_that_stand_for_a_described_machine_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job plans for the machine's links, which these devices do not have; what is given goes first."""
    monkeypatch.setattr("meshmend.jax.session.hardware.measure", lambda *_, **__: pytest.fail("measured"))
    file = tmp_path / "mine.yaml"
    file.write_text("meshmend: 1\nshape: 2x2\nhardware: tpu-v6e\n")
    session = initialize_alone(mmj.discover(jax.devices()[:4], machine=file))
    found = with_hardware(session, tmp_path, None, measures=True)
    assert found.fabric.hardware == "tpu-v6e-xla"
    assert hardware_of(found.fabric) == find_hardware("tpu-v6e-xla")
    given = with_hardware(session, tmp_path, "ideal", measures=True)
    assert given.fabric.hardware == find_hardware("ideal")


def test_a_job_measures_once_and_says_so_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round finds the file, whatever is left of the machine, and its timeline says nothing of measuring."""
    monkeypatch.setattr("meshmend.jax.engine.measure.TARGET_S", 0.002)
    chips, found = [(row, column) for row in range(2) for column in range(3)], []
    for left in (chips, chips[:-1]):
        fabric = mmj.discover(jax.devices()[: len(left)], shape="2x3", coords=left)
        found.append(with_hardware(initialize_alone(fabric), tmp_path / "hardware", None, measures=True))
    first, second = ([event["event"] for event in one.timeline.events] for one in found)
    assert first[-2:] == ["measuring", "measure"]
    assert not {"measuring", "measure"} & {*second}
    assert found[0].fabric.hardware == found[1].fabric.hardware != HARDWARE["cpu"]


def test_processes_share_no_links_where_all_of_them_are_in_one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert _share_network(lambda mine: mine)
    assert not _share_network(lambda mine: max(mine, 0.0))  # the other's number is 0
    assert not _share_network(lambda mine: max(mine, 2.0**24 if mine > 0 else -(2.0**24)))
