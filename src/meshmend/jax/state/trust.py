"""Which states may be trusted after a check has found wrong numbers, and up to which step a state is verified.

Every copy and checkpoint records the last step that was verified when it was written. An observation of wrong numbers
says in which attempt it was seen, and which step had been verified last: what that attempt or an earlier one kept of
later steps may be wrong, whoever turns out to be the culprit. What a later attempt keeps is trusted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshmend.errors import RestartError
from meshmend.jax.state.sources import UNCHECKED, Source

LISTED = 4
"""States that a message names."""


@dataclass(frozen=True)
class Trust:
    """What a job's observations say of its states: the states of attempts up to `attempt` after `step` are not trusted.

    >>> trust = Trust(((2, 100),))
    >>> trust.trusts(2, 100), trust.trusts(1, 101), trust.trusts(3, 101)
    (True, False, True)
    """

    untrusted: tuple[tuple[int, int], ...] = ()
    """Pairs of attempt and step."""
    is_checked: bool = True
    """Whether checks run in this job."""

    @classmethod
    def of(cls, untrusted: Any) -> Trust:
        """Return what pairs say, as JSON has them; None if nothing checks this job."""
        return cls(tuple((int(attempt), int(step)) for attempt, step in untrusted or ()), untrusted is not None)

    @property
    def newest_attempt(self) -> int:
        """The last attempt that has seen an observation, 0 if none has."""
        return max((attempt for attempt, _ in self.untrusted), default=0)

    @property
    def last_verified(self) -> int:
        """The last step that was verified before that attempt's observations."""
        return min((step for attempt, step in self.untrusted if attempt == self.newest_attempt), default=0)

    def trusts(self, attempt: int, step: int) -> bool:
        """Whether nothing speaks against what an attempt has kept of a step."""
        return not any(attempt <= its_attempt and step > its_step for its_attempt, its_step in self.untrusted)

    def verified_step(self, source: Source, sources: Sequence[Source]) -> int:
        """Return the last verified step of the state that a job resumes from, given all that was found.

        A state is verified itself if a later step of its attempt was, by an observation's word or that of other copies
        of the same run: what it has recorded itself is older.
        """
        known = [step for attempt, step in self.untrusted if source.attempt <= attempt]
        known += [one.verified for one in sources if one.run == source.run != "" and one.attempt == source.attempt]
        if max(known, default=UNCHECKED) >= source.step:
            return source.step
        if source.verified == UNCHECKED:
            return source.step if self.is_checked else UNCHECKED
        return source.verified

    def nothing_verified(self, passed_over: Sequence[Source], problems: Sequence[str], folders: str) -> RestartError:
        """Return the error for a job that has kept nothing that is both verified and intact."""
        listed = "".join(f"\n- {problem}" for problem in dict.fromkeys([self.explain(passed_over), *problems]))
        return RestartError(
            f"Nothing that this job has kept of step {self.last_verified}, the last verified one, or before can be "
            f"restored:{listed}\nBring back what is missing. To start over, remove {folders}. If the check was wrong, "
            "and these states are good, move fault_log.jsonl in the job's shared folder away: then they are trusted.",
            step=self.last_verified,
        )

    def explain(self, passed_over: Sequence[Source]) -> str:
        """Say why these states are not trusted."""
        more = f" and {len(passed_over) - LISTED} more" if len(passed_over) > LISTED else ""
        return (
            f"a check found wrong numbers in attempt {self.newest_attempt}, and the last verified step was "
            f"{self.last_verified}: not trusted are {', '.join(map(str, passed_over[:LISTED]))}{more}"
        )


class Preserved:
    """Which checkpoints stay on disk, as Orbax asks for it: the newest few, and the last up to the verified step.

    >>> kept = Preserved(2)
    >>> kept.of([100, 200, 300, 400])
    [False, False, True, True]
    >>> kept.verified = 250
    >>> kept.of([100, 200, 300, 400])
    [False, True, True, True]
    """

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.verified = UNCHECKED

    def of(self, steps: Sequence[int]) -> list[bool]:
        """Say for each of these steps, oldest first, whether its checkpoint stays."""
        stay = {*steps[-self.newest :], *[step for step in steps if step <= self.verified][-1:]}
        return [step in stay for step in steps]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:  # noqa: ARG002
        """Answer Orbax."""
        return self.of([info.step for info in checkpoints])
