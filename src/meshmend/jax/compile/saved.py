"""Compiled train steps in files, which a restart loads: nothing is traced, and nothing compiled.

A file has all that a job compiles for one mesh, and the layout of its state. Loading it runs what is in it (pickle, and
machine code), so a file is opened only if it is signed with the job's own key, which `meshmend run` derives from the
job's secret. Its name says what it is for: the mesh with its hole, the update, versions, and a fingerprint of all that
the step is made of (`fingerprint`), so a script that has changed never meets a program of before.

A file that is missing, damaged, signed by somebody else or not to be loaded here is no error: all processes compile,
or find their programs in JAX's compile cache, and the timeline's "compile" says why. On CPU, where virtual hosts share
their cores, process 0 compiles and the others load what it saves. Nor is a file an error that loads and then fails:
while a loaded program has not finished a step, a mark beside its file says so, and a start that finds that mark
compiles.

A file is made ahead for devices that stand in for the survivors' (`Session.fabrics_ahead`): only for a device that
exists can be compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from meshmend.buckets import Folder, as_path
from meshmend.errors import TransientError
from meshmend.files import write_whole
from meshmend.jax.compile.fingerprint import UnidentifiedError, fingerprint, sources, stamp
from meshmend.jax.compile.for_failures import CompileAhead, CompiledTrainStep, compile_train_step, step_digest
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.session.session import Session
from meshmend.jax.state.memory.collect import leaders_of
from meshmend.jax.train.plan import TrainingPlan
from meshmend.launch.signing import file_key, is_signed, signature

SPARE_FILES = 16
"""Files that are kept besides those for the mesh as it is and for each loss, twice: for two versions of a script."""
MOST_BYTES = 8 << 30
"""Bytes of all files together, beyond those for one version of a script."""
SIGNATURE_BYTES = 64
DIFFERENT = "processes have made different steps, or differ in versions, settings or kind of CPU"
OTHER_SETTINGS = re.compile("cache|log_|traceback|locations|share_binary|coordination|preemption|leak")
"""JAX's settings that change no program."""


