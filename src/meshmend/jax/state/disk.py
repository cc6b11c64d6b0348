"""The state on disk: Orbax checkpoints, written in the background, that any mesh can resume from.

Arrays are saved as they lie on the devices, each process its own shards, with the outline that says which elements they
are; nothing is gathered to save. Each process takes checksums of its shards before it passes them to Orbax; they are
kept in the checkpoint's facts, which have a checksum of their own, and are compared with what is read. Orbax is
imported when first needed: a job that restarts from memory does not wait for that.

A shared disk may hang. A checkpoint is written by a thread of its own (`Saving`), which training waits for only until
its arrays are copied, and only for so long; while one hangs, no other is begun.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MissingExtraError, RestartError
from meshmend.extras import install_hint
from meshmend.jax.state.fetch import OneAtATime, Saving, wait_for, with_timeout
from meshmend.jax.state.identity import Identity
from meshmend.jax.state.layout import Boxes, StateLayout, by_place, vectors_from_leaves
from meshmend.jax.state.outline import Outline, Vectors, dtype_named
from meshmend.jax.state.trust import UNCHECKED, Preserved

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

SLOWEST_BYTES_PER_S = 10e6
"""A disk that reads a checkpoint more slowly than this counts as dead."""
COPIED_BYTES_PER_S = 200e6
"""A host that copies its shards to memory more slowly than this waits for something else: the disk."""
LONGEST_FACTS = 256 << 20
"""Bytes; longer facts are damage, and not worth reading."""
SPARE_BYTES = 64 << 20
"""Bytes that a checkpoint may have beyond its arrays: metadata, and the shards of many small ones."""
ABANDONED = "abandoned"
"""Folder of checkpoints newer than the restored step."""

Checksums = dict[str, list[list[int]]]
"""For each leaf's number, runs of its elements, one shard after the other: first, end, CRC-32 of their bytes."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint's facts, without its arrays."""

    attempt: int
    step: int
    facts: dict[str, Any]
    identity: Identity
    checksum: str
    """Of the facts, which have the checksums of all arrays: it identifies this checkpoint's content."""
    verified: int = UNCHECKED
    """The last step that was verified when this was saved, 0 if none was; `UNCHECKED` if nothing checks the job."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(math.prod(shape) * dtype_named(dtype).itemsize for shape, dtype in self.facts["leaves"])


class Disk:
    """The checkpoints in a folder that all hosts share. The newest `keep` stay, and the last that is verified.

    `exchange` sends a fact to all processes and returns the facts of all; every process must make the same saves.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        timeout_s: float = 30.0,
        exchange: Callable[[Any], list[Any]] = lambda fact: [fact],
    ) -> None:
        self.folder = Path(folder).absolute()
        self.preserved = Preserved(keep)
        self.timeout_s = timeout_s
        self.exchange = exchange
        self._manager: ocp.CheckpointManager | None = None
        self._saving: Saving | None = None
        self._has_failed = False
        """Whether a save has failed: then Orbax's manager is in a state that nobody knows."""
        self._n_managers = 0
        self._probe = OneAtATime()
        self._claimed = 0
        self._claiming = threading.Lock()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first, without importing Orbax; none is trusted yet."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal() and len(name) < 19 and str(int(name)) == name)

    def facts(self, step: int) -> Saved:
        """Return a checkpoint's facts, without importing Orbax; raise `RestartError` if they are not as written."""
        path = self.folder / str(step) / "facts" / "metadata"
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode) or about.st_size > LONGEST_FACTS:
                    raise RestartError(f"{path} is damaged: expected a plain file of facts.", step=step)
                written = json.loads(file.read())
            if isinstance(written, dict) and "attempt" in written and "checksum" not in written:
                raise RestartError(
                    f"The checkpoint of step {step} in {self.folder} is from an older meshmend and does not record "
                    "which model's state it is, so it cannot be trusted to be this one's. Give this job a folder of "
                    "its own, or finish it with the version that began it.",
                    step=step,
                )
            text, expected = str(written["facts"]), str(written["checksum"])
            got = hashlib.sha256(text.encode()).hexdigest()
            if got != expected:
                raise RestartError(f"{path} is damaged: checksum mismatch: expected {expected}, got {got}.", step=step)
            facts = json.loads(text)
            if facts["step"] != step:
                raise RestartError(f"{path} is damaged: expected the facts of step {step}, got {facts['step']}'s.")
            for _, dtype in facts["leaves"]:
                dtype_named(dtype)
            verified = facts.get("verified", UNCHECKED)
            if not isinstance(verified, int) or not UNCHECKED <= verified <= step:
                raise RestartError(f"{path} is damaged: expected a verified step up to {step}, got {verified}.")
            return Saved(int(facts["attempt"]), step, facts, Identity.from_json(facts["identity"]), got, verified)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RestartError(f"{path} is damaged: {error}", step=step) from error

    def claim(self, attempt: int) -> None:
        """Claim an attempt's number for this side of the job; raise `RestartError` if another side has it.

        The launcher should prevent a split brain (by requiring a majority of the hosts); this is for when it does not.
        """
        folder = self.folder / "attempts"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / str(attempt)).touch(exist_ok=False)
        except FileExistsError:
            raise RestartError(
                f"Another part of this job continues as attempt {attempt}: this one must stop."
            ) from None

    def hold_claim(self, attempt: int) -> None:
        """Claim an attempt's number the first time; then check that no other part of the job has claimed a later one.

        For any thread. Raises `RestartError` if another part of the job has continued.
        """
        with self._claiming:
            if self._claimed == attempt:
                self.check_claim(attempt)
            else:
                self.claim(attempt)
                self._claimed = attempt

    def claimed(self) -> int:
        """Return the newest attempt that any part of the job has begun, 0 if none has."""
        return max((int(path.name) for path in self.folder.glob("attempts/*") if path.name.isdecimal()), default=0)

    def check_claim(self, attempt: int) -> None:
        """Raise `RestartError` if another part of the job has continued in the meantime."""
        newest = self.claimed()
        if newest > attempt:
            raise RestartError(
                f"Another part of this job continues as attempt {newest}, while this one was attempt {attempt}: the "
                "launcher took its hosts for dead. Nothing more of this attempt is kept; it restarts and joins them."
            )

    def set_aside_all_but(self, good: Container[int]) -> list[int]:
        """Move checkpoints that are damaged or newer than the restored step to `ABANDONED`; return their steps.

        Orbax saves nothing older than what is there, and would count them among the newest. Those of this restart are
        kept for inspection; those of an earlier one are deleted.
        """
        moved = [step for step in self.steps() if step not in good]
        aside = self.folder / ABANDONED
        if moved and aside.exists():
            shutil.rmtree(aside)
        for step in moved:
            aside.mkdir(exist_ok=True)
            (self.folder / str(step)).replace(aside / str(step))
        if self._manager is not None:
            self._manager.reload()
        return moved

    def save(
        self,
        layout: StateLayout,
        attempt: int,
        step: int,
        params: Any,
        state: Any,
        extra: Any,
        verified: int = UNCHECKED,
    ) -> str:
        """Begin to write a checkpoint; arrays may be donated as soon as this returns. `finished` says when it is there.

        Returns why nothing is written, and "" otherwise: if any process cannot reach the disk within `timeout_s`, or is
        still writing the checkpoint before this one. That long, training may wait here, and never longer.
        """
        leaves = jax.tree.leaves((params, state))
        wait_for(leaves)
        tiles = layout.fabric.jax_mesh.devices.reshape(-1, layout.outline.n_places)
        checksums = checksums_of(leaves, layout.is_sharded, jax.process_index(), jax.process_count(), tiles)
        why_not = self.why_not_yet() or self.out_of_reach()
        told = self.exchange({"why_not": why_not, "has_failed": self._has_failed, "checksums": checksums})
        reasons = [mine["why_not"] for mine in told if mine["why_not"]]
        if reasons:
            return str(reasons[0])
        if any(mine["has_failed"] for mine in told):
            self._manager, self._has_failed = None, False  # not closed: that may take as long
        merged: Checksums = {str(i): [] for i in range(len(leaves))}
        for mine in told:
            for number, runs in mine["checksums"].items():
                merged[number] += runs
        facts = {
            "step": step,
            "attempt": attempt,
            "identity": layout.identity.as_json(),
            "outline": layout.outline.as_json(),
            "is_sharded": layout.is_sharded,
            "boxes": layout.boxes,
            "leaves": [(leaf.shape, np.dtype(leaf.dtype).name) for leaf in leaves],
            "checksums": {number: sorted(runs) for number, runs in merged.items()},
            "extra": extra,
            "verified": verified,
        }
        text = json.dumps(facts)
        checksum = hashlib.sha256(text.encode()).hexdigest()
        saved = Saved(attempt, step, facts, layout.identity, checksum, verified)
        arrays = {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}

        def begin() -> None:
            if jax.process_index() == 0:
                self.hold_claim(attempt)
            self.preserved.verified = verified
            ocp, manager = self._opened()
            items = ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave({"facts": text, "checksum": checksum})
            )
            if not manager.save(step, args=items, force=True):
                raise RestartError(f"Orbax did not save step {step} in {self.folder}.", step=step)

        n_bytes = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
        self._saving = Saving(saved.step, saved.n_bytes, begin, lambda: self._finish(saved))
        if not self._saving.wait_copied(self.timeout_s + n_bytes / COPIED_BYTES_PER_S):
            return self._saving.why_not_yet
        return ""

    def _finish(self, saved: Saved) -> None:
        """Return when a checkpoint is complete; raise if it is not there then."""
        _, manager = self._opened()
        manager.wait_until_finished()
        # Process 0 writes the facts; only there are they certain to be seen at once.
        if jax.process_index() == 0 and self.facts(saved.step).checksum != saved.checksum:
            raise RestartError("another checkpoint is in its place")

    def why_not_yet(self, within_s: float | None = None) -> str:
        """Return why no checkpoint can be begun: the one before it is still being written. "" if none is.

        Waits for that one, by default `timeout_s`; but not again for one that somebody has waited for in vain.
        """
        if self._saving is None or self._saving.wait(self.timeout_s if within_s is None else within_s):
            return ""
        return self._saving.why_not_yet

    def finished(self, *, within_s: float = 0.0) -> int | None:
        """Return the step whose checkpoint was completed since the last call, None if there is none.

        Raises `RestartError` if the save has finished and the checkpoint is not there.
        """
        if self._saving is None or not self._saving.wait(within_s):
            return None
        saving, self._saving = self._saving, None
        if saving.error is not None:
            self._has_failed = True
            raise RestartError(
                f"Step {saving.step} was not saved in {self.folder}: {saving.error}", step=saving.step
            ) from saving.error
        return saving.step

    def load(self, step: int, outline: Outline | None = None) -> tuple[Saved, Vectors]:
        """Read a checkpoint whole; raise `RestartError` if anything about it is not as it was saved.

        `outline` is that of the state that it should be, on any mesh.
        """
        saved = self.facts(step)
        try:
            seconds = self.timeout_s + saved.n_bytes / SLOWEST_BYTES_PER_S
            leaves = with_timeout(seconds, self._read, saved)
            boxes = saved.facts.get("boxes") or [None] * len(leaves)
            check_checksums(leaves, saved.facts["leaves"], saved.facts["checksums"], boxes)
            its_outline = Outline.from_json(saved.facts["outline"])
            its_outline.check()
            if outline is not None and its_outline.vectors != outline.vectors:
                raise RestartError(f"expected vectors {outline.vectors}, got {its_outline.vectors}")
            return saved, vectors_from_leaves(its_outline, saved.facts["is_sharded"], leaves, boxes)
        except MissingExtraError:
            raise
        except Exception as error:  # a damaged file makes Orbax raise almost anything
            raise RestartError(
                f"The checkpoint of step {step} in {self.folder} is damaged or cannot be read: {str(error)[:300]}",
                step=step,
            ) from error

    def out_of_reach(self) -> str:
        """Return why this process cannot use the folder, "" if it can."""
        try:
            self._probe(self.timeout_s, self._make_folder)
        except (OSError, RestartError) as error:
            return f"{self.folder}: {error}"
        return ""

    def close(self) -> tuple[int, str]:
        """Wait for what is being written, but not forever, and end Orbax's threads.

        Returns the step of the last checkpoint and why it is not written yet, "" if it is.
        """
        step = 0
        if self._saving is not None:
            step = self._saving.step
            why_not = self.why_not_yet(self.timeout_s + self._saving.n_bytes / SLOWEST_BYTES_PER_S)
            if why_not:
                return step, why_not  # to close Orbax's manager would wait for the same
        if self._manager is not None:
            with contextlib.suppress(Exception):  # what went wrong with the last save, `finished` says
                with_timeout(self.timeout_s, self._manager.close)
            self._manager = None
        return step, ""

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.steps()

    def _read(self, saved: Saved) -> list[NDArray[Any]]:
        """Read the arrays, by this process alone: a barrier would wait for one whose disk is dead."""
        ocp = _orbax()
        folder = self.folder / str(saved.step) / "arrays"
        check_files(folder, saved.n_bytes)
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"meshmend-read-{me}"
        )
        leaves = saved.facts["leaves"]
        like = {f"{i:05d}": np.empty(shape, dtype_named(dtype)) for i, (shape, dtype) in enumerate(leaves)}
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            arrays = reader.restore(folder, args=ocp.args.StandardRestore(like))
        return [np.asarray(arrays[name]) for name in sorted(like)]

    def _opened(self) -> tuple[Any, Any]:
        ocp = _orbax()
        if self._manager is None:
            self._n_managers += 1
            # With processes named, Orbax's barriers are the coordinator's. Otherwise they are programs on the devices,
            # which must not run beside training: hosts would start them in different orders, and deadlock.
            beside = ocp.options.MultiprocessingOptions(
                active_processes=set(range(jax.process_count())),
                barrier_sync_key_prefix=f"meshmend-save-{self._n_managers}",
            )
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self.preserved,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
                create=False,
                multiprocessing_options=beside,
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return ocp, self._manager


