"""Which checks a job runs against chips that compute wrong numbers, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from meshmend.errors import ParameterError


@dataclass(frozen=True)
class Checks:
    """The checks of a job. Each of them can be left out; all of them off is what a job without checks does.

    - `digests_every`: steps between two comparisons of all replicas of the state; 0 for never.
    - `recompute_every`: steps between two checks in which each chip repeats a part of another chip's gradient; 0 for
      never. It costs one more gradient in so many steps.

    A state is known to be good, and is kept, where the replicas agree; with `recompute_every` where, besides, all chips
    have repeated each other's gradients.

    >>> Checks(recompute_every=0).is_due(200), Checks(digests_every=0).is_due(100), Checks().is_due(300)
    (True, False, True)
    """

    digests_every: int = 100
    recompute_every: int = 200

    def __post_init__(self) -> None:
        for name in ("digests_every", "recompute_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ParameterError(f"{name} is {value!r}, expected a number of steps, or 0 for never.")

    def repeats_gradients(self, step: int) -> bool:
        """Whether gradients are repeated after a step."""
        return bool(self.recompute_every) and step > 0 and step % self.recompute_every == 0

    def is_due(self, step: int) -> bool:
        """Whether anything is checked after a step that tells whether its state is good."""
        by_digests = bool(self.digests_every) and step > 0 and step % self.digests_every == 0
        return by_digests or self.repeats_gradients(step)

    def verifies(self, step: int) -> bool:
        """Whether the state after a step is known to be good once its checks have found nothing."""
        return self.repeats_gradients(step) if self.recompute_every else self.is_due(step)
