"""The input pipeline: batches from a grain dataset for whatever chips survive, every sample exactly once per epoch.

grain (the extra `restart`) shuffles, reads ahead in threads and runs the caller's own transformations.
`batching` says which samples a step uses. A process reads only what its own devices need, and what it has read ahead
does not count: the pipeline's state is the `Position` after the last committed step, the same on all processes, and
any number of them restores from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.extras import require
from meshmend.jax.batching import BatchSplit, Policy, Position
from meshmend.jax.collectives import Tree
from meshmend.jax.fabric import Fabric


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

    `source` is anything with `len` and `[i]`, or a `grain.MapDataset` with the caller's own transformations, one
    sample per element (not batched, filtered or repeated). The order of an epoch is a permutation that depends only on
    `seed` and the epoch; random transformations (`random_map`) depend on the epoch and the record. `threads`
    read ahead up to `prefetch` batches; 0 threads reads in the loop itself.

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
        grain = _grain()
        dataset = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
        if not 0 < len(dataset) < sys.maxsize:
            raise ParameterError(
                f"The source has {'no' if not len(dataset) else 'endlessly many'} samples, expected an epoch of them: "
                "the feed repeats it by itself."
            )
        # grain adds the epoch to the seed, so neighbouring seeds would give the same epochs, one later.
        shuffle = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
        self.policy = policy
        self.epoch_size = len(dataset)
        self.threads = threads
        self.prefetch = prefetch
        self._samples = dataset.shuffle(seed=shuffle)
        self._order = grain.MapDataset.range(self.epoch_size).shuffle(seed=shuffle)

    def records(self, epoch: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return the record numbers of an epoch's samples, in its order, without reading a sample."""
        first = epoch * self.epoch_size
        offsets = range(start, self.epoch_size if stop is None else stop)
        return np.array([self._order[first + offset] for offset in offsets], dtype=np.int64)

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
        reader = self._read(DeviceRows(self._samples, split, at, steps, mine)) if steps else None
        factor = self.policy.learning_rate_factor(fabric.mesh.n_chips, fabric.mesh.size)
        return self._batches(fabric, split, at, steps, mine, reader, factor)

    def like(self, fabric: Fabric) -> Batch:
        """Return the shapes and dtypes of this fabric's batches, to compile for: `compile_train_step` takes them.

        Reads one sample. The fabric may be one on which this process has no device, as after the loss of its own host.
        """
        split, at = self.split(fabric), Position()
        sharding, n_rows = fabric.sharding(fabric.batch_axes), split.n_devices * split.rows

        def shape(local: NDArray[np.generic]) -> Any:
            local = _canonical(local)
            return jax.ShapeDtypeStruct((n_rows, *local.shape[1:]), local.dtype, sharding=sharding)

        data = _stack(DeviceRows(self._samples, split, at, 1, [0], [0])[0])
        factor = self.policy.learning_rate_factor(fabric.mesh.n_chips, fabric.mesh.size)
        return Batch(jax.tree.map(shape, data), shape(np.zeros(1, np.float32)), factor, at, split.after(at), self)

    def read(self, fabric: Fabric, at: Position, devices: Sequence[int], rows: Sequence[int]) -> tuple[Tree, Tree]:
        """Read some rows of any devices at a position (again); return data and weights, as NumPy arrays.

        Device after device, whichever process feeds them. A batch of the same position has the same in these rows,
        except for what padding repeats.
        """
        split = self.split(fabric)
        reader = self._read(DeviceRows(self._samples, split, at, 1, devices, rows))
        try:
            data = _stack([row for _ in devices for row in next(reader)])
        finally:
            reader.close()
        offsets = split.offsets(devices)[:, list(rows)]
        return jax.tree.map(_canonical, data), (offsets.ravel() < split.count(at)).astype(np.float32)

    def _read(self, parts: DeviceRows) -> Tree:
        grain = _grain()
        ahead = max(self.prefetch * len(parts.offsets), self.threads) if self.prefetch else 0
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=ahead)
        reader = iter(grain.MapDataset.source(parts).to_iter_dataset(options))
        reader.start_prefetch()
        return reader

    def _batches(
        self, fabric: Fabric, split: BatchSplit, at: Position, steps: int, mine: list[int], reader: Any, factor: float
    ) -> Iterator[Batch]:
        coordinate_of = {device: i * split.rows for i, device in enumerate(mine)}
        sharding = fabric.sharding(fabric.batch_axes)

        def spread(local: NDArray[np.generic]) -> jax.Array:
            """Make one array over all devices of the rows of this process's own."""

            def part(index: Any) -> NDArray[np.generic]:
                first = coordinate_of[(index[0].start or 0) // split.rows]
                return local[first : first + split.rows]

            local = _canonical(local)
            return jax.make_array_from_callback((split.n_devices * split.rows, *local.shape[1:]), sharding, part)

        offsets = split.offsets(mine).ravel()
        try:
            for _ in range(steps):
                data = _stack([row for _ in mine for row in next(reader)])
                weights = (offsets < split.count(at)).astype(np.float32)
                after = split.after(at)
                yield Batch(jax.tree.map(spread, data), spread(weights), factor, at, after, self)
                at = after
        finally:
            if reader is not None:
                reader.close()


class DeviceRows:
    """The rows of some devices, device after device and step after step: a source that grain prefetches from.

    A part is a device's rows, or those of them that are named. A row of padding is None and costs no reading; but where
    no device has a sample, the first row is one, so that the step has something valid to compute with.
    """

    def __init__(
        self,
        samples: Any,
        split: BatchSplit,
        at: Position,
        steps: int,
        devices: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        self.samples = samples
        self.split = split
        self.at = at
        self.steps = steps
        self.offsets = split.offsets(devices)
        if rows is not None:
            self.offsets = self.offsets[:, list(rows)]
        self.lowest = int(self.offsets.min())

    def __len__(self) -> int:
        return self.steps * len(self.offsets)

    def __getitem__(self, number: int) -> list[Tree]:
        step, device = divmod(int(number), len(self.offsets))
        at = self.split.position(self.at, step)
        count = self.split.count(at)
        offsets = self.offsets[device].tolist()
        if device == 0 and self.lowest >= count:
            offsets[0] = 0
        return [self._sample(at, offset) if offset < count else None for offset in offsets]

    def _sample(self, at: Position, offset: int) -> Tree:
        sample = self.samples[at.epoch * self.split.epoch_size + at.sample + offset]
        if sample is None:
            raise ParameterError(
                f"The dataset has no sample {at.sample + offset} in epoch {at.epoch}: a filter has removed it. Each "
                "sample must count, or no two runs agree on a batch: filter the source before it becomes a feed."
            )
        return sample


def _stack(rows: list[Tree]) -> Tree:
    """Stack samples, and repeat the first one where there is none."""
    valid = next(row for row in rows if row is not None)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(valid if row is None else row for row in rows))


def _canonical(local: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an array in a dtype that JAX has: it warns of others, and NumPy makes 64-bit integers of Python's."""
    return local.astype(jax.dtypes.canonicalize_dtype(local.dtype), copy=False)


def _grain() -> Any:
    require("grain", needed_for="Feeding batches", extra="restart")
    import grain

    return grain
