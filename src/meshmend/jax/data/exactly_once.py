"""Whether a job has used each sample once per epoch: a check that the positions in its timelines are contiguous.

Each round of a job writes the position that it starts from and its global batch, and with each step the step's own
position. The samples of an epoch have one order, so where each step begins at the position at which the one before it
ended, no sample is lost and none is used twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from meshmend.errors import RestartError
from meshmend.jax.data.policy import BatchSplit, Position
from meshmend.launch.timeline import read_timeline
from meshmend.launch.watching import timelines


class _Start(NamedTuple):
    """What a round starts from: the step that it restored, the position after it, and its global batch."""

    step: int
    position: Position
    batch: int

    def after(self, steps: int, n_samples: int) -> Position:
        """Return the position after so many steps of this round."""
        return BatchSplit(n_samples, self.batch, 1).position(self.position, steps)


def check_positions(folder: str | Path, n_samples: int) -> int:
    """Return how many steps the job in a shared folder has done, if they use each sample once per epoch.

    `n_samples` is the length of an epoch. Raises `RestartError` with the first step whose position is another one than
    it should be. After a restart the steps from the restored one on count, and those that they replace do not. The last
    steps before a failure may have been done without a line: the next round must still start where they ended.
    """
    starts: dict[int, _Start] = {}
    done: dict[int, set[int]] = {}
    for path in timelines(folder):
        for event in read_timeline(path):
            kind, number, step = event["event"], int(event.get("round", 0)), int(event.get("step", 0))
            if kind == "feed":
                start = _Start(step, Position(*event["position"]), event["batch"])
                if starts.setdefault(number, start) != start:
                    raise _wrong(step, f"hosts start round {number} from", start, starts[number])
            elif kind in ("step", "steps") and number in starts:
                start = starts[number]
                at, expected = Position(*event["position"]), start.after(step - 1 - start.step, n_samples)
                if at != expected:
                    raise _wrong(step, f"round {number} uses the samples from", at, expected)
                done.setdefault(number, set()).update(range(int(event.get("first", step)), step + 1))
    counted = [_Start(0, Position(), 1)]
    for number, start in sorted(starts.items()):
        while counted[-1].step > start.step:
            counted.pop()
        expected = counted[-1].after(start.step - counted[-1].step, n_samples)
        if start.position != expected:
            raise _wrong(start.step, f"round {number} starts from", start.position, expected)
        missing = set(range(start.step + 1, max(done.get(number, {start.step})) + 1)) - done.get(number, set())
        if missing:
            raise RestartError(f"No host has written step {min(missing)} of round {number}.", step=min(missing))
        counted.append(start)
    if not starts:
        raise RestartError(f"No timeline in {folder} has a position: no job has trained there.")
    last = max(starts)
    return max(done.get(last, {starts[last].step}))


def _wrong(step: int, what: str, got: object, expected: object) -> RestartError:
    return RestartError(f"Samples are lost or used twice at step {step}: {what} {got}, expected {expected}.", step=step)
