"""`meshmend lab doctor`: which parts of the laboratory work here, and how to fix the rest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Annotated

import typer

from meshmend.cli.doctor import tell_findings
from meshmend.cli.options import JsonOption
from meshmend.cli.terminal import working
from meshmend.doctor import Finding
from meshmend.doctor.examine import TIMEOUT_S, run_probe
from meshmend_lab import simgrid

PROBES = "meshmend_lab.probes"


def command(
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="S", help="Time limit per trial, in seconds.")
    ] = TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Check what the laboratory needs besides Python packages: network namespaces, and SimGrid.

    Example: sudo meshmend lab doctor
    """
    with working("looking around", json):
        findings = [look_at_iproute2(), try_mesh(timeout), try_simgrid(timeout)]
    tell_findings(findings, json)


def look_at_iproute2() -> Finding:
    """Return whether the commands that make namespaces and links are here, and their version."""
    ip = shutil.which("ip")
    if ip is None or shutil.which("tc") is None:
        detail = "no ip and tc on the PATH: meshmend lab mesh"
        return Finding("packages", "iproute2", "absent", detail, "apt-get install iproute2")
    try:
        done = subprocess.run([ip, "-V"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("packages", "iproute2", "broken", f"ip -V: {error}", "apt-get install --reinstall iproute2")
    version = re.search(r"iproute2-([\w.]+)", done.stdout)
    return Finding("packages", "iproute2", "works", version[1] if version else done.stdout.strip())


def try_mesh(timeout_s: float) -> Finding:
    """Return whether a mesh of namespaces can be made here."""
    iproute2 = look_at_iproute2()
    if iproute2.status != "works":
        return Finding("engines", "mesh", "absent", f"not tried: {iproute2.detail}", iproute2.advice)
    if os.geteuid() != 0:
        detail = "not tried: creating network namespaces needs root"
        return Finding("engines", "mesh", "absent", detail, "sudo meshmend lab mesh up 4x4")
    install = "pip install meshmend-lab (in a checkout: pip install . ./lab)"
    finding, _ = run_probe("engines", "mesh", "try_mesh", {}, timeout_s, install, module=PROBES)
    if finding.status == "broken" and "not permitted" in finding.detail:
        advice = "run the container with --privileged, or with the capabilities SYS_ADMIN and NET_ADMIN"
        return Finding("engines", "mesh", "absent", f"root may not create namespaces here: {finding.detail}", advice)
    return finding


def try_simgrid(timeout_s: float) -> Finding:
    """Return whether SimGrid is here, and agrees with a prediction."""
    install = "apt-get install python3-simgrid"
    if not simgrid.is_available():
        advice = f"{install} (and set {simgrid.INTERPRETER_VARIABLE} to its python3 if needed)"
        return Finding("engines", "SimGrid", "absent", "no Python here can import simgrid", advice)
    return run_probe("engines", "SimGrid", "try_simgrid", {}, timeout_s, install, module=PROBES)[0]
