"""What a job asks of a loss: that an example's value is its own, and, while it trains, that it is a number.

A job spreads a batch over whatever chips it has, so an example has other neighbours after each failure. Where its loss
depends on them, as with batch normalisation, every number of chips trains something else, and nothing shows it. So a
new job calls the loss with some examples, and again with the same examples beside others: in the same compiled
program, at the same places, so that all that an example's own loss may differ by is 0. A job that goes on does not
check again.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.jax.data.feed import Feed
from meshmend.jax.data.policy import Position
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.engine.cpu_order import in_order
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.job.model import Model

LOGGER = logging.getLogger(__name__)
EXAMPLES = 4
"""Examples that a device gets: two that are compared, and two others."""
SIZE_TOLERANCE = 0.25
"""By how much of itself a loss may differ between batches of n and n/2 examples. XLA may sum in another order there,
and what it rounds to bfloat16 on the way may differ by percents; a loss that is divided by n changes by a half."""


def check_independence(model: Model, feed: Feed, fabric: Fabric, params: Tree, program: Program) -> None:
    """Raise `ParameterError` if an example's loss, or its row of a new model state, depends on other examples.

    Every process makes the same call, with the same first examples of the dataset. Not checked: batches of one
    example; a loss with side effects, which would be seen; one that gives other bits when it is called again.
    """
    split = feed.split(fabric)
    n_rows = EXAMPLES
    if isinstance(fabric, TiledFabric):  # a model may split the examples inside a tile, so they must divide as a step's
        n_rows = max(n_rows, -(-split.rows // model.microbatches))
    examples = _first_examples(model, feed, fabric, n_rows)
    n_taken = len(jax.tree.leaves(examples)[0])
    if n_taken < 2:
        return
    kept = n_taken // 2
    batch = _spread(examples, np.arange(n_rows) % n_taken, fabric)
    half = _spread(examples, np.arange(n_rows // 2) % n_taken, fabric)
    beside_others = _spread(examples, np.arange(n_rows) % kept, fabric)
    found = None
    for smaller in (half, None):  # what a model splits inside a tile may not be halved
        try:
            found = _outcomes(model, fabric, params, program, batch, beside_others, smaller)
        except Exception as error:  # a loss that cannot be called so is the step's to refuse, if at all
            LOGGER.debug("The loss was not called with other examples: %s", error)
        else:
            break
    if found is None or not _same_bits(found.first, found.again):
        return
    (values, state), (other_values, other_state) = found.first, found.beside_others
    names = ["An example's loss"] + [
        f"An example's row of model_state{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    pairs = zip([values, *jax.tree.leaves(state)], [other_values, *jax.tree.leaves(other_state)], strict=True)
    for name, (rows, others) in zip(names, pairs, strict=True):
        if jnp.issubdtype(rows.dtype, jnp.inexact):  # whole numbers of a state depend on no example (`ModelState`)
            gap = _first_gap(rows[:kept], others[:kept], _root_epsilon(rows))
            if gap is not None:
                raise _refusal(name, "when other examples are beside it in the batch", gap)
    if found.of_half is not None:
        least = min(kept, n_rows // 2)
        gap = _first_gap(values[:least], found.of_half[:least], SIZE_TOLERANCE, floor=_root_epsilon(values))
        if gap is not None:
            raise _refusal(names[0], f"in a batch of {n_rows // 2} instead of {n_rows} examples", gap)


class _Outcomes(NamedTuple):
    """Values and new model states, as one of this process's devices has them."""

    first: tuple[NDArray[np.generic], Tree]
    again: tuple[NDArray[np.generic], Tree]
    """Of the same batch: where the bits are others, nothing can be compared."""
    beside_others: tuple[NDArray[np.generic], Tree]
    of_half: NDArray[np.generic] | None
    """Values alone, of half a batch; None where none was given."""


