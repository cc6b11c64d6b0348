"""What an operator copies from examples/operate: it names what is served, and the real Prometheus takes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch.made_up_jobs import everything, lived_through, write
from launch.prometheus import FOLDER, ask, needs_prometheus
from meshmend.launch.metrics import serve_metrics
from meshmend.launch.processes import die_with_parent, free_port
from timelines import read_account

pytest.importorskip("prometheus_client")


@pytest.mark.parametrize("name", ["alerts.yml", "alerts_test.yml", "dashboard.json"])
def test_only_what_is_served_is_asked_for(name: str, tmp_path: Path) -> None:
    asked = set(re.findall(r"\bmeshmend_\w+", (FOLDER / name).read_text(encoding="utf-8")))
    served = {sample.name for metric in everything(tmp_path) for sample in metric.samples}
    assert asked
    assert asked <= served


@needs_prometheus
def test_promtool_takes_the_rules_and_their_tests() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def runbook() -> tuple[str, dict[str, str]]:
    """Return the table of the runbook, and its section of each alert."""
    page = (FOLDER.parents[1] / "docs/operate.md").read_text(encoding="utf-8")
    part = page.partition("\n## When an alert fires\n")[2].partition("\n## ")[0]
    table, *sections = re.split(r"^### ", part, flags=re.M)
    return table, {title: text for title, _, text in (one.partition("\n") for one in sections) if title != "The rules"}


def test_the_runbook_has_a_section_for_each_alert_the_critical_ones_first() -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in rules}
    table, sections = runbook()
    rows = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (\w+) \| .+ \|$", table, re.M)
    assert {name: said for name, _, said in rows} == severity
    assert [name for name, _, _ in rows] == list(sections)
    assert [said for *_, said in rows] == sorted(severity.values())  # critical, then warning


def test_the_commands_of_the_runbook_run(tmp_path: Path) -> None:
    """What it looks at and changes, in order, on a job that has lived through something."""
    write(lived_through(0), tmp_path / "shared")
    (tmp_path / "shared/fault_log.jsonl").touch()
    table, sections = runbook()
    inline = re.findall(r"`((?:meshmend (?:watch|quarantine)|grep|tail) [^`]+)`", table + "".join(sections.values()))
    quarantine = 'meshmend quarantine add shared 2,3 --why "somebody must, before it can be cleared"'
    commands = [quarantine, *(command for command in dict.fromkeys(inline) if "--metrics" not in command)]
    assert len(commands) >= 10
    for command in commands:
        words = command.replace("meshmend ", f"{sys.executable} -m meshmend ", 1) if command[0] == "m" else command
        done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, command + done.stdout + done.stderr


@needs_prometheus
def test_a_real_prometheus_scrapes_a_job(tmp_path: Path) -> None:
    account = read_account(write(lived_through(2), tmp_path / "job"))
    assert account is not None
    metrics, port = free_port(), free_port()
    configuration = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    configuration = configuration.replace("127.0.0.1:9464", f"127.0.0.1:{metrics}").replace("10s", "1s")
    (tmp_path / "prometheus.yml").write_text(configuration)
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (
        serve_metrics(tmp_path / "job", "127.0.0.1", metrics),
        subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        ) as prometheus,
    ):
        try:
            until = time.monotonic() + 60
            while not (found := ask(port, "meshmend_goodput_ratio")) and time.monotonic() < until:
                time.sleep(0.2)
            (goodput,) = found
            assert float(goodput["value"][1]) == pytest.approx(account.goodput)
            # The job has been silent for years, and says so.
            while not (fired := ask(port, 'ALERTS{alertname="MeshmendNoStep"}')) and time.monotonic() < until:
                time.sleep(0.2)
            assert fired[0]["metric"]["alertstate"] == "firing"
            assert ask(port, 'ALERTS{alertname="MeshmendHostLost"}') == []
        finally:
            prometheus.terminate()
