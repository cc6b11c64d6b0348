"""Output for people on a terminal.

Names in files, error messages and paths come from outside. Nothing here reads them as markup, and control characters
reach the terminal as visible escapes, so that what is shown is what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

Row = TypeVar("Row")


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


@contextmanager
def working(words: str, as_json: bool, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show on standard error what takes long, and for how long it has; what is yielded changes the words or advances.

    With a `total`, the bar shows how much of it is done; without, that there is work. It leaves nothing behind, and if
    nobody is watching, standard error is for errors only.
    """
    columns: list[str | ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=24)]
    columns += [] if total is None else [MofNCompleteColumn()]
    console = terminal(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=as_json or not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(plain(words), total=total)

        def tell(now: str | None = None, advance: int = 0) -> None:
            bar.update(task, advance=advance, description=None if now is None else plain(now))

        yield tell


def print_rows(
    rows: Iterable[Row],
    columns: Sequence[tuple[str, Callable[[Row], object]]],
    *,
    title: str | None = None,
    names: int = 1,
    words: Collection[str] = (),
    wrapped: str | None = None,
    style: Callable[[Row], str | None] = lambda _: None,
) -> None:
    """Print a table: one line per row, and per column a heading and what it shows of a row (None is a dash).

    The first `names` columns are names; the others are numbers, except those in `words`, and `wrapped`, the only column
    whose text may be wrapped. `style` is a row's own. The rows are those that `--json` prints, wherever it has them.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, (heading, _) in enumerate(columns):
        is_name, is_text = number < names, heading == wrapped
        table.add_column(
            heading,
            justify="left" if is_name or is_text or heading in words else "right",
            style="cyan" if is_name else None,
            no_wrap=is_name,
            min_width=20 if is_text else None,
        )
    for row in rows:
        cells = [shown(row) for _, shown in columns]
        table.add_row(
            *("–" if cell is None else cell if isinstance(cell, Text) else plain(cell) for cell in cells),
            style=style(row),
        )
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table; where its columns do not fit a narrow terminal, each row as a list of its own.

    Only columns with a `min_width` are text that may be wrapped: a number that is cut or split over lines is no number.
    """
    console = terminal()
    least = [_least_width(column) for column in table.columns]
    if sum(least) + 2 * len(least) <= console.width:
        if Measurement.get(console, console.options, table).maximum > console.width:
            # Left to itself, it would narrow all columns alike.
            for column, width in zip(table.columns, least, strict=True):
                column.width = width if column.min_width is None else None
        console.print(table)
        return
    headings = [str(column.header) for column in table.columns]
    title = str(table.title).strip() if table.title else headings[0]
    console.print(Text(title, style=table.title_style or "bold"))
    for first, *others in zip(*(list(column.cells) for column in table.columns), strict=True):
        console.print(first, style="cyan")
        listed = Table.grid(padding=(0, 2, 0, 0))
        for heading, cell in zip(headings[1:], others, strict=True):
            if str(cell):
                listed.add_row(f"  {heading}", cell)
        console.print(listed)


def _least_width(column: Column) -> int:
    heading = str(column.header)
    words = [heading] if column.no_wrap else heading.split()
    cells = [line for cell in column.cells for line in str(cell).split("\n")] if column.min_width is None else []
    return max([column.min_width or 0, *map(cell_len, [*words, *cells])])


def write_what_the_encoding_lacks() -> None:
    """Write ? for characters that standard output and standard error cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
