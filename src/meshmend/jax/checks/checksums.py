"""Sums must add up: an all-reduce whose every transfer and every addition is checked where it happens.

A digest of its bits travels with each chunk. In every step of the schedule

- what a chip is about to send must still have the digest that it had when it was put there (**memory**);
- what arrives must have the digest that it left with (**transfer**);
- and the sum s of what a chip held, a, and what arrived, b, must give b when a is taken away again (**addition**).

The first two are exact for all dtypes: a change of one word is always noticed. So is the third for integers. For floats
it has a bound. With u half the distance from 1 to the next number, s = (a + b)(1 + δ) and t = fl(s − a) =
(s − a)(1 + ε) with |δ|, |ε| ≤ u, so |t − b| ≤ u·|a + b| + u·|s − a| ≤ u/(1 − u)·(|s| + |t|); what is more than
2u·(|s| + |t|) is no rounding. Wrong sums within it are missed: a few units in the last place of the larger of s and t.
Sums of values that are not finite, or that overflow, are not checked.

What is found names the chip (memory, addition) or the cable (transfer). What was wrong before an all-reduce began, such
as a gradient, adds up: other checks are for that.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.checks.words import digest_rows, sum_rows
from meshmend.jax.collectives import all_reduce_by
from meshmend.jax.fabric import Fabric
from meshmend.jax.loops import Chunks, choose, scan_steps, zero_after
from meshmend.jax.program import ChunkLayout, Program
from meshmend.schedule import Op
from meshmend.schedule.lanes import KEEP, Lane

MEMORY, TRANSFER, ADDITION = KINDS = ("memory", "transfer", "addition")
Evidence = Annotated[jax.Array, "uint32[N, L, 3]"]
"""How often each check of `KINDS` has failed on a chip: a row per lane of all loops and one for the end, first those of
the program, then those of its program for scalars."""


class BadSum(NamedTuple):
    """Where an all-reduce went wrong: in a chip's memory or additions, or on the cable between two chips."""

    kind: str
    chips: tuple[tuple[int, ...], ...]
    """The chip; or the cable: the chip that sent and the one that received."""
    times: int
    """Steps in which it was seen."""


class Fault(NamedTuple):
    """A bit to be flipped, for tests: on which chip, in which loop, step of it and lane, in which element.

    A fault of the memory is one of the chunk that the lane is about to send. The loops of a program's `scalars` are
    counted on from its own. All are traced: one compiled program serves all faults.
    """

    kind: jax.Array
    chip: jax.Array
    loop: jax.Array
    step: jax.Array
    lane: jax.Array
    element: jax.Array
    bit: jax.Array


def checked_all_reduce(
    tree: Any,
    program: Program,
    *,
    mean: bool = False,
    accumulate_dtype: DTypeLike | None = None,
    fault: Fault | None = None,
) -> tuple[Any, Evidence]:
    """Sum a pytree as `all_reduce` does, bit for bit, and return the evidence of whatever went wrong on the way.

    Call it as `all_reduce` is called; the evidence is this chip's row, so that its `out_specs` is `program.spec`.
    `bad_sums` says what it means. `fault` is for tests.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> program = mmj.install(mm.plan(fabric.mesh, "row-pairs"), fabric)
    >>> total = jax.jit(jax.shard_map(
    ...     mmj.checked_all_reduce, mesh=fabric.jax_mesh, check_vma=False,
    ...     in_specs=(fabric.sharding("chip").spec, program.spec), out_specs=(program.spec, program.spec)))
    >>> sums, evidence = total(jnp.arange(12 * 3), program)
    >>> sums.reshape(12, 3)[-1].tolist(), mmj.bad_sums(evidence, program, fabric)
    ([198, 210, 222], [])
    """
    found = [jnp.zeros((len(_rows(way)), len(KINDS)), jnp.uint32) for way in _ways(program)]

    def run(chunks: Chunks, way: Program) -> Chunks:
        number, first_loop = (0, 0) if way is program else (1, len(program.tables))
        chunks, more = _run_checked(chunks, way, fault, first_loop)
        found[number] += more
        return chunks

    sums = all_reduce_by(run, tree, program, mean=mean, accumulate_dtype=accumulate_dtype)
    return sums, jnp.concatenate(found)[None]


