"""A job of a transformer with a billion parameters, on paper: what its programs need per chip, and its copies per host.

    python lab/benchmarks/jax_billion.py                                   # v5p:4x4x4 and v6e:8x8, each without a host
    python lab/benchmarks/jax_billion.py --machines v6e:8x8 --updates fsdp
    python lab/benchmarks/jax_billion.py --layers 2 --width 256 --vocabulary 512 --machines v6e:8x8  # a small one

All programs that a job compiles (`compile_train_step`) go through the real TPU compiler, without a TPU: the one for the
optimizer's first state, the step, and what makes copies of the state and sends them. Bytes per chip are the compiler's
own: arguments, results that are not written over arguments, and temporaries. Each program is counted by itself: while
`init` runs, the parameters are in HBM as well, and while copies are sent, the whole state, which these programs do
not take. Nothing is executed, so that no time of a step is known.

Parameters, sums of gradients and Adam's moments are float32, computing is in bfloat16, and each layer is computed again
in the backward pass. Each update is compiled in a process of its own, because the compiler aborts on some programs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from itertools import product
from typing import Any

HOLES = {"v5p:4x4x4": "2x2x1@0,0,0", "v6e:8x8": "2x2@2,2"}
"""The machines, and the host of each that is lost."""
HBM_BYTES = {"v5p": 95e9, "v6e": 32e9}
"""Per chip: cloud.google.com/tpu/docs/v5p and /v6e."""
UPDATES = ("replicated", "sharded", "fsdp")
"""Kinds of update, as a job names them."""


def model_of(options: argparse.Namespace, update: str) -> Any:
    """Return the model as a job has it: a transformer that predicts the next token of each example."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    import meshmend.jax as mmj
    from layer_stack import Transformer, layer
    from meshmend.jax.job.model import Model

    stack = Transformer(options.layers, options.width).weights
    ends = {"embed": jax.ShapeDtypeStruct((options.vocabulary, options.width), jnp.float32)}

    def half(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)

    def predict(ends: Any, run: Any, tokens: Any) -> Any:
        embed = ends["embed"]
        logits = run(embed[tokens[:, :-1]]) @ embed.T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean(axis=1)

    def loss(params: Any, tokens: Any) -> Any:
        def one(x: Any, weights: Any) -> Any:
            return layer(half(weights), x), None

        return predict(half(params["ends"]), lambda x: lax.scan(jax.checkpoint(one), x, params["layers"])[0], tokens)

    def sharded_loss(params: Any, tokens: Any, pair: Any) -> Any:
        ends = mmj.fsdp.gather_params(params["ends"], pair)
        return predict(ends, lambda x: mmj.fsdp.scan_layers(layer, params["layers"], x, pair), tokens)

    def zeros(like: Any, drop: int = 0) -> Any:
        return lambda _: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[drop:], leaf.dtype), like)

    def sharded_params(fabric: Any, pair: Any) -> Any:
        keys = jnp.zeros(options.layers)
        of_layers = mmj.fsdp.init_sharded(zeros(stack, 1), keys, fabric, pair, stacked=True, gather_dtype=jnp.bfloat16)
        return {
            "ends": mmj.fsdp.init_sharded(zeros(ends), keys[0], fabric, pair, gather_dtype=jnp.bfloat16),
            "layers": of_layers,
        }

    optimizer = optax.adam(1e-3)
    if update == "fsdp":
        return Model(sharded_loss, optimizer, sharded_params)
    return Model(loss, optimizer, {"ends": ends, "layers": stack})


def count_params(options: argparse.Namespace) -> int:
    """Return how many parameters the model has."""
    from layer_stack import Transformer

    found: int = Transformer(options.layers, options.width).n_params + options.vocabulary * options.width
    return found


def time_compiling() -> dict[int, float]:
    """Return a dict that will have how long each program took to compile, by the compiled object's `id`."""
    import jax

    seconds: dict[int, float] = {}
    compile_one = jax.stages.Lowered.compile

    def timed(self: Any, *given: Any, **options: Any) -> Any:
        started = time.perf_counter()
        found = compile_one(self, *given, **options)
        seconds[id(found)] = time.perf_counter() - started
        return found

    jax.stages.Lowered.compile = timed  # type: ignore[method-assign]
    return seconds


