"""Schedules that try to fool a proof: most are wrong, some are right after all, and none says which.

A proof that keeps less than the whole truth can be fooled where two truths look the same to it: counts that wrap round,
sums that are equal modulo a prime, totals that agree although their parts do not. Each generator here aims at one of
these. Whether it hit is for exact counting to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from meshmend import Collective, Mesh, Op, Schedule
from random_schedules import COLLECTIVES, random_schedule

Row = tuple[int, int, int, int, int, int]
Step = list[tuple[int, int, Op]]
"""Transfers (source, destination, op) of one step."""

MODULI = (2**61 - 1, 2**8, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64, 2**31 - 1)
"""What a count may come round at: the prime of the fingerprints, and what machine words and floats can hold."""


def hostile_schedule(seed: int) -> tuple[str, Schedule]:
    """Return the kind of attack and a schedule of at most about a dozen chips, always the same for the same seed."""
    rng = random.Random(seed)
    kind = rng.choice(list(ATTACKS))
    return kind, ATTACKS[kind](rng)


def doublings(rng: random.Random) -> Schedule:
    """Two chips add each other up again and again: what they hold doubles with every step."""
    times = rng.choice([rng.randint(1, 8), rng.randint(58, 66), rng.randint(120, 130)])
    both: Step = [(0, 1, Op.REDUCE), (1, 0, Op.REDUCE)]
    return of_steps(rng, _line(2), [both] * times)


def growth(rng: random.Random) -> Schedule:
    """Chips of a ring add each other up in turn, so that counts grow like Fibonacci's numbers and faster."""
    n = rng.randint(2, 4)
    steps: list[Step] = [[(step % n, (step + 1) % n, Op.REDUCE)] for step in range(rng.randint(n, 120))]
    return of_steps(rng, _line(n), steps + _spread(rng, n))


def round_trip(rng: random.Random) -> Schedule:
    """Sum up, then multiply the sum (or one contribution) by a number that is 1 modulo something."""
    n = rng.randint(3, 5)
    factor = 1 + rng.choice(MODULI) * rng.choice([0, 1, 1, 1, 2, rng.randint(1, 2**20)])
    last = n - 1
    steps: list[Step] = []
    if rng.random() < 0.5:
        steps += [[(chip, last, Op.REDUCE)] for chip in range(last)] + _spread(rng, n, last)
        return of_steps(rng, _line(n), steps + _times(factor, 0, 1, 2) + _spread(rng, n, 2))
    # Only one chip's contribution comes in too often; chips 0 and 1 lend their place and bring theirs in before.
    steps += [[(0, last, Op.REDUCE)], [(1, last, Op.REDUCE)]]
    if last > 2:
        steps += [[(chip, last, Op.REDUCE)] for chip in range(2, last)] + [[(last, 2, Op.COPY)]]
    multiple = factor - 1
    steps += [[(last, 0, Op.COPY), (last, 1, Op.COPY)]]
    if multiple:
        steps += _times(multiple, 0, 1, 2 if last > 2 else last, fresh=False)
    return of_steps(rng, _line(n), steps + _spread(rng, n, 2 if last > 2 else last))


def equal_totals(rng: random.Random) -> Schedule:
    """As many contributions as there should be, but one twice and another not at all."""
    n = rng.randint(3, 6)
    sources = [rng.randrange(n - 1) for _ in range(n - 1)] if rng.random() < 0.8 else list(range(n - 1))
    steps: list[Step] = [[(chip, n - 1, Op.REDUCE)] for chip in sources]
    return of_steps(rng, _line(n), steps + _spread(rng, n, n - 1))


def periodic(rng: random.Random) -> Schedule:
    """A few random steps, many times over."""
    n = rng.randint(2, 5)
    period = [_random_step(rng, n) for _ in range(rng.randint(1, 4))]
    return of_steps(rng, _line(n), period * rng.choice([1, 2, 3, 20, 61]) + _spread(rng, n))


def soup(rng: random.Random) -> Schedule:
    """Random steps, few enough to be right now and then."""
    n = rng.randint(2, 3)
    return of_steps(rng, _line(n), [_random_step(rng, n) for _ in range(rng.randint(2, 6))])


def late_writes(rng: random.Random) -> Schedule:
    """A right schedule, and then one more write."""
    schedule = random_schedule(rng.getrandbits(32), max_chips=6, max_chunks=5)
    n = schedule.mesh.n_chips
    if n == 1:
        return schedule
    src, dst = rng.sample(range(n), 2)
    first = rng.randrange(schedule.total_chunks)
    row = (schedule.n_steps, src, dst, first, rng.randint(1, schedule.total_chunks - first), rng.choice(list(Op)))
    return _with_rows(schedule, [*_rows(schedule), row])


