"""Reading a state from disk: each process the chunks that have elements of its own devices, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.state.disk.orbax import STATE, SavedArrays, names_of
from meshmend.jax.state.disk.write import Checksums, checksum_of
from meshmend.jax.state.layout.rectangles import Box, ChunkGrid, inside, overlap, shape_of, size_of
from meshmend.jax.state.layout.state_layout import Reader, StateLayout

AT_ONCE_BYTES = 256 << 20
"""Bytes that are read at the same time, beside what is kept of them."""


def read_state(
    layout: StateLayout, saved: SavedArrays, names: Sequence[str], checksums: Checksums | None = None
) -> Reader:
    """Read what this process needs of the user's arrays, which have these names.

    Raises `RestartError` if an array is another one than the user's, or if a chunk's checksum is not as expected.
    """
    # Of an array without elements nothing is read, and Orbax alone would not have saved it.
    arrays = {user: saved.array(names[user]) for user, array in enumerate(layout.users) if math.prod(array.shape)}
    grids = {user: ChunkGrid(array.shape, array.chunk_layout.read_chunk.shape or ()) for user, array in arrays.items()}
    for user, array in arrays.items():
        _check(names[user], layout.users[user], array)
        if checksums is not None and len(checksums[user]) != grids[user].n_chunks:
            raise RestartError(f"{names[user]} has {grids[user].n_chunks} chunks, expected {len(checksums[user])}")
    found: dict[tuple[str, int, int], NDArray[Any]] = {}
    wanted: dict[tuple[int, int], list[tuple[Box, NDArray[Any]]]] = {}
    for need in dict.fromkeys(layout.needs()):
        name, start, stop = need
        found[need] = np.empty(stop - start, np.dtype(layout.outline.vectors[name][0]))
        at = 0
        for piece, box in layout.rectangles(*need):
            into = found[need][at : at + size_of(box)].reshape(shape_of(box))
            at += into.size
            for chunk in grids[piece.user].chunks_of(box):
                wanted.setdefault((piece.user, chunk), []).append((box, into))
    for batch in _batches(sorted(wanted), arrays, grids):
        reads = [arrays[user][tuple(slice(*ends) for ends in grids[user].box(chunk))].read() for user, chunk in batch]
        for (user, chunk), read in zip(batch, reads, strict=True):
            values, own = np.asarray(read.result()), grids[user].box(chunk)
            if checksums is not None and checksum_of(values) != checksums[user][chunk]:
                raise RestartError(
                    f"{names[user]}, chunk {chunk}: checksum mismatch: expected {checksums[user][chunk]}, got "
                    f"{checksum_of(values)}"
                )
            for box, into in wanted[user, chunk]:
                common = overlap(own, box)
                assert common is not None  # noqa: S101  # or the chunk would not be read
                into[inside(common, box)] = values[inside(common, own)]
    return lambda name, start, stop: found[name, start, stop]


def read_foreign(layout: StateLayout, path: Any) -> Reader:
    """Read the state that Orbax has saved at a path, by itself or as a step of its manager; the newest, of several.

    Raises `RestartError` unless it is the same tree as the user's.
    """
    saved = SavedArrays(_find_tree(path))
    names = names_of(layout.tree)
    arrays = zip(names, layout.users, strict=True)
    missing = [name for name, array in arrays if math.prod(array.shape) and name not in saved.names]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RestartError(
            f"{saved.folder} has no array {missing[0]}{more}: expected a tree with {', '.join(layout.tree)}, as this "
            f"job saves it, got {', '.join(sorted(saved.names)[:4])}, … To begin with parameters alone, restore them "
            "with Orbax, and pass them to train."
        )
    return read_state(layout, saved, names)


def _find_tree(path: Any) -> Any:
    """Return the folder of a tree: the path, an item of it, or of its last step."""
    for folder in (path, path / STATE, path / "default"):
        if (folder / "_METADATA").exists():
            return folder
    steps = [one for one in path.iterdir() if one.name.isdecimal()] if path.is_dir() else []
    if not steps:
        raise RestartError(f"{path} has no tree that Orbax has saved, neither by itself nor as a step.")
    return _find_tree(max(steps, key=lambda one: int(one.name)))


def _check(name: str, user: Any, array: Any) -> None:
    """Raise unless an array on disk is the user's, or one of a narrower dtype of the same kind."""
    theirs = array.dtype.numpy_dtype
    is_narrower = theirs == user.dtype or (
        jnp.issubdtype(theirs, jnp.floating)
        and jnp.issubdtype(user.dtype, jnp.floating)
        and jnp.promote_types(theirs, user.dtype) == user.dtype
    )
    if tuple(array.shape) != user.shape or not is_narrower:
        raise RestartError(
            f"{name}: expected {np.dtype(user.dtype).name}{list(user.shape)}, got {theirs.name}{list(array.shape)}"
        )


def _batches(
    keys: Sequence[tuple[int, int]], arrays: Mapping[int, Any], grids: Mapping[int, ChunkGrid]
) -> Iterator[list[tuple[int, int]]]:
    batch: list[tuple[int, int]] = []
    n_bytes = 0
    for user, chunk in keys:
        batch.append((user, chunk))
        n_bytes += size_of(grids[user].box(chunk)) * arrays[user].dtype.numpy_dtype.itemsize
        if n_bytes >= AT_ONCE_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch
