"""A job that survives: one object from the launcher's environment to trained parameters."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from meshmend.buckets import as_path
from meshmend.cost import Hardware
from meshmend.errors import ParameterError, RestartError
from meshmend.jax.checks.settings import Checks
from meshmend.jax.data.example_keys import RandomKey, make_feed
from meshmend.jax.data.policy import KeepGlobal, KeepPerChip, Policy
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.private import joined_as
from meshmend.jax.job.exit import Ending
from meshmend.jax.job.model import Model, Update
from meshmend.jax.job.run import RecoveryOptions, TrainingRun
from meshmend.jax.job.step import JobStep
from meshmend.jax.session.hardware import with_hardware
from meshmend.jax.session.session import Session, initialize
from meshmend.jax.session.shared_folder import SharedFolder, open_shared
from meshmend.jax.session.single_process import initialize_alone, is_launched
from meshmend.jax.state import Resumed
from meshmend.launch.environment import SHARED
from meshmend.planning import Planner

LOGGER = logging.getLogger(__name__)


class Job:
    """A training job that survives failures of hosts: it joins its processes, trains, and resumes after a restart.

    Make it before anything touches a device. Started by a launcher (`meshmend run`) it joins the other
    processes; without one, it is a job of this process alone, on all of its devices. `shared` is a folder that all
    hosts see, by default that of `meshmend run --shared`, or "shared". Plans, compiled programs, checkpoints and
    timelines are in it, and it identifies the job. The same folder resumes the job, a new one starts over. Where hosts
    see no common folder, it is one in a bucket, as in "gs://bucket/job". `global_batch` is the number of samples per
    step, on any number of chips, or a policy such as `KeepPerChip(8)`.

    `tile`, as in "2x2", is for a model that is split over the chips of a tile, over the axis "model" or over those that
    `inner` names, as in {"fsdp": 2, "tensor": 2}; `train` then takes its `shardings`. Tiles are cut anew after each
    restart, and one that lost a chip is a hole.

    Hosts keep copies of the state in memory: by default as often as slows down training by at most 3 %, which the job
    measures, or after every `memory_every` steps. Checkpoints are made a minute after each start, every `disk_every`
    from then on, and at the end. They are in `shared`, or in `disk`, a folder or one in a bucket, as in
    "gs://bucket/job". A number as `disk_every` is one of steps, from the first on. 0 leaves either out. Checkpoints are
    what Orbax would save of {"params": …, "opt_state": …}, so that it reads them without meshmend; and a new job begins
    with one that Orbax has saved, if `start_from` is its path. `planner` is as in `meshmend.plan`; one that could not
    serve what a failed host would leave is refused at the start. Plans are made for the bytes that the model sends and
    for `hardware`, a preset's name or a file. The default is measured at the first start under a launcher
    (`mmj.measure`, a few seconds), else it is the devices' preset. With `compile_ahead`, hosts compile for the loss of
    each other while the job trains. With `checks`, as in `Checks()`, the job finds chips that compute wrong numbers or
    are slow. It leaves them out, and goes back to the last state that is known to be good. `session` is for scripts
    that call `initialize` themselves, and also end it.

    >>> import tempfile, jax, numpy as np, optax, meshmend.jax as mmj
    >>> from meshmend.jax.session import initialize_alone
    >>> x = np.arange(64, dtype=np.float32) / 64
    >>> loss = lambda w, batch: (w * batch["x"] - batch["y"]) ** 2  # one value per example
    >>> four = initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2"))  # without it, on all devices
    >>> with mmj.Job(tempfile.mkdtemp(), global_batch=32, session=four, disk_every=0) as job:
    ...     for step in job.train(loss, optax.sgd(0.5), np.float32(0), {"x": x, "y": 2 * x}, steps=40):
    ...         pass
    >>> round(float(job.params), 3)
    2.0
    """

    def __init__(
        self,
        shared: str | Path | None = None,
        global_batch: int | Policy | None = None,
        *,
        tile: str | None = None,
        inner: Mapping[str, int] | None = None,
        session: Session | None = None,
        planner: str | Planner = "auto",
        hardware: str | Hardware | None = None,
        memory_every: int | str = "auto",
        disk_every: int | str = "10min",
        disk: str | Path | None = None,
        start_from: str | Path | None = None,
        compile_ahead: bool = True,
        checks: Checks | None = None,
    ) -> None:
        self.shared = open_shared(_folder(shared))
        self.policy = _policy(global_batch)
        disk = self.shared.disk if disk is None else disk
        self.options = RecoveryOptions(
            self.shared, planner, memory_every, disk_every, compile_ahead, checks, disk, start_from
        )
        self._run: TrainingRun | None = None
        if inner is not None and tile is None:
            raise ParameterError("inner names the axes inside a tile: give tile='2x2' as well.")
        joined = _join(self.shared) if session is None else session
        # From here on, an error must not wait for the other processes.
        self._ending = Ending(joined, lambda: self._is_training) if session is None else None
        joined = replace(joined, launch=replace(joined.launch, job=self.shared.name))
        joined = with_hardware(joined, self.shared.hardware, hardware, measures=is_launched())
        self.session = joined if tile is None else joined.in_tiles(tile, **(inner or {}))

    @property
    def fabric(self) -> Fabric:
        """The live chips, or the tiles that they are cut into."""
        return self.session.fabric

    @property
    def resumed(self) -> Resumed:
        """The state that training started from: its `step`, and its `source`, "memory", "disk" or "start"."""
        return self._current().found

    @property
    def params(self) -> Any:
        """The parameters after the last step so far, as NumPy arrays.

        With update="fsdp" they are gathered, one layer at a time, in the dtype of their shards: ask on every process.
        """
        return self._current().fetch_params()

    @property
    def model_state(self) -> Any:
        """The model's state after the last step so far, as NumPy arrays; None if it has none."""
        return self._current().model_state

    def train(
        self,
        loss: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        params: Any,
        dataset: Any,
        *,
        steps: int,
        shardings: Any = None,
        model_state: Any = None,
        rng: jax.Array | int | None = None,
        has_aux: bool = False,
        update: Update = "auto",
        microbatches: int = 1,
        accumulate_dtype: DTypeLike | None = jnp.float32,
        seed: int = 0,
        independent: bool = True,
    ) -> Iterator[JobStep]:
        """Return the steps of training, one after the other, up to number `steps`, from where the job last stopped.

        `loss(params, batch)` has one value per example, without a mean over the batch: the mean over exactly the
        samples of a step is made here, whatever chips there are. `params` are what a new job begins with, the same on
        every process. `dataset` is anything that `Feed` takes (a `grain.MapDataset`, or anything with `len` and `[i]`),
        or an array, or a dict or tuple of arrays with one row per sample. `seed` is that of its order.

        - `shardings`: how each parameter is split inside a tile, as in `value_and_grad`, for a job with tiles. The
          loss sees one tile's part of a batch.
        - `model_state`: `loss(params, model_state, batch)` returns (values, new state), each array of the new state
          with one row per example. Their mean is the next state, such as running statistics. Whole numbers and bools
          are kept exactly: they must not depend on the examples, as in a counter of steps.
        - `rng`: `loss` gets one random key per example as its last argument. They depend on `rng`, the epoch and the
          example's offset in it, not on the chips: a repeated step draws the same numbers.
        - `has_aux`: `loss` returns (values, aux), or with a model state (values, (new state, aux)); `step.aux` has the
          means of its arrays.
        - `update`: "replicated" updates all weights on every chip. "sharded" divides the optimizer's memory and work
          by the number of chips, for element-wise optimizers, whose masks may go by name. "auto" is sharded if the
          optimizer allows it and its state is large (`SHARDED_FROM_BYTES`). "fsdp" also divides the parameters and
          gradients: `params` is then a function, and `params(fabric, pair)` makes them as `init_sharded` does; the loss
          is `loss(params, batch, pair)` and gathers what it needs with `scan_layers` and `gather_params`.

        An example's loss must not depend on others in its batch, which chips share differently after each failure. A
        new job calls the loss a few times to check that, and refuses what batch normalisation does;
        `independent=False` leaves the check out.

        `microbatches` and `accumulate_dtype` are as in `train_step`. Every process runs the same loop. A failure ends
        this process; the launcher starts it again, and then the steps continue with the first that was not committed.
        """
        if self._is_training:
            raise RestartError(
                "This job is already training: finish or leave the loop over its steps first. Where an error has ended "
                "that loop, as in a notebook, call job.close() and make the job again."
            )
        if self._run is not None:
            self._run.finish()
        model = Model(
            loss,
            optimizer,
            params if callable(params) else _arrays("params", params),
            None if model_state is None else _arrays("model_state", model_state),
            rng=None if rng is None else RandomKey.of(rng),
            has_aux=has_aux,
            microbatches=microbatches,
            accumulate_dtype=accumulate_dtype,
            shardings=shardings,
            independent=independent,
        )
        feed = make_feed(dataset, self.policy, seed=seed, n_chips=self.fabric.mesh.n_chips)
        self._run = TrainingRun(
            self.session,
            self.options,
            model,
            feed,
            is_sharded=model.is_sharded(update),
            steps=steps,
            seed=seed,
        )
        return self._run.steps()

    @property
    def _is_training(self) -> bool:
        return self._run is not None and self._run.is_open

    def _current(self) -> TrainingRun:
        if self._run is None:
            raise RestartError("This job has not trained yet: loop over job.train(…) first.")
        return self._run

    def close(self) -> None:
        """Leave the job, once all processes have come to this point. The end of the script does the same."""
        if self._run is not None and self.session.launch.n_processes == 1:
            self._run.finish()
        if self._ending is not None:
            self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._run is not None:
            self._run.finish()
        if self._ending is not None:
            self._ending.close(error)


