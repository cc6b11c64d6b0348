"""What `meshmend run` shows: the workers' lines, and between them what happened, in order, each thing once."""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import pairwise
from typing import NamedTuple

from meshmend.cli.terminal import plain, print_line
from meshmend.launch.goodput import HostRound, rounds_of
from meshmend.launch.hosts import name_hosts
from meshmend.launch.job import Report as Event
from meshmend.launch.watching import Watch

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
CHATTER = re.compile(r"\[Gloo\] Rank |is connected to (\d+ peer ranks|\d*$)|peer ranks\. Exp|peer ranks is : ")
"""What Gloo writes at every start, one line per device, from threads that tear one another's lines."""
NATIVE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] |\*\*\* Check failure stack|\s+@ +0x[0-9a-f]+ ")
"""Lines of XLA's own log. They matter where nothing else says why a worker has ended."""
MOST_NATIVE = 40
"""Of them, how many of a host are remembered."""
SAME_S = 1.0
"""How long a line waits for the first host of its round to write the same."""
MOST_TEXTS = 4096
"""Different lines that are remembered."""
QUIET_S = 2.0
"""A phase of a start is named when it has lasted so long."""
PHASES = {
    "": "starting",
    "start": "planning and compiling",
    "measuring": "measuring the links",
    "plan": "planning and compiling",
    "compile": "restoring the state",
    "restore": "doing the first step",
}
"""What a start does next, by the stage that it has last done."""


class _Held(NamedTuple):
    due: float
    host: int
    text: str


