"""What certificates cost: jobs of four hosts that lose one, with TLS at JAX's coordinator and without, in turn.

    python lab/benchmarks/tls_join.py --runs 5

Needs JAX 0.12 or later and `cryptography`. It prints how long it takes from the start of a job until all processes have
joined, how long they take to join again after the loss of a host, and how long a host's agent takes to sign a
certificate, for the first time and later. It ends with status 1 if a start takes more than 0.3 s longer with
certificates in the median, or a recovery more than 0.2 s.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax

from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import read_timeline, timeline_of

LONGER_S = {"start": 0.3, "recovery": 0.2}
SCRIPT = """
import os, sys, time
if sys.argv[1] == "without":
    os.environ.pop("MESHMEND_TLS", None)
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(os.environ["MESHMEND_SHARED"], 16, disk_every=0, compile_ahead=False, hardware="cpu-xla")
for step in job.train(lambda w, x: x @ w, optax.sgd(0.1), jnp.zeros(4), np.ones((64, 4), np.float32), steps=40):
    print("step", step.number, step.chips, flush=True)
    time.sleep(0.1)
"""
SIGN = """
import time
import meshmend.launch.host
began = time.perf_counter()
from meshmend.launch.certificates import make_credentials
make_credentials("secret", "job", 0)
first = time.perf_counter()
make_credentials("secret", "job", 0)
print(first - began, time.perf_counter() - first)
"""


def run_job(folder: Path, how: str) -> dict[str, float]:
    """Run a job, kill a host, and return how long it took until all had joined, and how long to join again."""
    script, lines = folder / "train.py", list[str]()
    script.write_text(SCRIPT)
    job = LocalJob(
        [str(script), how], Hosts.of("2x2", "1x1"), folder / "shared", on_line=lambda _, line: lines.append(line)
    )
    with job:
        began = time.time()
        job.start()
        while job.running and "step 10 4" not in lines:
            job.watch(0.05)
        job.kill(3)
        job.wait(120)
    events = [event for host in range(4) for event in read_timeline(timeline_of(folder / "shared", host))]
    joins = [event for event in events if event["event"] == "join"]
    return {
        "start": max(event["at"] + event["seconds"] for event in joins if event["round"] == 1) - began,
        "recovery": max(event["seconds"] for event in joins if event["round"] == 2),
    }


def main() -> None:
    """Run jobs in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        raise SystemExit(f"JAX {jax.__version__} has no TLS: 0.12 has.")
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for number in range(2 * runs):
        how = ("without", "with")[number % 2]
        with tempfile.TemporaryDirectory(prefix="meshmend-") as name:
            found[how].append(run_job(Path(name), how))
        print(f"{how:7}", *(f"{what} {seconds:.3f} s" for what, seconds in found[how][-1].items()), flush=True)
    signing: Any = [
        [float(word) for word in subprocess.check_output([sys.executable, "-c", SIGN], text=True).split()]
        for _ in range(runs)
    ]
    first, later = (median(times) for times in zip(*signing, strict=True))
    print(f"to sign a certificate: {first:.3f} s with its imports, {later:.4f} s later")
    failed = False
    for what, signs_s in (("start", first), ("recovery", later)):
        medians = {how: median(one[what] for one in each) for how, each in found.items()}
        longer = medians["with"] + signs_s - medians["without"]  # an agent signs in both cases
        failed |= longer > LONGER_S[what]
        print(
            f"{what}: all have joined after {medians['with']:.3f} s with certificates, {medians['without']:.3f} s "
            f"without; with the signing {longer:.3f} s longer (at most {LONGER_S[what]:g})"
        )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
