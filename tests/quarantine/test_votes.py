"""Votes over votes, against chips that are known to lie: all small meshes, lies of all kinds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshmend.quarantine import Observation, Suspect
from meshmend.quarantine.judge import judge
from meshmend.quarantine.votes import Owner, Vote, count_votes, is_agreed

STATE, SAMPLES = 7, 8


def owners(n_chips: int, per_process: int = 100) -> list[Owner]:
    return [Owner(Suspect.chip((0, chip)), chip // per_process) for chip in range(n_chips)]


def votes(n_chips: int, shifts: list[int], lies: dict[tuple[int, int], int]) -> list[Vote]:
    """All parts, computed by chips so far away; a lie of a chip about a shift is what it adds to the right gradient."""
    return [
        Vote(chip, part, STATE, SAMPLES, 100 * part + lies.get((chip, shift), 0))
        for shift in shifts
        for chip in range(n_chips)
        for part in [(chip + shift) % n_chips]
    ]


def named(observations: tuple[Observation, ...]) -> list[set[int]]:
    return [{suspect.ends[0][1] for suspect in observation.suspects} for observation in observations]


@pytest.mark.parametrize("n_chips", [3, 4, 5, 7])
def test_one_liar_is_named_alone_whenever_it_lies(n_chips: int) -> None:
    shifts = [0, *range(1, min(5, n_chips))]
    for liar in range(n_chips):
        for pattern in product([0, 1], repeat=len(shifts)):
            lies = {(liar, shift): 10 + shift for shift, is_lie in zip(shifts, pattern, strict=True) if is_lie}
            found = votes(n_chips, shifts, lies)
            assert is_agreed(found) == (not lies)
            result = count_votes(found, owners(n_chips), 5)
            assert named(result.observations) == ([{liar}] if lies else []), lies
            assert result.unsteady == frozenset()
            for observation in result.observations:
                assert observation.numbers["times"] == len(lies)
                assert observation.numbers["agree"] == len(shifts) - 1
                assert [verdict.suspect for verdict in judge([observation])] == list(observation.suspects)


@pytest.mark.parametrize("n_chips", [5, 6, 9])
def test_no_two_liars_can_blame_another(n_chips: int) -> None:
    """With five votes on each part, whatever two liars say, together or each for itself."""
    rng, shifts = np.random.default_rng(n_chips), [0, *range(1, 5)]
    for _ in range(300):
        liars = {int(chip) for chip in rng.choice(n_chips, 2, replace=False)}
        lies = {(liar, shift): int(rng.integers(1, 3)) for liar in liars for shift in shifts if rng.integers(3)}
        found = count_votes(votes(n_chips, shifts, lies), owners(n_chips), 5)
        assert {chip for chips in named(found.observations) for chip in chips} == {chip for chip, _ in lies}
        assert all(len(observation.suspects) == 1 for observation in found.observations)


@pytest.mark.parametrize("n_chips", [2, 3, 4, 8])
def test_whatever_is_said_there_is_an_observation_exactly_where_chips_disagree(n_chips: int) -> None:
    rng = np.random.default_rng(n_chips)
    shifts = [0, *range(1, min(4, n_chips)), 0]
    for _ in range(300):
        found = votes(n_chips, shifts, {})
        for i in rng.choice(len(found), rng.integers(0, len(found)), replace=False).tolist():
            found[i] = found[i]._replace(gradient=int(rng.integers(5)))
        result = count_votes(found, owners(n_chips), 5)
        assert bool(result.observations) == (not is_agreed(found))
        alone = [observation.suspects[0] for observation in result.observations if len(observation.suspects) == 1]
        assert len(set(alone)) == len(alone)  # one observation per chip
        together = {chip for chips in named(result.observations) if len(chips) > 1 for chip in chips}
        assert together.isdisjoint(suspect.ends[0][1] for suspect in alone)
        assert result.suspects == {suspect for observation in result.observations for suspect in observation.suspects}


def test_three_that_differ_from_each_other_are_suspects_together() -> None:
    found = votes(3, [0, 1, 2], {(0, 0): 1, (2, 1): 2})  # about part 0: chips 0 and 2, each in its own way
    (observation,) = count_votes(found, owners(3), 5).observations
    assert named((observation,)) == [{0, 1, 2}]
    assert observation.evidence == "they computed different gradients of examples of chip 0,0"
    assert judge([observation]) == []


def test_a_chip_that_contradicts_itself_is_named_and_its_votes_do_not_count() -> None:
    found = [one for one in votes(4, [0, 1], {}) if one.part == 2]
    found.append(found[0]._replace(gradient=1))
    result = count_votes([*found, *votes(4, [2], {})], owners(4), 5)
    assert named(result.observations) == [{2}]
    assert result.unsteady == {Suspect.chip((0, 2))}
    assert result.observations[0].numbers == {"agree": 2, "differ": 1, "times": 1}


def test_other_inputs_are_one_observation_and_no_vote_on_gradients() -> None:
    found = [one._replace(state=1, gradient=-1) if one.device == 3 else one for one in votes(6, [0, 1, 2], {})]
    (observation,) = count_votes(found, owners(6), 5).observations
    assert named((observation,)) == [{3}]
    assert observation.evidence == "its parameters or its model state differ from those of 5 of 6 devices"
    assert judge([observation]) == []
    assert len(judge([observation, Observation("recompute", observation.suspects, 9)])) == 1


def test_without_a_majority_of_parameters_all_are_suspects() -> None:
    found = [one._replace(state=one.device) for one in votes(4, [0, 1], {})]
    assert named(count_votes(found, owners(4), 5).observations) == [{0, 1, 2, 3}]
    many = [one._replace(state=one.device) for one in votes(20, [0, 1], {})]
    assert named(count_votes(many, owners(20), 5).observations) == [
        {chip} for chip in range(20)
    ]  # an observation has 16 suspects at most


def test_other_samples_blame_a_chip_only_if_two_hosts_agree_against_it() -> None:
    def given(device: int, samples: int) -> list[Vote]:
        return [
            one._replace(samples=samples, gradient=-samples) if (one.device, one.part) == (device, 0) else one
            for one in votes(6, [0, 1, 2], {})
        ]

    # Part 0 is computed by chips 0, 5 and 4. With two chips per process, 4 and 5 have a host in common.
    result = count_votes(given(5, 1), owners(6, per_process=2), 5)
    assert (named(result.observations), result.has_other_samples) == ([{5}], True)
    assert result.observations[0].evidence.startswith("it was given other data than chips 0,0 and 0,4 for its part")
    assert judge(result.observations) == []
    assert named(count_votes(given(0, 1), owners(6, per_process=2), 5).observations) == [{0, 4, 5}]
