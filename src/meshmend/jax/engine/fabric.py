"""Finding the hole: the mesh, its failures and the order of the chips, from JAX's devices.

A TPU device reports its coordinates (x, y, z). They are the mesh's axes in that order: axis 0 is x, axis 1 is y,
axis 2 is z, so that the slice `v3:16x32` is `Mesh("16x32")` and the hole `4x2@6,8` is x from 6 to 9, y from 8 to 9.
A last axis of one chip is left out. Devices say nothing about cables: axes wrap as documented for the kind of TPU
(`meshmend.machines.wiring` has the table and its sources), or as `discover(…, wrap=…)` says. This has not been tried on
a TPU. On Cloud TPU a slice comes up whole or not at all, so the only holes there today are healthy chips that are left
out of `devices`. Elsewhere (virtual CPU devices) the mesh is described by arguments or by the environment:
`MESHMEND_SHAPE=8x8`, `MESHMEND_FAILED="2x2@2,2 5,7"` and `MESHMEND_WRAP=0,1`; or by the machine's own description,
given as an argument or in `MESHMEND_MACHINE=mine.yaml`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.cost import Hardware
from meshmend.errors import MeshError, name_chip
from meshmend.jax.engine.compiler_options import options_for
from meshmend.machines import Machine
from meshmend.machines.read import as_machine
from meshmend.machines.wiring import WIRING, documented_axes
from meshmend.topology import Mesh, Region, name_shape, parse_wrap

CHIP_AXIS = "chip"
CORE_AXIS = "core"

HARDWARE = {"cpu": "cpu-xla"} | {kind: one.hardware for kind, one in WIRING.items()}
"""Hardware presets, as seen through XLA, by JAX's `device_kind`."""


@dataclass(frozen=True)
class Fabric:
    """The live chips as meshmend and as JAX see them. Made by `discover`.

    `jax_mesh` has an axis "chip" in order of rank and, where chips have two cores, an axis "core".
    """

    mesh: Mesh
    jax_mesh: jax.sharding.Mesh
    hardware: str | Hardware | None
    domains: tuple[str, ...] = field(default=(), kw_only=True)
    """The failure domain of each process's host, where that is known; "" for a host that names none."""

    @property
    def axis(self) -> str:
        """Name of the axis over chips, for `lax` collectives and partition specs."""
        return CHIP_AXIS

    @property
    def core_axis(self) -> str | None:
        """Name of the axis over the cores of a chip, None where a chip is one device."""
        return CORE_AXIS if CORE_AXIS in self.jax_mesh.axis_names else None

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, over every device."""
        return tuple(str(name) for name in self.jax_mesh.axis_names)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that a feed splits its batches by."""
        return self.axes

    @property
    def n_parts(self) -> int:
        """Parts of a batch, each differentiated alone: one per device, or one per tile."""
        return math.prod(self.jax_mesh.shape[axis] for axis in self.batch_axes)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes inside a tile, over which a model may be split; none where chips are not cut into tiles."""
        return ()

    @property
    def devices_per_tile(self) -> int:
        """Devices of a tile, its chips times their cores, each with shards of its own; 1 where there are no tiles."""
        return math.prod(self.jax_mesh.shape[axis] for axis in self.inner_axes)

    @property
    def n_chips(self) -> int:
        """Chips that compute."""
        return self.mesh.n_chips

    @property
    def platform(self) -> str:
        """Platform of the devices: "tpu", "cpu", …."""
        return str(self.jax_mesh.devices.flat[0].platform)

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options for `jax.jit(…, compiler_options=…)` that every program on this fabric needs; `jit` gives them.

        They allow more than five lanes in flight at once, for chips with six links (v4, v5p), and XLA's own
        collectives among a part of the chips (v6e). None but on TPUs. `compiler_options.py` says why each is there.
        """
        return options_for(self.platform, overlap=False)

    @property
    def overlap_options(self) -> dict[str, str]:
        """`compiler_options`, and those with which the TPU's scheduler puts computing beside unrolled permutes.

        For steps in which communication is to hide behind computing, as in `scan_layers`.
        """
        return options_for(self.platform, overlap=True)

    def jit(self, function: Callable[..., Any], *, overlap: bool = False, **settings: Any) -> jax.stages.Wrapped:
        """Return `jax.jit(function, **settings)` with `compiler_options`, or with `overlap` the `overlap_options`.

        Compile every program that runs on this fabric with it. Inside a function that JAX is tracing it is a part of
        that function's program, whose own options count.

        >>> import jax, jax.numpy as jnp
        >>> fabric = discover(jax.devices()[:4], shape="2x2")
        >>> fabric.jit(jnp.sum)(jnp.ones(3))
        Array(3., dtype=float32)
        """
        options = self.overlap_options if overlap else self.compiler_options
        return jax.jit(function, compiler_options=None if _is_tracing() else options or None, **settings)

    def sharding(self, *axes: str | tuple[str, ...] | None) -> jax.sharding.NamedSharding:
        """Return the sharding that splits an array's axes by axes of this fabric; none means one copy per device."""
        return jax.sharding.NamedSharding(self.jax_mesh, jax.sharding.PartitionSpec(*axes))

    def __repr__(self) -> str:
        cores = f", {self.jax_mesh.devices.shape[1]} cores per chip" if self.core_axis else ""
        return f"Fabric({self.mesh!r} of {self.platform}{cores}, hardware {self.hardware})"


def _is_tracing() -> bool:
    """Whether JAX is tracing a function: what is jitted now becomes a part of that function's program."""
    # Putting a number somewhere compiles nothing, as any arithmetic would, in each process that restarts.
    return isinstance(jax.device_put(np.int32(0)), jax.core.Tracer)


def discover(
    devices: Sequence[Any] | None = None,
    *,
    machine: Machine | Path | str | None = None,
    shape: Sequence[int] | str | None = None,
    failed: Iterable[Region | Sequence[int] | str] | None = None,
    coords: Sequence[Sequence[int] | str] | None = None,
    wrap: bool | Sequence[bool] | None = None,
) -> Fabric:
    """Return the fabric that `devices` (by default all of JAX's) form: mesh, holes, device order.

    Where devices report their coordinates (TPU) nothing else is needed: chips that are missing from the bounding box
    are the hole, and `failed` removes more. `coords` gives one coordinate per device where they report none. With
    `shape` alone, devices are laid out in row-major order. If there is one for each chip, the failed ones are not used;
    if there is one for each live chip, the order is that of live chips. Arguments that are not given come from the
    environment: MESHMEND_SHAPE, MESHMEND_FAILED, MESHMEND_WRAP, MESHMEND_MACHINE.

    `machine`, or the file that describes it (`meshmend.machines.read_machine`), takes the place of `shape` and `wrap`.
    It brings its failed chips, its failed and slow cables. It also brings its hardware, as XLA drives it, where the
    devices' kind says none or where virtual CPU devices stand for its chips. Chips without a device are a hole as well.
    Where devices report no coordinates and the machine's chips have names, `coords` says which device is which: a name
    or a coordinate for each.

    `wrap` says which axes wrap. The default is documented for the kind of TPU and the shape of the slice
    (`meshmend.machines.wiring`); a kind that is not known warns and does not wrap. It is none where only `coords` or
    `shape` describes the mesh. The devices must span the slice: for a part of one give `wrap`.

    >>> import jax
    >>> discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"]).mesh
    Mesh(4x4 minus 2x2@0,0: 12 of 16 chips)
    """
    found = list(jax.devices() if devices is None else devices)
    if not found:
        raise MeshError("There are no devices to build a fabric from.")
    if machine is not None and (shape is not None or wrap is not None):
        said = "wrap" if shape is None else "shape"
        raise MeshError(f"A machine already says its shape and which axes wrap: leave out {said}.")
    if machine is None and shape is None and wrap is None:
        machine = os.environ.get("MESHMEND_MACHINE")
    if shape is None:
        shape = os.environ.get("MESHMEND_SHAPE")
    holes = list(os.environ.get("MESHMEND_FAILED", "").split() if failed is None else failed)
    if machine is not None:
        return _on_machine(found, as_machine(machine), holes, coords)
    where = _coordinates(found, coords)
    kind = None if where is None or coords is not None else str(found[0].device_kind)
    if where is not None:
        mesh = _bounding_mesh(where, shape, holes, wrap, kind)
    elif shape is not None:
        mesh = Mesh(shape, wrap=_read_wrap(wrap, Mesh(shape), None), failed=holes)
        where = _lay_out(len(found), mesh)
    else:
        raise MeshError(
            f"{found[0].device_kind} devices do not report coordinates. Say which mesh they form: "
            "discover(devices, shape='8x8'), or MESHMEND_SHAPE=8x8 in the environment, or machine= and its description."
        )
    return _fabric(found, where, mesh)