def bad_sums(evidence: Annotated[Any, "uint32[N, L, 3]"], program: Program, fabric: Fabric) -> list[BadSum]:
    """Return what the evidence of a `checked_all_reduce` says went wrong; an empty list is how it should be.

    Where there are several processes, each sees the rows of its own devices: what it finds, others may not know.
    """
    mesh, rows = fabric.mesh, [lane for way in _ways(program) for lane in _rows(way)]
    n_devices, rest = divmod(evidence.shape[0], mesh.n_chips)
    if rest or evidence.shape[1:] != (len(rows), len(KINDS)):
        raise ParameterError(
            f"Expected evidence of shape {(mesh.n_chips, len(rows), len(KINDS))}, got {evidence.shape}: give the "
            "program and the fabric of the checked_all_reduce that it is from."
        )
    times: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}
    for device, found in sorted(_own_rows(evidence).items()):
        rank = device // n_devices
        for number, kind in zip(*np.nonzero(found), strict=True):
            chips: tuple[int, ...] = (rank,)
            lane = rows[number]
            if lane is not None and KINDS[kind] == TRANSFER:
                chips = (next(source for source, target in lane.pairs if target == rank), rank)
            key = KINDS[kind], tuple(mesh.chip(chip) for chip in chips)
            times[key] = times.get(key, 0) + int(found[number, kind])
    return [BadSum(kind, chips, n) for (kind, chips), n in times.items()]


def _ways(program: Program) -> list[Program]:
    """Return the programs that a checked all-reduce may run."""
    return [program] if program.scalars is None else [program, program.scalars]


def _rows(program: Program) -> list[Lane | None]:
    """Return what a program's rows of evidence are of: lanes, and None for the end."""
    return [*(lane for loop in program.layout.shape.lanes for lane in loop), None]


def _own_rows(evidence: Any) -> dict[int, NDArray[np.uint32]]:
    """Return the rows that this process can read, by their number."""
    if not hasattr(evidence, "addressable_shards"):
        return dict(enumerate(np.asarray(evidence)))
    rows: dict[int, NDArray[np.uint32]] = {}
    for shard in evidence.addressable_shards:
        for number, found in enumerate(np.asarray(shard.data), start=shard.index[0].start or 0):
            # Cores of a chip may share a row, each with its own evidence.
            rows[number] = np.maximum(rows.get(number, found), found)
    return rows


def _run_checked(chunks: Chunks, program: Program, fault: Fault | None, first_loop: int) -> tuple[Chunks, Any]:
    """Run the program's loops; return the chunks, and this chip's evidence."""
    layout, loops = program.layout, program.layout.shape.lanes
    first_rows = [0, *accumulate(map(len, loops))]
    digests = _digest_each(chunks)
    evidence = jnp.zeros((first_rows[-1] + 1, len(KINDS)), jnp.uint32)
    for number, (tables, lanes) in enumerate(zip(program.tables, loops, strict=True)):
        inject = _Injection(fault, first_loop + number, layout.axis)

        def step(
            held: Any,
            row: Any,
            _: None,
            lanes: tuple[Lane, ...] = lanes,
            first: int = first_rows[number],
            inject: _Injection = inject,
        ) -> Any:
            chunks, digests, evidence, now = held
            checked = _CheckedStep(chunks, digests, lanes, inject)
            checked.move(row, now, layout)
            evidence = evidence.at[first : first + len(lanes)].add(checked.failed)
            return checked.chunks, checked.digests, evidence, now + 1

        start = (chunks, digests, evidence, jnp.int32(0))
        chunks, digests, evidence, _ = scan_steps(start, tables, None, layout, step)
    at_rest = (_digest_each(chunks) != digests).any().astype(jnp.uint32)
    return chunks, evidence.at[-1, KINDS.index(MEMORY)].add(at_rest)


def _digest_each(chunks: Chunks) -> Annotated[jax.Array, "uint32[K]"]:
    """Return the digests of all chunks.

    In a loop of its own, one chunk after the other: otherwise the compiler may compute what is summed once more, in
    another order, to digest it. And mixed words need no room but that of one chunk.
    """
    found: jax.Array = lax.map(lambda chunk: digest_rows(chunk[None])[0], chunks)
    return found


