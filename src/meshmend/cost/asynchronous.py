"""Asynchronous time: an engine whose chips wait only for their data and their links.

The model. A transfer may start when every earlier step's transfer into its source, of the chunks that it sends, has
arrived; then it costs the step latency once, to start it. Each link serves one transfer at a time, in order of
step, and within a step whichever comes first. A transfer over several links takes each one when it reaches it, a hop
latency after the one before, and occupies each for its bytes, longer where the link is slow; past a slow link it goes
on no faster than that. Routers buffer what has to wait. Where a chip drives
only some of its links at once, or pays for each message, it also queues at its sender and at its receiver, which take
`message_s` for each and then pass `links_at_once` links' worth of data. Where all chips share the cores of one machine,
the transfers of all of them queue there instead, for `message_s` and, unless cables carry them, for their bytes. Data
that arrive before the receiver has read the old chunk wait in a buffer. Where no cables do (`Network`), every pair of
chips has a link of its own (`TransferPaths`).

The transfers of a step do not depend on each other, so a step is a handful of array operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.hardware import Hardware, Network
from meshmend.cost.paths import TransferPaths
from meshmend.cost.step_demand import CORES_PER_MESSAGE, handled_chunks
from meshmend.errors import ParameterError
from meshmend.schedule import Schedule
from meshmend.schedule.classes import ChunkClasses

MAX_CELLS = 2**28
"""Limit of stored times, one per chip and class of chunks: 2 GiB."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def arrivals(schedule: Schedule, paths: TransferPaths, payload_bytes: float, hardware: Hardware) -> Floats:
    """Return when each transfer has arrived, in seconds from the start."""
    chunks = _Chunks(schedule)
    mesh = schedule.mesh
    if mesh.n_chips * chunks.n > MAX_CELLS:
        raise ParameterError(
            f"Following {chunks.n:,} chunks on {mesh.n_chips:,} chips asynchronously needs more than "
            f"{MAX_CELLS:,} moments at once. Predict in lock-step instead."
        )
    chunk_s = payload_bytes / schedule.total_chunks / hardware.link_bytes_per_s
    width = hardware.links_at_once
    is_mesh = hardware.network is Network.CABLES
    limited = width is not None and (not is_mesh or width < mesh.n_directions)
    cores = hardware.shared_cores
    message_s = hardware.message_s if cores is None else 0.0
    queues = limited or message_s > 0
    ready = np.full(mesh.n_chips * chunks.n, hardware.start_s)
    link_free, last_of = np.zeros(paths.n_links), np.zeros(paths.n_links, dtype=np.int64)
    sender_free, receiver_free = np.zeros(mesh.n_chips), np.zeros(mesh.n_chips)
    cores_free = np.zeros(1)
    handled = handled_chunks(schedule) * (0.0 if is_mesh else chunk_s)
    link = paths.link.copy()
    link[paths.far] = paths.far_link[paths.far_hop == 0]
    arrived = np.empty(schedule.n_transfers)
    rates = mesh.link_rates if mesh.has_slow_cables and is_mesh else None
    starts = schedule.step_starts
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        rows = slice(first, last)
        src, dst = schedule.src[rows], schedule.dst[rows]
        lasts = schedule.n_chunks[rows].astype(np.float64) * chunk_s
        begin = chunks.latest(ready, rows, src) + hardware.step_latency_s
        at_chip = np.full(len(src), message_s)
        if limited and width is not None:
            at_chip += lasts / width
        if cores is not None:
            shared = hardware.message_s + handled[rows]
            begin = (
                _serve(cores_free, np.zeros(len(src), np.int64), begin, shared / cores)
                + hardware.message_s / CORES_PER_MESSAGE
            )
        if queues:
            begin = _serve(sender_free, src, begin, at_chip) + message_s
        work = lasts if rates is None else lasts / rates[link[rows]]
        begin = _serve_links(link_free, last_of, link[rows], begin, work)
        for flows, crossed in _later_hops(paths, first, last):
            reaches = begin[flows] + hardware.hop_latency_s
            own = lasts[flows] if rates is None else lasts[flows] / rates[crossed]
            begin[flows] = _serve(link_free, crossed, reaches, own)
            if rates is not None:
                # What a slow link lets through late ends late at the next one too.
                work[flows] = np.maximum(own, work[flows] - (begin[flows] - reaches))
        if queues:
            begin = _serve(receiver_free, dst, begin, at_chip) + message_s
        done = begin + work + hardware.hop_latency_s
        arrived[rows] = done
        chunks.arrive(ready, rows, dst, done)
    return arrived


def _serve_links(free: Floats, last_of: Ints, link: NDArray[np.int32], release: Floats, work: Floats) -> Floats:
    """Serve as `_serve` does; quick where no two transfers share a link, as in most steps of most schedules.

    `last_of` is scratch space, one number per link.
    """
    numbered = np.arange(len(link))
    last_of[link] = numbered
    if not np.array_equal(last_of[link], numbered):
        return _serve(free, link, release, work)
    begin = np.maximum(release, free[link])
    free[link] = begin + work
    return begin


def _serve(free: Floats, server: NDArray[np.integer], release: Floats, work: Floats) -> Floats:
    """Queue jobs at their servers, first come first served; return when each begins; `free` is updated."""
    order = np.lexsort((release, server))
    queue = server[order]
    heads = np.flatnonzero(np.diff(queue, prepend=-1))
    position = np.arange(len(queue)) - np.repeat(heads, np.diff(heads, append=len(queue)))
    begin = np.empty(len(order))
    for number in range(int(position.max(initial=-1)) + 1):
        jobs = order[position == number]
        begin[jobs] = np.maximum(release[jobs], free[server[jobs]])
        free[server[jobs]] = begin[jobs] + work[jobs]
    return begin


def _later_hops(paths: TransferPaths, first: int, last: int) -> list[tuple[Ints, Ints]]:
    """For transfers first … last−1, the second hops, then the third, …: (transfers from `first`, their links)."""
    low, high = np.searchsorted(paths.far_row, (first, last))
    row, hop, link = (column[low:high] for column in (paths.far_row, paths.far_hop, paths.far_link))
    return [(row[hop == k] - first, link[hop == k]) for k in range(1, int(hop.max(initial=0)) + 1)]


class _Chunks:
    """Classes of chunks that always travel together, and the times at which chips have them."""

    def __init__(self, schedule: Schedule) -> None:
        classes = ChunkClasses(schedule)
        self.n = classes.n
        self._first = classes.first
        self._length = classes.last - classes.first
        self._single = bool((self._length == 1).all())

    def latest(self, ready: Floats, rows: slice, rank: NDArray[np.int32]) -> Floats:
        """Return when `rank[i]` has everything that transfer i sends."""
        where, heads = self._cells(rows, rank)
        return ready[where] if heads is None else np.maximum.reduceat(ready[where], heads)

    def arrive(self, ready: Floats, rows: slice, rank: NDArray[np.int32], moment: Floats) -> None:
        """Record that transfer i delivered its chunks to `rank[i]`; no two of a step deliver the same."""
        where, heads = self._cells(rows, rank)
        if heads is not None:
            moment = np.repeat(moment, self._length[rows])
        ready[where] = np.maximum(ready[where], moment)

    def _cells(self, rows: slice, rank: NDArray[np.int32]) -> tuple[Ints, Ints | None]:
        start = rank.astype(np.int64) * self.n + self._first[rows]
        if self._single:
            return start, None
        length = self._length[rows]
        heads = np.cumsum(length) - length
        within = np.arange(int(length.sum())) - np.repeat(heads, length)
        return np.repeat(start, length) + within, heads
