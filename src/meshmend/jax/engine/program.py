"""A program: a schedule made ready to run on a fabric's devices.

It is a pytree. Its leaves are the schedule's tables, split over the chips so that each chip holds its own rows only;
its structure is what all chips share. Pass it to a jitted function like any other argument and split it by
`program.spec`: then neither the compiled code nor the compile time grows with the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshmend.errors import ParameterError, ScheduleError, name_chip
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.update_tables import update_tables
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.fused_update import with_update
from meshmend.schedule.lanes import Lowered, ProgramShape, lower
from meshmend.schedule.split import all_gather_of, reduce_scatter_of, single_chunk_of
from meshmend.schedule.verify import ensure_proven
from meshmend.topology import Mesh

TILE_WIDTH = 128
"""Elements of a row of a TPU's tile."""
TPU_TILE = 8 * TILE_WIDTH
"""Elements of a TPU's tile of a 32-bit array: chunks of whole tiles move without shifting."""

MOST_OWNED = 8
"""A chip may own this many times its fair share of the chunks where the update is sharded, but no more."""

Update = Literal["replicated", "fused", "two-phase"]
UPDATES: tuple[Update, ...] = ("replicated", "fused", "two-phase")
Put = Callable[[NDArray[np.generic], NamedSharding], jax.Array]


class Parts(TypedDict, total=False):
    """What `install` takes beside a schedule and a fabric."""

    update: Update
    scatter: Schedule | None
    gather: Schedule | None
    scalars: Schedule | None


class Tables(NamedTuple):
    """One loop's tables: an entry for each chip, step and lane. `ops` is None where no lane needs it."""

    send: Annotated[jax.Array, "int32[N, T, L]"]
    receive: Annotated[jax.Array, "int32[N, T, L]"]
    ops: Annotated[jax.Array, "uint8[N, T, L]"] | None


