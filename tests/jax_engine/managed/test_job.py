"""A job trains as plain optax does on one device, whatever its chips, and goes on where it stopped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend.jax as mmj
from jax_engine.managed.managed_cases import (
    BATCH,
    DATASET,
    HOLED,
    N_SAMPLES,
    ONE,
    PARAMS,
    WHOLE,
    assert_close,
    assert_same_bits,
    job,
    loss,
    plain_training,
    train,
)
from meshmend.errors import RestartError
from meshmend.jax.managed.model import Model

STEPS = 9  # of 4 per epoch, the last of each with 4 samples


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path / "memory"))
    return tmp_path / "memory"


@pytest.mark.parametrize(("machine", "update"), [(ONE, "sharded"), (WHOLE, "replicated"), (HOLED, "sharded")])
def test_the_trajectory_is_that_of_plain_optax_on_one_device(machine: str, update: Any, tmp_path: Path) -> None:
    losses, samples, params = train(job(tmp_path / "shared", machine), STEPS, update=update)
    for epoch in (samples[:4], samples[4:8]):
        assert sorted(np.concatenate(epoch)) == list(range(N_SAMPLES))
    assert_close((losses, params), plain_training(samples))


def test_steps_say_what_they_are(tmp_path: Path) -> None:
    with job(tmp_path / "shared", HOLED, ledger=True) as surviving:
        steps = list(surviving.train(loss, optax.sgd(0.1), PARAMS, DATASET, steps=STEPS))
        assert surviving.resumed.source == "start"
    assert [step.number for step in steps] == list(range(1, STEPS + 1))
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2]
    assert {step.chips for step in steps} == {12}
    assert not any(step.recovered for step in steps)
    assert steps[3].aux is None
    assert mmj.Ledger(tmp_path / "shared/ledger.jsonl").check(N_SAMPLES).steps == STEPS
    with pytest.raises(RestartError, match="parameters of step 4 are gone: step 9 has overwritten them"):
        _ = steps[3].params


@pytest.mark.parametrize(("kept_in", "update"), [("memory", "sharded"), ("disk", "replicated")])
def test_a_stopped_job_goes_on_to_the_same_bits(kept_in: str, update: Any, tmp_path: Path) -> None:
    aids: dict[str, Any]
    aids = {"memory_every": 1, "disk_every": 0} if kept_in == "memory" else {"memory_every": 0, "disk_every": 3}
    whole = train(job(tmp_path / "undisturbed", **aids), STEPS, update=update)
    stopped = job(tmp_path / "shared", **aids)
    for step in stopped.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS, update=update):
        if step.number == 5:
            break
    again = job(tmp_path / "shared", **aids)
    losses, samples, params = train(again, STEPS, update=update)
    assert (again.resumed.source, again.resumed.step) == (kept_in, 5 if kept_in == "memory" else 3)
    assert losses == whole[0][again.resumed.step :]
    np.testing.assert_equal(samples, whole[1][again.resumed.step :])
    assert_same_bits(params, whole[2])


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_fewer_chips_go_on_within_rounding_and_use_each_sample_once(update: Any, tmp_path: Path) -> None:
    first = job(tmp_path / "shared", "4x4", ledger=True)
    losses, samples, _ = train(first, 5, update=update)
    second = job(tmp_path / "shared", HOLED, ledger=True)
    recovered = []
    for step in second.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS, update=update):
        losses.append(step.loss)
        samples.append(step.batch.indices)
        recovered.append(step.recovered)
    assert recovered == [True, False, False, False]
    assert second.resumed.source == "memory"
    assert_close((losses, second.params), plain_training(samples))
    assert mmj.Ledger(tmp_path / "shared/ledger.jsonl").check(N_SAMPLES).steps == STEPS


def test_an_error_in_the_loop_loses_no_step(tmp_path: Path) -> None:
    def interrupted() -> None:
        for step in job(tmp_path / "shared", ledger=True).train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS):
            if step.number == 6:
                raise OSError("no more room for a picture of the loss")

    with pytest.raises(OSError, match="a picture"):
        interrupted()
    again = job(tmp_path / "shared", ledger=True)
    numbers = [step.number for step in again.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS)]
    assert numbers == [7, 8, 9]
    assert mmj.Ledger(tmp_path / "shared/ledger.jsonl").check(N_SAMPLES).steps == STEPS


def test_the_last_step_is_on_disk_and_a_finished_job_has_nothing_to_do(tmp_path: Path, memory: Path) -> None:
    _, _, params = train(job(tmp_path / "shared", disk_every=100), 2)
    assert not list(memory.glob("*/*"))
    again = job(tmp_path / "shared", disk_every=100)
    assert train(again, 2)[0] == []
    assert again.resumed.source == "disk"
    assert_same_bits(again.params, params)


def test_losses_are_in_the_timeline_without_being_asked_for(tmp_path: Path) -> None:
    surviving = job(tmp_path / "shared")
    for _ in surviving.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=4):
        pass
    events = [event for event in surviving.session.timeline.events if event["event"] == "step"]
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert [event["examples"] for event in events] == [32, 32, 32, 4]
    assert all(math.isfinite(event["loss"]) for event in events)


def test_random_keys_belong_to_examples_and_not_to_chips(tmp_path: Path) -> None:
    def dropped(params: Any, batch: Any, keys: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"])
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (5,)))(keys)
        return ((hidden * kept) @ params["out"] - batch["y"]) ** 2

    first = train(job(tmp_path / "a", WHOLE), STEPS, loss=dropped, rng=7)
    second = train(job(tmp_path / "b", HOLED), STEPS, loss=dropped, rng=jax.random.key(7))
    assert_close((first[0], first[2]), (second[0], second[2]))
    # Without updates each loss follows from the keys alone, made here by hand: epoch, then place in its order.
    losses, samples, _ = train(job(tmp_path / "c", HOLED), 6, loss=dropped, rng=7, optimizer=optax.sgd(0.0))
    for number, place, epoch in ((0, 0, 0), (2, 2 * BATCH, 0), (5, BATCH, 1)):
        rows = samples[number]
        key = jax.random.fold_in(jax.random.key(7), epoch)
        keys = jnp.stack([jax.random.fold_in(key, place + i) for i in range(len(rows))])
        values = dropped(PARAMS, {name: array[rows] for name, array in DATASET.items()}, keys)
        np.testing.assert_allclose(losses[number], values.mean(), rtol=2e-6)


def test_a_model_state_is_the_mean_over_examples_and_is_kept(tmp_path: Path) -> None:
    def with_state(params: Any, state: Any, batch: Any) -> Any:
        centred = batch["x"] - state["mean"]
        new = {"mean": 0.9 * state["mean"] + 0.1 * batch["x"], "steps": jnp.full(len(batch["y"]), state["steps"] + 1)}
        return (jnp.tanh(centred @ params["w"]) @ params["out"] - batch["y"]) ** 2, (new, {"error": batch["y"]})

    start = {"mean": np.zeros(6, np.float32), "steps": np.int32(0)}
    options = {"loss": with_state, "model_state": start, "has_aux": True}
    _, samples, _ = train(job(tmp_path / "shared", WHOLE), 3, **options)
    second = job(tmp_path / "shared", HOLED)
    errors = []
    for step in second.train(
        **{"optimizer": optax.adam(0.02), "params": PARAMS, "dataset": DATASET} | options, steps=6
    ):
        samples.append(step.batch.indices)
        errors.append(step.aux["error"])
    mean = np.zeros(6)
    for rows in samples:
        mean = 0.9 * mean + 0.1 * DATASET["x"][rows].mean(axis=0)
    found = second.model_state
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-7)
    assert found["steps"] == 6
    np.testing.assert_allclose(errors, [DATASET["y"][rows].mean() for rows in samples[3:]], rtol=1e-5, atol=1e-7)


def test_auto_shards_what_is_large_and_may_be_sharded() -> None:
    def is_sharded(optimizer: Any, n_weights: int, **more: Any) -> bool:
        return Model(loss, optimizer, {"w": jax.ShapeDtypeStruct((n_weights,), jnp.float32)}, **more).is_sharded("auto")

    large = 1 << 25  # twice 128 MiB of Adam
    assert is_sharded(optax.adam(0.1), large)
    assert not is_sharded(optax.adam(0.1), large - 1)
    assert not is_sharded(optax.sgd(0.1), large)  # no state
    assert is_sharded(optax.sgd(0.1, momentum=0.9), 2 * large)
    assert not is_sharded(optax.lamb(0.1), large)  # norms of whole layers
    assert not is_sharded(optax.adam(0.1), large, model_state={"mean": np.zeros(3)})


@pytest.mark.parametrize(
    "dataset",
    [
        np.stack([DATASET["y"], DATASET["y"]], axis=1),
        (DATASET["x"][:, :2],),
        [row[:2] for row in DATASET["x"]],
        jnp.asarray(DATASET["x"][:, :2]),
    ],
    ids=["array", "tuple", "sequence", "jax"],
)
def test_datasets_in_memory(dataset: Any, tmp_path: Path) -> None:
    def first(params: Any, batch: Any) -> Any:
        rows = batch[0] if isinstance(batch, tuple) else batch
        return (rows @ params) ** 2

    expected = np.asarray(dataset[0] if isinstance(dataset, tuple) else dataset)
    surviving = job(tmp_path / "shared", memory_every=0)
    (step,) = surviving.train(first, optax.sgd(0.1), np.ones(2, np.float32), dataset, steps=1)
    np.testing.assert_allclose(step.loss, (expected[step.batch.indices].sum(axis=1) ** 2).mean(), rtol=1e-6)
