"""A new job refuses a loss in which examples depend on each other, and no other; and it says when a loss is NaN."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshmend.jax as mmj
from jax_engine.job.job_cases import BATCH, HOLED, ONE, PARAMS, WHOLE, alone, job, loss, train
from meshmend.errors import ParameterError
from meshmend.jax.job.loss_checks import LossWatch, check_independence
from rows import others_slow

Loss = Callable[..., Any]
REFUSED = r"An example's loss depends on the other examples of its batch: it is \S+, and \S+ when other examples"
STATE = {"mean": np.zeros(5, np.float32)}


def normalised(hidden: Any, over: int) -> Any:
    """Normalise over examples (0), as batch normalisation does, or over an example's own features (1)."""
    mean = hidden.mean(axis=over, keepdims=True)
    return (hidden - mean) / jnp.sqrt(((hidden - mean) ** 2).mean(axis=over, keepdims=True) + 1e-5)


def with_norm(over: int) -> Loss:
    def loss(params: Any, batch: Any) -> Any:
        return (jnp.tanh(normalised(batch["x"] @ params["w"], over)) @ params["out"] - batch["y"]) ** 2

    return loss


BATCH_NORM, LAYER_NORM = with_norm(0), with_norm(1)


def with_keys(loss: Loss) -> Loss:
    """Dropout of whole examples' inputs, by each example's own key."""

    def dropped(params: Any, batch: Any, keys: Any) -> Any:
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (6,)))(keys)
        return loss(params, batch | {"x": batch["x"] * keep})

    return dropped


def with_state(loss: Loss) -> Loss:
    def kept(params: Any, state: Any, batch: Any) -> Any:
        return loss(params, batch), {"mean": 0.9 * state["mean"] + 0.1 * batch["x"] @ params["w"]}

    return kept


def with_aux(loss: Loss) -> Loss:
    """A metric of the whole batch harms nobody."""

    def measured(params: Any, batch: Any) -> Any:
        return loss(params, batch), {"largest": jnp.full(len(batch["y"]), jnp.max(batch["y"]))}

    return measured


FORMS: dict[str, tuple[Callable[[Loss], Loss], dict[str, Any]]] = {
    "plain": (lambda loss: loss, {}),
    "keys": (with_keys, {"rng": 0}),
    "state": (with_state, {"model_state": STATE}),
    "aux": (with_aux, {"has_aux": True}),
    "microbatches": (lambda loss: loss, {"microbatches": 2}),
    "microbatches of one": (lambda loss: loss, {"microbatches": BATCH}),
    "sharded": (lambda loss: loss, {"update": "sharded"}),
}


@pytest.mark.parametrize(
    ("form", "machine"),
    others_slow(
        [*((form, WHOLE) for form in FORMS), ("plain", HOLED)],
        quick=[("plain", HOLED), ("sharded", WHOLE)],
    ),
)
def test_batch_normalisation_is_refused_in_every_form_and_layer_normalisation_in_none(
    form: str, machine: str, tmp_path: Path
) -> None:
    make, options = FORMS[form]
    with pytest.raises(ParameterError, match=REFUSED):
        train(job(tmp_path / "batch", machine), 1, loss=make(BATCH_NORM), **options)
    losses, _, _ = train(job(tmp_path / "layer", machine), 1, loss=make(LAYER_NORM), **options)
    assert np.isfinite(losses[0])


def test_batch_normalisation_is_refused_per_tile(tmp_path: Path) -> None:
    params = {"w": np.ones((6, 8), np.float32) + np.arange(8, dtype=np.float32), "out": np.ones(8, np.float32)}
    shardings = {"w": P(None, "model"), "out": P("model")}
    for name, one, is_refused in (("batch", BATCH_NORM, True), ("layer", LAYER_NORM, False)):
        tiled = mmj.Job(tmp_path / name, BATCH, session=alone("4x4"), planner="weave", disk_every=0, tile="2x2")
        if is_refused:
            with pytest.raises(ParameterError, match=REFUSED):
                train(tiled, 1, loss=one, params=params, shardings=shardings)
        else:
            train(tiled, 1, loss=one, params=params, shardings=shardings)