@dataclass(frozen=True)
class ChunkLayout:
    """What all chips share: the lowered schedule's shape, and the axes and the platform that it runs on."""

    shape: ProgramShape
    axis: str
    core_axis: str | None
    n_cores: int
    platform: str

    @property
    def tile(self) -> int:
        """Elements that chunks are made of whole numbers of."""
        return TPU_TILE if self.platform == "tpu" else 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Program:
    """A schedule on its devices. Made by `install`; pass it as an argument, split by `spec`.

    `update` says which of the tables it has beside those of its own loops. "replicated" has none. "two-phase" has a
    reduce-scatter's own tables, and those of the all-gather that follows it, in `gather`. "fused" has in `due` which
    chunks a chip updates in which step, a table per loop.

    `scalars` is an all-reduce of few steps, for the few numbers that every chip needs: losses, metrics, norms. A
    program that sums gradients has one. That one itself has none, and neither has half of an all-reduce.
    """

    tables: tuple[Tables, ...]
    owned: Annotated[jax.Array, "int32[N, R]"]
    layout: ChunkLayout = field(metadata={"static": True})
    scalars: Program | None = None
    gather: Program | None = None
    due: tuple[Annotated[jax.Array, "int32[N, T, S]"], ...] | None = None
    only_sums: bool = field(default=False, metadata={"static": True})
    """Whether gradients of sharded parameters are sums over devices whatever a loss asks for: a step divides them."""

    @property
    def update(self) -> Update:
        """Who updates the weights: every chip all of them, or their owners, on the way or between two phases."""
        if self.gather is not None:
            return "two-phase"
        return "replicated" if self.due is None else "fused"

    @property
    def is_sharded(self) -> bool:
        """Whether each chip updates only the weights that it owns."""
        return self.update != "replicated"

    @property
    def for_scalars(self) -> Program:
        """The program that a few numbers take: `scalars`, or this one where it has none."""
        return self if self.scalars is None else self.scalars

    @property
    def phases(self) -> tuple[Program, ...]:
        """The programs that a payload takes one after the other: this one and, with two phases, `gather`."""
        return (self,) if self.gather is None else (self, self.gather)

    @property
    def spec(self) -> PartitionSpec:
        """How `jax.shard_map` splits a program: `in_specs=(…, program.spec)`."""
        return PartitionSpec(self.layout.axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the program's devices form."""
        layout = self.layout
        return (layout.axis,) if layout.core_axis is None else (layout.axis, layout.core_axis)

    @property
    def n_chips(self) -> int:
        """Number of live chips."""
        return self.layout.shape.n_chips

    @property
    def collective(self) -> Collective:
        """The collective of the program's own loops."""
        return self.layout.shape.collective

    @property
    def n_steps(self) -> int:
        """Steps of its own loops."""
        repeat = self.layout.shape.repeat
        return repeat.n_steps if repeat else sum(table.send.shape[-2] for table in self.tables)

    def __repr__(self) -> str:
        return f"Program({', then '.join(one._described() for one in self.phases)})"

    def _described(self) -> str:
        repeat = self.layout.shape.repeat
        steps = [self.n_steps] if repeat else [t.send.shape[-2] for t in self.tables]
        loops = ", ".join(f"{n} steps of {t.send.shape[-1]} lanes" for n, t in zip(steps, self.tables, strict=True))
        return f"{self.collective} over {self.n_chips} chips: {loops or 'nothing to do'}"


def install(
    schedule: Schedule | None,
    fabric: Fabric,
    *,
    update: Update = "replicated",
    scatter: Schedule | None = None,
    gather: Schedule | None = None,
    scalars: Schedule | None = None,
) -> Program:
    """Lower a schedule and put its tables on the fabric's devices, for one of three ways to update the weights.

    A schedule that is not proven yet (from a file, or made by hand) is proven here, or refused. It must be for the
    chips of the fabric, and use no cable that the fabric does not have: a plan for a torus does not fit a mesh.

    `update` is "replicated" where every chip updates all weights, and for any program outside of training. With the
    others each chip updates the weights that it owns. "two-phase" splits an all-reduce into its reduce-scatter and its
    all-gather, with room for the update between them. `scatter` and `gather` take their place where they were planned
    as such, with `collective="reduce-scatter"` and `"all-gather"`: the planner "gather" needs about two thirds of the
    steps of weave's. They must cut the payload into the same chunks with the same owners. "fused" updates each chunk at
    its owner on its way, for the price of the all-reduce. Plan it with `collective="all-reduce-with-update"`; any other
    all-reduce with even owners that can be updated will do. Every chip makes room for as many chunks as the chip that
    owns most, so a plan that leaves them to a few is refused.

    `scalars` is an all-reduce that was planned for a few bytes, as `mm.plan(fabric.mesh, "latency")`. It carries the
    few numbers that every chip needs: losses, metrics, norms. Without it they take the way of one chunk of `schedule`,
    which may be None where scatter, gather and scalars are all given.

    >>> import jax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> schedule = mm.plan(fabric.mesh, "hamiltonian")
    >>> mmj.install(schedule, fabric)
    Program(all-reduce over 12 chips: 11 steps of 2 lanes, 11 steps of 2 lanes)
    >>> mmj.install(schedule, fabric, update="two-phase").gather
    Program(all-gather over 12 chips: 11 steps of 2 lanes)
    >>> schedule = mm.plan(fabric.mesh, "weave", chunks=24, collective="all-reduce-with-update")
    >>> mmj.install(schedule, fabric, update="fused")
    Program(all-reduce-with-update over 12 chips: 4 steps of 4 lanes, 17 steps of 4 lanes, 4 steps of 4 lanes)
    """
    return _Installer(fabric, put_rows).program(schedule, update, scatter, gather, scalars)


def abstract_program(schedule: Schedule | None, fabric: Fabric, **parts: Unpack[Parts]) -> Program:
    """Return what `install` does, of shapes only: to compile for devices that are not here."""
    return _Installer(fabric, _abstract).program(schedule, **parts)


def _abstract(table: NDArray[np.generic], sharding: NamedSharding) -> jax.Array:
    shape: Any = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=sharding)
    found: jax.Array = shape
    return found


