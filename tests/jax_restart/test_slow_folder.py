"""A step waits for no disk: a job of two hosts whose shared folder takes two seconds for each call.

Where a checkpoint is due and the one before it is not written, training waits by design, so here only one is due.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import read_timeline, timeline_of
from meshmend.launch.watching import Watch

STEPS, SLOW_FROM, CALL_S = 79, 20, 2.0
SCRIPT = f"""
import json, os, sys, threading, time
import numpy as np, optax
import meshmend.jax as mmj

shared, slow, calls, done = os.environ["MESHMEND_SHARED"], threading.Event(), [], []

def hook(event, args):
    # Every call of Python's that names a file of the folder, whoever makes it, before it is made.
    if slow.is_set() and any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(shared) for a in args):
        calls.append((event, threading.current_thread().name))
        time.sleep({CALL_S})

sys.addaudithook(hook)
job = mmj.Job(global_batch=8, memory_every=1, disk_every=40, compile_ahead=False, hardware="cpu-xla")
x = np.arange(64, dtype=np.float32)[:, None] / 64
params = {{"w": np.zeros((1, 24), np.float32)}}
for step in job.train(lambda p, b: ((b @ p["w"]) ** 2).sum(axis=1), optax.adam(0.1), params, x, steps={STEPS}):
    time.sleep(0.02)
    done.append(time.time())
    if step.number == {SLOW_FROM}:
        slow.set()
    if step.number == {STEPS} - 2:
        slow.clear()  # the last step is saved
with open("calls-" + os.environ["MESHMEND_HOST"], "w") as file:
    json.dump([done, calls], file)
"""


def test_a_job_trains_at_its_pace_though_each_call_on_the_shared_folder_takes_two_seconds(tmp_path: Path) -> None:
    script, shared, log = tmp_path / "train.py", tmp_path / "shared", list[str]()
    script.write_text(SCRIPT.replace('"calls-"', repr(f"{tmp_path}/calls-")))
    with LocalJob([str(script)], Hosts.of("1x2", "1x1"), shared, on_line=lambda _, line: log.append(line)) as job:
        job.start()
        assert job.wait(240) == {0: 0, 1: 0}, log
    watch = Watch(shared)
    watch.read()
    for host in (0, 1):
        done, calls = json.loads((tmp_path / f"calls-{host}").read_text())
        assert len(done) == STEPS, log
        paces = [later - earlier for earlier, later in pairwise(done[SLOW_FROM:-1])]
        assert max(paces) < CALL_S / 2, (max(paces), calls)
        assert not [call for call in calls if call[1] == "MainThread"], "the loop itself asks for no file there"
        events = read_timeline(timeline_of(shared, host))
        assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, STEPS + 1)]
        assert {"done", "saved"} <= {event["event"] for event in events}
        # What is watched is what the worker has measured: no figure is made of when a line arrived.
        told = {event["step"]: event["at"] for event in events if event["event"] == "step"}
        late = [told[step] - at for step, at in enumerate(done, 1) if SLOW_FROM < step < STEPS - 10]
        assert max(map(abs, late)) < CALL_S / 2
    assert any(json.loads((tmp_path / f"calls-{host}").read_text())[1] for host in (0, 1)), "a checkpoint was slow"
    account = watch.account()
    assert account is not None
    assert account.step == STEPS
    assert account.hosts == (0, 1)
    assert account.until < time.time()
