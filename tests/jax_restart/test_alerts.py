"""Every alert fires for its cause on a real job that a real Prometheus scrapes, and none fires in a clean hour.

One job of four hosts is hung, loses a host, makes no copies any more, loses another host, and finds signs against two
chips where it may leave out one. Prometheus has the rules as they are shipped, with one change: each `for: Nm` is N
seconds. The clean hour has no change of rules, but its time is simulated: what Prometheus has recorded of the same job
before anything happened to it, its start and then its steady part over and over, is what `promtool` is given as an
hour.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from jax_restart.command import environment
from launch.observations import signs_against
from launch.prometheus import FOLDER, ask, needs_prometheus
from meshmend.errors import QuarantineError
from meshmend.launch import Hosts
from meshmend.launch.processes import die_with_parent, free_port, kill_tree
from meshmend.quarantine import report

pytest.importorskip("prometheus_client")

SCRIPT = """
import time
from pathlib import Path
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj
from meshmend.jax.state.memory.peer_copy import Mirror

if Path("no-copies").exists():
    Mirror.keep = lambda *_, **__: None
job = mmj.Job(shared="shared", global_batch=16, memory_every=1, disk_every=0)
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
data = [{"x": row, "y": row.sum()} for row in x]


def loss(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


for step in job.train(loss, optax.sgd(0.01), {"w": jnp.zeros(4)}, data, steps=10**6):
    time.sleep(0.1)
    while Path("hang").exists():
        time.sleep(0.1)
"""
ALERTS = {rule["alert"] for rule in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]}
HOST_LOST, NO_STEP, ONE_LOSS, STALE, UNCOVERED, QUARANTINED, LIMIT = (
    "MeshmendHostLost",
    "MeshmendNoStep",
    "MeshmendOneFailureFromWaiting",
    "MeshmendCopiesStale",
    "MeshmendUncoveredLoss",
    "MeshmendChipQuarantined",
    "MeshmendQuarantineLimit",
)
CLEAN_S = 40
INTERVAL_S = 5
Series = dict[str, list[tuple[float, float]]]


@contextmanager
def running(words: list[str], folder: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the test, nor its children."""
    with (folder / f"output-{Path(words[0]).name}").open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent, **more
        )
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def hosts_of(driver: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the hosts of `meshmend run --local`, which one process forks in order."""
    mine = children_of(driver.pid)
    (nursery,) = [pid for pid in mine if b"launch.nursery" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return sorted(children_of(nursery))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Watched:
    """The job, as Prometheus at a port sees it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seen: set[str] = set()

    def firing(self) -> set[str]:
        """Return the alerts that fire now."""
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/alerts", timeout=30) as it:
            alerts = json.load(it)["data"]["alerts"]
            now = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
            self.seen |= now
            return now
        return set()

    def value(self, query: str) -> float | None:
        """Return the value of a series now, None if there is none."""
        found = ask(self.port, query)
        return float(found[0]["value"][1]) if found else None

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 600.0) -> float:
        """Wait for something; return how many seconds that took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, f"{what}: firing {self.firing()}"
            time.sleep(0.5)
        took = time.monotonic() - began
        logging.getLogger(__name__).info("%s: after %.0f s, firing %s", what, took, sorted(self.firing()))
        return took

    def recorded(self) -> Series:
        """Return all that the rules ask for, as it was scraped."""
        names = sorted(set(re.findall(r"\bmeshmend_\w+", (FOLDER / "alerts.yml").read_text())))
        found: Series = {}
        for one in ask(self.port, f'{{__name__=~"{"|".join(names)}"}}[30m]'):
            labels = dict(one["metric"])
            inside = ", ".join(f'{name}="{value}"' for name, value in labels.items() if name != "__name__")
            found[f"{labels['__name__']}{{{inside}}}"] = [(float(at), float(value)) for at, value in one["values"]]
        return found


def clean_hour(recorded: Series, steady_from: float, steady_until: float) -> dict[str, Any]:
    """Return a test for `promtool` in which what was recorded goes on for an hour, and no alert may fire."""
    began = min(samples[0][0] for samples in recorded.values())
    steady_s = steady_until - steady_from

    def when(seconds: float) -> float:
        """The recorded moment that stands for one of the hour."""
        at = began + seconds
        return at if at < steady_until else steady_from + (at - steady_until) % steady_s

    def values(name: str, samples: list[tuple[float, float]]) -> Iterator[str]:
        for seconds in range(0, 3600 + INTERVAL_S, INTERVAL_S):
            at = when(seconds)
            known = [value for then, value in samples if then <= at]
            if not known:
                yield "_"
            else:
                # Times of day keep their age.
                yield repr(seconds - (at - known[-1]) if "_timestamp_seconds" in name else known[-1])

    series = [{"series": name, "values": " ".join(values(name, samples))} for name, samples in recorded.items()]
    checks = [{"eval_time": f"{minute}m", "alertname": alert} for minute in range(61) for alert in sorted(ALERTS)]
    return {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": [{"interval": f"{INTERVAL_S}s", "input_series": series, "alert_rule_test": checks}],
    }


def run_promtool(test: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(FOLDER / "alerts.yml", folder)
    (folder / "hour.yml").write_text(yaml.safe_dump(test))
    command = ["promtool", "test", "rules", "hour.yml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def configure(folder: Path, metrics: int) -> None:
    """Write Prometheus's files, as shipped, but for a job at this port, and with seconds for minutes in `for:`."""
    configuration = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    configuration = configuration.replace("127.0.0.1:9464", f"127.0.0.1:{metrics}").replace("10s", "2s")
    (folder / "prometheus.yml").write_text(configuration)
    rules, n_changed = re.subn(r"^(\s+for: \d+)m$", r"\1s", (FOLDER / "alerts.yml").read_text(), flags=re.M)
    assert n_changed == 4
    (folder / "alerts.yml").write_text(rules)


