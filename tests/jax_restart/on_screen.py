"""What a job writes on the screen of who runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshmend.cli.screen import Screen
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.watching import Watch

TRAIN = """
import os, time, numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(global_batch=32)
x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
for step in job.train(lambda w, batch: (batch @ w) ** 2, optax.sgd(0.01), np.ones(8, np.float32), x, steps=STEPS):
    BODY
"""


Look = Callable[[Callable[[], bool]], None]


FIGURES = re.compile(r"\d+\.\d+")


def environment() -> dict[str, str]:
    hidden = ("XLA_FLAGS", "MESHMEND_SHAPE", "MESHMEND_HOST", "MESHMEND_SHARED")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1", "COLUMNS": "300"}


def write(folder: Path, body: str, steps: int = 30) -> None:
    (folder / "train.py").write_text(TRAIN.replace("BODY", body).replace("STEPS", str(steps)))


def run(folder: Path, *words: str, code: int, shape: str = "2x4") -> list[str]:
    """Run a job of two hosts; return what was shown, with the error as its last line."""
    command = [sys.executable, "-m", "meshmend", "run", "--local", shape, "--host", "2x2", *words]
    done = subprocess.run(command, cwd=folder, env=environment(), check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return shown(done.stdout + done.stderr)


def shown(text: str) -> list[str]:
    """Return the lines, without what takes long, or is done again, only on a slow machine, and with figures as x."""
    now_and_then = re.compile(r"round \d+: (.* …$|steps? \d+.* repeated, because )")
    lines = [line for line in text.splitlines() if not now_and_then.search(line)]
    return [FIGURES.sub("x", line) for line in lines]


def matches(lines: list[str], *patterns: str) -> None:
    """Check that the lines are these, in order, and no others."""
    assert len(lines) == len(patterns), "\n".join(lines)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line}\nis not\n{pattern}\nin\n" + "\n".join(lines)


@contextmanager
def job_on_screen(folder: Path) -> Iterator[tuple[LocalJob, Watch, Look]]:
    """A job of two hosts whose screen can be waited for."""
    screen, began = Screen(2), time.time()
    os.environ.pop("MESHMEND_SHARED", None)
    hosts = LocalJob(
        [str(folder / "train.py")],
        Hosts.of("2x4", "2x2"),
        folder / "shared",
        on_line=screen.line,
        on_event=screen.event,
        environment=lambda _: {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with hosts as job:
        watch = Watch(folder / "shared")

        def look(until: Callable[[], bool]) -> None:
            end = time.monotonic() + 120
            while not until() and job.running:
                assert time.monotonic() < end
                watch.read()
                screen.look(watch, began)
                job.watch(0.1)

        yield job, watch, look
        watch.read()
        screen.look(watch, began)
        screen.flush()
