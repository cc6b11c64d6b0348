"""A transformer whose parameters are sharded over all surviving chips, through the real TPU compiler, without a TPU.

    python lab/benchmarks/jax_fsdp.py --topology v6e:8x8 --hole 2x2@2,2  # bytes per chip, replicated and sharded
    python lab/benchmarks/jax_fsdp.py --topology v5p:4x4x4 --hole 2x2x1@2,2,0 --ways sharded
    python lab/benchmarks/jax_fsdp.py --topology v6e:8x8 --hole 2x2@2,2 --ways behind --gradients --dtype bfloat16

Each way is compiled in a process of its own, because the compiler aborts on some programs. It prints the memory that a
step needs per chip, and how much of the computing, in the bodies of the scan over layers and outside them, lies beside
permutes in the compiler's schedule. That is an order of instructions, not a measured time.

Ways: "replicated" (`train_step` with a `Program`: everything is summed after the backward pass), "update"
(`update="two-phase"`: the optimizer's state is sharded), "behind" (`scan_layers` with replicated parameters: each layer
is all-reduced one layer later; gradients only), "sharded" (`scan_layers` with sharded parameters).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from typing import Any

import meshmend as mm

WAYS = {"replicated": ("none", False), "update": ("update", False), "behind": ("none", True), "sharded": ("fsdp", True)}
"""What is sharded, and whether communication hides behind computing."""


def plans_for(options: argparse.Namespace, mesh: mm.Mesh, way: str) -> Any:
    """Return the schedules of a way."""
    from layer_stack import StackPlans

    chunks = options.chunks or mesh.n_chips
    whole = mm.plan(mesh, "weave", chunks=chunks, owners="even")
    if way not in ("update", "sharded") or options.planner == "weave":
        return StackPlans(whole)
    halves = [mm.plan(mesh, "gather", chunks=chunks, collective=what) for what in ("reduce-scatter", "all-gather")]
    return StackPlans(whole, *halves)


def compile_way(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Compile one way for the slice, and return what the compiler says of it."""
    from layer_stack import Shard, Transformer, compile_stack
    from meshmend.jax.compile.for_topology import slice_fabric

    shard, hide = WAYS[way]
    failed = [options.hole] if options.hole else []
    fabric = slice_fabric(options.topology, failed=failed, cores=1)
    plans = plans_for(options, fabric.mesh, way)
    model = Transformer(
        options.layers, options.width, options.sequence, options.batch, options.dtype, options.wide_sums
    )
    gradients_only = way == "behind" or (options.gradients and way == "sharded")
    report, bodies = compile_stack(
        options.topology,
        model,
        plans,
        fabric,
        shard=Shard(shard),
        hide=hide and not options.unhidden,
        gradients_only=gradients_only,
    )
    return {
        "way": way,
        "chips": report.chips,
        "parameters": model.n_params,
        "steps": (plans.scatter or plans.whole).n_steps,
        "argument_bytes": report.argument_bytes,
        "temporary_bytes": report.temporary_bytes,
        "peak_bytes": report.peak_bytes,
        "compile_seconds": report.compile_seconds,
        "bodies": [dataclasses.asdict(one) | {"place": one.place, "share": one.share} for one in bodies],
    }


def compile_in_subprocess(way: str) -> dict[str, Any]:
    """Compile one way in a process of its own, by this script with the same options."""
    words = [sys.executable, __file__, *sys.argv[1:], "--here", "--json", "--ways", way]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.findall(r"^.*(?:Check failed|Fatal|Error).*$", done.stderr, re.M) or [done.stderr.strip()[-300:]]
        raise SystemExit(f"{way}: the compiler ended with {done.returncode}: {said[0]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:8x8")
    parser.add_argument("--hole", default="2x2@2,2", help='"" for the full slice')
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="examples per chip")
    parser.add_argument("--dtype", default="float32", help="of the weights, float32 or bfloat16")
    parser.add_argument("--wide-sums", action="store_true", help="sum in float32, and keep float32 shards")
    parser.add_argument("--planner", choices=["gather", "weave"], default="gather", help="of the pair of programs")
    parser.add_argument("--chunks", type=int, help="of the plan; by default one per chip")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["replicated", "update", "sharded"])
    parser.add_argument("--gradients", action="store_true", help="sharded: the gradients only, without the optimizer")
    parser.add_argument("--unhidden", action="store_true", help="gather each layer when it is needed: less memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help="compile in this process")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if not options.json:
        minus = f" minus {options.hole}" if options.hole else ""
        print(f"{options.topology}{minus}, {options.layers} layers of width {options.width}; MB per chip")
        print(f"{'':12}{'arguments':>11}{'temporaries':>13}{'peak':>9}  computing beside permutes")
    for way in options.ways:
        facts = compile_way(options, way) if options.here else compile_in_subprocess(way)
        if options.json:
            print(json.dumps(facts), flush=True)
            continue
        bodies = ", ".join(f"{one['place']} {one['share']:.0%} ({one['permutes']} permutes)" for one in facts["bodies"])
        sizes = [facts[name] / 1e6 for name in ("argument_bytes", "temporary_bytes", "peak_bytes")]
        print(f"{way:12}{sizes[0]:11.0f}{sizes[1]:13.0f}{sizes[2]:9.0f}  {bodies}", flush=True)


if __name__ == "__main__":
    main()
