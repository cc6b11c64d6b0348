"""`meshmend doctor`: what is installed, which engines work here, what JAX sees, and how to fix the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from meshmend import __version__
from meshmend.cli.common import exit_on_error, print_json
from meshmend.cli.options import JsonOption
from meshmend.cli.terminal import plain, print_line, working
from meshmend.doctor import Finding, Status, examine
from meshmend.doctor.examine import TIMEOUT_S

_LOOKS: dict[Status, tuple[str, str]] = {"works": ("✓", "green"), "absent": ("–", "yellow"), "broken": ("✗", "red")}


def command(
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="S", help="Time limit per engine, in seconds.")
    ] = TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Check what is installed and run every engine once, each in a separate process.

    Green works, yellow is not installed (or not possible here), red is installed but broken; each yellow and red line
    says what to do. The exit code is 1 if a line is red.
    """
    with exit_on_error(json):
        with working("looking around", json) as working_on:
            findings = examine(timeout_s=timeout, on_trial=lambda name: working_on(f"trying {name}"))
        broken = [finding for finding in findings if finding.status == "broken"]
        if json:
            print_json(
                {
                    "meshmend": __version__,
                    "healthy": not broken,
                    "findings": [asdict(finding) for finding in findings],
                }
            )
        else:
            _show(findings)
        if broken:
            raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
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