def test_examples_that_a_model_splits_inside_a_tile_are_as_many_as_in_a_step(tmp_path: Path) -> None:
    """Eight examples per tile, in four parts: of four or of two JAX would refuse to make four parts."""
    tiled = mmj.Job(
        tmp_path / "shared", BATCH, session=alone("4x4"), planner="weave", disk_every=0, tile="2x2", inner={"data": 4}
    )

    def split(params: Any, batch: Any) -> Any:
        inside = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, P("data")), batch)
        return BATCH_NORM(params, inside)

    with jax.sharding.set_mesh(tiled.fabric.jax_mesh), pytest.raises(ParameterError, match=REFUSED):
        train(tiled, 1, loss=split)


def test_batch_normalisation_is_refused_where_parameters_are_sharded(tmp_path: Path) -> None:
    def make(fabric: mmj.Fabric, pair: mmj.Program) -> Any:
        return mmj.fsdp.shard_params(PARAMS, fabric, pair)

    def gathered(loss: Loss) -> Loss:
        return lambda params, batch, pair: loss(mmj.fsdp.gather_params(params, pair), batch)

    with pytest.raises(ParameterError, match=REFUSED):
        train(job(tmp_path / "batch", "2x3"), 1, loss=gathered(BATCH_NORM), params=make, update="fsdp")
    train(job(tmp_path / "layer", "2x3"), 1, loss=gathered(LAYER_NORM), params=make, update="fsdp")


def test_flax_layers(tmp_path: Path) -> None:
    """As a user writes them: nnx.BatchNorm in its training mode, and nnx.GroupNorm in its place."""
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install flax")

    def trained(name: str, make: Callable[[Any], Any]) -> list[float]:
        rngs = nnx.Rngs(0)
        graph, params, rest = nnx.split(
            nnx.Sequential(nnx.Linear(6, 8, rngs=rngs), make(rngs), nnx.Linear(8, 1, rngs=rngs)), nnx.Param, ...
        )

        def loss(params: Any, batch: Any) -> Any:
            model = nnx.merge(graph, params, jax.tree.map(jnp.asarray, rest))  # BatchNorm writes into its own state
            return (model(batch["x"])[:, 0] - batch["y"]) ** 2

        return train(job(tmp_path / name), 2, loss=loss, params=params)[0]

    with pytest.raises(ParameterError, match=REFUSED):
        trained("batch", lambda rngs: nnx.BatchNorm(8, rngs=rngs))
    assert np.isfinite(trained("group", lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs))).all()


def test_a_state_and_a_size_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    def of_batch(params: Any, state: Any, batch: Any) -> Any:
        hidden = batch["x"] @ params["w"]
        return loss(params, batch), {"mean": jnp.broadcast_to(hidden.var(axis=0), hidden.shape)}

    with pytest.raises(ParameterError, match=r"An example's row of model_state\['mean'\] depends on the other"):
        train(job(tmp_path / "state"), 1, loss=of_batch, model_state=STATE)
    message = r"An example's loss depends .* in a batch of 2 instead of 4 examples.* give train\(…, independent=False\)"
    with pytest.raises(ParameterError, match=message):
        train(job(tmp_path / "size"), 1, loss=lambda params, batch: loss(params, batch) / len(batch["y"]))


def test_what_is_refused_does_depend_on_the_chips_and_may_be_asked_for(tmp_path: Path) -> None:
    """The reason for the refusal, and a way round it; the same loss with layers is the same on all chips."""
    found = {}
    for machine in (ONE, WHOLE):
        for name, one, checked in (("batch", BATCH_NORM, False), ("layer", LAYER_NORM, True)):
            trained = job(tmp_path / f"{name}-{machine}", machine)
            found[name, machine] = train(trained, 5, loss=one, independent=checked)[0][-1]
    gap = {name: abs(found[name, ONE] / found[name, WHOLE] - 1) for name in ("batch", "layer")}
    assert gap["layer"] < 1e-5
    assert gap["batch"] > 1e-2