def _join(shared: SharedFolder) -> Session:
    host = os.environ.get("MESHMEND_HOST", str((joined_as() or (0, 1))[0]))
    timeline = os.environ.get("MESHMEND_TIMELINE") or shared.timeline(host)
    folders: dict[str, Any] = {"compile_cache": shared.compiled, "timeline": timeline, "quarantine": shared.path}
    return initialize(**folders, preemption=True) if is_launched() else initialize_alone(**folders)


def _folder(shared: str | Path | None) -> str | Path:
    """Return the job's folder: the one that is named, or the launcher's."""
    launchers = os.environ.get("MESHMEND_SHARED")
    if shared is None:
        if is_launched() and not launchers:
            raise ParameterError(
                "A job of several hosts needs a folder that all of them see, or one in a bucket: give `meshmend run` "
                '--shared DIR or --shared gs://bucket/job, or Job(shared="…").'
            )
        return launchers or SHARED
    if launchers and as_path(launchers) != as_path(shared) and (joined_as() or (0,))[0] == 0:
        LOGGER.warning(
            "This job keeps its state in %s, but its launcher was given %s: give `meshmend run --shared %s`, or leave "
            "Job's `shared` out, so that both use one folder.",
            shared,
            launchers,
            shared,
        )
    return shared


def _policy(global_batch: Any) -> Policy:
    if isinstance(global_batch, KeepGlobal | KeepPerChip):
        return global_batch
    if not isinstance(global_batch, int) or isinstance(global_batch, bool) or global_batch < 1:
        raise ParameterError(
            f"global_batch is {global_batch!r}, expected a number of samples per step of at least 1, or a policy such "
            "as mmj.KeepPerChip(8)."
        )
    return KeepGlobal(global_batch)


def _arrays(name: str, tree: Any) -> Any:
    """Return a tree of arrays, with Python's own numbers made arrays as JAX does."""
    if not jax.tree.leaves(tree):
        raise ParameterError(f"{name} has no arrays, expected a pytree of them.")

    def array(path: Any, leaf: Any) -> Any:
        if hasattr(leaf, "dtype"):
            return leaf
        try:
            return np.asarray(jnp.asarray(leaf))
        except TypeError:
            raise ParameterError(
                f"{name}{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, expected an array. Keep what is not "
                "trained out of the parameters, such as functions and names of layers."
            ) from None

    return jax.tree_util.tree_map_with_path(array, tree)
