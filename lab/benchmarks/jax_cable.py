"""A cable is cut under `meshmend run`: how long until training goes on, what is lost, and who sends how much then.

    sudo python lab/benchmarks/jax_cable.py
    sudo python lab/benchmarks/jax_cable.py --renew 3 --shape 3x3 --cable 0,1-1,1

One host per chip, on the links of a lab, and the store beside the first. The machine's file has the hosts' addresses.
Routes around the cable are set so many seconds after the cut (`--renew`), as a routing daemon would.
Losses are held against one process that trains alone on all samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from meshmend import Mesh
from meshmend_lab.mesh import Lab

WIDTH, BATCH = 128, 12
SCRIPT = f"""
import sys, time, jax, jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj

inputs = np.random.default_rng(1).normal(size=({BATCH}, {WIDTH})).astype(np.float32)
job = mmj.Job(global_batch={BATCH}, disk_every=0, memory_every=1, hardware="cpu-xla", compile_ahead=False)


def loss(w, x):
    return (((x @ w - x[:, ::-1]) ** 2).mean(axis=1))


for step in job.train(loss, optax.sgd(1.0), jnp.zeros(({WIDTH}, {WIDTH})), inputs, steps=int(sys.argv[1])):
    print(f"{{time.time():.3f}} step {{step.number}}: loss {{step.loss:.7f}} on {{job.fabric.mesh}}", flush=True)
    time.sleep(0.05)
"""
Step = tuple[float, int, float, str]
"""When a step ended, its number, its loss, and the mesh."""


def describe(lab: Lab, path: Path) -> None:
    """Write the machine's file, with a name and an address for each host."""
    chips = [lab.mesh.chip(rank) for rank in range(lab.mesh.n_chips)]
    named = {"host" + "-".join(map(str, chip)): {"at": list(chip), "address": lab.address(chip)} for chip in chips}
    facts = {"meshmend": 1, "shape": "x".join(map(str, lab.mesh.shape)), "chips": named}
    path.write_text(json.dumps(facts), encoding="utf-8")


def steps_of(log: Path) -> list[Step]:
    """Return the steps that a host has printed."""
    found = re.findall(r"([\d.]+) step (\d+): loss ([\d.]+) on (.*)", log.read_text() if log.exists() else "")
    return [(float(at), int(number), float(loss), mesh) for at, number, loss, mesh in found]


def sent(lab: Lab) -> dict[str, dict[str, int]]:
    """Return how many bytes each interface of each host has sent, by the kernel's account."""
    found = {}
    for chip, namespace in lab.namespaces.items():
        words = ["ip", "netns", "exec", namespace, "cat", "/proc/net/dev"]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        rows = (line.split() for line in text.splitlines()[2:])
        ports = {row[0].rstrip(":"): int(row[9]) for row in rows}
        found[str(chip)] = {port: n for port, n in ports.items() if port not in ("lo", "chip0")}
    return found


def alone(n_steps: int) -> list[float]:
    """Return the losses of plain gradient descent, in double precision."""
    inputs = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32).astype(np.float64)
    w, found = np.zeros((WIDTH, WIDTH)), []
    for _ in range(n_steps):
        error = inputs @ w - inputs[:, ::-1]
        found.append(float((error**2).mean()))
        w -= 2 * inputs.T @ error / error.size
    return found