def stable(params: Any, batch: Any) -> Any:
    """An example's own, but computed with the largest number of the batch, so that it rounds with the batch."""
    logits = batch["x"] @ params["w"]
    most = jnp.max(logits)
    return jnp.log(jnp.sum(jnp.exp(logits - most), axis=1)) + most


def in_bfloat16(params: Any, batch: Any) -> Any:
    few, rows = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch))
    return loss(few, rows).astype(jnp.float32)


def almost_solved(params: Any, batch: Any) -> Any:
    """What is left is rounding, which changes with the size of a batch."""
    read = batch["x"] @ params["w"] @ params["out"]
    return (read - jnp.einsum("bi,ij,j->b", batch["x"], params["w"], params["out"])) ** 2


def drawn(params: Any, batch: Any) -> Any:
    """Not deterministic: nobody can say what depends on what."""
    noise = jax.pure_callback(
        lambda x: np.random.default_rng().normal(size=x.shape).astype(x.dtype), batch["y"], batch["y"]
    )
    return loss(params, batch) + noise


OWN: dict[str, Loss] = {
    "a maximum over the batch that cancels": stable,
    "bfloat16": in_bfloat16,
    "next to nothing": almost_solved,
    "nothing": lambda params, batch: 0 * loss(params, batch),
    "not a number": lambda params, batch: loss(params, batch) * jnp.nan,
    "not a number for some": lambda params, batch: jnp.log(batch["y"]) * loss(params, batch),
    "infinite": lambda params, batch: loss(params, batch) / jnp.zeros_like(batch["y"]),
    "not deterministic": drawn,
}


@pytest.mark.parametrize("name", others_slow(OWN, quick=["bfloat16", "nothing", "not a number for some", "infinite"]))
def test_a_loss_of_each_example_is_not_refused(name: str, tmp_path: Path) -> None:
    train(job(tmp_path / "shared"), 1, loss=OWN[name])


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_small_batches(batch: int, tmp_path: Path) -> None:
    """One example has no others; two are enough to tell."""
    if batch == 1:
        train(job(tmp_path / "shared", batch=1), 1, loss=BATCH_NORM)
        return
    with pytest.raises(ParameterError, match=REFUSED):
        train(job(tmp_path / "shared", batch=batch), 1, loss=BATCH_NORM)


def test_a_loss_with_side_effects_is_not_called_once_more(tmp_path: Path) -> None:
    seen: list[float] = []

    def noted(params: Any, batch: Any) -> Any:
        values = loss(params, batch)
        jax.debug.callback(lambda value: seen.append(float(value)), values[0])
        return values

    train(job(tmp_path / "shared", ONE), 2, loss=noted)
    jax.effects_barrier()
    assert len(seen) == 2


def test_a_job_that_goes_on_does_not_check_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = mock.Mock(wraps=check_independence)
    monkeypatch.setattr("meshmend.jax.job.run.check_independence", check)
    for steps in (2, 4):
        one = job(tmp_path / "shared", memory_every=1)
        train(one, steps)
        one.close()
    assert one.resumed.step == 2
    check.assert_called_once()


def test_a_loss_that_becomes_nan_is_said_once_with_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        losses, _, _ = train(job(tmp_path / "shared"), 12, optimizer=optax.sgd(1e3))
    first = next(number for number, value in enumerate(losses, 1) if not np.isfinite(value))
    said = [record.getMessage() for record in caplog.records if "The loss is" in record.getMessage()]
    assert 1 < first < len(losses)
    assert len(said) == 1
    assert said[0].startswith(
        f"The loss is {'NaN' if np.isnan(losses[first - 1]) else losses[first - 1]} at step {first}."
    )
    assert f"It was {losses[first - 2]:.6g} at step {first - 1}." in said[0]


def test_numbers_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            watch.see(step, 1e30)
        assert not caplog.records
        watch.see(4, float("inf"))
        watch.see(5, float("nan"))
    assert [record.getMessage()[:25] for record in caplog.records] == ["The loss is inf at step 4"]
