"""A fabric of tiles: which device is where, and what it tells planners and compilers."""

from __future__ import annotations

import jax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from meshmend.errors import ParameterError


def test_devices_of_a_tile_are_its_chips_in_row_major_order() -> None:
    chips = mmj.discover(shape="8x8", failed=["2x2@2,2"])
    fabric = mmj.tile(chips, "4x2", fsdp=4, tensor=2)
    assert fabric.axes == ("tile", "fsdp", "tensor")
    assert fabric.inner_axes == ("fsdp", "tensor")
    assert (fabric.axis, fabric.core_axis, fabric.batch_axes, fabric.devices_per_tile) == ("tile", None, ("tile",), 8)
    assert fabric.mesh == mm.Mesh("2x4", failed=["0,1"], cable_rates={((0, j), (1, j)): 0.5 for j in (0, 2, 3)})
    ids = [[device.id for device in tile] for tile in fabric.jax_mesh.devices.reshape(7, 8)]
    assert ids[0] == [0, 1, 8, 9, 16, 17, 24, 25]
    assert ids[-1] == [38, 39, 46, 47, 54, 55, 62, 63]
    assert repr(fabric).endswith("each a tile of 4x2 cpu chips (fsdp=4, tensor=2), 4 live chips unused)")


def test_axes_have_defaults() -> None:
    chips = mmj.discover(jax.devices()[:16], shape="4x4")
    assert mmj.tile(chips, "2x2").jax_mesh.shape == {"tile": 4, "model": 4}
    single = mmj.tile(chips, "1x1")
    assert single.jax_mesh.shape == {"tile": 16}
    assert single.mesh == chips.mesh
    assert single.compiler_options == {}


def test_what_is_no_tiling_is_refused() -> None:
    chips = mmj.discover(jax.devices()[:16], shape="4x4")
    with pytest.raises(ParameterError, match="sizes multiply to 4, as in model=4; got tensor=2"):
        mmj.tile(chips, "2x2", tensor=2)
    with pytest.raises(ParameterError, match="cannot be called 'tile'"):
        mmj.tile(chips, "2x2", tile=4)
    with pytest.raises(ParameterError, match=r"Cut fabric\.chips instead"):
        mmj.tile(mmj.tile(chips, "2x2"), "2x2")
