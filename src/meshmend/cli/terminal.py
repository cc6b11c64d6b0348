"""The terminal: what is printed on it, for people.

Names in files, error messages and paths come from outside. Nothing here reads them as markup, and control characters
reach the terminal as visible escapes, so that what is shown is what is there. A terminal whose encoding lacks a letter
gets the nearest it has.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


def plain(value: object) -> str:
    r"""Return text from outside as one line that a terminal shows as it is.

    >>> plain("weave\x1b[2J\nproven")
    'weave\\x1b[2J\\nproven'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


class _Terminal(Console):
    """A console that reads no markup, and shows control characters instead of obeying them."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                text = "\n".join(plain(line) for line in segment.text.split("\n"))
                yield Segment(text, segment.style)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal(*, stderr: bool = False) -> Console:
    """Return the console to print on. Strings are never markup: whatever has a style is a `rich.text.Text`."""
    return _Terminal(stderr=stderr)


def print_line(*parts: str | tuple[str, str], stderr: bool = False) -> None:
    """Print a line as long as it is; a part is text, or text and its style."""
    terminal(stderr=stderr).print(Text.assemble(*parts), soft_wrap=True)


def approved(text: object) -> Text:
    """Return the text behind a green tick."""
    return Text.assemble(("✓", "green"), " ", plain(text))


def shows_progress(as_json: bool) -> bool:
    """Say whether there is somebody to show progress to; otherwise standard error is for errors alone."""
    return not as_json and terminal(stderr=True).is_terminal


_NEAREST = {"✓": "ok", "✗": "no", "×": "x", "–": "-", "−": "-", "—": "-", "…": "...", "→": "->", "≥": ">=", "≤": "<="}
_NEAREST |= {"±": "+-", "µ": "u", "μ": "u", "━": "-", "╺": "-", "╸": "-", "’": "'", "λ": "lambda"}


def _write_nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_NEAREST.get(c, c.encode("unicode_escape").decode()) for c in text), error.end


codecs.register_error("meshmend", _write_nearest)


def write_what_the_encoding_lacks() -> None:
    """Have letters that standard output and standard error lack written in their nearest, not refused."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="meshmend")
