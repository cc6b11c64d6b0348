"""The identity of a training state: the path, shape and dtype of every array of it, and the types that hold them.

Two models may have the same number of elements, and two optimizers arrays of the same shapes. Restoring one as the
other would train with numbers that mean something else. So the identity of the state is kept with every copy
and checkpoint, and compared in full before any element is used. It does not depend on the mesh: an array that is split
over the devices counts by its elements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshmend.errors import RestartError
from meshmend.jax.collectives import travel_dtype
from meshmend.jax.fsdp.params import ShardedOutline, is_sharded


@dataclass(frozen=True)
class Identity:
    """The nodes and leaves of (params, state), outermost first: (path, what is there)."""

    entries: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls, params: Any, state: Any, split_sizes: Sequence[int | None], in_tiles: Sequence[str] | None = None
    ) -> Identity:
        """Describe a state; `split_sizes` has for each leaf its elements if it is split over the devices, else None.

        `in_tiles` has for each leaf how it is split inside tiles, "" where there are none: what is kept of it
        is kept place by place.

        >>> Identity.of({"w": np.zeros((2, 3), np.float32)}, (), [None]).entries
        (('params', 'dict'), ("params['w']", 'float32[2,3]'), ('state', 'tuple'))
        """
        splits = zip(split_sizes, in_tiles or [""] * len(split_sizes), strict=True)
        return cls((*_walk("params", params, splits), *_walk("state", state, splits)))

    @cached_property
    def digest(self) -> str:
        """A name for the whole, equal only for equal states."""
        return hashlib.sha256(json.dumps(self.entries).encode()).hexdigest()[:32]

    def difference(self, kept: Identity) -> str:
        """Return where a kept state first differs from this one, what was expected and what it has; "" if nowhere.

        >>> Identity((("params['w']", "float32[4]"),)).difference(Identity((("params['w']", "float32[5]"),)))
        "params['w']: expected float32[4], got float32[5]"
        """
        mine, theirs = dict(self.entries), dict(kept.entries)
        for path, what in self.entries:
            if path not in theirs:
                return f"{path}: expected {what}, got nothing of that path"
            if theirs[path] != what:
                return f"{path}: expected {what}, got {theirs[path]}"
        for path, what in kept.entries:
            if path not in mine:
                return f"{path}: expected nothing of that path, got {what}"
        return "" if self.entries == kept.entries else "the same paths in another order"

    def as_json(self) -> list[list[str]]:
        """Return the identity as plain values."""
        return [list(entry) for entry in self.entries]

    @classmethod
    def from_json(cls, facts: Any) -> Identity:
        """Return the identity that `as_json` wrote; raise `RestartError` if this is not one."""
        if not isinstance(facts, list) or not all(
            isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)
            for entry in facts
        ):
            raise RestartError("expected the state's identity as pairs of path and type, got something else")
        return cls(tuple((path, what) for path, what in facts))


def _walk(path: str, tree: Any, splits: Iterator[tuple[int | None, str]]) -> Iterator[tuple[str, str]]:
    """Yield a node and all that is below it; nodes without leaves count too: an optimizer's stateless parts."""
    if jax.tree_util.all_leaves([tree]):
        yield path, _describe(tree, *next(splits))
        return
    yield path, type(tree).__qualname__
    if is_sharded(tree):
        yield from _arrays_of(path, tree.outline)
    for key, child in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]:
        yield from _walk(path + jax.tree_util.keystr(key), child, splits)


def _arrays_of(path: str, outline: ShardedOutline) -> Iterator[tuple[str, str]]:
    """Yield the arrays that shards are of: as many elements of other shapes are other parameters.

    What they are gathered as is not kept, and may change.
    """
    stack = "" if outline.n_layers is None else f" of each of {outline.n_layers} layers"
    specs = jax.tree.leaves(outline.specs_inside, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    for (key, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(outline.like), specs, strict=True):
        dtype = travel_dtype(leaf.dtype, outline.accumulate_dtype).name
        inside = "" if outline.inside is None else f", {tuple(spec)} inside tiles"
        yield path + jax.tree_util.keystr(key), f"{dtype}[{','.join(map(str, leaf.shape))}]{stack}, sharded{inside}"


def _describe(leaf: Any, split_size: int | None, in_tiles: str) -> str:
    dtype, inside = np.dtype(leaf.dtype).name, f", {in_tiles}" if in_tiles else ""
    if split_size is not None:
        return f"{dtype}, {split_size} elements split over the devices{inside}"
    return f"{dtype}[{','.join(map(str, leaf.shape))}]{inside}"
