"""Memory that sharded state takes per chip of a TPU, by the real compiler's count, without a TPU.

    python lab/benchmarks/jax_shard_memory.py          # all tables, for v5p and v6e; fails beyond its limits
    python lab/benchmarks/jax_shard_memory.py --quick  # one mesh and one model
    python lab/benchmarks/jax_shard_memory.py --tables stored reduced --json

Three tables. "stored": what arrays of shards take, for every plan that `auto` makes for three models on three meshes
with a hole, as multiples of their bytes: as they are stored, and as they would be with flat rows, (R, n). "reduced":
temporaries of the all-reduce of a model's gradients. "step": arguments, temporaries and the peak of a whole step of
AdamW, beside the least bytes that parameters and state may have on a chip, and those of the elements that it has room
for: a chip has room for as many chunks as the chip that owns most.

Nothing is executed. Each row is compiled in a process of its own, because the compiler aborts on some programs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import meshmend as mm

Shape = tuple[int, ...]
GPT2_WIDTH, LLAMA_WIDTH = 768, 2048
MACHINES = {"v6e:8x8": "2x2@2,2", "v5p:4x4x4": "2x2x1@0,0,0"}
"""Slices that programs are compiled for, and the hole of each."""
MESHES = {"8x8": "2x2@2,2", "4x4x4": "2x2x1@0,0,0", "16x32": "4x2@6,8"}
"""Meshes whose plans are stored, each with its hole: the last has more chips than any slice of these kinds."""
KINDS = {machine.partition(":")[0]: machine for machine in MACHINES}
UPDATES = ("replicated", "sharded", "fsdp")
"""Kinds of update, as a job names them."""
MOST_PADDED = 1.02
"""Times the bytes of shards."""
TABLE_BYTES = 2e6
"""Bytes of a program's tables, at most, and of a batch: they are arguments beside parameters and state."""
MOST_TEMPORARY = {
    ("v6e:8x8", "Llama 1B, stacked"): 12.75e9,
    ("v6e:8x8", "ResNet-50"): 112e6,
    ("v6e:8x8", "GPT-2 124M"): 999e6,
    ("v5p:4x4x4", "Llama 1B, stacked"): 12.75e9,
    ("v5p:4x4x4", "ResNet-50"): 203e6,
    ("v5p:4x4x4", "GPT-2 124M"): 1495e6,
}
"""Bytes: what leaves that are joined flat took, and of the stacked llama 14 % less."""


def gpt2() -> dict[str, Shape]:
    """GPT-2 with 124M parameters: many small leaves, and a vocabulary that no tile divides."""
    d = GPT2_WIDTH
    block = {
        "ln1.g": (d,), "ln1.b": (d,), "attn.w": (d, 3 * d), "attn.b": (3 * d,), "proj.w": (d, d), "proj.b": (d,),
        "ln2.g": (d,), "ln2.b": (d,), "fc.w": (d, 4 * d), "fc.b": (4 * d,), "fc2.w": (4 * d, d), "fc2.b": (d,),
    }  # fmt: skip
    layers = {f"h{i:02}.{name}": shape for i in range(12) for name, shape in block.items()}
    return {"wte": (50257, d), "wpe": (1024, d), **layers, "lnf.g": (d,), "lnf.b": (d,)}


def llama_layer() -> dict[str, Shape]:
    """One layer of Llama 3.2 1B."""
    d, kv, f = LLAMA_WIDTH, 512, 8192
    return {"ln1": (d,), "q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "ln2": (d,),
            "gate": (d, f), "up": (d, f), "down": (f, d)}  # fmt: skip


def llama_ends() -> dict[str, Shape]:
    """What is not in its layers."""
    return {"embed": (128256, LLAMA_WIDTH), "lnf": (LLAMA_WIDTH,)}


LLAMA_LAYERS = 16


def llama() -> dict[str, Shape]:
    """Llama 3.2 1B with its layers in stacks, as `jax.lax.scan` has them."""
    return {**llama_ends(), **{name: (LLAMA_LAYERS, *shape) for name, shape in llama_layer().items()}}


