"""`meshmend compile --workload transformer`: what it prints and refuses, and what the real compiler makes of it."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.jax.compiling import ahead_of_time, apart
from meshmend.jax.compiling.layer_stack import Transformer

needs_libtpu = pytest.mark.skipif(
    not ahead_of_time.has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'"
)
WORDS = ["compile", "--topology", "v6e:4x4", "--workload", "transformer"]
ANSWER = {
    "topology": "v6e:4x4",
    "device_kind": "TPU v6 lite",
    "chips": 12,
    "cores_per_chip": 1,
    "bodies": [
        {"name": "a", "loop": "transpose(jvp())/while", "permutes": 72, "covered": 70, "cycles": 400, "hidden": 340},
        {"name": "b", "loop": "jvp()/while", "permutes": 36, "covered": 9, "cycles": 200, "hidden": 20},
        {"name": "c", "permutes": 4},
    ],
    "argument_bytes": 3_000_000,
    "temporary_bytes": 9_000_000,
    "aliased_bytes": 2_000_000,
    "peak_bytes": 12_000_000,
    "permutes": 112,
    "in_flight": 4,
    "compile_seconds": 8.0,
    "lower_seconds": 2.0,
}


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@needs_libtpu
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*WORDS[:3], "--shard", "fsdp"], "--shard is for --workload transformer, and this compiles the all-reduce"),
        ([*WORDS[:3], "--unhidden"], "--unhidden is for --workload transformer"),
        ([*WORDS, "--shard", "zero"], "--shard is 'zero', expected one of: none, update, fsdp."),
        ([*WORDS, "--tile", "2x2"], "transformer is for chips alone: leave out --tile 2x2"),
        ([*WORDS, "--width", "100"], "width is 100: expected a multiple of 64"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], says: str) -> None:
    done = run(*words)
    assert done.exit_code == 1
    assert says in done.stderr


@needs_libtpu
def test_the_command_prints_memory_collectives_and_what_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does not compile takes the compiler's place."""
    others = {name: 0 for name in ahead_of_time.Compiled.__dataclass_fields__ if name not in ANSWER}
    answer = json.dumps({"compiled": ANSWER | others})
    child = f"import json, sys; assert json.load(sys.stdin)['stack']['shard'] == 'fsdp'; print({answer!r})"
    monkeypatch.setattr(apart, "CHILD", child)
    words = [*WORDS, "--fail", "2x2@0,0", "--shard", "fsdp", "--layers", "2"]
    monkeypatch.setitem(os.environ, "COLUMNS", "200")
    done = run(*words)
    assert done.exit_code == 0, done.output
    for line in (
        "2 layers of width 256, 1,573,888 parameters of float32",
        "gather: 9 steps, 12 chunks",
        "12 MB at the peak; 3 MB arguments, 9 MB temporaries, 2 MB in place",
        "backward, per layer  70 of 72 permutes have computing beside them; 85% of the computing lies beside permutes",
        "forward, per layer   9 of 36 permutes have computing beside them; 10% of the computing lies beside permutes",
        "outside the layers   0 of 4 permutes",
    ):
        assert line in done.stdout, done.stdout
    facts = json.loads(run(*words, "--json").stdout)
    assert [(body["place"], body["share"]) for body in facts["bodies"]] == [
        ("backward", 0.85),
        ("forward", 0.1),
        ("outside", 0.0),
    ]
    assert (facts["shard"], facts["hide"], facts["parameters"], facts["steps"]) == ("fsdp", True, 1_573_888, 9)


def test_parameters_are_those_of_the_arrays() -> None:
    model = Transformer(layers=3, width=128)
    assert model.n_params == 3 * sum(np.zeros((128, n)).size for n in (3 * 128, 128, 4 * 128, 4 * 128, 1, 1))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("fail", [[], ["--fail", "2x2@0,0"]], ids=["full", "holed"])
@pytest.mark.parametrize("shard", ["none", "update", "fsdp"])
def test_the_command_compiles_full_and_holed_slices(shard: str, fail: list[str]) -> None:
    done = run(*WORDS, *fail, "--shard", shard, "--layers", "3", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    chips = 16 - 4 * bool(fail)
    assert (facts["chips"], facts["shard"]) == (chips, shard)
    moments, weights = 2 * 4 * facts["parameters"], 4 * facts["parameters"]
    expected = {"none": moments + weights, "update": moments / chips + weights, "fsdp": (moments + weights) / chips}
    batch = 4 * facts["sequence"] * facts["width"]
    assert expected[shard] + batch <= facts["argument_bytes"] < 1.2 * expected[shard] + batch
    assert facts["peak_bytes"] > facts["argument_bytes"]
    assert facts["other_collectives"] == 0
    backward = [body for body in facts["bodies"] if body["place"] == "backward"]
    if shard == "update":
        assert not backward, "everything is summed after the backward pass"
    else:
        assert backward[0]["permutes"] == 4 * facts["steps"] * (2 if shard == "fsdp" else 1)
        assert backward[0]["covered"] > 0


@needs_libtpu
@pytest.mark.slow
def test_nothing_hides_where_it_is_not_to() -> None:
    done = run(*WORDS, "--fail", "2x2@0,0", "--shard", "fsdp", "--layers", "3", "--unhidden", "--json")
    facts = json.loads(done.stdout)
    # Each loop with permutes is one over the steps of the plan, of four lanes: no layer is computed in it.
    assert {body["permutes"] for body in facts["bodies"] if body["place"] != "outside"} == {4}
