"""The state on disk: ordinary Orbax checkpoints, written in the background, that any mesh can resume from.

What is saved is the user's own tree, whole, in the item `state`; what only meshmend knows of it is beside it in
`meshmend`, under a checksum: the step, whose state it is, the position in the data, and checksums of all chunks, which
are compared with what is read (`write`, `read`, `orbax`). Where the job has a secret, all of that is signed with
it: a checkpoint that somebody without the secret has made or altered is refused.

A shared disk may hang: `background` writes each checkpoint in a thread of its own, which training does not wait for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshmend.buckets import as_os_errors, create, is_bucket, writable_path
from meshmend.errors import MissingExtraError, RestartError
from meshmend.files import with_timeout
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.state.candidates import UNCHECKED, Preserved
from meshmend.jax.state.disk.orbax import FACTS, STATE, ChunkStore, SavedArrays, Saver, names_of
from meshmend.jax.state.disk.read import read_state
from meshmend.jax.state.disk.write import Checksums, ChunkWriter, VectorRun
from meshmend.jax.state.layout.flat import dtype_named
from meshmend.jax.state.layout.rectangles import ChunkGrid
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.layout.tree_signature import Identity
from meshmend.launch.signing import file_key, is_signed, signature

FORMAT = 2
"""Of the facts; 1 was a format of arrays of our own."""
SLOWEST_BYTES_PER_S = 10e6
"""A disk that reads a checkpoint more slowly than this counts as dead."""
KIND = "checkpoint"
LONGEST_FACTS = 256 << 20
"""Bytes; longer facts are damage, and not worth reading."""
SPARE_BYTES = 64 << 20
"""Bytes that a checkpoint may have beyond its arrays: metadata, and the shards of many small ones."""
COMMITTED = "commit_success.txt"
"""Orbax's mark of a checkpoint that is complete."""
ABANDONED = "abandoned"
"""Folder of checkpoints newer than the restored step."""


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
        return sum(math.prod(shape) * dtype_named(dtype).itemsize for _, shape, dtype, _ in self.facts["arrays"])


class SupersededError(RestartError):
    """Another part of this job has continued without this one."""


