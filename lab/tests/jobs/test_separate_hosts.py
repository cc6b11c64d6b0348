"""Jobs whose hosts share no network stack: names that resolve to loopback, hosts that vanish, IPv6."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshmend.launch.addresses import join_address
from meshmend.launch.membership import SILENT_S
from meshmend.launch.processes import free_port
from namespaced_job import NamespacedJob, unsupported_reason
from network import has_ipv6

WHY_NOT = unsupported_reason()
needs_namespaces = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
STEPS, RATE = 40, 0.05
SCRIPT = f"""
import json, os, sys, time
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj
from network import listening

job = mmj.Job(global_batch=12, disk_every=0, compile_ahead=False, hardware="cpu-xla", memory_every=1)
for step in job.train(
    lambda w, x: (x @ w - 1) ** 2, optax.sgd({RATE}), jnp.zeros(4), np.ones((48, 4), np.float32), steps={STEPS}
):
    print("step", step.number, "on", step.chips, "at", *sorted({{host for host, _ in listening()}}), flush=True)
    until = time.time() + (0.1 if step.number < {STEPS} // 2 else 600)
    while time.time() < until and not os.path.exists(os.environ["MESHMEND_SHARED"] + "/hurry"):
        time.sleep(0.05)
print("params", json.dumps(job.params.tolist()), flush=True)
"""
"""Every host prints, with each step, the addresses at which it listens, by the kernel's own list.

Half-way it waits until the test has done all that it has to do.
"""


def expected_params() -> list[float]:
    """Gradient descent by hand: all samples are ones, so that the mean gradient is 2·(Σw − 1) for each weight."""
    w = np.zeros(4)
    for _ in range(STEPS):
        w -= RATE * 2 * (w.sum() - 1)
    return [float(value) for value in w]


def check_done(output: str) -> None:
    found = re.search(r"params \[(.*)\]", output)
    assert found is not None, output
    assert [float(word) for word in found[1].split(",")] == pytest.approx(expected_params(), rel=1e-5), output


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
@needs_namespaces
def test_hosts_whose_names_mean_loopback_train_and_survive_a_power_cut(tmp_path: Path, script: Path) -> None:
    """Of the host with JAX's coordinator: no packet of its own says that it is gone."""
    with NamespacedJob([script], tmp_path, "1x3", options=["--hosts", "2:3"]) as job:
        job.start()
        job.until(lambda: "step 5 on 3" in job.output(1), timeout_s=120)
        at = job.power_off(0)
        job.until(lambda: re.search(r"step \d+ on 2", job.output(1)) is not None, timeout_s=120)
        seconds, said = time.time() - at, job.output("store")
        job.start(0)
        job.until(lambda: "on 3" in job.output(1).rpartition("on 2")[2], timeout_s=120)
        (job.shared / "hurry").touch()
        assert job.wait(timeout_s=120) == {0: 0, 1: 0, 2: 0}, job.outputs()
        for host in range(3):
            check_done(job.output(host))
            where = set(re.findall(r"step \d+ on \d at (.*)", job.output(host)))
            assert where == {job.address(host)}, "no host listens anywhere else"
            assert "Gloo listens" not in job.output(host)
        # By its silence, or because its neighbours do not find it any more, which takes Linux about as long.
        assert re.search("host 0 is lost: (not heard from for 10 s|its connection to the store broke)", said), said
        assert SILENT_S / 2 < seconds < SILENT_S + 25, "the silence that counts as death, and a restart"


@pytest.mark.slow
@needs_namespaces
def test_a_job_on_one_machine_listens_on_loopback_only(tmp_path: Path, script: Path) -> None:
    with NamespacedJob([script], tmp_path, "1x1", resolves_to=None) as job:
        (job.shared / "hurry").touch()
        local = ("--local", "1x2", "--host", "1x1", "--shared", str(job.shared))
        status, output = job.call(0, "run", *local, str(script), timeout_s=120)
        assert status == 0, output
        assert set(re.findall(r"step \d+ on 2 at (.*)", output)) == {"127.0.0.1"}, output
        check_done(output)


@pytest.mark.slow
@needs_namespaces
def test_a_host_on_the_machine_of_the_store_is_reached_by_the_others(tmp_path: Path, script: Path) -> None:
    """It comes to the store over loopback, as its machine's name means that there; and it has JAX's coordinator."""
    with NamespacedJob([script], tmp_path, "1x2", store_on=0) as job:
        (job.shared / "hurry").touch()
        job.start()
        assert job.wait(timeout_s=120) == {0: 0, 1: 0}, job.outputs()
        for host in range(2):
            check_done(job.output(host))
            assert set(re.findall(r"step \d+ on 2 at (.*)", job.output(host))) == {job.address(host)}


WITHOUT = """
import jaxlib
real = jaxlib._jax.make_gloo_tcp_collectives
jaxlib._jax.make_gloo_tcp_collectives = lambda distributed_client: real(distributed_client)
"""
"""As if jaxlib took no address: JAX itself passes none."""


@needs_namespaces
@pytest.mark.slow
def test_where_the_address_cannot_be_set_a_line_says_what_to_do_and_that_helps(tmp_path: Path, script: Path) -> None:
    script.write_text(WITHOUT + SCRIPT)
    with NamespacedJob([script], tmp_path, "1x2") as job:
        job.start()
        line = r"No other host reaches this one: (\S+) resolves to 127\.0\.1\.1 here, .* Let (\S+) stand for (\S+) in "
        job.until(lambda: all(re.search(line, job.output(host)) for host in range(2)), timeout_s=120)
        for host in range(2):
            found = re.search(line, job.output(host))
            assert found is not None
            assert (found[1], found[3]) == (found[2], job.address(host)), "each host is told its own name and address"
            assert "step 1" not in job.output(host)
    (tmp_path / "again").mkdir()
    with NamespacedJob([script], tmp_path / "again", "1x2", resolves_to=None) as job:  # as the line says
        (job.shared / "hurry").touch()
        job.start()
        assert job.wait(timeout_s=120) == {0: 0, 1: 0}, job.outputs()
        check_done(job.output(0))


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_job_of_two_hosts_runs_over_ipv6(tmp_path: Path, script: Path) -> None:
    """The store, JAX's coordinator and Gloo."""
    shared, where = tmp_path / "shared", join_address("::1", free_port("::1"))
    shared.mkdir()
    (shared / "hurry").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHMEND", "XLA"))}
    environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    meshmend = [sys.executable, "-m", "meshmend"]
    machine = ["--hosts", "2:2", "--shape", "1x2", "--host", "1x1", "--store", where, "--shared", str(shared)]
    commands = [
        [*meshmend, "store", "--listen", where],
        *([*meshmend, "run", *machine, "--host-index", str(host), str(script)] for host in range(2)),
    ]
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment | {"MESHMEND_MEMORY": str(tmp_path / f"memory-{i}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands)
    ]
    try:
        said = [one.communicate(timeout=120)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0, 0, 0], said
    for output in said[1:]:
        assert set(re.findall(r"step \d+ on 2 at (.*)", output)) == {"::1"}, output
        check_done(output)
