"""Compile a training job's functions, for the survivors there are, and for those that there might be.

XLA's compile cache is keyed by the program and the numbers of its devices, not by how many other processes there are.
So while all hosts are well, process 0 can compile for the loss of each: the devices of the first processes stand in for
the survivors'. A restart on a hole that has never happened then finds its programs compiled.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from meshmend.errors import PlanError
from meshmend.jax.fabric import Fabric
from meshmend.jax.feed import Batch
from meshmend.jax.job.session import Session, is_orderly
from meshmend.jax.program import Program, ProgramPair
from meshmend.jax.state.layout import StateLayout
from meshmend.jax.state.mirror import cutter
from meshmend.jax.training import TrainStep
from meshmend.schedule import Schedule


@dataclass(frozen=True)
class Steps:
    """A `TrainStep`, compiled for one fabric. Made by `compile_steps`."""

    init: Callable[..., Any]
    """From parameters and a program to the optimiser's state."""
    step: Callable[..., Any]
    """From parameters, state, data and a program, `weights` and `scale`; takes over the memory of the first two."""


def compile_steps(
    training: TrainStep,
    program: Program | ProgramPair,
    schedule: Schedule,
    fabric: Fabric,
    params: Any,
    batch: Batch,
    *,
    accumulate_dtype: DTypeLike | None = np.float32,
) -> Steps:
    """Compile `train_step(…, per_example=True)` for a feed's batches, and what keeps copies of its state.

    `params` may be on any device or on none: only shapes and dtypes count. `accumulate_dtype` must be what `train_step`
    was given.
    """

    def abstract(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
    params = abstract(like, jax.tree.map(lambda _: fabric.sharding(), like))
    init = jax.jit(training.init).lower(params, program).compile()
    shapes = jax.eval_shape(training.init, params, program)
    layout = StateLayout.of(params, shapes, program, schedule, fabric, accumulate_dtype=accumulate_dtype)
    shardings = [layout.sharding(i) for i in range(len(layout.leaves))]
    _, state_shardings = jax.tree.unflatten(layout.structure, shardings)
    state = abstract(shapes, state_shardings)
    scale = jax.ShapeDtypeStruct((), np.float32)
    step = jax.jit(training.step, donate_argnums=(0, 1))
    compiled = step.lower(params, state, batch.data, program, weights=batch.weights, scale=scale).compile()
    jax.jit(cutter(layout)).lower(params, state).compile()
    return Steps(init, compiled)


class CompileAhead:
    """Compiles for the loss of each single host, one after the other, in a thread of process 0.

    `build(fabric)` must plan, install and compile for any fabric, as the job itself does for its own. Where it raises,
    that loss is left out: `failures` and the timeline say why, a warning says it once, and the next one is built.

    Leave the `with` block, or call `stop`, before the session ends. Leaving it by an exception does not wait for the
    build under way; no further one is started. The session then ends the process, and the build with it; where there is
    none, the end of the interpreter waits for the build.
    """

    def __init__(self, session: Session, build: Callable[[Fabric], Any]) -> None:
        self.session = session
        self.build = build
        self.ready: list[int] = []
        """Hosts whose loss has been compiled for."""
        self.failures: dict[int | None, str] = {}
        """Why a host's loss (its number) has not been compiled for; under None, why the losses could not be listed."""
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshmend-compile-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for lost, fabric in self.session.fabrics_ahead():
                if self._stop.is_set():
                    return
                with self.session.timeline.timed("compile ahead", lost=lost) as facts:
                    why_not = self._build(lost, fabric)
                    if why_not is not None:
                        facts["why_not"] = why_not
        except Exception as error:
            # Whatever it is, nobody would hear of it from a thread.
            self.session.timeline.note("compile ahead", why_not=self._failed(None, error))

    def _build(self, lost: int, fabric: Fabric) -> str | None:
        try:
            self.build(fabric)
        except PlanError as error:
            # Some losses have no plan: worth knowing, but nothing is broken.
            self.failures[lost] = error.why
            return error.why
        except Exception as error:
            return self._failed(lost, error)
        self.ready.append(lost)
        return None

    def _failed(self, lost: int | None, error: Exception) -> str:
        why = f"{type(error).__name__}: {error}"[:300]
        self.failures[lost] = why
        if not self._warned:
            self._warned = True
            what = "the losses that there might be" if lost is None else f"the loss of host {lost}"
            warnings.warn(
                f"Compiling ahead for {what} failed: {why}. The job is not affected, but a restart there would compile "
                "anew. Other losses go on being compiled for; all that failed are in CompileAhead.failures and in the "
                "timeline.",
                stacklevel=2,
            )
        return why

    def wait(self) -> None:
        """Return when everything is compiled."""
        self._thread.join()

    def stop(self, *, wait: bool = True) -> None:
        """Leave the rest; return when what is being compiled is done, or at once if not `wait`."""
        self._stop.set()
        if wait:
            self._thread.join()
        else:
            # An interpreter that ends under a compiler aborts. `Session` ends the process without its interpreter.
            atexit.register(self._thread.join)

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # With a peer gone the process must end at once, as `Session` does: the launcher waits for it.
        self.stop(wait=is_orderly(error))
