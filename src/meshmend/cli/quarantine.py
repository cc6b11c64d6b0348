"""`meshmend quarantine`: the chips, cables and hosts that a job leaves out, and how long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.buckets import is_bucket
from meshmend.cli.common import print_json
from meshmend.cli.options import JsonOption, option
from meshmend.cli.root import Command, CommandGroup
from meshmend.cli.terminal import plain, print_line, print_rows
from meshmend.cli.watch import duration
from meshmend.cost.units import parse_seconds
from meshmend.errors import LaunchError, ParameterError
from meshmend.launch.watching import find_machine
from meshmend.quarantine import Quarantined, QuarantineList, Suspect

app = typer.Typer(
    cls=CommandGroup,
    help="Chips, cables and hosts that a job leaves out, because they compute wrong numbers or are slow.",
    no_args_is_help=True,
)

FolderArgument = Annotated[str, typer.Argument(metavar="DIR|URL", help="The job's shared folder.")]
SuspectsArgument = Annotated[
    list[str], typer.Argument(metavar="SUSPECT...", help="A chip 2,3, a cable 2,3-2,4 or a host 'host 5'.")
]
CHANGES = "It counts from the next start of the job's processes on."


@app.command("list", cls=Command)
def list_entries(
    folder: FolderArgument,
    every: Annotated[bool, option("--all", "", "Also what has expired or was cleared.")] = False,
    json: JsonOption = False,
) -> None:
    """List what a job leaves out, who said so, why, and until when.

    Example: meshmend quarantine list shared
    """
    entries = _open(folder)
    found = [_facts(entry) for entry in (entries.read() if every else entries.active())]
    if json:
        print_json({"folder": folder, "entries": found})
    elif found:
        _show(found)
    else:
        print_line(f"Nothing is in quarantine in {plain(folder)}.")


@app.command("add", cls=Command)
def add(
    folder: FolderArgument,
    suspects: SuspectsArgument,
    why: Annotated[str, option("--why", "REASON", "The reason, for those who read the list.")] = "",
    length: Annotated[str, option("--for", "TIME", "How long, as in 7d, 12h, 30min or 90s.")] = "7d",
    json: JsonOption = False,
) -> None:
    """Leave out chips, cables or hosts. Entries by hand do not count towards the limit of the job's own entries.

    Example: meshmend quarantine add shared 2,3 --why "fails the burn-in" --for 30d
    """
    entries, hosts = _open(folder), find_machine(folder)
    for_s = parse_seconds(length)
    wanted = [Suspect.parse(text) for text in suspects]
    if hosts is not None:  # all of them or none
        for suspect in wanted:
            suspect.check(hosts.shape, len(hosts))
    made = [_facts(entries.add(one, why=why or "added by hand", for_s=for_s, hosts=hosts)) for one in wanted]
    if json:
        print_json({"folder": folder, "entries": made})
    else:
        _show(made)
        print_line(CHANGES)


@app.command("clear", cls=Command)
def clear(
    folder: FolderArgument,
    suspects: Annotated[list[str] | None, typer.Argument(metavar="SUSPECT...", help="As in `add`.")] = None,
    every: Annotated[bool, option("--all", "", "Everything that is listed.")] = False,
    json: JsonOption = False,
) -> None:
    """Take suspects off the list: they were tested or replaced. Observations against them count no longer.

    Example: meshmend quarantine clear shared 2,3
    """
    if every == bool(suspects):
        raise ParameterError("Which ones? Give suspects, as in 2,3, or --all.")
    wanted = [Suspect.parse(text) for text in suspects or ()]
    gone = _open(folder).clear(None if every else wanted)
    if json:
        print_json({"folder": folder, "cleared": [_facts(entry) for entry in gone]})
    elif names := [str(entry.suspect) for entry in gone] + [
        f"{one} (of observations)" for one in wanted if one not in {entry.suspect for entry in gone}
    ]:
        print_line(f"Cleared: {', '.join(names)}. {CHANGES}")
    else:
        print_line(f"Nothing was in quarantine in {plain(folder)}.")


def _open(folder: str) -> QuarantineList:
    if not is_bucket(folder) and not Path(folder).is_dir():
        raise LaunchError(f"There is no folder {folder}. Give the job's shared folder, as in --shared.")
    return QuarantineList(folder)


def _facts(entry: Quarantined) -> dict[str, Any]:
    return {**entry.facts(), "kind": entry.suspect.kind, "expired": entry.until <= time.time()}


def _show(rows: list[dict[str, Any]]) -> None:
    print_rows(
        rows,
        [
            ("suspect", lambda row: row["suspect"]),
            ("by", lambda row: row["by"]),
            ("since", lambda row: time.strftime("%Y-%m-%d %H:%M", time.localtime(row["since"]))),
            ("left", lambda row: "expired" if row["expired"] else duration(row["until"] - time.time())),
            ("verified", lambda row: f"step {row['verified']}" if row["verified"] else None),
            ("why", lambda row: row["why"]),
        ],
        words=("by", "since", "left", "verified"),
        wrapped="why",
    )
