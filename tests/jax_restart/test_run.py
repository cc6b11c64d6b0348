"""`meshmend run` as a user starts it: one command, a host that is killed, and a job that goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from jax_restart.command import ROOT, SCRIPT, environment, events_of, meshmend
from meshmend.launch.processes import children, free_port
from meshmend.launch.timeline import read_timeline
from waiting import until

CRD = os.environ.get("JOBSET_CRD")
TELL_PORT = """
    if step.number == 1:
        import json, os
        print("coordinator", json.loads(os.environ["MESHMEND_ROUND"])["coordinator"])
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""Addresses of loopback, as Linux lists those of listeners."""


@contextmanager
def repeating(do: Callable[[], None], every_s: float) -> Iterator[None]:
    """Do something again and again in a thread, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            do()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def scraping(port: int, scraped: list[str]) -> Iterator[None]:
    """Ask for a job's metrics all the time, as Prometheus does; the last answer is what counts."""

    def ask() -> None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            if text := answer.read().decode():  # a process that is just ending may say nothing more
                scraped.append(text)

    with repeating(ask, every_s=0.1):
        yield
    assert {"8", "4"} <= set(re.findall(r'^meshmend_chips{state="live"} (\d+)', "\n".join(scraped), re.M))


@contextmanager
def listing(found: set[tuple[str, int]]) -> Iterator[None]:
    """Collect the addresses and ports at which any process below this one listens, as `ss -ltp` shows them."""

    def look() -> None:
        own = set()
        for pid in children(os.getpid()):
            with suppress(OSError):
                own |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, where, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in own:
                    address, _, port = where.partition(":")
                    found.add((address, int(port, 16)))

    with repeating(look, every_s=0.2):
        yield


def address_of_this_machine() -> set[str]:
    """Where Gloo listens, which JAX has no setting for: at the address of the machine's name."""
    address = socket.inet_aton(socket.gethostbyname(socket.gethostname()))[::-1].hex().upper()
    return {address, "0000000000000000FFFF0000" + address}


def check_lines(path: Path) -> None:
    """Every line says of which job, round and host it is, and those of steps which step."""
    events = read_timeline(path)
    assert {"process", "step", "kept", "host lost", "recovered"} <= {event["event"] for event in events}
    for event in events:
        assert {"job", "round", "host"} <= event.keys(), event
        assert event["event"] not in ("step", "kept", "saved", "host lost", "recovered") or "step" in event
    assert {event["round"] for event in events} == {1, 2}


def check_accounts(watched: dict[str, Any], scraped: str) -> None:
    """What is watched adds up, and the metrics say the same as far as they got."""
    assert watched["state"] == "over"
    assert watched["step"] == 30
    (recovery,) = watched["recoveries"]
    assert (recovery["lost"], recovery["joined"], recovery["source"]) == ([1], [], "memory")
    assert watched["training_s"] + sum(watched["badput_s"].values()) == pytest.approx(watched["total_s"])
    found = dict(re.findall(r"^(meshmend_\w+(?:{[^}]*})?) (\S+)$", scraped, re.M))
    assert float(found["meshmend_steps_total"]) > 20  # it is asked ten times a second
    assert float(found['meshmend_chips{state="failed"}']) == 4
    assert float(found["meshmend_hosts_needed"]) == 1
    total = float(found['meshmend_recovery_seconds_sum{stage="total"}'])
    assert total == pytest.approx(recovery["total_s"])
    parts = [float(value) for name, value in found.items() if name.startswith("meshmend_badput_seconds_total")]
    in_all = float(found["meshmend_training_seconds_total"]) + sum(parts)
    assert in_all == pytest.approx(float(found["meshmend_job_seconds_total"]))


def test_a_job_goes_on_when_a_host_is_killed(tmp_path: Path) -> None:
    slower = "    __import__('time').sleep(0.2 * (step.chips == 8))\n    if step.number in"  # to be scraped meanwhile
    (tmp_path / "train.py").write_text(SCRIPT.replace("    if step.number in", slower) + TELL_PORT)
    port, scraped = free_port(), [""]
    words = ["--local", "2x4", "--host", "2x2", "--kill", "1@10", "--shared", "shared"]
    words += ["--metrics", f"127.0.0.1:{port}"]
    listeners: set[tuple[str, int]] = set()
    with scraping(port, scraped), listing(listeners):
        lines = meshmend("run", *words, "train.py", folder=tmp_path)
    lost, _ = events_of(tmp_path / "shared", "host lost", "recovered")
    assert (lost["lost"], lost["chips"]) == ([1], [[0, 2], [0, 3], [1, 2], [1, 3]])
    check_lines(tmp_path / "shared" / "timeline" / "host-0.jsonl")
    check_accounts(json.loads("".join(meshmend("watch", "shared", "--once", "--json", folder=tmp_path))), scraped[-1])
    assert "meshmend │ round 1: hosts 0, 1 start" in lines
    assert "host 0 │ step 1 on 8 chips" in lines
    coordinator = next(int(line.rpartition(":")[2]) for line in lines if " │ coordinator 127.0.0.1:" in line)
    assert {address for address, its_port in listeners if its_port == coordinator} <= LOOPBACK
    assert {port, coordinator} < {its_port for _, its_port in listeners}, "the store and Gloo listen, too"
    assert {address for address, _ in listeners} <= LOOPBACK | address_of_this_machine()
    pattern = r"meshmend │ host 1 is killed after step (\d+), its memory is lost"
    ((killed, last),) = ((at, int(found[1])) for at, line in enumerate(lines) if (found := re.fullmatch(pattern, line)))
    assert 10 <= last < 30
    started = lines.index("meshmend │ round 2: host 0 starts")
    assert killed < started < lines.index("host 0 │ step 30 on 4 chips")
    assert "meshmend │ round 1 ends: host 1 is lost: its connection to the store broke" in lines
    assert "host 1 │ step 30 on 4 chips" not in lines
    told = next(line for line in lines if line.startswith("meshmend │ round 2: training again on 4 chips: "))
    # Until it is known what copies cost, there is one after 4 steps and every 8 from then on.
    found = re.search(r"resumed from step (\d+) \(memory\), step (\d+) is done [\d.]+ s after the failure \(", told)
    assert found is not None
    assert 4 <= int(found[1]) < int(found[2]) <= int(found[1]) + 1
    assert re.fullmatch(r"meshmend │ done: 30 steps on 8, then 4 chips in \d+ s", lines[-1])


