"""The benchmark of a billion parameters, with a small model: what it adds up is what can be counted by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend.jax.compile import for_topology

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "jax_billion.py"
LAYERS, WIDTH, WORDS = 2, 256, 512


@pytest.mark.slow
@pytest.mark.skipif(not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
def test_the_state_is_whole_on_each_chip_or_divided_by_them_and_its_copies_by_hosts() -> None:
    words = ["--layers", str(LAYERS), "--width", str(WIDTH), "--vocabulary", str(WORDS), "--sequence", "128"]
    words += ["--machines", "v6e:8x8", "--updates", "replicated", "fsdp", "--json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    whole, sharded = map(json.loads, done.stdout.splitlines())
    # Queries, keys, values and the output are 4 matrices of width × width, the perceptron 8, and each has a norm.
    n_params = LAYERS * (12 * WIDTH**2 + 2 * WIDTH) + WORDS * WIDTH
    state = 3 * 4 * n_params + 4  # Adam's two moments, and its count of steps
    for facts in (whole, sharded):
        assert (facts["chips"], facts["hosts"], facts["parameters"]) == (60, 15, n_params)
        assert facts["state_bytes"] == state
        # Each host keeps all that is replicated, and its own shards and another host's.
        copy = state if facts is whole else 2 * state / 15
        assert facts["checked_copies_bytes"] == 2 * facts["copies_bytes"]
        assert copy <= facts["copies_bytes"] / 2 <= 1.1 * copy + 1000
        assert {"init", "step", "cut"} <= facts["programs"].keys()
        assert all(one["compile_seconds"] > 0 for one in facts["programs"].values())
    tables = 100_000
    """What a program's tables and a batch may take: a few kilobytes per step of a plan."""
    assert state <= whole["programs"]["step"]["argument_bytes"] < state + tables
    assert state / 60 <= sharded["programs"]["step"]["argument_bytes"] < 1.1 * state / 60 + tables
