"""Which checks a job under torchft runs, and how often; and what recomputed gradients say.

A part of a step's samples is computed by the chip that trains on it, and again by a partner; partners change. Where the
two differ, both repeat it and a third chip computes it, too: the majority is right. A chip that does not repeat itself
is a suspect like one that differs from others. But if several do not, or if many differ, it is the program: then there
is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmend.errors import Coordinate, ParameterError
from meshmend.quarantine import Sign, Suspect
from meshmend.quarantine.opinions import Opinion, Owner, weigh

Found = dict[int, dict[int, set[bytes]]]
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


def weigh_gradients(found: Found, chips: Sequence[Coordinate], step: int) -> Weighed:
    """Return what opinions that are not agreed say, the same on every chip: at most one sign per chip."""
    # State is compared by the digests, and samples came from the chip itself: only the gradients differ here.
    opinions = [
        Opinion(rank, part, 0, 0, int.from_bytes(value))
        for part, by_rank in found.items()
        for rank, values in by_rank.items()
        for value in values
    ]
    ruling = weigh(opinions, [Owner(Suspect.chip(chip), rank) for rank, chip in enumerate(chips)], step)
    named = {sign.suspects[0] for sign in ruling.signs if len(sign.suspects) == 1}
    n_open = len(ruling.suspects - named)
    if len(ruling.unsteady) > 1:
        return Weighed(unrepeatable=f"{len(ruling.unsteady)} of {len(chips)} chips do not find the same twice")
    if len(named) > max(1, len(chips) // 4) or n_open > max(3, len(chips) // 4):
        return Weighed(unrepeatable=f"{len(ruling.suspects)} of {len(chips)} chips find something else than others")
    return Weighed(ruling.signs)
