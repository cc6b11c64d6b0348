"""A job with a large model: what keeps it safe, against the same steps without, in the same processes.

    meshmend run --local 2x2 --host 1x2 lab/benchmarks/job_size.py steps 100    # megabytes of parameters, with Adam
    meshmend run --local 4x1 --host 1x1 lab/benchmarks/job_size.py restore 400
    python lab/benchmarks/job_size.py copy 400

`steps`: a step of plain JAX with `pmean`, of a job without copies in memory, and of a job as it is by default; what
copies cost over the first ten steps and over the hundred after them, and the seconds of training at risk.
`restore`: from the copies in memory of all hosts, one of which has lost its own, and from disk; and how much more
memory than for its state a host needs meanwhile. `copy`: writing a copy against copying as many bytes in memory, and
what the program that makes copies needs on each device.
"""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH = 8
FIRST = 10
"""Steps that are timed by themselves: with the first copy, and before a job knows what copies cost."""
UNDER_WAY = 3
"""A loop has the next step when all but the last so many are done."""
COUNTED = 100
"""Steps after them, unless there is another number behind the megabytes."""


def model(megabytes: float) -> tuple[dict[str, Any], Any, Any]:
    """Layers of 4 MB whose loss is cheap, and their data."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    n_layers = max(1, round(megabytes * 1e6 / 4 / 1024**2))
    weights = (rng.standard_normal((1024, 1024)) / 320).astype(np.float32)
    data = rng.standard_normal((4096, 1024)).astype(np.float32)

    def loss(params: Any, batch: Any) -> Any:
        for weight in params.values():
            batch = batch + jnp.tanh(batch @ weight)
        return jnp.mean((batch - 1) ** 2, axis=1)

    return {f"layer {i:03d}": weights + np.float32(i / 1e4) for i in range(n_layers)}, loss, data


def plain_steps(params: Any, loss: Any, data: Any, n_steps: int) -> Iterator[None]:
    """Train as anybody would with `pmean`."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh, optimizer = Mesh(np.array(jax.devices()), "x"), optax.adam(1e-3)
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    weights = jax.tree.map(lambda v: jax.make_array_from_callback(v.shape, everywhere, lambda i: v[i]), params)
    state = jax.jit(optimizer.init, out_shardings=everywhere)(weights)

    def step(weights: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda w: loss(w, batch).mean())(weights)
        updates, state = optimizer.update(jax.lax.pmean(gradients, "x"), state, weights)
        return optax.apply_updates(weights, updates), state, jax.lax.pmean(value, "x")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=(P(), P(), P()), check_vma=False)
    compiled = jax.jit(mapped, donate_argnums=(0, 1))
    under_way: deque[Any] = deque()
    for i in range(n_steps):
        rows = data[i * BATCH % len(data) :][:BATCH]
        batch = jax.make_array_from_callback(rows.shape, split, rows.__getitem__)
        weights, state, value = compiled(weights, state, batch)
        under_way.append(value)
        if len(under_way) > 2:
            float(under_way.popleft().addressable_data(0))
        yield


