"""What the real TPU compiler makes of our programs. Needs libtpu, but no TPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import meshmend as mm
from commandline import run
from meshmend.cli import app
from meshmend.cost import find_hardware, predict
from meshmend.errors import MeshmendError, ParameterError
from meshmend.jax.compile import for_topology
from meshmend.jax.compile.for_topology import Compiled, CompilerError, compile_for, compile_step, slice_fabric
from meshmend.jax.engine.tiles import tile
from standins import tree_schedule

needs_libtpu = pytest.mark.skipif(
    not for_topology.has_libtpu(),
    reason="needs the TPU compiler: pip install 'meshmend[tpu]'",
)
MEGABYTES = 102_400_000
"""ResNet-50's gradients in float32."""


def compiled(topology: str, hole: str, planner: str, **more: Any) -> tuple[Compiled, mm.Schedule]:
    fabric = slice_fabric(topology, failed=[hole], cores=more.pop("cores", None), wrap=more.pop("wrap", None))
    schedule = (
        tree_schedule(fabric.mesh, chunks=64)
        if planner == "trees"
        else mm.plan(fabric.mesh, planner, verify=False, **more)
    )
    return compile_for(topology, schedule, fabric, payload_bytes=MEGABYTES), schedule


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "n_chips", "cores"), [("v3:16x32", 504, 1), pytest.param("v3:32x32", 1016, 2, marks=pytest.mark.slow)]
)
def test_the_papers_machines(topology: str, n_chips: int, cores: int) -> None:
    report, _ = compiled(topology, "4x2@6,8", "row-pairs", cores=cores)
    assert (report.chips, report.cores_per_chip) == (n_chips, cores)
    assert report.permutes == 8
    assert report.other_collectives == (2 if cores == 2 else 0), "summing inside the chip, and joining its pair"


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "hole", "planner"),
    [
        ("v6e:16x16", "4x2@6,8", "row-pairs"),
        pytest.param("v6e:16x16", "4x2@6,8", "hamiltonian", marks=pytest.mark.slow),
        pytest.param("v6e:16x16", "4x2@6,8", "trees", marks=pytest.mark.slow),
        ("v4:4x4x8", "2x2x1@1,1,1", "trees"),
        pytest.param("v5p:4x4x8", "2x2x1@1,1,1", "trees", marks=pytest.mark.slow),
    ],
)
def test_all_lanes_are_in_flight_together(topology: str, hole: str, planner: str) -> None:
    """Every permute of a step has started before the first is waited for: on v4, v5p and v6e."""
    # Slices of this shape can be twisted, which the devices do not say: then only the long axis is sure to wrap.
    wrap = [False, False, True] if topology.endswith("4x4x8") else None
    report, schedule = compiled(topology, hole, planner, cores=1, wrap=wrap)
    assert report.in_flight == report.lanes
    if planner == "trees":
        assert report.lanes == (schedule.mesh.neighbours >= 0).sum(axis=1).max(), "a lane for each link of a chip"


@needs_libtpu
def test_code_does_not_grow_with_the_mesh() -> None:
    small, large = (compiled(f"v3:{shape}", "2x2@6,8", "row-pairs", cores=1)[0] for shape in ("16x16", "32x32"))
    assert (small.chips, large.chips) == (252, 1020)
    assert large.hlo_chars_without_pairs <= 1.1 * small.hlo_chars_without_pairs
    assert large.hlo_chars <= 2 * small.hlo_chars


@needs_libtpu
def test_code_that_jax_cannot_read_back_is_read_from_the_compilers_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """The v6e compiler leaves lookups in a large table to the SparseCores, in a form that JAX 0.10 refuses.

    JAX 0.12 reads it: there the dump and JAX are compared.
    """
    fabric = tile(slice_fabric("v6e:2x2"), "2x2")
    table = jax.ShapeDtypeStruct((50304, 768), jnp.float32, sharding=fabric.sharding("model"))
    tokens = jax.ShapeDtypeStruct((4096,), jnp.int32, sharding=fabric.sharding())
    lookup = jax.jit(lambda table, tokens: table[tokens])
    reports = [compile_step("v6e:2x2", lookup, fabric, table, tokens)[0]]

    def refuses(executable: Any) -> str:
        del executable
        raise jax.errors.JaxRuntimeError("INTERNAL: async-update instruction should have 1 operands but sees 3")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", refuses)
    reports.append(compile_step("v6e:2x2", lookup, fabric, table, tokens)[0])
    for report in reports:
        assert (report.permutes, report.other_collectives) == (0, 1), "each chip has zeros for the rows of others"
        assert report.hlo_chars > report.hlo_chars_without_pairs > 1000


@needs_libtpu
def test_runs_in_place() -> None:
    """A payload that divides into whole tiles is summed where it lies: two runs a lane beside it, at most."""
    fabric = slice_fabric("v6e:8x8", failed=["2x2@2,2"])
    schedule = mm.plan(fabric.mesh, "hamiltonian")
    chunk = 256 * 1024 * 4
    report = compile_for("v6e:8x8", schedule, fabric, payload_bytes=schedule.total_chunks * chunk)
    assert report.aliased_bytes == schedule.total_chunks * chunk
    assert report.temporary_bytes <= 2 * report.lanes * chunk


