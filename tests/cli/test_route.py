from __future__ import annotations

from functools import partial

import commandline

run, run_json = partial(commandline.run, "route"), partial(commandline.run_json, "route")


def test_all_pairs() -> None:
    facts = run_json("8x8", "--fail", "2x2@2,2")
    assert facts["scheme"] == "detour"
    assert facts["deadlock_free"] is True
    assert facts["virtual_channels"] == 2
    assert facts["pairs"] == 60 * 59
    assert facts["pairs_without_route"] == 0
    assert facts["mean_detour"] == 1
    assert facts["longest_detour_hops"] == 0
    assert facts["busiest_link_flows"] == 192


def test_one_route() -> None:
    facts = run_json("8x8", "--fail", "2x2@2,2", "--from", "2,1", "--to", "2,4")
    assert facts["hops"] == 5
    assert facts["path"] == [[2, 1], [1, 1], [1, 2], [1, 3], [1, 4], [2, 4]]
    assert len(facts["channels"]) == 5
    assert "(2,1) → (1,1) → (1,2)" in run("8x8", "--fail", "2x2@2,2", "--from", "2,1", "--to", "2,4")


def test_people_see_the_same_facts() -> None:
    shown = " ".join(run("8x8", "--fail", "2x2@2,2", "--scheme", "dimension-order").split())
    for words in ("dimension-order routes on 8x8 minus 2x2@2,2", "656 without a route", "✓ free of deadlock"):
        assert words in shown


def test_schemes_and_channels() -> None:
    assert run_json("8x8", "--wrap", "all")["virtual_channels"] == 2
    assert run_json("8x8", "--fail", "2x2@2,2", "--channels", "1")["scheme"] == "up-down"
    assert run_json("1x1")["busiest_link"] is None
    assert run_json("4x4", "--fail-cable", "1,1-1,2", "--scheme", "up-down")["failed_cables"] == ["1,1-1,2"]
