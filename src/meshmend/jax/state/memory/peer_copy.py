"""The mirror: after a step, hosts keep parts of the state in their memory, for when others fail (`placement`).

One compiled function cuts the parts: on each device a share of the arrays that all devices have alike, and its shards
of the others, which it also sends to a device of another host, with one permute of each sharded array. A thread then
copies all of them to this host's memory, while the next steps run.

A vote before it (`voting`) tells every host whether another one is late, still writing the copy before: then all leave
this copy out, and nobody waits. So no host writes a copy before every host has written the one before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshmend.jax.engine.collectives import Tree
from meshmend.jax.state.candidates import UNCHECKED
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.memory.copies import Copy, HostMemory
from meshmend.jax.state.memory.placement import Placement
from meshmend.jax.state.memory.redundancy import least_blocks
from meshmend.jax.state.timetable import Outcome, Timetable, Wishes
from meshmend.jax.state.waiting import wait_for
from meshmend.launch.timeline import Timeline

Parts = dict[str, dict[str, Annotated[jax.Array, "[D, M, P]"]]]
"""For each kind of part ("share", "own", "kept") and dtype, the elements of the parts that each device has."""


class Mirror:
    """Keeps this host's part in the copies of a training state. Made by `Keeper`."""

    def __init__(
        self,
        layout: StateLayout,
        memory: HostMemory,
        attempt: int,
        timeline: Timeline,
        on_failure: Callable[[BaseException], Any] = lambda _: None,
        *,
        run: str,
        vote: Callable[[Wishes], Outcome],
        placement: Placement,
        on_complete: Callable[[dict[str, Any]], Any] = lambda _: None,
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.attempt = attempt
        self.run = run
        self.timeline = timeline
        self.vote = vote
        self.on_failure = on_failure
        """Called with an error by the thread that writes: the one that trains may be blocked in the next step."""
        self.on_complete = on_complete
        """Called by that thread with what this host offers of a copy, once all hosts have written it."""
        self._offer: dict[str, Any] | None = None
        self.placement = placement
        n_most, n_chips = max(Counter(self.placement.host_of_chip).values()), len(self.placement.host_of_chip)
        if layout.outline.sharded and n_chips < 2 * n_most < 2 * n_chips:
            warnings.warn(
                f"One host has {n_most} of {n_chips} chips, so the others keep copies of only {n_chips - n_most} of "
                "them. If that host fails, the job goes back to its last checkpoint on disk.",
                stacklevel=2,
            )
        self._cut: Any = layout.programs.get("cut") if placement.n_blocks == least_blocks(layout) else None
        self._writer = ThreadPoolExecutor(1, "meshmend-mirror")
        self._writing: Future[None] | None = None

    def compile(self, params: Tree, state: Tree) -> None:
        """Compile ahead of the first copy, unless that was done."""
        if self._cut is None:
            self._cut = compile_cut(self.layout, params, state, self.placement)

    @property
    def is_writing(self) -> bool:
        """Whether a copy is being written."""
        return self._writing is not None and not self._writing.done()

    def keep(
        self,
        step: int,
        params: Tree,
        state: Tree,
        extra: Tree,
        verified: int = UNCHECKED,
        *,
        waits: bool = True,
        table: Timetable | None = None,
    ) -> None:
        """Keep a copy of a step, which is written while the next ones run; the arrays may be donated right away.

        If the copy before is still being written, on any host, this one `waits` for it, or is left out on all hosts.
        The vote of `table` goes with it, and it is told what the copy costs.
        """
        table = table or Timetable(1)
        is_late = self.is_writing and not waits
        if not is_late:
            self.wait()
        outcome = self.vote(table.wishes(is_late=is_late))
        parts = self._cut(params, state)
        table.voted(step, outcome)
        table.copied(step)
        if not is_late:
            for array in jax.tree.leaves(parts):
                array.copy_to_host_async()
            self._writing = self._writer.submit(self._write, step, parts, outcome, extra, verified, table)

    def wait(self) -> None:
        """Return when everything is written; raise what went wrong."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, step: int, parts: Parts, outcome: Outcome, extra: Tree, verified: int, table: Timetable) -> None:
        try:
            # Devices cut the copy when they have voted. Nothing is written before all hosts have.
            if outcome().is_late:
                self.timeline.note("copy skipped", step=step)
                return
            if self._offer is not None:
                self.on_complete(self._offer)
            table.copy_begins()
            wait_for(parts)
            table.copy_is_cut()
            me = jax.process_index()
            copy = copy_of(parts, self.layout, self.placement, me, self.attempt, step, extra, self.run)
            n_bytes = self.memory.write(replace(copy, verified=verified))
            self._offer = copy.offer(self.layout.copy_identity)
            table.copy_is_written()
        except BaseException as error:
            self.on_failure(error)
            raise
        self.timeline.note("kept", step=step, bytes=n_bytes)


def copy_of(
    parts: Parts, layout: StateLayout, placement: Placement, host: int, attempt: int, step: int, extra: Tree, run: str
) -> Copy:
    """Return what a host keeps of the parts that its devices have cut, or have been sent."""
    outline = replace(layout.outline, n_shares=placement.n_shares)
    held = placement.parts_of(host, outline)
    here = {
        (kind, dtype, shard.index[0].start or 0): shard.data
        for kind, arrays in parts.items()
        for dtype, array in arrays.items()
        for shard in array.addressable_shards
    }
    data = [
        [
            np.asarray(here[one.kind, dtype, one.device])[0, one.column]
            for dtype in outline.dtypes
            if outline.part_size(one.part, dtype)
        ]
        for one in held
    ]
    numbers = tuple(one.part for one in held)
    return Copy(attempt, step, outline, numbers, data, extra, layout.copy_identity, run)


def make_parts_fn(layout: StateLayout, placement: Placement) -> Callable[[Tree, Tree], Parts]:
    """Return the function from (params, state) to the parts that each device cuts, and those that it is sent.

    Leaf by leaf, so that no device holds a second state meanwhile.
    """
    fabric, outline = layout.fabric, replace(layout.outline, n_shares=placement.n_shares)
    by_device = PartitionSpec(fabric.axes)
    over_chips = tuple(axis for axis in fabric.axes if axis != fabric.core_axis)
    sends = [(chip, keeper) for keeper, chip in enumerate(placement.kept.tolist()) if chip != keeper]

    def local(*leaves: jax.Array) -> Parts:
        chip = lax.axis_index(over_chips)
        core = lax.axis_index(fabric.core_axis) if fabric.core_axis else 0
        mine = jnp.asarray(placement.shares)[chip * outline.n_cores + core]
        parts: Parts = {"share": {}, "own": {}, "kept": {}}
        for dtype in outline.dtypes:
            flat = [(jnp.ravel(x), s) for x, s in zip(leaves, layout.is_sharded, strict=True) if x.dtype.name == dtype]
            whole, shards = ([leaf for leaf, split in flat if split is kind] for kind in (False, True))
            if outline.part_size(0, dtype):
                pieces = [
                    lax.dynamic_slice_in_dim(leaf, jnp.minimum(mine[column] * share, leaf.size - share), share)
                    for column in range(placement.shares.shape[1])
                    for leaf, share in zip(whole, outline.shares(dtype), strict=True)
                ]
                parts["share"][dtype] = _stack(pieces, placement.shares.shape[1])
            if outline.part_size(outline.n_all_shares, dtype):  # otherwise only layers without elements have this dtype
                parts["own"][dtype] = _stack(shards, 1)
                if sends:
                    parts["kept"][dtype] = _stack([lax.ppermute(shard, over_chips, sends) for shard in shards], 1)
        return parts

    mapped = jax.shard_map(local, mesh=fabric.jax_mesh, in_specs=layout.specs, out_specs=by_device, check_vma=False)

    def cut(params: Tree, state: Tree) -> Parts:
        found: Parts = mapped(*jax.tree.leaves((params, state)))
        return found

    return cut


def _stack(pieces: list[jax.Array], n_parts: int) -> jax.Array:
    """Return the elements of so many parts of a device, one after the other."""
    return jnp.concatenate(pieces).reshape(1, n_parts, -1)


def compile_cut(layout: StateLayout, params: Tree, state: Tree, placement: Placement) -> jax.stages.Compiled:
    """Compile the function from (params, state) to parts."""
    return layout.fabric.jit(make_parts_fn(layout, placement)).lower(params, state).compile()
