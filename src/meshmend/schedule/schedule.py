"""The schedule: steps of transfers. The value that every planner makes and every other part reads.

A schedule is a struct of arrays, one row per transfer. Within a step all reads see the state before the step,
and no two transfers of a step may write the same chunk of the same chip: so the order of rows inside a step
does not matter, and an engine may run them all at once.

A schedule may be a *template* of N chunks, repeated R times, each time a period of T steps and N chunks later: K = N·R.
The template lasts longer than T, so the repeats overlap, and the whole fills and drains by itself. A template may have
idle steps, which other repeats fill; those of the whole that nothing fills do not count. The arrays of the whole are
not kept; who asks for them gets them expanded, so that no reader can take the template for the whole. Readers that know
of repeats ask for `template`, `repeats` and `period`, and their work does not grow with R.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import ScheduleError
from meshmend.schedule.collective import Collective, Op
from meshmend.schedule.columns import MAX_CHUNKS, BusySteps, as_int_array, expand, frozen_copy
from meshmend.topology import IntArray, Mesh
from meshmend.topology.mesh import read_only

MAX_STEPS = 2**31 - 1
MAX_PHASES = 256
MAX_EXPANDED = 2**25
"""Transfers, and owners, that a repeated schedule is expanded to at most: 0.7 GB."""


@dataclass(frozen=True)
class Phase:
    """The purpose of a set of transfers, and the steps that it spans. Phases may overlap in time."""

    name: str
    first_step: int
    last_step: int
    n_transfers: int


class Schedule:
    """Steps of transfers over the live chips of a mesh. Immutable.

    The payload is cut into `total_chunks` equal chunks. Row i of the arrays says: in step `step[i]`, rank `src[i]`
    sends chunks `first_chunk[i]`, …, `first_chunk[i] + n_chunks[i] - 1` to rank `dst[i]`, which applies `op[i]`;
    it belongs to phase `phase_names[phase[i]]`. `owners[k]` is the rank where chunk k is first complete:
    the chip that updates its weights when the update is sharded.

    Rows are kept in order of step. Every step has at least one transfer, unless `may_idle`: that is for templates.
    `repeated` makes a longer one of it.

    >>> mesh = Mesh((1, 2))
    >>> s = Schedule(mesh, total_chunks=1, step=[0, 1], src=[1, 0], dst=[0, 1], op=[Op.REDUCE, Op.COPY], owners=[0])
    >>> s
    Schedule(hand-made all-reduce on 1x2: 2 chips, 2 steps, 1 chunk, 2 transfers)
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        total_chunks: int,
        step: ArrayLike,
        src: ArrayLike,
        dst: ArrayLike,
        op: ArrayLike,
        owners: ArrayLike,
        first_chunk: ArrayLike = 0,
        n_chunks: ArrayLike = 1,
        phase: ArrayLike = 0,
        phase_names: tuple[str, ...] = ("all",),
        collective: Collective = Collective.ALL_REDUCE,
        planner: str = "hand-made",
        may_idle: bool = False,
    ) -> None:
        if not 1 <= total_chunks <= MAX_CHUNKS:
            raise ScheduleError(f"A payload is cut into 1 to {MAX_CHUNKS:,} chunks: got {total_chunks:,}.")
        self._mesh = mesh
        self._template: Schedule | None = None
        self._repeats, self._period = 1, 0
        self._total_chunks = int(total_chunks)
        self._phase_names = tuple(phase_names)
        self._collective = Collective(collective)
        self._planner = planner
        steps = as_int_array(step, "step")
        length = len(steps)
        columns: dict[str, NDArray[Any]] = {"step": steps}
        for name, column in (
            ("src", src),
            ("dst", dst),
            ("first_chunk", first_chunk),
            ("n_chunks", n_chunks),
            ("op", op),
            ("phase", phase),
        ):
            columns[name] = as_int_array(column, name, length)
        self._check_ranges(columns)
        if np.any(steps[1:] < steps[:-1]):
            order = np.argsort(steps, kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
        self._columns = {
            name: frozen_copy(column, np.uint8 if name in ("op", "phase") else np.int32)
            for name, column in columns.items()
        }
        if not may_idle:
            self._check_steps()
        self._owners = frozen_copy(as_int_array(owners, "owners", self._total_chunks), np.int32)
        if np.any((self._owners < 0) | (self._owners >= mesh.n_chips)):
            raise ScheduleError(f"Owners are ranks from 0 to {mesh.n_chips - 1}.")
        self._is_proven = False

    def _check_ranges(self, columns: dict[str, NDArray[Any]]) -> None:
        if not 1 <= len(self._phase_names) <= MAX_PHASES:
            raise ScheduleError(f"A schedule has 1 to {MAX_PHASES} phases: got {len(self._phase_names)}.")
        limits = {
            "step": (0, max(len(columns["step"]) - 1, 0)),
            "src": (0, self._mesh.n_chips - 1),
            "dst": (0, self._mesh.n_chips - 1),
            "first_chunk": (0, self._total_chunks - 1),
            "n_chunks": (1, self._total_chunks),
            "op": (min(Op), max(Op)),
            "phase": (0, len(self._phase_names) - 1),
        }
        for name, (low, high) in limits.items():
            column = columns[name]
            bad = np.flatnonzero((column < low) | (column > high))
            if len(bad):
                raise ScheduleError(
                    f"Transfer {bad[0]}: {name} is {column[bad[0]]}, expected {low} to {high} on {self._mesh!r} "
                    f"with {self._total_chunks} chunks."
                )
        # Both lie within range now, so the subtraction cannot overflow where the sum could.
        beyond = np.flatnonzero(columns["first_chunk"] > self._total_chunks - columns["n_chunks"])
        if len(beyond):
            i = beyond[0]
            raise ScheduleError(
                f"Transfer {i}: chunks {columns['first_chunk'][i]} to "
                f"{int(columns['first_chunk'][i]) + int(columns['n_chunks'][i]) - 1} reach past the last chunk, "
                f"{self._total_chunks - 1}."
            )
        same = np.flatnonzero(columns["src"] == columns["dst"])
        if len(same):
            raise ScheduleError(f"Transfer {same[0]}: rank {columns['src'][same[0]]} sends to itself.")

    def _check_steps(self) -> None:
        step = self._columns["step"]
        if not len(step):
            return
        jumps = np.flatnonzero(np.diff(step, prepend=np.int32(-1)) > 1)
        if len(jumps):
            raise ScheduleError(f"Step {step[jumps[0]] - 1} has no transfer; number the steps without gaps from 0.")

    def repeated(self, repeats: int, period: int) -> Schedule:
        """Return this schedule `repeats` times, each `period` steps and `total_chunks` chunks after the one before.

        >>> s = Schedule(Mesh((1, 2)), total_chunks=1, step=[0, 1], src=[1, 0], dst=[0, 1], op=[0, 1], owners=[0])
        >>> long = s.repeated(1000, period=1)
        >>> long
        Schedule(hand-made all-reduce on 1x2: 2 chips, 1,001 steps, 1,000 chunks, 2,000 transfers; 1 chunk repeated)
        >>> long.first_chunk[:5].tolist(), long.step[:5].tolist()
        ([0, 0, 1, 1, 2], [0, 1, 1, 2, 2])
        """
        if self._template is not None:
            raise ScheduleError(f"{self!r} is repeated already. Repeat its template, with other numbers.")
        if repeats < 1 or self._total_chunks * repeats > MAX_CHUNKS:
            raise ScheduleError(
                f"{self._total_chunks:,} chunks repeated {repeats:,} times: expected 1 or more times, and at most "
                f"{MAX_CHUNKS:,} chunks in all."
            )
        if repeats == 1:
            return self
        # A longer period would leave idle steps between one repeat and the next.
        if not 1 <= period <= self.n_steps:
            raise ScheduleError(f"The period is {period:,} steps, expected 1 to the template's {self.n_steps:,}.")
        if (repeats - 1) * period + self.n_steps > MAX_STEPS:
            raise ScheduleError(f"{repeats:,} repeats make more than {MAX_STEPS:,} steps. Repeat less often.")
        longer = object.__new__(Schedule)
        longer._mesh, longer._phase_names = self._mesh, self._phase_names
        longer._collective, longer._planner = self._collective, self._planner
        longer._template, longer._repeats, longer._period = self, int(repeats), int(period)
        longer._total_chunks = self._total_chunks * int(repeats)
        longer._is_proven = False
        return longer

    def interleaved(self, parts: int) -> Schedule:
        """Return this schedule with every chunk cut into so many parts, which go one after the other.

        A step becomes `parts` steps. A part that has arrived is sent on only `parts` steps after it was sent. While it
        is under way, and while its latency passes, the links carry the other parts. So an engine that waits for data
        alone keeps its links busy; one that waits for every step gains nothing.

        >>> s = Schedule(Mesh((1, 2)), total_chunks=1, step=[0, 1], src=[1, 0], dst=[0, 1], op=[0, 1], owners=[0])
        >>> s.interleaved(3)
        Schedule(hand-made all-reduce on 1x2: 2 chips, 6 steps, 3 chunks, 6 transfers)
        """
        if self._template is not None:
            return self._template.interleaved(parts).repeated(self._repeats, self._period * parts)
        part = np.arange(parts)[:, None]
        rows = np.tile(np.arange(self.n_transfers), parts)
        return self.replace(
            rows,
            total_chunks=self._total_chunks * parts,
            step=(self.step.astype(np.int64) * parts + part).ravel(),
            # Chunk k is followed by all others before its second part: runs of chunks stay runs.
            first_chunk=(self.first_chunk + self._total_chunks * part).ravel(),
            owners=np.tile(self._owners, parts),
            may_idle=True,
        )

    def expanded(self) -> Schedule:
        """Return the same schedule without repeats: every transfer of the whole as a row, at most `MAX_EXPANDED`."""
        if self._template is None:
            return self
        return self.replace()

    def replace(self, rows: NDArray[Any] | None = None, **changes: Any) -> Schedule:
        """Return a schedule without repeats that differs in what is given: the constructor's arguments, by their names.

        `rows` picks the transfers that it keeps, as an index into the columns; columns that are given replace what was
        picked. The new schedule is still to be proven.

        >>> s = Schedule(Mesh((1, 2)), total_chunks=1, step=[0, 1], src=[1, 0], dst=[0, 1], op=[0, 1], owners=[0])
        >>> s.replace(s.op == Op.REDUCE, collective=Collective.REDUCE_SCATTER, planner="mine")
        Schedule(mine reduce-scatter on 1x2: 2 chips, 1 step, 1 chunk, 1 transfer)
        """
        kept: dict[str, Any] = {
            name: column if rows is None else column[rows] for name, column in self._columns.items()
        }
        facts = ("mesh", "total_chunks", "owners", "phase_names", "collective", "planner")
        return Schedule(**{**kept, **{name: getattr(self, name) for name in facts}, **changes})

    @cached_property
    def _columns(self) -> dict[str, NDArray[Any]]:
        """The rows of a repeated schedule; one without repeats has its own from the start."""
        if self.n_transfers > MAX_EXPANDED:
            raise ScheduleError(
                f"{self!r} has more than the {MAX_EXPANDED:,} transfers that are expanded. Plan with fewer chunks, or "
                "use a part of meshmend that knows repeats: verify, save, predict in lock-step, the NumPy, JAX and "
                "PyTorch engines."
            )
        template = self.template
        columns = expand(template._columns, template.total_chunks, self._repeats, self._period)
        # Steps that nothing fills do not count, not even before the first transfer.
        if np.any(np.diff(columns["step"], prepend=-1) > 1):
            columns["step"] = frozen_copy(np.unique(columns["step"], return_inverse=True)[1], np.int32)
        return columns

    @cached_property
    def _owners(self) -> IntArray:
        if self._total_chunks > MAX_EXPANDED:
            raise ScheduleError(f"{self!r} has more than the {MAX_EXPANDED:,} owners that are listed one by one.")
        return read_only(np.tile(self.template.owners, self._repeats))

    @property
    def template(self) -> Schedule:
        """The part that is repeated; the schedule itself where nothing is."""
        return self if self._template is None else self._template

    @property
    def repeats(self) -> int:
        """How often the template is run, R; 1 where nothing is repeated."""
        return self._repeats

    @property
    def period(self) -> int:
        """Steps from one repeat to the next, T; 0 where nothing is repeated."""
        return self._period

    @property
    def mesh(self) -> Mesh:
        """The mesh whose live chips take part."""
        return self._mesh

    @property
    def total_chunks(self) -> int:
        """Number of equal chunks that the payload is cut into, K."""
        return self._total_chunks

    @property
    def collective(self) -> Collective:
        """The collective that the schedule computes."""
        return self._collective

    @property
    def planner(self) -> str:
        """Name of the planner that made it."""
        return self._planner

    @property
    def is_proven(self) -> bool:
        """Whether `meshmend.schedule.verify` has proven this very value. It is not saved, pickled or copied."""
        return self._is_proven

    @property
    def owners(self) -> IntArray:
        """For each chunk the rank that owns it."""
        return self._owners

    @property
    def step(self) -> IntArray:
        """Step of each transfer, in ascending order."""
        return self._columns["step"]

    @property
    def src(self) -> IntArray:
        """Sending rank of each transfer."""
        return self._columns["src"]

    @property
    def dst(self) -> IntArray:
        """Receiving rank of each transfer."""
        return self._columns["dst"]

    @property
    def first_chunk(self) -> IntArray:
        """First chunk of each transfer's run."""
        return self._columns["first_chunk"]

    @property
    def n_chunks(self) -> IntArray:
        """Length of each transfer's run of chunks."""
        return self._columns["n_chunks"]

    @property
    def op(self) -> NDArray[np.uint8]:
        """`Op` of each transfer."""
        return self._columns["op"]

    @property
    def phase(self) -> NDArray[np.uint8]:
        """Phase of each transfer, an index into `phase_names`."""
        return self._columns["phase"]

    @property
    def phase_names(self) -> tuple[str, ...]:
        """Names of the phases."""
        return self._phase_names

    @property
    def n_transfers(self) -> int:
        """Number of transfers."""
        return len(self.template._columns["step"]) * self._repeats

    @cached_property
    def n_steps(self) -> int:
        """Number of steps."""
        step = self.template._columns["step"]
        if self._template is None:
            return int(step[-1]) + 1 if len(step) else 0
        return self._busy_steps.count

    @cached_property
    def _busy_steps(self) -> BusySteps:
        return BusySteps(self.template._columns["step"], self._repeats, self._period)

    @cached_property
    def step_starts(self) -> NDArray[np.int64]:
        """Row of the first transfer of each step, and one past the last row: `step_starts[t]:step_starts[t+1]`."""
        return np.searchsorted(self.step, np.arange(self.n_steps + 1)).astype(np.int64)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have transfers, in order of their first step."""
        found = []
        template = self.template
        for index, name in enumerate(self._phase_names):
            rows = np.flatnonzero(template.phase == index)
            if len(rows):
                first, last = int(template.step[rows[0]]), int(template.step[rows[-1]])
                if self._template is not None:
                    first, last = self._busy_steps.in_first_repeat(first), self._busy_steps.in_last_repeat(last)
                found.append(Phase(name, first, last, len(rows) * self._repeats))
        return tuple(sorted(found, key=lambda phase: (phase.first_step, phase.last_step)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        if self._template is not None or other._template is not None:
            # A repeated schedule and its expanded form are two values: to compare what they do, expand both.
            ours, theirs = (self._repeats, self._period), (other._repeats, other._period)
            return ours == theirs and self.template == other.template
        return (
            self._mesh == other._mesh
            and self._total_chunks == other._total_chunks
            and self._collective == other._collective
            and self._planner == other._planner
            and self._phase_names == other._phase_names
            and np.array_equal(self._owners, other._owners)
            and all(np.array_equal(column, other._columns[name]) for name, column in self._columns.items())
        )

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_is_proven": False}
        if self._template is not None:
            # What was expanded can be expanded again.
            for name in ("_columns", "_owners", "step_starts"):
                state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Neither pickle nor deepcopy keeps arrays read-only.
        self.__dict__.update(state)
        if self._template is None:
            for column in (*self._columns.values(), self._owners):
                column.flags.writeable = False

    __hash__ = None  # type: ignore[assignment]  # equal values can be large: compare, do not hash

    def __repr__(self) -> str:
        def count(n: int, noun: str) -> str:
            return f"{n:,} {noun}{'s' * (n != 1)}"

        repeated = "" if self._template is None else f"; {count(self.template.total_chunks, 'chunk')} repeated"
        return (
            f"Schedule({self._planner} {self._collective} on {self._mesh}: {count(self._mesh.n_chips, 'chip')}, "
            f"{count(self.n_steps, 'step')}, {count(self._total_chunks, 'chunk')}, "
            f"{count(self.n_transfers, 'transfer')}{repeated})"
        )
