"""A small training job for the restart campaign: what each host's worker runs, under the launcher.

    meshmend run … -m meshmend_lab.bench.trainee job.json

It is the complete script of docs/recovery.md with a few switches, so that a campaign can switch off one aid at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from meshmend.topology import parse_shape

N_SAMPLES = 640
WIDTH = 32
LAYERS = 3
"""Between the ends, where parameters are sharded."""
UPDATES: dict[str, Literal["replicated", "sharded", "fsdp"]] = {
    "none": "replicated",
    "update": "sharded",
    "fsdp": "fsdp",
}
"""What a job calls it."""


@dataclass(frozen=True)
class TrainingJob:
    """What to train, and with which options."""

    folder: str
    caches: str = ""
    """Where plans and compiled programs are kept; by default in the job's folder."""
    shape: str = "4x4"
    host: str = "2x2"
    steps: int = 60
    planner: str = "hamiltonian"
    batch: int = 64
    keep_global: bool = True
    shard: str = "update"
    """What is sharded over the chips: nothing ("none"), the weight update, or the parameters, too ("fsdp")."""
    exact: bool = False
    """Integer-valued gradients: the same bits on any number of chips."""
    memory: bool = True
    plans: bool = True
    compile_cache: bool = True
    ahead: bool = True
    """Compile ahead for the loss of each host."""
    disk_every: int = 20
    pause_s: float = 0.0
    pause_on_hole_s: float = 0.0
    """Pause after each step on a mesh with a hole, so that a lost host can return before the job is over."""

    def write(self) -> Path:
        """Write the job to the file that its workers read."""
        path = Path(self.folder) / "job.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path


def main(path: str) -> None:
    """Train, or resume training."""
    job = TrainingJob(**json.loads(Path(path).read_text()))
    n_chips = math.prod(parse_shape(job.host))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={n_chips} --xla_cpu_multi_thread_eigen=false"
    folder = Path(job.folder)
    caches = Path(job.caches or job.folder)
    host = os.environ["MESHMEND_HOST"]

    import jax
    import optax

    import meshmend.jax as mmj
    from meshmend.jax.compile.saved import SavedSteps, shapes_of
    from meshmend.jax.session import initialize
    from meshmend.jax.session.hardware import with_hardware
    from meshmend.jax.session.session import RECOVERY_BUDGET_S
    from meshmend.jax.state import Keeper, fetch, put
    from meshmend.jax.train.plan import TrainingPlan, any_pair
    from meshmend.launch.timeline import timeline_of
    from meshmend.planning import PlanCache

    with initialize(
        job.shape,
        job.host,
        compile_cache=caches / "compiled" if job.compile_cache else None,
        timeline=timeline_of(folder, int(host)),
        timeout_s=15,
    ) as joined:
        # What a job does: it measures once, and plans for that.
        session = with_hardware(joined, caches / "hardware", None, measures=job.planner == "auto")
        fabric, timeline = session.fabric, session.timeline
        plans = caches / "plans" if job.plans else folder / f"no-plans-{session.launch.coordinator.split(':')[1]}"
        feed = mmj.Feed(_samples(), _policy(job), seed=1, threads=0, prefetch=0)
        loss = exact_loss if job.exact else regression_loss
        optimizer = optax.adam(2.0**-7 if job.exact else 1e-2)

        def outline(fabric: mmj.Fabric) -> Any:
            if job.shard != "fsdp":
                return _params(job.exact)
            return jax.eval_shape(lambda pair: _sharded_params(fabric, pair), any_pair(fabric))

        def make_plan(fabric: mmj.Fabric, cache: PlanCache) -> TrainingPlan:
            return mmj.plan(
                fabric,
                outline(fabric),
                update=UPDATES[job.shard],
                planner=job.planner,
                cache=cache,
                budget_s=RECOVERY_BUDGET_S,
            )

        def ingredients(fabric: mmj.Fabric, program: Any) -> tuple[Any, Any, Any]:
            if job.shard == "fsdp":
                sharded = mmj.fsdp.sharded_train_step(sharded_loss, optimizer, fabric, per_example=True)
                like = jax.eval_shape(lambda pair: _sharded_params(fabric, pair), program)
                return sharded, like, feed.like(fabric)
            return mmj.train_step(loss, optimizer, fabric, per_example=True), _params(job.exact), feed.like(fabric)

        planned = session.agree_on_plan(lambda cache: make_plan(fabric, cache), plans)
        params = shapes_of(_params(job.exact))
        made_of = {"losses": (loss, sharded_loss), "optimizer": optimizer, "params": params, "policy": _policy(job)}
        programs = caches / "programs" if job.compile_cache else None
        steps = SavedSteps(programs, session, made_of | {"shard": job.shard}, ingredients)
        compiled = steps.start(planned)
        is_fsdp = job.shard == "fsdp"
        params = _sharded_params(fabric, compiled.program) if is_fsdp else put(_params(job.exact), fabric)
        keeper = Keeper(
            session,
            compiled.layout,
            memory=folder / "memory" / f"host-{host}",
            memory_every=1 if job.memory else 0,
            disk=folder / "disk" if job.disk_every else None,
            disk_every=job.disk_every,
        )
        found = keeper.restore(params, compiled.init(params), extra=mmj.Position())
        params, state = found.params, found.state
        at = mmj.Position(*found.extra)
        batches = feed.batches(fabric, at=at)
        timeline.note("feed", step=found.step, position=at, batch=feed.split(fabric).global_batch)
        ahead = None
        for number in range(found.step + 1, job.steps + 1):
            batch = next(batches)
            params, state, value = compiled.step(params, state, batch)
            keeper.keep(number, params, state, extra=batch.after)
            facts: dict[str, Any] = {"digest": _digest(params)} if job.exact else {}
            facts |= {"examples": len(batch.indices), "position": batch.at}
            timeline.note("step", step=number, loss=float(fetch(value)), **facts)
            steps.confirm()
            if job.ahead and number == found.step + 3:
                # Not earlier: it would slow down a restart.
                ahead = steps.ahead(lambda fabric: make_plan(fabric, PlanCache(plans)))
            time.sleep(job.pause_s if fabric.mesh.is_full else job.pause_on_hole_s)
        keeper.close()
        if ahead is not None:
            ahead.stop()
        timeline.note("done", digest=_digest(params))


