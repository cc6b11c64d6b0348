"""A job with checks: what lies is found, left out on the second observation, and leaves no trace in the parameters.

Chips lie by a wrapper around their part: of the gradients, inside the loss; of the memory, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshmend.jax as mmj
from jax_engine.job.job_cases import BATCH, DATASET, PARAMS, assert_same_bits, loss
from meshmend.errors import ParameterError, QuarantineError
from meshmend.jax.data.exactly_once import check_positions
from meshmend.jax.session import Session, initialize_alone
from meshmend.launch.timeline import timeline_of
from meshmend.quarantine import FaultLog, QuarantineList, Suspect

LIAR = (1, 2)
EVERY, STEPS = 4, 15
GOES_BACK = pytest.mark.filterwarnings("ignore:Resuming from memory at step 4; skipped. a check found wrong numbers")
CHECKS = mmj.Checks(digests_every=EVERY, recompute_every=EVERY)


def session(shared: Path) -> Session:
    fabric = mmj.discover(jax.devices()[:8], shape="2x4")
    return initialize_alone(fabric, quarantine=shared, timeline=timeline_of(shared, 0))


def start(shared: Path, checks: mmj.Checks | None = CHECKS, **options: Any) -> mmj.Job:
    return mmj.Job(
        shared, BATCH, session=session(shared), **{"disk_every": 0, "planner": "auto", **options}, checks=checks
    )


def lying(fabric: mmj.Fabric, since: int, bit: int = 22) -> Callable[..., Any]:
    """The loss, but one chip's gradients have a flipped bit from a step on. The model state counts the steps."""
    rank = int(fabric.mesh.rank_of[LIAR])

    @jax.custom_vjp
    def through(params: Any, step: Any) -> Any:
        del step
        return params

    def backward(step: Any, gradients: Any) -> Any:
        lies = (lax.axis_index(fabric.axes) == rank) & (step >= since)

        def flipped(gradient: jax.Array) -> jax.Array:
            bits = lax.bitcast_convert_type(gradient, jnp.uint32)
            return lax.bitcast_convert_type(jnp.where(lies, bits ^ jnp.uint32(1 << bit), bits), jnp.float32)

        return jax.tree.map(flipped, gradients), None

    through.defvjp(lambda params, step: (params, step), backward)

    def lying_loss(params: Any, model_state: Any, batch: Any) -> Any:
        values = loss(through(params, model_state["step"]), batch)
        return values, {"step": jnp.full(values.shape, model_state["step"] + 1)}

    return lying_loss


def run(job: mmj.Job, steps: int = STEPS, since: int = 10**6, after: Callable[[Any], None] | None = None) -> Any:
    running = job.train(
        lying(job.fabric, since),
        optax.adam(0.02),
        PARAMS,
        DATASET,
        steps=steps,
        model_state={"step": np.float32(0)},
        update="replicated",
    )
    for step in running:
        if after is not None:
            after(step)
    return job.params


def failing(job: mmj.Job, message: str, steps: int = STEPS, **options: Any) -> list[dict[str, Any]]:
    """Run a job that ends with this error; return its timeline."""
    with pytest.raises(QuarantineError, match=message):
        run(job, steps, **options)
    return list(job.session.timeline.events)


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The oracle: what a job that has the liar up to step 4 only, because somebody quarantines it then, ends with."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHMEND_MEMORY", str(folder / "memory"))
        run(start(folder / "shared", checks=None), 4)
        QuarantineList(folder / "shared").add(Suspect.chip(LIAR), why="test")
        job = start(folder / "shared", checks=None)
        found = run(job)
    assert (job.resumed.step, job.fabric.n_chips) == (4, 7)
    return found


