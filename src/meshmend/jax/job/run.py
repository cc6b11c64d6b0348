"""One run of a training loop: from a plan and what was kept of an earlier run to the last step."""

from __future__ import annotations

import hashlib
import logging
import signal
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshmend.buckets import Folder
from meshmend.cost.units import parse_seconds
from meshmend.errors import ParameterError, PlanError, RestartError
from meshmend.jax.checks.settings import Checks
from meshmend.jax.compile import CompileAhead
from meshmend.jax.compile.saved import SavedSteps, shapes_of
from meshmend.jax.data.example_keys import with_offsets
from meshmend.jax.data.feed import Batch, Feed
from meshmend.jax.data.policy import Position
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.job.check_runner import Checking, check_possible
from meshmend.jax.job.exit import Interrupts
from meshmend.jax.job.loss_checks import LossWatch, check_independence
from meshmend.jax.job.model import Model
from meshmend.jax.job.step import JobStep
from meshmend.jax.session.coordination import Facts, Question
from meshmend.jax.session.session import RECOVERY_BUDGET_S, Session
from meshmend.jax.session.shared_folder import SharedFolder, check_shared
from meshmend.jax.session.survivors import read_untrusted
from meshmend.jax.state import Keeper, fetch
from meshmend.jax.state.holdings import Record
from meshmend.jax.train.plan import PlannedUpdate, TrainingPlan, hardware_of, max_steps_of, plan, workload_of
from meshmend.planning import PlanCache, Planner, StepDemands, Workload

LOGGER = logging.getLogger(__name__)
AHEAD_AFTER = 3
"""Steps after a start before it compiles for the next failures: earlier, that would slow down a restart."""
IN_FLIGHT = 2
"""Steps that may be under way while the loop continues: enough to keep the devices busy."""
MOST_LOSSES = 16
"""Losses for which a new job asks whether its planner serves them: on 9,000 chips a third of a second each."""

_RUNS: weakref.WeakValueDictionary[Folder, TrainingRun] = weakref.WeakValueDictionary()
"""The last run of each shared folder in this process."""


@dataclass(frozen=True)
class RecoveryOptions:
    """What helps a job to come back, and where it is kept."""

    shared: SharedFolder
    planner: str | Planner
    memory_every: int | str
    disk_every: int | str
    compile_ahead: bool
    checks: Checks | None = None
    disk: str | Path = ""
    """Where checkpoints go."""
    start_from: str | Path | None = None
    """What Orbax has saved, for a new job to begin with."""

    def __post_init__(self) -> None:
        for name in ("memory_every", "disk_every"):
            value = getattr(self, name)
            if isinstance(value, str):
                is_valid = value == "auto" if name == "memory_every" else parse_seconds(value) > 0
            else:
                is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not is_valid:
                words = '"auto"' if name == "memory_every" else 'a time as in "10min"'
                raise ParameterError(f"{name} is {value!r}, expected a number of steps, or 0 for never, or {words}.")


