"""A job on one machine: nothing outlives its driver, and the example trains through the failure of a host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jax_restart.command import runs
from meshmend.launch.processes import children
from waiting import until


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(600)")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from meshmend.launch.hosts import Hosts; from meshmend.launch.local import LocalJob\n"
        f"with LocalJob([{str(worker)!r}], Hosts.of('2x2', '2x2'), Path({str(tmp_path)!r}), warm=False) as hosts:\n"
        "    hosts.start(); hosts.wait(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(children(driver.pid)) >= 4)
        alive = children(driver.pid)
        assert len(alive) == 4  # store, host, what starts workers, worker
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    until(lambda: not any(runs(pid) for pid in alive), timeout_s=10)


@pytest.mark.slow
def test_the_example_trains_through_the_loss_of_a_host(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    command = [sys.executable, "examples/jax/train_through_failure.py", "--no-view", "--figure", str(figure)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == list(range(1, 46))
    assert sorted(set(result["chips"])) == [56, 64]
    assert result["resumed_from"] == "memory"
    assert result["resumed_step"] >= result["killed_after_step"] - 1
    assert result["last_loss"] < 0.6 * result["first_loss"]
    assert figure.read_bytes().startswith(b"\x89PNG")