def resnet50() -> dict[str, Shape]:
    """ResNet-50: convolutions, most of whose last axes are whole rows of tiles."""
    found: dict[str, Shape] = {"stem.w": (7, 7, 3, 64), "stem.g": (64,), "stem.b": (64,)}
    before = 64
    for stage, (blocks, w) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            ways = [("c0", 1, before, w), ("c1", 3, w, w), ("c2", 1, w, 4 * w)]
            ways += [("down", 1, before, 4 * w)] if block == 0 else []
            for name, side, inputs, outputs in ways:
                at = f"s{stage}b{block}{name}"
                found |= {f"{at}.w": (side, side, inputs, outputs), f"{at}.g": (outputs,), f"{at}.b": (outputs,)}
            before = 4 * w
    return {**found, "fc.w": (2048, 1000), "fc.b": (1000,)}


MODELS = {"GPT-2 124M": gpt2, "Llama 1B, stacked": llama, "ResNet-50": resnet50}


def size_of(shapes: dict[str, Shape]) -> int:
    """Return the number of parameters."""
    return sum(map(math.prod, shapes.values()))


def arrays(shapes: dict[str, Shape]) -> Any:
    """Return parameters as shapes and dtypes."""
    import jax
    import jax.numpy as jnp

    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def plans_of(mesh: str, model: str, kind: str, update: str) -> Any:
    """Return what `auto` plans for a model: gradients of all of it or, for FSDP, a layer of a stack."""
    from meshmend.cost import find_hardware
    from meshmend.planning import Workload, plan_step
    from meshmend.schedule import Collective

    collective = Collective.ALL_GATHER if update == "fsdp" else Collective.ALL_REDUCE_WITH_UPDATE
    workload = Workload(4.0 * size_of(shard_of_model(model, update)), collective).rounded()
    return plan_step(mm.Mesh(mesh, failed=[MESHES[mesh]]), workload, find_hardware(f"tpu-{kind}-xla"))


def shard_of_model(model: str, update: str) -> dict[str, Shape]:
    """Return what is cut into shards together: of a stack, one layer."""
    return llama_layer() if (model, update) == ("Llama 1B, stacked", "fsdp") else MODELS[model]()


def stored(kind: str, mesh: str, model: str, update: str) -> dict[str, Any]:
    """Count what a device of a kind makes of one array of shards, as it is stored and with flat rows."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshmend.jax.compile.for_topology import slice_fabric
    from meshmend.jax.engine.collectives import groups_of
    from meshmend.jax.engine.program import ChunkLayout
    from meshmend.schedule.lanes import lower

    planned = plans_of(mesh, model, kind, update).schedules[0]
    fabric = slice_fabric(KINDS[kind])
    layout = ChunkLayout(lower(planned).shape, fabric.axis, core_axis=None, n_cores=1, platform=fabric.platform)
    leaves = jax.tree.leaves(arrays(shard_of_model(model, update)))
    (group,) = groups_of(leaves, layout, jnp.float32)
    n_rows = len(layout.shape.owned[0])
    stack = (LLAMA_LAYERS,) if (model, update) == ("Llama 1B, stacked", "fsdp") else ()
    one = NamedSharding(Mesh([fabric.jax_mesh.devices.flat[0]], ("x",)), PartitionSpec())

    def takes(shape: Shape) -> float:
        like = jax.ShapeDtypeStruct((*stack, *shape), jnp.float32, sharding=one)
        memory: Any = jax.jit(lambda x: x * 2).lower(like).compile().memory_analysis()
        return float(memory.argument_size_in_bytes / (4 * math.prod(like.shape)))

    shape = group.shard_shape(n_rows)
    return {
        "chunks": planned.total_chunks,
        "rows": n_rows,
        "shape": shape,
        "bytes": 4 * math.prod((*stack, *shape)),
        "flat": takes((n_rows, group.chunk)),
        "stored": takes(shape),
    }


def program_of(fabric: Any, params: Any, update: str) -> Any:
    """Return the program of the plan that `auto` makes."""
    import meshmend.jax as mmj

    return mmj.plan(fabric, params, update=update).abstract(fabric)  # type: ignore[arg-type]


def reduced(machine: str, model: str) -> dict[str, Any]:
    """Count what the all-reduce of a model's gradients takes, each device with gradients of its own."""
    import jax
    from jax.sharding import PartitionSpec

    from meshmend.jax.compile.for_topology import compile_step, slice_fabric
    from meshmend.jax.engine.collectives import all_reduce

    fabric = slice_fabric(machine, failed=[MACHINES[machine]])
    params = arrays(MODELS[model]())
    program = program_of(fabric, params, "replicated")
    by_device = PartitionSpec(fabric.axes)
    n_devices = int(fabric.jax_mesh.size)

    def rows(x: Any) -> Any:
        return jax.ShapeDtypeStruct(
            (n_devices * x.shape[0], *x.shape[1:]), x.dtype, sharding=fabric.sharding(fabric.axes)
        )

    mapped = jax.shard_map(
        all_reduce, mesh=fabric.jax_mesh, in_specs=(by_device, program.spec), out_specs=by_device, check_vma=False
    )
    report, _ = compile_step(machine, fabric.jit(mapped, donate_argnums=0), fabric, jax.tree.map(rows, params), program)
    return {
        "chunks": program.layout.shape.total_chunks,
        "payload": 4 * size_of(MODELS[model]()),
        "temporary": report.temporary_bytes,
        "peak": report.peak_bytes,
        "accessed": report.accessed_bytes,
        "seconds": report.compile_seconds,
    }


