"""A job trains as plain optax does on one device, whatever its chips, and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend.jax as mmj
from jax_engine.job.job_cases import (
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
from meshmend.jax.data.exactly_once import check_positions
from meshmend.jax.job.model import Model

STEPS = 9  # of 4 per epoch, the last of each with 4 samples


@pytest.mark.parametrize(("machine", "update"), [(ONE, "replicated"), (HOLED, "sharded")])
def test_the_trajectory_is_that_of_plain_optax_on_one_device(machine: str, update: Any, tmp_path: Path) -> None:
    losses, samples, params = train(job(tmp_path / "shared", machine), STEPS, update=update)
    for epoch in (samples[:4], samples[4:8]):
        assert sorted(np.concatenate(epoch)) == list(range(N_SAMPLES))
    assert_close((losses, params), plain_training(samples))


def test_a_job_that_is_done_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user who runs the same command again sees no step, and must not take that for a fault."""
    with job(tmp_path / "shared", disk_every=2) as first:
        train(first, 2)
    assert "done already" not in caplog.text
    with job(tmp_path / "shared", disk_every=2) as again:
        assert not list(again.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=2))
    assert "All 2 steps of the job in" in caplog.text
    assert "give Job another folder" in caplog.text


def test_steps_say_what_they_are(tmp_path: Path) -> None:
    with job(tmp_path / "shared") as surviving:
        running = surviving.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS)
        first = next(running)
        with pytest.raises(RestartError, match=r"already training.* call job\.close\(\)"):
            train(surviving, 2)
        after_first, steps = first.params, [first, *running]
        assert surviving.resumed.source == "start"
    assert [step.number for step in steps] == list(range(1, STEPS + 1))
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2]
    assert {step.chips for step in steps} == {8}
    assert not any(step.recovered for step in steps)
    assert steps[3].aux is None
    samples = [step.batch.indices for step in steps]
    assert_close(([step.loss for step in steps], surviving.params), plain_training(samples))
    assert_close(after_first, plain_training(samples[:1])[1])
    with pytest.raises(RestartError, match="parameters of step 4 are gone: step 9 has overwritten them"):
        _ = steps[3].params
    # Nobody has to ask for a loss to find it in the timeline.
    events = [event for event in surviving.session.timeline.events if event["event"] == "step"]
    assert [(event["step"], event["loss"]) for event in events] == [(step.number, step.loss) for step in steps]
    assert [event["examples"] for event in events] == [32, 32, 32, 4, 32, 32, 32, 4, 32]
    surviving.session.timeline.flush()  # nothing else waits for the disk
    assert check_positions(tmp_path / "shared", N_SAMPLES) == STEPS


@pytest.mark.parametrize("update", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_job_whose_loop_fails_goes_on_from_memory_to_the_same_bits(update: Any, tmp_path: Path) -> None:
    whole = train(job(tmp_path / "undisturbed"), STEPS, update=update)

    def interrupted() -> None:
        stopped = job(tmp_path / "shared")
        for step in stopped.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS, update=update):
            if step.number == 5:
                raise OSError("no more room for a picture of the loss")

    with pytest.raises(OSError, match="a picture"):
        interrupted()
    again = job(tmp_path / "shared")
    losses, samples, params = train(again, STEPS, update=update)
    assert (again.resumed.source, again.resumed.step) == ("memory", 5)
    assert losses == whole[0][5:]
    np.testing.assert_equal(samples, whole[1][5:])
    assert_same_bits(params, whole[2])
    again.session.timeline.flush()  # nothing else waits for the disk
    assert check_positions(tmp_path / "shared", N_SAMPLES) == STEPS


