"""What a job pays for its timeline and its metrics: CPU time per step, as a share of the step of 100 ms.

    python lab/benchmarks/overhead.py                four hosts, 20 groups of steps; docs/metrics.md says what it found
    python lab/benchmarks/overhead.py --groups 2     a quick look

Two measurements in one run. Directly: the CPU time of the lines that a step writes, and of a scrape. In pairs: steps of
pure arithmetic, with and without their lines and their share of a scrape, that take turns, so that whatever else the
machine does falls on both alike. CPU time is that of the whole process: the threads that condense full files and serve
metrics count. The client that scrapes is another process, as Prometheus is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.launch.hosts import Hosts
from meshmend.launch.metrics import serve_metrics
from meshmend.launch.processes import die_with_parent, free_port
from meshmend.launch.timeline import MAX_FILE_BYTES, Timeline, timeline_of
from meshmend_lab.errors import LabError

LOOPBACK = "127.0.0.1"
STEP_S = 0.1
STEPS_PER_SCRAPE = 10
"""A scrape each second, in the pairs; in examples/operate Prometheus asks every ten seconds."""
WARM_STEPS = 5000
"""Steps that each host has done when metrics are first asked for: the account remembers about as many."""
SMALL = 100
"""Files of the direct measurement are smaller by this factor, so that condensing them is a part of every batch."""
BATCH = 500
"""Steps whose lines are timed at once."""
CLIENT = """
import sys, urllib.request
for line in sys.stdin:
    asked = urllib.request.Request(line.strip(), headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        sys.stdout.write(f"{len(answer.read())}\\n")
        sys.stdout.flush()
"""


@dataclass(frozen=True)
class Overhead:
    """CPU time that goes into timelines and metrics."""

    step_s: float
    """Of a step without timeline and metrics, in this run."""
    n_hosts: int
    lines_s: float
    """Of the lines of one step, on one host."""
    scrape_s: float
    """Of serving one scrape."""
    groups: tuple[float, ...]
    """Of each group of steps: how much longer those with lines and scrapes took, as a ratio."""

    def share(self, steps_per_scrape: int) -> float:
        """Return the share of a step, from the two direct figures."""
        return (self.lines_s + self.scrape_s / steps_per_scrape) / self.step_s

    @property
    def paired(self) -> float:
        """Share of a step, the median of the groups."""
        return statistics.median(self.groups)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median lies with a probability of 95 %, by order statistics; of few groups, the whole range."""
        ordered, n = sorted(self.groups), len(self.groups)
        below, tail = 0, 0.0
        while below < n // 2 and (tail := tail + math.comb(n, below) / 2**n) <= 0.025:
            below += 1
        low = max(0, below - 1)
        return ordered[low], ordered[n - 1 - low]

    def facts(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "step_s": self.step_s,
            "hosts": self.n_hosts,
            "lines_us": self.lines_s * 1e6,
            "scrape_us": self.scrape_s * 1e6,
            "lines": self.lines_s / self.step_s,
            "scraped_each_second": self.share(STEPS_PER_SCRAPE),
            "scraped_every_ten_seconds": self.share(10 * STEPS_PER_SCRAPE),
            "paired": {"median": self.paired, "interval": list(self.interval), "groups": len(self.groups)},
        }


class WatchedJob:
    """Hosts that write their timelines, and the metrics that are made of them."""

    def __init__(self, folder: Path, n_hosts: int, ask: Callable[[], None]) -> None:
        self.scrape = ask
        self._timelines = [Timeline(timeline_of(folder, host), host=host, round=1) for host in range(n_hosts)]
        self.steps = 0
        for timeline in self._timelines:
            timeline.note("process", seconds=1.0)
            hosts = Hosts.of((2, 2 * n_hosts), (2, 2))
            timeline.note("fabric", chips=4 * n_hosts, hosts=list(range(n_hosts)), machine=str(hosts))

    def begin_step(self) -> None:
        """Begin a step, and do what the other hosts do in it."""
        self.steps += 1
        for timeline in self._timelines[1:]:
            write_step(timeline, self.steps)

    def end_step(self) -> None:
        """Do what the first host does in a step."""
        write_step(self._timelines[0], self.steps)


def write_steps(timeline: Timeline, numbers: Iterable[int]) -> None:
    """Write the lines of several steps."""
    for number in numbers:
        write_step(timeline, number)


def write_step(timeline: Timeline, number: int) -> None:
    """Write what a host of a job writes in each step: what it did, and that its copy is in memory."""
    timeline.note("step", step=number, loss=1.0 / number, chips=16, examples=512, waited_s=0.000123)
    timeline.note("kept", step=number, bytes=12_345_678)


@contextmanager
def client(port: int) -> Iterator[Callable[[], None]]:
    """Return what asks for the metrics, as Prometheus does, and waits for the answer."""
    with subprocess.Popen(  # our own interpreter
        [sys.executable, "-c", CLIENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        preexec_fn=die_with_parent,
    ) as process:
        words, answers = process.stdin, process.stdout
        assert words is not None and answers is not None  # noqa: S101, PT018  # pipes, as asked for

        def ask() -> None:
            words.write(f"http://{LOOPBACK}:{port}/metrics\n")
            if not answers.readline():
                raise LabError("The metrics were not answered.")

        try:
            yield ask
        finally:
            words.close()


def measure(*, n_hosts: int = 4, n_groups: int = 20, n_batches: int = 20, n_scrapes: int = 30) -> Overhead:
    """Measure both ways."""
    with tempfile.TemporaryDirectory(prefix="meshmend-") as name:
        alone = Timeline(Path(name) / "alone" / "host-0.jsonl", max_bytes=MAX_FILE_BYTES // SMALL, host=0, round=1)
        batches = [range(1 + i * BATCH, 1 + (i + 1) * BATCH) for i in range(n_batches)]
        lines = [cpu_s(partial(write_steps, alone, batch)) / BATCH for batch in batches]
        folder, port = Path(name) / "shared", free_port(LOOPBACK)
        folder.mkdir()
        with serve_metrics(folder, LOOPBACK, port), client(port) as ask:
            job = WatchedJob(folder, n_hosts, ask)
            for _ in range(WARM_STEPS):
                job.begin_step()
                job.end_step()
            job.scrape()
            took = []
            for _ in range(n_scrapes):
                for _ in range(STEPS_PER_SCRAPE):
                    job.begin_step()
                    job.end_step()
                took.append(cpu_s(job.scrape))
            pairs = [_pair(job, arithmetic(STEP_S)) for _ in range(n_groups)]
    return Overhead(
        statistics.median(bare / STEPS_PER_SCRAPE for bare, _ in pairs),
        n_hosts,
        statistics.median(lines),
        statistics.median(took),
        tuple(watched / bare - 1 for bare, watched in pairs),
    )


def _pair(job: WatchedJob, compute: Callable[[], None]) -> tuple[float, float]:
    """Return the CPU time of a group of steps, without and with timeline and metrics, that take turns."""

    def watched(number: int) -> None:
        compute()
        job.end_step()
        if number == STEPS_PER_SCRAPE - 1:
            job.scrape()

    spent = [0.0, 0.0]
    for number in range(STEPS_PER_SCRAPE):
        job.begin_step()
        both: list[tuple[int, Callable[[], None]]] = [(0, compute), (1, partial(watched, number))]
        for which, work in both if number % 2 else reversed(both):
            spent[which] += cpu_s(work)
    return spent[0], spent[1]


def arithmetic(seconds: float) -> Callable[[], None]:
    """Return a function that computes for about so long, in one thread."""
    values = np.linspace(0.0, 1.0, 20_000)

    def some(rounds: int) -> None:
        for _ in range(rounds):
            np.sin(values)

    once = min(cpu_s(lambda: some(20)) for _ in range(5)) / 20
    rounds = max(1, round(seconds / once))
    return lambda: some(rounds)


def cpu_s(work: Callable[[], Any]) -> float:
    """Return the CPU time that this process spends on something, in all of its threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4, help="hosts whose lines a scrape reads")
    parser.add_argument("--groups", type=int, default=20, help="groups of ten steps to compare")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(n_hosts=options.hosts, n_groups=options.groups)
    if options.json:
        print(json.dumps(found.facts()))
        return
    low, high = found.interval
    print(f"lines of a step        {found.lines_s * 1e6:.0f} µs")
    print(f"a scrape               {found.scrape_s * 1e3:.1f} ms for {options.hosts} hosts")
    print(f"a step without them    {found.step_s * 1e3:.0f} ms")
    print(f"share of a step        {found.lines_s / found.step_s:.2%} for its lines")
    print(f"  with metrics         scraped every ten seconds {found.share(100):.2%}, each second {found.share(10):.2%}")
    print(f"in pairs, each second  {found.paired:+.2%} ({low:+.2%} to {high:+.2%}), {options.groups} groups of steps")


if __name__ == "__main__":
    main()
