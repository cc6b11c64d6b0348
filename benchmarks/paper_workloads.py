"""The paper's workloads, compiled for its machines by the real TPU compiler: what a device computes, sends and holds.

    python benchmarks/paper_workloads.py                     # all of table 2: about half an hour on two cores
    python benchmarks/paper_workloads.py --model resnet-50 --shape 32x32 --json

Batches are those of MLPerf v0.7 at 1024 chips (32,768 images, 8,192 sequences), and the same global batch on 512.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

HOLE = "4x2@6,8"
GLOBAL_BATCH = {"resnet-50": 32_768, "bert-large": 8_192}
SHAPES = ("16x32", "32x32")


def measure(model: str, shape: str, hole: str | None, *, alone: bool) -> dict[str, Any]:
    """Compile one train step; `alone` leaves out everything that is sent."""
    import meshmend as mm
    from meshmend.jax.compiling.ahead_of_time import slice_fabric
    from meshmend.jax.workloads import compile_workload, find_workload

    full = mm.Mesh(shape)
    # What a device computes by itself does not depend on how many there are.
    topology = "v3:4x4" if alone else f"v3:{shape}"
    fabric = slice_fabric(topology, failed=[hole] if hole else [], wrap=False)
    batch = GLOBAL_BATCH[model] // (2 * full.n_chips)
    schedule = None if alone else mm.plan(fabric.mesh, "row-pairs")
    workload = find_workload(model)
    report = compile_workload(topology, workload, schedule, fabric, batch=batch)
    facts = {"model": model, "shape": shape, "failed": hole, "batch_per_device": batch, "sends": not alone}
    return facts | dataclasses.asdict(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(GLOBAL_BATCH), action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args()
    if not options.json:
        print(f"{'model':11}{'chips':>11}{'batch':>6}{'GFLOP':>9}{'GB moved':>9}{'est. ms':>8}", end="")
        print(f"{'args GB':>8}{'temp GB':>8}{'permutes':>9}{'compile s':>10}")
    for model in options.model or GLOBAL_BATCH:
        for shape in options.shape or SHAPES:
            for hole, alone in ((None, True), (None, False), (HOLE, False)):
                facts = measure(model, shape, hole, alone=alone)
                if options.json:
                    print(json.dumps(facts), flush=True)
                    continue
                where = f"1 ({shape})" if alone else str(facts["chips"])
                print(
                    f"{model:11}{where:>11}{facts['batch_per_device']:6}{facts['flops'] / 1e9:9.1f}"
                    f"{facts['accessed_bytes'] / 1e9:9.2f}{facts['estimated_seconds'] * 1e3:8.1f}"
                    f"{facts['argument_bytes'] / 1e9:8.2f}{facts['temporary_bytes'] / 1e9:8.2f}"
                    f"{facts['permutes']:9}{facts['compile_seconds']:10.0f}"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