def exact_loss(params: Any, batch: Any) -> Any:
    """Return a loss per example whose gradients are small whole numbers that depend on the weights."""
    import jax.numpy as jnp
    from jax import lax

    level = lax.stop_gradient(jnp.floor(params["w"] * 64) % 8) - 3
    return (batch["whole"] @ (level * params["w"])).sum(axis=-1) + params["b"].sum()


def regression_loss(params: Any, batch: Any) -> Any:
    """Return the squared error per example of a small network."""
    import jax.numpy as jnp

    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return (hidden @ params["out"] - batch["y"]) ** 2


def sharded_loss(params: Any, batch: Any, pair: Any) -> Any:
    """Return the squared error per example of a few layers between two ends, all of them sharded."""
    import jax.numpy as jnp

    import meshmend.jax as mmj

    ends = mmj.fsdp.gather_params(params["ends"], pair)
    x = jnp.tanh(batch["x"] @ ends["w"] + ends["b"])
    x = mmj.fsdp.scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"] + w["b"]), params["layers"], x, pair)
    return (x @ ends["out"] - batch["y"]) ** 2


def _sharded_params(fabric: Any, pair: Any) -> Any:
    import numpy as np

    import meshmend.jax as mmj

    rng = np.random.default_rng(2)
    shapes = {"w": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH)}
    layers = {name: (rng.standard_normal(shape) / 16).astype(np.float32) for name, shape in shapes.items()}
    return {
        "ends": mmj.fsdp.shard_params(_params(exact=False), fabric, pair),
        "layers": mmj.fsdp.shard_params(layers, fabric, pair, stacked=True),
    }


def _params(exact: bool) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = {"w": (16, WIDTH), "b": (WIDTH,)} | ({} if exact else {"out": (WIDTH,)})
    return {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}


def _samples() -> list[dict[str, Any]]:
    import numpy as np

    rng = np.random.default_rng(1)
    x = rng.standard_normal((N_SAMPLES, 16)).astype(np.float32)
    y = np.sin(x.sum(axis=1)).astype(np.float32)
    whole = rng.integers(-3, 4, (N_SAMPLES, 16)).astype(np.float32)
    return [{"x": x[i], "y": y[i], "whole": whole[i]} for i in range(N_SAMPLES)]


def _policy(job: TrainingJob) -> Any:
    import meshmend.jax as mmj

    return mmj.KeepGlobal(job.batch) if job.keep_global else mmj.KeepPerChip(job.batch // 16)


def _digest(params: Any) -> str:
    import jax
    import numpy as np

    leaves = [np.asarray(leaf.addressable_shards[0].data) for leaf in jax.tree.leaves(params)]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1])
