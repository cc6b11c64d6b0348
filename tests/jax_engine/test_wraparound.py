"""Which axes wrap, per kind of TPU and shape of the slice: the sentences of the documentation, shape by shape."""

from __future__ import annotations

import warnings

import jax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.slices import slice_of
from meshmend.cost import PRESETS
from meshmend.jax.engine.fabric import HARDWARE
from meshmend.machines.wiring import WIRING, documented_axes

PODS = ("TPU v2", "TPU v3")
CUBES = ("TPU v4", "TPU v5", "TPU v5p", "TPU7x")
LITE = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")


CASES = [
    # A whole pod of v2 and of v3 is a torus; what is cut out of it is not, and 32×32 is not a v2.
    *(("TPU v2", shape, wrap) for shape, wrap in (("16x16", "11"), ("8x16", "00"), ("16x32", "00"), ("32x32", "00"))),
    *(("TPU v3", shape, wrap) for shape, wrap in (("32x32", "11"), ("16x32", "00"), ("16x16", "00"), ("4x4", "00"))),
    # Whole cubes of 4×4×4, however many, unless they can be twisted.
    *((kind, shape, "111") for kind in CUBES for shape in ("4x4x4", "8x8x8", "4x4x12", "4x8x12", "16x16x24")),
    *((kind, shape, "000") for kind in CUBES for shape in ("2x4x4", "4x4x2", "2x2x2", "4x4x6", "8x8x10")),
    *((kind, shape, "00") for kind in CUBES for shape in ("2x2", "4x4", "16x16")),
    # An axis of 16, whichever.
    *((kind, shape, wrap) for kind in LITE for shape, wrap in (("16x16", "11"), ("8x16", "01"), ("16x8", "10"))),
    *((kind, shape, "00") for kind in LITE for shape in ("8x8", "4x4", "2x4", "4x8")),
]  # fmt: skip
TWISTED = {"4x4x8": "001", "4x8x4": "010", "4x8x8": "011", "8x8x16": "001", "8x16x16": "011", "12x12x24": "001"}


@pytest.mark.parametrize(("kind", "shape", "wrap"), CASES)
def test_axes_wrap_as_documented(kind: str, shape: str, wrap: str) -> None:
    assert documented_axes(kind, mm.Mesh(shape).shape) == (tuple(digit == "1" for digit in wrap), None)


@pytest.mark.parametrize("kind", CUBES)
@pytest.mark.parametrize(("shape", "wrap"), TWISTED.items())
def test_where_a_torus_may_be_twisted_only_the_long_axes_count_and_it_says_so(kind: str, shape: str, wrap: str) -> None:
    x, y, z = mm.Mesh(shape).shape
    with pytest.warns(UserWarning, match=rf"A {kind} slice of {shape} chips may be a twisted torus.*MESHMEND_WRAP"):
        mesh = mmj.discover(slice_of((x, y, z), kind=kind)).mesh
    assert mesh.wrap == tuple(digit == "1" for digit in wrap)


def test_every_kind_of_tpu_has_a_wiring_and_a_preset_as_xla_drives_it() -> None:
    assert set(WIRING) == {*PODS, *CUBES, *LITE}
    other_names = {"TPU v5": "v5p", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "v7x"}
    for kind in WIRING:
        assert HARDWARE[kind] == f"tpu-{other_names.get(kind, kind.removeprefix('TPU '))}-xla"
        assert HARDWARE[kind] in PRESETS


def test_discover_knows_the_wraps_of_a_slice_with_a_hole() -> None:
    devices = [device for device in slice_of((4, 4, 4), kind="TPU v4") if device.coords != (1, 2, 3)]
    assert mmj.discover(devices).mesh == mm.Mesh("4x4x4", wrap=True, failed=[(1, 2, 3)])
    devices = slice_of((8, 16), kind="TPU v6 lite")
    assert mmj.discover(devices, failed=["2x2@3,14"]).mesh.wrap == (False, True)


def test_what_is_given_goes_before_what_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = slice_of((4, 4, 4), kind="TPU v4")
    assert mmj.discover(devices, wrap=False).mesh.wrap == (False,) * 3
    assert mmj.discover(devices, wrap=[True, False, False]).mesh.wrap == (True, False, False)
    assert mmj.discover(slice_of((2, 4, 4), kind="TPU v4"), wrap=[False, True, True]).mesh.wrap == (False, True, True)
    monkeypatch.setenv("MESHMEND_WRAP", "2")
    assert mmj.discover(devices).mesh.wrap == (False, False, True)
    assert mmj.discover(devices, wrap=True).mesh.wrap == (True,) * 3
    monkeypatch.setenv("MESHMEND_WRAP", "none")
    assert mmj.discover(devices).mesh.wrap == (False,) * 3


def test_a_mesh_that_is_described_by_hand_wraps_as_described() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mmj.discover(jax.devices()[:16], shape="4x4").mesh.wrap == (False, False)
        spots = [(i, j) for i in range(16) for j in range(2)]
        assert mmj.discover(slice_of((16, 2), kind="TPU v5e"), coords=spots).mesh.wrap == (False, False)


def test_a_kind_that_is_not_known_warns_and_does_not_wrap() -> None:
    with pytest.warns(UserWarning, match=r"not known here how TPU v99 devices are wired.*4x4x4 wraps.*wrap=…") as found:
        assert mmj.discover(slice_of((4, 4, 4), kind="TPU v99")).mesh == mm.Mesh("4x4x4")
    assert found[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mmj.discover(slice_of((4, 4, 4), kind="TPU v99"), wrap=True).mesh == mm.Mesh("4x4x4", wrap=True)
