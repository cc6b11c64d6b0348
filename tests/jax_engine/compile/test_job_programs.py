"""Every program of a job compiles for TPU slices with a hole, by the calls that a job makes, with the fabric's options.

On v6e, tiles with a hole and restoring from memory do not compile without them; on v4 and v5p, with six links per chip,
only five permutes are in flight.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from meshmend.jax.compile import for_topology

needs_libtpu = pytest.mark.skipif(
    not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'"
)
IN_TRAINING = ["jit_init", "jit_step", "jit_cut", "jit_gather_rows", "jit_vote"]
"""What `compile_train_step` compiles: the last three cut a state into copies, send them when it is restored, and let
processes vote on when to keep the next."""
MORE = {"fsdp": ["jit__lambda"] * 3, "checks": ["jit_replica_digests"], "recompute": ["jit_choose", "jit_run"]}
"""Shards are made, and those of a tree and of a stack fetched; or replicas compared and gradients repeated."""


def run(*words: str) -> Any:
    """Compile in a process of its own, which the compiler may abort."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jax_engine.compile.job_programs", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_libtpu
def test_a_tiled_job_with_a_hole_steps_and_restores_on_v6e() -> None:
    facts = run("v6e:4x4", "0,1", "2x2", "replicated")
    assert facts["programs"] == IN_TRAINING
    assert facts["all_have_options"]
    assert facts["can_be_saved"], "that a TPU loads them again, nobody could try here"


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "fused", "fsdp"])
@pytest.mark.parametrize(
    ("topology", "hole", "side"),
    [
        ("v4:4x4x4", "1,1,1", "none"),
        ("v5p:4x4x4", "1,1,1", "none"),
        ("v6e:4x4", "0,1", "none"),
        ("v4:4x4x4", "1,1,1", "2x2x1"),
        ("v5p:4x4x4", "1,1,1", "2x2x1"),
        ("v6e:4x4", "0,1", "2x2"),
    ],
)
def test_every_program_of_a_job_compiles(topology: str, hole: str, side: str, kind: str) -> None:
    facts = run(topology, hole, side, kind, "all")
    checks = MORE["checks"] + (MORE["recompute"] if side == "none" else [])
    assert facts["programs"] == IN_TRAINING + (MORE["fsdp"] if kind == "fsdp" else checks)
    assert facts["all_have_options"]
    if topology.startswith("v5p") and side == "none" and kind == "replicated":
        assert facts["in_flight"] == 6
