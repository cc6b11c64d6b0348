from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.slices import FakeTpu, slice_of
from meshmend.cost import PRESETS
from meshmend.errors import MachineError, MeshError
from meshmend.machines import read_machine
from meshmend.machines.machine import through_xla


def coords_in_order(fabric: mmj.Fabric) -> list[tuple[int, ...]]:
    return [device.coords for device in fabric.jax_mesh.devices.reshape(fabric.mesh.n_chips, -1)[:, 0]]


def test_tpu_coordinates_give_mesh_hole_and_order() -> None:
    devices = [d for d in slice_of((4, 6), at=(8, 16, 3)) if d.coords[:2] not in ((9, 18), (9, 19), (10, 18), (10, 19))]
    fabric = mmj.discover(list(reversed(devices)))
    assert fabric.mesh == mm.Mesh("4x6", failed=["2x2@1,2"])
    assert [(x - 8, y - 16) for x, y, _ in coords_in_order(fabric)] == [tuple(c) for c in fabric.mesh.coords.tolist()]
    assert fabric.hardware == "tpu-v3-xla"
    assert (fabric.axis, fabric.core_axis, fabric.axes) == ("chip", None, ("chip",))


def test_a_slice_in_three_dimensions() -> None:
    devices = [d for d in slice_of((4, 4, 8)) if d.coords != (1, 2, 3)]
    assert mmj.discover(devices, wrap=[False, False, True]).mesh == mm.Mesh(
        "4x4x8", wrap=[False, False, True], failed=[(1, 2, 3)]
    )


def test_two_cores_a_chip_sit_side_by_side() -> None:
    fabric = mmj.discover(slice_of((4, 4), cores=2), failed=["2x2@0,0"])
    assert fabric.jax_mesh.devices.shape == (12, 2)
    assert fabric.axes == ("chip", "core")
    assert all([core.core_on_chip for core in chip] == [0, 1] for chip in fabric.jax_mesh.devices)
    assert "2 cores per chip" in repr(fabric)


def test_a_chip_that_lost_one_core_is_a_hole() -> None:
    devices = [d for d in slice_of((2, 4), cores=2) if (d.coords[:2], d.core_on_chip) != ((1, 2), 1)]
    fabric = mmj.discover(devices)
    assert fabric.mesh == mm.Mesh("2x4", failed=[(1, 2)])
    assert fabric.jax_mesh.devices.shape == (7, 2)


def test_a_failed_edge_row_only_makes_the_mesh_smaller_unless_the_shape_is_known() -> None:
    devices = slice_of((3, 4))
    assert mmj.discover(devices).mesh == mm.Mesh("3x4")
    assert mmj.discover(devices, shape="4x4").mesh == mm.Mesh("4x4", failed=["1x4@3,0"])


def test_cpu_devices_stand_for_all_chips_or_for_the_live_ones() -> None:
    devices = jax.devices()
    wanted = mm.Mesh("4x4", failed=["2x2@0,0"])
    for given in (devices[:16], devices[:12]):
        fabric = mmj.discover(given, shape="4x4", failed=["2x2@0,0"])
        assert fabric.mesh == wanted
        assert fabric.jax_mesh.devices.shape == (12,)
        assert fabric.hardware == "cpu-xla"
    assert fabric.jax_mesh.devices[0] is devices[0]
    whole = mmj.discover(devices[:16], shape="4x4", failed=["2x2@0,0"])
    assert whole.jax_mesh.devices[0] is devices[2], "chips (0,0) and (0,1) have failed"


def test_given_coordinates() -> None:
    spots = [(1, 1), (0, 1), (0, 0)]
    fabric = mmj.discover(jax.devices()[:3], coords=spots)
    assert fabric.mesh == mm.Mesh("2x2", failed=[(1, 0)])
    assert [d.id for d in fabric.jax_mesh.devices] == [2, 1, 0]


def test_the_environment_describes_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_SHAPE", "8x8")
    monkeypatch.setenv("MESHMEND_FAILED", "2x2@2,2 7,7")
    monkeypatch.setenv("MESHMEND_WRAP", "1")
    assert mmj.discover().mesh == mm.Mesh("8x8", wrap=[False, True], failed=["2x2@2,2", "7,7"])
    monkeypatch.setenv("MESHMEND_WRAP", "2")
    with pytest.raises(MeshError, match="MESHMEND_WRAP is '2', expected none, all, or axes from 0 to 1"):
        mmj.discover()


def test_what_cannot_be_a_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match=r"do not report coordinates.*MESHMEND_SHAPE=8x8"):
        mmj.discover()
    with pytest.raises(MeshError, match=r"64 devices do not fit .*give 16 .* or 12"):
        mmj.discover(shape="4x4", failed=["2x2@0,0"])
    with pytest.raises(MeshError, match="64 devices and 1 coordinates"):
        mmj.discover(coords=[(0, 0)])
    with pytest.raises(MeshError, match=r"A device is at \(3,3,0\), outside the 4x4 mesh"):
        mmj.discover([FakeTpu((3, 3, 0)), FakeTpu((0, 0, 1))], shape="4x4")
    with pytest.raises(MeshError, match="no devices"):
        mmj.discover([])


