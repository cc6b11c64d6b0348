"""`meshmend verify`: prove a schedule from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshmend.cli.common import print_json
from meshmend.cli.options import JsonOption
from meshmend.cli.plan import schedule_facts, show_schedule
from meshmend.cli.terminal import working
from meshmend.schedule.serialize import load
from meshmend.schedule.verify import verify


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A schedule that `plan --save` wrote.")],
    json: JsonOption = False,
) -> None:
    """Prove a saved schedule: every contribution exactly once, over live chips and cables only.

    Example: meshmend verify plan.npz
    """
    schedule = load(file)
    with working(f"proving {schedule.n_transfers:,} transfers", json):
        proof = verify(schedule)
    if json:
        print_json(schedule_facts(schedule, proof))
    else:
        show_schedule(schedule, proof, {})
