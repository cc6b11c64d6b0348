"""Which samples a step uses, and which device gets them, for any number of chips: plain arithmetic.

The samples of an epoch have one order, whatever the chips. A step takes the next ones: as many as the policy says,
fewer at the end of an epoch, so that no step crosses it. A `Position` in that order is therefore all that a job
needs to resume, on the same chips or on others, with no sample lost and none used twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError

RULES = ("linear", "sqrt", "none")
"""How the learning rate follows the global batch: see `KeepPerChip`."""


class Position(NamedTuple):
    """How far committed steps have come: the epoch, and how many of its samples they have used.

    It is the whole state of the input pipeline. Two plain ints: put it into a checkpoint as a pytree, or into JSON as
    a list. (Two, because one count of all samples would outgrow the 32-bit integers of JAX.)

    >>> import json
    >>> Position(*json.loads(json.dumps(Position(epoch=2, sample=640))))
    Position(epoch=2, sample=640)
    """

    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True)
class KeepGlobal:
    """The same global batch on any number of chips: `n_examples`, spread as evenly as possible.

    Chips that get one example fewer than others are padded with an example of weight 0. The steps of a run, their
    samples and the learning rate are the same with a hole as without.

    >>> KeepGlobal(512).global_batch(n_chips=60)
    512
    """

    n_examples: int

    def __post_init__(self) -> None:
        _at_least_one("KeepGlobal's n_examples", self.n_examples)

    def global_batch(self, n_chips: int) -> int:
        """Return how many samples a step uses."""
        del n_chips
        return self.n_examples

    def learning_rate_factor(self, n_chips: int, full: int) -> float:
        """Return 1: the batch does not change, and neither does the learning rate."""
        del n_chips, full
        return 1.0


@dataclass(frozen=True)
class KeepPerChip:
    """The same batch on each chip: the global batch, `n_examples` × chips, shrinks with the hole.

    The learning rate follows the global batch B by `rule`, relative to B₀, the global batch that it was chosen for:

    - "linear": B / B₀ (Goyal et al., 2017, for SGD);
    - "sqrt": √(B / B₀), often preferred for Adam and LAMB;
    - "none": 1.

    B₀ is `reference`; by default `n_examples` × all chips of the mesh, failed ones included. The shorter batch at the
    end of an epoch has the factor of the others.

    >>> KeepPerChip(8).global_batch(n_chips=48), KeepPerChip(8).learning_rate_factor(n_chips=48, full=64)
    (384, 0.75)
    """

    n_examples: int
    rule: str = "linear"
    reference: int | None = None

    def __post_init__(self) -> None:
        _at_least_one("KeepPerChip's n_examples", self.n_examples)
        if self.reference is not None:
            _at_least_one("KeepPerChip's reference", self.reference)
        if self.rule not in RULES:
            raise ParameterError(
                f"The rule for the learning rate is {self.rule!r}, expected one of {', '.join(RULES)}."
            )

    def global_batch(self, n_chips: int) -> int:
        """Return how many samples a step uses."""
        return self.n_examples * n_chips

    def learning_rate_factor(self, n_chips: int, full: int) -> float:
        """Return what to multiply the learning rate by, on `n_chips` of a mesh of `full`."""
        reference = self.n_examples * full if self.reference is None else self.reference
        share = self.global_batch(n_chips) / reference
        return {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[self.rule]


Policy = KeepGlobal | KeepPerChip
"""What happens to the batch when the number of chips changes."""


@dataclass(frozen=True)
class BatchSplit:
    """One policy on one fabric: steps of `global_batch` samples, split over `n_chips` of `n_cores` devices each."""

    epoch_size: int
    global_batch: int
    n_chips: int
    n_cores: int = 1

    @property
    def n_devices(self) -> int:
        """Number of devices; device c of chip r is number r × cores + c, as in `fabric.jax_mesh`."""
        return self.n_chips * self.n_cores

    @property
    def rows(self) -> int:
        """Examples per device, padding included: the same for all devices and all steps."""
        return -(-self.global_batch // self.n_devices)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps from the beginning of an epoch to its end."""
        return -(-self.epoch_size // self.global_batch)

    def count(self, at: Position) -> int:
        """Return how many samples the step at a position uses."""
        return min(self.global_batch, self.epoch_size - at.sample)

    def after(self, at: Position) -> Position:
        """Return the position once the step at `at` is committed."""
        sample = at.sample + self.count(at)
        return Position(at.epoch, sample) if sample < self.epoch_size else Position(at.epoch + 1, 0)

    def position(self, at: Position, steps: int) -> Position:
        """Return the position that is so many steps past `at`: as `after`, so many times."""
        to_end = -(-(self.epoch_size - at.sample) // self.global_batch)
        if steps < to_end:
            return Position(at.epoch, at.sample + steps * self.global_batch)
        epochs, steps = divmod(steps - to_end, self.steps_per_epoch)
        return Position(at.epoch + 1 + epochs, steps * self.global_batch)

    def steps_until(self, at: Position, epochs: int) -> int:
        """Return how many steps lead from `at` to the end of so many epochs."""
        if at.epoch >= epochs:
            return 0
        to_end = -(-(self.epoch_size - at.sample) // self.global_batch)
        return to_end + (epochs - at.epoch - 1) * self.steps_per_epoch

    def offsets(self, devices: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Return which of a step's samples each row of each device holds, of shape (devices, rows).

        Samples go round-robin, to one chip after the other, and to a chip's second core only when all chips have as
        many: no chip and no device has more than one more than another, in short batches too. A step of n
        samples has them where this is below n; the other rows are padding.
        """
        every = np.arange(self.n_devices, dtype=np.int64)
        chosen = every if devices is None else every[list(devices)]
        chip, core = np.divmod(chosen, self.n_cores)
        number = core * self.n_chips + chip
        return number[:, None] + self.n_devices * np.arange(self.rows, dtype=np.int64)

    def epochs_and_offsets(
        self, at: Position, devices: Sequence[int] | None = None
    ) -> Annotated[NDArray[np.uint32], "uint32[D, B, 2]"]:
        """Return the epoch of each row of each device at a position, and the row's offset in it.

        Neither depends on the chips: they are what the random key of an example is made of.
        """
        offsets = self.offsets(devices) + at.sample
        return np.stack([np.full_like(offsets, at.epoch), offsets], axis=-1).astype(np.uint32)


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise ParameterError(f"{what} is {value}, expected at least 1.")
