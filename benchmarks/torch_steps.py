"""DDP under torchrun over loopback, start to end: the same script of small steps with Gloo and with meshmend.

    python benchmarks/torch_steps.py                    4 processes as 2x2, 600 steps, 3 runs of each, alternating
    python benchmarks/torch_steps.py --shape 2x3 --steps 100 --repeat 1

A run lasts from the start of torchrun to its end, imports and rendezvous included. CPU seconds are those of all of its
processes: on a machine that does other work they say more than the clock does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshmend.topology import Mesh

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
{first}
{second}
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
clock_s, cpu_s = time.monotonic(), time.process_time()
for step in range({steps}):
    ddp(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
clock_s, cpu_s = time.monotonic() - clock_s, time.process_time() - cpu_s
weights = sum(float(weight.detach().double().sum()) for weight in model.parameters())
dist.destroy_process_group()
if int(os.environ["RANK"]) == 0:
    with open(sys.argv[1], "w") as file:
        file.write(f"{{clock_s}} {{cpu_s}} {{weights}}")
"""
"""The two lines that differ are those that docs/torch.md shows."""
LINES = {
    "gloo": ("", 'dist.init_process_group("gloo")'),
    "meshmend": (
        "import meshmend.torch as mmt",
        'dist.init_process_group("cpu:meshmend", pg_options=mmt.MeshOptions("{shape}"))',
    ),
}


def run(backend: str, shape: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run the script once; return its seconds, CPU seconds, and what rank 0 measured of the loop."""
    first, second = (line.format(shape=shape) for line in LINES[backend])
    script, result = folder / f"train_{backend}.py", folder / "result"
    script.write_text(SCRIPT.format(first=first, second=second, steps=steps))
    n_processes = str(Mesh(shape).n_chips)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n_processes]
    # Installed packages come with bytecode; without this, a checkout would be compiled in every process.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(script), str(result)], check=True, env=environment)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    loop_s, loop_cpu_s, weights = map(float, result.read_text().split())
    return {"seconds": seconds, "cpu_s": cpu_s, "loop_s": loop_s, "loop_cpu_s": loop_cpu_s, "weights": weights}


def main() -> None:
    """Run both in turn, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="2x2", help="the mesh, one process per chip")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each backend; the medians count")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in LINES}
    with tempfile.TemporaryDirectory() as folder:
        for backend in runs:  # so that both find their files in memory
            run(backend, options.shape, 1, Path(folder))
        for _ in range(options.repeat):
            for backend, found in runs.items():
                found.append(run(backend, options.shape, options.steps, Path(folder)))
    medians = {
        backend: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for backend, found in runs.items()
    }
    gloo, ours = medians["gloo"], medians["meshmend"]
    if abs(gloo["weights"] - ours["weights"]) > 1e-4:
        raise SystemExit(f"The weights differ: {gloo['weights']} with Gloo, {ours['weights']} with meshmend.")
    ratios = {name: ours[name] / gloo[name] for name in gloo if name != "weights"}
    if options.json:
        print(json.dumps({"steps": options.steps, "medians": medians, "ratios": ratios}))
        return
    print(f"{options.steps} steps of DDP under torchrun on {options.shape}, medians of {options.repeat} runs in turn")
    print(f"{'':30}{'Gloo':>9}{'meshmend':>10}{'ratio':>8}")
    names = {
        "seconds": "seconds, start to end",
        "cpu_s": "CPU seconds, all processes",
        "loop_s": "seconds of the loop",
        "loop_cpu_s": "CPU seconds of rank 0's loop",
    }
    for name, words in names.items():
        print(f"{words:30}{gloo[name]:9.2f}{ours[name]:10.2f}{ratios[name]:8.2f}")


if __name__ == "__main__":
    main()