def compile_job(options: argparse.Namespace, machine: str, update: str) -> dict[str, Any]:
    """Compile all programs of a job for a machine with its hole; return what the compiler says of them."""
    import numpy as np

    import meshmend.jax as mmj
    from meshmend.jax.compile import compile_train_step
    from meshmend.jax.compile.for_topology import slice_fabric
    from meshmend.jax.session.session import RECOVERY_BUDGET_S
    from meshmend.jax.state.memory.copies import KEPT
    from meshmend.jax.state.memory.redundancy import CHECKED_COPIES, copy_bytes, least_blocks

    seconds = time_compiling()
    fabric = slice_fabric(machine, failed=[options.hole or HOLES[machine]])
    model = model_of(options, update)
    planned = mmj.plan(fabric, model.outline(fabric), update=update, budget_s=RECOVERY_BUDGET_S)  # type: ignore[arg-type]
    program = planned.abstract(fabric)
    examples = np.zeros((fabric.n_chips * options.batch, options.sequence + 1), np.int32)
    batch = mmj.Feed(examples, mmj.KeepPerChip(options.batch)).like(fabric)
    compiled = compile_train_step(model.training(fabric), program, model.like(fabric, program), batch)
    n_hosts = len({device.process_index for device in fabric.jax_mesh.devices.flat})
    of_host = sum(copy_bytes(compiled.layout, least_blocks(compiled.layout)))
    programs = {}
    for name, one in compiled.executables.items():
        memory = one.memory_analysis()
        programs[name] = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "compile_seconds": seconds.get(id(one), math.nan),
        }
    return {
        "machine": machine,
        "mesh": str(fabric.mesh),
        "chips": fabric.n_chips,
        "hosts": n_hosts,
        "update": update,
        "planner": planned.schedules[0].planner,
        "parameters": count_params(options),
        "programs": programs,
        "state_bytes": sum(size * np.dtype(dtype).itemsize for dtype, size in compiled.layout.outline.vectors.values()),
        "copies_bytes": KEPT * of_host,
        "checked_copies_bytes": CHECKED_COPIES * of_host,
    }


def compile_in_subprocess(machine: str, update: str) -> dict[str, Any]:
    """Compile one update for one machine in a process of its own, by this script with the same options."""
    words = [sys.executable, __file__, *sys.argv[1:], "--here", "--machines", machine, "--updates", update]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.findall(r"^.*(?:Check failed|Fatal|Error|Ran out).*$", done.stderr, re.M)
        why = (said or [done.stderr.strip()[-300:]])[-1]
        return {"machine": machine, "update": update, "problem": f"ended with {done.returncode}: {why}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_job(facts: dict[str, Any]) -> None:
    """Print one row per program."""
    where = f"{facts['machine']:10} {facts['update']:10}"
    if "problem" in facts:
        print(f"{where} {facts['problem']}", flush=True)
        return
    hbm = HBM_BYTES[facts["machine"].partition(":")[0]]
    for name, one in facts["programs"].items():
        parts = [one[f"{which}_bytes"] for which in ("argument", "output", "temporary")]
        sizes = "".join(f"{part / 1e9:12.2f}" for part in (*parts, sum(parts)))
        print(f"{where} {name:8}{sizes}{sum(parts) / hbm:12.1%}{one['compile_seconds']:10.0f} s", flush=True)


def print_hosts(found: list[dict[str, Any]]) -> None:
    """Print what copies of the state take in the memory of a host, by arithmetic."""
    from meshmend.jax.state.memory.copies import KEPT
    from meshmend.jax.state.memory.redundancy import CHECKED_COPIES

    heads = f"{'hosts':>8}{'state':>11}{f'{KEPT} copies':>11}{f'{CHECKED_COPIES} with checks':>16}"
    print(f"\nGB of RAM per host for copies of the state\n{'machine':10} {'update':10} {heads}")
    for facts in found:
        state, copies, checked = (facts[f"{which}_bytes"] / 1e9 for which in ("state", "copies", "checked_copies"))
        where = f"{facts['machine']:10} {facts['update']:10} {facts['hosts']:8}"
        print(f"{where}{state:11.2f}{copies:11.2f}{checked:16.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", choices=HOLES, default=list(HOLES))
    parser.add_argument("--hole", help="in place of a host's chips, as in 2x2@0,0")
    parser.add_argument("--updates", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--vocabulary", type=int, default=40_960)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1, help="examples per chip")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help="compile in this process, and print JSON")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.here:
        for machine, update in product(options.machines, options.updates):
            print(json.dumps(compile_job(options, machine, update)), flush=True)
        return
    if not options.json:
        heads = "".join(
            f"{head:>12}" for head in ("arguments", "results", "temporaries", "in all", "of HBM", "compiled in")
        )
        print(
            f"{count_params(options):,} parameters: {options.layers} layers of width {options.width}, "
            f"{options.vocabulary:,} words; {options.batch} × {options.sequence} tokens per chip; GB per chip\n"
            f"{'machine':10} {'update':10} {'program':8}{heads}"
        )
    found = []
    for machine, update in product(options.machines, options.updates):
        facts = compile_in_subprocess(machine, update)
        print(json.dumps(facts), flush=True) if options.json else print_job(facts)
        found += [] if "problem" in facts else [facts]
    if found and not options.json:
        print_hosts(found)


if __name__ == "__main__":
    main()
