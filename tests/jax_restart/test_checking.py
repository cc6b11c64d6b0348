"""`meshmend run` of a job with checks: a chip that lies from a step on is found and left out, and leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jax_restart.command import ROOT, events_of, meshmend
from meshmend.quarantine import QuarantineList, Suspect

SCRIPT = ROOT / "examples/jax/lying_chip.py"
MACHINE = ["run", "--local", "2x6", "--host", "2x2", "--shared", "shared"]


@pytest.mark.slow
def test_a_chip_that_lies_is_left_out_and_leaves_no_trace(tmp_path: Path) -> None:
    lied, never = tmp_path / "lied", tmp_path / "never"
    lied.mkdir()
    never.mkdir()
    lines = meshmend(*MACHINE, str(SCRIPT), "--save", "after.npy", folder=lied)
    assert any("1,2 is in quarantine now; the job goes back to step 20" in line for line in lines), lines
    assert any(line.startswith("host 0 │ step 21 on 11 chips") for line in lines), lines
    (entry,) = QuarantineList(lied / "shared").active()
    assert (str(entry.suspect), entry.verified, entry.step, entry.by) == ("1,2", 20, 30, "the job")
    (noted,) = events_of(lied / "shared", "quarantined")
    assert (noted["chips"], noted["hosts"]) == ([[1, 2]], [1])
    watched = json.loads("".join(meshmend("watch", "shared", "--once", "--json", folder=lied)))
    assert list(watched["quarantined"]) == ["1,2"]
    assert (watched["state"], watched["step"], watched["chips"]) == ("over", 40, 11)

    # The oracle: twelve honest chips up to the verified step, and from there on without that one.
    honest = [str(SCRIPT), "--lies-from", "1000", "--save", "after.npy"]
    meshmend(*MACHINE, *honest, "--steps", "20", folder=never)
    QuarantineList(never / "shared").add(Suspect.parse("1,2"), why="test")
    lines = meshmend(*MACHINE, *honest, folder=never)
    assert any(line.startswith("host 0 │ step 21 on 11 chips") for line in lines), lines
    found, expected = np.load(lied / "after.npy"), np.load(never / "after.npy")
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert np.abs(found - 1).max() < 1
