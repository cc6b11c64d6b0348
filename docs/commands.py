"""A hook of the site: writes the reference of the command line into cli.md, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.cli import get_docs_for_click

from meshmend.cli import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marked place by every command with its options, in the order of `meshmend --help`."""
    if PLACE not in markdown:
        return markdown
    command: Any = typer.main.get_command(app)
    command.commands = {name: one for name, one in command.commands.items() if not one.hidden}
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="meshmend")
    # The page has its title; a list of commands cut off after a few words helps nobody.
    text = text.partition("**Commands**")[2].partition("\n## ")[2]
    text = re.sub(r"^(\*\*Commands\*\*:\n\n(\* .*\n)+)", "", "## " + text, flags=re.M)
    # A usage line is to be read, not pasted: it has no prompt that would be copied.
    text = re.sub(r"^```console\n\$ ", "```text\n", text, flags=re.M)
    return markdown.replace(PLACE, text)
