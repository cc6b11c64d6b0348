"""What a chip under torchft does about wrong numbers: it checks, reports, leaves if it is the suspect, or goes back.

All members gather the same digests, so they come to the same signs, and each of them goes back to the last verified
state by itself. Whoever did not get all digests, because a chip died meanwhile, has an error instead: the step is not
committed, and in the next quorum either the check is repeated or the members see that some of them have gone back
(`membership`), and the others follow. Nobody can be further: to commit a step takes the gradients of all members, and
whoever has an error sends none.

A chip that comes back receives the verified state of the others together with the current one, so every member has it.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchft

from meshmend.errors import Coordinate, DisagreementError, MeshmendError, ParameterError, QuarantineError
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import Timeline
from meshmend.quarantine import Sign, SignBook, report, untrusted
from meshmend.torch.checks import Found, TorchChecks, weigh_gradients
from meshmend.torch.digests import compare, digest, pieces
from meshmend.torch.membership import UndoneError
from meshmend.torch.process_group import MeshProcessGroup
from meshmend.torch.snapshot import Snapshot, StateFns
from meshmend.torch.watchlist import Watchlist

KEY = "meshmend"
"""The part of a state that is sent to chips that come back in which the verified state is."""
WORD = 16
"""Bytes of the digest of a gradient."""

Gradients = Callable[[Any], Any]


class StateGuard:
    """The checks of one chip, and the state that it goes back to."""

    def __init__(
        self,
        checks: TorchChecks,
        manager: torchft.Manager,
        rewind: Callable[[dict[str, int]], None],
        group: MeshProcessGroup,
        parts: StateFns,
        watchlist: Watchlist,
        timeline: Timeline,
        hosts: Hosts,
    ) -> None:
        self._checks, self._manager, self._rewind, self._group, self._parts = checks, manager, rewind, group, parts
        self._watchlist, self._timeline, self._hosts = watchlist, timeline, hosts
        self._kept: Snapshot | None = None
        self._undone = 0
        self._has_received = False
        """Whether the state came from another chip since it was last found to be that of the majority."""
        self._recomputed = -1
        """The step whose gradients were recomputed last."""
        self._is_repeatable = True
        self._n_open = 0
        """Checks in a row in which no majority agreed."""
        self._book = SignBook(watchlist.folder)
        self._book_size = -1
        self._settled: set[tuple[int, int]] = set(untrusted(self._book))
        """What the book calls untrusted, and this chip has gone back from or never had."""
        group.terms = f", checks every {checks.digests_every} and {checks.recompute_every} steps"
        group.terms += ", of stragglers" * checks.stragglers
        group.is_watched = checks.stragglers

    @property
    def verified(self) -> int:
        """The last step whose state all due checks have found to be good."""
        return 0 if self._kept is None else self._kept.step

    def send(self) -> dict[str, Any]:
        """Return what a chip that comes back needs of this."""
        kept = None if self._kept is None else {"torchft": self._kept.torchft, "parts": self._kept.parts}
        return {"kept": kept, "undone": self._undone, "n_open": self._n_open}

    def receive(self, sent: Mapping[str, Any]) -> None:
        """Take over what another chip has sent."""
        self._kept = None if sent["kept"] is None else Snapshot(**sent["kept"])
        self._undone, self._n_open = sent["undone"], sent["n_open"]
        self._has_received = self._kept is not None

    def before_quorum(self) -> None:
        """Go back if another process of this job has seen a sign of which this one does not know."""
        size = self._book.path.stat().st_size if self._book.path.exists() else 0
        if size != self._book_size:
            self._book_size = size
            new = set(untrusted(self._book)) - self._settled
            self._settled |= new
            formed_ms, step = self._group.timings.formed_ms, self._manager.current_step()
            if any(attempt >= formed_ms and step > verified for attempt, verified in new):
                self._go_back(self._undone + 1)

    def after_quorum(self) -> None:
        """Compare the state with that of the others, if that is due after this step."""
        problem = self._manager.errored()
        if problem is not None:
            error = problem.original_exception
            if isinstance(error, UndoneError) and error.undone > self._undone:
                self._go_back(error.undone)
            return
        step = self._manager.current_step()
        if self._checks.stragglers and not self._guarded(lambda: self._watch(step)):
            return
        if self._checks.compares(step) and not self._compare(step):
            return
        if self._kept is None or (self._checks.compares(step) and not self._checks.recomputes(step)):
            self._keep()
        self._group.undone = self._undone

    def recompute(self, gradients: Gradients, batch: Any) -> None:
        """Let a partner compute the gradient of this chip's samples, if that is due at this step."""
        step, n_chips = self._manager.current_step(), self._group.mesh.n_chips
        if not self._checks.recomputes(step) or self._manager.errored() is not None:
            return
        self._recomputed = step
        has_others = n_chips > 1 and self._is_repeatable
        if not has_others or self._guarded(lambda: self._recompute(gradients, batch, step, n_chips)):
            self._keep()

    def check_recomputed(self) -> None:
        """Raise if gradients were to be recomputed in this step, and were not."""
        step = self._manager.current_step()
        if self._checks.recomputes(step) and self._recomputed != step and self._manager.errored() is None:
            raise ParameterError(
                f"Gradients are to be recomputed at every {self._checks.recompute_every} steps, but step {step} ends "
                "without it. Call manager.recompute(gradients, batch) in each step, before the forward pass; or set "
                "recompute_every=0."
            )

    def _watch(self, step: int) -> bool:
        """Note who is slow, by the times of the steps so far, and leave if it is this chip. Nothing is undone."""
        signs = self._group.end_times(step)
        if signs:
            attempt = self._group.timings.formed_ms
            report(self._watchlist.folder, signs, attempt=attempt, verified=self.verified, hosts=self._hosts)
            self._watchlist.look()
            if (entry := self._watchlist.own) is not None:
                raise self._watchlist.refusal(entry)
        return True

    def _compare(self, step: int) -> bool:
        """Compare digests of the state; return whether all is well."""
        replicated = {key: save() for key, (_, save) in self._parts.items()}
        found = [
            (name, digest(piece))
            for name, piece in pieces(replicated.pop("default", {}) | replicated)
            if not name.startswith(self._checks.own)
        ]
        names = [name for name, _ in found]
        layout = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
        word = b"".join(value.to_bytes(8, "little") for _, value in found)
        word = bytes([self._has_received, self._is_repeatable]) + word

        def check() -> bool:
            told = self._group.gather(f"digests of the state after step {step}, tensors {layout}", word)
            signs = compare({chip: (bool(said[0]), said[2:]) for chip, said in told.items()}, names, step)
            # One that has just joined does not know that gradients are not recomputed any more.
            self._is_repeatable = all(said[1] for said in told.values())
            if signs:
                self._act_on(signs)
            return not signs

        is_well = self._guarded(check)
        if is_well:
            self._has_received = False
        return is_well

    def _recompute(self, gradients: Gradients, batch: Any, step: int, n_chips: int) -> bool:
        distance, third = self._checks.distances(step, n_chips)
        own = _packed(batch)
        partners = self._group.pass_on(own, distance)
        first = [self._gradient(gradients, of, step) for of in (own, partners)]
        opinions = self._opinions(step, 1, first)
        found: Found = defaultdict(lambda: defaultdict(set))
        for rank, word in enumerate(opinions.values()):
            for part, value in zip((rank, (rank - distance) % n_chips), word, strict=True):
                found[part][rank].add(value)
        if all(len(set().union(*values.values())) == 1 for values in found.values()):
            return True
        batches = [own, partners] + ([self._group.pass_on(own, third)] if n_chips > 2 else [])
        again = self._opinions(step, 2, [self._gradient(gradients, of, step) for of in batches])
        for rank, word in enumerate(again.values()):
            parts = (rank, (rank - distance) % n_chips, (rank - third) % n_chips)
            for part, value in zip(parts, word, strict=False):
                found[part][rank].add(value)
        ruling = weigh_gradients(found, list(opinions), step)
        if ruling.unrepeatable:
            self._is_repeatable = False
            text = f"Gradients are not recomputed any more: {ruling.unrepeatable}, so the program is not deterministic."
            warnings.warn(f"{text} torch.use_deterministic_algorithms(True) names what is not.", stacklevel=2)
            self._timeline.note("unrepeatable", step=step, why=text)
        elif ruling.signs:
            self._act_on(list(ruling.signs))
            return False
        return True

    def _opinions(self, step: int, number: int, digests: list[bytes]) -> dict[Coordinate, list[bytes]]:
        told = self._group.gather(f"gradients {number} of step {step}", b"".join(digests))
        return {chip: [word[i : i + WORD] for i in range(0, len(word), WORD)] for chip, word in told.items()}

    def _gradient(self, gradients: Gradients, packed: bytes, step: int) -> bytes:
        """Return the digest of the gradient of some samples. Random numbers are the same for whoever computes it."""
        with torch.random.fork_rng():
            torch.manual_seed(step)
            found = gradients(torch.load(io.BytesIO(packed), weights_only=True))
        words = [f"{name}: {digest(piece)}" for name, piece in pieces(found)]
        if not words:
            raise ParameterError("manager.recompute needs gradients(batch) to return tensors, and it returned none.")
        return hashlib.blake2b("\n".join(words).encode(), digest_size=WORD).digest()

    def _guarded(self, check: Callable[[], bool]) -> bool:
        """Return what a check says; if it failed because a chip is lost, the step fails with it."""
        try:
            return check()
        except (DisagreementError, ParameterError, QuarantineError):
            raise
        except MeshmendError as error:
            self._manager.report_error(error)
            return False

    def _act_on(self, signs: list[Sign]) -> None:
        """Report signs, leave if this chip is the suspect, and otherwise go back."""
        attempt, verified = self._group.timings.formed_ms, self.verified
        self._n_open = self._n_open + 1 if all(len(sign.suspects) > 1 for sign in signs) else 0
        if self._kept is None or self._n_open > 1:
            when = "before the first step" if self._kept is None else "for the second time"
            raise QuarantineError(
                f"The chips do not agree {when}: {signs[0].evidence}. So nobody knows whose state is right. If it is "
                "state that each chip has for itself, name it in Checks(own=…)."
            )
        report(self._watchlist.folder, signs, attempt=attempt, verified=verified, hosts=self._hosts)
        self._settled.add((attempt, verified))
        self._watchlist.look()
        if (entry := self._watchlist.own) is not None:
            raise self._watchlist.refusal(entry)
        self._go_back(self._undone + 1)
        evidence = "; ".join(f"{' or '.join(map(str, sign.suspects))}: {sign.evidence}" for sign in signs[:3])
        self._manager.report_error(
            MeshmendError(f"All chips go back to the state of step {verified}, the last verified one: {evidence}")
        )

    def _go_back(self, undone: int) -> None:
        """Put the verified state back into place; torchft counts on from its step."""
        self._undone = self._group.undone = undone
        if self._kept is not None:
            self._kept.put_back(self._parts)
            self._rewind(self._kept.torchft)

    def _keep(self) -> None:
        if self._kept is not None and self._manager.current_step() > self._kept.step:
            self._n_open = 0
        self._kept = Snapshot.take(self._manager.state_dict(), self._parts)


def _packed(batch: Any) -> bytes:
    packed = io.BytesIO()
    torch.save(batch, packed)
    return packed.getvalue()