def main() -> None:
    """Cut the cable after a third of the steps, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2x3")
    parser.add_argument("--rate", default="40mbit")
    parser.add_argument("--cable", default="0,1-0,2")
    parser.add_argument("--renew", type=float, default=1.0, help="seconds until routes lead around the cable")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    mesh, third = Mesh(options.shape), options.steps // 3
    with tempfile.TemporaryDirectory() as name, Lab.temporary(mesh, rate=options.rate) as lab:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        describe(lab, folder / "machine.json")
        (folder / "secret").write_text("of this run only")
        (folder / "secret").chmod(0o600)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHMEND")}
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
        environment |= {"XLA_FLAGS": flags, "RES_OPTIONS": "timeout:1 attempts:1"}
        store = f"{lab.address(mesh.chip(0))}:29400"
        common = ["--store", store, "--secret-file", str(folder / "secret"), "--shared", str(folder / "shared")]
        common += ["--machine", str(folder / "machine.json"), "--host", "x".join("1" for _ in mesh.shape)]
        common += ["--hosts", f"{mesh.n_chips}:{mesh.n_chips}"]
        (folder / "shared").mkdir()
        started = []

        def start(chip: tuple[int, ...], log: str, *words: str) -> None:
            command = ["ip", "netns", "exec", lab.namespace(chip), sys.executable, "-m", "meshmend", *words]
            own = {"MESHMEND_MEMORY": str(folder / f"memory-{log}")}
            with (folder / log).open("w") as output:
                started.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, env=environment | own, cwd=folder
                    )
                )

        try:
            start(mesh.chip(0), "store", "store", "--listen", store, "--secret-file", str(folder / "secret"))
            for rank in range(mesh.n_chips):
                words = ("run", *common, "--host-index", str(rank), str(folder / "train.py"), str(options.steps))
                start(mesh.chip(rank), f"host-{rank}", *words)
            counts: dict[str, tuple[int, dict[str, dict[str, int]]]] = {}
            first = folder / "host-0"

            def count_at(step: int, name: str) -> None:
                while (done := steps_of(first)[-1:]) == [] or done[0][1] < step:
                    if started[1].poll() is not None:
                        raise SystemExit(first.read_text()[-4000:] + (folder / "store").read_text()[-2000:])
                    time.sleep(0.02)
                counts[name] = (done[0][1], sent(lab))

            count_at(third // 2, "a")
            count_at(third, "b")
            left, cut_at = lab.cut(options.cable), time.time()
            time.sleep(options.renew)
            left.renew()
            count_at(2 * third, "c")
            count_at(options.steps - 5, "d")
            for one in started[1:]:
                one.wait(120)
            show(steps_of(first), counts, cut_at, options)
            print((folder / "store").read_text()[-1500:])
            print((folder / "shared" / "quarantine.json").read_text())
        finally:
            for one in started:
                one.kill()
                one.wait()


def show(
    steps: list[Step],
    counts: dict[str, tuple[int, dict[str, dict[str, int]]]],
    cut_at: float,
    options: argparse.Namespace,
) -> None:
    """Print the stall, the losses, and what each interface sent before and after."""
    print(f"meshmend run on {options.shape}, {options.cable} cut, routes renewed after {options.renew:g} s")
    before = [step for step in steps if step[0] <= cut_at]
    anew = next(step for step in steps if "cable" in step[3])
    print(f"the last step before the cut is {before[-1][1]}, the first around the cable {anew[1]}, on {anew[3]}")
    gaps = [(b[0] - a[0], b) for a, b in itertools.pairwise(steps) if b[0] > cut_at]
    stall, after = max(gaps)
    print(f"it ended {anew[0] - cut_at:.1f} s after the cut; the longest gap: {stall:.1f} s before step {after[1]}")
    numbers = [step[1] for step in steps]
    print(f"steps done twice: {len(numbers) - len(set(numbers))}")
    pace = [b[0] - a[0] for a, b in itertools.pairwise(before[10:])]
    later = [b[0] - a[0] for a, b in itertools.pairwise([step for step in steps if step[1] > anew[1] + 5])]
    print(f"a step before: {statistics.median(pace):.3f} s, after: {statistics.median(later):.3f} s")
    expected = alone(max(numbers))
    apart = max(abs(step[2] - expected[step[1] - 1]) for step in steps)
    print(f"losses differ from plain gradient descent by at most {apart:.1e} (the first is {expected[0]:.3f})")
    for name, a, b in (("before", "a", "b"), ("after", "c", "d")):
        print(f"kB per step that each host sent on each of its interfaces, {name}:")
        n = counts[b][0] - counts[a][0]
        for chip, ports in counts[b][1].items():
            then = counts[a][1][chip]
            print(f"  {chip}:", {port: round((now - then[port]) / n / 1000, 1) for port, now in ports.items()})


if __name__ == "__main__":
    main()
