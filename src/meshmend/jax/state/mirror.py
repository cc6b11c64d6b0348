"""The mirror: after a step, each device's part of the state is also in another host's memory.

One compiled function cuts every device's part (its shards of the optimizer's state, and its share of each array that
all devices have alike), and sends it to a device of another host: one permute of each sharded array, and nothing at all
for replicated arrays, which every device has anyway. A thread then copies both to this host's memory, while the next
steps run.

A vote before it (`voting`) tells every host whether another one is late, still writing the copy before: then all leave
this copy out, and nobody waits. So no host writes a copy before every host has written the one before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from meshmend.jax.collectives import Tree
from meshmend.jax.fabric import Fabric
from meshmend.jax.state.fetch import wait_for
from meshmend.jax.state.layout import StateLayout
from meshmend.jax.state.memory import Copy, HostMemory
from meshmend.jax.state.sources import UNCHECKED
from meshmend.jax.state.timetable import Outcome, Timetable, Wishes
from meshmend.launch.timeline import Timeline
from meshmend.topology import Mesh

Parts = dict[str, tuple[Annotated[jax.Array, "[D, P]"], Annotated[jax.Array, "[D, P]"]]]
"""For each dtype every device's own part, and the one of another host that it keeps; one row per device."""


def backup_chips(host_of_chip: Sequence[int], mesh: Mesh | None = None) -> list[int]:
    """Return for each chip the chip of another host that keeps its part; every chip keeps one.

    Chips are taken host by host and moved on by as many as the largest host has, so they always land on another host,
    and the same chip of the next one where all hosts are alike. If they are and `mesh` is given, two hosts that one
    failure takes out of the job together, as it cuts the mesh in two, do not keep each other's parts, where possible.
    Where one host has more than half of the chips, as may be when chips of the others are in quarantine, the others
    keep as many of its parts as they have chips, and the rest of its chips keep their own.

    >>> backup_chips([0, 0, 1, 1, 2, 2])
    [2, 3, 4, 5, 0, 1]
    >>> backup_chips([0, 1, 2, 3], Mesh("1x4"))  # the loss of host 1 cuts off host 0
    [2, 3, 0, 1]
    >>> backup_chips([0, 0, 0, 1, 1])
    [3, 4, 2, 0, 1]
    """
    order = sorted(range(len(host_of_chip)), key=lambda chip: (host_of_chip[chip], chip))
    sizes = np.unique(host_of_chip, return_counts=True)[1]
    shift, n_hosts = int(sizes.max()), len(sizes)
    if n_hosts < 2:
        return list(range(len(host_of_chip)))
    keeper = list(range(len(order)))
    if 2 * shift > len(order):
        largest = np.bincount(host_of_chip).argmax()
        others = [chip for chip in order if host_of_chip[chip] != largest]
        for chip, other in zip([chip for chip in order if host_of_chip[chip] == largest], others, strict=False):
            keeper[chip], keeper[other] = other, chip
        return keeper
    if mesh is not None and sizes.min() == shift:
        of_host = np.array(order).reshape(n_hosts, shift)
        for chips, kept_by in zip(of_host, _backup_hosts(of_host, mesh), strict=True):
            for chip, other in zip(chips.tolist(), of_host[kept_by].tolist(), strict=True):
                keeper[chip] = other
        return keeper
    for at, chip in enumerate(order):
        keeper[chip] = order[(at + shift) % len(order)]
    return keeper


def _backup_hosts(chips: NDArray[np.int64], mesh: Mesh) -> NDArray[np.int64]:
    """Return for each host the one that keeps its parts; `chips` has a row of ranks per host."""
    n = len(chips)
    numbers = np.arange(n)
    cost = (numbers[None, :] - numbers[:, None] - 1) % n / n**2  # the next host is the natural one
    np.fill_diagonal(cost, n * n)
    for lost in range(n):
        left = mesh.fail(*mesh.coords[chips[lost]].tolist())
        if left.n_components < 2:
            continue
        groups = left.component_of[left.rank_of[tuple(mesh.coords[np.delete(chips, lost, axis=0)[:, 0]].T)]]
        gone = np.union1d(lost, np.delete(numbers, lost)[groups != np.bincount(groups).argmax()])
        cost[np.ix_(gone, gone)] += 1
    return np.asarray(linear_sum_assignment(cost)[1])


class Mirror:
    """Keeps copies of a training state in this host's memory and in another host's. Made by `Keeper`."""

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
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.attempt = attempt
        self.run = run
        self.timeline = timeline
        self.vote = vote
        self.on_failure = on_failure
        """Called with an error by the thread that writes: the one that trains may be blocked in the next step."""
        self.host_of_chip = hosts_of_chips(layout.fabric)
        n_most, n_chips = max(Counter(self.host_of_chip).values()), len(self.host_of_chip)
        if n_chips < 2 * n_most < 2 * n_chips:
            warnings.warn(
                f"One host has {n_most} of {n_chips} chips, so the others keep copies of only {n_chips - n_most} of "
                "them. If that host is lost, the job goes back to its last checkpoint on disk.",
                stacklevel=2,
            )
        self._cut: Any = layout.programs.get("cut")
        self._writer = ThreadPoolExecutor(1, "meshmend-mirror")
        self._writing: Future[None] | None = None

    def compile(self, params: Tree, state: Tree) -> None:
        """Compile ahead of the first copy, unless that was done."""
        if self._cut is None:
            self._cut = compile_cut(self.layout, params, state, self.host_of_chip)

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
            table.copy_begins()
            wait_for(parts)
            table.copy_is_cut()
            me = jax.process_index()
            copy = copy_of(parts, self.layout, self.host_of_chip, me, self.attempt, step, extra, self.run)
            n_bytes = self.memory.write(replace(copy, verified=verified))
            table.copy_is_written()
        except BaseException as error:
            self.on_failure(error)
            raise
        self.timeline.note("kept", step=step, bytes=n_bytes)


