"""What JAX processes in network namespaces measure is the rate of the cable between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import meshmend as mm
from meshmend_lab.mesh import Lab
from namespaces import needs_lab


def measure_in_processes(coordinator: str, prefixes: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """Return what each process of a job measures, whose command begins with its prefix."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    module = [sys.executable, "-m", "jax_engine.measured_links", coordinator]
    words = [[*prefix, *module, str(number), str(len(prefixes))] for number, prefix in enumerate(prefixes)]
    running = [
        subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in words
    ]
    try:
        told = [process.communicate(timeout=180) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


@pytest.mark.slow
@needs_lab
def test_processes_in_namespaces_are_not_called_switched(tmp_path: Path) -> None:
    """Two of them exchange over the cable between them, whose rate is found, and which others would have to share."""
    lab = Lab.up(mm.Mesh("1x2"), rate="100mbit", name="jaxmeasured")  # `Lab.temporary` forks, which JAX warns of
    try:
        prefixes = []
        for chip, namespace in lab.namespaces.items():
            # XLA's Gloo publishes the address of the host's name.
            hosts = tmp_path / f"hosts-{chip[1]}"
            hosts.write_text(f"127.0.0.1 localhost\n{lab.address(chip)} {socket.gethostname()}\n")
            shell = f'mount --bind {hosts} /etc/hosts && exec "$@"'
            prefixes.append(("ip", "netns", "exec", namespace, "sh", "-c", shell, "sh"))
        found = measure_in_processes(f"{lab.address((0, 0))}:29500", prefixes)
    finally:
        lab.down()
    assert [each["is_switched"] for each in found] == [False, False]
    for each in found:
        assert each["link_bytes_per_s"] == pytest.approx(lab.rate_bytes_per_s, rel=0.25)