@needs_prometheus
@pytest.mark.slow
def test_every_alert_fires_for_its_cause_and_none_in_a_clean_hour(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hour").mkdir()
    metrics, port = free_port(), free_port()
    configure(tmp_path, metrics)
    run = [sys.executable, "-m", "meshmend", "run", "--local", "2x2", "--host", "1x1", "--hosts", "3:4"]
    run += ["--shared", "shared", "--metrics", f"127.0.0.1:{metrics}", "train.py"]
    scrape = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (
        running(run, tmp_path, env=environment()) as driver,
        running([*scrape, f"--web.listen-address=127.0.0.1:{port}"], tmp_path),
    ):
        provoke(Watched(port), driver, tmp_path)


def provoke(job: Watched, driver: subprocess.Popen[bytes], folder: Path) -> None:
    # Nothing happens.
    job.until(lambda: job.value("meshmend_compiled_ahead_ratio") == 1.0, "all losses are compiled for")
    job.until(lambda: job.firing() == set(), "nothing fires")  # compiling took longer than half a shortened hour
    steady_from = time.time()
    while time.time() < steady_from + CLEAN_S:
        assert job.firing() == set()
        time.sleep(1.0)
    hour = clean_hour(job.recorded(), steady_from, time.time())
    done = run_promtool(hour, folder / "hour")
    assert done.returncode == 0, done.stdout + done.stderr
    # The same hour with a host that is lost in it fails, so the test can.
    for one in hour["tests"][0]["input_series"]:
        if "meshmend_hosts{" in one["series"] and 'state="lost"' in one["series"]:
            one["values"] = " ".join([*one["values"].split()[:360], *["1.0"] * 361])
    assert HOST_LOST in run_promtool(hour, folder / "hour").stderr

    # The job hangs.
    (folder / "hang").touch()
    took = job.until(lambda: job.firing() == {NO_STEP}, "no step")
    assert took > 25  # not sooner than half a minute, but for the interval of the scrapes
    (folder / "hang").unlink()
    job.until(lambda: job.firing() == set(), "steps again")

    # A host is lost: of the three that are left, the one in the middle must not be lost, nor may any other. And the
    # script, as it is started again, makes no copies any more.
    (folder / "no-copies").touch()
    job.seen.clear()
    pids = hosts_of(driver)
    kill_tree(pids[3])
    job.until(lambda: {HOST_LOST, ONE_LOSS} <= job.firing(), "a host is lost")
    job.until(lambda: job.firing() == {HOST_LOST, ONE_LOSS, STALE, UNCOVERED}, "no copies, and a loss without a plan")
    assert job.value('meshmend_hosts{state="lost"}') == 1
    assert job.value("meshmend_compiled_ahead_ratio") == pytest.approx(2 / 3)

    # Another one, and the job waits.
    kill_tree(pids[2])
    job.until(lambda: job.value('meshmend_job_state{state="waiting"}') == 1, "the job waits")
    job.until(lambda: NO_STEP in job.firing(), "no step while it waits")
    assert job.value('meshmend_hosts{state="lost"}') == 2

    # Its checks find a chip, and then another one, which is past the limit.
    machine = Hosts.of("2x2", "1x1")
    assert not {QUARANTINED, LIMIT} & job.seen
    report(folder / "shared", signs_against("0,1", 0), attempt=1, verified=0, hosts=machine)
    job.until(lambda: QUARANTINED in job.firing(), "a chip is quarantined")
    assert LIMIT not in job.seen
    with pytest.raises(QuarantineError, match="may leave out 1"):
        report(folder / "shared", signs_against("1,0", 1), attempt=1, verified=0, hosts=machine)
    job.until(lambda: LIMIT in job.firing(), "the limit is reached")
    assert job.seen == ALERTS
