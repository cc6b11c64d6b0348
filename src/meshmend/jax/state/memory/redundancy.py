"""How much of the replicated arrays each host keeps: all of them, if memory and time allow it.

Then a job resumes from memory whichever hosts have failed, as long as one is left. Where that takes more than half of
the memory that hosts have for copies, a sixteenth of a device's memory, or, on CPU, so much time that more than a
minute of training would be at risk between copies, each host keeps one of several blocks, and fewer may fail at once.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from meshmend.errors import RestartError
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.memory.copies import KEPT
from meshmend.jax.state.memory.placement import most_blocks, place
from meshmend.jax.state.timetable import LARGE_LOSS_S, LARGEST_SLOWDOWN

CHECKED_COPIES = KEPT + 2
"""Copies in memory of a job with checks: also the last verified one, and the one that is being checked."""
LARGEST_SHARE_OF_ROOM = 0.5
"""How much of the memory for copies redundancy may take; what the job cannot do without may take all of it."""
LARGEST_SHARE_OF_DEVICE = 1 / 16
"""How much of a device's memory a copy may take while the next step runs."""
COPIED_BYTES_PER_S = 4e8
"""How fast devices that share the host's cores cut and write a copy. A rough estimate: one process with four devices
took 0.8 to 1.4 s of CPU time to cut 302 MB, and 0.3 s to write a host's copy of as much."""
LARGEST_ON_CPU_BYTES = COPIED_BYTES_PER_S * LARGEST_SLOWDOWN * LARGE_LOSS_S
"""Bytes of a copy that training waits for on CPU, where a larger one would come more than a minute after the last."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Room(NamedTuple):
    """What a host has for its copies."""

    free: int
    """Bytes that are free in the folder."""
    held: int
    """Bytes of an earlier run's copies, which are replaced one by one."""
    where: str
    """The same for virtual hosts that share a machine's memory."""


def look_for_room(folder: Path) -> Room:
    """Return what this host has for its copies."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    held = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    machine = BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else ""
    return Room(shutil.disk_usage(there).free, held, f"{machine}:{there.stat().st_dev}")


def copy_bytes(layout: StateLayout, n_blocks: int = 1) -> tuple[int, int]:
    """Return the bytes of shares and of shards in a copy, at most, where a host keeps one of so many blocks."""
    placement = place(layout.fabric, n_blocks=n_blocks)
    return placement.host_bytes(replace(layout.outline, n_shares=placement.n_shares))


def least_blocks(layout: StateLayout) -> int:
    """Return into how many blocks the replicated arrays must be cut for the devices' own memory."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform == layout.fabric.platform else None
    limit: float = LARGEST_SHARE_OF_DEVICE * (stats or {}).get("bytes_limit", math.inf)
    placement = place(layout.fabric)
    n_columns = placement.shares.shape[1]
    share = n_columns * replace(layout.outline, n_shares=placement.n_shares).share_bytes
    return int(min(max(1, math.ceil(share / limit)), most_blocks(layout.fabric)))


def choose_blocks(layout: StateLayout, rooms: Sequence[Room], n_copies: int) -> int:
    """Return how many blocks there are: the fewest that fit, the same on every process.

    Raises `RestartError` if a host has no room for its copies even so.
    """
    on_cpu = layout.fabric.platform == "cpu"
    n_on, most = Counter(room.where for room in rooms), most_blocks(layout.fabric)
    of = {room.where: room.free for room in sorted(rooms, key=lambda room: room.free)}  # the largest counts
    for room in rooms:
        of[room.where] += room.held
    least_room = min(of[where] / n for where, n in n_on.items()) / n_copies
    allowed = min(LARGEST_SHARE_OF_ROOM * least_room, LARGEST_ON_CPU_BYTES if on_cpu else math.inf)
    shares, shards = copy_bytes(layout)
    found = least_blocks(layout)
    if shares + shards > allowed:
        found = max(found, math.ceil(shares / (allowed - shards)) if allowed > shards else most)
    found = min(found, most)
    needed = sum(copy_bytes(layout, found))
    if needed > least_room:
        where, n = min(n_on.items(), key=lambda item: of[item[0]] / item[1])
        process = next(i for i, room in enumerate(rooms) if room.where == where)
        raise RestartError(
            f"A host's copies of the state need {needed * n_copies / 1e6:,.0f} MB of memory, and process {process} has "
            f"room for {of[where] / n / 1e6:,.0f} MB. Make the folder larger (in a container: a larger /dev/shm), name "
            "one with more room in MESHMEND_MEMORY, or leave the copies out, with Job(…, memory_every=0)."
        )
    return found