def put_rows(table: NDArray[np.generic], sharding: NamedSharding) -> jax.Array:
    """Put a table on devices of one process or of many: each fills in the rows of its own."""
    return jax.make_array_from_callback(table.shape, sharding, lambda index: table[index], dtype=table.dtype)


@dataclass(frozen=True)
class _Installer:
    """Makes programs on one fabric, with tables that `put` puts there."""

    fabric: Fabric
    put: Put

    def program(
        self,
        schedule: Schedule | None,
        update: Update = "replicated",
        scatter: Schedule | None = None,
        gather: Schedule | None = None,
        scalars: Schedule | None = None,
    ) -> Program:
        """Return the program for one way to update the weights, and for scalars beside it."""
        if update not in UPDATES:
            raise ParameterError(f"update is {update!r}, expected one of: {', '.join(map(repr, UPDATES))}.")
        if update != "two-phase" and (scatter is not None or gather is not None):
            raise ParameterError(f"scatter and gather go with update='two-phase', got them with update={update!r}.")
        if update == "two-phase":
            made = self._two_phase(schedule, scatter, gather)
        elif update == "fused":
            made = self._fused(schedule)
        else:
            made = self._one(schedule)
            if not made.collective.is_all_reduce:
                if scalars is not None:
                    raise ParameterError(
                        f"Scalars go with an all-reduce, got them with a schedule for {made.collective}. Leave them "
                        "out, or give both halves and update='two-phase'."
                    )
                return made
        return replace(made, scalars=self._scalars(schedule, scalars))

    def _two_phase(self, schedule: Schedule | None, scatter: Schedule | None, gather: Schedule | None) -> Program:
        if scatter is None and gather is None:
            whole = self._proven(schedule)
            halves = reduce_scatter_of(whole), all_gather_of(whole)
        else:
            halves = _check_halves(scatter, gather, self.fabric)
        _check_owners(halves[0])
        up, down = map(self._one, halves)
        return replace(up, gather=down)

    def _fused(self, schedule: Schedule | None) -> Program:
        given = _check_fit(schedule, self.fabric.mesh)
        fused = with_update(given) if given.collective is Collective.ALL_REDUCE else given
        if fused.collective is not Collective.ALL_REDUCE_WITH_UPDATE:
            raise ParameterError(
                f"Expected an all-reduce, got a schedule of a {fused.collective}. Plan with "
                "collective='all-reduce-with-update'."
            )
        ensure_proven(fused)
        _check_owners(fused)
        lowered = lower(fused)
        return replace(self._lowered(lowered), due=tuple(map(self._by_chip, update_tables(fused, lowered))))

    def _scalars(self, schedule: Schedule | None, scalars: Schedule | None) -> Program:
        """Return the program for the few numbers that every chip needs, beside that of a schedule."""
        if scalars is None and schedule is None:
            raise ParameterError(
                "There is no plan for the few numbers that every chip needs, such as the loss. Give an all-reduce as "
                "the schedule, or one for a few bytes, as in scalars=mm.plan(fabric.mesh, 'latency')."
            )
        program = self._one(single_chunk_of(self._proven(schedule)) if scalars is None else scalars)
        if not program.collective.is_all_reduce:
            raise ParameterError(
                f"Expected an all-reduce as scalars, got a schedule for {program.collective}. Plan one for a few "
                "bytes, as in scalars=mm.plan(fabric.mesh, 'latency')."
            )
        return program

    def _proven(self, schedule: Schedule | None) -> Schedule:
        """Return a schedule that fits the fabric and is proven; refuse any other."""
        found = _check_fit(schedule, self.fabric.mesh)
        ensure_proven(found)
        return found

    def _one(self, schedule: Schedule | None) -> Program:
        return self._lowered(lower(self._proven(schedule)))

    def _lowered(self, lowered: Lowered) -> Program:
        fabric = self.fabric
        tables = tuple(
            Tables(
                self._by_chip(loop.send),
                self._by_chip(loop.receive),
                self._by_chip(loop.ops) if loop.reads_ops else None,
            )
            for loop in lowered.loops
        )
        layout = ChunkLayout(
            shape=lowered.shape,
            axis=fabric.axis,
            core_axis=fabric.core_axis,
            n_cores=fabric.jax_mesh.shape[fabric.core_axis] if fabric.core_axis else 1,
            platform=fabric.platform,
        )
        return Program(tables, self._by_chip(lowered.owned), layout)

    def _by_chip(self, table: NDArray[np.generic]) -> jax.Array:
        return self.put(table, self.fabric.sharding(self.fabric.axis))