@pytest.mark.parametrize(
    ("number", "error", "status"),
    [
        (signal.SIGINT, b"Error: Interrupted.", 130),
        pytest.param(signal.SIGTERM, b"", 143, marks=pytest.mark.slow),
    ],
)
def test_control_c_or_sigterm_ends_everything(
    number: signal.Signals, error: bytes, status: int, tmp_path: Path
) -> None:
    script = "import os, time; print('waiting', os.environ['MESHMEND_HOST']); time.sleep(600)"
    (tmp_path / "wait.py").write_text(script)
    words = ["run", "--local", "2x4", "--host", "2x2", "--cold", "wait.py"]
    # A shell starts what it runs in the background deaf to SIGINT, and that is inherited.
    hear = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", hear, sys.executable, "-m", "meshmend", *words]
    driver = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stderr is not None
    with driver:
        n_waiting = 0
        while n_waiting < 2:
            line = driver.stdout.readline()
            assert line, "it has ended"
            n_waiting += b"waiting" in line
        below = children(driver.pid)
        driver.send_signal(number)
        said, errors = driver.stdout.read(), driver.stderr.read()
        assert b"interrupted: all hosts are stopped; no checkpoint is there yet" in said
        assert errors.strip() == error
        assert driver.wait(30) == status
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), timeout_s=10)
    assert len(below) >= 7  # the store; two hosts, what starts their workers, and the workers


MANIFESTS = ["jobset.yaml", "jobset-bucket.yaml"]


def read_manifest(name: str) -> Any:
    return yaml.safe_load((ROOT / "examples/operate" / name).read_text(encoding="utf-8"))


def refuse_unknown_fields(schema: Any) -> None:
    """Make a CRD's schema as strict as `kubectl --validate=strict`: a field it does not name is an error."""
    if isinstance(schema, dict):
        open_ended = {"additionalProperties", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource"}
        if schema.get("properties") and not open_ended & schema.keys():
            schema["additionalProperties"] = False
        for part in schema.values():
            refuse_unknown_fields(part)
    elif isinstance(schema, list):
        for part in schema:
            refuse_unknown_fields(part)


@pytest.mark.skipif(CRD is None, reason="set JOBSET_CRD to jobset.x-k8s.io_jobsets.yaml of a JobSet release")
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_is_one_that_jobset_takes(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    (version,) = yaml.safe_load(Path(str(CRD)).read_text(encoding="utf-8"))["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    refuse_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own, not in a CRD
    validator = jsonschema.Draft7Validator(schema)
    manifest = read_manifest(name)
    assert manifest["apiVersion"].split("/")[1] == version["name"]
    assert [error.message for error in validator.iter_errors(manifest)] == []
    # A schema that takes everything would prove nothing.
    manifest["spec"]["replicatedJobs"][1]["template"]["spec"]["backoffLimits"] = 1
    assert [list(error.path)[-1] for error in validator.iter_errors(manifest)] == ["spec"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_starts_what_the_command_line_has(name: str) -> None:
    """The commands in the manifest are parsed by ours."""
    from typer.main import get_command

    from meshmend.cli import app

    manifest = read_manifest(name)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    jobs = {job["name"]: job for job in manifest["spec"]["replicatedJobs"]}
    assert jobs["hosts"]["replicas"] == 8
    assert set(manifest["spec"]["successPolicy"]["targetReplicatedJobs"]) <= jobs.keys()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for job in jobs.values():
        pod = job["template"]["spec"]["template"]["spec"]
        assert pod["restartPolicy"] in ("OnFailure", "Never")  # all that a Job allows
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        words = container["command"]
        if words[0] == "bash":
            words = words[2].replace("$(cat /etc/meshmend/host)", "3").removeprefix("exec ").split()
        assert words[0] == "meshmend"
        commands[words[1]].make_context(words[1], list(words[2:]))
