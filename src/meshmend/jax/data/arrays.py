"""Arrays in memory as a source of samples."""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree


class Rows:
    """A pytree of arrays as a source of samples: sample i is row i of each of them.

    >>> rows = Rows({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})
    >>> len(rows), rows[1]
    (3, {'x': array([2, 3]), 'y': np.int64(1)})
    """

    def __init__(self, arrays: Tree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        lengths = {f"dataset{jax.tree_util.keystr(path)}": np.shape(leaf)[:1] for path, leaf in leaves}
        scalars = [name for name, length in lengths.items() if not length]
        if scalars or not lengths:
            found = f"{scalars[0]} is a single number" if scalars else "there are no arrays"
            raise ParameterError(
                f"In a dataset of arrays each has one row per sample, but {found}. Give an array, a dict or tuple of "
                "arrays, a sequence of samples, or a grain.MapDataset."
            )
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length[0]}" for name, length in lengths.items())
            raise ParameterError(f"The arrays of a dataset have one row per sample, but {listed}.")
        self.arrays = [np.asarray(leaf) for _, leaf in leaves]
        self.treedef = jax.tree.structure(arrays)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, number: int) -> Tree:
        return jax.tree.unflatten(self.treedef, [array[number] for array in self.arrays])

    def take(self, numbers: NDArray[np.int64]) -> Tree:
        """Return some rows of each array, in dtypes that JAX has."""
        return jax.tree.unflatten(self.treedef, [as_in_jax(array[numbers]) for array in self.arrays])

    @property
    def has_objects(self) -> bool:
        """Whether a row may be any Python object, such as a pytree of its own: then rows make no array."""
        return any(array.dtype.hasobject for array in self.arrays)


def as_in_jax(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an array in a dtype that JAX has: it warns of others, and NumPy makes 64-bit integers of Python's."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")), copy=False)