def _on_machine(
    devices: list[Any],
    machine: Machine,
    holes: list[Region | Sequence[int] | str],
    coords: Sequence[Sequence[int] | str] | None,
) -> Fabric:
    """Return the fabric of a machine that is described: what has failed there, or has no device, is the hole."""
    mesh = machine.mesh.fail(*holes)
    coordinates = None if coords is None else [machine.coordinate(at) if isinstance(at, str) else at for at in coords]
    where = _coordinates(devices, coordinates, mesh.n_axes)
    if where is not None:
        _check_inside(where, mesh, f" of {machine.file}. Is that the description of another machine?")
        mesh = mesh.fail(*_without_device(where, mesh))
    elif machine.n_named:
        # Where a layout was found from cables, row-major order would put devices on chips that they are not.
        names = ", ".join(repr(chip.name) for _, chip in sorted(machine.chips.items())[:2])
        raise MeshError(
            f"{devices[0].device_kind} devices do not report coordinates, and {machine.file} names its chips. Say "
            f"which device is which: discover(…, coords=[{names}, …]), one name or coordinate per device."
        )
    else:
        where = _lay_out(len(devices), mesh, f" of {machine.file}")
    fabric = _fabric(devices, where, mesh)
    # Virtual devices stand for the machine's chips; real ones say better what they are, as XLA drives them.
    own = None if fabric.platform == "cpu" and machine.hardware is not None else fabric.hardware
    return replace(fabric, hardware=own or machine.hardware_through_xla)


def _read_wrap(wrap: bool | Sequence[bool] | None, mesh: Mesh, kind: str | None) -> bool | Sequence[bool]:
    """Return what was given, what the environment says, or what is documented for the kind of device.

    Where that is not known it warns, and leaves cables out: a plan without a cable that exists leaves it unused; a plan
    with a cable that does not exist is slower than predicted.
    """
    if wrap is not None:
        return wrap
    text = os.environ.get("MESHMEND_WRAP")
    if text is not None:
        return parse_wrap(text, mesh.n_axes, given=f"MESHMEND_WRAP is {text!r},")
    if kind is None:
        return False
    documented, doubt = documented_axes(kind, mesh.shape)
    if doubt is not None:
        warnings.warn(
            f"{doubt}. Give discover(…, wrap=…) or MESHMEND_WRAP (all, none, or axes as in 0,1) if you know better.",
            stacklevel=4,
        )
    return documented


