"""From votes to observations: several chips have computed the gradient of the same examples, and not all found the
same.

The majority of those who computed a part is right, and who differs from it is named. That needs the same inputs, so
each vote has digests of those, too. A chip whose inputs differ says nothing about the gradient. It gets an observation
that is not confirmed: a flipped bit in its copy of the parameters, or a sample that its host has read wrong, is no
proof that it computes wrong numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from meshmend.quarantine.observation import MAX_SUSPECTS, RECOMPUTE, Observation
from meshmend.quarantine.suspect import Suspect


class Vote(NamedTuple):
    """What one device has computed of one part. Only JSON's types: it is exchanged between processes."""

    device: int
    part: int
    """The device that trains on these examples."""
    state: int
    """Digest of the parameters and the model state that it computed with."""
    samples: int
    """Digest of the examples that it computed with."""
    gradient: int
    """Digest of the gradients, the loss and aux."""


class Owner(NamedTuple):
    """Where a device is."""

    chip: Suspect
    process: int


@dataclass
class VoteResult:
    """What the votes of one check say."""

    observations: tuple[Observation, ...] = ()
    unsteady: frozenset[Suspect] = frozenset()
    """Chips that computed the same part twice and found two things."""
    has_other_samples: bool = False
    """Whether some who computed a part had other examples than others."""

    @property
    def suspects(self) -> frozenset[Suspect]:
        """All chips that the observations name, alone or with others."""
        return frozenset(chain.from_iterable(one.suspects for one in self.observations))


def is_agreed(votes: Iterable[Vote]) -> bool:
    """Whether all who computed a part found the same, with the same inputs."""
    everything = list(votes)
    by_part = {(one.part, one.samples, one.gradient) for one in everything}
    return len({one.state for one in everything}) == 1 and len(by_part) == len({one.part for one in everything})


def count_votes(votes: Sequence[Vote], owners: Sequence[Owner], step: int) -> VoteResult:
    """Return the observations of votes that are not agreed, at most one per chip that is named."""
    found = _Found(owners)
    states: dict[int, set[int]] = defaultdict(set)
    for one in votes:
        states[one.device].add(one.state)
    tally = _tally(states)
    n_same = f"{len(tally.agreeing)} of {len(states)} devices"
    found.inputs(tally, states, f"its parameters or its model state differ from those of {n_same}")
    excluded, parts = set(tally.excluded), defaultdict(list)
    for one in votes:
        if one.device not in excluded:
            parts[one.part].append(one)
    for part, computed in sorted(parts.items()):
        found.count_part(part, computed)
    return found.result(step)


class _Tally(NamedTuple):
    odd: tuple[int, ...]
    """Devices that differ from the majority, or from themselves."""
    open: tuple[int, ...]
    """Devices of which some must be wrong, without a majority that says which."""
    agreeing: tuple[int, ...]
    """Devices that agree with each other, if there is nothing open."""

    @property
    def excluded(self) -> tuple[int, ...]:
        return self.odd + self.open


def _tally(values: Mapping[int, set[int]]) -> _Tally:
    steady = {device: next(iter(found)) for device, found in values.items() if len(found) == 1}
    unsteady = tuple(device for device in values if device not in steady)
    if not steady:
        return _Tally(unsteady, (), ())
    (value, times), *_ = Counter(steady.values()).most_common(1)
    agreeing = tuple(device for device, found in steady.items() if found == value)
    others = tuple(device for device in steady if device not in agreeing)
    if others and 2 * times <= len(steady):
        return _Tally(unsteady, tuple(steady), ())
    return _Tally(unsteady + others, (), agreeing)


class _Case(NamedTuple):
    """What speaks against one chip, in one part."""

    evidence: str
    agree: int
    differ: int


