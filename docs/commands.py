"""A hook of the site: writes the reference of the command line into its pages, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.cli import get_docs_for_click

from meshmend.cli import app
from meshmend_lab.cli import app as lab

PLACES = {"<!-- commands -->": (app, "meshmend"), "<!-- lab commands -->": (lab, "meshmend lab")}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marked place by every command with its options, in the order of `meshmend --help`."""
    for place, (commands, name) in PLACES.items():
        if place in markdown:
            markdown = markdown.replace(place, reference(commands, name))
    return markdown


def reference(commands: typer.Typer, name: str) -> str:
    """Return what the help says of every command, as Markdown."""
    command: Any = typer.main.get_command(commands)
    command.commands = {name: one for name, one in command.commands.items() if not one.hidden}
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name)
    # The page has its title; a list of commands cut off after a few words helps nobody.
    text = text.partition("**Commands**")[2].partition("\n## ")[2]
    text = re.sub(r"^(\*\*Commands\*\*:\n\n(\* .*\n)+)", "", "## " + text, flags=re.M)
    # A usage line is to be read, not pasted: it has no prompt that would be copied.
    return re.sub(r"^```console\n\$ ", "```text\n", text, flags=re.M)