def _check_fit(schedule: object, mesh: Mesh) -> Schedule:
    """Return the schedule; refuse one for other chips than the mesh has, or for a cable that is not there."""
    if not isinstance(schedule, Schedule):
        raise ParameterError(
            f"Expected a Schedule, as meshmend.plan(fabric.mesh) makes, got a {type(schedule).__name__}."
        )
    planned = schedule.mesh
    if not np.array_equal(planned.live, mesh.live):
        raise ScheduleError(f"The schedule is for {planned!r}, but the fabric is {mesh!r}. Plan for fabric.mesh.")
    # Fewer cables are fine: a plan for a mesh runs on a torus too.
    absent = {_ends(cable) for cable in planned.cables} - {_ends(cable) for cable in mesh.cables}
    if absent:
        a, b = (name_chip(mesh.coords[rank]) for rank in min(absent))
        raise ScheduleError(
            f"The schedule is for {planned!r}, which has {len(absent)} cables that the fabric, {mesh!r}, lacks: one "
            f"joins {a} and {b}. Plan for fabric.mesh; or, if the machine has them, give discover() its wrap."
        )
    return schedule


def _check_halves(scatter: Schedule | None, gather: Schedule | None, fabric: Fabric) -> tuple[Schedule, Schedule]:
    """Return both; refuse schedules of other collectives, and shards that one of them leaves and the other misses."""
    if scatter is None or gather is None:
        missing = Collective.REDUCE_SCATTER if scatter is None else Collective.ALL_GATHER
        raise ParameterError(f"Give both scatter and gather, or neither: there is no schedule for {missing}.")
    for given, collective in ((scatter, Collective.REDUCE_SCATTER), (gather, Collective.ALL_GATHER)):
        _check_fit(given, fabric.mesh)
        if given.collective is not collective:
            raise ParameterError(f"Expected a schedule for {collective}, got one for {given.collective}.")
    if not np.array_equal(scatter.owners, gather.owners):
        raise ParameterError(
            f"{scatter!r} and {gather!r} do not have the same chunks with the same owners. Plan both with one planner "
            "and the same options."
        )
    return scatter, gather


def _check_owners(schedule: Schedule) -> None:
    """Refuse a plan whose chunks belong to a few chips: their share of the optimizer's state would be everybody's."""
    template, n_chips = schedule.template, schedule.mesh.n_chips
    most = int(np.bincount(template.owners).max()) * schedule.repeats
    if most > MOST_OWNED * -(-schedule.total_chunks // n_chips):
        raise ParameterError(
            f"One of {n_chips:,} chips owns {most:,} of {schedule.total_chunks:,} chunks of {schedule!r}, and every "
            "chip would make room for as many. Plan with owners='even'."
        )


def _ends(cable: NDArray[np.int32]) -> tuple[int, int]:
    return int(cable.min()), int(cable.max())
