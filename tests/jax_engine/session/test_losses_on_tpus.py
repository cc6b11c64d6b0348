"""Compiling ahead where hosts are found from devices, as on TPUs: the loss of each process's chips is a hole.

No TPU is here. What is: devices with coordinates that stand in for a TPU's, libtpu's own devices and cache keys of a
slice, and virtual CPU devices that are given coordinates and hosts, on which a whole job runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.two_processes import run_two
from meshmend.cost import find_hardware
from meshmend.errors import PlanError
from meshmend.jax.compile import for_topology
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.job.run import check_losses
from meshmend.jax.session import Session
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.survivors import fabric_of_hosts, find_fabric, share_losses
from meshmend.jax.state.memory.placement import place_on
from meshmend.launch import Hosts, Launch, Timeline
from meshmend.planning import StepDemands, Workload
from meshmend.quarantine import Quarantined, Suspect

needs_libtpu = pytest.mark.skipif(
    not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'"
)


@dataclass(frozen=True)
class Tpu:
    """A device of a v4 slice whose hosts drive 2×2×1 chips; numbered by its place, x fastest, as libtpu does."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    device_kind: str = "TPU v4"
    platform: str = "tpu"
    core_on_chip: int = 0


def slice_of(x: int, y: int, z: int) -> list[Tpu]:
    return [
        Tpu(i + x * (j + y * k), (i, j, k), i // 2 + x // 2 * (j // 2 + y // 2 * k))
        for k in range(z)
        for j in range(y)
        for i in range(x)
    ]


def session_of(
    devices: Sequence[Any], monkeypatch: pytest.MonkeyPatch, *quarantined: str, process: int = 0, shape: Any = None
) -> Session:
    monkeypatch.setattr(jax, "devices", lambda: list(devices))
    numbers = tuple(range(len({device.process_index for device in devices})))
    entries = tuple(Quarantined(Suspect.parse(name), "test", "by hand", 0.0, 1e12) for name in quarantined)
    fabric = find_fabric(shape, None, numbers, entries)
    launch = Launch("127.0.0.1:1", len(numbers), process)
    facts: dict[str, Any] = {"quarantined": entries, "shape": shape}
    return Session(fabric, launch, None, numbers, Coordination(process, 1), Timeline(None), **facts)


def numbers_in(fabric: mmj.Fabric) -> set[int]:
    return {device.id for device in fabric.jax_mesh.devices.flat}


HOLES = {0: "2x2@0,0", 1: "2x2@2,0", 2: "2x2@0,2", 3: "2x2@2,2"}
"""Which chips of a 4×4 slice each process has."""


def test_the_chips_of_each_process_are_a_hole_and_the_others_stand_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = dict(session_of(slice_of(4, 4, 1), monkeypatch).fabrics_ahead())
    assert {lost: fabric.mesh for lost, fabric in ahead.items()} == {
        lost: mm.Mesh("4x4", failed=[hole]) for lost, hole in HOLES.items()
    }
    assert numbers_in(ahead[0]) == {2, 3, 6, 7, *range(8, 16)}
    assert numbers_in(ahead[3]) == {*range(8), 8, 9, 12, 13}
    first = ahead[1].jax_mesh.devices.flat[ahead[1].mesh.rank((2, 3))]
    assert (first.coords, first.id) == ((2, 3, 0), 14)


def test_a_slice_that_shrinks_is_the_one_that_the_restarted_job_will_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts one behind the other, which do not wrap: an end makes it shorter, and the middle cuts it in two."""
    devices = slice_of(2, 2, 4)
    ahead = dict(session_of(devices, monkeypatch).fabrics_ahead())
    assert {lost: fabric.mesh for lost, fabric in ahead.items()} == {0: mm.Mesh("2x2x3"), 3: mm.Mesh("2x2x3")}
    assert numbers_in(ahead[0]) == set(range(4, 16))
    # With the shape that the script gives, the mesh keeps its size, also after the restart.
    ahead = dict(session_of(devices, monkeypatch, shape="2x2x4").fabrics_ahead())
    assert ahead[3].mesh == mm.Mesh("2x2x4", failed=["2x2x1@0,0,3"])


def test_quarantine_and_tiles_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(slice_of(4, 4, 1), monkeypatch, "0,3", "3,0-3,1")
    ahead = {lost: fabric.mesh for lost, fabric in session.fabrics_ahead()}
    assert ahead == {
        lost: mm.Mesh("4x4", failed=[hole, *([] if lost == 2 else ["0,3"])], failed_cables=["3,0-3,1"][: lost != 1])
        for lost, hole in HOLES.items()
    }
    session = session_of(slice_of(4, 4, 1), monkeypatch, "0,3").in_tiles("2x1")
    chips_of = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}, 2: {8, 9, 12, 13}, 3: {10, 11, 14, 15}}
    tiles = {lost: numbers_in(fabric) for lost, fabric in session.fabrics_ahead()}
    assert tiles == {lost: set(range(16)) - {12, 13} - chips for lost, chips in chips_of.items()}
    assert list(session_of(slice_of(4, 4, 1), monkeypatch).in_tiles("3x3").fabrics_ahead()) == [], (
        "no tile is whole after a loss"
    )


def test_a_planner_that_does_not_serve_a_loss_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(planner: str, *quarantined: str, tile: str | None = None, **of_launch: Any) -> None:
        session = session_of(slice_of(4, 4, 1), monkeypatch, *quarantined)
        launch = replace(session.launch, **{"hosts": (0, 1, 2, 3), **of_launch})
        session = replace(session if tile is None else session.in_tiles(tile), launch=launch)
        check_losses(session, StepDemands(Workload(1 << 20), find_hardware("tpu-v4-xla"), tile, planner=planner))

    for planner in ("hamiltonian", "row-pairs", "weave", "auto"):
        check(planner)  # holes are whole 2×2 blocks
    message = (
        r"two-color cannot plan for 4x4 minus 2x2@0,0: it needs every row.* The loss of host 0 would leave this mesh "
        r"and end the job, .* Use planner='auto', .* Planners that can serve this mesh: hamiltonian,"
    )
    with pytest.raises(PlanError, match=message) as found:
        check("two-color")
    assert found.value.mesh_name == "4x4 minus 2x2@0,0"
    check("two-color", least=4)  # without the lost host the launcher does not start it again
    check("two-color", hosts=())  # nobody knows what restarts it
    check("hamiltonian", tile="1x1")
    with pytest.raises(PlanError, match=r"hamiltonian cannot plan for 2x2 minus .* The loss of host 0"):
        check("hamiltonian", tile="2x2")  # a host's chips are a tile: one of four is left out of a 2×2 block
    check("hamiltonian", "0,3")  # it does not serve the mesh as it is, which planning will say


def test_few_losses_of_many_are_spread_from_the_first_host_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(slice_of(8, 8, 1), monkeypatch)
    assert [lost for lost, _ in session.fabrics_ahead()] == list(range(16))
    assert [lost for lost, _ in session.fabrics_ahead(99)] == list(range(16))
    assert [lost for lost, _ in session.fabrics_ahead(4)] == [0, 5, 10, 15]


def test_process_0_compiles_and_only_where_devices_report_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = slice_of(4, 4, 1)
    assert list(session_of(whole, monkeypatch, process=1).fabrics_ahead()) == []
    assert list(session_of(whole[:2] + whole[4:6], monkeypatch).fabrics_ahead()) == [], "one host: nothing is left"
    monkeypatch.undo()
    session = Session(
        mmj.discover(jax.devices()[:4], shape="2x2"),
        Launch("a:1", 1, 0),
        None,
        (0,),
        Coordination(0, 1),
        Timeline(None),
    )
    assert list(session.fabrics_ahead()) == []


@pytest.mark.parametrize("tile", [None, "2x2"])
def test_each_process_compiles_for_its_share_and_has_a_device_in_it(
    tile: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    racks = ("left", "left", "right", "right")
    found: list[tuple[int | str, mm.Mesh]] = []
    for process in range(4):
        session = session_of(slice_of(4, 4, 1), monkeypatch, process=process)
        session = replace(session, fabric=replace(session.fabric, domains=racks))
        for lost, fabric in (session if tile is None else session.in_tiles(tile)).fabrics_ahead(is_divided=True):
            chips = fabric.chips if isinstance(fabric, TiledFabric) else fabric
            assert process in {device.process_index for device in fabric.jax_mesh.devices.flat}
            assert chips.domains == racks, "processes keep their numbers"
            found.append((lost, chips.mesh))
    assert len(found) == 6
    assert {lost: mesh for lost, mesh in found if isinstance(lost, int)} == {
        lost: mm.Mesh("4x4", failed=[hole]) for lost, hole in HOLES.items()
    }
    left = {lost: mesh.n_chips for lost, mesh in found if isinstance(lost, str)}
    assert left == {"left": 8, "right": 8}


def test_each_process_has_its_share_of_the_losses_of_numbered_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors are numbered anew, so the last process compiles for nothing: no device of it stands in for them."""
    devices, hosts = slice_of(4, 4, 1), Hosts.of("4x4", "2x2")
    monkeypatch.setattr(jax, "devices", lambda: devices)
    whole = replace(fabric_of_hosts(hosts, [0, 1, 2, 3], devices), domains=("a", "a", "b", ""))
    asked = Session(whole, Launch("127.0.0.1:1", 4, 0), hosts, (0, 1, 2, 3), Coordination(0, 1), Timeline(None))
    undivided = {lost: fabric.mesh for lost, fabric in asked.fabrics_ahead()}
    assert list(undivided) == [0, 1, 2, 3, "a"], "of a domain of one host, nothing more is lost than the host"
    found = {}
    for process in range(4):
        session = replace(asked, launch=Launch("127.0.0.1:1", 4, process))
        shares = dict(session.fabrics_ahead(is_divided=True))
        for fabric in shares.values():
            assert process in {device.process_index for device in fabric.jax_mesh.devices.flat}
        found[process] = {lost: (fabric.mesh, fabric.domains) for lost, fabric in shares.items()}
    assert {process: list(shares) for process, shares in found.items()} == {0: [1], 1: [2, "a"], 2: [0, 3], 3: []}
    assert {lost: mesh for shares in found.values() for lost, (mesh, _) in shares.items()} == undivided
    assert undivided["a"] == mm.Mesh("4x4", failed=["2x4@0,0"])
    assert found[1]["a"][1] == ("b", "")
    assert found[2][3][1] == ("a", "a", "b")


def taken(n: int, n_domains: int) -> list[list[int]]:
    """All single losses of so many processes, and those of domains that lie side by side."""
    bounds = np.linspace(0, n, n_domains + 1).astype(int)
    domains = [list(range(first, last)) for first, last in pairwise(bounds)]
    return [[process] for process in range(n)] + [lost for lost in domains if 1 < len(lost) < n]


@given(st.integers(2, 2240), st.integers(1, 300), st.booleans())
@example(2, 1, True)
@example(2240, 280, True)
@example(2240, 280, False)
def test_every_loss_is_compiled_for_once_by_one_that_has_a_device(n: int, n_domains: int, are_renumbered: bool) -> None:
    """With survivors that are numbered anew, stand-ins are the devices of the first processes."""
    losses = taken(n, min(n, n_domains))
    who = share_losses(losses, n, are_renumbered=are_renumbered)
    assert len(who) == len(losses), "each has one process"
    for lost, process in zip(losses, who, strict=True):
        assert process in range(n - len(lost) if are_renumbered else n)
        spared = {*range(n - len(lost) if are_renumbered else n)}.difference(lost)
        assert process not in lost or not spared, "what a lost host has in a folder of its own is lost with it"
    assert max(Counter(who[:n]).values()) <= 2, "all single losses are covered in the time of two"
    assert max(Counter(who[n:]).values(), default=0) <= 2


def test_shares_of_a_few_hosts_are_as_by_hand() -> None:
    assert share_losses([[0], [1]], 2, are_renumbered=True) == [0, 0]
    assert share_losses([[0], [1]], 2, are_renumbered=False) == [1, 0]
    assert share_losses([[0], [1], [2], [3]], 4, are_renumbered=True) == [2, 0, 1, 2]
    assert share_losses([[0], [1], [2], [3]], 4, are_renumbered=False) == [3, 0, 1, 2]


def test_whom_hosts_give_their_copies_does_not_depend_on_their_numbers() -> None:
    """So the program that cuts copies is found, whether processes are numbered anew after a loss or not."""
    for hosts in ([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1], [1, 0, 2, 1, 0, 2]):
        kept, renumbered = np.array([0, 2, 5]), [int(n) for n in np.array([0, 2, 5])[hosts]]
        assert set(renumbered) <= set(kept.tolist())
        mesh = mm.Mesh([1, len(hosts)])
        named = [place_on(tuple(one), mesh, n_blocks=n) for one in (renumbered, hosts) for n in (1, 2)]
        assert [one.kept.tolist() for one in named[:2]] == [one.kept.tolist() for one in named[2:]]
        assert [one.shares.tolist() for one in named[:2]] == [one.shares.tolist() for one in named[2:]]


def run(*words: str, cwd: Path) -> Any:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16",
        "MESHMEND_MEMORY": str(cwd / "memory"),
    }
    command = [sys.executable, "-W", "ignore", "-m", "jax_engine.session.job_of_tpus", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


PROGRAMS = ("jit_init", "jit_step", "jit_cut", "jit_vote")


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "2x2"])
def test_a_job_finds_its_programs_after_the_loss_of_a_host(side: str, tmp_path: Path) -> None:
    """A whole job on CPU devices with coordinates and hosts; it compiles ahead, and goes on without host 2."""
    before = run("job", "none", side, cwd=tmp_path)
    assert before["ahead"] == [0, 1, 2, 3]
    assert before["looked_up"] == dict.fromkeys((*PROGRAMS, "jit_check"), False)
    after = run("job", "2", side, cwd=tmp_path)
    assert (after["source"], after["resumed"]) == ("memory", before["step"])
    assert after["looked_up"] == dict.fromkeys(PROGRAMS, True)


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "lost", "hole", "side"),
    [
        pytest.param("v6e:4x4", 1, "2x2@2,0", "none", marks=pytest.mark.slow),
        pytest.param("v6e:4x4", 0, "2x2@0,0", "2x2", marks=pytest.mark.slow),
        pytest.param("v4:2x2x4", 3, "2x2x1@0,0,3", "none", marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", 5, "2x2x1@2,0,1", "none", marks=pytest.mark.slow),
    ],
)
def test_libtpus_cache_keys_are_those_of_the_restarted_job(
    topology: str, lost: int, hole: str, side: str, tmp_path: Path
) -> None:
    """By the compiler's keys, which have devices' numbers and the slice's topology: what is looked up is there."""
    assert run("ahead", topology, str(lost), side, cwd=tmp_path) == {"ahead": [lost]}
    after = run("after", topology, hole, side, cwd=tmp_path)
    assert after["looked_up"] == [
        [name, True] for name in ("jit_init", "jit_step", "jit_cut", "jit_gather_rows", "jit_vote")
    ]


@pytest.mark.slow
def test_a_process_compiles_for_the_loss_of_its_own_host() -> None:
    """Then none of the devices is its own. Two real processes, of which the first compiles for the second's."""
    first, second = run_two("jax_engine.session.loss_of_own_host", timeout_s=300)
    assert first == {"replicated": True, "fused": True, "two-phase": True}
    assert second == {}
