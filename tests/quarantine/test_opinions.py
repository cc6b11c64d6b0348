"""Votes over opinions, against chips that are known to lie: all small meshes, lies of all kinds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshmend.quarantine import Sign, Suspect
from meshmend.quarantine.judge import judge
from meshmend.quarantine.opinions import Opinion, Owner, is_agreed, weigh

STATE, SAMPLES = 7, 8


def owners(n_chips: int, per_process: int = 100) -> list[Owner]:
    return [Owner(Suspect.chip((0, chip)), chip // per_process) for chip in range(n_chips)]


def opinions(n_chips: int, shifts: list[int], lies: dict[tuple[int, int], int]) -> list[Opinion]:
    """All parts, computed by chips so far away; a lie of a chip about a shift is what it adds to the right gradient."""
    return [
        Opinion(chip, part, STATE, SAMPLES, 100 * part + lies.get((chip, shift), 0))
        for shift in shifts
        for chip in range(n_chips)
        for part in [(chip + shift) % n_chips]
    ]


def named(signs: tuple[Sign, ...]) -> list[set[int]]:
    return [{suspect.ends[0][1] for suspect in sign.suspects} for sign in signs]


@pytest.mark.parametrize("n_chips", [3, 4, 5, 7])
def test_one_liar_is_named_alone_whenever_it_lies(n_chips: int) -> None:
    shifts = [0, *range(1, min(5, n_chips))]
    for liar in range(n_chips):
        for pattern in product([0, 1], repeat=len(shifts)):
            lies = {(liar, shift): 10 + shift for shift, is_lie in zip(shifts, pattern, strict=True) if is_lie}
            found = opinions(n_chips, shifts, lies)
            assert is_agreed(found) == (not lies)
            ruling = weigh(found, owners(n_chips), 5)
            assert named(ruling.signs) == ([{liar}] if lies else []), lies
            assert ruling.unsteady == frozenset()
            for sign in ruling.signs:
                assert sign.numbers["times"] == len(lies)
                assert sign.numbers["agree"] == len(shifts) - 1
                assert [verdict.suspect for verdict in judge([sign])] == list(sign.suspects)


@pytest.mark.parametrize("n_chips", [5, 6, 9])
def test_no_two_liars_can_blame_another(n_chips: int) -> None:
    """With five opinions on each part, whatever two liars say, together or each for itself."""
    dice, shifts = np.random.default_rng(n_chips), [0, *range(1, 5)]
    for _ in range(300):
        liars = {int(chip) for chip in dice.choice(n_chips, 2, replace=False)}
        lies = {(liar, shift): int(dice.integers(1, 3)) for liar in liars for shift in shifts if dice.integers(3)}
        found = weigh(opinions(n_chips, shifts, lies), owners(n_chips), 5)
        assert {chip for chips in named(found.signs) for chip in chips} == {chip for chip, _ in lies}
        assert all(len(sign.suspects) == 1 for sign in found.signs)


@pytest.mark.parametrize("n_chips", [2, 3, 4, 8])
def test_whatever_is_said_there_is_a_sign_exactly_where_chips_disagree(n_chips: int) -> None:
    dice = np.random.default_rng(n_chips)
    shifts = [0, *range(1, min(4, n_chips)), 0]
    for _ in range(300):
        found = opinions(n_chips, shifts, {})
        for i in dice.choice(len(found), dice.integers(0, len(found)), replace=False).tolist():
            found[i] = found[i]._replace(gradient=int(dice.integers(5)))
        ruling = weigh(found, owners(n_chips), 5)
        assert bool(ruling.signs) == (not is_agreed(found))
        alone = [sign.suspects[0] for sign in ruling.signs if len(sign.suspects) == 1]
        assert len(set(alone)) == len(alone)  # one sign per chip
        together = {chip for chips in named(ruling.signs) if len(chips) > 1 for chip in chips}
        assert together.isdisjoint(suspect.ends[0][1] for suspect in alone)
        assert ruling.suspects == {suspect for sign in ruling.signs for suspect in sign.suspects}


def test_three_that_differ_from_each_other_are_suspects_together() -> None:
    found = opinions(3, [0, 1, 2], {(0, 0): 1, (2, 1): 2})  # about part 0: chips 0 and 2, each in its own way
    (sign,) = weigh(found, owners(3), 5).signs
    assert named((sign,)) == [{0, 1, 2}]
    assert sign.evidence == "they computed different gradients of examples of chip 0,0"
    assert judge([sign]) == []


def test_a_chip_that_contradicts_itself_is_named_and_its_votes_do_not_count() -> None:
    found = [one for one in opinions(4, [0, 1], {}) if one.part == 2]
    found.append(found[0]._replace(gradient=1))
    ruling = weigh([*found, *opinions(4, [2], {})], owners(4), 5)
    assert named(ruling.signs) == [{2}]
    assert ruling.unsteady == {Suspect.chip((0, 2))}
    assert ruling.signs[0].numbers == {"agree": 2, "differ": 1, "times": 1}


def test_other_inputs_are_one_observation_and_no_vote_on_gradients() -> None:
    found = [one._replace(state=1, gradient=-1) if one.device == 3 else one for one in opinions(6, [0, 1, 2], {})]
    (sign,) = weigh(found, owners(6), 5).signs
    assert named((sign,)) == [{3}]
    assert sign.evidence == "its parameters or its model state differ from those of 5 of 6 devices"
    assert judge([sign]) == []
    assert len(judge([sign, Sign("recompute", sign.suspects, 9)])) == 1


def test_without_a_majority_of_parameters_all_are_suspects() -> None:
    found = [one._replace(state=one.device) for one in opinions(4, [0, 1], {})]
    assert named(weigh(found, owners(4), 5).signs) == [{0, 1, 2, 3}]
    many = [one._replace(state=one.device) for one in opinions(20, [0, 1], {})]
    assert named(weigh(many, owners(20), 5).signs) == [{chip} for chip in range(20)]  # a sign has 16 suspects at most


def test_other_samples_blame_a_chip_only_if_two_hosts_agree_against_it() -> None:
    def given(device: int, samples: int) -> list[Opinion]:
        return [
            one._replace(samples=samples, gradient=-samples) if (one.device, one.part) == (device, 0) else one
            for one in opinions(6, [0, 1, 2], {})
        ]

    # Part 0 is computed by chips 0, 5 and 4. With two chips per process, 4 and 5 have a host in common.
    ruling = weigh(given(5, 1), owners(6, per_process=2), 5)
    assert (named(ruling.signs), ruling.has_other_samples) == ([{5}], True)
    assert ruling.signs[0].evidence.startswith("it was given other data than chips 0,0 and 0,4 for its part")
    assert judge(ruling.signs) == []
    assert named(weigh(given(0, 1), owners(6, per_process=2), 5).signs) == [{0, 4, 5}]
