"""Which samples a chip uses in a step under torchft: every sample of an epoch in exactly one committed step.

The samples of all epochs form one sequence without end, epoch after epoch, each in an order of its own. It is cut into
batches, and torchft counts those that committed steps have used. A step whose quorum has n chips uses the next n
batches, one per chip. A step that is not committed counts nothing, so the next quorum begins with the same samples; and
a chip that comes back receives the count with the weights. Nothing else is kept.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torchft
from numpy.typing import NDArray

from meshmend.errors import ParameterError


class StepSampler:
    """The samples of this chip in the step under way. Needs a torchft manager, and no state of its own.

    `n_samples` is the size of the dataset, `batch_size` the number of samples per chip and step. The order of an epoch
    depends only on `seed` and the epoch. All three must be the same on all chips, and for as long as the job lasts.

    Call `indices` once the step has begun (`optimizer.zero_grad()`, `manager.start_quorum()`). All chips have equally
    many samples, so the mean over chips that torchft computes is the mean over samples; the global batch shrinks with
    the hole. A step at the end of an epoch goes on with the samples of the next.
    """

    def __init__(self, manager: torchft.Manager, n_samples: int, batch_size: int, *, seed: int = 0) -> None:
        for name, value, least in (("n_samples", n_samples, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if value < least:
                raise ParameterError(f"StepSampler's {name} is {value}, expected at least {least}.")
        self._manager = manager
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.seed = seed

    @property
    def position(self) -> int:
        """How many samples committed steps have used, over all epochs."""
        return int(self._manager.batches_committed()) * self.batch_size

    @property
    def epoch(self) -> int:
        """How many epochs committed steps have used completely."""
        return self.position // self.n_samples

    def indices(self) -> NDArray[np.int64]:
        """Return the record numbers of this chip's samples; waits for the quorum.

        A chip that does not take part (a spare, or one that is still receiving the weights) has those of the first:
        torchft counts its gradients as zero.
        """
        first = self.position + (self._manager.participating_rank() or 0) * self.batch_size
        epochs, offsets = np.divmod(np.arange(first, first + self.batch_size, dtype=np.int64), self.n_samples)
        found = np.empty(self.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = order_of(self.seed, int(epoch), self.n_samples)[offsets[here]]
        return found


@lru_cache(maxsize=2)
def order_of(seed: int, epoch: int, n_samples: int) -> NDArray[np.int64]:
    """Return an epoch's order: records sorted by a 64-bit hash of their number, the same in every version of NumPy.

    Chips whose orders differ would use samples twice, and libraries do not promise that a shuffle stays what it is.

    >>> order_of(seed=0, epoch=0, n_samples=6).tolist()
    [4, 0, 1, 2, 5, 3]
    """
    key = _mixed(_mixed(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    return np.argsort(_mixed(np.arange(n_samples, dtype=np.uint64) + key), kind="stable").astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's next output for each state (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
