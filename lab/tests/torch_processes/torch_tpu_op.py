"""Run by test_torch_tpu.py in an environment with torch_tpu: our op on meta tensors and in an FX graph; writes facts.

Python 3.12 or later; `pip install torch_tpu==0.2.0 torch==2.14.1 jax optax` and meshmend's own dependencies. Without a
GPU, `pip install --no-deps torch` and empty libraries in the place of CUDA's are enough to import it.
"""

import json
import os
import sys
from importlib.metadata import version

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import torch
import torch_tpu  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import meshmend as mm
from meshmend_lab.export import torch_tpu as tpu

WORLD, ELEMENTS = 64, 1 << 20


def main() -> None:
    schedule = mm.plan(mm.Mesh("8x8", failed=["2x2@2,2"]), "weave", chunks=60)
    lowered = tpu.over_ranks(schedule, None, WORLD)
    # CPU devices in the place of get_pallas_mesh's: torch_tpu exports for TPUs, whatever the mesh's devices are.
    op = tpu.tpu_op(lowered, jax.sharding.Mesh(np.array(jax.devices()), ("chip",)))
    part = tpu.part_of(lowered, 0, op, "meta")
    out = op(torch.empty(1, ELEMENTS, device="meta"), list(part.rows))
    with FakeTensorMode():
        payload = torch.empty(1, ELEMENTS)
        rows = [torch.empty(row.shape, dtype=row.dtype) for row in part.rows]
        graph = make_fx(lambda payload, rows: op(payload * 2, rows) + 1)(payload, rows).graph
    ours = [node for node in graph.nodes if node.op == "call_function" and "meshmend" in str(node.target)]
    try:
        op(torch.zeros(1, ELEMENTS), [torch.zeros(row.shape, dtype=row.dtype) for row in part.rows])
        real_call = "it summed something"
    except Exception as error:
        real_call = f"{type(error).__name__}: {error}"
    facts = {
        "python": list(sys.version_info[:3]),
        "torch": torch.__version__,
        "torch_tpu": version("torch_tpu"),
        "jax": jax.__version__,
        "world": WORLD,
        "shape": list(out.shape),
        "dtype": str(out.dtype),
        "device": str(out.device),
        "nodes": len(ours),
        "graph": str(graph),
        "schema": str(op._opoverload._schema),
        "real_call": real_call[:300],
    }
    sys.stdout.write(json.dumps(facts) + "\n")


main()