class Disk:
    """The checkpoints in a folder that all hosts share. The newest `keep` stay, and the last that is verified.

    `folder` is any path that Orbax writes to, as in gs://bucket/job. Every process must make the same saves.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, timeout_s: float = 30.0) -> None:
        self.folder = writable_path(folder)
        self.preserved = Preserved(keep)
        self.timeout_s = timeout_s
        self._saver: Saver | None = None
        self._has_failed = False
        """Whether the last save has not succeeded: then Orbax's manager is in a state that nobody knows."""
        self._claimed = 0
        self._claiming = threading.Lock()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first, without importing Orbax; none is trusted yet."""
        try:
            # In a bucket nothing is renamed when it is complete: a file says so.
            is_local = not is_bucket(self.folder)
            with as_os_errors(self.folder):
                names = [path.name for path in self.folder.iterdir() if is_local or (path / COMMITTED).exists()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal() and len(name) < 19 and str(int(name)) == name)

    def facts(self, step: int) -> Saved:
        """Return a checkpoint's facts, without importing Orbax; raise `RestartError` if they are not as written."""
        path = self.folder / str(step) / FACTS / "metadata"
        try:
            written = json.loads(read_plain(path))
            text, expected = str(written["facts"]), str(written["checksum"])
            got = hashlib.sha256(text.encode()).hexdigest()
            if got != expected:
                raise RestartError(f"{path} is damaged: checksum mismatch: expected {expected}, got {got}.", step=step)
            if not is_signed(file_key(lasting=True), KIND, text.encode(), str(written.get("signature", ""))):
                raise RestartError(
                    f"The checkpoint of step {step} in {self.folder} is not signed with this job's secret. If it is "
                    "yours, from a job with another secret or none: give this job that one, or begin a new job in a "
                    f"new folder with Job(start_from={str(self.folder / str(step))!r}).",
                    step=step,
                )
            facts = json.loads(text)
            if facts["step"] != step:
                raise RestartError(f"{path} is damaged: expected the facts of step {step}, got {facts['step']}'s.")
            if facts["format"] != FORMAT:
                raise RestartError(f"{path} has format {facts['format']}, expected {FORMAT}.", step=step)
            for _, shape, dtype, chunk in facts["arrays"]:
                dtype_named(dtype)
                ChunkGrid(shape, chunk)
            verified = facts.get("verified", UNCHECKED)
            if not isinstance(verified, int) or not UNCHECKED <= verified <= step:
                raise RestartError(f"{path} is damaged: expected a verified step up to {step}, got {verified}.")
            return Saved(int(facts["attempt"]), step, facts, Identity.from_json(facts["identity"]), got, verified)
        except (ArithmeticError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RestartError(f"{path} is damaged: {error}", step=step) from error

    def hold_claim(self, attempt: int) -> None:
        """Claim an attempt's number for this part of the job, the first time; for any thread.

        Raises `SupersededError` if another part has that number or a later one. The launcher should prevent a split
        brain (by requiring a majority of the hosts); this is for when it does not.
        """
        with self._claiming:
            if self._claimed != attempt:
                try:
                    with as_os_errors(self.folder):
                        (self.folder / "attempts").mkdir(parents=True, exist_ok=True)
                        claim = self.folder / "attempts" / str(attempt)
                        create(claim, secrets.token_hex(8)) if is_bucket(claim) else claim.touch(exist_ok=False)
                except FileExistsError:
                    raise SupersededError(
                        f"Another part of this job continues as attempt {attempt}: this one must stop."
                    ) from None
                self._claimed = attempt
            newest = self.claimed()
        if newest > attempt:
            raise SupersededError(
                f"Another part of this job continues as attempt {newest}, while this one was attempt {attempt}: the "
                "launcher took its hosts for dead. Nothing more of this attempt is kept; it restarts and joins them."
            )

    def claimed(self) -> int:
        """Return the newest attempt that any part of the job has begun, 0 if none has."""
        with as_os_errors(self.folder):
            return max((int(path.name) for path in self.folder.glob("attempts/*") if path.name.isdecimal()), default=0)

    def set_aside_all_but(self, good: Container[int]) -> list[int]:
        """Move checkpoints that are damaged or newer than the restored step to `ABANDONED`; return their steps.

        Orbax saves nothing older than what is there, and would count them among the newest. Those of this restart are
        kept for inspection; those of an earlier one are deleted.
        """
        moved = [step for step in self.steps() if step not in good]
        aside = self.folder / ABANDONED
        with as_os_errors(self.folder):
            if moved and aside.exists():
                shutil.rmtree(aside) if isinstance(aside, Path) else aside.rmtree()
            if moved and is_bucket(aside):  # where a folder is there if something is in it
                (aside / "README").write_text("Checkpoints that were damaged, or newer than the restored step.")
            for step in moved:
                aside.mkdir(exist_ok=True)
                (self.folder / str(step)).replace(aside / str(step))
        if self._saver is not None:
            self._saver.manager.reload()
        return moved

    def save(self, layout: StateLayout, runs: list[VectorRun], facts: dict[str, Any], channel: Coordination) -> None:
        """Write a checkpoint of what `copy_to_host` has returned; return when it is complete, and raise if it is not.

        `facts` are the `step`, `attempt`, `extra` and `verified` of it; `channel` lets the processes agree.
        """
        facts = facts | {"format": FORMAT}
        self._begin(facts["attempt"], channel)
        self.preserved.verified = facts["verified"]
        if self._saver is None:
            self._saver = Saver(self.folder, self.preserved, f"meshmend-{channel.name}")
        self._has_failed = True
        checksums: Checksums = []
        written: dict[str, str] = {}

        def write(folder: Any, context: Any) -> None:
            process_of = [int(device.process_index) for device in layout.devices]
            me = jax.process_index()
            writer = ChunkWriter(layout, folder, channel.exchange, process=me, process_of_device=process_of)
            checksums[:] = writer.run(runs, ChunkStore(folder, context, layout.tree, writer.grids))
            runs.clear()
            facts["arrays"] = [
                (name, grid.shape, np.dtype(user.dtype).name, grid.chunk)
                for name, grid, user in zip(names_of(layout.tree), writer.grids, layout.users, strict=True)
            ]

        def to_json() -> str:
            text = json.dumps(facts | {"identity": layout.identity.as_json(), "checksums": checksums})
            written["checksum"] = hashlib.sha256(text.encode()).hexdigest()
            signed = signature(file_key(lasting=True), KIND, text.encode())
            return json.dumps({"facts": text, "checksum": written["checksum"], "signature": signed})

        step = facts["step"]
        if not self._saver.save(step, layout.tree, write, to_json):
            raise RestartError(f"Orbax did not save step {step} in {self.folder}.", step=step)
        # Process 0 writes the facts; only there are they certain to be seen at once.
        if jax.process_index() == 0 and self.facts(step).checksum != written["checksum"]:
            raise RestartError("another checkpoint is in its place")
        self._has_failed = False

    def _begin(self, attempt: int, channel: Coordination) -> None:
        """Raise on all processes what keeps any of them from writing: Orbax would wait for that one."""
        mine: dict[str, Any] = {"has_failed": True} if self._has_failed else {}
        try:
            if jax.process_index() == 0:
                self.hold_claim(attempt)
            with as_os_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            self.steps()
        except SupersededError as error:
            mine["superseded"] = str(error)
        except (OSError, RestartError) as error:
            mine["problem"] = f"{self.folder}: {error}"
        told = channel.decide(mine, lambda all_: {name: why for one in all_ for name, why in one.items()})
        if "superseded" in told:
            raise SupersededError(told["superseded"])
        if "problem" in told:
            raise RestartError(told["problem"])
        if "has_failed" in told:
            self._saver = None  # not closed: that may hang

    def load(self, step: int, layout: StateLayout) -> tuple[Saved, Reader]:
        """Read what this process needs of a checkpoint; raise `RestartError` if any of that is not as it was saved."""
        try:
            saved = with_timeout(self.timeout_s, self.facts, step)
        except TimeoutError as error:
            raise self._cannot_read(step, error) from error
        try:
            seconds = self.timeout_s + saved.n_bytes / SLOWEST_BYTES_PER_S
            return saved, with_timeout(seconds, self._read, saved, layout)
        except MissingExtraError:
            raise
        except Exception as error:  # a damaged file makes TensorStore raise almost anything
            raise self._cannot_read(step, error) from error

    def _cannot_read(self, step: int, error: Exception) -> RestartError:
        return RestartError(
            f"The checkpoint of step {step} in {self.folder} is damaged or cannot be read: {str(error)[:300]}",
            step=step,
        )

    def _read(self, saved: Saved, layout: StateLayout) -> Reader:
        folder = self.folder / str(saved.step) / STATE
        check_files(folder, saved.n_bytes)
        names = names_of(layout.tree)
        if [name for name, *_ in saved.facts["arrays"]] != names:
            raise RestartError(f"expected arrays {names}, got {[name for name, *_ in saved.facts['arrays']]}")
        return read_state(layout, SavedArrays(folder), names, saved.facts["checksums"])

    def offers(self, identity: Identity) -> tuple[list[dict[str, Any]], list[str], int]:
        """Return what the disk offers, what is wrong with the rest of it, and the newest attempt that was claimed."""
        offers: list[dict[str, Any]] = []
        problems = []
        for step in self.steps():
            try:
                saved = self.facts(step)
            except RestartError as error:
                problems.append(str(error))
                continue
            offers.append(
                {
                    "attempt": saved.attempt,
                    "step": step,
                    "kind": "disk",
                    "generation": saved.checksum,
                    "differs": identity.difference(saved.identity),
                    "verified": saved.verified,
                }
            )
        return offers, problems, self.claimed()

    def close(self) -> None:
        """End Orbax's threads, if nothing is being written."""
        if self._saver is not None:
            with contextlib.suppress(Exception):  # what went wrong with the last save has been raised
                with_timeout(self.timeout_s, self._saver.manager.close)
            self._saver = None


def read_plain(path: Any) -> bytes:
    """Return what a small file has; what is not a plain file may never end (a device, a pipe), and is not read."""
    if not isinstance(path, Path):
        return bytes(path.read_bytes())
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > LONGEST_FACTS:
            raise RestartError(f"{path} is damaged: expected a plain file of facts.")
        return file.read()


def check_files(folder: Any, n_bytes: int) -> None:
    """Raise `RestartError` if a checkpoint has what would be read without end: links, devices, files out of size."""
    total = 0
    for path in folder.rglob("*") if isinstance(folder, Path) else ():
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            raise RestartError(f"{path}: expected a plain file")
        total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    if total > 4 * n_bytes + SPARE_BYTES:
        raise RestartError(f"{folder}: expected about {n_bytes} bytes of arrays, got {total}")
