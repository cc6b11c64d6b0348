"""A job that goes on for long: what launcher, store, agents and workers hold does not grow with steps or recoveries."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jax_restart.held import Held, held
from meshmend.jax.data.exactly_once import check_positions
from meshmend.launch.processes import children
from meshmend.launch.timeline import read_timeline, timeline_of

STEPS, DISK_EVERY, SAMPLES, N_HOSTS = 500, 10, 48, 3
KILLS = {60: 1, 130: 0, 200: 2, 270: 1, 340: 0}
"""After which step the worker of which host is killed. Host 0 has JAX's coordinator."""
WINDOW = range(40, 60)
"""Steps of a round after which its workers are compared with those of another round: compiling is over by then."""
SETTLED = range(90, 110)
"""Steps of the last round that its end is compared with: gRPC starts a thread now and then for longer than a window."""
TOLERANCE = 0.05
LIMIT_S = 1800.0
SCRIPT = f"""
import json, os, time
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj
from jax._src import distributed
from jax_restart.held import held, keys_of

host, shared = os.environ["MESHMEND_HOST"], os.environ["MESHMEND_SHARED"]
job = mmj.Job(global_batch=12, disk_every={DISK_EVERY}, hardware="cpu-xla", memory_every=1, compile_ahead=False)
keys = keys_of(distributed.global_state)
samples, weights = np.eye({SAMPLES}, dtype=np.float32), jnp.zeros({SAMPLES})
with open(f"{{shared}}/held-{{host}}.jsonl", "a") as notes:
    for step in job.train(lambda w, x: x @ w, optax.sgd(12.0), weights, samples, steps={STEPS}):
        facts = {{"step": step.number, "pid": os.getpid(), "at": time.time(), **held(os.getpid())._asdict()}}
        if host == "0":
            facts["keys"] = len(keys())
        print(json.dumps(facts), file=notes, flush=True)
        time.sleep(0.06)
assert np.allclose(job.params, -{STEPS} * 12 // {SAMPLES}, atol=1e-2), job.params
"""
"""Each sample is a unit vector, so that the parameters say how often each of them was used.

Nothing is compiled ahead: how far that has come after so many steps depends on how busy the machine is.
"""


def name_of(pid: int, launcher: int) -> str | None:
    """Return what a process of the job is; None for those that come and go."""
    words = Path(f"/proc/{pid}/cmdline").read_text()
    if pid == launcher:
        return "launcher"
    if "launch.store" in words:
        return f"store {pid}"
    above = [pid]
    while above[-1] not in (launcher, 1):
        above.append(int(Path(f"/proc/{above[-1]}/stat").read_text().rsplit(")", 1)[1].split()[1]))
    # All below the process that forks hosts have its command line; the last of the line is a worker.
    name = {2: "nursery", 3: "agent", 4: "warm"}.get(len(above)) if "launch.nursery" in words else None
    return name and f"{name} {pid}"


def notes_of(shared: Path, host: int) -> list[dict[str, Any]]:
    path = shared / f"held-{host}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one of a worker that was killed
            found.append(json.loads(line))
    return found


def settled(samples: list[Held]) -> Held:
    """What stays: the fewest threads and descriptors, as a checkpoint that is being written has some of its own."""
    assert len(samples) >= 3, "too few to compare"
    threads, descriptors, megabytes = zip(*samples, strict=True)
    return Held(min(threads), min(descriptors), statistics.median(megabytes))


def compare(what: str, before: Held, after: Held) -> list[str]:
    """Print both; return what has grown by more than the tolerance."""
    print(f"{what:<24}" + "".join(f"{a:>10.1f} {b:>10.1f}" for a, b in zip(before, after, strict=True)))  # noqa: T201
    return [
        f"{what}: {name} from {a:.1f} to {b:.1f}"
        for name, a, b in zip(Held._fields, before, after, strict=True)
        if b > a * (1 + TOLERANCE)
    ]


def test_one_descriptor_more_is_found_among_those_of_checkpoints() -> None:
    """Of twenty steps with two checkpoints, as a worker has noted them."""
    noted = [19, 22, 25, 22, 22, 19, 19, 19, 19, 19, 22, 25, 25, 22, 22, 22, 19, 19, 19, 19]
    before = settled([Held(31, number, 155.0) for number in noted])
    assert compare("the same, later in a checkpoint", before, settled([Held(31, n, 156.0) for n in noted[5:]])) == []
    leaked = settled([Held(31, number + 1, 155.0) for number in noted])
    assert compare("a leak", before, leaked) == ["a leak: descriptors from 19.0 to 20.0"]