def total_of(weights: Any) -> Any:
    """Return a number with a gradient for every weight, at little cost."""
    import jax
    import jax.numpy as jnp

    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))


def training_of(fabric: Any, model: str, update: str) -> tuple[Any, Any, Any]:
    """Return a step of AdamW, its program and the parameters' shapes."""
    import jax
    import jax.numpy as jnp
    import optax

    import meshmend.jax as mmj

    optimizer = optax.adamw(1e-3)
    whole = arrays(MODELS[model]())
    if update != "fsdp":
        training = mmj.train_step(lambda w, batch: jnp.mean(batch) * total_of(w), optimizer, fabric)
        return training, program_of(fabric, whole, update), whole
    is_stack = model == "Llama 1B, stacked"
    pair = program_of(fabric, arrays(shard_of_model(model, update)), update)

    def zeros(shapes: dict[str, Shape]) -> Any:
        return lambda _: {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def cut(key: Any, shapes: dict[str, Shape], **more: Any) -> Any:
        from meshmend.jax.train.fsdp.params import ShardedParams, sharder

        made, values, outline = sharder(zeros(shapes), key, fabric, pair, **more)
        return ShardedParams(jax.eval_shape(made, values, pair), outline)

    if not is_stack:
        params = {"ends": cut(jnp.zeros(()), MODELS[model]())}
    else:
        params = {"ends": cut(jnp.zeros(()), llama_ends()),
                  "layers": cut(jnp.zeros(LLAMA_LAYERS), llama_layer(), stacked=True)}  # fmt: skip

    def loss(params: Any, batch: Any, pair: Any) -> Any:
        found = total_of(mmj.fsdp.gather_params(params["ends"], pair))
        if is_stack:
            found = mmj.fsdp.scan_layers(lambda w, x: x + total_of(w), params["layers"], found, pair)
        return jnp.mean(batch) * found

    return mmj.fsdp.sharded_train_step(loss, optimizer, fabric), pair, params


def step(machine: str, model: str, update: str) -> dict[str, Any]:
    """Count what a whole step takes, and its parameters and state by arithmetic."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from meshmend.jax.compile.for_topology import compile_step, slice_fabric
    from meshmend.jax.state.layout.state_layout import StateLayout

    fabric = slice_fabric(machine, failed=[MACHINES[machine]])
    training, program, params = training_of(fabric, model, update)
    layout = StateLayout.of(training, program, params)
    given = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(fabric.jax_mesh, spec))
        for leaf, spec in zip(layout.leaves, layout.specs, strict=True)
    ]
    params, state = jax.tree.unflatten(layout.structure, given)
    batch = jax.ShapeDtypeStruct((fabric.n_chips, 1), jnp.float32, sharding=fabric.sharding(fabric.axes))
    jitted = fabric.jit(training.step, donate_argnums=(0, 1))
    report, _ = compile_step(machine, jitted, fabric, params, state, batch, program)
    n_params, n_devices = size_of(MODELS[model]()), int(fabric.jax_mesh.size)
    on_device = [
        leaf.dtype.itemsize * math.prod(leaf.shape) / (n_devices if is_sharded else 1)
        for leaf, is_sharded in zip(layout.leaves, layout.is_sharded, strict=True)
    ]
    whole = {"replicated": 3, "sharded": 1, "fsdp": 0}[update]
    return {
        "exact": 4 * n_params * (whole + (3 - whole) / fabric.n_chips),
        "shards": sum(on_device),
        "arguments": report.argument_bytes,
        "temporary": report.temporary_bytes,
        "peak": report.peak_bytes,
        "seconds": report.compile_seconds,
    }


TABLES: dict[str, Callable[..., dict[str, Any]]] = {"stored": stored, "reduced": reduced, "step": step}
COLUMNS: dict[str, dict[str, int]] = {
    "stored": {"kind": 6, "mesh": 8, "model": 20, "update": 12, "chunks": -8, "shard": -20, "MB": -9, "as (R, n)": -11,
               "stored": -9},
    "reduced": {"machine": 12, "model": 20, "chunks": -8, "payload": -10, "temporaries": -13, "peak": -10,
                "accessed": -11, "MB": -4},
    "step": {"machine": 12, "model": 20, "update": 12, "least": -10, "elements": -10, "arguments": -11,
             "temporaries": -13, "peak": -10, "MB": -4},
}  # fmt: skip
"""Heads of the columns and their widths, below 0 of those that are aligned to the right."""


def rows_of(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the rows that are asked for: the name of a table, and what the row is of."""
    machines, meshes, models, updates = options.machines, list(MESHES), options.models, list(UPDATES)
    if options.quick:
        machines, meshes, models, updates = ["v6e:8x8"], ["8x8"], ["ResNet-50"], ["sharded"]
    kinds = [machine.partition(":")[0] for machine in machines]
    found = {
        "stored": product(kinds, meshes, models, [one for one in updates if one != "replicated"]),
        "reduced": product(machines, models),
        "step": product(machines, models, updates),
    }
    return [(table, list(row)) for table in options.tables for row in found[table]]


def in_subprocess(table: str, row: list[str]) -> dict[str, Any]:
    """Count one row in a process of its own."""
    words = [sys.executable, __file__, "--row", json.dumps([table, row])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.findall(r"^.*(?:Check failed|Fatal|Error|Ran out).*$", done.stderr, re.M)
        return {"problem": f"ended with {done.returncode}: {(said or [done.stderr.strip()[-300:]])[-1]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line_of(table: str, cells: list[str]) -> str:
    """Return the cells of a row, each as wide as its column."""
    widths = list(COLUMNS[table].values())[: len(cells)]
    return "".join(
        f"{cell:{width}}" if width > 0 else f"{cell:>{-width}}" for cell, width in zip(cells, widths, strict=True)
    )


def cells_of(table: str, found: dict[str, Any]) -> list[str]:
    """Return what a row says of what was counted."""
    if "problem" in found:
        return []
    if table == "stored":
        shape = " × ".join(map(str, found["shape"]))
        sizes = [f"{found['bytes'] / 1e6:.1f}", f"{found['flat']:.3f} ×", f"{found['stored']:.3f} ×"]
        return [str(found["chunks"]), shape, *sizes]
    names = ["exact", "shards", "arguments", "temporary", "peak"]
    if table == "reduced":
        names = ["payload", "temporary", "peak", "accessed"]
    sizes = [f"{found[name] / 1e6:.1f}" for name in names]
    return [str(found["chunks"]), *sizes] if table == "reduced" else sizes


def beyond(table: str, row: list[str], found: dict[str, Any]) -> str:
    """Return which limit a row is beyond; nothing if it is within all."""
    if "problem" in found:
        return str(found["problem"])
    if table == "stored" and found["stored"] > MOST_PADDED:
        return f"shards take {found['stored']:.3f} × their bytes, expected at most {MOST_PADDED}"
    most = MOST_TEMPORARY.get((row[0], row[1]), math.inf) if table == "reduced" else math.inf
    if table == "reduced" and found["temporary"] > most:
        return f"the all-reduce takes {found['temporary'] / 1e6:.1f} MB, expected at most {most / 1e6:.1f}"
    if table == "step" and found["arguments"] > MOST_PADDED * found["shards"] + TABLE_BYTES:
        return f"arguments take {found['arguments'] / 1e6:.1f} MB, and have {found['shards'] / 1e6:.1f}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="one mesh and one model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.row:
        table, row = json.loads(options.row)
        print(json.dumps(TABLES[table](*row)))
        return
    last, failures = "", list[str]()
    for table, row in rows_of(options):
        if table != last and not options.json:
            print(f"\n{table}\n{line_of(table, list(COLUMNS[table]))}", flush=True)
        last, found = table, in_subprocess(table, row)
        if options.json:
            print(json.dumps({"table": table, "of": row, **found}), flush=True)
        else:
            print(line_of(table, [*row, *cells_of(table, found)]) + found.get("problem", ""), flush=True)
        why = beyond(table, row, found)
        failures += [f"{table}, {', '.join(row)}: {why}"] if why else []
    if failures:
        raise SystemExit("\n".join(["", "beyond the limits:", *failures]))


if __name__ == "__main__":
    main()