def check_files(folder: Path, n_bytes: int) -> None:
    """Raise `RestartError` if a checkpoint has what Orbax would read without end: links, devices, files out of size."""
    total = 0
    for path in folder.rglob("*"):
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            raise RestartError(f"{path}: expected a plain file")
        total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    if total > 4 * n_bytes + SPARE_BYTES:
        raise RestartError(f"{folder}: expected about {n_bytes} bytes of arrays, got {total}")


def checksums_of(
    leaves: Sequence[jax.Array],
    is_sharded: Sequence[bool],
    process: int,
    n_processes: int,
    tiles: Annotated[NDArray[Any], "[T, P]"] | None = None,
) -> Checksums:
    """Return the checksums of this process: of its own shards, and of its share of replicated leaves.

    `tiles` has the devices of each tile, where leaves are split inside them: one tile provides a leaf, and each of its
    devices the checksum of its shard, as elements of one shard after the other.
    """
    found: Checksums = {}
    n_places = 1 if tiles is None else tiles.shape[1]
    for number, (leaf, split) in enumerate(zip(leaves, is_sharded, strict=True)):
        if split:
            # A device's shard is as many rows of each layer; shards count one after the other, whole stacks of layers.
            width = math.prod(leaf.shape) // max(leaf.shape[-2], 1)
            found[str(number)] = [
                [start := (shard.index[-2].start or 0) * width, start + values.size, _crc(values)]
                for shard in leaf.addressable_shards
                for values in [np.asarray(shard.data)]
            ]
        elif tiles is not None and n_places > 1:
            held = {shard.device: shard.data for shard in leaf.addressable_shards}
            found[str(number)] = [
                [place * values.size, (place + 1) * values.size, _crc(values)]
                for place, device in enumerate(tiles[number % len(tiles)])
                if device in held
                for values in [np.asarray(held[device])]
            ]
        elif number % n_processes == process:
            values = np.asarray(leaf.addressable_shards[0].data)
            found[str(number)] = [[0, values.size, _crc(values)]]
    return found


