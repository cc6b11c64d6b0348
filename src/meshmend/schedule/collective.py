"""What a transfer does, and what a schedule promises."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Op(IntEnum):
    """The operation of a transfer at its destination."""

    REDUCE = 0
    """Add what arrives to the chunk that is there."""
    COPY = 1
    """Replace the chunk that is there."""


class Collective(StrEnum):
    """The collective that a schedule computes. `meshmend.schedule.verify` defines and proves each of them."""

    ALL_REDUCE = "all-reduce"
    """Every chip ends with the sum of every chunk over all chips."""
    REDUCE_SCATTER = "reduce-scatter"
    """The owner of a chunk ends with its sum; what other chips hold is scratch."""
    ALL_GATHER = "all-gather"
    """Every chip ends with the owner's value of every chunk."""
    ALL_REDUCE_WITH_UPDATE = "all-reduce-with-update"
    """An all-reduce in which the owner of a chunk may replace its sum, and every chip ends with what it put there."""

    @property
    def is_all_reduce(self) -> bool:
        """Whether every chip ends with every sum (or with what its owner made of it)."""
        return self in (Collective.ALL_REDUCE, Collective.ALL_REDUCE_WITH_UPDATE)