def steps(megabytes: float) -> None:
    import jax
    import numpy as np
    import optax

    import meshmend.jax as mmj
    from meshmend.jax.session import initialize
    from meshmend.jax.state.timetable import NEVER

    params, loss, data = model(megabytes)
    counted = int(sys.argv[3]) if len(sys.argv) > 3 else COUNTED
    names = ("plain", "no copies", "default")
    first: dict[str, list[Any]] = {name: [] for name in names}
    later: dict[str, list[Any]] = {name: [] for name in names}
    chosen = ""
    with initialize() as session, tempfile.TemporaryDirectory() as private:
        shared = Path(os.environ.get("MESHMEND_SHARED", private))
        # What changes on the machine is seen by all alike; a second pass of a large model would take too long.
        for number, name in enumerate([*names, *reversed(names)] if megabytes < 200 else names):
            job: mmj.Job | None = None
            n_steps = FIRST + UNDER_WAY + counted
            loop: Any = plain_steps(params, loss, data, n_steps)
            if name != "plain":
                every: Any = 0 if name == "no copies" else "auto"
                options: Any = {"disk_every": 0, "compile_ahead": False, "hardware": "cpu-xla"}
                job = mmj.Job(shared / str(number), BATCH, session=session, memory_every=every, **options)
                loop = job.train(loss, optax.adam(1e-3), params, data, steps=n_steps + 1)
            session.coordination.exchange("ready")
            marks = [(time.perf_counter(), time.process_time())]
            for _ in loop:
                marks.append((time.perf_counter(), time.process_time()))
                if len(marks) > n_steps:
                    break
            begin, tenth, end = np.array([marks[0], marks[FIRST + UNDER_WAY], marks[-1]])
            first[name].append((tenth - begin) / FIRST)
            later[name].append((end - tenth) / counted)
            if name == "default":
                assert job is not None and job._run is not None and job._run._keeper is not None  # noqa: S101, PT018
                table = job._run._keeper._table
                n_kept = sum(note["event"] == "kept" for note in session.timeline.events)
                cut_s, write_s = table.cost or (0.0, 0.0)
                chosen = f"{n_kept} copies in all, each {cut_s:.2f} s on devices and {write_s:.2f} s of writing; "
                chosen += (
                    f"at most {table.at_risk_s:.1f} s of training at risk" if table.every < NEVER else "too few to say"
                )
            loop.close()
            del loop, job
            gc.collect()
        if jax.process_index() == 0:
            mean = {name: np.mean(seconds, axis=0)[0] for name, seconds in later.items()}
            where = f"{jax.process_count()} hosts of {jax.local_device_count()} devices"
            sys.stdout.write(
                f"{megabytes:g} MB of parameters, {where}: a step takes {mean['plain']:.3f} s with pmean; as a job "
                f"{mean['no copies'] / mean['plain']:.2f} of that without copies, "
                f"{mean['default'] / mean['plain']:.2f} by default\n"
                f"by default, of a job without copies: {ratios(first)} over the first {FIRST} steps, {ratios(later)} "
                f"over the {counted} after them; {chosen}\n"
            )


def ratios(seconds: dict[str, list[Any]]) -> str:
    """Write what copies cost: in each pass, which shows how much the machine varies, and in process 0's CPU time."""
    passes = [default / without for default, without in zip(seconds["default"], seconds["no copies"], strict=True)]
    wall, cpu = sum(seconds["default"]) / sum(seconds["no copies"])
    return f"{wall:.3f} (passes: {', '.join(f'{one[0]:.2f}' for one in passes)}; CPU time {cpu:.2f})"


def restore(megabytes: float) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.session import initialize
    from meshmend.jax.state import Keeper, put
    from meshmend.jax.state.layout.state_layout import StateLayout
    from meshmend.jax.state.memory.collect import compile_gather
    from meshmend.jax.state.memory.peer_copy import compile_cut
    from meshmend.jax.state.memory.placement import place

    params, loss, _ = model(megabytes)
    with initialize() as session:
        fabric, me = session.fabric, jax.process_index()
        folder = Path(session.coordination.exchange(tempfile.mkdtemp(prefix="meshmend-"))[0])
        for update in [sys.argv[3] if len(sys.argv) > 3 else "replicated"]:
            plan = mm.plan(fabric.mesh, "weave")
            program = mmj.install(plan, fabric, update=update)  # type: ignore[arg-type]
            training = mmj.train_step(loss, optax.adam(1e-3), fabric)
            layout = StateLayout.of(training, program, params)
            n_bytes = sum(math.prod(user.shape) * np.dtype(user.dtype).itemsize for user in layout.users)

            def begin(training: Any = training, program: Any = program) -> tuple[Any, Any]:
                weights = put(params, fabric)
                state = fabric.jit(training.init)(weights, program)
                # Arrays of their own: on CPU, the parameters are still NumPy's.
                found: tuple[Any, Any] = jax.tree.map(jnp.copy, (weights, state))
                jax.block_until_ready(found)
                return found

            memory = folder / f"memory-{me}"
            if Path("/dev/shm").is_dir():  # noqa: S108
                memory = Path("/dev/shm") / folder.name / f"{update}-{me}"  # noqa: S108
            both: Any = {"memory": memory, "disk": folder / update, "disk_timeout_s": 300.0}
            state = begin()
            layout.programs.update(cut=compile_cut(layout, *state, place(fabric)), gather=compile_gather(layout))
            kept = Keeper(session, layout, **both, memory_every=1, disk_every=1)
            kept.restore(*state)
            kept.keep(1, *state, save=True)
            assert kept._mirror is not None and kept.checkpoints is not None  # noqa: S101, PT018
            kept._mirror.wait()
            kept.checkpoints.close()
            kept.abandon()
            if me == 1 and "--lost" in sys.argv:
                shutil.rmtree(kept.memory.folder)  # as on a host that came back without memory
            del state, kept
            seconds: dict[str, list[float]] = {"memory": [], "disk": []}
            more: dict[str, list[float]] = {"memory": [], "disk": []}
            for source in ("memory", "disk") * 2:
                gc.collect()
                weights, moments = begin()
                session.coordination.exchange("ready")
                before = memory_mb("VmRSS", anew=True)
                begun = time.perf_counter()
                only: Any = {"disk": None} if source == "memory" else {"memory_every": 0}
                keeper = Keeper(session, layout, **both | {"memory_every": 1} | only)
                found = keeper.restore(weights, moments, donate=True)
                jax.block_until_ready((found.params, found.state))
                session.coordination.exchange("done")
                seconds[source].append(time.perf_counter() - begun)
                more[source].append(memory_mb("VmHWM") - before)
                assert found.source == source  # noqa: S101
                keeper.abandon()
                del weights, moments, found, keeper
            peak = max(max(told) for told in session.coordination.exchange(more["memory"]))
            if me == 0:
                best = {source: min(times) for source, times in seconds.items()}
                sys.stdout.write(
                    f"{update}, {n_bytes / 1e6:.0f} MB of state, {jax.process_count()} hosts of "
                    f"{jax.local_device_count()} devices: from memory {best['memory']:.2f} s, from disk "
                    f"{best['disk']:.2f} s, ratio {best['memory'] / best['disk']:.2f}; from memory at most "
                    f"{peak * 1e6 / n_bytes:.2f} states in RAM beyond its own\n"
                )
                sys.stdout.flush()
        session.coordination.exchange("over")
        if me == 0:
            for path in (folder, Path("/dev/shm") / folder.name):  # noqa: S108
                shutil.rmtree(path, ignore_errors=True)


