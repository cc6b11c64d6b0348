"""Steps on tiles through the real TPU compiler: what crosses tiles, and what it needs to place the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from jax_engine.reach import ACROSS, INSIDE, STRAIGHT, reach_of_collectives
from meshmend.jax.compile import for_topology

needs_libtpu = pytest.mark.skipif(
    not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'"
)

STEP = """
import sys, json, jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
from jax.sharding import PartitionSpec as P
from meshmend.jax.compile.for_topology import compile_step, slice_fabric
from jax_engine.reach import reach_of_collectives
from meshmend.jax.engine.program import abstract_program

topology, side, hole = sys.argv[1:]
fabric = mmj.tile(slice_fabric(topology, failed=[hole]), side)
program = abstract_program(mm.plan(fabric.mesh, "weave", chunks=16), fabric)
specs = {"up": P(None, "model"), "down": P("model", None), "scale": P()}
shapes = {"up": (256, 1024), "down": (1024, 256), "scale": (256,)}

def loss(w, x):
    hidden = jax.lax.with_sharding_constraint(jax.nn.gelu(x @ w["up"]), P(None, "model"))
    return jnp.mean((hidden @ w["down"] * w["scale"] - x) ** 2)

on = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=fabric.sharding(*spec))
w = {name: on(shape, *specs[name]) for name, shape in shapes.items()}
differentiate = mmj.value_and_grad(loss, fabric, specs)
step = jax.jit(lambda w, x, program: differentiate(w, x, program=program))
with jax.set_mesh(fabric.jax_mesh):
    _, compiled = compile_step(topology, step, fabric, w, on((fabric.mesh.n_chips * 8, 256), "tile"), program)
reach = reach_of_collectives(compiled.as_text(), fabric.devices_per_tile)
lanes = sum(map(len, program.layout.shape.lanes))
print(json.dumps({"reach": [[*key, n] for key, n in reach.items()], "lanes": lanes}))
"""


def compile_step(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: where the compiler aborts, it takes its process with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "side", "hole"),
    [
        ("v6e:8x8", "2x2", "2,2"),
        pytest.param("v3:8x8", "2x2", "2,2", marks=pytest.mark.slow),
        pytest.param("v4:4x4x4", "2x2x1", "1,1,1", marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", "2x2x1", "1,1,1", marks=pytest.mark.slow),
        pytest.param("v6e:8x8", "4x2", "2,2", marks=pytest.mark.slow),
    ],
)
def test_only_the_plans_permutes_cross_tiles(topology: str, side: str, hole: str) -> None:
    """Each between corresponding chips, and nothing is gathered inside a tile: the model's all-reduces are all."""
    done = compile_step(STEP, topology, side, hole)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    reach = {(kind, where): n for kind, where, n in answer["reach"]}
    assert reach["collective-permute", STRAIGHT] == answer["lanes"]
    assert set(reach) == {("collective-permute", STRAIGHT), ("all-reduce", INSIDE)}


@needs_libtpu
@pytest.mark.slow
def test_the_v6e_compiler_aborts_without_the_fabrics_options() -> None:
    without = (
        "import meshmend.jax.engine.tiles as tiles; tiles.TiledFabric.compiler_options = property(lambda self: {})\n"
    )
    done = compile_step(without + STEP, "v6e:8x8", "2x2", "2,2")
    assert done.returncode
    assert "Unexpected device_id" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = f32[4] all-gather(y), replica_groups={{0,1,2,3},{4,5,6,7}}", ("all-gather", INSIDE)),
        ("x = f32[4] all-reduce(y), replica_groups={{0,4},{1,5}}, to_apply=add", ("all-reduce", ACROSS)),
        ("x = f32[4] all-reduce-start(y), replica_groups=[2,4]<=[8]", ("all-reduce", INSIDE)),
        ("x = f32[4] reduce-scatter(y), replica_groups=[4,2]<=[2,4]T(1,0)", ("reduce-scatter", ACROSS)),
        ("x = f32[4] all-to-all(y), replica_groups=mesh['tile'=2,'model'=4] {'model'}", ("all-to-all", INSIDE)),
        ("x = f32[4] all-to-all(y), replica_groups=mesh['tile'=2,'model'=4] {'tile'}", ("all-to-all", ACROSS)),
        (
            "x = f32[4] all-reduce(y), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
            ("all-reduce", INSIDE),
        ),
        (
            "x = f32[4] all-reduce(y), replica_groups=mesh['a'=2,'b'=2], device_ids=(0,4,1,5) {'b'}",
            ("all-reduce", ACROSS),
        ),
        (
            "x = f32[4] all-reduce(y), replica_groups=mesh['a'=2,'b'=2], device_ids=(0,4,1,5) {'a'}",
            ("all-reduce", INSIDE),
        ),
        ("x = f32[4] collective-permute(y), source_target_pairs={{0,4},{4,0}}", ("collective-permute", STRAIGHT)),
        ("x = f32[4] collective-permute(y), source_target_pairs={{0,1},{5,4}}", ("collective-permute", INSIDE)),
        ("x = f32[4] collective-permute(y), source_target_pairs={{0,4},{1,6}}", ("collective-permute", ACROSS)),
        ("x = f32[4] collective-permute(y), source_target_pairs={{0,4},{1,0}}", ("collective-permute", ACROSS)),
    ],
)
def test_whom_a_collective_joins(line: str, expected: tuple[str, str]) -> None:
    assert reach_of_collectives(f"  {line}\n  z = f32[4] add(x, x)", 4) == Counter({expected: 1})
