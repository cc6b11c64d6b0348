"""Small jobs of one process whose keepers can be started, stopped and started again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.session import Session
from meshmend.jax.state import Keeper, Resumed, put
from meshmend.jax.state.candidates import UNCHECKED, Source
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.disk.write import copy_to_host
from meshmend.jax.state.layout.flat import Outline, dtype_named
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.memory.copies import Copy, PartReader
from meshmend.launch import Launch
from meshmend.launch.timeline import Timeline

Vectors = dict[str, NDArray[Any]]
"""The whole state, independent of any mesh: flat vectors by name."""
WEIGHTS = {"in": np.arange(12, dtype=np.float32).reshape(3, 4), "out": 100 + np.arange(8, dtype=np.float32)}


@cache
def machine(shape: str, sharded: bool) -> tuple[mmj.Fabric, Any]:
    n_devices = int(np.prod([int(n) for n in shape.split("x")]))
    fabric = mmj.discover(jax.devices()[:n_devices], shape=shape)
    schedule = mm.plan(fabric.mesh, "hamiltonian")
    return fabric, mmj.install(schedule, fabric, update="two-phase" if sharded else "replicated")


def begin(weights: Any, optimizer: Any, shape: str, sharded: bool) -> tuple[Any, Any, StateLayout]:
    """What a new job starts with: params, state and their layout."""
    fabric, program = machine(shape, sharded)
    params = put(weights, fabric)
    training = mmj.train_step(_loss, optimizer, fabric)
    return params, jax.jit(training.init)(params, program), StateLayout.of(training, program, params)


@cache
def fresh(shape: str, sharded: bool) -> tuple[Any, Any, StateLayout]:
    return begin(WEIGHTS, optax.adam(0.1), shape, sharded)


class Started:
    """A job that has just been started: nothing is restored yet."""

    def __init__(
        self,
        weights: Any = None,
        optimizer: Any = None,
        *,
        sharded: bool = False,
        job: str = "job",
        shape: str = "2x2",
        **options: Any,
    ) -> None:
        self.fabric, _ = machine(shape, sharded)
        if weights is None and optimizer is None:
            self.params, self.state, self.layout = fresh(shape, sharded)
        else:
            self.params, self.state, self.layout = begin(
                weights or WEIGHTS, optimizer or optax.adam(0.1), shape, sharded
            )
        launch = Launch("127.0.0.1:1", 1, 0, job=job)
        self.session = Session(self.fabric, launch, None, (0,), Coordination(0, 1), Timeline(None))
        self.keeper = Keeper(self.session, self.layout, **{"memory_every": 1, **options})

    def restore(self) -> Resumed:
        return self.keeper.restore(self.params, self.state, extra=["start"])

    def values(self, step: int) -> tuple[Any, Any]:
        """A state that belongs to a step and to no other: whole numbers, so that all of them are exact."""
        leaves, tree = jax.tree.flatten((self.params, self.state))
        new = [
            jax.device_put(
                (np.arange(leaf.size).reshape(leaf.shape) + 1000 * step + i).astype(leaf.dtype), leaf.sharding
            )
            for i, leaf in enumerate(leaves)
        ]
        params, state = jax.tree.unflatten(tree, new)
        return params, state

    def keep(self, *steps: int, pin: bool = False) -> None:
        for step in steps:
            self.keeper.keep(step, *self.values(step), extra=["after", step], pin=pin)

    def crash(self) -> None:
        """End as a killed process does, once what it has begun is written."""
        if self.keeper._mirror is not None:
            self.keeper._mirror.wait()
        finish_save(self)
        self.keeper.memory.lock.release()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.session.timeline.events if event["event"] == name]


def finish_save(job: Started) -> None:
    """Return when the checkpoint that was begun last is on disk."""
    if job.keeper.checkpoints is not None:
        job.keeper.checkpoints.note_saved(within_s=job.keeper.checkpoints.disk.timeout_s)


def save(disk: Disk, layout: StateLayout, step: int, state: Any, extra: Any = None) -> None:
    """Save a state, and return when it is there."""
    facts = {"step": step, "attempt": 1, "extra": extra, "verified": UNCHECKED}
    disk.save(layout, copy_to_host(layout, *state), facts, Coordination(0, 1))


def _loss(params: Any, batch: Any) -> Any:
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(params)) * jnp.mean(batch)


def assert_is_step(job: Started, found: Resumed, step: int) -> None:
    """What was found is what `keep` was given at that step, bit by bit."""
    assert found.step == step
    assert found.extra == ["after", step]
    assert elements(job, (found.params, found.state)) == elements(job, job.values(step))


def elements(job: Started, tree: Any) -> dict[str, bytes]:
    """All elements of a state, without the padding of shards: that is no part of it."""
    return {name: vector.tobytes() for name, vector in vectors_of(job.layout, tree).items()}


def empty(outline: Outline) -> Vectors:
    """Vectors of zeros."""
    return {name: np.zeros(size, dtype_named(dtype)) for name, (dtype, size) in outline.vectors.items()}


def collect(copy: Copy, source: Source, process: int, into: Vectors) -> None:
    """Put the slices that a process is to provide from its copy where they belong."""
    senders = source.senders(source.all_slices())
    for part, data in zip(copy.parts, copy.data, strict=True):
        content = b"".join(array.tobytes() for array in data)
        for which, (low, high) in enumerate(copy.outline.slices(part)):
            for name, first, at, length in copy.outline.byte_runs(part):
                begin, end = max(low, at), min(high, at + length)
                if begin < end and senders[part, which] == process:
                    where = slice(first + begin - at, first + end - at)
                    into[name].view(np.uint8)[where] = np.frombuffer(content[begin:end], np.uint8)


def with_parts(copy: Copy) -> Copy:
    """A copy of which only the header was read, with its parts: they must be as they were written."""
    data: list[list[NDArray[Any]]] = []
    with PartReader(copy) as reader:
        for part in copy.parts:
            slices = range(len(copy.outline.slices(part)))
            content, at = b"".join(block for which in slices for _, block in reader.blocks(part, which)), 0
            data.append([])
            for dtype in copy.outline.dtypes:
                size = copy.outline.part_size(part, dtype)
                if size:
                    data[-1].append(np.frombuffer(content, dtype_named(dtype), size, at))
                    at += data[-1][-1].nbytes
    return replace(copy, data=data)


def read_vectors(vectors: Vectors) -> Reader:
    """The reader of whole vectors."""
    return lambda name, start, stop: vectors[name][start:stop]


def vectors_of(layout: StateLayout, tree: Any) -> Vectors:
    """The vectors of a state, all of which is on this process's devices."""
    vectors = empty(layout.outline)
    for name, start, values in copy_to_host(layout, *tree):
        vectors[name][start : start + len(values)] = values
    return vectors


def arrays_on_disk(disk: Path, step: int) -> list[Path]:
    """The files that hold a checkpoint's values, largest first."""
    found = [path for path in (disk / str(step)).rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(found, key=lambda path: -path.stat().st_size)
