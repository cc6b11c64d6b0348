"""Hosts, launchers and timelines: what a restart stands on, before JAX is up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.session.host_cases import of_hosts
from meshmend.errors import RestartError
from meshmend.jax.session import initialize_alone
from meshmend.jax.session.session import check_hosts, check_preloaded
from meshmend.jax.session.single_process import is_launched
from meshmend.jax.session.survivors import check_connected, fabric_of_hosts
from meshmend.launch import Hosts, Launch, Timeline, read_launch, read_timeline
from meshmend.launch import timeline as timelines
from meshmend.launch.local import worker_environment
from meshmend.launch.timeline import process_started_at
from meshmend.launch.warm import jax_settings


def test_hosts_tile_the_mesh_and_their_chips_are_all_of_it() -> None:
    hosts = Hosts.of("8x8", "4x2")
    chips = [chip for number in range(len(hosts)) for chip in hosts.chips(number)]
    assert len(hosts) == 8
    assert sorted(chips) == [(row, column) for row in range(8) for column in range(8)]
    assert hosts.chips(5) == [(4, 2), (4, 3), (5, 2), (5, 3), (6, 2), (6, 3), (7, 2), (7, 3)]
    assert [hosts.number(host_index) for host_index in (5, "5", "4,2", (4, 2))] == [5, 5, 5, 5]


@settings(max_examples=60)
@given(data=st.data())
def test_the_largest_group_of_hosts_is_the_largest_group_of_their_chips(data: st.DataObject) -> None:
    """On tori too. Oracle: the connected parts of the chips' own mesh, in which the other hosts have failed."""
    tile = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    grid = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    wrap = data.draw(st.tuples(st.booleans(), st.booleans()))
    hosts = Hosts.of(tuple(n * h for n, h in zip(grid, tile, strict=True)), tile, wrap=wrap)
    here = data.draw(st.sets(st.sampled_from(range(len(hosts))), min_size=1))
    gone = [region for number, region in enumerate(hosts.tiles) if number not in here]
    mesh = mm.Mesh(hosts.shape, wrap=wrap, failed=gone)
    group_of = {number: int(mesh.component_of[mesh.rank(hosts.tiles[number].at)]) for number in here}
    largest = max(Counter(group_of.values()).values())
    found = hosts.largest_group(here)
    assert len(found) == largest
    assert {group_of[number] for number in found} == {group_of[found[0]]}
    assert Hosts.read(str(hosts)) == hosts


