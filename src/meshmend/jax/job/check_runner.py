"""A job's checks: when they run, what follows from what they find, and up to which step the state is known to be good.

Whatever a check finds goes to the job's fault log, and from there, if it is enough, to the quarantine list; then this
process gives up. The launcher starts all of them again: they leave out what is on the list, and go back to the last
state that is known to be good. So a process that has seen something needs no other's consent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax

from meshmend.buckets import Folder
from meshmend.errors import ParameterError, QuarantineError
from meshmend.jax.checks.digests import compare_replicas, digest_observations, replica_digests
from meshmend.jax.checks.recompute import Recompute, check_recomputable
from meshmend.jax.checks.settings import Checks
from meshmend.jax.compile import CompiledTrainStep
from meshmend.jax.data.feed import Batch
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.job.model import Model
from meshmend.jax.session.session import Session
from meshmend.jax.state import Keeper
from meshmend.launch.events import note_quarantined
from meshmend.quarantine import Observation, Quarantined, report

WRITTEN_AFTER = 2
"""The result of a step implies that all hosts have written their copies of the one so many steps before."""


class FoundError(QuarantineError):
    """A check has found wrong numbers: this round of the job ends, and the next one does without."""


class _Open(NamedTuple):
    """A state whose replicas are being compared."""

    step: int
    digests: Tree


class Checking:
    """Runs the checks of one round. Every process makes the same calls, in the same order.

    They are `between(step, …)` when a step has been started and the next one has not, and `settled(step, …)` when its
    results are there. It tells the keeper which states are known to be good.
    """

    def __init__(
        self, checks: Checks, session: Session, path: Folder, model: Model, compiled: CompiledTrainStep, keeper: Keeper
    ) -> None:
        self.checks = checks
        self.session = session
        self.folder = path
        self.keeper = keeper
        self._model = model
        self._compiled = compiled
        self._digest: Callable[..., Tree] | None = None
        self._open = deque[_Open]()
        self._recompute: Recompute | None = None
        if checks.recompute_every:
            exchange = session.coordination.exchange
            self._recompute = Recompute(model.gradients, session.fabric, exchange, every=checks.recompute_every)

    def between(self, step: int, params: Tree, state: Tree, batch: Batch, *, is_last: bool = False) -> None:
        """Check the state after a step, before `batch`, the next one, is trained on. The last state always is."""
        if not step or not (is_last or self.checks.is_due(step)):
            return
        if self.checks.digests_every:
            self._open.append(_Open(step, self._digests(params, state)))
        if self._recompute is not None and (is_last or self.checks.repeats_gradients(step)):
            model_state = None if self._model.model_state is None else state[1]
            self._act_on(self._recompute.check(step, params, model_state, batch))
        if not self.checks.digests_every:
            self._open.append(_Open(step, None))

    def settled(self, step: int) -> None:
        """Look at the digests of the states that are old enough now that a step's results are there."""
        while self._open and self._open[0].step + WRITTEN_AFTER <= step:
            self._compare(self._open.popleft())

    def finish(self) -> None:
        """Look at what is still open, at the end of training."""
        while self._open:
            self._compare(self._open.popleft(), is_written=False)

    def verifies(self, step: int) -> bool:
        """Whether the state after a step is known to be good once its checks have found nothing."""
        is_off = self._recompute is None or bool(self._recompute.why_off)
        return self.checks.is_due(step) if is_off else self.checks.verifies(step)

    def _compare(self, one: _Open, *, is_written: bool = True) -> None:
        """Look at the digests of a step; if its replicas agree, its state may be known to be good now."""
        if one.digests is not None:
            like, shardings = self._replicated
            found = compare_replicas(one.digests, like, self.session.fabric, shardings=shardings)
            self._act_on(digest_observations(found, one.step))
        if is_written and self.verifies(one.step):
            self.keeper.verify(one.step)
            self.session.timeline.note("verified", step=one.step)

    def _act_on(self, observations: Sequence[Observation]) -> None:
        """Report what was found, and raise: the job cannot go on as it is."""
        if not observations:
            return
        verified = self.keeper.verified
        hosts = self.session.hosts
        fabric = self.session.fabric
        mesh = fabric.chips.mesh if isinstance(fabric, TiledFabric) else fabric.mesh
        entries = report(
            self.folder,
            observations,
            attempt=self.keeper.attempt,
            verified=verified,
            hosts=hosts,
            n_chips=mesh.size,
        )
        for observation in observations:
            suspects = [str(one) for one in observation.suspects]
            self.session.timeline.note(
                "observation", step=observation.step, kind=observation.kind, suspects=suspects, why=observation.evidence
            )
        for entry in entries:
            note_quarantined(self.session.timeline, entry, hosts)
        raise FoundError(_describe(observations, entries, verified))

    def _digests(self, params: Tree, state: Tree) -> Tree:
        """Start to digest the state, and return the digests to be."""
        program = self._compiled.program
        _, shardings = self._replicated
        tree = self._compared(params, state)
        if self._digest is None:
            fabric = self.session.fabric
            with self.session.timeline.timed("compile"):
                jitted = fabric.jit(partial(replica_digests, fabric=fabric, shardings=shardings))
                self._digest = jitted.lower(tree, program).compile()
        return self._digest(tree, program)

    def _compared(self, params: Tree, state: Tree) -> Tree:
        """Return the part of the state that every chip, or every tile, has a copy of."""
        is_whole = not self._compiled.program.is_sharded and not isinstance(self.session.fabric, TiledFabric)
        return {"params": params, "state": state} if is_whole else {"params": params}

    @property
    def _replicated(self) -> tuple[Tree, Tree]:
        """The shapes of what is compared, and how it is split inside tiles."""
        layout = self._compiled.layout
        like = self._compared(*jax.tree.unflatten(layout.structure, layout.leaves))
        shardings = None if self._model.shardings is None else {"params": self._model.shardings}
        return like, shardings


def check_possible(checks: Checks, model: Model, fabric: Fabric) -> None:
    """Raise `ParameterError` for checks that this way of training has no use for: before it starts, not at step 200."""
    if checks.recompute_every:
        model.check_recomputable()
        check_recomputable(fabric)
    if model.is_fsdp and checks.digests_every:
        raise ParameterError(
            "With update='fsdp' each chip holds other parameters, so that there are no replicas to compare. Leave this "
            "check out: Checks(digests_every=0, …)."
        )


def _describe(observations: Sequence[Observation], entries: Sequence[Quarantined], verified: int) -> str:
    first = observations[0]
    suspects = " or ".join(f"{one.kind} {one}".replace("host host", "host") for one in first.suspects[:4])
    more = f" (and {len(observations) - 1} more)" if len(observations) > 1 else ""
    seen = f"Step {first.step}: {suspects} is suspected ({first.kind}): {first.evidence}{more}."
    if not entries:
        return f"{seen} One observation is not enough to leave it out: the job goes back to step {verified}."
    named = ", ".join(str(entry.suspect) for entry in entries)
    return f"{seen} {named} is in quarantine now; the job goes back to step {verified}, and on without it."
