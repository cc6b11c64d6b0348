"""What a model may do inside a tile: one small loss per case, for the table in docs/tiles.md.

`python tests/jax_engine/inside_tiles.py CASE` runs one in a process of its own, as XLA might abort.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.reach import ACROSS, reach_of_collectives

ROWS, WIDTH = 24, 16
INNER = {"fsdp", "tensor"}


def _rows(h: Any) -> Any:
    """Something that needs whole rows, as a kernel in a shard_map does."""
    return jax.lax.all_gather(jax.nn.softmax(h), "tensor", axis=1, tiled=True)


def _one_hot(p: Any, x: Any) -> Any:
    return jax.nn.one_hot(x, ROWS) @ p["table"] @ p["w"]


def _lookup(p: Any, x: Any) -> Any:
    return p["table"][x] @ p["w"]


def _scanned(p: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.lax.scan(layer, _one_hot(p, x), jnp.stack([p["w"], p["w"]]))[0]


def _cases(mesh: Any) -> dict[str, tuple[Callable[[Any, Any], Any], P]]:
    spec, rows = P("fsdp", "tensor"), P("tensor", None)
    mapped: dict[str, Any] = {"in_specs": spec, "out_specs": P("fsdp"), "check_vma": False}
    constrain: Any = jax.lax.with_sharding_constraint
    return {
        "no constraints": (_lookup, rows),
        "constraint, PartitionSpec": (lambda p, x: constrain(_one_hot(p, x), spec), rows),
        "constraint, NamedSharding": (lambda p, x: constrain(_one_hot(p, x), NamedSharding(mesh, spec)), rows),
        "scan and remat": (_scanned, rows),
        "shard_map(mesh=mesh)": (lambda p, x: jax.shard_map(_rows, mesh=mesh, **mapped)(_one_hot(p, x)), rows),
        "shard_map(axis_names=inner)": (
            lambda p, x: jax.shard_map(_rows, axis_names=INNER, **mapped)(_one_hot(p, x)),
            rows,
        ),
        "lookup, table split by rows": (lambda p, x: constrain(_lookup(p, x), spec), rows),
        "lookup, table split by columns": (lambda p, x: constrain(_lookup(p, x), spec), P(None, "fsdp")),
        "lookup, table split by both": (lambda p, x: constrain(_lookup(p, x), spec), P("fsdp", "tensor")),
    }


CASES = list(_cases(None))


def try_out(name: str) -> tuple[float, list[str]]:
    """Return the largest difference of the gradients from plain jit's, relative to the largest, and what crosses tiles.

    The latter are the kinds of collectives that join different tiles, apart from the plan's permutes.
    """
    chips = mmj.discover(jax.devices()[:16], shape="4x4", failed=["0,1"])
    fabric = mmj.tile(chips, "2x2", fsdp=2, tensor=2)
    program = mmj.install(mm.plan(fabric.mesh, "weave", chunks=4), fabric)
    model, table = _cases(fabric.jax_mesh)[name]
    specs = {"table": table, "w": P("fsdp", "tensor")}
    rng = np.random.default_rng(0)
    shapes = {"table": (ROWS, WIDTH), "w": (WIDTH, WIDTH)}
    host = {key: rng.normal(0, 1, shape).astype(np.float32) for key, shape in shapes.items()}
    params = {key: jax.device_put(value, fabric.sharding(*specs[key])) for key, value in host.items()}
    tokens = rng.integers(0, ROWS, 12).astype(np.int32)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(model(p, x) ** 2)

    def plain(p: Any, x: Any) -> Any:
        h = _scanned(p, x) if model is _scanned else _lookup(p, x)
        if name.startswith("shard_map"):
            # Each chip's softmax is over the columns that it has.
            h = jnp.concatenate([jax.nn.softmax(part) for part in jnp.split(h, 2, axis=1)], axis=1)
        return jnp.mean(h**2)

    differentiate = mmj.value_and_grad(loss, fabric, specs)
    step = jax.jit(lambda p, x, program: differentiate(p, x, program=program))
    with jax.set_mesh(fabric.jax_mesh):
        arguments = params, jax.device_put(tokens, fabric.sharding(("tile", "fsdp"))), program
        compiled = step.lower(*arguments).compile()
        _, got = compiled(*arguments)
    reach = reach_of_collectives(str(compiled.as_text()), fabric.devices_per_tile)
    _, want = jax.value_and_grad(plain)(host, tokens)
    off = max(float(np.abs(got[key] - want[key]).max() / np.abs(want[key]).max()) for key in host)
    return off, [kind for kind, where in reach if where == ACROSS]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    difference, crossing = try_out(*sys.argv[1:])
    print(f"off by {difference:.0e}; across tiles: {', '.join(crossing) or 'the plan alone'}")  # noqa: T201
