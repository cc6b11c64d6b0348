"""The round that a job's state belongs to is the launcher's, or the next one where the launcher has no count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jax_engine.restart_cases import Started


@pytest.mark.parametrize(("rounds", "kept"), [((3, 4, 6), [3, 4, 6]), ((0, 0, 0), [1, 2, 3]), ((3, 1, 4), [3, 4, 5])])
def test_rounds_of_a_state(rounds: tuple[int, ...], kept: list[int], tmp_path: Path) -> None:
    """Of `meshmend run`; of no launcher; and of a store that does not know of an earlier job in the folder."""
    found = []
    for number in rounds:
        job = Started(memory=tmp_path)
        job.keeper.session = replace(job.session, launch=replace(job.session.launch, round=number))
        job.restore()
        job.keep(*(1, 2))
        job.crash()
        (restored,) = job.events("restore")
        found.append(restored["round"])
        assert job.keeper.attempt == restored["round"]
    assert found == kept