class SavedSteps:
    """A job's compiled steps: loaded where they were saved, else compiled, and saved for the next restart.

    `made_of` has by name all that the step depends on besides the plan and the fabric: its functions, its numbers, the
    shapes of parameters. `ingredients(fabric, program)` returns what `compile_train_step` takes: the train step,
    parameters and a batch. `folder` is on a disk that all hosts share, or in a bucket, as in "gs://bucket/programs":
    each process writes what it compiles ahead to it. Without one, or without a key in the environment, steps are
    compiled and none is saved.
    """

    def __init__(
        self,
        folder: Folder | None,
        session: Session,
        made_of: dict[str, Any],
        ingredients: Callable[[Fabric, Program], tuple[Any, Any, Any]],
    ) -> None:
        self.folder: Any = as_path(folder or Path())
        self.session = session
        self.ingredients = ingredients
        self._key = file_key() if folder is not None else b""
        self._made_of = self._why_unnamed = ""
        if self._key:
            try:
                self._made_of = fingerprint(**made_of, sources=sources())
            except UnidentifiedError as error:
                self._why_unnamed = str(error)
        self._own: tuple[str, CompiledTrainStep, bool] | None = None
        """What this job runs: its name, the step, and whether it was loaded."""
        self._is_saved = False
        self._on_trial: Any = None
        self._prunes = session.launch.process == 0 and isinstance(self.folder, Path)

    def start(self, planned: TrainingPlan) -> CompiledTrainStep:
        """Return the step of this session's fabric: loaded if every process can, else compiled. For every process."""
        fabric, is_writer = self.session.fabric, self.session.launch.process == 0
        with self.session.timeline.timed("compile") as facts:
            program, name = planned.install(fabric), self.name(fabric, planned)
            content, why, loaded = "", self._why_unnamed, None
            if name:
                try:
                    body = self._read(name)
                    content = hashlib.sha256(body).hexdigest()
                    loaded = _load(body, fabric, program)
                except _NotLoadedError as error:
                    why = f"{name} {error}"
            # One that loads while another compiles would run another program, or wait for it for ever.
            problem = self.session.coordination.decide([name, content, why], why_not_loaded)
            if loaded is None or problem:
                facts |= {"why_not_loaded": problem[:500]} if problem else {}
                compiled = self._compile_for_all(name if problem != DIFFERENT else "", fabric, program)
            else:
                compiled, facts["loaded"] = loaded, name
                if is_writer:
                    self._on_trial = self._mark(name)
                    with contextlib.suppress(Exception):  # a disk or a bucket that fails does not stop the job
                        self._on_trial.touch()
                        if isinstance(self.folder, Path):
                            os.utime(self.folder / name)  # what is used is pruned last
            self._own = name, compiled, compiled is loaded
        return compiled

    def confirm(self) -> None:
        """Say that a step has been made: what was loaded works."""
        if self._on_trial is not None:
            with contextlib.suppress(Exception):
                self._on_trial.unlink(missing_ok=True)
            self._on_trial = None

    def ahead(self, plan: Callable[[Fabric], TrainingPlan]) -> CompileAhead:
        """Save this session's step, then compile and save for the possible losses, in a thread of each process.

        Where nothing is saved, only process 0 does: programs then go to JAX's cache, which no other one writes to.
        """
        is_divided = bool(self._made_of) and self.session.launch.n_processes > 1
        return CompileAhead(
            self.session, lambda lost: self.prepare(lost, plan(lost)), first=self.keep_own, is_divided=is_divided
        )

    def prepare(self, fabric: Fabric, planned: TrainingPlan) -> dict[str, Any]:
        """Compile for a fabric that the job may be left with, and save it, unless that was done; return facts."""
        name = self.name(fabric, planned)
        if not name:
            self._compile(fabric, planned.install(fabric))
            return {"why_not_saved": self._why_unnamed[:500]} if self._why_unnamed else {}
        with contextlib.suppress(_NotLoadedError):
            self._read(name)
            return {"saved": name}
        return self._save(name, fabric, planned.install(fabric))

    def keep_own(self) -> None:
        """Save the step that this job runs; or if it was loaded, check that its script would still make that one."""
        if self._own is None or not self._own[0]:
            return
        (name, compiled, is_loaded), fabric = self._own, self.session.fabric
        if not is_loaded:
            if self._is_saved:
                return
            self.session.timeline.note("program", **self._save(name, fabric, compiled.program, compiled))
            return
        training, params, batch = self.ingredients(fabric, compiled.program)
        if step_digest(training, compiled.program, params, batch) != compiled.hlo:
            for path in self._files():
                path.unlink(missing_ok=True)
            self.session.end_with(
                TransientError(
                    f"The saved program {name} is not the one that this script makes now. Something has changed that "
                    "its fingerprint does not show: values that the loss reads while it is traced from files, from "
                    "the environment or from a library's state. All saved programs are deleted, "
                    "and the restart compiles. Steps since the last restart were made with the earlier program."
                )
            )

    def name(self, fabric: Fabric, planned: TrainingPlan) -> str:
        """Return the name of the file for a fabric; "" if nothing is saved."""
        if not self._made_of:
            return ""
        mesh = re.sub(r"[^\w.,@x]+", "-", str(fabric.mesh))[:60]
        digest = fingerprint(made_of=self._made_of, plan=planned.digest, fabric=_facts_of(fabric))
        return f"{mesh}.{planned.update}.jax-{jax.__version__}.{digest}.program"

    def prune(self, *, most_bytes: int = MOST_BYTES) -> None:
        """Remove the files that were not used for longest, beyond a number of files and of bytes."""
        n_losses = len(self.session.host_of_process) + len({*self.session.fabric.domains})
        most_files = 2 * (n_losses + 1) + SPARE_FILES
        newest_first = sorted(self._files(), key=lambda path: path.stat().st_mtime, reverse=True)
        n_bytes = 0
        for number, path in enumerate(newest_first):
            n_bytes += path.stat().st_size
            # Those of one version of the script stay, whatever their bytes: other hosts have just made them.
            if number > n_losses and (number >= most_files or n_bytes > most_bytes):
                path.unlink(missing_ok=True)
                self._mark(path.name).unlink(missing_ok=True)

    def _compile_for_all(self, name: str, fabric: Fabric, program: Program) -> CompiledTrainStep:
        """Compile; on CPU, process 0 does, and the others load what it saves. For every process."""
        session = self.session
        if not name or fabric.platform != "cpu" or session.launch.n_processes == 1:
            return self._compile(fabric, program)
        compiled, facts = None, dict[str, Any]()
        if session.launch.process == 0:  # an error of the script is its own, which the others do not raise, too
            compiled = self._compile(fabric, program)
            facts = self._save(name, fabric, program, compiled)
            session.timeline.note("program", **facts)
        self._is_saved = session.coordination.tell(lambda: "saved" in facts)
        if compiled is None and self._is_saved:
            with contextlib.suppress(_NotLoadedError):
                compiled = _load(self._read(name), fabric, program)
        return compiled or self._compile(fabric, program)

    def _compile(self, fabric: Fabric, program: Program) -> CompiledTrainStep:
        training, params, batch = self.ingredients(fabric, program)
        return compile_train_step(training, program, params, batch)

    def _save(
        self, name: str, fabric: Fabric, program: Program, compiled: CompiledTrainStep | None = None
    ) -> dict[str, Any]:
        """Save a step; return facts for the timeline."""
        compiled = compiled or self._compile(fabric, program)
        try:
            body = _dump(compiled)
            content = signature(self._key, _kind(name), body).encode() + body
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, content)
            self._mark(name).unlink(missing_ok=True)
            if self._prunes:  # once per start, because there may be thousands; a bucket has room, and rules of its own
                self._prunes = False
                self.prune()
        except Exception as error:  # whatever a disk or a bucket raises
            return {"why_not_saved": str(error)[:500]}
        return {"saved": name}

    def _read(self, name: str) -> memoryview:
        """Return what is in a file that this job has signed."""
        try:
            is_on_trial, content = self._mark(name).exists(), (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise _NotLoadedError("was not saved") from None
        except Exception as error:  # whatever a disk or a bucket raises
            raise _NotLoadedError(f"cannot be read: {error}") from error
        if is_on_trial:
            raise _NotLoadedError("was loaded before, and that start did not finish a step")
        body = memoryview(content)[SIGNATURE_BYTES:]
        if not is_signed(self._key, _kind(name), body, content[:SIGNATURE_BYTES].decode(errors="replace")):
            raise _NotLoadedError("is damaged, or was signed with another key (job or secret)")
        return body

    def _mark(self, name: str) -> Any:
        return (self.folder / name).with_suffix(".on-trial")

    def _files(self) -> list[Any]:
        return list(self.folder.glob("*.program"))


class _NotLoadedError(Exception):
    """Why a step is compiled, and not loaded."""


class _NotSavedError(Exception):
    """Why a step is not saved."""


def _kind(name: str) -> str:
    """Return what is signed together with a file's content, so that no file can take another one's name."""
    return f"compiled train step {name}"


def why_not_loaded(everybody: list[list[str]]) -> str:
    """Return why not all processes have loaded the same program; "" if they have, or if nobody was to load one."""
    if len({name for name, _, _ in everybody}) > 1:
        return DIFFERENT
    for process, (_, _, why) in enumerate(everybody):
        if why:
            return f"process {process}: {why}"
    same = len({content for _, content, _ in everybody}) == 1
    return "" if same else "processes have read different files of the same name"


def _dump(compiled: CompiledTrainStep) -> bytes:
    """Return all that is compiled of a step, and the layout of its state."""
    if not compiled.hlo:
        raise _NotSavedError("the step calls back into this process, as jax.debug.print does")
    layout = compiled.layout
    try:
        executables = {which: serialize(one) for which, one in compiled.executables.items()}
        fabric: Any = None  # its devices are this process's
        return pickle.dumps((executables, replace(layout, fabric=fabric, programs={}), compiled.hlo))
    except Exception as error:  # whatever a program or a pytree has in it that cannot be written
        raise _NotSavedError(f"{type(error).__name__}: {error}") from error


def _load(body: memoryview, fabric: Fabric, program: Program) -> CompiledTrainStep:
    try:
        written, layout, hlo = pickle.loads(body)  # noqa: S301  # its signature was right: this job has written it
        devices, leaders = list(fabric.jax_mesh.devices.flat), list(leaders_of(fabric))
        loaded = {}
        for which, (executable, in_tree, out_tree) in written.items():
            used = leaders if which == "gather" else devices
            loaded[which] = deserialize_and_load(executable, in_tree, out_tree, execution_devices=used)
        programs = {which: loaded.pop(which, None) for which in ("cut", "gather", "vote")}
        layout = replace(layout, fabric=fabric, programs=programs)
        return CompiledTrainStep(program, layout, hlo, loaded["init"], loaded["step"])
    except Exception as error:  # whatever another version, another machine or a missing class raises
        raise _NotLoadedError(f"does not load: {type(error).__name__}: {error}") from error


def shapes_of(tree: Any) -> Any:
    """Return the shapes and dtypes of arrays, and what holds them, for `made_of`."""
    leaves, structure = jax.tree.flatten(tree)
    return [(tuple(np.shape(leaf)), str(leaf.dtype)) for leaf in leaves], structure


def _facts_of(fabric: Fabric) -> dict[str, Any]:
    """Return what a compiled program depends on besides its functions: devices, versions, and settings."""
    devices = fabric.jax_mesh.devices
    first = devices.flat[0]
    settings = {name: repr(value) for name, value in jax.config.values.items() if not OTHER_SETTINGS.search(name)}
    return {
        "mesh": repr(sorted(fabric.mesh.to_dict().items())),
        "axes": (tuple(fabric.jax_mesh.axis_names), tuple(devices.shape), fabric.axes, fabric.batch_axes),
        "devices": [(int(device.id), int(device.process_index)) for device in devices.flat],
        "domains": [fabric.domains[device.process_index] for device in devices.flat] if fabric.domains else [],
        "kind": (first.platform, first.device_kind, first.client.platform_version),
        "cpu": _cpu() if first.platform == "cpu" else "",
        "options": sorted(fabric.compiler_options.items()),
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "settings": settings,
        "versions": (sys.version, jax.__version__, version("jaxlib"), np.__version__, stamp("meshmend")),
    }


def _cpu() -> str:
    """Return what distinguishes CPUs that run each other's machine code from others."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        flags = re.findall(r"^(?:flags|Features|model name)\s*:.*$", text, re.M)
        return platform.machine() + "".join(sorted(set(flags)))
    return platform.machine() + platform.processor()
