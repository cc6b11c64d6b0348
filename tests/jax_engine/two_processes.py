"""Two processes of one JAX job, with eight devices each, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from meshmend.launch.processes import free_port


def run_two(module: str, *, timeout_s: float) -> list[Any]:
    """Run a module as both processes, with the coordinator's address and its number; return their last lines' JSON."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    words = [sys.executable, "-m", module, f"localhost:{free_port()}"]
    running = [
        subprocess.Popen([*words, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    told = [process.communicate(timeout=timeout_s) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]
