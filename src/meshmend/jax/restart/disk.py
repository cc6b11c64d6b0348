"""The state on disk: Orbax checkpoints, written while training goes on, that any mesh can go on from.

Arrays are saved as they lie on the devices, each process its own shards, with the outline that says which elements they
are; nothing is gathered to save. Orbax is imported when it is first needed: a job that restarts from memory doesn't
wait for that.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshmend.errors import MissingExtraError, RestartError, install_hint
from meshmend.jax.restart.elements import Outline, StateLayout, Vectors, vectors_from_leaves

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


@dataclass(frozen=True)
class Saved:
    """A checkpoint's facts, without its arrays."""

    attempt: int
    step: int
    facts: dict[str, Any]


class Disk:
    """The checkpoints in a folder that all hosts share. The newest `keep` are kept."""

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._manager: ocp.CheckpointManager | None = None

    def newest(self) -> Saved | None:
        """Return the newest checkpoint's facts, without importing Orbax; the caller must not trust it to be whole."""
        steps = [int(path.parts[-3]) for path in self.folder.glob("*/facts/metadata") if path.parts[-3].isdecimal()]
        for step in sorted(steps, reverse=True):
            with contextlib.suppress(RestartError):
                return self.facts(step)
        return None

    def facts(self, step: int) -> Saved:
        """Return a checkpoint's facts, without importing Orbax."""
        path = self.folder / str(step) / "facts" / "metadata"
        try:
            facts = json.loads(path.read_text())
            return Saved(int(facts["attempt"]), step, facts)
        except (OSError, ValueError, KeyError) as error:
            raise RestartError(f"{path} says nothing of a checkpoint: {error}", step=step) from error

    def claim(self, attempt: int) -> None:
        """Take an attempt's number for this part of the job; raise `RestartError` if another part has it.

        The launcher should see to it that there is only one part (by asking for more than half of the hosts); this is
        for when it does not.
        """
        folder = self.folder / "attempts"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / str(attempt)).touch(exist_ok=False)
        except FileExistsError:
            raise RestartError(
                f"Another part of this job has gone on as attempt {attempt}: this one must not."
            ) from None

    def claimed(self) -> int:
        """Return the newest attempt that any part of the job has begun, 0 if none has."""
        return max((int(path.name) for path in self.folder.glob("attempts/*") if path.name.isdecimal()), default=0)

    def check_claim(self, attempt: int) -> None:
        """Raise `RestartError` if another part of the job has gone on in the meantime."""
        newest = self.claimed()
        if newest > attempt:
            raise RestartError(
                f"Another part of this job has gone on as attempt {newest}, while this one was attempt {attempt}: the "
                "launcher took its hosts for dead. Nothing more of this attempt is kept; it restarts and joins them."
            )

    def save(self, layout: StateLayout, attempt: int, step: int, params: Any, state: Any, extra: Any) -> None:
        """Begin to write a checkpoint; arrays may be donated as soon as this returns."""
        ocp, manager = self._opened()
        leaves = jax.tree.leaves((params, state))
        facts = {
            "attempt": attempt,
            "outline": layout.outline.as_json(),
            "is_sharded": layout.is_sharded,
            "leaves": [(leaf.shape, np.dtype(leaf.dtype).name) for leaf in leaves],
            "extra": extra,
        }
        arrays = {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}
        manager.save(
            step, args=ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts))
        )

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def load(self, step: int) -> tuple[Saved, Vectors]:
        """Read a checkpoint whole; raise `RestartError` if it cannot be read."""
        ocp, manager = self._opened()
        try:
            facts = manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
            like = {f"{i:05d}": np.empty(shape, np.dtype(dtype)) for i, (shape, dtype) in enumerate(facts["leaves"])}
            arrays = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(like)))["arrays"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RestartError(
                f"The checkpoint of step {step} in {self.folder} cannot be read: {error}", step=step
            ) from error
        leaves = [arrays[name] for name in sorted(arrays)]
        outline = Outline.from_json(facts["outline"])
        return Saved(int(facts["attempt"]), step, facts), vectors_from_leaves(outline, facts["is_sharded"], leaves)

    def steps(self) -> list[int]:
        """Return the steps that are on disk whole, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(self._opened()[1].all_steps(read=True))

    def close(self) -> None:
        """Wait for what is being written, and end Orbax's threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _opened(self) -> tuple[Any, Any]:
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise MissingExtraError("Checkpoints on disk", "orbax-checkpoint", install_hint("restart")) from error
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return ocp, self._manager