class TrainingRun:
    """A job's training from a start or restart on. Made by `Job.train`; every process makes the same one."""

    def __init__(
        self,
        session: Session,
        options: RecoveryOptions,
        model: Model,
        feed: Feed,
        *,
        is_sharded: bool,
        steps: int,
        seed: int,
    ) -> None:
        if steps < 0:
            raise ParameterError(f"steps is {steps}, expected the number of the last step, at least 0.")
        self.session = session
        self.options = options
        self.model = model
        self.feed = feed
        self.is_sharded = is_sharded
        self.last = steps
        self.is_open = False
        """Whether a loop over the steps has begun and not ended."""
        self.is_suspended = False
        """Whether that loop is in the hands of whoever asked for the steps."""
        self.is_replaced = False
        """Whether another run in this process goes on with the job."""
        self._data = {"samples": feed.epoch_size, "seed": seed}
        self._ahead: CompileAhead | None = None
        self._interrupts = Interrupts()
        if options.checks is not None:
            check_possible(options.checks, model, session.fabric)
        self._update: PlannedUpdate = "fsdp" if model.is_fsdp else "sharded" if is_sharded else "replicated"
        self._outline = model.outline(session.fabric)
        untrusted, self.plan = self._agree()
        demands = self._demands(self.plan.workload)
        if session.launch.process == 0 and demands is not None:
            demands.write(options.shared.path)  # so that `meshmend prepare --shared` can plan the same ahead
        self._saved_steps = SavedSteps(options.shared.programs, session, self._made_of(), self._ingredients)
        self._compiled = self._saved_steps.start(self.plan)
        layout = self._compiled.layout
        self._take_over()
        self._keeper: Keeper | None = Keeper(
            session,
            layout,
            memory_every=options.memory_every,
            disk=options.disk if options.disk_every else None,
            disk_every=options.disk_every,
            start_from=options.start_from,
            # None says that nothing checks this job: what it keeps counts as good for a later run with checks.
            untrusted=untrusted if untrusted or options.checks is not None else None,
            record=Record(options.shared.path),
        )
        self._checking: Checking | None = None
        try:
            params = model.put(session.fabric, self._compiled.program)
            self.found = self._keeper.restore(
                params, self._compiled.init(params), extra=self._extra(Position()), donate=True
            )
            self.params, self._state = self.found.params, self.found.state
            self.number = self.found.step
            self._check_found()
            self._at = Position(*self.found.extra["position"])
            batch = feed.split(session.fabric).global_batch
            session.timeline.note("feed", step=self.number, position=self._at, batch=batch)
            if options.checks is not None:
                self._checking = Checking(
                    options.checks, session, options.shared.path, model, self._compiled, self._keeper
                )
        except BaseException:
            self._keeper.abandon()
            raise
        _RUNS[options.shared.path] = self

    def _take_over(self) -> None:
        """End an earlier run of this job in this process, whose loop an error has ended: as in a notebook.

        The error, which a notebook keeps, keeps that loop, and with it the folder of its copies.
        """
        earlier = _RUNS.get(self.options.shared.path)
        if earlier is None or not earlier.is_suspended or self.session.launch.n_processes > 1:
            return
        earlier.is_replaced = True
        keeper = earlier._keeper
        try:
            earlier.finish()
        except Exception as error:  # whatever it was, it is that run's, and this one begins with what there is
            self.session.timeline.note("skipped", why=f"an earlier run in this process: {error}"[:300])
            if keeper is not None:
                keeper.abandon()

    @property
    def model_state(self) -> Any:
        """The model's state, as NumPy arrays."""
        return None if self.model.model_state is None else fetch(self._state[1])

    def steps(self) -> Iterator[JobStep]:
        """Train, one step after the other."""
        fabric, timeline, under_way = self.session.fabric, self.session.timeline, deque[JobStep]()
        waited = deque[float]()
        keeper, found, checking, interrupts = self._keeper, self.found, self._checking, self._interrupts
        watch = LossWatch() if self.session.launch.process == 0 else None
        assert keeper is not None  # noqa: S101  # it is there until the end of the loop
        self.is_open, is_stopped = True, False
        if self.session.launch.process == 0 and 0 < self.last <= found.step:
            LOGGER.warning(
                "All %d steps of the job in %s are done already. For more, ask for more steps; to begin anew, or for "
                "another script, give Job another folder, or remove this one.",
                found.step,
                self.options.shared.path,
            )

        def settle(step: JobStep) -> None:
            """Wait for a step's loss, which raises as soon as any of this host's devices has lost its peer."""
            examples = self.feed.split(fabric).count(step.batch.at)
            facts = {"step": step.number, "loss": step.loss, "chips": step.chips, "examples": examples}
            timeline.note("step", **facts, position=step.batch.at, waited_s=round(waited.popleft(), 6))
            self._saved_steps.confirm()
            if watch is not None:
                watch.see(step.number, step.loss)
            if checking is not None:
                checking.settled(step.number)

        try:
            interrupts.watch()
            batches = self.feed.batches(fabric, at=self._at)
            for number in range(found.step + 1, self.last + 1):
                self.session.check()
                is_stopped = interrupts.is_due()
                if is_stopped:
                    break
                asked = time.monotonic()
                batch = next(batches)
                waited.append(time.monotonic() - asked)
                given = self._input(batch, fabric)
                if checking is not None:
                    checking.between(number - 1, self.params, self._state, batch)
                self.params, self._state, *results = self._compiled.step(self.params, self._state, given)
                keeper.keep(
                    number,
                    self.params,
                    self._state,
                    self._extra(batch.after),
                    save=number == self.last,
                    pin=checking is not None and checking.verifies(number),
                )
                self.number, self._at = number, batch.after
                recovered = found.source != "start" and number == found.step + 1
                under_way.append(JobStep(number, fabric.n_chips, batch, recovered, results, self._params_of))
                if number == found.step + AHEAD_AFTER and self.options.compile_ahead:
                    self._ahead = self._saved_steps.ahead(self._plan_ahead)
                self.is_suspended = True
                yield under_way[-1]
                self.is_suspended = False
                if self.is_replaced:
                    raise RestartError(
                        f"Another Job of this process goes on with {self.options.shared.path}, from the steps that "
                        "this one has kept. Take the steps of that one.",
                        step=number,
                    )
                if len(under_way) > IN_FLIGHT:
                    settle(under_way.popleft())
            if is_stopped:
                keeper.keep_now(self.number, self.params, self._state, self._extra(self._at))
            elif checking is not None and self.number > found.step:
                checking.between(self.number, self.params, self._state, next(batches), is_last=True)
            while under_way:
                settle(under_way.popleft())
            if is_stopped:
                timeline.note("stopped", step=self.number)
            else:
                if checking is not None:
                    checking.finish()
                self._stop_ahead()
                timeline.note("done", step=self.number)
                is_stopped = interrupts.is_due()
        except GeneratorExit:
            # The loop was left: what is kept so far stays, and the job may go on from there.
            pass
        except BaseException as error:
            self.is_open, self._keeper, self._checking = False, None, None
            with suppress(Exception):  # of a step that has failed, there may be no state any more
                self._keep_last(keeper)
            interrupts.end()
            try:
                self.session.give_up(error)  # ends the process, unless it is alone
            finally:
                keeper.abandon()  # a notebook keeps the error, and with it all that it was raised in
        self.finish(wait=not is_stopped)
        if is_stopped:
            self._stop(keeper)

    def finish(self, *, wait: bool = True) -> None:
        """Write what is still to be written, and release the copies' folder; `wait` for what is being compiled."""
        self.is_open = False
        self._interrupts.end()
        try:
            self._stop_ahead(wait=wait)
        finally:
            if self._keeper is not None:
                keeper, self._keeper = self._keeper, None
                self._keep_last(keeper)
                keeper.close()

    def _stop(self, keeper: Keeper) -> None:
        """End the process as the signal would that has stopped the loop."""
        number = self._interrupts.heard or signal.SIGTERM
        if self.session.launch.process == 0 and self.session.launch.launcher != "meshmend run":  # which says it itself
            LOGGER.warning("Stopped by %s after step %d: %s.", number.name, self.number, keeper.where(self.number))
        self.session.stop(number)

    def _stop_ahead(self, *, wait: bool = True) -> None:
        """Compile no more ahead. Raises if the program that this job has loaded is not the one of its script."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.stop(wait=wait)

    def _keep_last(self, keeper: Keeper) -> None:
        """Keep the last step of a loop that was left, if this process is alone: others would not know of it."""
        if self.session.launch.n_processes == 1 and self.found.step < self.number < self.last:
            keeper.keep_last(self.number, self.params, self._state, self._extra(self._at))

    def _plan(self, fabric: Fabric, cache: PlanCache) -> TrainingPlan:
        """Return the plan for what this job sends, on any fabric that it may find itself on."""
        return plan(
            fabric,
            self._outline if fabric is self.session.fabric else self.model.outline(fabric),
            update=self._update,
            shardings=self.model.shardings,
            accumulate_dtype=self.model.accumulate_dtype,
            planner=self.options.planner,
            cache=cache,
            budget_s=RECOVERY_BUDGET_S,
        )

    def _demands(self, workload: Workload) -> StepDemands | None:
        """Return what this job plans for, on whatever chips are left; None if its planner has no name."""
        fabric, planner = self.session.fabric, self.options.planner
        chips = fabric.chips if isinstance(fabric, TiledFabric) else fabric
        tile = None if self.session.cut is None else self.session.cut.side
        if not isinstance(planner, str):
            return None
        return StepDemands(workload, hardware_of(chips), tile, max_steps_of(fabric), planner)

    def _made_of(self) -> dict[str, Any]:
        """Return all that the train step depends on: of whole parameters and of an example, their shapes."""
        params = self.model.params if self.model.is_fsdp else shapes_of(self.model.params)
        batch = self.feed.like(self.session.fabric).data
        example = shapes_of(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch))
        facts = {"params": params, "example": example, "sharded": self.is_sharded, "policy": self.feed.policy}
        return vars(self.model) | facts

    def _ingredients(self, fabric: Fabric, program: Program) -> tuple[Any, Any, Any]:
        batch = self._input(self.feed.like(fabric), fabric)
        return self.model.training(fabric), self.model.like(fabric, program), batch

    def _plan_ahead(self, fabric: Fabric) -> TrainingPlan:
        return self._plan(fabric, PlanCache(self.options.shared.plans))

    def _input(self, batch: Batch, fabric: Fabric) -> Batch:
        return batch if self.model.rng is None else with_offsets(batch, fabric)

    def _extra(self, position: Position) -> dict[str, Any]:
        return {"position": list(position), **self._data}

    def _params_of(self, step: JobStep) -> Any:
        if step.number != self.number:
            raise RestartError(
                f"The parameters of step {step.number} are gone: step {self.number} has overwritten them. Ask for "
                "step.params inside the loop, before the next step.",
                step=step.number,
            )
        return self.fetch_params()

    def fetch_params(self) -> Any:
        """Return the parameters after the last step so far, as NumPy arrays."""
        return self.model.fetch(self.params, self.session.fabric, self._compiled.program)

    def _agree(self) -> tuple[list[tuple[int, int]], TrainingPlan]:
        """Return which states are not to be trusted, by the fault log that process 0 sees, and the plan.

        Raises on every process if they were not given the same things to do.
        """
        session, shared = self.session, self.options.shared
        mine = {
            **self._data,
            "shared": shared.name,
            "steps": self.last,
            "batch": repr(self.feed.policy),
            "sharded": "fsdp" if self.model.is_fsdp else self.is_sharded,
            "memory_every": self.options.memory_every,
            "disk_every": self.options.disk_every,
            "disk": str(self.options.disk),
            "start_from": None if self.options.start_from is None else str(self.options.start_from),
            "checks": repr(self.options.checks),
            "tile": session.cut,
        }

        def judge(everybody: Facts) -> list[tuple[int, int]]:
            check_shared(shared, [facts["shared"] for facts in everybody])
            check_same_settings(everybody)
            self._check_planner()
            return read_untrusted(shared.path)

        untrusted, made = session.ask_and_plan(Question(mine, judge), partial(self._plan, session.fabric), shared.plans)
        return [(attempt, step) for attempt, step in untrusted], made

    def _check_planner(self) -> None:
        """Refuse a new job whose planner would not serve the next loss."""
        with suppress(ParameterError):
            if StepDemands.read(self.options.shared.path).planner == self.options.planner:
                return  # it goes on as long as it can
        fabric = self.session.fabric
        options: Any = {"shardings": self.model.shardings, "accumulate_dtype": self.model.accumulate_dtype}
        demands = self._demands(workload_of(fabric, self._outline, update=self._update, **options))
        if demands is not None:
            check_losses(self.session, demands)

    def _check_found(self) -> None:
        """Raise if the data have changed since the state was kept, or if processes begin with different parameters."""
        if self.found.source != "start":
            kept = {name: self.found.extra.get(name) for name in self._data}
            for name, value in self._data.items():
                if kept[name] != value:
                    raise RestartError(
                        f"This job has trained {self.found.step} steps on a dataset whose {name} was {kept[name]}, but "
                        f"now {name} is {value}, so that its position in the data means something else. Give it the "
                        "same dataset and seed, or start over with another shared folder than "
                        f"{self.options.shared.path}."
                    )
            return
        if self.model.independent:
            check_independence(self.model, self.feed, self.session.fabric, self.params, self._compiled.program)
        if self.model.is_fsdp:
            return  # each chunk is on one chip, so that all begin with the same parameters, whoever made them
        self.session.coordination.decide(digest(self.model.params), check_same_params)


def check_same_settings(everybody: Facts) -> None:
    """Raise if the processes were not given the same things to do."""
    for name in everybody[0]:
        found = [facts[name] for facts in everybody]
        other = next((process for process, value in enumerate(found) if value != found[0]), None)
        if other is not None:
            raise RestartError(
                f"Processes were started with different settings: {name} is {found[0]!r} on process 0 and "
                f"{found[other]!r} on process {other}. Give all of them the same script, arguments and dataset."
            )


def check_same_params(digests: Facts) -> None:
    """Raise if the processes have not begun with the same parameters."""
    other = next((process for process, found in enumerate(digests) if found != digests[0]), None)
    if other is not None:
        raise RestartError(
            f"Processes 0 and {other} begin with different parameters, and would never agree. Make them from the "
            "same seed on every process, as in init(jax.random.key(0))."
        )


def digest(tree: Any) -> str:
    """Return a digest of the values of all arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data)
    return found.hexdigest()


def check_losses(session: Session, demands: StepDemands) -> None:
    """Raise `PlanError` if a planner that was named does not serve what a loss would leave, and others do.

    Nothing is planned, and at most `MOST_LOSSES` are looked at. A job that the launcher would not start again without
    the lost host is not concerned, nor one that its planner does not serve now: planning will say so.
    """
    chips = session.fabric.chips if isinstance(session.fabric, TiledFabric) else session.fabric
    if demands.planner == "auto" or len(session.launch.hosts) <= session.launch.least or demands.refusal(chips.mesh):
        return
    for lost, fabric in session.fabrics_ahead(MOST_LOSSES):
        refused = demands.refusal(fabric.chips.mesh if isinstance(fabric, TiledFabric) else fabric.mesh)
        if refused is not None and refused.alternatives:
            why = (
                f"{refused.why} The loss of host {lost} would leave this mesh and end the job, so the job does not "
                "start. Use planner='auto', which takes a planner that serves what is left."
            )
            raise PlanError(refused.planner, refused.mesh_name, why, refused.alternatives)