@needs_libtpu
def test_a_refusal_says_why_and_what_to_do() -> None:
    with pytest.raises(CompilerError, match=r"v5e:4x8.*limited ICI routing.*v6e work") as caught:
        compiled("v5e:4x8", "2x2@0,0", "row-pairs")
    assert caught.value.topology == "v5e:4x8"
    with pytest.raises(CompilerError, match=r"libtpu does not support it.*v9"):
        slice_fabric("v9:4x4")
    with pytest.raises(ParameterError, match="'v3' is not a TPU slice"):
        slice_fabric("v3")


def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from meshmend.cli import main; main()", "compile", *words],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "120"} | more,
    )


@needs_libtpu
def test_command_line(tmp_path: Path) -> None:
    words = ["--topology", "v3:8x8", "--fail", "2x2@2,2", "--planner", "hamiltonian", "--payload", "1MB"]
    cached = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    facts = json.loads(command(*words, "--json", **cached).stdout)
    assert (facts["mesh"], facts["chips"], facts["failed"]) == ("8x8", 60, ["2x2@2,2"])
    assert facts["payload_bytes"] == 1_000_000
    again = command(*words, **cached)
    assert "60 × 2 cores (TPU v3)" in again.stdout
    assert list(tmp_path.glob("*-cache")), "what JAX tries to load the second time"
    assert not again.stderr
    refused = command("--topology", "v5e:4x8", "--fail", "0,0", "--planner", "row-pairs")
    assert refused.returncode == 1
    assert "row-pairs cannot plan" in refused.stderr


def test_reading_compiled_code() -> None:
    hlo = """
%body (p: f32[]) -> f32[] {
  %a = f32[8] collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}, metadata={op_name="x"}
  %b = f32[8] collective-permute-start(%y), source_target_pairs={{0,1}}
  %c = f32[8] collective-permute-done(%a)
  %d = f32[8] collective-permute-done(%b)
  %e = f32[8] collective-permute(%d), source_target_pairs={{0,1}}
}
ENTRY %main (p: f32[]) -> f32[] {
  %f = f32[8] all-reduce(%x), replica_groups={{0,1}}
}
"""
    assert for_topology.count_collectives(hlo) == (3, 1)
    assert for_topology.most_in_flight(hlo) == 2
    assert "{0,1}" not in for_topology.without_pairs(hlo)
    assert "op_name" not in for_topology.without_pairs(hlo)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v4:4x4x4", "v5p:4x4x4"])
def test_the_command_plans_for_the_slice_as_it_is_wired(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cube of 4x4x4 chips is a torus: planned as a mesh its all-reduce has 93 steps, as a torus 63."""
    from meshmend.cli import compile as command

    planned = []

    def stop(mesh: mm.Mesh, planner: Any) -> None:
        planned.append((mesh, planner))
        raise MeshmendError("planned")

    monkeypatch.setattr(command, "plan", stop)
    for words in ([], ["--planner", "weave"], ["--wrap", "none"]):
        CliRunner().invoke(app, ["compile", "--topology", topology, "--payload", "100MB", *words])
    (wired, _), (_, weave), (open_ended, _) = planned
    assert wired == slice_fabric(topology, wrap=None).mesh
    assert wired.wrap == (True, True, True)
    assert open_ended.wrap == (False, False, False)
    assert weave.payload_bytes == 1e8, "a planner that is named is tuned for the payload, too"
    hardware = find_hardware(slice_fabric(topology).hardware or "")
    best = mm.plan(wired, payload_bytes=1e8, hardware=hardware, budget_s=2)
    found = mm.plan(wired, dataclasses.replace(planned[0][1], budget_s=2))
    assert predict(found, 1e8, hardware).seconds <= 1.05 * predict(best, 1e8, hardware).seconds


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "words", "wrap"),
    [
        ("v6e:8x8", "0", (True, False)),
        ("v6e:8x8", "1", (False, True)),
        ("v4:4x4x4", "0,2", (True, False, True)),
        ("v4:4x4x1", "all", (True, True)),
    ],
)
def test_axes_that_wrap_are_named_as_in_other_commands(
    topology: str, words: str, wrap: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshmend.cli import compile as command

    planned = []

    def stop(mesh: mm.Mesh, _: Any) -> None:
        planned.append(mesh.wrap)
        raise MeshmendError("planned")

    monkeypatch.setattr(command, "plan", stop)
    shown = run("compile", "--topology", topology, "--wrap", words, code=1)
    assert planned == [wrap], shown
    refused = run("compile", "--topology", topology, "--wrap", "7", code=1, width=200)
    assert f"--wrap 7: expected none, all, or axes from 0 to {len(wrap) - 1}" in refused
