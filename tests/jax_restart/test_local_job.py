"""A job on one machine: nothing outlives its driver, and the example trains through the failure of a host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_restart.command import runs
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.processes import children
from waiting import until


@pytest.mark.parametrize(("warm", "count"), [(False, 4), (True, 5)])
def test_nothing_outlives_a_driver_that_is_killed(warm: bool, count: int, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(600)")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from meshmend.launch.hosts import Hosts; from meshmend.launch.local import LocalJob\n"
        f"with LocalJob([{str(worker)!r}], Hosts.of('2x2', '2x2'), Path({str(tmp_path)!r}), warm={warm}) as hosts:\n"
        "    hosts.start(); hosts.wait(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(children(driver.pid)) >= count)
        alive = children(driver.pid)
        assert len(alive) == count  # store, what forks hosts, host, what starts workers, worker
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    until(lambda: not any(runs(pid) for pid in alive), timeout_s=10)


FORKED = """
import json, os, random, sys, time
import numpy as np
environ, folder = open("/proc/self/environ").read(), "/proc/self/fd/"
facts = {
    "draws": [random.random(), np.random.random()], "jax": "jax" in sys.modules, "main": __name__,
    "argv": sys.argv[1:], "threads": len(os.listdir("/proc/self/task")), "above": os.getppid(),
    "secret": "MESHMEND_SECRET" in os.environ or "MESHMEND_SECRET" in environ,
    "open": [os.readlink(folder + n).partition(":")[0] for n in os.listdir(folder) if os.path.islink(folder + n)],
    "processors": os.environ["OMP_NUM_THREADS"],
}
print(json.dumps(facts), flush=True)
while os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


def test_hosts_are_forked_and_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with settings of its own, which a library may have read when it was imported, is started by itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text(FORKED)
    (tmp_path / "hold").touch()
    said: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}

    with LocalJob(
        ["worker.py", "hold"],
        Hosts.of("1x3", "1x1"),
        tmp_path / "shared",
        on_line=lambda host, line: said[host].append(json.loads(line)),
        environment=lambda host: {"OMP_NUM_THREADS": "2"} if host == 1 else {},
    ) as job:

        def after_a_look(condition: Callable[[], bool]) -> bool:
            job.watch(0.1)
            return condition()

        job.start()
        until(lambda: after_a_look(lambda: all(said.values())), "the first lines")
        forked = [pid for pid in children(job._nursery._process.pid) if runs(pid)] if job._nursery else []
        assert [one[0]["above"] in forked for one in said.values()] == [True, False, True]
        job.kill(2)
        until(lambda: after_a_look(lambda: min(len(said[0]), len(said[1])) == 2), "the next round")
        job.start(2)
        until(lambda: after_a_look(lambda: min(map(len, said.values())) >= 2), "the round of all")
        (tmp_path / "hold").unlink()
        assert job.wait(120) == {0: 0, 1: 0, 2: 0}
    first = [one[0] for one in said.values()]
    assert len({draw for one in said.values() for each in one for draw in each["draws"][:1]}) >= 6
    assert len({one["draws"][1] for one in first}) == 3
    for one in first:
        facts = ("jax", "main", "argv", "secret", "threads")
        assert [one[name] for name in facts] == [True, "__main__", ["hold"], False, 1]
        assert sorted(one["open"]) == sorted(first[1]["open"]), (
            "no descriptor more than that of a host that was not forked"
        )
    assert [one["processors"] for one in first] == ["1", "2", "1"]


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
