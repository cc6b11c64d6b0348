"""Gradients must be reproducible: now and then chips compute a part of each other's gradients, and compare the bits.

A check comes before a step, with its parameters and its batch. Each device computes the gradient of half of its own
examples, and that of the same half of a partner's, by the same compiled program; the digests of both must be equal.
Which half it is, and which chip is the partner, changes from check to check. Partners' examples come from the feed, and
digests are compared by the hosts. Nothing goes over the mesh, so a chip that lies in transfers cannot confuse the
check, any two chips can be partners, and all processes conclude the same.

Where two disagree, up to three more chips compute each part, and all compute their own again. The majority is right;
who differs from it is named (`votes`). Between two chips there is no majority: both are suspects.

**What is promised.** Let p be the probability that a chip's gradient of half of its examples comes out wrong. In a
check each chip computes two, and each is compared with that of a chip that is right, so that a wrong one is caught with
certainty, up to 2⁻³² for the digests. The check catches the chip with the probability

    q = 1 − (1 − p)²,

and n steps, with a check every k, with 1 − (1 − q)^⌊n/k⌋. A chip that is always wrong is caught by the first check
after that began: within k steps. If faults strike examples independently, and P is the probability that the gradient of
all of a device's R examples is wrong, then p = 1 − (1 − P)^(⌈R/2⌉/R), and for an even R, q = P: a check finds a fault
as often as a step suffers from one. Half of the examples is enough, because each chip is tested and tester.

Missed are: many chips with the same wrong bits; faults between checks that have gone again; what only the program of
the train step suffers from, since this one is a program of its own. Wrong sums and updates are for the other checks.

**What it costs.** The gradients of one whole batch per check, so about 1/k of the computing; reading half a batch; and
two digests of the parameters and the gradients, which count where a chip has few examples.

**What it needs.** A deterministic program: the same on all chips, and the same each time. The first check computes each
device's own part twice. Where chips do not reproduce themselves, or more than a third of them are suspects at the first
check, that is the program and not the chips. Then there are no observations, a warning says what to do, and no more
checks.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.checks.digests import digest_leaves, digest_tree
from meshmend.jax.data.feed import Batch
from meshmend.jax.data.policy import Position
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.quarantine.observation import Observation
from meshmend.quarantine.suspect import Suspect
from meshmend.quarantine.votes import Owner, Vote, VoteResult, count_votes, is_agreed

ARBITERS = 3
"""Chips that are asked besides two that disagree: with five, two that are wrong in the same way are outvoted."""
OWN = 0
"""Shift of a device that computes its own part."""


class Part(NamedTuple):
    """Examples of one device: half of its part of a batch."""

    data: Tree
    weights: Annotated[jax.Array, "float32[H]"]
    """0 for padding, which must have no influence."""
    offsets: Annotated[jax.Array, "uint32[H, 2]"]
    """Epoch of each example and its offset in it, which do not depend on the chips: for random keys."""


Gradients = Callable[[Tree, Tree, Part], Tree]
"""From parameters, the model's state (None without one) and a part to a pytree of arrays, without collectives."""