def test_shardings_and_devices_agree() -> None:
    fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["1,1"])
    rows = jax.device_put(np.arange(15), fabric.sharding("chip"))
    for shard in rows.addressable_shards:
        assert fabric.jax_mesh.devices[int(shard.data[0])] is shard.device


MINE = """
meshmend: 1
shape: 4x4
wrap: "1"
hardware: tpu-v3
failed: ["2x2@0,0", "2,2-2,3"]
rates: {"3,0-3,1": 1/2}
"""
NAMED = """
meshmend: 1
shape: 2x2
chips: {north: [0, 0], east: [0, 1], south: [1, 1], west: [1, 0]}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_a_machine_brings_its_holes_cables_rates_and_hardware(tmp_path: Path) -> None:
    file = written(tmp_path, MINE)
    devices = jax.devices()
    for machine in (file, str(file), read_machine(file)):
        fabric = mmj.discover(devices[:12], machine=machine)
        assert fabric.mesh == mm.Mesh(
            "4x4",
            wrap=[False, True],
            failed=["0,0", "0,1", "1,0", "1,1"],
            failed_cables=["2,2-2,3"],
            cable_rates={"3,0-3,1": Fraction(1, 2)},
        )
        assert list(fabric.jax_mesh.devices) == devices[:12]
        assert fabric.hardware == "tpu-v3-xla", "as XLA drives it"
    more = mmj.discover(devices[:16], machine=file, failed=["3,3"])
    assert (more.mesh.n_chips, more.mesh.failed_cables) == (11, (((2, 2), (2, 3)),))
    assert list(more.jax_mesh.devices) == [devices[n] for n in (2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14)]


def test_the_environment_names_a_machines_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_MACHINE", str(written(tmp_path, MINE)))
    monkeypatch.setenv("MESHMEND_SHAPE", "4x4")  # both, as `meshmend run` sets them
    devices = jax.devices()[:16]
    assert mmj.discover(devices) == mmj.discover(devices, machine=tmp_path / "mine.yaml")
    assert mmj.discover(devices, shape="2x8").mesh == mm.Mesh("2x8"), "what is given goes first"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_form_that_xla_drives(name: str) -> None:
    through = through_xla(name)
    assert through in PRESETS
    assert name.startswith("tpu-") == through.endswith("-xla") or name == "cpu-xla"


def test_devices_with_coordinates_are_matched_with_the_machine(tmp_path: Path) -> None:
    devices = [d for d in slice_of((4, 4)) if d.coords[:2] != (3, 3)]
    fabric = mmj.discover(list(reversed(devices)), machine=written(tmp_path, MINE))
    gone = {(0, 0), (0, 1), (1, 0), (1, 1), (3, 3)}
    assert coords_in_order(fabric) == [(x, y, 0) for x in range(4) for y in range(4) if (x, y) not in gone]
    assert fabric.mesh.wrap == (False, True), "as described, whatever is documented for the kind of TPU"
    assert fabric.hardware == "tpu-v3-xla", "what the devices say goes first"
    flat = written(tmp_path, "meshmend: 1\nshape: 2x2x1")
    assert mmj.discover(slice_of((2, 2)), machine=flat).mesh == mm.Mesh("2x2x1")


def test_devices_are_matched_by_the_names_of_their_chips(tmp_path: Path) -> None:
    file, devices = written(tmp_path, NAMED), jax.devices()
    fabric = mmj.discover(devices[:4], machine=file, coords=["south", "west", (0, 1), "north"])
    assert list(fabric.jax_mesh.devices) == [devices[n] for n in (3, 2, 1, 0)]
    without = mmj.discover(devices[:3], machine=file, coords=["south", "west", "north"])
    assert without.mesh == mm.Mesh("2x2", failed=["0,1"])


def test_machines_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, devices = written(tmp_path, MINE), jax.devices()
    with pytest.raises(MeshError, match=r"64 devices do not fit Mesh.* of .*mine.yaml: give 16 .* or 12 "):
        mmj.discover(machine=file)
    with pytest.raises(
        MeshError, match=r"A device is at \(7,0\), outside the 4x4 mesh of .*mine.yaml.*another machine"
    ):
        mmj.discover(slice_of((8, 4)), machine=file)
    with pytest.raises(MeshError, match="already says its shape and which axes wrap: leave out wrap"):
        mmj.discover(devices[:12], machine=file, wrap=True)
    with pytest.raises(MeshError, match="leave out shape"):
        mmj.discover(devices[:12], machine=file, shape="4x4")
    with pytest.raises(MeshError, match="'south' is the name of a chip: give the machine"):
        mmj.discover(devices[:1], coords=["south"])
    file = written(tmp_path, NAMED)
    with pytest.raises(MeshError, match=r"names its chips. Say which device is which: .*coords=\['north', 'east', …\]"):
        mmj.discover(devices[:4], machine=file)
    with pytest.raises(MachineError, match=r"no chip is named 'sooth'. Its chips are named south"):
        mmj.discover(devices[:2], machine=file, coords=["sooth", "west"])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        mmj.discover(devices[:2], machine="nowhere.yaml")
