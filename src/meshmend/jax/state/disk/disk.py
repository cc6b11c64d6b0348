"""The state on disk: ordinary Orbax checkpoints, written in the background, that any mesh can resume from.

What is saved is the user's own tree, whole, in the item `state`; what only meshmend knows of it is beside it in
`meshmend`, under a checksum: the step, whose state it is, the position in the data, and checksums of all chunks, which
are compared with what is read (`write`, `read`, `orbax`). Where the job has a secret, all of that is signed with
it: a checkpoint that somebody without the secret has made or altered is refused.

A shared disk may hang. A checkpoint is written by a thread of its own (`Saving`), which training does not wait for;
while one hangs, no other is begun.
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
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshmend.errors import MissingExtraError, RestartError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.state.candidates import UNCHECKED, Preserved
from meshmend.jax.state.disk.orbax import FACTS, STATE, ChunkStore, SavedArrays, Saver, imported, names_of
from meshmend.jax.state.disk.read import read_state
from meshmend.jax.state.disk.write import Checksums, ChunkWriter, VectorRun, copy_to_host
from meshmend.jax.state.layout.flat import dtype_named
from meshmend.jax.state.layout.rectangles import ChunkGrid
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.layout.tree_signature import Identity
from meshmend.jax.state.waiting import Saving, with_timeout
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

    `folder` is any path that Orbax takes, as in gs://bucket/job. Every process must make the same saves, and agrees on
    them by `coordination`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        timeout_s: float = 30.0,
        coordination: Coordination | None = None,
    ) -> None:
        self.folder = as_path(folder)
        self.preserved = Preserved(keep)
        self.timeout_s = timeout_s
        self.coordination = coordination or Coordination(0, 1)
        self._saver: Saver | None = None
        self._saving: Saving | None = None
        self._has_failed = False
        """Whether a save has failed: then Orbax's manager is in a state that nobody knows."""
        self._claimed = 0
        self._claiming = threading.Lock()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first, without importing Orbax; none is trusted yet."""
        try:
            # In a bucket nothing is renamed when it is complete: a file says so.
            is_local = isinstance(self.folder, Path)
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

    def claim(self, attempt: int) -> None:
        """Claim an attempt's number for this side of the job; raise `RestartError` if another side has it.

        The launcher should prevent a split brain (by requiring a majority of the hosts); this is for when it does not.
        """
        folder = self.folder / "attempts"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / str(attempt)).touch(exist_ok=False)
        except FileExistsError:
            raise SupersededError(
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
            raise SupersededError(
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
            shutil.rmtree(aside) if isinstance(aside, Path) else aside.rmtree()
        for step in moved:
            aside.mkdir(exist_ok=True)
            (self.folder / str(step)).replace(aside / str(step))
        if self._saver is not None:
            self._saver.manager.reload()
        return moved

    def save(
        self,
        layout: StateLayout,
        attempt: int,
        step: int,
        params: Tree,
        state: Tree,
        extra: Tree,
        verified: int = UNCHECKED,
    ) -> str:
        """Begin to write a checkpoint; arrays may be donated as soon as this returns. `finished` says when it is there.

        Returns why nothing is written, and "" otherwise: if any process is still writing the checkpoint before this one
        after `timeout_s`. That long, training may wait here, and never longer; the disk is not asked.
        """
        told = self.coordination.exchange({"problem": self.why_not_yet(), "has_failed": self._has_failed})
        reasons = [mine["problem"] for mine in told if mine["problem"]]
        if reasons:
            return str(reasons[0])
        if any(mine["has_failed"] for mine in told):
            self._saver, self._has_failed = None, False  # not closed: that may take as long
        facts = {"step": step, "attempt": attempt, "extra": extra, "verified": verified, "format": FORMAT}
        text = json.dumps(facts)  # what JSON cannot write is refused here, and not in the background
        runs = copy_to_host(layout, params, state)
        n_bytes = sum(math.prod(user.shape) * np.dtype(user.dtype).itemsize for user in layout.users)
        channel = self.coordination.channel("save")  # each one its own: one that has failed leaves exchanges unfinished
        self._saving = Saving(step, n_bytes, lambda: self._save(layout, runs, json.loads(text), channel))
        return ""

    def _save(self, layout: StateLayout, runs: list[VectorRun], facts: dict[str, Any], channel: Coordination) -> None:
        """Write a checkpoint; return when it is complete, and raise if it is not there then."""
        self._begin(facts["attempt"], channel)
        self.preserved.verified = facts["verified"]
        if self._saver is None:
            self._saver = Saver(self.folder, self.preserved, f"meshmend-{channel.name}")
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

    def _begin(self, attempt: int, channel: Coordination) -> None:
        """Raise on all processes what keeps any of them from writing: Orbax would wait for that one."""
        mine: dict[str, str] = {}
        try:
            if jax.process_index() == 0:
                self.hold_claim(attempt)
            self.folder.mkdir(parents=True, exist_ok=True)
            self.steps()
        except SupersededError as error:
            mine["superseded"] = str(error)
        except (OSError, RestartError) as error:
            mine["problem"] = f"{self.folder}: {error}"
        told = {name: why for one in channel.exchange(mine) for name, why in one.items()}
        if told:
            raise SupersededError(told["superseded"]) if "superseded" in told else RestartError(told["problem"])

    def why_not_yet(self, within_s: float | None = None) -> str:
        """Return why no checkpoint can be begun: the one before it is still being written. "" if none is.

        Waits for that one, by default `timeout_s`; but not again for one that somebody has waited for in vain.
        """
        if self._saving is None or self._saving.wait(self.timeout_s if within_s is None else within_s):
            return ""
        return self._saving.why_not_yet

    def finished(self, *, within_s: float = 0.0) -> int | None:
        """Return the step whose checkpoint was completed since the last call, None if there is none.

        Raises `RestartError` if the save has finished and the checkpoint is not there: `SupersededError` on purpose.
        """
        if self._saving is None or not self._saving.wait(within_s):
            return None
        saving, self._saving = self._saving, None
        if isinstance(saving.error, SupersededError):
            raise saving.error
        if saving.error is not None:
            self._has_failed = True
            raise RestartError(
                f"Step {saving.step} was not saved in {self.folder}: {saving.error}", step=saving.step
            ) from saving.error
        return saving.step

    def load(self, step: int, layout: StateLayout) -> tuple[Saved, Reader]:
        """Read what this process needs of a checkpoint; raise `RestartError` if any of that is not as it was saved."""
        saved = self.facts(step)
        try:
            seconds = self.timeout_s + saved.n_bytes / SLOWEST_BYTES_PER_S
            return saved, with_timeout(seconds, self._read, saved, layout)
        except MissingExtraError:
            raise
        except Exception as error:  # a damaged file makes TensorStore raise almost anything
            raise RestartError(
                f"The checkpoint of step {step} in {self.folder} is damaged or cannot be read: {str(error)[:300]}",
                step=step,
            ) from error

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

    def close(self) -> tuple[int, str]:
        """Wait for what is being written, but not forever, and end Orbax's threads.

        Returns the step of the last checkpoint and why it is not written yet, "" if it is.
        """
        step = 0
        if self._saving is not None:
            step = self._saving.step
            problem = self.why_not_yet(self.timeout_s + self._saving.n_bytes / SLOWEST_BYTES_PER_S)
            if problem:
                return step, problem  # to close Orbax's manager would wait for the same
        if self._saver is not None:
            with contextlib.suppress(Exception):  # what went wrong with the last save, `finished` says
                with_timeout(self.timeout_s, self._saver.manager.close)
            self._saver = None
        return step, ""


def as_path(folder: Any) -> Any:
    """Return a path of this machine, or of a bucket as in gs://bucket/job, which needs Orbax's `etils`."""
    if not isinstance(folder, str | Path):
        return folder
    return imported("etils.epath").Path(folder) if "://" in str(folder) else Path(folder).absolute()


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
