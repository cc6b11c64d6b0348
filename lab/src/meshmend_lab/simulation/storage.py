"""What outlives a worker: copies in the memory of each host, and checkpoints on a disk that all hosts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from meshmend.jax.state.candidates import UNCHECKED, Preserved
from meshmend.jax.state.memory import copies
from meshmend.jax.state.memory.copies import HostMemory
from meshmend.jax.state.memory.placement import place_on
from meshmend.launch.hosts import ranges_of
from meshmend.topology import Mesh

Key = tuple[int, int]
"""An attempt and a step: later ones are newer."""


@dataclass(eq=False)
class SimulatedCopy:
    """What one host keeps of one step."""

    key: Key
    run: str
    process: int
    parts: frozenset[int]
    n_shares: int
    n_parts: int
    position: int
    """Of the data: what is kept with the state."""
    hosts: tuple[int, ...]
    verified: int = UNCHECKED
    damaged: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.key[0]:06d}-{self.key[1]:012d}"

    @property
    def generation(self) -> str:
        """The state that this is a part of."""
        return f"{self.run}/{self.key[0]}/{self.key[1]}"

    def offer(self) -> dict[str, Any]:
        """Return what `Copy.offer` does."""
        return {
            "attempt": self.key[0],
            "step": self.key[1],
            "kind": "memory",
            "generation": self.generation,
            "differs": "",
            "slices": [1, 1],
            "n_shares": self.n_shares,
            "n_parts": self.n_parts,
            "parts": sorted(self.parts),
            "verified": self.verified,
            "run": self.run,
            "hosts": ranges_of(self.hosts),
        }


@lru_cache(maxsize=4096)
def parts_of(
    n_hosts: int, domains: tuple[str, ...], n_blocks: int, shards: bool
) -> tuple[tuple[frozenset[int], ...], int]:
    """Return the parts that each process keeps, by the product's placement on a line of chips, and how many are shares.

    After the shares come the shards of each process, where there are any.
    """
    placement = place_on(tuple(range(n_hosts)), Mesh(f"1x{n_hosts}"), 1, domains, n_blocks)
    n_shares = placement.n_shares
    found = []
    for process in range(n_hosts):
        parts = set(placement.shares[process].tolist())
        if shards:
            parts |= {n_shares + process, n_shares + int(placement.kept[process])}
        found.append(frozenset(parts))
    return tuple(found), n_shares


class _File:
    """As much of a path as `HostMemory` needs to decide which copies go."""

    def __init__(self, memory: SimulatedMemory, name: str) -> None:
        self.memory = memory
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _File) and self.name == other.name

    def __lt__(self, other: _File) -> bool:
        return self.name < other.name

    def __truediv__(self, name: str) -> _File:
        return _File(self.memory, name)

    def is_dir(self) -> bool:
        """Return that it is a file."""
        return False

    def unlink(self, missing_ok: bool = False) -> None:  # noqa: ARG002  # as a path has it
        """Remove it."""
        copy = self.memory.files.pop(self.name, None)
        if copy is not None:
            self.memory.on_removed(copy)

    def replace(self, target: _File) -> None:
        """Rename it."""
        self.memory.files[target.name] = self.memory.files.pop(self.name)


class SimulatedMemory(HostMemory):
    """The copies of one host as its worker sees them: which of them go is what `HostMemory` decides, on mere names."""

    def __init__(self, files: dict[str, SimulatedCopy], on_removed: Callable[[SimulatedCopy], None]) -> None:
        self.files = files
        self.on_removed = on_removed
        self.folder: Any = _File(self, "")
        self.pinned = frozenset()
        self.hosts = ()
        self._n_written = 0
        self._has_room = True

    def _files(self, ending: str = "") -> list[Any]:
        return [
            _File(self, name) for name in sorted(self.files) if name.endswith(copies.ASIDE) == (ending == copies.ASIDE)
        ]

    def begin(self, name: str) -> None:
        """Begin to write a copy: the memory of those that it supersedes is used again."""
        files: set[Any] = {*self._files(), _File(self, name)}
        for spare in self._superseded(sorted(files)):
            spare.unlink()

    def end(self, copy: SimulatedCopy) -> None:
        """Have a copy written."""
        self.files[copy.name] = copy
        self._n_written += 1
        if self._n_written == 2:
            self._drop_aside()

    def delete_all(self) -> None:
        """Delete all copies, as a job does whose last step is on disk."""
        for name in list(self.files):
            _File(self, name).unlink()


@dataclass
class Checkpoint:
    """A checkpoint that is complete."""

    key: Key
    position: int
    checksum: str
    verified: int = UNCHECKED
    is_damaged: bool = False


@dataclass
class SimulatedDisk:
    """A folder or a bucket that all hosts share."""

    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    """Claimed ones."""
    hangs: int = 0
    """How many faults make it hang now."""
    is_full: int = 0
    preserved: Preserved = field(default_factory=lambda: Preserved(2))
    record: dict[str, Any] | None = None
    """What is recorded of a copy that was complete."""

    @property
    def claimed(self) -> int:
        """The newest attempt that any part of the job has begun."""
        return max(self.attempts, default=0)

    def offers(self) -> list[dict[str, Any]]:
        """Return what `Disk.offers` does."""
        return [
            {
                "attempt": one.key[0],
                "step": step,
                "kind": "disk",
                "generation": one.checksum,
                "differs": "",
                "verified": one.verified,
            }
            for step, one in sorted(self.checkpoints.items())
        ]

    def add(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Have a checkpoint complete; return those that it supersedes, as the product decides."""
        self.checkpoints[checkpoint.key[1]] = checkpoint
        steps = sorted(self.checkpoints)
        gone = [step for step, stays in zip(steps, self.preserved.of(steps), strict=True) if not stays]
        return [self.checkpoints.pop(step) for step in gone]
