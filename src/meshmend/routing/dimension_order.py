"""Dimension order: correct one axis after the other, the last one first (figure 1 of the paper).

In 2-D a packet goes along its row, then along its column. Turns only ever lead from a later axis to an earlier
one, so no cycle of waiting packets can turn its corners: one virtual channel is enough on a plain mesh.

An axis that wraps is itself a cycle, and packets take the shorter direction. There the wrap link is a *dateline*:
a packet that has yet to cross it on this axis travels on channel 0, and on channel 1 once it has (or if it never
will). Channel 1 is never used on a wrap link and channel 0 never after one, so neither closes the cycle.

A pair whose path is blocked by a failed chip or cable has no route here; `detour` routes it round the hole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.routing.table import NO_PORT, Ports
from meshmend.topology import Mesh


def dimension_order_channels(mesh: Mesh) -> int:
    """Virtual channels that dimension order needs: one, or two where an axis that wraps has a dateline."""
    return 2 if any(mesh.wrap) else 1


def dimension_order_port(mesh: Mesh, at: NDArray[np.integer], dst: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the port that corrects the last axis on which ranks `at` and `dst` differ, whether it is live or not."""
    here, there = mesh.coords[at], mesh.coords[dst]
    ports = np.full(np.broadcast_shapes(here.shape, there.shape)[:-1], NO_PORT, dtype=np.int64)
    for axis in range(mesh.n_axes):
        on_axis = _axis_port(mesh, axis, here[..., axis], there[..., axis])
        ports = np.where(on_axis >= 0, on_axis, ports)
    return ports


def survives(mesh: Mesh, src: NDArray[np.integer], dst: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return whether the dimension-order path from each of `src` to each of `dst` (ranks) is live.

    No path is followed: a path is one straight stretch per axis, and the failed cables of a stretch are counted by
    the difference of two running totals along its line.
    """
    here, there = mesh.coords[src].astype(np.int64), mesh.coords[dst].astype(np.int64)
    here, there = np.broadcast_arrays(here, there)
    live = np.ones(here.shape[:-1], dtype=np.bool_)
    corner = here.copy()
    for axis in reversed(range(mesh.n_axes)):
        length = mesh.shape[axis]
        start, end = here[..., axis], there[..., axis]
        forward = _goes_forward(mesh, axis, start, end)
        ahead = (end - start) % length
        # The totals go round the line twice, so that a stretch over the wrap link is a plain difference too.
        low = np.where(forward, start, start + length - (start - end) % length)
        high = np.where(forward, start + ahead, start + length)
        lost = _failed_before(mesh, axis)
        others = tuple(corner[..., other] for other in range(mesh.n_axes) if other != axis)
        live &= lost[(*others, high)] == lost[(*others, low)]
        corner[..., axis] = end
    return live


def surviving_ports(mesh: Mesh, destinations: NDArray[np.integer]) -> Ports:
    """Return the port table of dimension order, without the routes that a failure blocks."""
    ports = np.full((mesh.n_chips, len(destinations)), NO_PORT, dtype=np.int8)
    for axis, length in enumerate(mesh.shape):
        code = _axis_port(mesh, axis, np.arange(length)[:, None], mesh.coords[destinations, axis]).astype(np.int8)
        on_axis = code[mesh.coords[:, axis]]
        np.copyto(ports, on_axis, where=on_axis >= 0)
    if not mesh.is_full:
        rows = max(1, 2**20 // max(1, len(destinations)))
        for first in range(0, mesh.n_chips, rows):
            src = np.arange(first, min(first + rows, mesh.n_chips))
            ports[src] = np.where(survives(mesh, src[:, None], destinations), ports[src], np.int8(NO_PORT))
    return ports


def _goes_forward(mesh: Mesh, axis: int, start: NDArray[np.integer], end: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether a packet goes towards larger coordinates: the shorter way on an axis that wraps, forward on a tie."""
    if mesh.wrap[axis]:
        return np.asarray((end - start) % mesh.shape[axis] <= mesh.shape[axis] // 2)
    return np.asarray(end > start)


def _axis_port(mesh: Mesh, axis: int, start: NDArray[np.integer], end: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the port along one axis, `NO_PORT` where the packet has already arrived."""
    forward = _goes_forward(mesh, axis, start, end)
    direction = np.where(forward, 2 * axis, 2 * axis + 1)
    if mesh.wrap[axis]:
        wrap_ahead = np.where(forward, end < start, end > start)
        direction = np.where(wrap_ahead, direction, direction + mesh.n_directions)
    return np.where(start == end, NO_PORT, direction)


def _failed_before(mesh: Mesh, axis: int) -> NDArray[np.int64]:
    """Count the failed cables before each position of each line along `axis`, twice round; that axis comes last.

    The cable of a position is the one towards the next position. A cable of a failed chip counts as failed.
    """
    failed = np.ones(mesh.shape, dtype=np.int64)
    failed[mesh.live] = mesh.neighbours[:, 2 * axis] < 0
    twice = np.concatenate([np.moveaxis(failed, axis, -1)] * 2, axis=-1)
    return np.concatenate([np.zeros_like(twice[..., :1]), np.cumsum(twice, axis=-1)], axis=-1)
