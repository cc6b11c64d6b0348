"""How much computing lies beside permutes: read from code that was written for it, and from the real TPU compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hidden import Overlap, bodies_with_permutes, overlaps
from meshmend.jax.compile import for_topology

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "jax_fsdp.py"

HLO = """HloModule step

%body.1 (p: f32[8]) -> f32[8] {
  %s1 = f32[8] collective-permute-start(%p)
  %s2 = f32[8] collective-permute-start(%p)
  %f1 = f32[8] fusion(%p), backend_config={"estimated_cycles":"300"}
  %d1 = f32[8] collective-permute-done(%s1)
  %f2 = f32[8] fusion(%p), backend_config={"estimated_cycles":"40"}
  %d2 = f32[8] collective-permute-done(%s2)
  %s3 = (f32[8], f32[8]) collective-permute-start(%d2)
  %d3 = f32[8] collective-permute-done((f32[8], f32[8]) %s3), metadata={op_name="(later)"}
  %f3 = f32[8] fusion(%d2), backend_config={"estimated_cycles":"60"}
}

%adds (a: f32[], b: f32[]) -> f32[] {
  %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %q = f32[8] collective-permute(%p)
  %w = f32[8] while(%q), condition=%less, body=%body.1, metadata={op_name="jit(step)/transpose(jvp())/while"}
  %f4 = f32[8] fusion(%w), backend_config={"estimated_cycles":"1000"}
}
"""


def test_cycles_between_a_start_and_its_done_are_hidden() -> None:
    body, entry = overlaps(HLO)
    loop = "jit(step)/transpose(jvp())/while"
    assert body == Overlap("body.1", loop, permutes=3, covered=2, cycles=400, hidden=340)
    assert (body.share, body.place) == (0.85, "backward")
    assert entry == Overlap("main", permutes=1, waiting=1, loops=1, cycles=1000)
    assert (entry.share, entry.place) == (0.0, "outside")
    assert Overlap("b", "jit(step)/jvp()/while").place == "forward"
    assert [one.name for one in bodies_with_permutes(HLO)] == ["main", "body.1"]
    assert Overlap("empty").share == 0.0


@pytest.mark.slow
@pytest.mark.skipif(not for_topology.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
def test_the_backward_pass_on_v5p_hides_nearly_all_of_its_computing_beside_permutes() -> None:
    # Where the compiler aborts, or does not know one of our options, it ends its process and says why.
    words = ["--topology", "v5p:4x4x4", "--hole", "2x2x1@2,2,0", "--ways", "sharded", "--json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    facts = json.loads(done.stdout)
    (backward,) = (body for body in facts["bodies"] if body["place"] == "backward")
    assert backward["permutes"] == 2 * 6 * facts["steps"], "the gather and the scatter, unrolled, on six links"
    assert backward["share"] >= 0.85
    assert facts["argument_bytes"] < 3 * 4 * facts["parameters"] / 60 * 1.3, "a chip's own part of weights and moments"
    assert facts["peak_bytes"] < 4 * facts["parameters"], "less than the weights alone would take"
