"""A fabric of tiles: the model is split inside a tile, and only corresponding chips of tiles exchange gradients.

`tile(fabric, "2x2", model=4)` is a fabric like any other. Its `mesh` is the mesh of tiles, so that planners, proofs,
forecasts and `install` work on it unchanged; its `jax_mesh` has the axis "tile" and the axes inside a tile, for
whatever sharding the model has. `value_and_grad` differentiates on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import jax

from meshmend.cost import between_tiles
from meshmend.errors import ParameterError
from meshmend.jax.engine.fabric import Fabric
from meshmend.topology import Tiling, cut_into_tiles, name_shape

TILE_AXIS = "tile"
MODEL_AXIS = "model"


@dataclass(frozen=True)
class TiledFabric(Fabric):
    """A fabric whose chips are tiles. Made by `tile`.

    `hardware` is what a chip's shard gets of the links between two tiles, so that `mm.predict` and `mm.plan` take the
    bytes of one chip's shards as the payload.
    """

    tiling: Tiling = field(repr=False)
    """Where the tiles lie, and how many live chips belong to none (`n_wasted`)."""
    chips: Fabric = field(repr=False)
    """The fabric that was cut."""

    @property
    def axis(self) -> str:
        """Name of the axis over tiles."""
        return TILE_AXIS

    @property
    def core_axis(self) -> str | None:
        """None: the cores of a chip are part of the axes inside a tile."""
        return None

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes inside a tile, for the model's own sharding."""
        return self.axes[1:]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """A batch is split over tiles; what becomes of a part inside its tile is up to the model's sharding."""
        return (TILE_AXIS,)

    @property
    def n_chips(self) -> int:
        """Chips that compute: those of all tiles."""
        return self.mesh.n_chips * self.tiling.chips_per_tile

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={self.jax_mesh.shape[name]}" for name in self.inner_axes)
        side, wasted = name_shape(self.tiling.side), self.tiling.n_wasted
        return (
            f"TiledFabric({self.mesh!r}, each a tile of {side} {self.platform} chips{f' ({inner})' if inner else ''}, "
            f"{wasted} live chips unused)"
        )


def tile(fabric: Fabric, side: str, **inner: int) -> TiledFabric:
    """Cut a fabric into tiles of `side` chips, for a model that is split inside them.

    `inner` names the axes inside a tile and their sizes, as in `model=4` or `fsdp=2, tensor=2`; by default one axis
    "model". Devices fill them in row-major order, and the cores of a chip come last. Tiles are placed so that as many
    as possible are whole (`meshmend.topology.cut_into_tiles`); one that lost a chip is a hole of `mesh`.

    >>> import jax, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["0,1"])
    >>> mmj.tile(fabric, "2x2", fsdp=2, tensor=2)
    TiledFabric(Mesh(2x2 minus 1x1@0,0: 3 of 4 chips), each a tile of 2x2 cpu chips (fsdp=2, tensor=2), 3 live ...)
    """
    if isinstance(fabric, TiledFabric):
        raise ParameterError(f"This fabric is cut into tiles already: {fabric!r}. Cut fabric.chips instead.")
    tiling = cut_into_tiles(fabric.mesh, side)
    devices = fabric.jax_mesh.devices.reshape(fabric.mesh.n_chips, -1)[tiling.ranks]
    n_devices = devices[0].size
    sizes = inner or ({MODEL_AXIS: n_devices} if n_devices > 1 else {})
    if TILE_AXIS in sizes:
        raise ParameterError(f"An axis inside a tile cannot be called {TILE_AXIS!r}, the name of the axis over tiles.")
    if prod(sizes.values()) != n_devices or any(size < 1 for size in sizes.values()):
        cores = n_devices // tiling.chips_per_tile
        of = f"{name_shape(tiling.side)} chips" + (f" of {cores} cores" if cores > 1 else "")
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ParameterError(
            f"A tile of {of} has {n_devices} devices: expected axes inside it whose sizes multiply to {n_devices}, as "
            f"in {MODEL_AXIS}={n_devices}; got {got}."
        )
    jax_mesh = jax.sharding.Mesh(devices.reshape(-1, *sizes.values()), (TILE_AXIS, *sizes))
    hardware = None if fabric.hardware is None else between_tiles(fabric.hardware, tiling)
    return TiledFabric(tiling.tiles, jax_mesh, hardware, tiling, fabric, domains=fabric.domains)
