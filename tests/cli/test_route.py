from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from meshmend.cli import app


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["route", *words])
    assert result.exit_code == code, result.output
    return result.stdout if "--json" in words else result.output


def run_json(*words: str, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code))


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["8x8", "--from", "0,0"], "--from and --to go together"),
        (["8x8", "--scheme", "detour", "--channels", "2"], "nothing to choose"),
        (["8x8", "--scheme", "north"], "There is no scheme 'north'"),
        (["1x3", "--fail", "0,1"], "not connected"),
        (["4x4", "--fail", "1,1", "--scheme", "dimension-order", "--from", "1,0", "--to", "1,2"], "has no route"),
        (["4x4", "--fail", "1,1", "--from", "1,1", "--to", "1,2"], "has failed"),
    ],
)
def test_mistakes_are_reported(words: list[str], message: str) -> None:
    assert message in run_json(*words, code=1)["message"]
