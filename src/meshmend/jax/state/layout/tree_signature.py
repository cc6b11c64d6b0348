"""The identity of a training state: the path, shape and dtype of every array of it, and the types that hold them.

Two models may have the same number of elements, and two optimizers arrays of the same shapes. Restoring one as the
other would train with numbers that mean something else. So the identity of the state is kept with every copy
and checkpoint, and compared in full before any element is used. It is that of the user's own tree (`user_tree`), so
that it depends neither on the mesh nor on how the state is split over devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree


@dataclass(frozen=True)
class Identity:
    """The nodes and leaves of a state, outermost first: (path, what is there)."""

    entries: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, tree: Mapping[str, Any], more: Callable[[Any], str] = lambda _: "") -> Identity:
        """Describe a state as the user has it, by the names of its parts; `more` is what else counts of an array.

        >>> Identity.of({"params": {"w": np.zeros((2, 3), np.float32)}, "opt_state": ()}).entries
        (('params', 'dict'), ("params['w']", 'float32[2,3]'), ('opt_state', 'tuple'))
        """
        return cls(tuple(entry for name, part in tree.items() for entry in _walk(name, part, more)))

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


def _walk(path: str, tree: Tree, more: Callable[[Any], str]) -> Iterator[tuple[str, str]]:
    """Yield a node and all that is below it; nodes without leaves count too: an optimizer's stateless parts."""
    if jax.tree_util.all_leaves([tree]):
        yield path, f"{np.dtype(tree.dtype).name}[{','.join(map(str, tree.shape))}]{more(tree)}"
        return
    yield path, type(tree).__qualname__
    for key, child in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]:
        yield from _walk(path + jax.tree_util.keystr(key), child, more)
