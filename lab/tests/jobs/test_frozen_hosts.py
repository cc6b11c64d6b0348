"""Hosts of a JAX job that stop without dying: frozen, or with all their packets dropped, beside killed ones.

The model counts its samples: each is a unit vector, the loss is linear, and a sample's use changes its own weight by
one. So the parameters say how often each sample was used, and the loss of a step is minus the epochs before it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshmend.jax.data.exactly_once import check_positions
from meshmend.launch.membership import SILENT_S
from meshmend.launch.timeline import read_timeline, timeline_of
from namespaced_job import NamespacedJob, unsupported_reason

WHY_NOT = unsupported_reason()
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
N_HOSTS, SAMPLES, BATCH, EPOCHS = 3, 48, 12, 12
STEPS = SAMPLES * EPOCHS // BATCH
SCRIPT = f"""
import json, os, time
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj

shared = os.environ["MESHMEND_SHARED"]
os.symlink(str(os.getpid()), f"{{shared}}/{{os.getpid()}}")  # whole from the start, as a file is not
os.replace(f"{{shared}}/{{os.getpid()}}", f"{{shared}}/worker-{{os.environ['MESHMEND_HOST']}}")
job = mmj.Job(global_batch={BATCH}, disk_every=0, compile_ahead=False, hardware="cpu-xla", memory_every=1)
samples, weights = np.eye({SAMPLES}, dtype=np.float32), jnp.zeros({SAMPLES})
for step in job.train(lambda w, x: x @ w, optax.sgd({BATCH}.0), weights, samples, steps={STEPS}):
    print("step", step.number, "on", step.chips, flush=True)
    until = time.time() + (0.1 if step.number < {STEPS} // 2 else 600)
    while time.time() < until and not os.path.exists(f"{{shared}}/hurry"):
        time.sleep(0.05)
print("params", json.dumps(job.params.tolist()), flush=True)
"""
"""Half-way it waits until the test has done all that it has to do."""
PATIENCE_S = 180.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NamespacedJob]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with NamespacedJob([script], tmp_path, f"1x{N_HOSTS}", options=["--hosts", f"2:{N_HOSTS}"]) as job:
        job.start()
        job.until(lambda: "step 5 on 3" in job.output(1), PATIENCE_S)
        yield job


def events(job: NamespacedJob, host: int) -> list[dict[str, Any]]:
    return read_timeline(timeline_of(job.shared, host))


def worker(job: NamespacedJob, host: int) -> int:
    return int(str((job.shared / f"worker-{host}").readlink()))


def stop(job: NamespacedJob, host: int, how: str) -> float:
    """Stop a host; return when."""
    at = time.time()
    if how == "frozen":
        job.freeze(host)
    elif how == "worker frozen":
        os.kill(worker(job, host), signal.SIGSTOP)
    elif how == "cut off":
        job.cut(host)
    elif how == "deaf":
        job.cut(host, sent=False)
    elif how == "mute":
        job.cut(host, received=False)
    else:
        job.power_off(host)
    return at


def resume(job: NamespacedJob, host: int, how: str) -> None:
    if how == "frozen":
        job.thaw(host)
    elif how in ("cut off", "deaf", "mute"):
        job.join(host)
    elif how == "killed":
        job.start(host)


def committed(job: NamespacedJob) -> list[tuple[int, int, int]]:
    """For each round but the first: its number, the last step that was committed before it, and where it went on.

    Committed is a step that all hosts of a round have kept.
    """
    kept: dict[int, dict[int, set[int]]] = {}
    resumed: dict[int, set[int]] = {}
    for host in range(N_HOSTS):
        for event in events(job, host):
            number = int(event.get("round", 0))
            if event["event"] == "restore":
                resumed.setdefault(number, set()).add(event["step"])
                kept.setdefault(number, {}).setdefault(host, set())
            elif event["event"] == "kept":
                kept.setdefault(number, {}).setdefault(host, set()).add(event["step"])
    found, last = [], 0
    for number in sorted(resumed):
        (step,) = resumed[number]
        found.append((number, last, step))
        last = max(last, step, *set.intersection(*kept[number].values()))
    return found[1:]


def check(job: NamespacedJob) -> None:
    """No committed step was lost, no step is missing, and each sample was used once per epoch."""
    for number, before, step in committed(job):
        assert step >= before, f"round {number} went back to step {step} behind the committed step {before}"
    assert check_positions(job.shared, SAMPLES) == STEPS
    for host in range(N_HOSTS):
        uses = json.loads(re.findall(r"params (\[.*\])", job.output(host))[-1])
        assert uses == pytest.approx([-EPOCHS] * SAMPLES, abs=1e-3), f"host {host}"
        for event in events(job, host):
            if event["event"] == "step":
                epoch = (event["step"] - 1) * BATCH // SAMPLES
                assert event["loss"] == pytest.approx(-epoch, abs=1e-3), event


def finish(job: NamespacedJob) -> None:
    """Let the job come to its end, and check what it has done."""
    (job.shared / "hurry").touch()
    assert job.wait(PATIENCE_S) == dict.fromkeys(range(N_HOSTS), 0), job.outputs()
    check(job)


def on_two(job: NamespacedJob, witness: int) -> bool:
    return re.search(r"step \d+ on 2", job.output(witness)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("how", ["frozen", "cut off", "deaf", "mute", "killed"])
def test_a_host_stops_and_comes_back(how: str, host: int, job: NamespacedJob) -> None:
    """Host 0 has JAX's coordinator. The others go on without it, and with it when it is back."""
    at = stop(job, host, how)
    job.until(lambda: on_two(job, 1), PATIENCE_S)
    seconds = time.time() - at
    resume(job, host, how)
    back_at = time.time()
    job.until(lambda: "on 3" in job.output(1).rpartition("on 2")[2], PATIENCE_S)
    again = time.time() - back_at
    print(f"{how}: on without host {host} after {seconds:.1f} s, with it {again:.1f} s after its return")  # noqa: T201
    assert seconds < SILENT_S + 60
    finish(job)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 2])
def test_a_worker_freezes_and_its_agent_does_not(host: int, job: NamespacedJob) -> None:
    """Its agent still answers the store: only the training has stopped."""
    first = worker(job, host)
    at = stop(job, host, "worker frozen")
    job.until(lambda: worker(job, host) != first, 300)
    seconds = time.time() - at
    print(f"the frozen worker of host {host} was replaced after {seconds:.1f} s")  # noqa: T201
    assert seconds < SILENT_S + 60
    finish(job)


@pytest.mark.slow
def test_one_host_freezes_while_another_is_killed(job: NamespacedJob) -> None:
    """The one that is left waits for a second host, and all go on from what was committed."""
    stop(job, 0, "frozen")
    stop(job, 2, "killed")
    time.sleep(SILENT_S + 5)
    resume(job, 0, "frozen")
    resume(job, 2, "killed")
    finish(job)