@pytest.mark.slow
def test_nothing_grows_over_500_steps_50_checkpoints_and_5_kills(tmp_path: Path) -> None:
    script, shared = tmp_path / "train.py", tmp_path / "shared"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "meshmend", "run", "--local", f"1x{N_HOSTS}", "--host", "1x1"]
    began = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [*command, "--hosts", f"{N_HOSTS}:{N_HOSTS}", "--shared", str(shared), str(script)],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    seen: dict[str, list[tuple[float, Held]]] = {}
    left = dict(KILLS)
    try:
        while job.poll() is None:
            assert time.monotonic() < began + LIMIT_S, (tmp_path / "log").read_text()[-3000:]
            for pid in (job.pid, *children(job.pid)):
                with contextlib.suppress(OSError, KeyError):  # it has ended meanwhile
                    if (name := name_of(pid, job.pid)) is not None:
                        seen.setdefault(name, []).append((time.time(), held(pid)))
            for step, host in list(left.items()):
                so_far = notes_of(shared, host)
                if so_far and so_far[-1]["step"] >= step:
                    del left[step]
                    os.kill(so_far[-1]["pid"], signal.SIGKILL)
            time.sleep(0.2)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait(60)
    printed = (tmp_path / "log").read_text()
    assert job.returncode == 0, printed[-3000:]
    assert not left
    assert check_positions(shared, SAMPLES) == STEPS

    # Rounds of host 0's workers, each with what its worker has noted, in order.
    notes = {host: notes_of(shared, host) for host in range(N_HOSTS)}
    rounds = {host: list(dict.fromkeys(one["pid"] for one in notes[host])) for host in notes}
    assert {len(pids) for pids in rounds.values()} == {len(KILLS) + 1}, "every kill is a round of all"
    saved = {e["step"] for host in notes for e in read_timeline(timeline_of(shared, host)) if e["event"] == "saved"}
    assert len(saved) >= 0.9 * STEPS / DISK_EVERY, "one that is under way when a worker is killed may be left out"

    grown = []
    print(f"\n{time.monotonic() - began:.0f} s, {len(saved)} checkpoints; threads, descriptors, MiB: then, now")  # noqa: T201
    for host in notes:
        own = [[one for one in notes[host] if one["pid"] == pid] for pid in rounds[host]]
        window = [[Held(*(one[name] for name in Held._fields)) for one in ones] for ones in own]
        third, last = (settled(window[index][WINDOW.start : WINDOW.stop]) for index in (2, -1))
        grown += compare(f"worker {host}, recoveries", third, last)
        before = settled(window[-1][SETTLED.start : SETTLED.stop])
        grown += compare(f"worker {host}, steps", before, settled(window[-1][-20:]))
        if host == 0:
            keys = [one["keys"] for one in own[-1]]
            early, late = min(keys[WINDOW.start : WINDOW.stop]), min(keys[-20:])  # what stays between two checkpoints
            print(f"keys of the coordinator   {early} {late}")  # noqa: T201
            grown += [f"keys: from {early} to {late}"] * (late > early * (1 + TOLERANCE))
    # When two recoveries are over, and at the end: both times all workers train, each a descriptor of its parent's.
    third_round = [one["at"] for one in notes[0] if one["pid"] == rounds[0][2]][WINDOW.start : WINDOW.stop]
    at_the_end = [one["at"] for one in notes[0][-20:-1]]
    lasting: Counter[str] = Counter()
    for name, samples in seen.items():
        early_on, at_last = (
            [one for at, one in samples if steps[0] <= at <= steps[-1]] for steps in (third_round, at_the_end)
        )
        if len(samples) > 3:  # a process that is just being started has the command line of the one that starts it
            lasting[name.split()[0]] += 1
            grown += compare(name, settled(early_on), settled(at_last))
    assert lasting == {"launcher": 1, "store": 1, "nursery": 1, "agent": N_HOSTS, "warm": N_HOSTS}
    assert not grown
