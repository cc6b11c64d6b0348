"""Every command and option that there was before the laboratory left still is one, or the changelog says what is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from meshmend.cli import app
from pages import ROOT

HOLES = "fail fail-cable cable-rate wrap"
MACHINE = "machine intended"
TUNING = "orientation segments chunks budget"
PRICES = "hardware link-rate step-latency hop-latency links-at-once mode"
STUDY = """
    host board wrap cable-rate days runs mtbf-chip mtbf-board mtbf-host repair-chip repair-board repair-host log
    log-chips quick-repair checkpoint-minutes save-seconds copies-seconds detect-seconds restart-seconds swap-seconds
    replan-seconds grow spares cube spare-cubes ocs-seconds slice elastic-seconds replace-slice price crew-price payload
    compute-seconds hardware seed checks
"""
BEFORE = {
    "plan": f"{HOLES} {MACHINE} {TUNING} {PRICES} planner collective payload neighbours-only save programs json",
    "verify": "json",
    "compare": f"{HOLES} {MACHINE} {PRICES} payload collective plot json",
    "draw": f"{HOLES} {MACHINE} {TUNING} output payload hardware planner collective what chunk steps route figure json",
    "run": "local shape host wrap machine hosts store shared host-index kill metrics job secret-file address restarts "
    "start-over state-wait cold",
    "doctor": "timeout measure shape json",
    "studio": f"{HOLES} {MACHINE} payload hardware planner listen open json",
    "prepare": f"{HOLES} {TUNING} host planner payload hardware neighbours-only cache shared collective tile json",
    "store": "listen job secret-file",
    "watch": "every once json metrics",
    "machine": "intended shape wrap compare payload json",
    "availability": f"{STUDY} {MACHINE} plot json",
    "report": f"{STUDY} {MACHINE} out name json",
    "reproduce": "resnet-compute bert-compute json",
    "route": f"{HOLES} from to scheme channels json",
    "compile": f"{TUNING} topology planner fail wrap payload dtype cores tile json",
    "export": f"{HOLES} {MACHINE} {TUNING} output planner payload hardware dtype stand-by json",
    "quarantine list": "all json",
    "quarantine add": "why for json",
    "quarantine clear": "all json",
    "bench allreduce": "lab loopback fail rate delay payload planner repeat engine hardware update json",
    "bench restart": "failures unaided host shard store seed json",
    "lab up": f"{HOLES} rate delay name json",
    "lab kill": "name json",
    "lab show": "name json",
    "lab list": "json",
    "lab down": "name all json",
    "lab run": "chip name",
}
"""The options of each command, at the time when there was one distribution."""
JOINED = {"report": "availability", "route": "draw"}
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n### Added")[0]


def test_all_of_them_are_listed() -> None:
    assert len({command.split()[0] for command in BEFORE}) == 20
    assert sum(len(options.split()) for options in BEFORE.values()) == 295


@pytest.mark.parametrize("words", BEFORE)
def test_it_is_there_or_has_a_successor(words: str) -> None:
    """A command that went to the laboratory took its options with it: those are tested there."""

    def find(path: str) -> Any:
        found: Any = typer.main.get_command(app)
        for word in path.split():
            found = getattr(found, "commands", {}).get(word)
        return found

    command = find(words)
    if command is None:
        assert re.search(rf"^\| `meshmend {words.split()[0]}\b.* \| .*`meshmend ", CHANGES, re.M)
        command = find(JOINED[words]) if words in JOINED else None
    known = {name for param in command.params for name in param.opts} if command is not None else set()
    for name in BEFORE[words].split() if command is not None else ():
        assert f"--{name}" in known or re.search(rf"^\|[^|]*`[^`]*--{name}\b[^|]*\|[^|]+\|$", CHANGES, re.M), name
