"""libtpu's `ici_link_health`: one line per link, such as `tray1.chip3.ici0.int: 10`.

0 is healthy, 10 is unusable, and numbers between are links that retry. The lines do not say what a link joins, so
they are read together with a description that names the links of its cables, or at least its chips.
"""

from __future__ import annotations

import re

from meshmend.errors import MachineError
from meshmend.machines.description import MAX_CHIPS, Description

FORMAT = "libtpu ici_link_health"
LINE = re.compile(r"""[\s\['"]*(tray\d{1,6}\.chip\d{1,6}\.ici\d{1,3}(?:\.[a-z]{1,16})?)\s*:\s*(\d{1,3})[\s\]'",]*""")
UNUSABLE = 10


def read(text: str, file: str) -> Description:
    """Return the health of each link."""
    links: dict[str, int] = {}
    found = Description(FORMAT, file)
    unread = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip(" \t[]"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            unread += 1
            continue
        if match[1] in links and links[match[1]] != int(match[2]):
            raise MachineError(
                f"{file}, line {number}: expected one value per link, got two for {match[1]}.", file=file, line=number
            )
        if int(match[2]) > UNUSABLE:
            raise MachineError(
                f"{file}, line {number}: expected a health from 0 to {UNUSABLE}, got {match[2]}.",
                file=file,
                line=number,
            )
        links[match[1]] = int(match[2])
        if len(links) > 8 * MAX_CHIPS:
            raise MachineError(f"{file}: expected at most {8 * MAX_CHIPS:,} links, got more.", file=file)
    if not links:
        raise MachineError(
            f"{file}: expected lines such as 'tray1.chip3.ici0.int: 10', got none.",
            file=file,
            expected="lines of ici_link_health",
        )
    if unread:
        found.notes.append(f"{unread} lines were not understood.")
    found.links = links
    return found