def test_a_description_says_which_axes_wrap(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text('meshmend: 1\nshape: 4x8\nwrap: "1"')
    hosts = Hosts.described(None, "4x2", machine=file)
    assert hosts == Hosts.described("4x8", "4x2", wrap="1") == Hosts.of("4x8", "4x2", wrap=[False, True])
    assert hosts.largest_group([0, 2, 3]) == (0, 2, 3)
    with pytest.raises(RestartError, match="describes a 4x8 mesh, got the shape 8x8"):
        Hosts.described("8x8", "4x2", machine=file)
    with pytest.raises(RestartError, match="The shape of the machine is not known"):
        Hosts.described(None, "4x2")


@pytest.mark.parametrize(
    ("shape", "tile", "host_index", "message"),
    [
        ("8x8", "3x2", 0, "Hosts of 3x2 chips do not tile a 8x8 mesh"),
        ("8x8", "4x2x1", 0, "Hosts of 4x2x1 chips do not tile"),
        ("8x8", "4x2", 8, "There is no host 8: 8x8 in hosts of 4x2 has hosts 0 to 7"),
        ("8x8", "4x2", "4,1", r"No host of 8x8 in hosts of 4x2 begins at \(4,1\)"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(shape: str, tile: str, host_index: Any, message: str) -> None:
    with pytest.raises(RestartError, match=message):
        Hosts.of(shape, tile).number(host_index)


def test_a_host_with_too_few_devices_is_named() -> None:
    with pytest.raises(RestartError, match="Host 3 has 4 devices, expected 8") as caught:
        Hosts.of("8x8", "4x2").check_devices({1: 8, 3: 4})
    assert caught.value.host == 3


@pytest.mark.parametrize(
    ("coordinator", "n", "process", "message"),
    [
        ("h0:7", 3, 3, "This is process 3 of 3, expected a number from 0 to 2"),
        ("h0:7", 3, -1, "This is process -1 of 3"),
        ("h0", 2, 0, "The coordinator is 'h0', expected an address and a port"),
        (":7", 2, 0, "The coordinator is ':7'"),
        ("h0:70000", 2, 0, "expected an address and a port from 1 to 65535"),
        ("h0:seven", 2, 0, "The coordinator is 'h0:seven'"),
    ],
)
def test_launches_that_make_no_sense_are_refused(coordinator: str, n: int, process: int, message: str) -> None:
    with pytest.raises(RestartError, match=message):
        Launch(coordinator, n, process)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_have_not_joined_do_not_train_each_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHMEND_ROUND", raising=False)
    assert not is_launched()
    monkeypatch.setenv(name, "4")
    with pytest.raises(RestartError, match=f"{name}=4: this is one of several processes, but they have not joined"):
        initialize_alone()
    with pytest.raises(RestartError, match="No launcher is recognised"):
        read_launch()
    monkeypatch.setenv(name, "1")
    assert initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2")).launch.n_processes == 1


def test_everyone_must_describe_one_machine_and_another_host() -> None:
    good = [{"machine": "m", "host": 0}, {"machine": "m", "host": 2}]
    assert check_hosts(good) == (0, 2)
    with pytest.raises(RestartError, match="Processes 1 and 2 both say that they are host 2"):
        check_hosts([*good, {"machine": "m", "host": 2}])
    with pytest.raises(RestartError, match="different machines: m; n"):
        check_hosts([*good, {"machine": "n", "host": 1}])
    with pytest.raises(RestartError, match=r"are on hosts 2, 0\. Number them in the order of their hosts"):
        check_hosts(good[::-1])
    with pytest.raises(RestartError, match="has no chips assigned"):
        check_hosts([*good, {"error": "Process 2 has no chips assigned."}])


def test_the_fabric_has_the_missing_hosts_as_its_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = of_hosts(56, 8, monkeypatch)
    fabric = fabric_of_hosts(Hosts.of("8x8", "4x2"), [0, 1, 2, 3, 4, 6, 7], devices)
    assert fabric.mesh == mm.Mesh("8x8", failed=["4x2@4,2"])
    # Host 6 begins at (4,4), and is the sixth process: its first device sits there.
    assert fabric.jax_mesh.devices.flat[fabric.mesh.rank((4, 4))] == devices[40].device


def test_what_the_launcher_knows_of_the_machine_reaches_the_fabric(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wrap, single failed chips, slow cables and hardware, in the environment as `meshmend run --machine` sets it."""

    devices = of_hosts(24, 8, monkeypatch)
    ring = Hosts.of("4x8", "4x2", wrap=[False, True])
    fabric = fabric_of_hosts(ring, [0, 2, 3], devices)
    assert fabric.mesh == mm.Mesh("4x8", wrap=[False, True], failed=["4x2@0,2"])
    check_connected(fabric, [0, 2, 3])
    file = tmp_path / "mine.yaml"
    file.write_text('meshmend: 1\nshape: 4x8\nwrap: "1"\nhardware: tpu-v6e\nfailed: ["3,7"]\nrates: {"0,0-1,0": 1/2}')
    environment = worker_environment(ring, 2, None, file)
    assert environment["MESHMEND_WRAP"] == "1"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fabric = fabric_of_hosts(ring, [0, 2, 3], devices)
    assert fabric.mesh == mm.Mesh(
        "4x8", wrap=[False, True], failed=["4x2@0,2", "3,7"], cable_rates={"0,0-1,0": Fraction(1, 2)}
    )
    assert fabric.hardware == "tpu-v6e-xla"


def test_survivors_that_are_cut_apart_are_named() -> None:
    chips = [chip for host in (0, 3) for chip in Hosts.of("4x4", "2x2").chips(host)]
    fabric = mmj.discover(jax.devices()[:8], shape="4x4", coords=chips)
    message = (
        r"The survivors \(hosts 0, 3 of 4x4 minus 2x2@0,2, 2x2@2,0\) form 2 disconnected groups: "
        r"no cable leads from \(0,0\) to \(2,2\)"
    )
    with pytest.raises(RestartError, match=message):
        check_connected(fabric, (0, 3))


def test_what_meshmend_run_provides_is_read() -> None:
    facts = {"number": 4, "coordinator": "10.0.0.7:5000", "hosts": [0, 2, 3], "process": 1}
    env = {"MESHMEND_ROUND": json.dumps(facts), "MESHMEND_JOB": "train", "RANK": "7"}
    launch = Launch("10.0.0.7:5000", 3, 1, 4, "meshmend run", "train", hosts=(0, 2, 3))
    assert read_launch(env) == launch
    assert read_launch(env | {"MESHMEND_LEAST_HOSTS": "2"}) == replace(launch, least=2)
    with pytest.raises(RestartError, match="expected what `meshmend run` puts there"):
        read_launch({"MESHMEND_ROUND": "{}"})


def test_a_setting_of_jax_that_comes_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    monkeypatch.setenv("MESHMEND_PRELOADED", json.dumps(jax_settings()))
    check_preloaded()
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    with pytest.raises(
        RestartError, match="The script sets JAX_ENABLE_X64, but `meshmend run` had imported JAX before"
    ):
        check_preloaded()
    monkeypatch.delenv("MESHMEND_PRELOADED")
    check_preloaded()


def test_a_timeline_survives_its_writer_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "timeline.jsonl"
    first = Timeline(path, host=3)
    first.note("step", number=1)
    with first.timed("plan") as facts:
        facts["from_cache"] = True
    first.flush()
    path.write_text(path.read_text() + '{"at": 1, "event": "ste')
    events = read_timeline(path)
    assert [event["event"] for event in events] == ["step", "plan"]
    assert events[0]["host"] == 3
    assert events[1]["from_cache"] is True
    assert events[1]["seconds"] >= 0
    assert read_timeline(tmp_path / "none") == []
    # The next round goes on in the same file, and the torn line spoils only itself.
    (again := Timeline(path, host=3)).note("step", number=2)
    again.flush()
    assert [event["event"] for event in read_timeline(path)] == ["step", "plan", "step"]


def test_a_timeline_is_bounded_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.launch.timeline.MAX_EVENTS", 100)
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path, max_bytes=20_000, host=3)
    for number in range(2000):
        timeline.note("other", number=number)
        timeline.flush()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000
    assert [event["number"] for event in timeline.events] == list(range(1900, 2000))
    read = [event["number"] for event in read_timeline(path)]
    # What is there is the newest part without a gap, and more than a third of the room is used.
    assert read == list(range(read[0], 2000))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 20_000 / 3
    names = [f"timeline.jsonl{end}" for end in ("", ".lock")]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    timeline.note("huge", what="x" * 1_000_000)
    timeline.flush()
    huge = read_timeline(path)[-1]
    assert (huge["event"], huge["left_out_bytes"] > 1_000_000) == ("huge", True)


def test_a_timeline_that_cannot_be_written_does_not_stop_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timeline = Timeline(tmp_path / "file" / "timeline.jsonl")
    timeline.note("step", number=1)
    with pytest.warns(UserWarning, match=r"cannot be written: .*Not a directory.* The job continues without it"):
        timeline.flush()
    timeline.note("step", number=2)
    timeline.flush()  # said once
    assert [event["number"] for event in timeline.events] == [1, 2]


def test_a_timeline_on_a_disk_that_hangs_does_not_stop_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back, opened = threading.Event(), timelines._open
    timeline, path = Timeline(tmp_path / "timeline.jsonl"), tmp_path / "timeline.jsonl"
    timeline.note("step", number=0)
    timeline.flush()
    monkeypatch.setattr(timelines, "_open", lambda path: (back.wait(), opened(path))[1])
    monkeypatch.setattr(timelines, "HUNG_AFTER_S", 1.5)
    begun = time.monotonic()
    for number in range(1, 40):
        timeline.note("step", number=number)  # none of them waits
    assert time.monotonic() - begun < 1.5
    with pytest.warns(UserWarning, match=r"cannot be written: no answer within 1\.5 s.* The job continues without it"):
        timeline.flush(3)
    assert [event["number"] for event in timeline.events] == list(range(40))
    assert [event["number"] for event in read_timeline(path)] == [0]
    back.set()
    timeline.flush(60)
    assert [event["number"] for event in read_timeline(path)] == list(range(40)), "what was left is written, in order"


def test_the_thread_that_writes_a_timeline_ends_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "IDLE_S", 0.01)
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for number in range(3):
        timeline.note("step", number=number)
        timeline.flush()
        writer = timeline._writer
        if writer is not None:
            writer.join(60)
        assert timeline._writer is None
    # At the end of the interpreter no thread can be started.
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("shutdown")).__next__())
    timeline.note("step", number=3)
    timeline.flush()
    assert [event["number"] for event in read_timeline(tmp_path / "timeline.jsonl")] == [0, 1, 2, 3]


def test_many_threads_write_one_timeline(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl", max_bytes=100_000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: timeline.note("step", number=number), range(400)))
    timeline.flush(60)
    assert sorted(event["number"] for event in read_timeline(tmp_path / "timeline.jsonl")) == list(range(400))


def test_a_process_knows_when_it_was_started() -> None:
    before = time.time()
    code = "from meshmend.launch.timeline import process_started_at; print(process_started_at())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before - 0.1 <= float(done.stdout) <= time.time()
    assert process_started_at() < before


def test_importing_the_engine_brings_neither_orbax_nor_grain() -> None:
    code = (
        "import sys, meshmend.jax, meshmend.jax.session, meshmend.jax.state, meshmend.jax.compile; "
        "print([m for m in ('orbax', 'grain', 'torch', 'tensorstore') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