class _CheckedStep:
    """One step of a loop: moves as `loops` does, and notes which checks have failed.

    What a check reads must be read before it is overwritten, or the compiler copies the whole payload to be safe: on
    TPU barriers say so, elsewhere zeros that come out of the checks (see `after_all`).
    """

    def __init__(self, chunks: Chunks, digests: jax.Array, lanes: tuple[Lane, ...], inject: _Injection) -> None:
        self.chunks, self.digests = chunks, digests
        self._lanes, self._inject = lanes, inject
        self._failed: dict[tuple[int, str], Any] = {}

    @property
    def failed(self) -> Annotated[jax.Array, "uint32[L, 3]"]:
        """Whether each check of each lane has failed."""
        flags = [self._failed.get((i, kind), False) for i in range(len(self._lanes)) for kind in KINDS]
        return jnp.stack([jnp.asarray(flag).astype(jnp.uint32) for flag in flags]).reshape(-1, len(KINDS))

    def move(self, row: Any, now: jax.Array, layout: ChunkLayout) -> None:
        """Do what a row of the tables says; `now` is the number of the step."""
        send, receive, ops = row
        arrived, told = [], []
        for i, lane in enumerate(self._lanes):
            leaving = lax.dynamic_slice_in_dim(self.chunks, send[i], lane.run)
            leaving = lax.optimization_barrier(self._inject(MEMORY, i, now, leaving))
            digest = digest_rows(leaving)
            kept = lax.dynamic_slice_in_dim(self.digests, send[i], lane.run)
            self._failed[i, MEMORY] = (digest != kept).any()
            arrived.append(self._inject(TRANSFER, i, now, lax.ppermute(leaving, layout.axis, lane.pairs)))
            told.append(lax.ppermute(digest, layout.axis, lane.pairs))
        arrived, told = lax.optimization_barrier((arrived, told))
        is_tpu = layout.platform == "tpu"
        after = 0 if is_tpu else zero_after([*arrived, *told], receive[0])
        for i in range(len(self._lanes)):
            op = None if ops is None else ops[i]
            self._take(i, arrived[i], told[i], receive[i] + after, op, now, zero=None if is_tpu else receive[i] >> 31)

    def _take(self, i: int, new: jax.Array, told: jax.Array, at: jax.Array, op: Any, now: Any, zero: Any) -> None:
        """Check what has arrived on a lane, and put it where it belongs."""
        lane = self._lanes[i]
        digest = digest_rows(new)
        self._failed[i, TRANSFER] = (digest != told).any() & _does(lane, op, Op.REDUCE, Op.COPY)
        if lane.ops != (Op.COPY,):
            old = lax.dynamic_slice_in_dim(self.chunks, at, lane.run)
            old, total = lax.optimization_barrier((old, self._inject(ADDITION, i, now, old + new)))
            wrong = sum_rows(is_wrong_sum(old, new, total).reshape(lane.run, -1), is_flat=new.ndim == 2)
            self._failed[i, ADDITION] = (wrong > 0).any() & _does(lane, op, Op.REDUCE)
            sums = digest_rows(total)
            kept = lax.dynamic_slice_in_dim(self.digests, at, lane.run)
            digest = choose(lane, {Op.REDUCE: sums, Op.COPY: digest, KEEP: kept}, op)
            new = choose(lane, {Op.REDUCE: total, Op.COPY: new, KEEP: old}, op)
            if zero is not None:
                new = _tied(new, zero_after([wrong, sums], zero))
        self.chunks = lax.dynamic_update_slice_in_dim(self.chunks, new, at, axis=0)
        self.digests = lax.dynamic_update_slice_in_dim(self.digests, digest, at, axis=0)


def _tied(values: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the values, bit for bit, available only once a zero is."""
    if jnp.iscomplexobj(values):
        return lax.complex(_tied(jnp.real(values), zero), _tied(jnp.imag(values), zero))
    word = np.dtype(f"uint{8 * values.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(values, word) ^ zero.astype(word), values.dtype)


def _does(lane: Lane, op: Any, *which: int) -> Any:
    """Whether a lane does one of these things in this step."""
    if len(lane.ops) == 1:
        return lane.ops[0] in which
    return jnp.isin(op, jnp.asarray(which, jnp.uint8))


def is_wrong_sum(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """Whether a sum is further from a + b than rounding can take it, element by element."""
    if jnp.iscomplexobj(total):
        return is_wrong_sum(jnp.real(a), jnp.real(b), jnp.real(total)) | is_wrong_sum(
            jnp.imag(a), jnp.imag(b), jnp.imag(total)
        )
    rest = total - a
    if not jnp.issubdtype(total.dtype, jnp.floating):
        return rest != b
    info = jnp.finfo(total.dtype)
    # Devices may take numbers below the smallest normal one for zero.
    bound = info.eps * (jnp.abs(total) + jnp.abs(rest)) + 4 * info.tiny
    is_checked = jnp.abs(a) / 2 + jnp.abs(b) / 2 < info.max / 2  # never for what is not finite
    return is_checked & ~(jnp.abs(rest - b) <= bound)


class _Injection:
    """Flips a fault's bit where it belongs; does nothing, and costs nothing, without a fault."""

    def __init__(self, fault: Fault | None, loop: int, axis: str) -> None:
        self._fault = fault
        self._loop = loop
        self._axis = axis

    def __call__(self, kind: str, lane: int, now: Any, values: jax.Array) -> jax.Array:
        if self._fault is None:
            return values
        fault = self._fault
        here = (fault.kind == KINDS.index(kind)) & (fault.chip == lax.axis_index(self._axis))
        here &= (fault.loop == self._loop) & (fault.step == now) & (fault.lane == lane)
        word = np.dtype(f"uint{8 * values.dtype.itemsize}")
        bits = lax.bitcast_convert_type(values, word).reshape(-1)
        changed = bits.at[fault.element].set(bits[fault.element] ^ (word.type(1) << fault.bit.astype(word)))
        return lax.bitcast_convert_type(jnp.where(here, changed, bits), values.dtype).reshape(values.shape)
