"""The paper's workloads, compiled for its machines by the real TPU compiler: what a device computes, sends and holds.

    python lab/benchmarks/paper_workloads.py                     # all of table 2: about half an hour on two cores
    python lab/benchmarks/paper_workloads.py --model resnet-50 --shape 32x32 --json
    python lab/benchmarks/paper_workloads.py --model gpt-small --topology v6e:4x4 --hole 0,1 --tile 2x2 --batch 1

The last compiles one step for any slice, with `auto`'s plan; with --tile, its weights are split inside tiles. It needs
pip install 'meshmend-lab[workloads]'.

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
    from meshmend.jax.compile.for_topology import slice_fabric
    from workloads import WORKLOADS, compile_workload

    full = mm.Mesh(shape)
    # What a device computes by itself does not depend on how many there are.
    topology = "v3:4x4" if alone else f"v3:{shape}"
    fabric = slice_fabric(topology, failed=[hole] if hole else [], wrap=False)
    batch = GLOBAL_BATCH[model] // (2 * full.n_chips)
    schedule = None if alone else mm.plan(fabric.mesh, "row-pairs")
    report = compile_workload(topology, WORKLOADS[model], schedule, fabric, batch=batch)
    facts = {"model": model, "shape": shape, "failed": hole, "batch_per_device": batch, "sends": not alone}
    return facts | dataclasses.asdict(report)


def measure_on(topology: str, model: str, hole: str | None, tile: str | None, batch: int) -> dict[str, Any]:
    """Compile one train step for a slice, on tiles if there are any."""
    import meshmend as mm
    import meshmend.jax as mmj
    from meshmend.jax.compile.for_topology import slice_fabric
    from workloads import WORKLOADS, compile_workload, payload_of

    chips = slice_fabric(topology, failed=[hole] if hole else [])
    fabric = chips if tile is None else mmj.tile(chips, tile)
    payload_bytes = payload_of(WORKLOADS[model], fabric, batch=batch)
    schedule = mm.plan(fabric.mesh, "auto", payload_bytes=payload_bytes, hardware=fabric.hardware)
    report = compile_workload(topology, WORKLOADS[model], schedule, fabric, batch=batch)
    facts = {"model": model, "failed": hole, "tile": tile, "batch_per_device": batch, "payload_bytes": payload_bytes}
    return facts | dataclasses.asdict(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*GLOBAL_BATCH, "gpt-small"], action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--topology", help="compile for this slice instead, as in v6e:4x4")
    parser.add_argument("--hole", help="with --topology: the failed chips")
    parser.add_argument("--tile", help="with --topology: cut it into tiles, as in 2x2")
    parser.add_argument("--batch", type=int, default=16, help="with --topology: examples per device")
    options = parser.parse_args()
    if options.topology:
        for model in options.model or GLOBAL_BATCH:
            print(json.dumps(measure_on(options.topology, model, options.hole, options.tile, options.batch)))
        return
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