class Screen:
    """One stream of lines: those of the workers, each with its host, and what happened between them.

    What several hosts write is shown once, as the first host of the round has it. Call `look` a few times per second.
    """

    def __init__(self, n_hosts: int) -> None:
        self._width = len(str(n_hosts - 1))
        self._said: set[str] = set()
        self._first = 0
        """The first host of the round."""
        self._written: OrderedDict[str, Counter[int]] = OrderedDict()
        """How often each host has written a text in this round, and under −1 how often it was shown."""
        self._held: deque[_Held] = deque()
        self._native: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=MOST_NATIVE))
        self._chatting: set[int] = set()
        self._shown_traces: set[str] = set()
        self._phases: set[tuple[int, str]] = set()
        self._lost_at: list[float] = []
        """When the losses were heard of that the job has not recovered from yet."""
        self._round = 0
        self.raised: list[str] = []
        """Which hosts have raised an error, which a job that ends well must not hide."""
        self.is_ending = False
        """Whether the job was interrupted: then it is no news that hosts leave, and rounds end."""
        self.errors: list[str] = []
        self.over: Event | None = None

    def line(self, host: int, text: str) -> None:
        """Show a line of a worker."""
        if CHATTER.search(text) or (host in self._chatting and not text.strip(" 0123456789")):
            self._chatting.add(host)
            return
        self._chatting.discard(host)
        if NATIVE.match(text):
            self._native[host].append(text)
            return
        counts = self._written.setdefault(text, Counter())
        self._written.move_to_end(text)
        while len(self._written) > MOST_TEXTS:
            self._written.popitem(last=False)
        counts[host] += 1
        if counts[host] <= counts[-1]:
            return
        if host == self._first:
            self._show(host, text)
        else:
            self._held.append(_Held(time.monotonic() + SAME_S, host, text))

    def _show(self, host: int, text: str) -> None:
        self._written.setdefault(text, Counter())[-1] += 1
        print_line((f"host {host:>{self._width}} │ ", COLOURS[host % len(COLOURS)]), plain(text))

    def flush(self, now: float = float("inf")) -> None:
        """Show the lines that the first host of the round has not written by now."""
        while self._held and self._held[0].due <= now:
            _, host, text = self._held.popleft()
            counts = self._written.get(text, Counter())
            if counts[host] > counts[-1] or not counts:
                self._show(host, text)

    def say(self, text: str, style: str = "bold", *, once: bool = True) -> None:
        """Show what happened, once, though every host reports it."""
        if text not in self._said or not once:
            self._said.add(text)
            self.flush()
            print_line((f"meshmend │ {plain(text)}", style))

    def event(self, event: Event) -> None:
        """Show what a host's agent reports."""
        kind, host = event["event"], event["host"]
        if self.is_ending and kind in ("round", "store", "short", "failed"):
            return
        if kind == "round":
            starting, waiting = event["hosts"], event["cut_off"]
            said = f"round {event['number']}: {name_hosts(starting)} {'starts' if len(starting) == 1 else 'start'}"
            waits = f"; {name_hosts(waiting)} {'waits' if len(waiting) == 1 else 'wait'}, cut off from them"
            if said + waits * bool(waiting) not in self._said:
                self.flush()
                self._first, self._round = min(starting), event["number"]
                self._written.clear()
                self._native.clear()
            self.say(said + waits * bool(waiting))
        elif kind == "store" and event["type"] == "stop":
            said = f"round {event['number']} ends: {event['why']}"
            if event["lost"] is not None and said not in self._said:
                self.lost(time.time())
            self.say(said, "bold yellow")
        elif kind == "store" and event["type"] == "unreachable" and "for_s" in event:
            since = (
                f"host {host} has not reached the store at {event['where']} for {event['for_s']:.0f} s ({event['why']})"
            )
            todo = "start `meshmend store` there, or give its address as --store"
            if event["reached"]:
                todo = "training goes on; start `meshmend store` there again"
            self.say(f"{since} and tries again: {todo}", "bold yellow")
        elif kind == "short":
            here = event["hosts"]
            waits = f"{name_hosts(here)} wait{'s' * (len(here) == 1)}"
            self.say(f"after round {event['number']} {waits}: the job needs {event['least']} hosts", "bold yellow")
        elif kind == "changed":
            self.say(f"{event['script']} has changed since this job started: it is run as it is now", "bold yellow")
        elif kind == "raised":
            self._raised(host, event)
        elif kind == "failed":
            for text in self._native.pop(host, ()):
                self._show(host, text)
            left = f"{event['left']} restart{'s' * (event['left'] != 1)} left"
            self.say(f"host {host}: {event['why']}; {left}", "bold red", once=False)
        elif kind == "quarantined":
            self.say(event["message"], "bold yellow")
        elif kind == "error":
            self.errors.append(event["message"])
        elif kind == "over":
            self.over = event

    def _raised(self, host: int, event: Event) -> None:
        """Show a traceback, once for all hosts. That a peer is gone, the store says."""
        self._native.pop(host, None)
        if event["kind"] == "transient" and not event["trace"] and event["error"].startswith("lost a peer"):
            return
        shown = event["trace"] or event["error"]
        self.raised.append(f"host {host} raised {event['error'].rstrip('.')} in round {self._round}")
        if shown not in self._shown_traces:
            self._shown_traces.add(shown)
            self.flush()
            for text in shown.rstrip("\n").split("\n"):
                self._show(host, text)

    def tell_raised(self) -> None:
        """Show the errors that a finished job went on after: what the loop did not do in that step stays undone."""
        for one in self.raised:
            self.say(f"{one}, and the job went on", "bold yellow")

    def lost(self, at: float) -> None:
        """Take note of when a host was killed: the others hear of it later."""
        self._lost_at.append(at)

    def look(self, job: Watch, since: float) -> None:
        """Show lines that have waited, and what the timelines say: what takes long at a start, and a recovery."""
        self.flush(time.monotonic())
        rounds = [one for one in job.latest.values() if one.number and one.started > since]
        if not rounds:
            return
        now = max(rounds, key=lambda one: (one.number, -len(one.stages)))
        if (now.number, "done") in self._phases:
            return
        if now.marks:
            self._phases.add((now.number, "done"))
            self._resumed(job, now)
            return
        phase = now.stages[-1][0] if now.stages else ""
        if phase in PHASES and time.time() - now.ended > QUIET_S and (now.number, phase) not in self._phases:
            self._phases.add((now.number, phase))
            self.say(f"round {now.number}: {PHASES[phase]} …", "dim")

    def _resumed(self, job: Watch, now: HostRound) -> None:
        """Show that a round has done its first step."""
        step, at = now.marks[0]
        lost = [one for one in self._lost_at if one < at]
        # On a busy machine it may be heard of when the others have started again: then it was before that.
        found = job.recovery(min(lost[0], now.started), now.number) if lost else None
        self._lost_at = [one for one in self._lost_at if one not in lost]
        if found is None:
            whence = f"from step {now.resumed} ({now.source}) " * (now.resumed > 0)
            took = stages_text(now.stages_since(now.started, ()))
            said = f"step {step} is done on {now.chips} chips, {whence}{at - now.started:.1f} s after the start{took}"
        else:
            recovery, step = found
            said = (
                f"training again on {now.chips} chips: resumed from step {recovery.resumed} ({recovery.source}), step "
                f"{step} is done {recovery.total_s:.1f} s after the failure{stages_text(recovery.stages_s)}"
            )
        self.say(f"round {now.number}: {said}", "bold green")
        if now.survives and found is None:
            self.say(f"copies in memory survive {now.survives}")
        if repeated := repeated_text(job, now):
            self.say(f"round {now.number}: {repeated}", "bold yellow")


def repeated_text(job: Watch, now: HostRound) -> str:
    """Return which steps a round does again, and why; "" if it goes on with the next one."""
    rounds = rounds_of(job.histories.values())
    before = next((before for before, one in pairwise(rounds) if one.number == now.number), None)
    if before is None or before.last <= now.resumed:
        return ""
    n_steps, every = before.last - now.resumed, before.kept_every
    which = f"step {before.last} is" if n_steps == 1 else f"steps {now.resumed + 1} to {before.last} are"
    if now.source == "memory":
        why = (
            f"copies in memory are kept every {f'{every} steps' if every > 1 else 'step'}"
            if every >= n_steps
            else "the next copy was not complete"
        )
    else:
        why = f"the last checkpoint is of step {now.resumed}" if now.resumed else "there was no copy and no checkpoint"
    return f"{which} repeated, because {why}"


def stages_text(stages_s: dict[str, float]) -> str:
    """Return what the stages of a start took, those that took any time.

    >>> stages_text({"detect": 0.0, "compile": 1.62, "first step": 0.5})
    ' (compile 1.6, first step 0.5)'
    """
    parts = [f"{stage} {seconds:.1f}" for stage, seconds in stages_s.items() if seconds >= 0.05]
    return f" ({', '.join(parts)})" * bool(parts)
