from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest

import meshmend as mm
import meshmend.jax as mmj
from meshmend.errors import MeshError


@dataclass(frozen=True)
class FakeTpu:
    """As much of a TPU device as `discover` looks at."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    device_kind: str = "TPU v3"
    platform: str = "tpu"


def slice_of(shape: tuple[int, ...], *, cores: int = 1, at: tuple[int, ...] = (0, 0, 0)) -> list[FakeTpu]:
    """Devices in JAX's order, x fastest, at an offset in the pod; coordinates have three axes always."""
    x, y, z = (*shape, 1)[:3]
    return [
        FakeTpu((i + at[0], j + at[1], k + at[2]), core)
        for k in range(z)
        for j in range(y)
        for i in range(x)
        for core in range(cores)
    ]


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
        assert fabric.hardware is None
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
