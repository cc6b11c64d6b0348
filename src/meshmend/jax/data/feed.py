"""The input pipeline: batches of samples for whatever chips survive, every sample exactly once per epoch.

`shuffle` says the order of an epoch, and `policy` which of its samples a step uses. Threads read ahead of training: of
arrays in memory a step's rows at once, of any other source sample by sample. A process reads only what its own devices
need, and what it has read ahead does not count: the pipeline's state is the `Position` after the last committed step,
the same on all processes, and any number of them restores from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.data.policy import BatchSplit, Policy, Position
from meshmend.jax.data.read_ahead import Submit, read_ahead
from meshmend.jax.data.shuffle import shuffled
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.fabric import Fabric


@dataclass(frozen=True)
class Batch:
    """The data of one step. Made by `Feed.batches`.

    Give it to the step of `compile_train_step`, or its `data`, `weights` and `learning_rate_factor` to the step of
    `train_step(…, per_example=True)`, and put `after` into the checkpoint that has the step's parameters.
    """

    data: Tree
    """A pytree of arrays, the first axis split over all devices or tiles; padding repeats a sample of the same step."""
    weights: jax.Array
    """1.0 for each example that counts and 0.0 for padding, split like the data."""
    learning_rate_factor: float
    """What the policy multiplies the learning rate by."""
    at: Position
    """The position before this step."""
    after: Position
    """The position once this step is committed."""
    feed: Feed = field(repr=False)

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """Record numbers in the source that this step uses, over all processes, in the order of the epoch."""
        stop = self.after.sample if self.after.epoch == self.at.epoch else self.feed.epoch_size
        return self.feed.records(self.at.epoch, self.at.sample, stop)


class Feed:
    """A source of samples, an order of them for each epoch, and a policy for the batch.

    `source` is an array, or a dict or tuple of arrays with one row per sample. It may also be anything with `len` and
    `[i]`, asked by several threads, or a `grain.MapDataset` with the caller's own transformations, one sample per
    element (not batched, filtered or repeated). The order of an epoch is a permutation that depends only on `seed` and
    the epoch; random transformations (`random_map`) depend on the epoch and the record. `threads` (for arrays one) read
    ahead up to `prefetch` batches; 0 threads reads in the loop itself.

    >>> import jax, numpy as np, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> feed = mmj.Feed(np.arange(100, dtype=np.float32), mmj.KeepGlobal(32))
    >>> [batch.after for batch in feed.batches(fabric, at=mmj.Position(epoch=0, sample=40), epochs=1)]
    [Position(epoch=0, sample=72), Position(epoch=1, sample=0)]
    """

    def __init__(self, source: Any, policy: Policy, *, seed: int = 0, threads: int = 16, prefetch: int = 2) -> None:
        if seed < 0 or threads < 0 or prefetch < 0:
            raise ParameterError(
                f"seed is {seed}, threads is {threads} and prefetch is {prefetch}, expected none below 0."
            )
        is_in_memory = isinstance(source, dict | tuple | np.ndarray | jax.Array)
        if not is_in_memory and not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ParameterError(
                f"The dataset is a {type(source).__name__}, expected something with len() and [i]: arrays, a sequence "
                "of samples, or a grain.MapDataset. An iterator cannot go back to the samples of a step that was lost."
            )
        samples = Rows(source) if is_in_memory else source
        if not 0 < len(samples) < sys.maxsize:
            raise ParameterError(
                f"The source has {'no' if not len(samples) else 'endlessly many'} samples, expected an epoch of them: "
                "the feed itself repeats it."
            )
        self.policy = policy
        self.epoch_size = len(samples)
        self.threads = threads
        self.prefetch = prefetch
        self._samples = samples
        # The epoch is added to it, so neighbouring seeds would give the same epochs, one later.
        self._seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])

    def records(self, epoch: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return the record numbers of an epoch's samples, in its order, without reading a sample."""
        return self._order(epoch, np.arange(start, self.epoch_size if stop is None else stop, dtype=np.int64))

    def split(self, fabric: Fabric) -> BatchSplit:
        """Return how this feed's samples are split over a fabric's devices: sizes of batches, steps per epoch.

        On a fabric of tiles a tile counts as one chip and one device: its devices share its part of a batch.
        """
        n_chips = fabric.mesh.n_chips
        n_cores = math.prod(fabric.jax_mesh.shape[axis] for axis in fabric.batch_axes) // n_chips
        return BatchSplit(self.epoch_size, self.policy.global_batch(n_chips), n_chips, n_cores)

    def batches(self, fabric: Fabric, at: Position | None = None, *, epochs: int | None = None) -> Iterator[Batch]:
        """Return the batches from a position on (by default the beginning), for this fabric.

        Without end, or to the end of so many epochs. All have the same shapes. Reading ahead begins at once, so call
        it before whatever else takes time at a start, such as compiling.
        """
        at = Position() if at is None else Position(int(at[0]), int(at[1]))
        if at.epoch < 0 or not 0 <= at.sample < self.epoch_size:
            raise ParameterError(
                f"The position is {at}, but an epoch has the samples 0 to {self.epoch_size - 1}: it was made with "
                "another source."
            )
        split = self.split(fabric)
        # The devices of a tile share its part of the batch, and may belong to several processes.
        parts = fabric.jax_mesh.devices.reshape(split.n_devices, -1)
        here = jax.process_index()
        mine = [i for i, part in enumerate(parts) if any(device.process_index == here for device in part)]
        if not mine:
            raise ParameterError(
                f"Process {jax.process_index()} has no device in {fabric!r}, so it has nothing to feed."
            )
        steps = sys.maxsize // (split.n_devices * split.rows) if epochs is None else split.steps_until(at, epochs)
        factor = self.policy.learning_rate_factor(fabric.mesh.n_chips, fabric.mesh.size)
        return self._batches(fabric, split, at, mine, self._read(split, at, steps, mine), factor)

    def like(self, fabric: Fabric) -> Batch:
        """Return the shapes and dtypes of this fabric's batches, to compile for: `compile_train_step` takes them.

        Reads one sample. The fabric may be one on which this process has no device, as when its host has failed.
        """
        split, at = self.split(fabric), Position()
        sharding, n_rows = fabric.sharding(fabric.batch_axes), split.n_devices * split.rows

        def shape(local: NDArray[np.generic]) -> Any:
            return jax.ShapeDtypeStruct((n_rows, *local.shape[1:]), local.dtype, sharding=sharding)

        data, weights = jax.tree.map(shape, self.read(fabric, at, [0], [0]))
        factor = self.policy.learning_rate_factor(fabric.mesh.n_chips, fabric.mesh.size)
        return Batch(data, weights, factor, at, split.after(at), self)

    def read(self, fabric: Fabric, at: Position, devices: Sequence[int], rows: Sequence[int]) -> tuple[Tree, Tree]:
        """Read some rows of any devices at a position (again); return data and weights, as NumPy arrays.

        Device after device, whichever process feeds them. A batch of the same position has the same in these rows,
        except for what padding repeats.
        """
        split = self.split(fabric)
        with closing(self._read(split, at, 1, devices, rows)) as read:
            data = next(read)
        offsets = split.offsets(devices)[:, list(rows)]
        return jax.tree.map(as_in_jax, data), (offsets.ravel() < split.count(at)).astype(np.float32)

    def _order(self, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return shuffled(offsets, self.epoch_size, (self._seed + epoch) % 2**32)

    def _read(
        self, split: BatchSplit, at: Position, steps: int, devices: Sequence[int], rows: Sequence[int] | None = None
    ) -> Generator[Tree]:
        """Begin to read rows of some devices; return those of all of them, step after step, as NumPy arrays.

        Padding repeats the first sample of these rows, or of the step where these have none: it is not read again.
        """
        chosen, samples = split.offsets(devices), self._samples
        offsets = (chosen if rows is None else chosen[:, list(rows)]).ravel()
        takes_rows = isinstance(samples, Rows) and not samples.has_objects
        threads = min(self.threads, 1 if takes_rows else len(offsets))

        def begin(step: int, submit: Submit) -> Callable[[], Tree]:
            start = split.position(at, step)
            used = offsets < split.count(start)
            padded = np.where(used, offsets, offsets[used][0] if used.any() else 0)
            if takes_rows:
                return submit(lambda: samples.take(self._order(start.epoch, start.sample + padded))).result
            distinct, places = np.unique(padded, return_inverse=True)
            parts = np.array_split(distinct, min(max(1, threads), len(distinct)))
            reads = [submit(self._samples_at, start, part) for part in parts]
            return lambda: _stack([sample for read in reads for sample in read.result()], places.tolist())

        return read_ahead(begin, steps, threads=threads, depth=self.prefetch)

    def _samples_at(self, start: Position, offsets: NDArray[np.int64]) -> list[Tree]:
        """Read the samples at some offsets from a position, in the order of its epoch."""
        # The random transformations of a grain.MapDataset follow an index that counts on from epoch to epoch.
        grain = sys.modules.get("grain")
        counts_on = grain is not None and isinstance(self._samples, grain.MapDataset)
        first = start.epoch * self.epoch_size if counts_on else 0
        found = []
        records = self._order(start.epoch, start.sample + offsets)
        for offset, record in zip(offsets.tolist(), records.tolist(), strict=True):
            found.append(self._samples[first + record])
            if found[-1] is None:
                raise ParameterError(
                    f"The dataset has no sample {start.sample + offset} in epoch {start.epoch}: a filter has removed "
                    "it. Each sample must count, or no two runs agree on a batch: filter the source before it becomes "
                    "a feed."
                )
        return found

    def _batches(
        self, fabric: Fabric, split: BatchSplit, at: Position, mine: list[int], read: Generator[Tree], factor: float
    ) -> Iterator[Batch]:
        coordinate_of = {device: i * split.rows for i, device in enumerate(mine)}
        sharding = fabric.sharding(fabric.batch_axes)

        def spread(local: NDArray[np.generic]) -> jax.Array:
            """Make one array over all devices of the rows of this process's own."""

            def part(index: Any) -> NDArray[np.generic]:
                first = coordinate_of[(index[0].start or 0) // split.rows]
                return local[first : first + split.rows]

            local = as_in_jax(local)
            return jax.make_array_from_callback((split.n_devices * split.rows, *local.shape[1:]), sharding, part)

        offsets = split.offsets(mine).ravel()
        with closing(read):
            for data in read:
                weights = (offsets < split.count(at)).astype(np.float32)
                after = split.after(at)
                yield Batch(jax.tree.map(spread, data), spread(weights), factor, at, after, self)
                at = after


def _stack(samples: list[Tree], places: list[int]) -> Tree:
    """Stack samples, each as often as its place is named."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(samples[place] for place in places))


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
