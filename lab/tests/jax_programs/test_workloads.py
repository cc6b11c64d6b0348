"""The models of lab/benchmarks/workloads: as large as published, and trained by the plan."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import jax
import jax.numpy as jnp
import pytest

import meshmend as mm
from jax_engine import cases
from meshmend.jax.compile.for_topology import has_libtpu, slice_fabric
from meshmend.jax.engine.program import abstract_program

pytest.importorskip("flax", reason="needs flax: pip install flax")
from workloads import WORKLOADS, abstract_arguments, compile_workload, train_step

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "paper_workloads.py"


# ResNet-50: as torchvision counts it. BERT-large: 334 M in its layers and embeddings, as published, and its two heads.
# The small GPT, by hand: words, positions, twelve layers (two norms, four matrices with biases) and the last norm.
@pytest.mark.parametrize(
    ("name", "n_weights"),
    [
        ("resnet-50", 25_557_032),
        ("bert-large", 336_226_108),
        ("gpt-small", (8192 + 256) * 256 + 12 * (4 * 256 + 12 * 256**2 + 9 * 256) + 2 * 256),
    ],
)
def test_the_models_have_their_weights(name: str, n_weights: int) -> None:
    params, _ = WORKLOADS[name].variables(2)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == n_weights
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_keeps_shapes_and_sends_by_the_plan_only(name: str) -> None:
    fabric = cases.fabric_of("one-way ring")
    arguments = abstract_arguments(WORKLOADS[name], fabric, batch=2)
    program = abstract_program(cases.schedule_of("one-way ring"), fabric)
    step = train_step(WORKLOADS[name], fabric)
    lowered = jax.jit(step).lower(*arguments, program)
    params, statistics, state, value = lowered.out_info
    for got, given in zip((params, statistics, state), arguments[:3], strict=True):
        same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), got, given)
        assert all(jax.tree.leaves(same))
    assert value.shape == ()
    text = lowered.as_text()
    assert text.count("collective_permute") == 2, "one lane, two loops"
    assert "all_reduce" not in text


@pytest.mark.slow
@pytest.mark.skipif(not has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
def test_resnet_compiles_for_the_papers_large_machine() -> None:
    fabric = slice_fabric("v3:32x32", failed=["4x2@6,8"], wrap=False)
    schedule = mm.plan(fabric.mesh, "row-pairs")
    report = compile_workload("v3:32x32", WORKLOADS["resnet-50"], schedule, fabric, batch=16)
    assert report.permutes == 8
    # 8.2 GFLOP of multiply-adds per image forward, twice that backward: 24.6 GFLOP by hand, 16 images per core.
    assert report.flops == pytest.approx(16 * 24.6e9, rel=0.05)
    assert report.temporary_bytes + report.argument_bytes < 16e9, "a core of a v3 has 16 GB"


@pytest.mark.slow
@pytest.mark.skipif(not has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
def test_a_gpt_compiles_with_tensor_parallelism_inside_tiles() -> None:
    facts = run_path(str(BENCHMARK))["measure_on"]("v6e:4x4", "gpt-small", "0,1", "2x2", 1)
    assert facts["other_collectives"] > 0, "the model's own, inside tiles"
    # 11.6 M weights and twice as much of Adam's moments in float32, split over four chips, but for norms and positions.
    assert 3 * 11.6e6 < facts["argument_bytes"] < 3 * 11.6e6 * 1.05
