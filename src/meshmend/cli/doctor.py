"""`meshmend doctor`: what is installed, which engines work here, how fast JAX's devices are, how to fix the rest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshmend import __version__
from meshmend.cli.common import check_output, print_facts, print_json
from meshmend.cli.options import JsonOption, option
from meshmend.cli.terminal import plain, print_line, working
from meshmend.cost.hardware import hardware_facts, read_hardware
from meshmend.cost.units import name_rate, name_seconds
from meshmend.doctor import Finding, Status, examine
from meshmend.doctor.examine import TIMEOUT_S, ask, jax_environment, virtual_devices
from meshmend.errors import MeshmendError, ParameterError
from meshmend.extras import require
from meshmend.topology import Mesh

_LOOKS: dict[Status, tuple[str, str]] = {"works": ("✓", "green"), "absent": ("–", "yellow"), "broken": ("✗", "red")}


def command(
    timeout: Annotated[float, option("--timeout", "S", "Time limit per engine, in seconds.", min=1.0)] = TIMEOUT_S,
    measure: Annotated[
        Path | None,
        option("--measure", "FILE.json", "Only measure JAX's devices, and write the file that --hardware takes."),
    ] = None,
    shape: Annotated[
        str | None, option("--shape", "SHAPE", "With --measure: virtual CPU devices in this mesh.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check what is installed and run every engine once, each in a separate process.

    Green works, yellow is not installed (or not possible here), red is installed but broken; each yellow and red line
    says what to do. The exit code is 1 if a line is red.

    With --measure no engine is tried. It measures the cost of a step, a message and a byte on JAX's devices, or on
    virtual ones, in less than a minute.

    Example: meshmend doctor --measure mine.json --shape 4x4
    """
    if measure is not None:
        _measure(measure, shape, timeout, json)
        return
    if shape is not None:
        raise ParameterError("--shape says which mesh is measured: give --measure FILE.json as well.")
    with working("looking around", json) as working_on:
        findings = examine(timeout_s=timeout, on_trial=lambda name: working_on(f"trying {name}"))
    tell_findings(findings, json)


def tell_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """Print findings, and exit with 1 if one of them is broken."""
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        facts = [asdict(finding) for finding in findings]
        print_json({"meshmend": __version__, "healthy": not broken, "findings": facts})
    else:
        _show(findings)
    if broken:
        raise typer.Exit(1)


def _measure(path: Path, shape: str | None, timeout_s: float, json: bool) -> None:
    check_output("--measure", path, (".json",))
    require("jax", "optax", needed_for="Measuring", extra="jax")
    environment = jax_environment() if shape is None else virtual_devices(Mesh(shape).n_chips)
    words = ["-m", "meshmend.doctor.probes", "measure_jax", str(path.absolute()), *([shape] if shape else [])]
    with working("measuring", json):
        facts, failure = ask(words, environment, timeout_s)
    if failure is not None:
        raise MeshmendError(f"Nothing was measured: {failure.removeprefix('meshmend.errors.ParameterError: ')}")
    hardware = read_hardware(path)
    if json:
        print_json({"file": str(path), "mesh": facts["mesh"], **hardware_facts(hardware)})
        return
    width = hardware.links_at_once
    print_facts(
        facts["detail"],
        {
            "per link": name_rate(hardware.link_bytes_per_s),
            "per step": name_seconds(hardware.step_latency_s + hardware.hop_latency_s),
            "per message": name_seconds(hardware.message_s),
            "per collective": name_seconds(hardware.start_s),
            "links at once": "all" if width is None else str(width),
        },
    )
    print_line(f"Written to {plain(path)}. Wherever a preset's name is taken, the file is taken:")
    where = f"meshmend plan {facts['mesh'].partition(' ')[0]} --payload 4MB --hardware {shlex.quote(str(path))}"
    print_line("  ", (plain(where), "cyan"))


def _show(findings: Sequence[Finding]) -> None:
    # Soft-wrapped, not in a table: a command that is split over two lines cannot be copied.
    print_line((f"meshmend {__version__}", "bold"))
    width = max(len(finding.name) for finding in findings)
    for section in dict.fromkeys(finding.section for finding in findings):
        print_line("\n", (section, "bold"))
        for finding in (one for one in findings if one.section == section):
            mark, colour = _LOOKS[finding.status]
            took = f" ({finding.seconds:.1f} s)" if finding.seconds is not None else ""
            name = (f" {finding.name:<{width}}  ", "cyan")
            print_line((mark, colour), name, plain(finding.detail), (took, "dim"))
            for line in finding.advice.splitlines() if finding.advice else ():
                print_line(f"  {'':<{width}}  ", (f"→ {plain(line)}", colour))
    counts = {status: sum(finding.status == status for finding in findings) for status in _LOOKS}
    work, absent, broken = (counts[status] for status in ("works", "absent", "broken"))
    print_line("\n", (f"{work} work", "green"), ", ", (f"{absent} absent", "yellow"), ", ", (f"{broken} broken", "red"))