def stale_copies(rng: random.Random) -> Schedule:
    """A right schedule of which some transfers come earlier or later than they should, from or to another chip."""
    schedule = random_schedule(rng.getrandbits(32), max_chips=6, max_chunks=5)
    rows = _rows(schedule)
    for _ in range(rng.randint(1, 3) if rows else 0):
        number = rng.randrange(len(rows))
        step, src, dst, first, length, op = rows[number]
        other = rng.randrange(schedule.mesh.n_chips)
        match rng.choice(["step", "src", "dst", "op", "length", "drop"]):
            case "step":
                step = max(0, step + rng.randint(-3, 3))
            case "src" if other != dst:
                src = other
            case "dst" if other != src:
                dst = other
            case "op":
                op = 1 - op
            case "length":
                length = rng.randint(1, schedule.total_chunks - first)
            case "drop" if len(rows) > 1:
                del rows[number]
                continue
        rows[number] = step, src, dst, first, length, op
    return _with_rows(schedule, rows)


def wrong_owner(rng: random.Random) -> Schedule:
    """A right reduce-scatter or all-gather whose owners are others, or which claims to be another collective."""
    schedule = random_schedule(rng.getrandbits(32), max_chips=5, max_chunks=4)
    owners = schedule.owners.tolist()
    owners[rng.randrange(len(owners))] = rng.randrange(schedule.mesh.n_chips)
    collective = rng.choice([schedule.collective, rng.choice(COLLECTIVES)])
    return _with_rows(schedule, _rows(schedule), owners, collective)


ATTACKS: dict[str, Callable[[random.Random], Schedule]] = {
    attack.__name__: attack
    for attack in (
        doublings,
        growth,
        round_trip,
        equal_totals,
        periodic,
        soup,
        late_writes,
        stale_copies,
        wrong_owner,
    )
}


def of_steps(rng: random.Random, mesh: Mesh, steps: list[Step]) -> Schedule:
    """Make a schedule of whole steps over one chunk, or over a few that all travel together or one by one."""
    chunks = rng.choice([1, 1, 2, 3])
    lengths = rng.choice([[chunks], [1] * chunks])
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    rows = [
        (number, src, dst, first, length, int(op))
        for number, step in enumerate(steps)
        for src, dst, op in step
        for first, length in zip(firsts, lengths, strict=True)
    ]
    collective = rng.choice([Collective.ALL_REDUCE, Collective.ALL_REDUCE, *COLLECTIVES])
    return _from_rows(mesh, chunks, rows, [rng.randrange(mesh.n_chips)] * chunks, collective)


def _line(n: int) -> Mesh:
    return Mesh((1, n))


def _spread(rng: random.Random, n: int, holder: int | None = None) -> list[Step]:
    """Copy what one chip holds to all others, from one to the next."""
    holder = rng.randrange(n) if holder is None else holder
    return [[(holder, chip, Op.COPY)] for chip in range(n) if chip != holder]


def _times(factor: int, one: int, two: int, into: int, *, fresh: bool = True) -> list[Step]:
    """Let chip `into` hold `factor` times what `one` and `two` both hold (or that much more than it held).

    The peasants' way: the two double each other, and wherever the factor has a binary digit 1 they are added.
    """
    steps: list[Step] = []
    while factor:
        step: Step = [(one, two, Op.REDUCE), (two, one, Op.REDUCE)]
        if factor & 1:
            step.append((one, into, Op.COPY if fresh else Op.REDUCE))
            fresh = False
        steps.append(step)
        factor >>= 1
    return steps


def _random_step(rng: random.Random, n: int) -> Step:
    writes = rng.sample(range(n), rng.randint(1, n))
    return [(rng.choice([chip for chip in range(n) if chip != dst]), dst, rng.choice(list(Op))) for dst in writes]


def _rows(schedule: Schedule) -> list[Row]:
    columns = (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _with_rows(
    schedule: Schedule, rows: list[Row], owners: list[int] | None = None, collective: Collective | None = None
) -> Schedule:
    owned = schedule.owners.tolist() if owners is None else owners
    return _from_rows(schedule.mesh, schedule.total_chunks, rows, owned, collective or schedule.collective)


def _from_rows(mesh: Mesh, chunks: int, rows: list[Row], owners: list[int], collective: Collective) -> Schedule:
    step, src, dst, first_chunk, n_chunks, op = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Schedule(
        mesh,
        total_chunks=chunks,
        step=np.unique(step, return_inverse=True)[1],
        src=src,
        dst=dst,
        first_chunk=first_chunk,
        n_chunks=n_chunks,
        op=op,
        owners=owners,
        collective=collective,
    )
