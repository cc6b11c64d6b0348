"""What the real TPU compiler makes of a train step with a fused update. Needs libtpu, but no TPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend.jax.compile import for_topology

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "jax_fused_update.py"


@pytest.mark.slow
@pytest.mark.skipif(not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
@pytest.mark.parametrize("optimizer", ["adamw", "clipped"])
@pytest.mark.parametrize(
    ("topology", "hole", "cores"),
    [
        ("v3:32x32", "4x2@6,8", 1),
        ("v3:32x32", "4x2@6,8", 2),
        ("v5p:4x4x4", "1x1x1@1,1,1", 1),
        ("v6e:16x16", "4x2@6,8", 1),
    ],
)
def test_a_step_with_an_update_is_compiled_in_place(topology: str, hole: str, cores: int, optimizer: str) -> None:
    # Where the compiler aborts, it takes its process with it.
    words = ["--topology", topology, "--hole", hole, "--cores", str(cores)]
    words += ["--optimizer", optimizer, "--megabytes", "100", "--json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    facts = json.loads(done.stdout)
    (whole, fused), payload = facts["runs"], facts["payload_bytes"]
    assert fused["temporary_bytes"] <= 1.1 * whole["temporary_bytes"]
    if cores == 1:  # two cores sum and join what each of them has, in buffers of their own
        assert fused["temporary_bytes"] < payload / 4, "no second buffer of the payload"
    assert fused["aliased_bytes"] >= payload, "new weights and state are written over the old"
    assert fused["argument_bytes"] < 1.2 * payload, "the moments are a chip's own share"
