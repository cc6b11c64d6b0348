from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest

from commandline import run, run_json
from meshmend import Mesh, Schedule, plan, save
from meshmend.cost import PRESETS
from meshmend.errors import CacheWarning, ParameterError, ScheduleFileError
from meshmend.files import cache_folder
from meshmend.planning import Hamiltonian, PlanCache, Planner, RowPairs, Weave, make_planner, round_payload
from meshmend.schedule import MAX_EXPANDED
from meshmend.schedule.split import reduce_scatter_of

MESH = Mesh("8x8", failed=["2x2@2,2"])


def test_a_plan_is_made_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(tmp_path)
    first = plan(MESH, "row-pairs", cache=cache)
    monkeypatch.setattr(RowPairs, "plan", lambda *_: pytest.fail("planned again"))
    assert plan(MESH, "row-pairs", cache=cache) == first


def test_a_long_plan_between_neighbours_is_found_without_being_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two million chunks: more transfers than are ever listed one by one."""
    cache, weave = PlanCache(tmp_path), Weave(chunks=2_000_000, trees=8, budget_s=0.1)
    mesh = Mesh("4x4", failed=["1,1"])
    first = plan(mesh, weave, cache=cache, neighbours_only=True)
    assert first.n_transfers > MAX_EXPANDED
    monkeypatch.setattr(Weave, "plan", lambda *_: pytest.fail("planned again"))
    assert plan(mesh, weave, cache=cache, neighbours_only=True) == first


def test_mesh_planner_and_parameters_are_distinguished(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    meshes = [MESH, Mesh("8x8"), Mesh("8x8", wrap=True), Mesh("8x8", failed_cables=["2,3-2,4"]), MESH.fail("2x2@6,6")]
    planners = [Hamiltonian(), RowPairs(), RowPairs(segments=2), RowPairs(orientation="rows")]
    paths = {cache.path(mesh, planner) for mesh in meshes for planner in planners}
    assert len(paths) == len(meshes) * len(planners)
    assert cache.path(Mesh((8, 8), failed=[(2, 2), (2, 3), (3, 2), (3, 3)]), RowPairs()) == cache.path(MESH, RowPairs())


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("garbage", "archive is damaged"),
        ("cut", "archive is damaged"),
        ("folder", "not a regular file"),
        ("dead link", "No such file"),
        ("another mesh", "it is for 4x4, expected 8x8 minus 2x2@2,2"),
        ("another planner", "row-pairs made it, expected hamiltonian"),
        ("half", "its collective is reduce-scatter, expected all-reduce"),
        ("wrong sums", "ends with a wrong chunk"),
    ],
)
def test_a_bad_entry_is_planned_again_and_replaced(tmp_path: Path, damage: str, why: str) -> None:
    cache = PlanCache(tmp_path)
    good = plan(MESH, "hamiltonian", cache=cache)
    path = cache.path(MESH, Hamiltonian())
    match damage:
        case "garbage":
            path.write_bytes(b"not an archive")
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "folder":
            path.unlink()
            path.mkdir()
        case "dead link":
            path.unlink()
            path.symlink_to(tmp_path / "nowhere.npz")
        case "another mesh":
            save(plan(Mesh("4x4"), "hamiltonian"), path)
        case "another planner":
            save(plan(MESH, "row-pairs"), path)
        case "half":
            save(reduce_scatter_of(good), path)
        case "wrong sums":
            save(good.replace(op=np.zeros(good.n_transfers, dtype=int)), path)
    with pytest.warns(CacheWarning, match=why):
        assert cache.get(MESH, Hamiltonian()) is None
    if damage == "folder":
        # What is in the way cannot be replaced, and the plan is there all the same.
        with pytest.warns(CacheWarning, match=why), pytest.warns(CacheWarning, match="not kept in the cache"):
            assert plan(MESH, "hamiltonian", cache=cache) == good
        return
    with pytest.warns(CacheWarning, match=why):
        assert plan(MESH, "hamiltonian", cache=cache) == good
    kept = cache.get(MESH, Hamiltonian())
    assert kept == good
    assert kept.is_proven
    assert len(cache) == 1


def test_auto_takes_a_plan_of_any_planner_that_it_chooses_from(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    first = plan(MESH, cache=cache)
    assert first.planner != "auto"
    assert cache.get(MESH, make_planner("auto")) == first


@dataclass(frozen=True)
class Signless(Planner):
    """A planner of somebody else's, which does not sign its plans."""

    name: ClassVar[str] = "signless"

    def n_transfers(self, mesh: Mesh) -> int:
        return Hamiltonian().n_transfers(mesh)

    def _check(self, mesh: Mesh) -> None:
        Hamiltonian()._check(mesh)

    def _plan(self, mesh: Mesh) -> Schedule:
        return Hamiltonian().plan(mesh)


