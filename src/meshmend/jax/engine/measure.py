"""Measure the devices at hand: what a collective's start, a step, a permute and a byte cost through XLA, and how many
links a chip drives at once.

No preset describes CPU devices, and nobody has published what a permute costs through XLA on a TPU. So a few probes are
timed, each a loop of the engine's own steps over neighbours of the mesh: with one lane and with all of them, with short
and with long messages, with few steps and with many. Hardware is fitted to their times (`meshmend.cost.fitting`). The
plan for a hole cannot be timed before the hole is there: that is why a model is fitted, and not the fastest plan timed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshmend.cost import Hardware, find_hardware
from meshmend.cost.fitting import TimedLoop, fit_loops
from meshmend.cost.hardware import write_hardware
from meshmend.errors import ParameterError
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.loops import move
from meshmend.jax.engine.program import ChunkLayout, put_rows
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.schedule import Collective, Op
from meshmend.schedule.lanes import KEEP, Lane, ProgramShape

SHORT, LONG, LONG_ON_CPU = 2**8, 2**22, 2**17
"""Floats of a message: so few that bytes do not count, and so many that they do. CPU devices share one memory."""
ROOM = 4
"""Chunks that each device holds."""
FEW_STEPS, MOST_STEPS, GROWTH = 2, 20_000, 4
TARGET_S = 0.05
"""What a run of many steps takes, about."""
REPEAT, ROUNDS = 2, 5


def measure(fabric: Fabric, *, file: str | Path | None = None) -> Hardware:
    """Return the hardware of a fabric as its devices show it, in seconds; in a job, call it on every process.

    With `file`, the measurement is also written there, with versions and raw times: `hardware=file` takes it wherever a
    preset's name is taken, such as `meshmend plan --hardware file.json`.

    >>> import jax, meshmend.jax as mmj
    >>> found = mmj.measure(mmj.discover(jax.devices()[:4], shape="2x2"))
    >>> found.runs_lanes, found.is_switched, found.link_bytes_per_s > 1e6
    (True, True, True)
    """
    chips = fabric.chips if isinstance(fabric, TiledFabric) else fabric
    directions = [lane for lane in _neighbour_lanes(chips) if lane.pairs]
    if not directions:
        raise ParameterError(f"Nothing can be measured on {chips.mesh!r}: no cable joins two chips.")
    loops = _run_loops(chips, directions)
    is_switched = chips.platform == "cpu" and _share_network(_agreeing(chips))
    hardware = fit(loops, chips, len(directions), platform=chips.platform, is_switched=is_switched)
    if file is not None and jax.process_index() == 0:
        write_hardware(hardware, file, measured_facts(chips, loops))
    return hardware


def measured_facts(fabric: Fabric, loops: list[TimedLoop]) -> dict[str, Any]:
    """Return what a measurement was made of and on, for its file."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu") if find_spec(name) is not None}
    return {
        "versions": versions,
        "device_kind": str(fabric.jax_mesh.devices.flat[0].device_kind),
        "platform": fabric.platform,
        "mesh": str(fabric.mesh),
        "chips": fabric.n_chips,
        "processes": jax.process_count(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "loops": [vars(loop) for loop in loops],
    }


def _neighbour_lanes(fabric: Fabric) -> list[Lane]:
    """Return a lane per direction, from each chip to its neighbour there; a chip that has none keeps what it holds."""
    neighbours = fabric.mesh.neighbours
    ops = (int(Op.REDUCE), KEEP)
    return [
        Lane(tuple((int(rank), int(neighbours[rank, d])) for rank in np.flatnonzero(neighbours[:, d] >= 0)), 1, ops)
        for d in range(neighbours.shape[1])
    ]


def _run_loops(fabric: Fabric, directions: list[Lane]) -> list[TimedLoop]:
    counts = [1, len(directions)] if fabric.platform == "cpu" else range(1, len(directions) + 1)
    sizes = (SHORT, LONG_ON_CPU if fabric.platform == "cpu" else LONG)
    kinds = [(lanes, size) for lanes in sorted(set(counts)) for size in sizes]
    run = _program(fabric, [(tuple(directions[:lanes]), size) for lanes, size in kinds])

    def steps(n: int, number: int) -> list[int]:
        return [n if other == number else 0 for other in range(len(kinds))]

    nothing = min(run(steps(0, 0)) for _ in range(REPEAT))
    loops = [(0, 0)]
    for number in range(len(kinds)):
        many = _many_steps(lambda n, number=number: run(steps(n, number)), nothing)  # type: ignore[misc]
        loops += [(FEW_STEPS, number), (many, number)]
    best = [float("inf")] * len(loops)
    # In rounds: while a job starts, other processes of its hosts take the cores now and then.
    for _ in range(ROUNDS):
        best = [min(before, run(steps(*loop))) for before, loop in zip(best, loops, strict=True)]
    return [
        TimedLoop(n, kinds[number][0], 4 * kinds[number][1], seconds)
        for (n, number), seconds in zip(loops, best, strict=True)
    ]


def _many_steps(run: Callable[[int], float], nothing: float) -> int:
    """Return how many steps take about `TARGET_S`, longer than a run of none; `run(n)` says how long n steps take.

    They are found from a few on: on a busy machine these may take no longer than none, which says nothing of thousands.
    """
    n = FEW_STEPS
    while n < MOST_STEPS:
        n = min(GROWTH * n, MOST_STEPS)
        seconds = run(n)
        if seconds > max(2 * nothing, TARGET_S / GROWTH):
            return int(np.clip(n * TARGET_S / (seconds - nothing), 2 * FEW_STEPS, min(GROWTH * n, MOST_STEPS)))
    return n


def _program(fabric: Fabric, kinds: list[tuple[tuple[Lane, ...], int]]) -> Callable[[list[int]], float]:
    """Compile one program with a loop per kind of step; return what times so many steps of each, mostly none.

    One program and not many: on a host that starts, compiling takes longer than everything else here.
    """
    n = fabric.mesh.n_chips
    tables = []
    for lanes, _ in kinds:
        ops = np.full((n, len(lanes)), KEEP, dtype=np.uint8)
        for number, lane in enumerate(lanes):
            ops[[dst for _, dst in lane.pairs], number] = int(Op.REDUCE)
        tables.append(put_rows(ops, fabric.sharding(fabric.axis)))
    shape = ProgramShape(n, ROOM, Collective.ALL_REDUCE, (), ())
    layout = ChunkLayout(shape, fabric.axis, fabric.core_axis, 1, fabric.platform)

    def local(n_steps: jax.Array, payloads: list[jax.Array], tables: list[jax.Array]) -> list[jax.Array]:
        payloads = list(payloads)
        by_size = {size: i for i, size in enumerate(sizes)}
        for number, (lanes, size) in enumerate(kinds):

            def step(i: jax.Array, held: jax.Array, lanes: Any = lanes, ops: jax.Array = tables[number]) -> jax.Array:
                at = jnp.full(len(lanes), i % ROOM, dtype=jnp.int32)
                return move(held, (at, at, ops[0]), lanes, layout)

            which = by_size[size]
            held: jax.Array = lax.fori_loop(0, n_steps[number], step, payloads[which][0])
            payloads[which] = held[None]
        return payloads

    sizes = sorted({size for _, size in kinds})
    by_device, by_chip = PartitionSpec(fabric.axes), PartitionSpec(fabric.axis)
    mapped = jax.shard_map(
        local,
        mesh=fabric.jax_mesh,
        in_specs=(PartitionSpec(), by_device, by_chip),
        out_specs=by_device,
        check_vma=False,
    )
    run = fabric.jit(mapped, donate_argnums=1)
    n_devices = int(fabric.jax_mesh.devices.size)
    chunk = {size: (size,) if layout.tile == 1 else (size // 128, 128) for size in sizes}
    start = [np.zeros((n_devices, ROOM, *chunk[size]), np.float32) for size in sizes]
    held = [put_rows(values, fabric.sharding(fabric.axes)) for values in start]
    held = jax.block_until_ready(run(np.ones(len(kinds), np.int32), held, tables))

    agree = _agreeing(fabric)

    def timed(n_steps: list[int]) -> float:
        nonlocal held
        started = time.perf_counter()
        held = jax.block_until_ready(run(np.array(n_steps, np.int32), held, tables))
        return agree(time.perf_counter() - started)

    return timed


def _agreeing(fabric: Fabric) -> Callable[[float], float]:
    """Return what finds the largest of the numbers that processes have: what follows from it is the same on all."""
    if jax.process_count() == 1:
        return lambda value: value
    n_devices = int(fabric.jax_mesh.devices.size)
    largest = fabric.jit(jnp.max, out_shardings=fabric.sharding())

    def agree(value: float) -> float:
        found = largest(put_rows(np.full(n_devices, value, np.float32), fabric.sharding(fabric.axes)))
        return float(np.asarray(found.addressable_data(0)))

    return agree


def _share_network(agree: Callable[[float], float]) -> bool:
    """Whether all processes are in one network namespace: then they share no link, whatever the mesh looks like.

    Between others the mesh's own links count, as on a TPU: only neighbours are timed, and their times do not show
    which transfers share a link.
    """
    if jax.process_count() == 1:
        return True
    here = (Path("/proc/sys/kernel/random/boot_id").read_bytes(), Path("/proc/self/ns/net").stat().st_ino)
    mine = float(zlib.crc32(repr(here).encode()) >> 8)  # 24 bits, which processes compare as float32
    return agree(mine) == -agree(-mine)


def fit(loops: list[TimedLoop], fabric: Fabric, n_lanes: int, *, platform: str, is_switched: bool = False) -> Hardware:
    """Return the hardware whose times are closest, in proportion, to those of the loops."""
    # CPU devices share their cores: two lanes take twice as long as one.
    costs = fit_loops(loops, range(1, 2 if platform == "cpu" else n_lanes + 1))
    step, width = costs.step_s, costs.width
    known = find_hardware(fabric.hardware) if fabric.hardware is not None else None
    hop = 0.0 if is_switched or known is None else min(known.hop_latency_s, step)
    kind = str(fabric.jax_mesh.devices.flat[0].device_kind)
    how = f"measured on {fabric.n_chips} chips, {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
    return Hardware(
        f"{kind}, measured",
        link_bytes_per_s=1 / costs.byte_s,
        step_latency_s=step - hop,
        hop_latency_s=hop,
        links_at_once=None if width == fabric.mesh.n_directions and not is_switched else width,
        start_s=costs.start_s,
        message_s=costs.message_s,
        runs_lanes=True,
        is_switched=is_switched,
        sources=tuple((name, how) for name in ("link_bytes_per_s", "step_latency_s", "message_s", "links_at_once")),
    )
