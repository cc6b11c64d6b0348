"""A script under `meshmend run`, and what it leaves in the shared folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from meshmend.launch.timeline import Line, read_timeline

ROOT = Path(__file__).parents[2]


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(shared="shared", global_batch=64)
x = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
data = [{"x": row, "y": row.sum()} for row in x]


def loss(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


for step in job.train(loss, optax.adam(0.05), {"w": jnp.zeros(8)}, data, steps=30):
    if step.number in (1, 30):
        print(f"step {step.number} on {step.chips} chips")
"""


def environment() -> dict[str, str]:
    hidden = ("XLA_FLAGS", "MESHMEND_SHAPE", "MESHMEND_HOST", "http_proxy", "HTTP_PROXY")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1", "COLUMNS": "200"}


def meshmend(*words: str, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "meshmend", *words]
    done = subprocess.run(command, cwd=folder, env=environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


def events_of(shared: Path, *kinds: str) -> list[Line]:
    """Events of a job's timelines in their order, each once, though several hosts have written it."""
    written = [event for path in sorted(shared.glob("timeline/host-*.jsonl")) for event in read_timeline(path)]
    found = {event["id"]: event for event in written if event["event"] in kinds}
    return sorted(found.values(), key=lambda event: event["at"] + event.get("seconds", 0.0))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
