"""Which checks a job under torchft runs, and how often; and what recomputed gradients say.

A part of a step's samples is computed by the chip that trains on it, and again by a partner; partners change. Where the
two differ, both repeat it and a third chip computes it, too: the majority is right. A chip that does not repeat itself
is a suspect like one that differs from others. But if several do not, or if many differ, it is the program: then there
is nothing to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmend.errors import Coordinate, ParameterError
from meshmend.quarantine import Sign, Suspect
from meshmend.quarantine.sign import RECOMPUTE

Opinions = dict[int, dict[int, set[bytes]]]
"""For each part, by the rank of its chip, what each rank that computed it found."""


@dataclass(frozen=True)
class TorchChecks:
    """The checks of a job under torchft, as `mmt.Checks`: for `Manager.of(group, shared=…, checks=Checks(), …)`.

    - `digests_every`: all chips compare digests of their state every so many steps; 0: only where gradients are
      recomputed.
    - `recompute_every`: a partner recomputes each chip's gradient every so many steps, if the loop calls
      `manager.recompute`; 0: never.
    - `stragglers`: chips and cables that are slow are quarantined, too, from the engine's own times.
    - `own`: state that is not the same on all chips, by how its names begin, as in `("model.norm.running",)`.
    """

    digests_every: int = 100
    recompute_every: int = 0
    own: tuple[str, ...] = ()
    stragglers: bool = False

    def __post_init__(self) -> None:
        is_any = self.digests_every or self.recompute_every or self.stragglers
        if min(self.digests_every, self.recompute_every) < 0 or not is_any:
            raise ParameterError(
                f"Checks every {self.digests_every} and {self.recompute_every} steps: expected numbers from 0, and one "
                "of them above 0, or stragglers=True."
            )
        if isinstance(self.own, str):
            raise ParameterError(f'own is a tuple of names, even of one: write own=("{self.own}",).')

    def compares(self, step: int) -> bool:
        """Whether chips compare their state after this step: also whenever gradients are recomputed from it."""
        return (self.digests_every > 0 and step % self.digests_every == 0) or self.recomputes(step)

    def recomputes(self, step: int) -> bool:
        """Whether gradients are recomputed from the state after this step."""
        return self.recompute_every > 0 and step % self.recompute_every == 0

    def distances(self, step: int, n_chips: int) -> tuple[int, int]:
        """Return how far a chip's partner is from it, in ranks, and how far the third chip: other ones each time.

        >>> [TorchChecks(recompute_every=10).distances(step, n_chips=4) for step in (0, 10, 20, 30)]
        [(1, 2), (2, 3), (3, 1), (1, 2)]
        """
        partner = step // max(self.recompute_every, 1) % (n_chips - 1)
        return partner + 1, (partner + 1) % (n_chips - 1) + 1


@dataclass(frozen=True)
class Weighed:
    """What opinions say: signs, or that the program cannot be checked so."""

    signs: tuple[Sign, ...] = ()
    unrepeatable: str = ""
    """Why the program is not deterministic, if it is not."""


def weigh(opinions: Opinions, chips: Sequence[Coordinate], step: int) -> Weighed:
    """Return what opinions that are not agreed say, the same on every chip: at most one sign per chip."""
    unsteady = {rank for found in opinions.values() for rank, values in found.items() if len(values) > 1}
    signs: dict[tuple[int, ...], Sign] = {}
    for part, found in sorted(opinions.items()):
        if len(set().union(*found.values())) == 1:
            continue
        of = f"the gradient of the samples of chip {Suspect.chip(chips[part])}"
        steady = {rank: value for rank, values in found.items() if len(values) == 1 for value in values}
        ((_, times),) = Counter(steady.values()).most_common(1) or [(b"", 0)]
        right = [value for value, n in Counter(steady.values()).items() if n == times and 2 * n > len(steady)]
        odd = [rank for rank in sorted(found) if rank not in steady or (right and steady[rank] != right[0])]
        if not odd:
            text = f"{len(found)} chips computed {of}, and no majority found the same"
            numbers = {"agree": 1, "differ": len(found) - 1}
            signs.setdefault(tuple(sorted(found)), _sign(sorted(found), chips, step, text, numbers))
        for rank in odd:
            text = f"{times} of {len(found)} chips agree on {of}, and this one differs"
            text += " from itself" * (rank not in steady)
            numbers = {"agree": times, "differ": len(odd)}
            before = signs.get((rank,))
            if before is None or before.numbers["agree"] - before.numbers["differ"] < times - len(odd):
                signs[rank,] = _sign([rank], chips, step, text, numbers)
    named = {rank for ranks in signs for rank in ranks if len(ranks) == 1}
    open_ones = {rank for ranks in signs for rank in ranks} - named
    if len(unsteady) > 1:
        return Weighed(unrepeatable=f"{len(unsteady)} of {len(chips)} chips do not find the same twice")
    if len(named) > max(1, len(chips) // 4) or len(open_ones) > max(3, len(chips) // 4):
        return Weighed(unrepeatable=f"{len(named | open_ones)} of {len(chips)} chips find something else than others")
    # Whoever is named explains what is open where it took part.
    return Weighed(tuple(sign for ranks, sign in sorted(signs.items()) if len(ranks) == 1 or named.isdisjoint(ranks)))


def _sign(
    ranks: Sequence[int], chips: Sequence[Coordinate], step: int, text: str, numbers: Mapping[str, float]
) -> Sign:
    return Sign(RECOMPUTE, tuple(Suspect.chip(chips[rank]) for rank in ranks), step, text, numbers)