@GOES_BACK
def test_gradients_that_lie_are_found_and_the_chip_is_left_out(tmp_path: Path, without_it: Any) -> None:
    events = failing(
        start(tmp_path / "shared"),
        r"chip 1,2 is suspected .recompute.: .* in quarantine now.* back to step 4",
        since=6,
    )
    (entry,) = QuarantineList(tmp_path / "shared").active()
    assert (entry.suspect, entry.verified, entry.step) == (Suspect.chip(LIAR), 4, 8)
    again = start(tmp_path / "shared")
    found = run(again, since=6)
    assert (again.resumed.source, again.resumed.step, again.fabric.n_chips) == ("memory", 4, 7)
    assert_same_bits(found, without_it)
    told = [event["event"] for event in events if event["event"] in ("quarantined", "observation", "verified")]
    assert told == ["verified", "observation", "quarantined"]
    again.session.timeline.flush()  # nothing else waits for the disk
    assert check_positions(tmp_path / "shared", len(DATASET["y"])) == STEPS


def flip_after(job: mmj.Job, number: int) -> Callable[[Any], None]:
    """A bit of one chip's copy of the parameters changes after a step."""

    def flip(step: Any) -> None:
        if step.number == number and job.fabric.mesh.rank_of[LIAR] >= 0:
            training = job._run
            assert training is not None
            whole = training.params["w"]
            device = job.fabric.jax_mesh.devices.flatten()[job.fabric.mesh.rank(LIAR)]
            copies = [shard.data for shard in whole.addressable_shards]
            at = [shard.device for shard in whole.addressable_shards].index(device)
            bits = np.array(copies[at]).view(np.uint32)
            bits[2, 3] ^= 1 << 12
            copies[at] = jax.device_put(bits.view(np.float32), device)
            training.params["w"] = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, copies)

    return flip


@GOES_BACK
def test_memory_that_flips_costs_a_return_first_and_the_chip_the_second_time(tmp_path: Path, without_it: Any) -> None:
    checks = mmj.Checks(digests_every=EVERY, recompute_every=0)
    shared = tmp_path / "shared"
    first = start(shared, checks)
    failing(first, r"is not enough to leave it out: the job goes back to step 4", after=flip_after(first, 8))
    assert QuarantineList(shared).active() == ()
    assert [noted.verified for noted in FaultLog(shared).read()] == [4]
    second = start(shared, checks)
    assert second.fabric.n_chips == 8
    failing(second, r"1,2 is in quarantine now; the job goes back to step 4", after=flip_after(second, 8))
    assert (second.resumed.step, second.resumed.source) == (4, "memory")
    third = start(shared, checks)
    found = run(third, after=flip_after(third, 8))
    assert (third.resumed.step, third.fabric.n_chips) == (4, 7)
    assert_same_bits(found, without_it)


def test_a_clean_job_has_the_bits_of_one_without_checks(tmp_path: Path) -> None:
    checked = start(tmp_path / "checked", mmj.Checks(EVERY, EVERY))
    assert_same_bits(run(checked), run(start(tmp_path / "plain", None)))
    assert not (tmp_path / "checked" / "fault_log.jsonl").exists()
    verified = [event["step"] for event in checked.session.timeline.events if event["event"] == "verified"]
    assert verified == [4, 8, 12]


def test_the_last_state_is_checked_too(tmp_path: Path) -> None:
    job = start(tmp_path / "shared", mmj.Checks(digests_every=100, recompute_every=0))
    failing(job, r"Step 5: chip 1,2 .* goes back to step 0", 5, after=flip_after(job, 5))


def test_checks_that_have_no_use_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"loss": loss, "optimizer": optax.adam(0.02), "params": PARAMS, "dataset": DATASET}
    with pytest.raises(ParameterError, match=r"the chips of a tile compute them together"):
        start(tmp_path / "b", mmj.Checks(), tile="2x2").train(**given, steps=1)
    given["params"] = lambda fabric, pair: None
    with pytest.raises(ParameterError, match=r"no single chip could repeat another's part"):
        start(tmp_path / "c", mmj.Checks()).train(**given, steps=1, update="fsdp")
    with pytest.raises(ParameterError, match=r"no replicas to compare"):
        start(tmp_path / "d", mmj.Checks(recompute_every=0)).train(**given, steps=1, update="fsdp")
