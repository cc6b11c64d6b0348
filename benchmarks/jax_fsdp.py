"""A transformer whose parameters are sharded over all surviving chips, through the real TPU compiler, without a TPU.

    python benchmarks/jax_fsdp.py --topology v6e:8x8 --hole 2x2@2,2  # bytes per chip, replicated and sharded
    python benchmarks/jax_fsdp.py --topology v5p:4x4x4 --hole 2x2x1@2,2,0 --ways sharded
    python benchmarks/jax_fsdp.py --topology v6e:8x8 --hole 2x2@2,2 --ways behind --gradients --dtype bfloat16

Each way is compiled in a process of its own, because the compiler aborts on some programs. It prints the memory that a
step needs per chip, and how much of the computing in the bodies of the scan over layers lies beside permutes in the
compiler's schedule. That is an order of instructions, not a measured time.

Ways: "replicated" (`train_step` with a `Program`: everything is summed after the backward pass), "update"
(`install_pair`: the optimizer's state is sharded), "behind" (`scan_layers` with replicated parameters: each layer is
all-reduced one layer later), "sharded" (`scan_layers` with sharded parameters).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

WAYS = ("replicated", "update", "behind", "sharded")


def layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Return the arrays of one layer."""
    return {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "norm1": (width,),
        "norm2": (width,),
    }


def layer(w: Any, x: Any) -> Any:
    """Apply attention and a perceptron, each with a norm before it."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + scale)

    n_heads = x.shape[-1] // 64
    q, k, v = jnp.split((norm(x, w["norm1"]) @ w["qkv"]).reshape(*x.shape[:2], n_heads, -1), 3, axis=-1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def compile_way(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Compile one way for the slice, and return what the compiler says of it."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax
    from jax.sharding import PartitionSpec

    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.compiling.ahead_of_time import slice_fabric
    from meshmend.jax.compiling.hidden import bodies_with_permutes
    from meshmend.jax.program import abstract_pair, abstract_program

    fabric = slice_fabric(options.topology, failed=[options.hole], cores=1)
    n_chips = fabric.mesh.n_chips
    chunks = options.chunks or n_chips
    schedule = mm.plan(fabric.mesh, "weave", chunks=chunks, owners="even")
    program: Any
    if way in ("update", "sharded"):
        halves = (
            {
                name: mm.plan(fabric.mesh, "gather", chunks=chunks, collective=what)
                for name, what in (("scatter", "reduce-scatter"), ("gather", "all-gather"))
            }
            if options.planner == "gather"
            else {}
        )
        program = abstract_pair(schedule, fabric, **halves)
        steps = program.scatter.n_steps
    else:
        program = abstract_program(schedule, fabric)
        steps = program.n_steps
    dtype = jnp.dtype(options.dtype)
    sums = jnp.float32 if options.wide_sums else None
    shape = (options.layers, n_chips * options.batch, options.sequence, options.width)

    def placed(tree: Any, specs: Any) -> Any:
        specs = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fabric.sharding(*spec)), tree, specs
        )

    def plain_loss(params: Any, x: Any) -> Any:
        y, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, params)
        return jnp.mean((y - jnp.roll(x, 1, axis=1)).astype(jnp.float32) ** 2)

    def scanned_loss(params: Any, x: Any, program: Any) -> Any:
        y = mmj.scan_layers(layer, params, x, program, accumulate_dtype=sums, hide=not options.no_hide)
        return jnp.mean((y - jnp.roll(x, 1, axis=1)).astype(jnp.float32) ** 2)

    whole = {name: jax.ShapeDtypeStruct((shape[0], *one), dtype) for name, one in layer_shapes(options.width).items()}
    x = placed(jax.ShapeDtypeStruct(shape[1:], dtype), PartitionSpec(fabric.axes))
    optimizer = optax.adam(1e-2)
    if way == "sharded":
        params = jax.eval_shape(
            lambda tree, pair: mmj.shard_params(tree, fabric, pair, stacked=True, accumulate_dtype=sums), whole, program
        )
        specs = mmj.sharded_specs(params, fabric)
        training: Any = mmj.sharded_train_step(scanned_loss, optimizer, fabric)
    else:
        params, specs = whole, PartitionSpec()
        training = mmj.train_step(plain_loss, optimizer, fabric)
    params = placed(params, specs)
    arguments: tuple[Any, ...]
    if way == "behind" or options.gradients:
        differentiate = jax.grad(scanned_loss)
        step = jax.shard_map(
            differentiate,
            mesh=fabric.jax_mesh,
            in_specs=(specs, PartitionSpec(fabric.axes), program.spec),
            out_specs=specs,
            check_vma=False,
        )
        jitted, arguments = jax.jit(step), (params, x, program)
    else:
        state = jax.eval_shape(training.init, params, program)
        by_owner = way == "update"
        state_specs = (
            jax.tree.map(lambda leaf: PartitionSpec(fabric.axes) if by_owner and leaf.ndim else PartitionSpec(), state)
            if way != "sharded"
            else mmj.sharded_specs(state, fabric)
        )
        jitted = jax.jit(training.step, donate_argnums=(0, 1))
        arguments = (params, placed(state, state_specs), x, program)
    started = time.perf_counter()
    compiled: Any = jitted.lower(*arguments).compile(compiler_options=dict(fabric.overlap_options))
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    return {
        "way": way,
        "chips": n_chips,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(whole)),
        "steps": steps,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "compile_seconds": seconds,
        "bodies": [
            {"permutes": one.permutes, "loops": one.loops, "cycles": one.cycles, "share": one.share}
            for one in bodies_with_permutes(compiled.as_text())[:4]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:8x8")
    parser.add_argument("--hole", default="2x2@2,2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="examples per chip")
    parser.add_argument("--dtype", default="float32", help="of the weights, float32 or bfloat16")
    parser.add_argument("--wide-sums", action="store_true", help="sum in float32, and keep float32 shards")
    parser.add_argument("--planner", choices=["gather", "weave"], default="gather", help="of the pair of programs")
    parser.add_argument("--chunks", type=int, help="of the plan; by default one per chip")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["replicated", "update", "sharded"])
    parser.add_argument("--gradients", action="store_true", help="compile the gradients only, without the optimizer")
    parser.add_argument("--no-hide", action="store_true", help="gather each layer when it is needed: less memory")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one way")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.child:
        sys.stdout.write(f"\n{json.dumps(compile_way(options, options.ways[0]))}\n")
        return
    if not options.json:
        print(f"{options.topology} minus {options.hole}, {options.layers} layers of width {options.width}; MB per chip")
        print(f"{'':12}{'arguments':>11}{'temporaries':>13}{'peak':>9}  computing beside permutes, by body")
    given = [word for word in sys.argv[1:] if word not in (*WAYS, "--ways")]
    for way in options.ways:
        done = subprocess.run(
            [sys.executable, __file__, *given, "--child", "--ways", way],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=options.timeout,
        )
        line = done.stdout.splitlines()[-1]
        if options.json:
            print(line, flush=True)
            continue
        facts = json.loads(line)
        bodies = ", ".join(f"{one['share']:.0%} ({one['permutes']} permutes)" for one in facts["bodies"])
        sizes = [facts[name] / 1e6 for name in ("argument_bytes", "temporary_bytes", "peak_bytes")]
        print(f"{way:12}{sizes[0]:11.0f}{sizes[1]:13.0f}{sizes[2]:9.0f}  {bodies}", flush=True)


if __name__ == "__main__":
    main()
