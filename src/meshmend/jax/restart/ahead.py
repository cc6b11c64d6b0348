"""Compile a training job's functions, for the survivors there are, and for those that there might be.

XLA's compile cache is keyed by the program and the numbers of its devices, not by how many other processes there are.
So while all hosts are well, process 0 can compile for the loss of each: the devices of the first processes stand in for
the survivors'. A restart on a hole that has never happened then finds its programs compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from meshmend.errors import PlanError
from meshmend.jax.fabric import Fabric
from meshmend.jax.feed import Batch
from meshmend.jax.program import Halves, Program
from meshmend.jax.restart.elements import StateLayout
from meshmend.jax.restart.mirror import cutter
from meshmend.jax.restart.session import Session
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
    program: Program | Halves,
    schedule: Schedule,
    fabric: Fabric,
    params: Any,
    batch: Batch,
    *,
    accumulate: DTypeLike | None = np.float32,
) -> Steps:
    """Compile `train_step(…, per_example=True)` for a feed's batches, and what keeps copies of its state.

    `params` may be on any device or on none: only shapes and dtypes count. `accumulate` must be what `train_step` was
    given.
    """

    def abstract(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
    params = abstract(like, jax.tree.map(lambda _: fabric.sharding(), like))
    init = jax.jit(training.init).lower(params, program).compile()
    shapes = jax.eval_shape(training.init, params, program)
    layout = StateLayout.of(params, shapes, program, schedule, fabric, accumulate=accumulate)
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

    `build(fabric)` must plan, install and compile for any fabric, as the job itself does for its own. Leave the `with`
    block, or call `stop`, before the session ends.
    """

    def __init__(self, session: Session, build: Callable[[Fabric], Any]) -> None:
        self.session = session
        self.build = build
        self.ready: list[int] = []
        """Hosts whose loss has been compiled for."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshmend-compile-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for lost, fabric in self.session.fabrics_ahead():
            if self._stop.is_set():
                return
            with self.session.timeline.timed("compile ahead", lost=lost) as facts:
                try:
                    self.build(fabric)
                    self.ready.append(lost)
                except PlanError as error:
                    facts["why_not"] = error.why

    def wait(self) -> None:
        """Return when everything is compiled."""
        self._thread.join()

    def stop(self) -> None:
        """Leave the rest; return when what is being compiled is done."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
