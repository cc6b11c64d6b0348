"""`meshmend watch`: a running job on a terminal, from its shared folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshmend.cli.common import print_json
from meshmend.cli.options import JsonOption, MetricsOption, option
from meshmend.cli.store import check_metrics, serving
from meshmend.cli.terminal import plain, terminal
from meshmend.errors import Coordinate, LaunchError
from meshmend.launch.goodput import Recovery, TimeAccount
from meshmend.launch.hosts import Hosts
from meshmend.launch.watching import JobSnapshot, Watch
from meshmend.quarantine import Suspect

BARS = "▁▂▃▄▅▆▇█"
STYLES = {
    "training": "bold green",
    "over": "bold green",
    "recovering": "bold yellow",
    "waiting": "bold red",
    "stalled": "bold red",
}
MOST_RECOVERIES = 6
MOST_QUARANTINED = 6


def command(
    where: Annotated[str, typer.Argument(metavar="DIR", help="The job's shared folder.")],
    every: Annotated[float, option("--every", "S", "Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, option("--once", "", "Show it once, and end.")] = False,
    json: JsonOption = False,
    metrics: MetricsOption = None,
) -> None:
    """Watch a job: its mesh and the hole in it, step, loss, goodput, what is in quarantine, and each recovery.

    It only reads the timelines in the shared folder, so it may run anywhere that sees it, and costs the job nothing.
    With --metrics it serves the job's metrics itself, as long as it watches; for a job under torchft nothing else does.

    Example: meshmend watch shared
    """
    watch = Watch(where)
    if metrics is not None and (once or json):
        raise LaunchError("--metrics serves as long as the job is watched: leave out --once and --json.")
    if json:
        print_json(watch.snapshot().facts())
    elif once:
        terminal().print(view(watch.snapshot(), where))
    else:
        with serving(check_metrics(metrics, Path(where)), Path(where)):
            _follow(watch, where, every)


def _follow(watch: Watch, where: str, every: float) -> None:
    with Live(console=terminal(), auto_refresh=False, transient=False) as live:
        while True:
            now = watch.snapshot()
            live.update(view(now, where), refresh=True)
            if now.state == "over":
                return
            time.sleep(every)


def view(now: JobSnapshot, where: str) -> RenderableType:
    """Return what there is to see of a job."""
    account = now.account
    head = Text.assemble((now.state, STYLES.get(now.state, "bold")), "  ", (plain(where), "dim"))
    if account is None:
        hosts = ", ".join(plain(name) for name in now.started) or "none yet"
        return Group(head, Text(f"No step so far. Hosts that have started: {hosts}"), *quarantine(now))
    waits = [Text(f"{plain(now.waiting)}, for {duration(now.waiting_s)} so far", "bold red")] if now.waiting else []
    parts: list[RenderableType] = [
        head,
        *waits,
        Columns([mesh_view(account, now.quarantined), numbers(account, list(now.losses))], padding=(0, 3)),
        time_bar(account),
        *quarantine(now),
    ]
    if account.recoveries:
        parts.append(recoveries(account.recoveries))
    return Group(*parts)


def quarantine(now: JobSnapshot) -> list[Text]:
    """Return what is left out, who said so and why: a line each."""
    if now.quarantine_problem:
        return [Text(plain(now.quarantine_problem), "bold red")]
    lines = [
        Text.assemble(("quarantine ", "cyan"), (plain(suspect), "bold yellow"), f" {plain(why)}")
        for suspect, why in list(now.quarantined.items())[:MOST_QUARANTINED]
    ]
    more = len(now.quarantined) - len(lines)
    return lines + ([Text(f"and {more} more: meshmend quarantine list {plain(now.folder)}")] if more else [])


def mesh_view(account: TimeAccount, quarantined: Iterable[str] = ()) -> RenderableType:
    """Return the mesh: crosses are chips of hosts that are not there, Q those in quarantine."""
    if not account.machine:
        return Text(f"{account.chips} chips on hosts {', '.join(map(str, account.hosts))}")
    hosts = Hosts.read(account.machine)
    owner: dict[Coordinate, int] = {chip: host for host in range(len(hosts)) for chip in hosts.chips(host)}
    *outer, rows, columns = (1, 1, *hosts.shape)
    if max(outer, default=1) > 1 or columns > 32 or rows > 32:
        lost = sorted(set(range(len(hosts))) - set(account.hosts))
        return Text(f"{account.machine}: without hosts {', '.join(map(str, lost))}" if lost else account.machine)
    suspects = [Suspect.parse(name) for name in quarantined]
    left_out = {chip for one in suspects if (one.host or 0) < len(hosts) for chip in one.chips(hosts)}
    picture = Text()
    for row in range(rows):
        for column in range(columns):
            chip = (row, column) if len(hosts.shape) > 1 else (column,)
            is_live = owner[chip] in account.hosts
            mark = ("Q ", "bold yellow") if chip in left_out else ("● ", "green") if is_live else ("✗ ", "bold red")
            picture.append(*mark)
        picture.append("\n" if row + 1 < rows else "")
    return picture


def numbers(account: TimeAccount, losses: list[float]) -> Table:
    """Return the figures of a job."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_row("step", f"{account.step:,}, {account.step_s * 1e3:,.0f} ms each")
    if losses:
        table.add_row("loss", f"{losses[-1]:.4g}  {spark(losses)}")
    table.add_row("chips", f"{account.chips}, hosts {', '.join(map(str, account.hosts))}")
    if account.examples:
        table.add_row("samples", f"{account.examples_per_s:,.0f} per second")
    table.add_row("goodput", f"{account.goodput:.1%} of {duration(account.total_s)}")
    return table


def spark(values: list[float], width: int = 30) -> str:
    """Return a line of small bars.

    >>> spark([1.0, 2.0, 3.0])
    '▁▅█'
    """
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * 7)] for value in shown)


def time_bar(account: TimeAccount) -> RenderableType:
    """Return what the time was spent on, the largest cause of badput first."""
    causes = sorted(((s, cause) for cause, s in account.badput_s.items() if s > 0.0005 * account.total_s), reverse=True)
    words = [f"{cause} {seconds / account.total_s:.1%}" for seconds, cause in causes]
    return Text.assemble(("badput ", "cyan"), " " + (" · ".join(words) or "none"))


def recoveries(found: tuple[Recovery, ...]) -> Table:
    """Return the last recoveries and their stages."""
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for name in ("recovery", "hosts", "resumed", "seconds", "stages"):
        table.add_column(name, justify="right" if name == "seconds" else "left", no_wrap=name != "stages")
    for one in found[-MOST_RECOVERIES:]:
        lost = [f"−{host}" for host in one.lost] + [f"+{host}" for host in one.joined]
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in one.stages_s.items() if seconds >= 0.05)
        when = time.strftime("%H:%M:%S", time.localtime(one.at))
        resumed = f"step {one.resumed} ({plain(one.source)})"
        table.add_row(when, " ".join(lost) or "the same", resumed, f"{one.total_s:.1f}", stages)
    return table


def duration(seconds: float) -> str:
    """Return a length of time in the largest units that say it.

    >>> duration(42.4), duration(3_725), duration(200_000)
    ('42 s', '1 h 2 min', '2 d 7 h')
    """
    whole = round(seconds)
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{whole} s"
