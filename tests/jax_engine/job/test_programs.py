"""Every program of a job is compiled with its fabric's options: when it starts, trains, checks, restores and ends."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import optax
import pytest

import meshmend
import meshmend.jax as mmj
from jax_engine.compile.job_programs import recorded_compilations
from jax_engine.job.job_cases import BATCH, DATASET, FSDP, PARAMS, SHARDINGS, SPLIT, alone, loss, train
from meshmend.errors import RestartError
from meshmend.launch.signing import FILE_KEY

OPTION = {"xla_cpu_enable_fast_min_max": True}
"""One that a CPU's compiler knows, in the place of those for TPUs."""
OF_JOBS = [f"jax/{part}/**/*.py" for part in ("state", "job", "checks", "compile")] + [
    "jax/data/example_keys.py",
    "jax/train/fsdp/params.py",
    "jax/engine/measure.py",
]
CHECKED = {"checks": mmj.Checks(digests_every=1, recompute_every=2)}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicated": (CHECKED, {"update": "replicated"}),
    "sharded": ({"checks": mmj.Checks(digests_every=1, recompute_every=0)}, {"update": "sharded"}),
    "fsdp": ({}, FSDP),
    "tiled": ({"tile": "2x2"}, {"params": SPLIT, "shardings": SHARDINGS, "update": "sharded"}),
}
MORE = {
    "replicated": ["jit_replica_digests", "jit_choose", "jit_run"],
    "sharded": ["jit_replica_digests"],
    "fsdp": ["jit__lambda"],  # makes shards, and fetches them
    "tiled": [],
}


@pytest.mark.parametrize(
    "kind", ["replicated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sharded", "fsdp", "tiled"))]
)
def test_a_job_from_start_to_restart_compiles_with_its_fabrics_options(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshmend.jax.engine.fabric.options_for", lambda *_, **__: OPTION)
    of_job, of_training = KINDS[kind]
    with recorded_compilations() as compiled:
        for steps, hole in ((2, ""), (3, " minus 0,0")):
            session = alone(("4x4" if "tile" in of_job else "2x3") + hole)
            job = mmj.Job(tmp_path / "shared", BATCH, session=session, planner="weave", disk_every=0, **of_job)
            train(job, steps, **of_training)
            job.close()
    assert (job.resumed.source, job.resumed.step) == ("memory", 2)
    # A new job also checks its loss, unless that has effects.
    assert {"jit_init", "jit_step", "jit_cut", "jit_vote", *MORE[kind]} == {name for name, _ in compiled} - {
        "jit_check"
    }
    assert {name for name, options in compiled if not OPTION.items() <= options.items()} == set()


@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_job_of_one_process_ends_if_its_saved_program_is_not_the_one_of_its_script(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that is found after its last step: the loss reads a value from the environment while it is traced."""
    monkeypatch.setenv(FILE_KEY, "ab" * 32)

    def scaled(params: Any, batch: Any) -> Any:
        return float(os.environ["SCALE"]) * loss(params, batch)

    def run(scale: str, steps: int) -> mmj.Job:
        monkeypatch.setenv("SCALE", scale)
        job = mmj.Job(tmp_path / "shared", BATCH, session=alone("2x3"), planner="weave", disk_every=0)
        for step in job.train(scaled, optax.sgd(0.01), PARAMS, DATASET, steps=steps):
            if waits and step.number == steps - 1:
                job._run._ahead.wait()  # type: ignore[union-attr]  # the next step must not be made
        job.close()
        return job

    run("1", 5)
    assert run("1", 10).resumed.step == 5, "the oracle: a program that is the script's own is no error"
    with pytest.raises(RestartError, match="is not the one that this script makes now") as caught:
        run("2", 14 if waits else 13)
    job = caught.traceback[1].frame.f_locals["job"]
    assert "loaded" in next(event for event in job.session.timeline.events if event["event"] == "compile")
    assert [event["event"] for event in job.session.timeline.events if event["event"] in ("done", "gave up")] == [
        "gave up"
    ]
    assert job._run.number == 13
    assert not list((tmp_path / "shared" / "programs").glob("*.program"))


def test_no_part_of_a_job_jits_past_its_fabric() -> None:
    """By its own name, which also a decorator has; `fabric.jit` gives the options."""
    source = Path(meshmend.__file__).parent
    files = [file for part in OF_JOBS for file in source.glob(part)]
    assert len(files) > len(OF_JOBS)
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    found = [f"{file.relative_to(source)}:{line}" for file, tree in trees.items() for line in bare_jits(tree)]
    assert found == [], "use fabric.jit"


def bare_jits(tree: ast.AST) -> list[int]:
    """Lines with `jax.jit`, or that import it or another way to compile by another name."""
    ways = {"jit", "pjit", "pmap"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ways and getattr(node.value, "id", "") == "jax")
        or (isinstance(node, ast.ImportFrom) and "jax" in (node.module or "").split(".")[:1] and imported(node) & ways)
    ]


def imported(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_a_bare_jit_would_be_found() -> None:
    code = "from jax import jit\n@jax.jit\ndef f(x): return x\ng = fabric.jit(f)\nh = partial(jax.jit, f)\nimport jax"
    assert sorted(bare_jits(ast.parse(code))) == [1, 2, 5]