def copy_of(
    parts: Parts,
    layout: StateLayout,
    host_of_chip: Sequence[int],
    host: int,
    attempt: int,
    step: int,
    extra: Tree,
    run: str,
) -> Copy:
    """Return what a host keeps of the parts: those of its own devices, and those that its devices have received.

    `host_of_chip` is as `hosts_of_chips` has it.
    """
    n_cores = layout.outline.n_cores
    kept = _backed_up_by(tuple(host_of_chip), layout.fabric.mesh)
    mine = [c * n_cores + core for c, owner in enumerate(host_of_chip) if owner == host for core in range(n_cores)]
    theirs = {d: int(kept[d // n_cores]) * n_cores + d % n_cores for d in mine if kept[d // n_cores] != d // n_cores}
    rows = {dtype: [np.zeros(0, jnp.dtype(dtype))] * (len(mine) + len(theirs)) for dtype in layout.outline.dtypes}
    for dtype, (own, other) in parts.items():
        held = {shard.index[0].start or 0: shard.data for shard in own.addressable_shards}
        received = {shard.index[0].start or 0: shard.data for shard in other.addressable_shards}
        found = [held[device] for device in mine] + [received[device] for device in theirs]
        rows[dtype] = [np.asarray(row).reshape(-1) for row in found]
    return Copy(attempt, step, layout.outline, (*mine, *theirs.values()), rows, extra, layout.copy_identity, run)


@lru_cache(maxsize=64)
def _backed_up_by(host_of_chip: tuple[int, ...], mesh: Mesh) -> NDArray[np.int32]:
    """Return for each chip the chip whose part it keeps beside its own; itself where there is no other host.

    In tiles, it is one in the same slot of another tile. Every copy asks for this, and it takes a look at the loss
    of every host.
    """
    devices_per_tile = len(host_of_chip) // mesh.n_chips
    kept = np.empty(len(host_of_chip), np.int32)
    tiles = np.arange(mesh.n_chips, dtype=np.int32)
    for slot in range(devices_per_tile):
        keeper = np.array(backup_chips(host_of_chip[slot::devices_per_tile], mesh))
        kept[keeper * devices_per_tile + slot] = tiles * devices_per_tile + slot
    kept.flags.writeable = False
    return kept


def hosts_of_chips(fabric: Fabric) -> list[int]:
    """Return for each chip the process that drives it; in tiles, for each device, one tile after the other."""
    devices = fabric.jax_mesh.devices.reshape(fabric.mesh.n_chips * fabric.devices_per_tile, -1)
    return [int(device.process_index) for device in devices[:, 0]]


def make_parts_fn(layout: StateLayout, host_of_chip: Sequence[int] | None = None) -> Callable[[Tree, Tree], Parts]:
    """Return the function from (params, state) to parts: for each dtype, every device's own and the one it keeps.

    Leaf by leaf, so that no device holds a second state meanwhile.
    """
    fabric, outline = layout.fabric, layout.outline
    kept = _backed_up_by(tuple(hosts_of_chips(fabric) if host_of_chip is None else host_of_chip), fabric.mesh)
    pairs = [(int(chip), keeper) for keeper, chip in enumerate(kept) if chip != keeper]
    by_device = PartitionSpec(fabric.axes)
    over_chips = tuple(axis for axis in fabric.axes if axis != fabric.core_axis)

    def local(*leaves: jax.Array) -> Parts:
        chip = lax.axis_index(over_chips)
        core = lax.axis_index(fabric.core_axis) if fabric.core_axis else 0
        device, kept_device = chip * outline.n_cores + core, jnp.asarray(kept)[chip] * outline.n_cores + core
        # All tiles have the same in this slot, and a device's share of it depends on its tile.
        tile, kept_tile = device // outline.devices_per_tile, kept_device // outline.devices_per_tile
        parts = {}
        for dtype in outline.dtypes:
            mine = [(x, s) for x, s in zip(leaves, layout.is_sharded, strict=True) if np.dtype(x.dtype).name == dtype]
            whole = [jnp.ravel(leaf) for leaf, split in mine if not split]
            own, other = list[jax.Array](), list[jax.Array]()
            for flat, share in zip(whole, outline.shares(dtype), strict=True):
                for found, number in ((own, tile), (other, kept_tile)):
                    start = jnp.minimum(number * share, flat.size - share)
                    found.append(lax.dynamic_slice_in_dim(flat, start, share))
            for shard in (jnp.ravel(leaf) for leaf, split in mine if split):
                own.append(shard)
                other.append(lax.ppermute(shard, over_chips, pairs) if pairs else shard)
            if outline.part_size(dtype):  # otherwise only layers without elements have this dtype
                parts[dtype] = (jnp.concatenate(own)[None], jnp.concatenate(other)[None])
        return parts

    mapped = jax.shard_map(local, mesh=fabric.jax_mesh, in_specs=layout.specs, out_specs=by_device, check_vma=False)

    def parts_of(params: Tree, state: Tree) -> Parts:
        found: Parts = mapped(*jax.tree.leaves((params, state)))
        return found

    return parts_of


def compile_cut(
    layout: StateLayout, params: Tree, state: Tree, host_of_chip: Sequence[int] | None = None
) -> jax.stages.Compiled:
    """Compile the function from (params, state) to parts."""
    return layout.fabric.jit(make_parts_fn(layout, host_of_chip)).lower(params, state).compile()
