"""Run a kernel with a credit too many, or as it is, in its own process: `python broken_credit.py broken|whole MODE`.

From JAX 0.12 on a race is an error on one device, while others still run: nothing else can be run in that process.
"""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}

import meshmend as mm
from kernel_cases import integers, run_made, without_credit
from meshmend_lab.pallas.instructions import instructions_of

if __name__ == "__main__":
    schedule = mm.plan(mm.Mesh("1x3"), "weave", chunks=6)
    made = instructions_of(schedule)
    payload = integers(schedule.mesh, schedule.total_chunks, 1, 128)
    chosen = without_credit(made) if sys.argv[1] == "broken" else made
    run_made(schedule, chosen, payload, sys.argv[2])