@dataclass
class _Found:
    """All that is found, before it becomes observations."""

    owners: Sequence[Owner]
    named: dict[Suspect, list[_Case]] = field(default_factory=lambda: defaultdict(list))
    open: list[tuple[dict[Suspect, set[int]], str]] = field(default_factory=list)
    """Votes without a majority: what each chip found, and what it is about."""
    unsteady: set[Suspect] = field(default_factory=set)
    has_other_samples: bool = False

    def chips(self, devices: Iterable[int]) -> frozenset[Suspect]:
        return frozenset(self.owners[device].chip for device in devices)

    def inputs(self, tally: _Tally, values: Mapping[int, set[int]], evidence: str) -> None:
        """Note whose inputs differ: never confirmed, so nobody counts as agreeing."""
        for chip in self.chips(tally.odd):
            self.named[chip].append(_Case(evidence, 0, 1))
        self._note_open(tally, values, "they computed with different parameters, model states or examples")

    def _note_open(self, tally: _Tally, values: Mapping[int, set[int]], evidence: str) -> None:
        if tally.open:
            by_chip: dict[Suspect, set[int]] = defaultdict(set)
            for device in tally.open:
                by_chip[self.owners[device].chip] |= values[device]
            self.open.append((by_chip, evidence))

    def count_part(self, part: int, votes: Sequence[Vote]) -> None:
        samples: dict[int, set[int]] = defaultdict(set)
        gradients: dict[int, set[int]] = defaultdict(set)
        for one in votes:
            samples[one.device].add(one.samples)
        tally = self._samples_tally(_tally(samples))
        of = f"of examples of chip {self.owners[part].chip}"
        if tally.excluded:
            self.has_other_samples = True
            self.inputs(
                tally, samples, f"it was given other data than {_names(self.chips(tally.agreeing))} for its part {of}"
            )
        for one in votes:
            if one.device not in tally.excluded:
                gradients[one.device].add(one.gradient)
        if not gradients:
            return
        tally = _tally(gradients)
        for device in tally.odd:
            chip, against = self.owners[device].chip, f"that of {_names(self.chips(tally.agreeing))}"
            if len(gradients[device]) > 1:
                self.unsteady.add(chip)
                against = "the one that it computed from the same data before"
            self.named[chip].append(
                _Case(f"its gradient {of} differs from {against}", len(tally.agreeing), len(tally.odd))
            )
        self._note_open(tally, gradients, f"they computed different gradients {of}")

    def _samples_tally(self, tally: _Tally) -> _Tally:
        """Return the vote, open if a host that reads wrong samples could have given the majority its own."""
        hosts = {self.owners[device].process for device in tally.agreeing}
        if len(hosts) == 1 and any(self.owners[device].process not in hosts for device in tally.odd):
            return _Tally((), tally.odd + tally.agreeing, ())
        return tally

    def result(self, step: int) -> VoteResult:
        observations = []
        for chip, cases in sorted(self.named.items()):
            strongest = max(cases, key=lambda case: (case.agree, -case.differ))
            more = f", and {len(cases) - 1} more like this" if len(cases) > 1 else ""
            numbers = {"agree": strongest.agree, "differ": strongest.differ, "times": len(cases)}
            observations.append(Observation(RECOMPUTE, (chip,), step, strongest.evidence + more, numbers))
        observations += self._open_observations(step)
        return VoteResult(tuple(observations), frozenset(self.unsteady), self.has_other_samples)

    def _open_observations(self, step: int) -> Iterable[Observation]:
        """Return an observation for each set of chips that still differ when those that are named are left out."""
        seen = set()
        for values, evidence in self.open:
            rest = {chip: found for chip, found in values.items() if chip not in self.named}
            suspects = tuple(sorted(rest))
            if len({frozenset(found) for found in rest.values()}) < 2 or suspects in seen:
                continue
            seen.add(suspects)
            numbers = {"agree": 1, "differ": len(rest) - 1}
            for together in [suspects] if len(suspects) <= MAX_SUSPECTS else [(chip,) for chip in suspects]:
                yield Observation(RECOMPUTE, together, step, evidence, numbers)


def _names(chips: Iterable[Suspect]) -> str:
    names = [str(chip) for chip in sorted(chips)]
    if len(names) == 1:
        return f"chip {names[0]}"
    return f"chips {', '.join(names[:-1])} and {names[-1]}" if names else "all others"
