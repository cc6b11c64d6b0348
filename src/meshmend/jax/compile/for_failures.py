"""Compile a training job's functions, for the current survivors and for those after the next failure.

A compiled program names its devices by their numbers, and does not depend on how many other processes there are. So
while all hosts are up, they can compile for the loss of each, for devices with the numbers that the survivors' will
have (`Session.fabrics_ahead`). A restart with a hole that has never happened then loads its programs (`saved`), or
finds them in XLA's compile cache.

On a TPU the cache's key also has the slice's topology. Tests show that the survivors' programs are found by their keys
where the slice still says that it is whole (libtpu's own devices and keys, without a TPU). That a TPU's runtime comes
up without a host, and what it then says of its topology, nobody has tried: Cloud TPU restarts a slice whole or not at
all.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import socket
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax
import numpy as np

from meshmend.errors import ParameterError, PlanError
from meshmend.jax.compile.for_topology import as_compiler_error
from meshmend.jax.data.feed import Batch
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.session.session import Session, is_orderly
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.memory.collect import compile_gather
from meshmend.jax.state.memory.peer_copy import compile_cut
from meshmend.jax.state.memory.placement import place
from meshmend.jax.state.memory.redundancy import least_blocks
from meshmend.jax.state.voting import compile_vote
from meshmend.jax.train.step import TrainStep
from meshmend.launch.failure import repeated_by_restarts


@dataclass(frozen=True)
class CompiledTrainStep:
    """A `TrainStep`, compiled for one program, one model and one size of batch. Made by `compile_train_step`."""

    program: Program
    layout: StateLayout
    """The layout of parameters and state on the fabric, which `Keeper` uses."""
    hlo: str
    """Digest of the step before it was compiled; "" if it calls this process, as `jax.debug.print` does."""
    _init: Any = field(repr=False)
    _step: Any = field(repr=False)

    def init(self, params: Any) -> Any:
        """Return the optimizer's state for parameters that are on the devices (`put`)."""
        return self._init(params, self.program)

    def step(self, params: Any, state: Any, batch: Batch) -> tuple[Any, ...]:
        """Return new parameters, state and loss (and aux). `params` and `state` are donated."""
        scale = np.float32(batch.learning_rate_factor)
        given = (params, state, batch.data, self.program)
        found: tuple[Any, ...] = self._step(*given, weights=batch.weights, scale=scale)
        return found

    @property
    def executables(self) -> dict[str, Any]:
        """All that was compiled: "init" and "step", and what makes copies of the state and sends them to all hosts."""
        of_state = {which: one for which, one in self.layout.programs.items() if one is not None}
        return {"init": self._init, "step": self._step} | of_state


def compile_train_step(training: TrainStep, program: Program, params: Any, batch: Batch) -> CompiledTrainStep:
    """Compile `train_step(…, per_example=True)` for a feed's batches, and what copies its state and sends the copies.

    Or `sharded_train_step(…, per_example=True)`, with its sharded parameters.

    `params` and `batch` may be on any device or on none (`Feed.like`): only shapes and dtypes count.
    """
    fabric = training.fabric
    where = f"{fabric.mesh!r} of {fabric.jax_mesh.devices.flat[0].device_kind}"
    with repeated_by_restarts(), as_compiler_error(where):
        layout, (params, state), lowered = _lower(training, program, params, batch)
        _check_result(layout, lowered)
        # An empty state, made of no parameter, would be compiled for one device, which other processes do not have.
        init = fabric.jit(training.init, keep_unused=True).lower(params, program).compile()
        step = lowered.compile()
        layout.programs["cut"] = compile_cut(layout, params, state, place(fabric, n_blocks=least_blocks(layout)))
        layout.programs["gather"] = compile_gather(layout)
        layout.programs["vote"] = compile_vote(fabric)
    return CompiledTrainStep(program, layout, _digest(lowered), init, step)


def step_digest(training: TrainStep, program: Program, params: Any, batch: Batch) -> str:
    """Trace a step without compiling it; return what `compile_train_step(…).hlo` would be."""
    return _digest(_lower(training, program, params, batch)[2])