def _coordinates(
    devices: list[Any], coords: Sequence[Sequence[int] | str] | None, n_axes: int = 2
) -> NDArray[np.int64] | None:
    """Return one coordinate per device: given, or the device's own, without a last axis of one chip beyond `n_axes`."""
    if coords is not None:
        if len(coords) != len(devices):
            raise MeshError(f"There are {len(devices)} devices and {len(coords)} coordinates; give one for each.")
        names = [at for at in coords if isinstance(at, str)]
        if names:
            raise MeshError(f"{names[0]!r} is the name of a chip: give the machine that has it, as machine=.")
        return np.array(coords, dtype=np.int64).reshape(len(devices), -1)
    own = [getattr(device, "coords", None) for device in devices]
    if any(coord is None for coord in own):
        return None
    where = np.array(own, dtype=np.int64)
    if where.shape[1] == 3 > n_axes and (where[:, 2] == where[0, 2]).all():
        where = where[:, :2]
    return where


def _bounding_mesh(
    where: NDArray[np.int64],
    shape: Sequence[int] | str | None,
    holes: list[Region | Sequence[int] | str],
    wrap: bool | Sequence[bool] | None,
    kind: str | None,
) -> Mesh:
    """Return the mesh that the coordinates span; what is missing in it has failed."""
    if shape is None:
        # A slice may lie anywhere in its pod; a row that has failed as a whole only makes the mesh smaller.
        where -= where.min(axis=0)
        shape = [int(n) for n in where.max(axis=0) + 1]
    full = Mesh(shape)
    _check_inside(where, full, ".")
    return Mesh(full.shape, wrap=_read_wrap(wrap, full, kind), failed=[*holes, *_without_device(where, full)])


def _check_inside(where: NDArray[np.int64], mesh: Mesh, end: str) -> None:
    if mesh.n_axes != where.shape[1] or (where < 0).any() or (where >= mesh.shape).any():
        worst = where[(where.max(axis=1)).argmax()]
        raise MeshError(f"A device is at {name_chip(worst)}, outside the {name_shape(mesh.shape)} mesh{end}")


def _without_device(where: NDArray[np.int64], mesh: Mesh) -> list[list[int]]:
    missing = np.ones(mesh.shape, dtype=np.bool_)
    missing[tuple(where.T)] = False
    coordinates: list[list[int]] = np.argwhere(missing).tolist()
    return coordinates


def _lay_out(n_devices: int, mesh: Mesh, of: str = "") -> NDArray[np.int64]:
    if n_devices == mesh.size:
        return np.argwhere(np.ones(mesh.shape))
    if n_devices == mesh.n_chips:
        return mesh.coords.astype(np.int64)
    raise MeshError(
        f"{n_devices} devices do not fit {mesh!r}{of}: give {mesh.size} (one per chip, failed ones unused) or "
        f"{mesh.n_chips} (one per live chip)."
    )


def _fabric(devices: list[Any], where: NDArray[np.int64], mesh: Mesh) -> Fabric:
    """Put the devices in order of rank, and a chip's cores side by side."""
    cores: dict[int, list[Any]] = {}
    for device, coord in zip(devices, where.tolist(), strict=True):
        rank = int(mesh.rank_of[tuple(coord)])
        if rank >= 0:
            cores.setdefault(rank, []).append(device)
    per_chip = max(len(chip) for chip in cores.values())
    short = [rank for rank in range(mesh.n_chips) if len(cores.get(rank, ())) < per_chip]
    if short:
        # A chip that has lost a core cannot do its part: the whole chip is a hole, and its other core idles.
        return _fabric(devices, where, mesh.fail(*(mesh.chip(rank) for rank in short)))
    table = np.array(
        [sorted(cores[rank], key=lambda d: getattr(d, "core_on_chip", 0)) for rank in range(mesh.n_chips)],
        dtype=object,
    )
    names = (CHIP_AXIS, CORE_AXIS) if per_chip > 1 else (CHIP_AXIS,)
    jax_mesh = jax.sharding.Mesh(table if per_chip > 1 else table[:, 0], names)
    return Fabric(mesh, jax_mesh, HARDWARE.get(str(devices[0].device_kind)))