class Flaky:
    """A dataset that cannot be read once, after so many samples."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, at: int) -> Any:
        if self.left == 0:
            self.left = -1
            raise OSError("disk hiccup")
        self.left -= 1
        return {name: column[at] for name, column in DATASET.items()}


def test_after_an_error_that_a_notebook_keeps_the_next_job_starts(tmp_path: Path) -> None:
    """An error keeps its frames, and with them the loop that it was raised in or that it left."""
    whole = train(job(tmp_path / "undisturbed"), STEPS)[0]
    data = Flaky(after=2 * 32 + 7)
    losses: list[float] = []
    steps: list[Iterator[mmj.JobStep]] = []  # as the errors' frames keep them

    def run_cell(*, raise_at: int | None = None) -> mmj.Job:
        started = job(tmp_path / "shared")
        steps.append(started.train(loss, optax.adam(0.02), PARAMS, data, steps=STEPS))
        for step in steps[-1]:
            losses.append(step.loss)
            if step.number == raise_at:
                raise ValueError("no such column")
        return started

    with pytest.raises(OSError, match="disk hiccup"):
        run_cell()
    with pytest.raises(ValueError, match="no such column"):
        run_cell(raise_at=5)
    again = run_cell()
    assert losses == whole
    assert (again.resumed.source, again.resumed.step) == ("memory", 5)
    # The loop that was left is still there, and says who goes on.
    with pytest.raises(RestartError, match="Another Job of this process goes on with"):
        next(steps[1])


def test_a_loop_that_is_left_goes_on_from_disk_to_the_same_bits(tmp_path: Path, memory: Path) -> None:
    stopped = job(tmp_path / "shared", memory_every=0, disk_every=4)
    losses = []
    for step in stopped.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS):
        losses.append(step.loss)
        if step.number == 6:
            break
    after_six = stopped.params
    again = job(tmp_path / "shared", disk_every=4)
    repeated = []
    for step in again.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS):
        repeated.append(step.loss)
        if step.number == 6:
            assert_same_bits(step.params, after_six)
    assert (again.resumed.source, again.resumed.step) == ("disk", 4)
    assert repeated[:2] == losses[4:]
    # The last step is on disk, though 4 does not divide its number: no copies stay behind, and nothing is left to do.
    assert not list(memory.glob("*"))
    finished = job(tmp_path / "shared", disk_every=4)
    assert train(finished, STEPS)[0] == []
    assert finished.resumed.step == STEPS
    assert_same_bits(finished.params, again.params)
    # In a notebook an error leaves its loop behind: closing the job ends it.
    abandoned = finished.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS + 2)
    next(abandoned)
    finished.close()
    assert len(train(finished, STEPS + 2)[0]) == 1


@pytest.mark.parametrize("update", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_fewer_chips_go_on_within_rounding_and_use_each_sample_once(update: Any, tmp_path: Path) -> None:
    first = job(tmp_path / "shared", "4x4")
    losses, samples, _ = train(first, 5, update=update)
    second = job(tmp_path / "shared", HOLED)
    recovered = []
    for step in second.train(loss, optax.adam(0.02), PARAMS, DATASET, steps=STEPS, update=update):
        losses.append(step.loss)
        samples.append(step.batch.indices)
        recovered.append(step.recovered)
    assert recovered == [True, False, False, False]
    assert second.resumed.source == "memory"
    assert_close((losses, second.params), plain_training(samples))
    second.session.timeline.flush()  # nothing else waits for the disk
    assert check_positions(tmp_path / "shared", N_SAMPLES) == STEPS


def test_random_keys_belong_to_examples_and_not_to_chips(tmp_path: Path) -> None:
    def dropped(params: Any, batch: Any, keys: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"])
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (5,)))(keys)
        return ((hidden * kept) @ params["out"] - batch["y"]) ** 2

    @jax.jit
    def by_hand(rows: Any, epoch: Any, place: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(7), epoch)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, place + i))(jnp.arange(len(rows)))
        return dropped(PARAMS, {name: jnp.asarray(array)[rows] for name, array in DATASET.items()}, keys).mean()

    # Without updates each loss follows from the keys alone: those of an epoch, and of a place in its order.
    for machine, rng in ((WHOLE, 7), (HOLED, jax.random.key(7))):
        surviving = job(tmp_path / machine, machine, memory_every=0)
        losses, samples, _ = train(surviving, 6, loss=dropped, rng=rng, optimizer=optax.sgd(0.0))
        for number, epoch, place in ((0, 0, 0), (2, 0, 2 * BATCH), (5, 1, BATCH)):
            np.testing.assert_allclose(losses[number], by_hand(samples[number], epoch, place), rtol=2e-6)


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
    assert not is_sharded(mmj.lamb(0.1), large)  # they would be known only after the last update
    assert is_sharded(optax.adamw(0.1, mask={"w": True}), large)  # by name
    assert is_sharded(optax.masked(optax.adam(0.1), {"w": True}), large)
    assert not is_sharded(optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)), large)
    assert not is_sharded(optax.masked(optax.adam(0.1), {"w": False}), large)  # no state
    assert not is_sharded(optax.adam(0.1), large, model_state={"mean": np.zeros(3)})
    assert is_sharded(optax.chain(mmj.clip_by_global_norm(1.0), optax.adam(0.1)), large)


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_what_orbax_saved_of_a_job_starts_another(
    update: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import orbax.checkpoint as ocp

    first = job(tmp_path / "shared", HOLED, disk_every=100, disk=tmp_path / "elsewhere")
    _, _, params = train(first, 3, update=update)
    saver = ocp.StandardCheckpointer()
    tree = saver.restore(tmp_path / "elsewhere" / "3" / "state")
    assert set(tree) == {"params", "opt_state"}
    assert_same_bits(tree["params"], params)
    assert int(tree["opt_state"][0]["count"]) == 3
    saver.save(tmp_path / "again", tree)
    saver.wait_until_finished()
    begun = job(tmp_path / "second", ONE, start_from=tmp_path / "again")
    other = {name: values + 1 for name, values in PARAMS.items()}
    losses, samples, _ = train(begun, 2, params=other, update="replicated")
    assert begun.resumed.step == 0
    assert f"with the state that is in {tmp_path / 'again'}" in caplog.text
    # The oracle: three steps of the first job's samples, and then those of the second's, on one device.
    three = train(job(tmp_path / "third", ONE), 3)[1]
    expected, _ = plain_training([*three, *samples])
    assert_close(losses, expected[3:])
    with pytest.raises(RestartError, match=r"The job cannot start from .*: .* has no tree that Orbax has saved"):
        train(job(tmp_path / "fourth", ONE, start_from=tmp_path / "nothing"), 1)