def check_checksums(
    leaves: Sequence[NDArray[Any]],
    expected: Sequence[tuple[Sequence[int], str]],
    sums: Checksums,
    boxes: Sequence[Boxes | None] | None = None,
) -> None:
    """Raise `RestartError` unless all elements of all leaves have the checksums that were taken before the save."""
    boxes = [None] * len(leaves) if boxes is None else boxes
    for number, (leaf, (shape, dtype), box) in enumerate(zip(leaves, expected, boxes, strict=True)):
        if leaf.shape != tuple(shape) or leaf.dtype.name != dtype:
            raise RestartError(f"array {number}: expected {dtype}{shape}, got {leaf.dtype.name}{list(leaf.shape)}")
        flat, at = np.ascontiguousarray(by_place(leaf, box)).reshape(-1), 0
        for start, end, checksum in sums[str(number)]:
            if start != at or end < start:
                raise RestartError(f"array {number}: expected the checksum of elements from {at} on, got {start}")
            got = _crc(flat[start:end])
            if got != checksum:
                raise RestartError(
                    f"array {number}, elements {start} to {end}: checksum mismatch: expected {checksum:08x}, "
                    f"got {got:08x}"
                )
            at = end
        if at != flat.size:
            raise RestartError(f"array {number}: expected checksums of {flat.size} elements, got {at}")


def _crc(values: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise MissingExtraError("Checkpoints on disk", "orbax-checkpoint", install_hint("restart")) from error
    return ocp
