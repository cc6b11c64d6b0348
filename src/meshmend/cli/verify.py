"""`meshmend verify`: prove a schedule from a file, or what `meshmend export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.common import print_json, without_devices
from meshmend.cli.options import JsonOption
from meshmend.cli.plan import schedule_facts, show_schedule
from meshmend.cli.terminal import working
from meshmend.errors import MissingExtraError
from meshmend.extras import require
from meshmend.schedule.artefact import Artefact, read_artefact
from meshmend.schedule.serialize import load
from meshmend.schedule.verify import verify


def command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A schedule that `plan --save` wrote, .npz or .txt; or an export's folder."
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Prove a saved schedule: every contribution exactly once, over live chips and cables only.

    Of a folder that `meshmend export` wrote, the plan is proven, the tables are held to it, and so is the program, if
    these versions of JAX and meshmend wrote it.

    Example: meshmend verify plan.npz
    Example: meshmend verify plan-artefact/
    """
    if file.is_dir():
        with working("reading and proving", json):
            artefact = read_artefact(file)
            checked = _check_program(artefact)
        facts = schedule_facts(artefact.schedule, artefact.proof)
        facts |= {"manifest_sha256": artefact.digest, "versions": dict(artefact.versions), "program": checked}
        more = {"tables": "those of the plan", "program": checked, "manifest": f"SHA-256 {artefact.digest}"}
        schedule, proof = artefact.schedule, artefact.proof
    else:
        schedule = load(file)
        with working(f"proving {schedule.n_transfers:,} transfers", json):
            proof = verify(schedule)
        facts, more = schedule_facts(schedule, proof), {}
    if json:
        print_json(facts)
    else:
        show_schedule(schedule, proof, more)


def _check_program(artefact: Artefact) -> str:
    """Return what is known about an artefact's program; raise an error if it is another than its plan's."""
    wrote = " and ".join(f"{name} {version}" for name, version in artefact.versions.items() if name != "jaxlib")
    try:
        require("jax", "optax", "flatbuffers", needed_for="Comparing the program", extra="export")
    except MissingExtraError as error:
        return f"not compared: {error.missing} is not installed. {wrote} wrote it"
    without_devices()
    from meshmend.jax.compiling import check_program

    if check_program(artefact):
        return "that of the plan, byte by byte"
    return f"not compared: {wrote} wrote it, and other versions are here. Export the plan again to be sure"
