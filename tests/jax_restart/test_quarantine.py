"""`meshmend run` with a quarantine list: a chip, a cable and a whole host have no part, and the job survives a loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jax_restart.command import SCRIPT, events_of, meshmend
from meshmend.launch.timeline import read_timeline
from meshmend.quarantine import QuarantineList, Suspect


@pytest.mark.slow
def test_a_job_leaves_out_what_is_in_quarantine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shared = tmp_path / "shared"
    for name in ("1,1", "2,0-3,0", "host 3"):
        QuarantineList(shared).add(Suspect.parse(name), why="test")
    words = ["--local", "4x4", "--host", "2x2", "--hosts", "2:4", "--kill", "1@10", "--shared", "shared"]
    lines = meshmend("run", *words, "train.py", folder=tmp_path)
    (said,) = [line for line in lines if "in quarantine" in line]
    assert said.startswith("meshmend │ all chips of host 3 are in quarantine, so it has no part in the job. `meshmend")
    assert "meshmend │ round 1: hosts 0, 1, 2 start" in lines
    assert "host 0 │ step 1 on 11 chips" in lines  # of 16: four of host 3, and one
    assert "meshmend │ round 2: hosts 0, 2 start" in lines
    assert "host 0 │ step 30 on 7 chips" in lines
    for host in (0, 1, 2):
        events = read_timeline(shared / "timeline" / f"host-{host}.jsonl")
        fabric = next(event for event in events if event["event"] == "fabric")
        assert (fabric["chips"], fabric["hosts"]) == (11, [0, 1, 2])
    noted = events_of(shared, "quarantined")
    assert sorted(event["text"].split(": ", 1)[1].split(" is ")[0] for event in noted) == [
        "cable 2,0-3,0",
        "chip 1,1",
        "host 3",
    ]
    watched = json.loads("".join(meshmend("watch", "shared", "--once", "--json", folder=tmp_path)))
    assert watched["quarantined"] == {"1,1": "by hand: test", "2,0-3,0": "by hand: test", "host 3": "by hand: test"}
    assert (watched["step"], watched["chips"]) == (30, 7)
