"""Run a kernel with a credit too many, or as it is, in its own process: `python broken_credit.py broken|whole MODE`.

From JAX 0.12 on a race is an error on one device, while others still run: nothing else can be run in that process.
"""

import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
sys.path.insert(0, str(Path(__file__).parents[2]))

import meshmend as mm
from jax_engine.pallas.kernel_cases import fabric_for, integers, run_made, without_credit
from meshmend.jax.engine.pallas.instructions import instructions_of

if __name__ == "__main__":
    schedule = mm.plan(mm.Mesh("1x3"), "weave", chunks=6)
    made = instructions_of(schedule)
    payload = integers(schedule.mesh, schedule.total_chunks, 1, 128)
    chosen = without_credit(made) if sys.argv[1] == "broken" else made
    run_made(fabric_for(schedule.mesh), chosen, payload, sys.argv[2])