class Recompute:
    """Compares gradients between chips every so many steps. Every process makes the same one, and the same calls.

    `gradients(params, model_state, part)` is what one device computes of its examples, without collectives: the
    gradients, and what else should be the same, such as the loss. `exchange` sends a fact to all processes and returns
    those of all. `every` is the number of steps from check to check. `seed` is that of the partners and halves.
    """

    def __init__(
        self,
        gradients: Gradients,
        fabric: Fabric,
        exchange: Callable[[Any], list[Any]],
        *,
        every: int,
        seed: int = 0,
    ) -> None:
        check_recomputable(fabric)
        self.gradients = gradients
        self.fabric = fabric
        self.every = every
        self.seed = seed
        self.why_off = "" if fabric.mesh.n_chips > 1 else "One chip alone has no partner to compare gradients with."
        """Why there are no checks any more; empty while there are."""
        self._exchange = exchange
        self._cores = int(fabric.jax_mesh.size) // fabric.mesh.n_chips
        self._owners = [
            Owner(Suspect.chip(fabric.mesh.chip(number // self._cores)), int(device.process_index))
            for number, device in enumerate(fabric.jax_mesh.devices.flat)
        ]
        self._is_first = True
        self._choose: Callable[..., Tree] | None = None
        self._run: Callable[..., Tree] | None = None

    def compile(self, params: Tree, model_state: Tree, batch: Batch) -> None:
        """Compile the check for parameters, a model state (None without one) and batches of these shapes.

        Without it, the first check does so. The parameters and the state may be on any device or on none.
        """
        fabric, axes = self.fabric, PartitionSpec(self.fabric.axes)
        by_device, everywhere = fabric.sharding(fabric.axes), fabric.sharding()
        half = -(-self._n_rows(batch) // 2)

        def shapes(tree: Tree, sharding: Any, rows: int | None = None) -> Tree:
            def shape(leaf: Any) -> jax.ShapeDtypeStruct:
                dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
                first = np.shape(leaf) if rows is None else (rows * len(self._owners), *np.shape(leaf)[1:])
                return jax.ShapeDtypeStruct(first, dtype, sharding=sharding)

            return jax.tree.map(shape, tree)

        def choose(batch: Tree, rows: jax.Array) -> Tree:
            return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), batch)

        def run(params: Tree, model_state: Tree, part: Part) -> jax.Array:
            found = digest_leaves(self.gradients(params, model_state, part))
            inputs = jnp.stack([digest_tree((params, model_state)), digest_tree(_without_padding(part))])
            return jnp.concatenate([inputs, found])[None]

        def mapped(function: Callable[..., Tree], *specs: PartitionSpec) -> jax.stages.Wrapped:
            return fabric.jit(
                jax.shard_map(function, mesh=fabric.jax_mesh, in_specs=specs, out_specs=axes, check_vma=False)
            )

        whole = (batch.data, batch.weights)
        rows = jax.ShapeDtypeStruct((half,), np.int32, sharding=everywhere)
        offsets: Any = jax.ShapeDtypeStruct((half * len(self._owners), 2), np.uint32, sharding=by_device)
        data, weights = shapes(whole, by_device, half)
        part = Part(data, weights, offsets)
        replicated = PartitionSpec()
        self._choose = mapped(choose, axes, replicated).lower(shapes(whole, by_device), rows).compile()
        self._run = (
            mapped(run, replicated, replicated, axes)
            .lower(shapes(params, everywhere), shapes(model_state, everywhere), part)
            .compile()
        )

    def check(self, step: int, params: Tree, model_state: Tree, batch: Batch) -> tuple[Observation, ...]:
        """Compare gradients of the step's batch, before the step; return what speaks against chips.

        `params` and `model_state` (None without one) are on the devices, a copy on each. `batch` is the feed's own.
        An empty result is how it should be. Every process returns the same observations.
        """
        if self.why_off:
            return ()
        if self._run is None:
            self.compile(params, model_state, batch)
        number = max(1, step // self.every) - 1
        partner, *arbiters = self._shifts(number)
        parts = _Parts(self, batch, np.random.default_rng([self.seed, number, 1]))
        first = [OWN, partner, OWN] if self._is_first else [OWN, partner]
        votes = self._ask(first, params, model_state, parts)
        was_first, self._is_first = self._is_first, False
        if is_agreed(votes):
            return ()
        # Who finds something else the second time is unsteady; the first check has asked for that already.
        more = [] if was_first and arbiters else [OWN]
        votes += self._ask([*arbiters, *more], params, model_state, parts)
        return self._conclude(count_votes(votes, self._owners, step), was_first=was_first)

    def _ask(self, shifts: Sequence[int], params: Tree, model_state: Tree, parts: _Parts) -> list[Vote]:
        """Have each device compute the part that is so many chips further; return what all processes found."""
        assert self._choose is not None and self._run is not None  # noqa: S101, PT018  # compiled in `check`
        # All are dispatched before any is waited for: the host reads while devices compute.
        found = [(shift, self._run(params, model_state, parts.of(shift, self._choose))) for shift in shifts]
        mine = []
        for shift, digests in found:
            for shard in digests.addressable_shards:
                device = int(shard.index[0].start or 0)
                state, samples, *rest = np.asarray(shard.data)[0].tolist()
                gradient = int(hashlib.blake2b(np.array(rest, np.uint32).tobytes(), digest_size=8).hexdigest(), 16)
                mine.append(Vote(device, self.partner(device, shift), state, samples, gradient))
        return [Vote(*one) for process in self._exchange(mine) for one in process]

    def partner(self, device: int, shift: int) -> int:
        """Return the device that is so many chips further: the same core of another chip."""
        chip, core = divmod(device, self._cores)
        return (chip + shift) % self.fabric.mesh.n_chips * self._cores + core

    def _shifts(self, number: int) -> list[int]:
        """Return the shifts of a check's partner and of its arbiters, all different.

        Partners come in a random order, each once before any comes again. No two chips are each other's partners (if
        there are more than two): if both had the same wrong bits, that check would not see either.
        """
        n_chips = self.fabric.mesh.n_chips
        mutual = [n_chips // 2] if n_chips > 2 and n_chips % 2 == 0 else []
        others = [shift for shift in range(1, n_chips) if shift not in mutual]
        lap, offset = divmod(number, len(others))
        order: list[int] = np.random.default_rng([self.seed, lap]).permutation(others).tolist()
        return [*order[offset:], *order[:offset], *mutual][: 1 + ARBITERS]

    def _n_rows(self, batch: Batch) -> int:
        return len(batch.weights) // len(self._owners)

    def _conclude(self, result: VoteResult, *, was_first: bool) -> tuple[Observation, ...]:
        """Return the observations, unless it is the program or the dataset that is not deterministic."""
        n_chips = self.fabric.mesh.n_chips
        n_unsteady, n_suspects = len(result.unsteady), len(result.suspects)
        are_many = was_first and n_suspects > 2 and 3 * n_suspects > n_chips
        if n_unsteady > 1 and 3 * n_unsteady > n_chips:
            why = (
                f"{n_unsteady} of {n_chips} chips computed other gradients from the same examples the second time. The "
                "loss is not deterministic: it calls the host, or uses operations whose order of additions varies (on "
                "GPUs scatters and some convolutions: set XLA_FLAGS=--xla_gpu_deterministic_ops=true)."
            )
        elif are_many and result.has_other_samples:
            why = (
                "The samples of the batch were others when they were read again. A dataset must give the same sample "
                "for the same index: make random transformations with grain's random_map, which depends on the epoch "
                "and the record alone."
            )
        elif are_many:
            why = (
                f"{n_suspects} of {n_chips} chips computed other gradients than others from the same examples, each of "
                "them the same each time. The loss depends on the chip: by lax.axis_index, or because chips are of "
                "different kinds."
            )
        else:
            return result.observations
        self.why_off = why
        warnings.warn(
            f"Gradients cannot be compared between chips, so chips that compute wrong ones will not be found. {why} Or "
            "leave this check out, with recompute_every=0.",
            RuntimeWarning,
            stacklevel=3,
        )
        return ()


class _Parts:
    """The parts of one step's batch: those of this process's devices, and those of their partners."""

    def __init__(self, recompute: Recompute, batch: Batch, rng: np.random.Generator) -> None:
        self._fabric = recompute.fabric
        self._partner = recompute.partner
        self._batch = batch
        self._split = batch.feed.split(self._fabric)
        # A short batch at the end of an epoch may have no examples for some devices. Those of the first one do as well.
        self._is_short = self._split.count(batch.at) < self._split.n_devices
        self._at = Position(batch.at.epoch) if self._is_short else batch.at
        self._rows = choose_rows(self._split.rows, self._split.count(self._at) / self._split.n_devices, rng)
        self._own: Part | None = None
        here = jax.process_index()
        devices = self._fabric.jax_mesh.devices.flat
        self._mine = [number for number, device in enumerate(devices) if device.process_index == here]

    def of(self, shift: int, choose: Callable[..., Tree]) -> Part:
        """Return the part that each device computes: its own from the devices, as the step gets it, or a partner's."""
        if shift == OWN and self._own is not None:
            return self._own
        targets = [self._partner(device, shift) for device in self._mine]
        table = self._split.epochs_and_offsets(self._at, targets)
        offsets = self._spread(table[:, self._rows].reshape(-1, 2))
        if shift == OWN and not self._is_short:
            everywhere = self._fabric.sharding()
            rows = jax.make_array_from_callback(self._rows.shape, everywhere, lambda index: self._rows[index])
            data, weights = choose((self._batch.data, self._batch.weights), rows)
        else:
            found = self._batch.feed.read(self._fabric, self._at, targets, self._rows.tolist())
            data, weights = jax.tree.map(self._spread, found)
        part = Part(data, weights, offsets)
        if shift == OWN:
            self._own = part
        return part

    def _spread(self, local: NDArray[np.generic]) -> jax.Array:
        """Make one array over all devices of the rows of this process's own."""
        n_rows, fabric = len(self._rows), self._fabric

        def part(index: Any) -> NDArray[np.generic]:
            first = self._mine.index((index[0].start or 0) // n_rows) * n_rows
            return local[first : first + n_rows]

        shape = (n_rows * int(fabric.jax_mesh.size), *local.shape[1:])
        return jax.make_array_from_callback(shape, fabric.sharding(fabric.axes), part)


def choose_rows(n_rows: int, used: float, rng: np.random.Generator) -> NDArray[np.int32]:
    """Return half of the rows of a device, drawn from the first `used`: a last one that is a fraction is not in use
    on all devices, so that it is never chosen alone. Padding fills up what is missing.
    """
    half = -(-n_rows // 2)
    order = rng.permutation(math.ceil(used) if half > 1 else max(1, math.floor(used)))
    chosen = np.concatenate([order, np.arange(len(order), n_rows)])[:half]
    return np.sort(chosen).astype(np.int32)


def check_recomputable(fabric: Fabric) -> None:
    """Raise `ParameterError` where no single chip can repeat what another has computed."""
    if isinstance(fabric, TiledFabric):
        raise ParameterError(
            f"Gradients cannot be recomputed on {fabric!r}: the chips of a tile compute them together, so that no "
            "single chip could repeat another's part. Leave this check out for a job with tiles; digests of replicas "
            "compare the parameters of tiles."
        )


def _without_padding(part: Part) -> Part:
    """Return a part with zeros for the data of padding, which repeats any sample."""

    def zeroed(leaf: jax.Array) -> jax.Array:
        used = (part.weights != 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(used, leaf, jnp.zeros_like(leaf))

    return Part(jax.tree.map(zeroed, part.data), part.weights, part.offsets)
