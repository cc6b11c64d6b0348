"""What peers plan becomes a schedule that `verify` proves and `predict` prices; the pages have what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import meshmend as mm
import table
from peer_plans import MESHES, Slots, Tree, breadth_first, from_gather, judge, one_pipeline, two_phases

ROOT = Path(__file__).parents[3]
LINES = table.read()
ROW = mm.Mesh("1x3")
Make = Callable[[mm.Mesh, list[Tree], str], mm.Schedule]
FROM_LEFT: Tree = (0, [(0, 1), (1, 2)])
FROM_RIGHT: Tree = (2, [(2, 1), (1, 0)])
# The owner of each chunk sends it to both sides: three chunks, two steps.
GATHER = [(0, 0, 1, 0), (0, 1, 0, 1), (0, 1, 2, 1), (0, 2, 1, 2), (1, 1, 2, 0), (1, 1, 0, 2)]


def test_sends_become_an_all_reduce() -> None:
    schedule = from_gather(ROW, GATHER, [0, 1, 2], "by hand")
    # Two steps of a third of the payload, there and back.
    assert judge(schedule) == {"proven": True, "chunks": 3, "units": 1.3333, "units_1us": 1.3337}


def test_trees_become_an_all_reduce() -> None:
    # Two halves meet no other half on their way, neither up nor down: four hops of half the payload.
    for make in (two_phases, one_pipeline):
        assert judge(make(ROW, [FROM_LEFT, FROM_RIGHT], "by hand"))["units"] == 2.0
        assert judge(make(ROW, [FROM_LEFT, FROM_RIGHT], "by hand"))["units_1us"] == 2.0004


def test_a_pipeline_sends_down_while_others_come_up() -> None:
    trees = [FROM_LEFT] * 100
    # Two phases: 101 steps each. In one pipeline the first chunk goes down after two steps, and the last after 101.
    assert judge(two_phases(ROW, trees, "by hand"))["units"] == 2.02
    assert judge(one_pipeline(ROW, trees, "by hand"))["units"] == 1.03


def test_a_link_carries_one_chunk_per_step() -> None:
    slots = Slots()
    assert [slots.take((0, 1), ready) for ready in (2, 0, 2, 0, 0)] == [2, 0, 3, 1, 4]
    assert slots.take((1, 0), 0) == 0


@pytest.mark.parametrize("make", [two_phases, one_pipeline])
def test_sums_at_one_chip_in_one_step_are_told_apart(make: Make) -> None:
    star: Tree = (1, [(1, 0), (1, 2)])
    schedule = make(ROW, [star], "by hand")
    assert judge(schedule)["proven"]
    assert judge(schedule)["units"] == 2.0, "which costs nothing: they come over different links"


def test_what_is_no_all_reduce_is_not_proven() -> None:
    with pytest.raises(mm.VerificationError):
        judge(from_gather(ROW, GATHER[:-1], [0, 1, 2], "by hand"))
    assert judge(from_gather(ROW, GATHER[:-1], [0, 1, 2], "by hand"), prove=False)["proven"] is False


def test_a_tree_that_does_not_hang_together_is_refused() -> None:
    assert breadth_first(0, [(1, 2), (0, 1)]) == FROM_LEFT
    with pytest.raises(ValueError, match="has 2 links, but only 1 can be reached"):
        breadth_first(0, [(0, 1), (2, 3)])


def test_the_page_has_what_was_measured() -> None:
    page = (ROOT / "docs" / "related.md").read_text(encoding="utf-8")
    assert table.tables(LINES) in page, "run: python lab/benchmarks/peers/table.py"


def test_the_recipe_names_what_was_run() -> None:
    recipe = (ROOT / "lab" / "benchmarks" / "peers" / "README.md").read_text(encoding="utf-8")
    others = {line["commit"] for line in LINES if line["peer"] != "meshmend"}
    assert set(re.findall(r"`([0-9a-f]{40})`", recipe)) == others


def test_no_result_is_below_its_bound() -> None:
    plans = [line for line in LINES if "units" in line]
    assert {line["peer"] for line in plans} == set(table.PEERS)
    for line in plans:
        least = mm.bound(MESHES[line["mesh"]]).units
        # TTO does less than an all-reduce of all chips.
        assert line["proven"] == (line["peer"] != "TTO")
        assert line["units_1us"] >= line["units"] >= least - 1e-4, line


def test_peers_agree_with_our_price() -> None:
    """TACOS says how long its plan takes; ForestColl what its trees tend to with ever smaller chunks, in two phases."""
    checked = [line for line in LINES if "own_units" in line]
    assert {line["peer"].partition(",")[0] for line in checked} == {"TACOS", "ForestColl"}
    for line in checked:
        if line["peer"] == "TACOS":
            assert line["units"] == pytest.approx(line["own_units"], abs=1e-3), line
        elif line["peer"].endswith("two phases"):
            assert line["own_units"] <= line["units"] + 1e-4, line


def test_the_shortest_plan_counts(tmp_path: Path) -> None:
    runs = [{"units": 0.9, "cpu_seconds": 5.0}, {"units": 0.8, "cpu_seconds": 7.0}, {"units": 0.8, "cpu_seconds": 6.0}]
    path = tmp_path / "results.jsonl"
    facts = {"mesh": "4x4", "commit": "0" * 40, "proven": True}
    lines = [{"peer": "TACOS", **facts, **run} for run in runs]
    lines += [{"peer": "TTO", **facts, "proven": False, "units": 0.7, "cpu_seconds": 12.3}]
    lines += [{"peer": "forestcoll", "mesh": "4x4", "commit": "0" * 40, "gave_up_after": 1500}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    read = table.read(path)
    assert table.times(read, "units") == [["4×4", "0.625", "0.938", "–", "0.800", "–", "–", "–", "0.700*"]]
    assert table.cpu_seconds(read) == [["4×4", "–", "6.00", "> 1,500", "> 1,500", "–", "12"]]


def test_the_readme_has_the_shortest_of_each() -> None:
    rows = [line.strip("| ").split(" | ") for line in table.readme(LINES).splitlines()[2:]]
    units = {row[0]: row[-1] for row in rows}
    assert list(units) == ["meshmend", "TACOS", "ForestColl", "MultiTree", "TTO"]
    assert units["TTO"] == "–"
    shortest = {peer: table.shortest(LINES, peer, table.README_MESH, "units") for peer in table.PEERS}
    for peer, line in shortest.items():
        if line:
            assert f"{line['units']:.3f}" in units[peer.partition(",")[0]].split(" / ")
    assert units["ForestColl"].count("/") == 1
    assert min(float(one) for cell in units.values() for one in re.findall(r"[\d.]+", cell)) == float(units["meshmend"])