def _lower(training: TrainStep, program: Program, params: Any, batch: Batch) -> tuple[StateLayout, Any, Any]:
    """Return the state's layout, the (params, state) to compile for, and the step as JAX has lowered it."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
    layout = StateLayout.of(training, program, like)
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(i))
        for i, leaf in enumerate(layout.leaves)
    ]
    params, state = jax.tree.unflatten(layout.structure, leaves)
    # What gathers its parameters hides that behind computing.
    step = training.fabric.jit(training.step, overlap=training.is_fsdp, donate_argnums=(0, 1))
    scale = jax.ShapeDtypeStruct((), np.float32)
    lowered = step.lower(params, state, batch.data, program, weights=batch.weights, scale=scale)
    return layout, (params, state), lowered


def _digest(lowered: Any) -> str:
    text = lowered.as_text()
    if re.search(r"callback|is_host_transfer ?= ?true", text):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _check_result(layout: StateLayout, lowered: Any) -> None:
    """Refuse a step whose state comes back with other shapes or dtypes: the next step could not take it."""
    new_params, new_state, *_ = lowered.out_info
    why = layout.difference(new_params, new_state)
    if why:
        raise ParameterError(
            f"A step does not return the parameters and the state as it was given them: {why}. A job compiles one step "
            "and keeps one layout of its state. Use an optimizer whose state keeps its arrays, shapes and dtypes; or, "
            "for other dtypes, cast the state in its init()."
        )


class CompileAhead:
    """Compiles for each possible loss (`Session.fabrics_ahead`), one after the other, in a thread.

    Process 0 does all of that, because JAX lets only this one write to XLA's cache. Where `build` saves what it
    compiles, the losses may be divided among all processes: all are then covered in the time of about two, however many
    hosts there are.

    `build(fabric)` must plan, install and compile for any fabric, as the job itself does for its own; a dict that it
    returns goes into the timeline. `first()`, if it is given, is called before on process 0. Where `build` raises, that
    loss is left out: the timeline says why, a warning says it once, and the next one is built.

    Leave the `with` block, or call `stop`, before the session ends. Leaving it by an exception does not wait for the
    current build; no further one is started. The session then ends the process, and the build with it; without a
    session, the interpreter waits for the build at exit.
    """

    def __init__(
        self,
        session: Session,
        build: Callable[[Fabric], Any],
        *,
        first: Callable[[], Any] | None = None,
        is_divided: bool = False,
    ) -> None:
        self.session = session
        self.build = build
        self.first = first
        self.is_divided = is_divided
        self.ready: list[int | str] = []
        """Hosts and failure domains whose loss this process has compiled for."""
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshmend-compile-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self.first is not None and self.session.launch.process == 0:
                self.first()
            for lost, fabric in self.session.fabrics_ahead(is_divided=self.is_divided):
                which = {"lost": lost} if isinstance(lost, int) else {"domain": lost}
                with self._core():
                    if self._stop.is_set():
                        return
                    with self.session.timeline.timed("compile ahead", **which) as facts:
                        facts |= self._build(lost, fabric)
        except Exception as error:
            # Whatever it is, an error in a thread would go unseen.
            self.session.timeline.note("compile ahead", problem=self._failed("the possible losses", error))

    def _core(self) -> socket.socket:
        """Wait for one of this machine's cores, and return what holds it: hosts of a local job share them with steps.

        A name of Linux's abstract sockets is free again when its process ends, however it does.
        """
        while True:
            for number in range(os.cpu_count() or 1):
                core = socket.socket(socket.AF_UNIX)
                try:
                    core.bind(f"\0meshmend {self.session.launch.job[:50]} compiles on core {number}")
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        core.close()
                        continue
                return core
            if self._stop.wait(0.05):
                return core

    def _build(self, lost: int | str, fabric: Fabric) -> dict[str, Any]:
        try:
            facts = self.build(fabric)
        except PlanError as error:
            return {"problem": error.why}  # some losses have no plan: worth knowing, but nothing is broken
        except Exception as error:
            who = f"{'host' if isinstance(lost, int) else 'domain'} {lost}"
            return {"problem": self._failed(f"the loss of {who}", error)}
        self.ready.append(lost)
        return facts if isinstance(facts, dict) else {}

    def _failed(self, what: str, error: Exception) -> str:
        why = f"{type(error).__name__}: {error}"[:300]
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Compiling ahead for {what} failed: {why}. The job is not affected, but a restart then would compile "
                "again. Other losses are still compiled for; all failures are in the timeline.",
                stacklevel=2,
            )
        return why

    def wait(self) -> None:
        """Return when everything is compiled."""
        self._thread.join()

    def stop(self, *, wait: bool = True) -> None:
        """Skip the rest; return when the current build is done, or at once if not `wait`.

        With `wait`, raises what `first` has ended the job with, where the session has one process.
        """
        self._stop.set()
        if wait:
            self._thread.join()
            if self.first is not None:
                self.session.check()
        else:
            # An interpreter that exits while a thread compiles aborts. `Session` ends the process directly.
            atexit.register(self._thread.join)

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # With a peer gone the process must end at once, as `Session` does: the launcher waits for it.
        self.stop(wait=is_orderly(error))
