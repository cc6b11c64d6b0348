from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from meshmend import Mesh, Schedule, plan, save
from meshmend.cli import app
from meshmend.planning import Hamiltonian, PlanCache, RowPairs
from meshmend.planning.cache import default_folder

MESH = Mesh("8x8", failed=["2x2@2,2"])


def test_a_plan_is_made_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(tmp_path)
    first = plan(MESH, "row-pairs", cache=cache)
    monkeypatch.setattr(RowPairs, "plan", lambda *_: pytest.fail("planned again"))
    assert plan(MESH, "row-pairs", cache=cache) == first


def test_mesh_planner_and_parameters_are_told_apart(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    meshes = [MESH, Mesh("8x8"), Mesh("8x8", wrap=True), Mesh("8x8", failed_cables=["2,3-2,4"]), MESH.fail("2x2@6,6")]
    planners = [Hamiltonian(), RowPairs(), RowPairs(segments=2), RowPairs(orientation="rows")]
    paths = {cache.path(mesh, planner) for mesh in meshes for planner in planners}
    assert len(paths) == len(meshes) * len(planners)
    assert cache.path(Mesh((8, 8), failed=[(2, 2), (2, 3), (3, 2), (3, 3)]), RowPairs()) == cache.path(MESH, RowPairs())


@pytest.mark.parametrize("damage", ["garbage", "cut", "another mesh", "wrong sums"])
def test_a_bad_entry_is_planned_anew_and_replaced(tmp_path: Path, damage: str) -> None:
    cache = PlanCache(tmp_path)
    good = plan(MESH, "hamiltonian", cache=cache)
    path = cache.path(MESH, Hamiltonian())
    match damage:
        case "garbage":
            path.write_bytes(b"not an archive")
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "another mesh":
            save(plan(Mesh("4x4"), "hamiltonian"), path)
        case "wrong sums":
            columns = ("step", "src", "dst", "first_chunk", "n_chunks", "phase", "owners")
            wrong = Schedule(
                MESH,
                total_chunks=good.total_chunks,
                op=np.zeros(good.n_transfers, dtype=int),
                phase_names=good.phase_names,
                **{name: getattr(good, name) for name in columns},
            )
            save(wrong, path)
    assert cache.get(MESH, Hamiltonian()) is None
    assert plan(MESH, "hamiltonian", cache=cache) == good
    assert cache.get(MESH, Hamiltonian()) == good
    assert len(cache) == 1


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "meshmend"
    assert len(PlanCache()) == 0


def prepare(tmp_path: Path, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["prepare", *words, "--cache", str(tmp_path)])
    assert result.exit_code == code, result.output
    return result.stdout


def test_prepare_plans_for_the_loss_of_every_host(tmp_path: Path) -> None:
    shown = json.loads(prepare(tmp_path, "8x8", "--host", "4x2", "--planner", "row-pairs", "--json"))
    # Eight hosts tile the mesh, and the mesh as it is needs a plan too.
    assert shown["plans"] == 9
    assert shown["refused"] == {}
    assert len(PlanCache(tmp_path)) == 9
    for lost in ("4x2@0,0", "4x2@4,6"):
        assert PlanCache(tmp_path).get(Mesh("8x8", failed=[lost]), RowPairs()) is not None


def test_prepare_says_which_losses_have_no_plan(tmp_path: Path) -> None:
    shown = prepare(tmp_path, "4x4", "--fail", "2x2@0,0", "--host", "2x2", "--planner", "row-pairs")
    assert "ready    3 of 4" in shown
    assert "2x2@2,2: the survivors form 2 disconnected groups" in shown


def test_prepare_wants_hosts_that_tile_the_mesh(tmp_path: Path) -> None:
    prepare(tmp_path, "8x8", "--host", "3x2", "--planner", "row-pairs", code=1)
