"""All-reduce a tensor or a tree of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshmend.errors import PayloadError
from meshmend.torch.engine import Engine
from meshmend.torch.payload import check_tensor, describe, device_of, kind_of, overwrite


def all_reduce(tree: Any, engine: Engine, *, mean: bool = False) -> None:
    """Sum (or average) the tensors of a tree over all chips, in place: of lists, tuples and dictionaries in each other.

    A single contiguous tensor is reduced where it is. Other tensors are packed, by dtype, into one payload each:
    one long message is faster than many short ones. All tensors are checked before the first is sent.
    """
    kind = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    leaves = list(_tensors_with_paths(tree))
    tensors = [leaf for _, leaf in leaves]
    check_tensors(tensors, kind)
    engine.need_all_reduce()
    # A dictionary's leaves come in the order in which it was filled: chips that filled theirs in another order would
    # add up tensors of equal shapes and different names.
    reduce_tensors(tensors, engine.run, kind, names=[path for path, _ in leaves])


def _tensors_with_paths(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[list[str | int], torch.Tensor]]:
    """Return the tensors of a tree, each with the keys that lead to it, or their types where processes may differ."""
    if isinstance(tree, torch.Tensor):
        yield list(path), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors_with_paths(value, (*path, key if isinstance(key, str | int) else type(key).__name__))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _tensors_with_paths(value, (*path, number))
    elif tree is not None and not isinstance(tree, str | bytes | int | float | complex):
        advice = "Pass its tensors, as in list(module.parameters())."
        raise PayloadError("lists, tuples and dictionaries of tensors", f"a {type(tree).__name__} in them", advice)


def check_tensors(tensors: Sequence[torch.Tensor], op: Any) -> None:
    """Raise `PayloadError` if one of them cannot be reduced."""
    for tensor in tensors:
        check_tensor(tensor, kind_of(op))
    device_of(tensors)


def reduce_tensors(
    tensors: Sequence[torch.Tensor],
    run: Callable[..., object],
    op: Any,
    names: Any = None,
    *,
    timeout: timedelta | None = None,
) -> None:
    """Reduce tensors in place, those of each dtype as one payload, with an engine's `run`.

    Members agree on `names` too, if they are given.
    """
    kind = kind_of(op)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor.detach())
    for alike in by_dtype.values():
        words = describe(alike, kind, names)
        if len(alike) == 1 and alike[0].is_contiguous():
            run(alike[0], kind, words, timeout=timeout)
            continue
        # In inference mode the engine's threads could not write to what is made here.
        with torch.inference_mode(False):
            packed = torch.cat([tensor.reshape(-1) for tensor in alike])
        run(packed, kind, words, timeout=timeout)
        for tensor, part in zip(alike, packed.split([tensor.numel() for tensor in alike]), strict=True):
            overwrite(tensor, part)
