"""A step waits for no disk: a job of two hosts whose shared folder answers no call until its training is almost over.

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

STEPS, HANGS_FROM, ANSWERS_AT, LONGEST_CALL_S = 79, 20, 77, 60.0
SCRIPT = f"""
import json, os, sys, threading, time
import numpy as np, optax
import meshmend.jax as mmj

shared, hangs, answers, calls, done = os.environ["MESHMEND_SHARED"], threading.Event(), threading.Event(), [], []

def hook(event, args):
    # Every call of Python's that names a file of the folder, whoever makes it, before it is made.
    if hangs.is_set() and any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(shared) for a in args):
        calls.append((event, threading.current_thread().name))
        answers.wait({LONGEST_CALL_S})

sys.addaudithook(hook)
job = mmj.Job(global_batch=8, memory_every=1, disk_every=40, compile_ahead=False, hardware="cpu-xla")
x = np.arange(64, dtype=np.float32)[:, None] / 64
params = {{"w": np.zeros((1, 24), np.float32)}}
for step in job.train(lambda p, b: ((b @ p["w"]) ** 2).sum(axis=1), optax.adam(0.1), params, x, steps={STEPS}):
    time.sleep(0.02)
    done.append(time.time())
    if step.number == {HANGS_FROM}:
        hangs.set()
    if step.number == {ANSWERS_AT}:
        hangs.clear()  # the last step is saved
        answered = time.time()
        answers.set()
with open("calls-" + os.environ["MESHMEND_HOST"], "w") as file:
    json.dump([done, calls, answered], file)
"""


def test_a_job_trains_at_its_pace_though_no_call_on_the_shared_folder_returns(tmp_path: Path) -> None:
    script, shared, log = tmp_path / "train.py", tmp_path / "shared", list[str]()
    script.write_text(SCRIPT.replace('"calls-"', repr(f"{tmp_path}/calls-")))
    with LocalJob([str(script)], Hosts.of("1x2", "1x1"), shared, on_line=lambda _, line: log.append(line)) as job:
        job.start()
        assert job.wait(240) == {0: 0, 1: 0}, log
    watch = Watch(shared)
    watch.read()
    found = [json.loads((tmp_path / f"calls-{host}").read_text()) for host in (0, 1)]
    threads = [{thread for _, thread in calls} for _, calls, _ in found]
    assert set() < threads[0] | threads[1], "a checkpoint was begun"
    assert "MainThread" not in threads[0] | threads[1], "the loop itself asks for no file there"
    for host, (done, calls, answered) in enumerate(found):
        assert len(done) == STEPS, log
        paces = [later - earlier for earlier, later in pairwise(done[HANGS_FROM:ANSWERS_AT])]
        assert max(paces) < LONGEST_CALL_S / 2, (max(paces), calls)
        events = read_timeline(timeline_of(shared, host))
        assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, STEPS + 1)]
        assert {"done", "saved"} <= {event["event"] for event in events}
        # What is watched is what the worker has measured: no figure is made of when a line arrived.
        told = {event["step"]: event["at"] for event in events if event["event"] == "step"}
        assert told[ANSWERS_AT - 10] < answered
    account = watch.account()
    assert account is not None
    assert account.step == STEPS
    assert account.hosts == (0, 1)
    assert account.until < time.time()
