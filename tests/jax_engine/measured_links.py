"""One of several processes of a JAX job with a device each, which measures: for tests.

python -m jax_engine.measured_links COORDINATOR PROCESS PROCESSES
"""

from __future__ import annotations

import json
import sys

import jax

import meshmend.jax as mmj


def main(coordinator: str, process: int, processes: int) -> None:
    """Join the others, measure a row of chips, and print what was found."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process)
    found = mmj.measure(mmj.discover(shape=f"1x{processes}"))
    print(json.dumps({"is_switched": found.is_switched, "link_bytes_per_s": found.link_bytes_per_s}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
