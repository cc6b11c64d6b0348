"""Compiling ahead on 6 and 16 real processes of this machine: how long until every loss is covered, and by whom.

    python lab/benchmarks/compile_ahead.py [HOSTS ...]

Each host is a process with one virtual chip. The job runs twice: once the hosts share the losses, as jobs do, and once
process 0 compiles for all of them. Then one host is killed, and the survivors must load the program that another
host has compiled; the script fails if they compile, or if a loss is covered twice or never. All processes
share this machine's cores, which limit what sharing can gain here: "one host's share" is what is left of the time where
each host has cores of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

SHAPES = {6: "2x3", 16: "4x4"}
LAYERS, WIDTH = 12, 32
"""Of the model: its layers are written out, so that compiling takes a while."""
ALONE = "alone"
PATIENCE_S = 900.0


def train(folder: str, way: str) -> None:
    """Be one process of the job, until the step that a file "last" in its folder names."""
    import jax
    import numpy as np
    import optax

    import meshmend.jax as mmj
    from meshmend.jax.compile import CompileAhead

    if way == ALONE:

        def undivided(*words: Any, **options: Any) -> CompileAhead:
            return CompileAhead(*words, **options | {"is_divided": False})

        mock.patch("meshmend.jax.compile.saved.CompileAhead", undivided).start()
    job = mmj.Job(folder, global_batch=96, disk_every=0, memory_every=2)
    rng = np.random.default_rng(1)
    data = rng.normal(size=(960, WIDTH)).astype(np.float32)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH for _ in range(LAYERS)]

    def loss(weights: Any, batch: Any) -> Any:
        x = batch
        for layer in weights:
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ layer)
        return ((x - batch) ** 2).mean(axis=1)

    last = Path(folder) / "last"
    for step in job.train(loss, optax.adam(1e-3), weights, data, steps=10**6):
        if job.session.launch.process == 0:
            print(json.dumps({"step": step.number}), flush=True)
        if last.exists() and step.number >= int(last.read_text()):
            break
        time.sleep(1.0)  # what is timed here is the compiler
    job.close()


def compiled_ahead(folder: Path, n: int) -> list[dict[str, Any]]:
    """Return what the hosts have noted of compiling ahead, with the host that each event is of."""
    from meshmend.launch.timeline import read_timeline, timeline_of

    paths = {host: timeline_of(folder, host) for host in range(n)}
    events = [event | {"host": host} for host, path in paths.items() if path.exists() for event in read_timeline(path)]
    return [event for event in events if event["event"] == "compile ahead"]


def measure(n: int, way: str, folder: Path) -> tuple[float, Counter[int], str]:
    """Run a job of `n` hosts; return how long covering took, how many losses each host has covered, who was loaded."""
    from meshmend.files import write_whole
    from meshmend.launch.hosts import Hosts
    from meshmend.launch.local import LocalJob
    from meshmend.launch.timeline import read_timeline, timeline_of

    log: list[str] = []
    steps: list[int] = []

    def heard(host: int, line: str) -> None:
        log.append(f"{host} {line}")
        if line.startswith('{"step"'):
            steps.append(json.loads(line)["step"])

    argv = [str(Path(__file__).resolve()), "--train", str(folder), way]
    victim = n // 2
    with LocalJob(argv, Hosts.of(SHAPES[n], "1x1"), folder, least=2, on_line=heard, on_event=lambda _: None) as job:

        def until(what: str, is_done: Any) -> None:
            began = time.monotonic()
            while not is_done():
                job.watch(0.2)
                if time.monotonic() - began > PATIENCE_S or not job.running:
                    sys.exit("\n".join([*log[-40:], f"{n} hosts, {way}: {what} has not happened."]))

        job.start()
        until("covering each loss", lambda: len(compiled_ahead(folder, n)) >= n)
        ahead = compiled_ahead(folder, n)
        last = steps[-1]
        job.kill(victim)
        until("a step after the loss", lambda: steps[-1] > last + 2)
        write_whole(folder / "last", str(steps[-1] + 3))  # so far ahead that all see it before they are there
        job.wait(PATIENCE_S)
    problems = [event for event in ahead if "saved" not in event]
    if problems or sorted(event["lost"] for event in ahead) != list(range(n)):
        sys.exit(f"{n} hosts, {way}: expected each loss once, got {problems or ahead}.")
    made = next(event for event in ahead if event["lost"] == victim)
    for host in {*range(n)} - {victim}:
        events = read_timeline(timeline_of(folder, host))
        start = next(event for event in events if event["event"] == "compile" and event["round"] > 1)
        if start.get("loaded") != made["saved"]:
            sys.exit(f"{n} hosts, {way}: host {host} should load {made['saved']}, got {start}.")
    if made["host"] == victim:
        sys.exit(f"{n} hosts: host {victim} has compiled for its own loss, expected another one.")
    took = max(event["at"] + event["seconds"] for event in ahead) - min(event["at"] for event in ahead)
    return took, Counter(event["host"] for event in ahead), f"{n - 1} survivors loaded host {made['host']}'s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", type=int, help="numbers of hosts", metavar="HOSTS")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(*given.train)
        return
    wanted = given.hosts or list(SHAPES)
    if not SHAPES.keys() >= set(wanted):
        parser.error(f"HOSTS are some of {', '.join(map(str, SHAPES))}")
    print(f"{os.cpu_count()} cores")
    print("| hosts | process 0 alone, s | shared, s | ratio | one host's share | the program after a loss |")
    print("|--:|--:|--:|--:|--:|---|")
    for n in wanted:
        with tempfile.TemporaryDirectory() as folder:
            alone_s, _, _ = measure(n, ALONE, Path(folder) / "alone")
            shared_s, shares, loaded = measure(n, "shared", Path(folder) / "shared")
        most = f"{max(shares.values())} of {n}"
        print(f"| {n} | {alone_s:.1f} | {shared_s:.1f} | {shared_s / alone_s:.2f} | {most} | {loaded} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
