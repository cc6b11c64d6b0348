"""One step of a job's training, as its loop sees it: what it used, and results that are fetched when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshmend.jax.data.feed import Batch
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.state.waiting import fetch


@dataclass(frozen=True)
class JobStep:
    """One step. Made by `Job.train`.

    Its results are still being computed when the loop gets it: `loss`, `aux` and `params` wait for them, so ask for
    them only where you use them.
    """

    number: int
    """From 1; the same with a failure as without."""
    chips: int
    """Live chips that computed it."""
    batch: Batch = field(repr=False)
    """Its samples: `batch.indices` are their record numbers, `batch.at` and `batch.after` the positions around it."""
    recovered: bool
    """Whether it is the first one after a restart."""
    _results: Any = field(repr=False)
    _params: Callable[[JobStep], Tree] = field(repr=False)

    @property
    def epoch(self) -> int:
        """Its epoch, from 0."""
        return self.batch.at.epoch

    @cached_property
    def loss(self) -> float:
        """The mean loss over the samples of this step, before its update."""
        return float(fetch(self._results[0]))

    @cached_property
    def aux(self) -> Tree:
        """The metrics that the loss returned with `has_aux`, each the mean over the samples; None without."""
        return fetch(self._results[1]) if len(self._results) > 1 else None

    @property
    def params(self) -> Tree:
        """The parameters after this step, as NumPy arrays. Only until the next step: that one overwrites them."""
        return self._params(self)
