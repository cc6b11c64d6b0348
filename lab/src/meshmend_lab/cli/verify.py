"""`meshmend lab verify`: prove what `meshmend lab export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.common import print_json, without_devices
from meshmend.cli.options import JsonOption
from meshmend.cli.plan import schedule_facts, show_schedule
from meshmend.cli.terminal import working
from meshmend.errors import MissingExtraError
from meshmend_lab.export.artefact import Artefact, read_artefact
from meshmend_lab.extras import require


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `meshmend lab export` wrote.")],
    json: JsonOption = False,
) -> None:
    """Prove the plan of an export, and compare its tables and its program with the plan.

    The program is compared if these versions of JAX and meshmend wrote it.

    Example: meshmend lab verify plan-artefact/
    """
    with working("reading and proving", json):
        artefact = read_artefact(folder)
        checked = _check_program(artefact)
    if json:
        more = {"manifest_sha256": artefact.digest, "versions": dict(artefact.versions), "program": checked}
        print_json(schedule_facts(artefact.schedule, artefact.proof) | more)
    else:
        shown = {"tables": "those of the plan", "program": checked, "manifest": f"SHA-256 {artefact.digest}"}
        show_schedule(artefact.schedule, artefact.proof, shown)


def _check_program(artefact: Artefact) -> str:
    """Return what is known about an artefact's program; raise an error if it is another than its plan's."""
    wrote = " and ".join(f"{name} {version}" for name, version in artefact.versions.items() if name != "jaxlib")
    try:
        require("jax", "optax", "flatbuffers", needed_for="Comparing the program", extra="export")
    except MissingExtraError as error:
        return f"not compared: {error.missing} is not installed. {wrote} wrote it"
    without_devices()
    from meshmend_lab.export.exporting import check_program

    if check_program(artefact):
        return "that of the plan, byte by byte"
    return f"not compared: {wrote} wrote it, and other versions are here. Export the plan again to be sure"
