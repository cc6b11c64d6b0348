"""The README's numbers that come from the laboratory, and their commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import meshmend_lab.tenstorrent
import table
from meshmend_lab.cli import app
from readme import ON_ITS_PAGE_ONLY, README, goodputs_said, rows

MEASURED = Path(meshmend_lab.tenstorrent.__file__).with_name("ttnn_meshes.json")


@pytest.mark.parametrize(
    "command", sorted({row.command.strip("`") for row in rows() if "meshmend lab " in row.command})
)
def test_the_command_is_there(command: str) -> None:
    words = shlex.split(command.removeprefix("sudo "))[2:]
    group = typer.main.get_command(app)
    while hasattr(group, "commands"):
        group, words = group.commands[words[0]], words[1:]
    # Reads the arguments without running anything: an option that is gone is an error.
    group.make_context("lab", words).close()


def test_the_table_of_planners_is_what_its_command_prints() -> None:
    """`lab/tests/benchmarks/test_peers.py` has how that table is made of what was measured."""
    assert f"\n{table.readme(table.read())}\n" in README


def test_what_tenstorrents_runtime_opens_is_what_it_answered() -> None:
    kept = json.loads(MEASURED.read_text(encoding="utf-8"))
    (galaxy,) = (one for one in kept["machines"] if one["hardware"] == "tenstorrent-wormhole-galaxy")
    singles = [one for one in galaxy["losses"] if len(one["lost"]) == 1]
    opened = sorted({len(one["opened"]["devices"]) for one in singles})
    assert len(singles) == 32
    assert f"with one of 32 chips gone, its runtime opens a mesh of {opened[0]} or {opened[1]}" in README
    assert len(opened) == 2


@pytest.mark.slow
def test_a_simulated_year_is_what_it_says() -> None:
    def goodput(*words: str) -> dict[str, float]:
        done = CliRunner().invoke(app, ["availability", "32x32", *words, "--json"])
        assert done.exit_code == 0, done.output
        return {one["policy"]: one["goodput"]["mean"] for one in json.loads(done.stdout)["policies"]}

    said = [value for answer, value in goodput().items() if answer not in ON_ITS_PAGE_ONLY]
    said.append(goodput("--hardware", "tpu-v6e-xla")["fault-tolerant"])
    assert sorted(round(100 * value, 1) for value in said) == goodputs_said()