def _first_examples(model: Model, feed: Feed, fabric: Fabric, n_wanted: int) -> Tree:
    """Return the first examples of the first epoch, at most those of one batch, with what their keys are made of."""
    split, start = feed.split(fabric), Position()
    n_taken = min(n_wanted, split.count(start))
    devices = range(min(n_taken, split.n_devices))
    rows = range(-(-n_taken // len(devices)))
    data, weights = feed.read(fabric, start, devices, rows)
    offsets = split.epochs_and_offsets(start, devices)[:, list(rows)].reshape(-1, 2)
    used = np.flatnonzero(weights)[:n_taken]
    return jax.tree.map(lambda leaf: leaf[used], data if model.rng is None else (data, offsets))


def _spread(examples: Tree, rows: NDArray[np.int64], fabric: Fabric) -> Tree:
    """Return a batch of which each device, or tile, has these examples."""
    sharding = fabric.sharding(fabric.batch_axes)

    def spread(leaf: NDArray[np.generic]) -> jax.Array:
        part = leaf[rows]
        shape = (fabric.n_parts * len(part), *part.shape[1:])
        return jax.make_array_from_callback(shape, sharding, lambda _: part, dtype=part.dtype)

    return jax.tree.map(spread, examples)


def _outcomes(
    model: Model, fabric: Fabric, params: Tree, program: Program, batch: Tree, beside_others: Tree, half: Tree
) -> _Outcomes | None:
    """Call the loss, in one program; return None if it has side effects."""
    values = model.training(fabric).values
    assert values is not None  # noqa: S101  # each of a job's steps has it

    def check(params: Tree, batch: Tree, half: Tree, program: Program) -> Tree:
        of_half = None if half is None else model.values_and_state(values(params, half, program))[0]
        return model.values_and_state(values(params, batch, program)), of_half

    traced = fabric.jit(in_order(check, fabric)).trace(params, batch, half, program)
    if traced.jaxpr.effects:
        return None
    compiled = traced.lower().compile()

    def run(batch: Tree) -> Tree:
        found = compiled(params, batch, half, program)
        return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data), found)

    (first, of_half), (again, _), (beside, _) = run(batch), run(batch), run(beside_others)
    return _Outcomes(first, again, beside, of_half)


def _same_bits(one: Tree, other: Tree) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


def _root_epsilon(values: NDArray[np.generic]) -> float:
    """Half of the digits that a dtype has: a sum over all examples that cancels again may cost as many."""
    return math.sqrt(float(jnp.finfo(values.dtype).eps))


def _first_gap(
    one: NDArray[np.generic], other: NDArray[np.generic], tolerance: float, *, floor: float = 0.0
) -> tuple[float, float] | None:
    """Return the first two numbers that differ by more than this share of the largest; NaN is like NaN.

    None, too, where the largest is below `floor`: what is left of numbers that cancel is their rounding.
    """
    a, b = (values.astype(np.float64).ravel() for values in (one, other))
    sizes = np.abs(np.concatenate([a, b]))
    most = float(np.max(sizes, initial=0, where=np.isfinite(sizes)))
    with np.errstate(invalid="ignore"):  # infinite - infinite
        near = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tolerance * most)
    (far,) = np.nonzero(~near)
    return (float(a[far[0]]), float(b[far[0]])) if len(far) and most >= floor else None


def _refusal(what: str, when: str, gap: tuple[float, float]) -> ParameterError:
    return ParameterError(
        f"{what} depends on the other examples of its batch: it is {gap[0]:.6g}, and {gap[1]:.6g} {when}. How a batch "
        "is spread changes with the number of chips, so that after a failure the job would train something else. Batch "
        "normalisation has this effect, and so has a division by the size of the batch. Normalise each example alone, "
        "as nnx.LayerNorm and nnx.GroupNorm do, or with running statistics in model_state (docs/loss.md, "
        '"Batch statistics"). If it is intended, as for experts of limited capacity, give train(…, independent=False).'
    )


class LossWatch:
    """Says once that the loss is no longer a number."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._is_said = False

    def see(self, step: int, loss: float) -> None:
        """Look at the loss of a step; they come in order."""
        if math.isfinite(loss):
            self._last = step, loss
        elif not self._is_said:
            self._is_said = True
            before = "" if self._last is None else f" It was {self._last[1]:.6g} at step {self._last[0]}."
            LOGGER.warning(
                "The loss is %s at step %d.%s The job trains on: stop it if that is not meant. A lower learning rate, "
                "or mmj.clip_by_global_norm before the optimizer, keeps steps small; a new job may begin with a "
                "checkpoint from before that step (Job(start_from=…)).",
                "NaN" if math.isnan(loss) else loss,
                step,
                before,
            )
