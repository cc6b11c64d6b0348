"""A job's programs for a TPU slice that is not here, by the calls that a job makes; run by `test_job_programs`.

XLA aborts on some programs that it should refuse, so this is a process of its own. Prints one line of JSON: what was
compiled, and with which options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.serialize_executable import serialize
from jax.sharding import PartitionSpec as P

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.checks.digests import replica_digests
from meshmend.jax.checks.recompute import Recompute
from meshmend.jax.compile import CompiledTrainStep, compile_train_step
from meshmend.jax.compile.for_topology import most_in_flight, slice_fabric
from meshmend.jax.engine.program import Update, abstract_program
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.job.model import Model, joiner
from meshmend.jax.train.fsdp.params import sharder

WIDTH, LAYERS = 128, 2
WAYS: dict[str, Update] = {"replicated": "replicated", "fused": "fused", "fsdp": "two-phase"}
WEIGHTS = {"up": np.zeros((WIDTH, 4 * WIDTH), np.float32), "down": np.zeros((4 * WIDTH, WIDTH), np.float32)}
INSIDE = {"up": P(None, "model"), "down": P("model", None)}
SAMPLES = np.zeros((64, WIDTH), np.float32)


@contextmanager
def recorded_compilations(*, at_least: int = 2) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Give a list that gets the name and the options of each program that JAX compiles for so many devices."""
    from jax._src import compiler

    found: list[tuple[str, dict[str, Any]]] = []
    compile_as_before = compiler.compile_or_get_cached

    def noted(backend: Any, module: Any, devices: Any, options: Any, *rest: Any, **more: Any) -> Any:
        if devices.size >= at_least:
            name = str(module.operation.attributes["sym_name"]).strip('"')
            found.append((name, dict(options.env_option_overrides)))
        return compile_as_before(backend, module, devices, options, *rest, **more)

    with mock.patch.object(compiler, "compile_or_get_cached", noted):
        yield found


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(layer(params, x) ** 2, axis=1)


def loss_of_shards(params: Any, x: Any, pair: mmj.Program) -> Any:
    head = mmj.fsdp.gather_params(params["head"], pair)
    return jnp.sum(layer(head, mmj.fsdp.scan_layers(layer, params["layers"], x, pair)) ** 2, axis=1)


def shards(fabric: mmj.Fabric, pair: mmj.Program) -> dict[str, Any]:
    inside = INSIDE if isinstance(fabric, TiledFabric) else None
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {
        "head": mmj.fsdp.shard_params(WEIGHTS, fabric, pair, shardings=inside),
        "layers": mmj.fsdp.init_sharded(draw, keys, fabric, pair, stacked=True, shardings=inside),
    }


def draw(key: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), WEIGHTS)


def model_of(kind: str, fabric: mmj.Fabric) -> Model:
    if kind == "fsdp":
        return Model(loss_of_shards, optax.adam(0.1), shards)
    return Model(loss, optax.adam(0.1), WEIGHTS, shardings=INSIDE if isinstance(fabric, TiledFabric) else None)


def build(kind: str, fabric: mmj.Fabric) -> CompiledTrainStep:
    """As `TrainingRun` does: init, step, copies, and restoring from them."""
    program = abstract_program(mm.plan(fabric.mesh, "weave", chunks=2 * fabric.mesh.n_chips), fabric, update=WAYS[kind])
    model, feed = model_of(kind, fabric), mmj.Feed(SAMPLES, mmj.KeepPerChip(2), threads=0, prefetch=0)
    return compile_train_step(model.training(fabric), program, model.like(fabric, program), feed.like(fabric))


def compile_the_rest(kind: str, fabric: mmj.Fabric, compiled: CompiledTrainStep) -> None:
    """What a job runs besides: making and fetching sharded parameters, and checks."""
    layout, program, model = compiled.layout, compiled.program, model_of(kind, fabric)
    params, _ = jax.tree.unflatten(
        layout.structure,
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(number))
            for number, leaf in enumerate(layout.leaves)
        ],
    )
    if program.update == "two-phase":
        inside = INSIDE if isinstance(fabric, TiledFabric) else None
        keys = jax.random.split(jax.random.key(0), LAYERS)
        made, values, _ = sharder(draw, keys, fabric, program, stacked=True, shardings=inside)
        values = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=fabric.sharding()) for value in values]
        made.lower(values, program).compile()
        number = jax.ShapeDtypeStruct((), np.int32, sharding=fabric.sharding())
        for part in params.values():
            joiner(part, fabric, program).lower(number, part, program).compile()
        return
    digest = fabric.jit(partial(replica_digests, fabric=fabric, shardings=model.shardings))
    digest.lower(params, program).compile()
    if not isinstance(fabric, TiledFabric):
        feed = mmj.Feed(SAMPLES, mmj.KeepPerChip(2), threads=0, prefetch=0)
        Recompute(model.gradients, fabric, lambda fact: [fact], every=1).compile(params, None, feed.like(fabric))


def main(topology: str, hole: str, side: str, kind: str, *, with_the_rest: bool) -> None:
    fabric = slice_fabric(topology, failed=[hole])
    if side != "none":
        fabric = mmj.tile(fabric, side)
    with recorded_compilations() as found:  # not what is computed here on one device, such as random keys
        compiled = build(kind, fabric)
        if with_the_rest:
            compile_the_rest(kind, fabric, compiled)
    facts = {
        "programs": [name for name, _ in found],
        "all_have_options": all(fabric.compiler_options.items() <= options.items() for _, options in found),
        "can_be_saved": all(len(serialize(one)[0]) > 1000 for one in compiled.executables.values()),
        "in_flight": most_in_flight(compiled.executables["step"].as_text()),
    }
    sys.stdout.write(f"\n{json.dumps(facts)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:5], with_the_rest=sys.argv[5:] == ["all"])
