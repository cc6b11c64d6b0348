"""The options that meshmend gives the TPU compiler: each with its reason, none anywhere else, all known to libtpu."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshmend
import meshmend as mm
import meshmend.jax as mmj
from jax_engine.compile.job_programs import recorded_compilations
from meshmend.jax.compile import for_topology
from meshmend.jax.compile.for_topology import CompilerError, compile_step, slice_fabric
from meshmend.jax.engine import compiler_options
from meshmend.jax.engine.compiler_options import OPTIONS, CompilerOption, options_for, without_option

needs_libtpu = pytest.mark.skipif(
    not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'"
)
SLICES = ["v5p:2x2x1", "v6e:2x2"]
IN_ADVICE = {"apart.py": {"xla_tpu_enable_glp_ring_reordering"}, "recompute.py": {"xla_gpu_deterministic_ops"}}


def test_one_table_names_all_options() -> None:
    """XLA_FLAGS of child processes on the CPU are another matter: they are no options of a compilation."""
    source = Path(meshmend.__file__).parent
    for path in source.rglob("*.py"):
        named = set(re.findall(r"\bxla_(?!force_host|cpu_|bridge)\w+", path.read_text(encoding="utf-8")))
        assert path.name == "compiler_options.py" or named == IN_ADVICE.get(path.name, set()), path.name
    assert len({one.name for one in OPTIONS}) == len(OPTIONS)
    assert all(len(one.why) > 20 for one in OPTIONS)


def test_a_fabric_has_options_only_on_tpus() -> None:
    assert options_for("tpu", overlap=False).items() < options_for("tpu", overlap=True).items()
    assert len(options_for("tpu", overlap=True)) == len(OPTIONS)
    assert options_for("cpu", overlap=True) == {}
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    assert fabric.compiler_options == fabric.overlap_options == {}


def test_a_fabric_jits_with_its_options_but_not_inside_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX refuses options for a part of a program; sharded parameters may be made inside of one."""
    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    some = {"xla_cpu_enable_fast_min_max": True, "xla_cpu_enable_fast_math": False}
    others = {**some, "xla_cpu_enable_fast_min_max": False}
    monkeypatch.setattr("meshmend.jax.engine.fabric.options_for", lambda _, *, overlap: others if overlap else some)
    with recorded_compilations(at_least=1) as found:
        for overlap in (False, True):
            fabric.jit(lambda x: x + 1, overlap=overlap)(jnp.ones(3))
        pair = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
        cut = fabric.jit(lambda tree, pair: mmj.fsdp.shard_params(tree, fabric, pair).shards)
        (shards,) = cut(np.ones(8, np.float32), pair)
    assert shards.sum() == 8
    assert [options for name, options in found if name == "jit__lambda"] == [some, others, some]


@needs_libtpu
@pytest.mark.parametrize("topology", SLICES)
def test_libtpu_knows_every_option(topology: str) -> None:
    fabric = slice_fabric(topology)
    assert fabric.overlap_options == options_for("tpu", overlap=True)
    assert mmj.tile(fabric, "1x1").compiler_options == options_for("tpu", overlap=False)
    for option in OPTIONS:
        compile_one(fabric, topology, {option.name: option.value})


@needs_libtpu
@pytest.mark.parametrize("topology", SLICES)
def test_an_option_that_libtpu_does_not_know_is_an_error_that_names_it(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = slice_fabric(topology)
    with pytest.raises(CompilerError, match=r"libtpu [\d.]+\) does not know the option xla_tpu_invented\. It is not"):
        compile_one(fabric, topology, {"xla_tpu_invented": "true"})
    ours = CompilerOption("xla_tpu_invented", "true", "Permutes would wait for each other.")
    monkeypatch.setattr(compiler_options, "OPTIONS", (*OPTIONS, ours))
    with pytest.raises(CompilerError, match=r"option xla_tpu_invented\. .*would wait for each other\. Install libtpu"):
        compile_one(fabric, topology, fabric.overlap_options)


def test_what_to_do_without_an_option() -> None:
    assert "leave it out of compiler_options" in without_option("xla_elsewhere")
    assert OPTIONS[0].why in without_option(OPTIONS[0].name)


def compile_one(fabric: mmj.Fabric, topology: str, options: dict[str, str]) -> None:
    x: Any = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=fabric.sharding())
    compile_step(topology, jax.jit(lambda x: x + 1, compiler_options=options), fabric, x)
