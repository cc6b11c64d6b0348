"""Output for people on a terminal.

Names in files, error messages and paths come from outside. Nothing here reads them as markup, and control characters
reach the terminal as visible escapes, so that what is shown is what is there. Characters that the terminal's encoding
lacks are replaced by the nearest ones.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


def plain(value: object) -> str:
    r"""Return untrusted text as one line that a terminal shows verbatim.

    >>> plain("weave\x1b[2J\nproven")
    'weave\\x1b[2J\\nproven'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


class _Terminal(Console):
    """A console that ignores markup and shows control characters as escapes."""

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
    """Return the console to print on. Strings are never markup: styled text is a `rich.text.Text`."""
    return _Terminal(stderr=stderr)


def print_line(*parts: str | tuple[str, str], stderr: bool = False) -> None:
    """Print a line without wrapping; a part is text, or text and its style."""
    terminal(stderr=stderr).print(Text.assemble(*parts), soft_wrap=True)


def approved(text: object) -> Text:
    """Return the text behind a green tick."""
    return Text.assemble(("✓", "green"), " ", plain(text))


def shows_progress(as_json: bool) -> bool:
    """Return whether to show progress; if nobody is watching, standard error is for errors only."""
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
    """Replace characters that standard output and standard error cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="meshmend")