def copy(megabytes: float) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    import jax
    import numpy as np
    import optax

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.state import put
    from meshmend.jax.state.layout.state_layout import StateLayout
    from meshmend.jax.state.memory.copies import HostMemory
    from meshmend.jax.state.memory.peer_copy import compile_cut, copy_of
    from meshmend.jax.state.memory.placement import place

    params, loss, _ = model(megabytes)
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    placement = place(fabric, host_of_chip=[0, 0, 1, 1])
    for update in ("replicated", "two-phase"):
        program = mmj.install(mm.plan(fabric.mesh, "weave"), fabric, update=update)
        training = mmj.train_step(loss, optax.adam(1e-3), fabric)
        weights = put(params, fabric)
        state = fabric.jit(training.init)(weights, program)
        layout = StateLayout.of(training, program, params)
        n_bytes = sum(math.prod(user.shape) * np.dtype(user.dtype).itemsize for user in layout.users)
        cut = compile_cut(layout, weights, state, placement)
        needs: Any = cut.memory_analysis()
        parts = jax.block_until_ready(cut(weights, state))
        folder = Path(tempfile.mkdtemp(prefix="meshmend-", dir=os.environ.get("MESHMEND_MEMORY", "/dev/shm")))  # noqa: S108
        memory, wrote, copied = HostMemory(folder / "host-0"), list[float](), list[float]()
        one = copy_of(parts, layout, placement, 0, 1, 0, None, "run")
        of_host = np.concatenate([array.view(np.uint8) for data in one.data for array in data])
        into = np.zeros_like(of_host)
        for step in range(8):
            begun = time.perf_counter()
            memory.write(copy_of(parts, layout, placement, 0, 1, step, None, "run"))
            wrote.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            np.copyto(into, of_host)
            copied.append(time.perf_counter() - begun)
        memory.clear()
        shutil.rmtree(folder)
        sys.stdout.write(
            f"{update}, {n_bytes / 1e6:.0f} MB of state: a host's copy of {of_host.nbytes / 1e6:.0f} MB is written at "
            f"{of_host.nbytes / min(wrote) / 1e9:.2f} GB/s, {min(copied) / min(wrote):.2f} of what memory copies; on "
            f"each of 4 devices it takes outputs of {needs.output_size_in_bytes / n_bytes:.3f} and temporaries of "
            f"{needs.temp_size_in_bytes / n_bytes:.3f} states\n"
        )


def memory_mb(name: str, *, anew: bool = False) -> float:
    """Return what this process uses now (VmRSS) or has used at most (VmHWM), `anew` from here on."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None  # noqa: S101
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    {"steps": steps, "restore": restore, "copy": copy}[sys.argv[1]](float(sys.argv[2]))
