"""A program: a schedule made ready to run on a fabric's devices.

It is a pytree. Its leaves are the schedule's tables, split over the chips so that each chip holds its own rows only;
its structure is what all chips share. Pass it to a jitted function like any other argument and split it by
`program.spec`: then neither the compiled code nor the compile time grows with the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshmend.errors import ParameterError, ScheduleError, name_chip
from meshmend.jax.fabric import Fabric
from meshmend.jax.turn_tables import turn_tables
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.lanes import Lowered, ProgramShape, lower
from meshmend.schedule.single import single_chunk_of
from meshmend.schedule.split import all_gather_of, reduce_scatter_of
from meshmend.schedule.turn import with_turn
from meshmend.schedule.verify import ensure_proven
from meshmend.topology import Mesh

TPU_TILE = 1024
"""Elements of a TPU's tile of a 32-bit array, 8 × 128: chunks of whole tiles move without shifting."""

MOST_OWNED = 8
"""A chip may own this many times its fair share of the chunks where the update is sharded, but no more."""

Place = Callable[[NDArray[Any], NamedSharding], Any]


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

    `scalars` is an all-reduce of few steps, for the few numbers that every chip needs: losses, metrics, norms. An
    all-reduce that was installed has one; that one itself has none, and neither have halves of an all-reduce.
    """

    tables: tuple[Tables, ...]
    owned: Annotated[jax.Array, "int32[N, R]"]
    layout: ChunkLayout = field(metadata={"static": True})
    scalars: Program | None = None

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
        """What the program does."""
        return self.layout.shape.collective

    @property
    def n_steps(self) -> int:
        """Steps of all loops."""
        repeat = self.layout.shape.repeat
        return repeat.n_steps if repeat else sum(table.send.shape[-2] for table in self.tables)

    def __repr__(self) -> str:
        repeat = self.layout.shape.repeat
        steps = [repeat.n_steps] if repeat else [t.send.shape[-2] for t in self.tables]
        loops = ", ".join(f"{n} steps of {t.send.shape[-1]} lanes" for n, t in zip(steps, self.tables, strict=True))
        return f"Program({self.collective} over {self.n_chips} chips: {loops or 'nothing to do'})"


class ProgramPair(NamedTuple):
    """An all-reduce as two programs, with room between them for a sharded update. Made by `install_pair`.

    `scalars` is an all-reduce of few steps, for the few numbers that every chip needs: losses, metrics, norms.
    """

    scatter: Program
    gather: Program
    scalars: Program

    @property
    def spec(self) -> PartitionSpec:
        """How `jax.shard_map` splits all of them."""
        return self.scatter.spec

    @property
    def sharded_by(self) -> Program:
        """The program whose chunks and owners say which shards a chip has."""
        return self.scatter


class ProgramWithTurn(NamedTuple):
    """An all-reduce in which each chunk is updated at its owner, between its way up and its way down.

    Made by `install_turn`. `turns` says which chunks a chip turns in which step, a table per loop of `through`.
    `scalars` is an all-reduce of few steps, for the few numbers that every chip needs: losses, metrics, norms.
    """

    through: Program
    turns: tuple[Annotated[jax.Array, "int32[N, T, S]"], ...]
    scalars: Program

    @property
    def spec(self) -> PartitionSpec:
        """How `jax.shard_map` splits all of it."""
        return self.through.spec

    @property
    def sharded_by(self) -> Program:
        """The program whose chunks and owners say which shards a chip has."""
        return self.through


ShardedProgram = ProgramPair | ProgramWithTurn
"""Programs with which each chip updates its own weights only."""
AnyProgram = Program | ProgramPair | ProgramWithTurn
"""Programs that a train step takes."""


def install(schedule: Schedule, fabric: Fabric, *, scalars: Schedule | None = None) -> Program:
    """Lower a schedule and put its tables on the fabric's devices.

    A schedule that is not proven yet (from a file, or made by hand) is proven here, or refused. It must be for the
    chips of the fabric, and use no cable that the fabric does not have: a plan for a torus does not fit a mesh.

    `scalars` is an all-reduce that was planned for a few bytes, as `mm.plan(fabric.mesh, "latency")`. It carries the
    few numbers that every chip needs: losses, metrics, norms. Without it they take the way of one chunk of `schedule`.

    >>> import jax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)
    Program(all-reduce over 12 chips: 11 steps of 2 lanes, 11 steps of 2 lanes)
    """
    return _whole(schedule, fabric, _put, scalars)


def install_pair(
    schedule: Schedule | None,
    fabric: Fabric,
    *,
    scatter: Schedule | None = None,
    gather: Schedule | None = None,
    scalars: Schedule | None = None,
) -> ProgramPair:
    """Prepare an all-reduce's reduce-scatter and all-gather, each proven first, for a sharded weight update.

    Every chip makes room for as many chunks as the chip that owns most, so a plan that leaves them to a few is refused.

    `scatter` and `gather` take their place where they were planned as such, with `collective="reduce-scatter"` and
    `"all-gather"`: the planner "gather" needs about two thirds of the steps of weave's. They must cut the payload into
    the same chunks with the same owners. `scalars` is as in `install`; with all three `schedule` is not used, and may
    be None.

    >>> import jax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> scatter, gather = (mm.plan(fabric.mesh, "gather", chunks=12, collective=what)
    ...                    for what in ("reduce-scatter", "all-gather"))
    >>> scalars = mm.plan(fabric.mesh, "latency")
    >>> mmj.install_pair(None, fabric, scatter=scatter, gather=gather, scalars=scalars).gather
    Program(all-gather over 12 chips: 1 steps of 2 lanes, 4 steps of 4 lanes, 4 steps of 2 lanes)
    """
    return _pair(schedule, fabric, _put, scatter, gather, scalars)


def install_turn(schedule: Schedule, fabric: Fabric, *, scalars: Schedule | None = None) -> ProgramWithTurn:
    """Prepare an all-reduce, proven to have a turn, for a sharded weight update on its way: for the price of the whole.

    Plan it with `collective="all-reduce-with-turn"`; any other all-reduce with even owners that has a turn will do.
    `scalars` is as in `install`.

    >>> import jax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> schedule = mm.plan(fabric.mesh, "weave", chunks=24, collective="all-reduce-with-turn")
    >>> mmj.install_turn(schedule, fabric).through
    Program(all-reduce-with-turn over 12 chips: 4 steps of 4 lanes, 17 steps of 4 lanes, 4 steps of 4 lanes)
    """
    return _with_turn(schedule, fabric, _put, scalars)


def abstract_program(schedule: Schedule, fabric: Fabric, *, scalars: Schedule | None = None) -> Program:
    """Return a program of shapes only, to compile for devices that are not here."""
    return _whole(schedule, fabric, _abstract, scalars)


def abstract_pair(
    schedule: Schedule | None,
    fabric: Fabric,
    *,
    scatter: Schedule | None = None,
    gather: Schedule | None = None,
    scalars: Schedule | None = None,
) -> ProgramPair:
    """Return what `install_pair` does, of shapes only."""
    return _pair(schedule, fabric, _abstract, scatter, gather, scalars)


def abstract_turn(schedule: Schedule, fabric: Fabric, *, scalars: Schedule | None = None) -> ProgramWithTurn:
    """Return what `install_turn` does, of shapes only."""
    return _with_turn(schedule, fabric, _abstract, scalars)


def _abstract(table: NDArray[Any], sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=sharding)


def _put(table: NDArray[Any], sharding: NamedSharding) -> jax.Array:
    # Each process fills in the rows of its own devices, so this works on many hosts too.
    return jax.make_array_from_callback(table.shape, sharding, lambda index: table[index], dtype=table.dtype)


def _proven(schedule: Any, fabric: Fabric) -> Schedule:
    """Return a schedule that fits the fabric and is proven; refuse any other."""
    found = _check_fit(schedule, fabric.mesh)
    ensure_proven(found)
    return found


def _program(schedule: Schedule, fabric: Fabric, place: Place) -> Program:
    return _place(lower(_proven(schedule, fabric)), fabric, place)


def _whole(schedule: Schedule, fabric: Fabric, place: Place, scalars: Schedule | None) -> Program:
    program = _program(schedule, fabric, place)
    if program.collective.is_all_reduce:
        return replace(program, scalars=_scalars(schedule, fabric, place, scalars))
    if scalars is not None:
        raise ParameterError(
            f"Scalars go with an all-reduce, got them with a schedule for {program.collective}. Leave them out, or "
            "give both halves to install_pair."
        )
    return program


def _scalars(schedule: Schedule | None, fabric: Fabric, place: Place, scalars: Schedule | None) -> Program:
    """Return the program for the few numbers that every chip needs, beside that of a schedule."""
    if scalars is None and schedule is None:
        raise ParameterError(
            "There is no plan for the few numbers that every chip needs, such as the loss: give an all-reduce as the "
            "schedule, or one for a few bytes, as in scalars=mm.plan(fabric.mesh, 'latency')."
        )
    program = _program(single_chunk_of(_proven(schedule, fabric)) if scalars is None else scalars, fabric, place)
    if not program.collective.is_all_reduce:
        raise ParameterError(
            f"Expected an all-reduce as scalars, got a schedule for {program.collective}. Plan one for a few bytes, as "
            "in scalars=mm.plan(fabric.mesh, 'latency')."
        )
    return program


def _pair(
    schedule: Schedule | None,
    fabric: Fabric,
    place: Place,
    scatter: Schedule | None,
    gather: Schedule | None,
    scalars: Schedule | None,
) -> ProgramPair:
    if scatter is None and gather is None:
        whole = _proven(schedule, fabric)
        halves = reduce_scatter_of(whole), all_gather_of(whole)
    else:
        halves = _check_halves(scatter, gather, fabric)
    _check_owners(halves[0])
    up, down = (_program(half, fabric, place) for half in halves)
    return ProgramPair(up, down, _scalars(schedule, fabric, place, scalars))


def _with_turn(schedule: Schedule, fabric: Fabric, place: Place, scalars: Schedule | None) -> ProgramWithTurn:
    _check_fit(schedule, fabric.mesh)
    turned = with_turn(schedule) if schedule.collective is Collective.ALL_REDUCE else schedule
    if turned.collective is not Collective.ALL_REDUCE_WITH_TURN:
        raise ParameterError(
            f"Expected an all-reduce, got a schedule of a {turned.collective}. Plan with "
            "collective='all-reduce-with-turn'."
        )
    ensure_proven(turned)
    _check_owners(turned)
    lowered = lower(turned)
    by_chip = fabric.sharding(fabric.axis)
    turns = tuple(place(table, by_chip) for table in turn_tables(turned, lowered))
    return ProgramWithTurn(_place(lowered, fabric, place), turns, _scalars(schedule, fabric, place, scalars))


def _place(lowered: Lowered, fabric: Fabric, place: Place) -> Program:
    by_chip = fabric.sharding(fabric.axis)
    tables = tuple(
        Tables(
            place(loop.send, by_chip),
            place(loop.receive, by_chip),
            place(loop.ops, by_chip) if any(len(lane.ops) > 1 for lane in loop.lanes) else None,
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
    return Program(tables, place(lowered.owned, by_chip), layout)


def _check_fit(schedule: Any, mesh: Mesh) -> Schedule:
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