def test_other_peoples_planners_need_not_sign(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    first = plan(MESH, Signless(), cache=cache)
    assert cache.get(MESH, Signless()) == first


@pytest.mark.parametrize("obstacle", ["a file", "under a file", "full disk", "read-only"])
def test_an_unusable_folder_does_not_cost_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    folder = tmp_path / "cache"
    if "file" in obstacle:
        folder.write_text("")
    cache = PlanCache(folder / "under" if obstacle == "under a file" else folder)
    # The tests may run as root, whom no permission stops, so these two are played.
    if obstacle == "full disk":
        monkeypatch.setattr(np, "savez_compressed", failing(errno.ENOSPC))
    elif obstacle == "read-only":
        monkeypatch.setattr("meshmend.planning.cache.tempfile.mkstemp", failing(errno.EROFS))
    with pytest.warns(CacheWarning, match=r"not kept in the cache\. .* cannot be written: "):
        schedule = plan(MESH, "hamiltonian", cache=cache)
    assert schedule.is_proven
    assert schedule == plan(MESH, "hamiltonian")
    if folder.is_dir():
        assert list(folder.iterdir()) == []
    with pytest.raises(ScheduleFileError, match="cannot be written"):
        cache.put(MESH, Hamiltonian(), schedule)


def failing(number: int) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "meshmend"
    assert len(PlanCache()) == 0


def test_prepare_plans_for_the_loss_of_every_host(tmp_path: Path) -> None:
    shown = run_json("prepare", "8x8", "--host", "4x2", "--planner", "row-pairs", "--cache", tmp_path)
    # Eight hosts tile the mesh, and the mesh as it is needs a plan too.
    assert shown["plans"] == 9
    assert shown["refused"] == {}
    assert len(PlanCache(tmp_path)) == 18, "and one for scalars each"
    asked = make_planner("row-pairs", payload_bytes=round_payload(1e8), hardware="tpu-v3")
    for lost in ("4x2@0,0", "4x2@4,6"):
        assert PlanCache(tmp_path).get(Mesh("8x8", failed=[lost]), asked) is not None


def test_prepare_says_which_losses_have_no_plan(tmp_path: Path) -> None:
    shown = run(
        *["prepare", "4x4", "--fail", "2x2@0,0", "--host", "2x2", "--planner", "row-pairs", "--cache"], tmp_path
    )
    assert "ready 3 of 4" in " ".join(shown.split())
    assert "2x2@2,2: the survivors form 2 disconnected groups" in shown


def test_prepare_does_not_count_plans_that_it_cannot_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "savez_compressed", failing(errno.ENOSPC))
    shown = run_json("prepare", "4x4", "--host", "4x2", "--planner", "hamiltonian", "--cache", tmp_path)
    assert shown["plans"] == 0
    assert re.search(r"not kept in the cache\. .* No space left on device", shown["refused"]["4x2@0,0"])


def test_the_budget_belongs_to_the_key_and_what_hardware_is_called_does_not(tmp_path: Path) -> None:
    """Two hosts whose caches differ would run different plans: one of 2 s and one of 60 s for the same question."""
    cache, mesh = PlanCache(tmp_path), Mesh("4x4", failed=["2x2@0,0"])
    for name in ("auto", "weave"):
        paths = {
            cache.path(mesh, make_planner(name, budget_s=budget, payload_bytes=1e9, hardware=hardware))
            for budget in (2, 60)
            for hardware in ("tpu-v3", dataclasses.replace(PRESETS["tpu-v3"], name="ours", sources=()))
        }
        assert len(paths) == 2


def test_every_planner_takes_a_budget() -> None:
    assert plan(Mesh("4x4"), "hamiltonian", budget_s=2) == plan(Mesh("4x4"), "hamiltonian")
    for name in ("hamiltonian", "weave", "auto"):
        for nonsense in (0, -1, float("nan"), "soon"):
            with pytest.raises(ParameterError, match=r"budget_s is .*, expected a positive number of seconds"):
                plan(Mesh("4x4"), name, budget_s=nonsense)


def test_what_is_used_can_be_sent_to_another_cache(tmp_path: Path) -> None:
    here, there = PlanCache(tmp_path / "here"), PlanCache(tmp_path / "there", is_complete=True)
    plan(MESH, "row-pairs", cache=here)
    with pytest.raises(LookupError, match="has no plan for 8x8"):
        plan(MESH, "row-pairs", cache=there)
    used = PlanCache(here.folder, is_complete=True)
    schedule = plan(MESH, "row-pairs", cache=used)
    there.unpack(used.pack())
    assert plan(MESH, "row-pairs", cache=there) == schedule
    assert [path.name for path in there.used] == [path.name for path in used.used]
    assert len(there) == 1


def test_what_another_host_sends_stays_in_the_folder_and_is_proven(tmp_path: Path) -> None:
    cache, content = PlanCache(tmp_path / "cache"), io.BytesIO()
    name = cache.path(MESH, Hamiltonian()).name
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("../../outside.npz", b"no plan")
        archive.writestr(name, b"no plan")
    cache.unpack(content.getvalue())
    assert sorted(path.name for path in cache.folder.iterdir()) == sorted(["outside.npz", name])
    with pytest.warns(CacheWarning, match="is not used"):
        assert cache.get(MESH, Hamiltonian()) is None
