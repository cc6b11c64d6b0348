"""Train through the loss of a board: 16 processes as a 4×4 mesh, a 2×2 board killed in the middle of a step.

    python examples/torch/train_through_failure.py

Each process is one chip. torchft finds out who is alive, meshmend plans the all-reduce for them. A third of the way
in, a board of four chips gets SIGKILL while its gradients are in flight; the other twelve redo the step without
it and continue. Later the board comes back, receives the weights, and the mesh is whole again. You see the mesh and
the loss while it runs; at the end there is a figure. No sample is lost or used twice in an epoch, which is counted too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torchft
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torchft.coordination import LighthouseServer

import meshmend as mm
import meshmend.torch as mmt
from meshmend.launch import Chips

HOST = "127.0.0.1"
LIGHTHOUSE = (-1,)
N_SAMPLES = 5000
PER_CHIP = 64


def lighthouse(_: Any, folder: Path, at_least: int) -> None:
    """Serve torchft's lighthouse, which decides who is alive."""
    quiet(folder / "lighthouse.err")
    server = LighthouseServer(
        bind=f"{HOST}:0", min_replicas=at_least, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    (folder / "port.part").write_text(server.address().rsplit(":", 1)[1])
    (folder / "port.part").rename(folder / "port")
    time.sleep(86_400)


def quiet(path: Path) -> None:
    """Send the libraries' own logging to a file."""
    logging.disable(logging.CRITICAL)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)


def spirals(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two spirals to classify."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (size,), generator=random)
    along = torch.rand(size, generator=random).sqrt() * 3 * math.pi
    angle = along + math.pi * label
    points = torch.stack([angle.cos() * along, angle.sin() * along], dim=1) / 10
    return points + 0.02 * torch.randn(size, 2, generator=random), label


def train(
    chip: tuple[int, ...], life: int, mesh: mm.Mesh, folder: Path, steps: int, shared: Path | None = None
) -> None:
    """One chip: a plain torchft training loop with a mesh process group. Writes one line per step."""
    quiet(folder / f"{mesh.rank(chip)}.{life}.err")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = (folder / f"{mesh.rank(chip)}.{life}.log").open("w", buffering=1)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 2)
    )
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)

    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{HOST}:{(folder / 'port').read_text()}"
    group = mmt.MeshProcessGroup(mesh.shape, chip, interface="lo")
    manager = mmt.Manager.of(group, model=model, adam=adam, shared=shared)
    points, labels = spirals(seed=0, size=N_SAMPLES)
    sampler = mmt.StepSampler(manager, N_SAMPLES, batch_size=PER_CHIP)
    parallel = mmt.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, adam)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        step = manager.current_step()
        own = sampler.indices()
        loss = torch.nn.functional.cross_entropy(parallel(points[own]), labels[own])
        attempt = {"step": step, "attempt": group.timings.formed_ms}
        log.write(json.dumps({"at": "backward", "samples": own.tolist(), **attempt}) + "\n")
        loss.backward()
        manager.note(loss=loss.item(), examples=PER_CHIP * manager.num_participants())
        optimizer.step()
        committed = manager.current_step() > step
        weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        facts = {"t": time.time(), "chips": manager.num_participants(), "loss": loss.item(), **attempt}
        log.write(json.dumps({"at": "end", "committed": committed, "weights": weights, **facts}) + "\n")
    manager.shutdown()


class Story:
    """What the chips have written so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.steps: dict[int, dict[str, Any]] = {}
        self.weights: dict[int, set[str]] = {}
        self.losses: dict[int, list[float]] = {}
        self.samples: dict[tuple[int, int], list[int]] = {}
        """What the chips of each attempt at each step have used."""
        self.last: dict[int, dict[str, Any]] = {}
        self.refused = 0

    def update(self) -> None:
        """Read what is new."""
        for path in sorted(self._folder.glob("*.log")):
            with path.open() as handle:
                handle.seek(self._read.get(path, 0))
                text, _, _ = handle.read().rpartition("\n")
            self._read[path] = self._read.get(path, 0) + len(text) + bool(text)
            for event in map(json.loads, text.splitlines()):
                self.last[int(path.name.split(".")[0])] = event
                if event["at"] != "end":
                    self.samples.setdefault((event["step"], event["attempt"]), []).extend(event["samples"])
                    continue
                if event["committed"]:
                    self.steps.setdefault(event["step"], event)
                    self.losses.setdefault(event["step"], []).append(event["loss"])
                    self.weights.setdefault(event["step"], set()).add(event["weights"])
                else:
                    self.refused += 1

    @property
    def step(self) -> int:
        """The last committed step."""
        return max(self.steps, default=-1)

    def used(self) -> Counter[int]:
        """Count how often committed steps have used each sample."""
        counted = Counter(dict.fromkeys(range(N_SAMPLES), 0))
        for step, event in self.steps.items():
            counted.update(self.samples[step, event["attempt"]])
        return counted

    def loss(self, step: int) -> float:
        """Return the mean loss of the chips in a step."""
        return sum(self.losses[step]) / len(self.losses[step])


def view(story: Story, mesh: mm.Mesh, dead: list[tuple[int, ...]], what: str, steps: int) -> Group:
    """Draw the mesh and the loss."""
    grid = Table.grid(padding=(0, 1))
    for row in range(mesh.shape[0]):
        chips = [(row, column) for column in range(mesh.shape[1])]
        grid.add_row(
            *(Text(" ✗ " if chip in dead else " ● ", "white on red" if chip in dead else "green") for chip in chips)
        )
    bars = "▁▂▃▄▅▆▇█"
    shown = [story.loss(step) for step in sorted(story.steps)[-60:]]
    line = "".join(bars[min(int(loss / 0.75 * 7), 7)] for loss in shown)
    now = f"step {story.step + 1} of {steps}, loss {shown[-1]:.3f}" if shown else "starting"
    return Group(grid, Text(f"{now}  {line}"), Text(what, "bold"))


def draw(story: Story, killed_at: float, back_at: float, path: Path) -> None:
    """Write the figure: loss and chips over time."""
    from matplotlib.figure import Figure

    steps = sorted(story.steps)
    begun = story.steps[steps[0]]["t"]
    seconds = [story.steps[step]["t"] - begun for step in steps]
    figure = Figure(figsize=(8, 4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot(seconds, [story.loss(step) for step in steps], ".-", markersize=3)
    top.set_ylabel("loss")
    bottom.step(seconds, [story.steps[step]["chips"] for step in steps], where="post")
    bottom.set_ylabel("chips")
    bottom.set_ylim(0)
    bottom.set_xlabel("seconds")
    for moment, label in ((killed_at, "board killed"), (back_at, "board back")):
        for axes in (top, bottom):
            axes.axvline(moment - begun, color="black", linestyle="dashed", linewidth=1)
        top.text(moment - begun, top.get_ylim()[1], f" {label}", va="top", fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Start the chips, kill a board, bring it back, and report what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4x4")
    parser.add_argument("--board", default="2x2@0,2", help="what is killed")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--figure", type=Path, default=Path("train_through_failure.svg"))
    parser.add_argument("--shared", type=Path, help="folder for the chips' timelines, for `meshmend watch`")
    parser.add_argument("--no-view", action="store_true", help="print one JSON object at the end instead")
    options = parser.parse_args()
    mesh = mm.Mesh(options.shape)
    holed = mesh.fail(options.board)
    board = [mesh.chip(rank) for rank in range(mesh.n_chips) if not holed.live[mesh.chip(rank)]]
    console = Console(quiet=options.no_view)
    # The first Adam imports a compiler, which takes seconds: once here, not once in every chip that is forked below.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    with (
        tempfile.TemporaryDirectory(prefix="meshmend-") as name,
        Chips() as chips,
        Live(console=console, auto_refresh=False) as live,
    ):
        folder, story = Path(name), Story(Path(name))
        chips.start(LIGHTHOUSE, lighthouse, folder, holed.n_chips)
        wait_for(lambda: (folder / "port").exists())
        for rank in range(mesh.n_chips):
            chips.start(mesh.chip(rank), train, 0, mesh, folder, options.steps, options.shared)

        def until(condition: Any, dead: list[tuple[int, ...]], what: str) -> None:
            def look() -> bool:
                chips.poll()  # raises what a chip has raised
                story.update()
                live.update(view(story, mesh, dead, what, options.steps), refresh=not options.no_view)
                return bool(condition())

            wait_for(look)

        until(lambda: story.step >= options.steps // 3, [], f"{mesh.n_chips} chips train")
        victim = mesh.rank(board[0])
        # In the middle of a step: its gradients are in flight.
        until(lambda: story.last[victim]["at"] == "backward", [], "waiting for the middle of a step")
        killed_at = time.time()
        chips.kill(board)
        until(
            lambda: story.steps.get(story.step, {}).get("chips") == holed.n_chips,
            board,
            f"SIGKILL for board {options.board}: the others give up the step, plan round the hole and redo it",
        )
        recovered_s = time.time() - killed_at
        until(lambda: story.step >= 2 * options.steps // 3, board, f"{holed.n_chips} chips continue training")
        back_at = time.time()
        for chip in board:
            chips.start(chip, train, 1, mesh, folder, options.steps, options.shared)
        until(lambda: story.step >= options.steps - 1, [], "the board is back: torchft sends it the weights")
        until(lambda: chips.alive == [LIGHTHOUSE], [], "done")
    # Since the kill: on a busy machine the first steps may be done by those chips that are up already.
    since = {step: facts for step, facts in story.steps.items() if facts["t"] > killed_at}
    killed_step = min(step for step, facts in since.items() if facts["chips"] == holed.n_chips) - 1
    draw(story, killed_at, back_at, options.figure)
    agree = all(len(weights) == 1 for weights in story.weights.values())
    used = story.used().values()
    result = {
        "steps": len(story.steps),
        "killed_after_step": killed_step,
        "recovered_s": recovered_s,
        "chips": [story.steps[step]["chips"] for step in sorted(story.steps)],
        "first_loss": story.loss(0),
        "last_loss": story.loss(story.step),
        "weights_agree": agree,
        "samples": sum(used),
        "sample_used": [min(used), max(used)],
        "figure": str(options.figure),
    }
    if options.no_view:
        print(json.dumps(result))
    else:
        console.print(
            f"{result['steps']} steps. The board died after step {killed_step + 1}; {holed.n_chips} chips committed a "
            f"step {recovered_s:.2f} s later. Loss {result['first_loss']:.3f} → {result['last_loss']:.3f}. After every "
            f"step all chips {'had the same weights' if agree else 'did NOT have the same weights'}. Each of "
            f"{N_SAMPLES} samples was used {min(used)} or {max(used)} times. "
            f"Figure: {options.figure}"
        )
    if not agree:
        raise SystemExit(1)


def wait_for(condition: Any, patience_s: float = 180.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing happened for {patience_s:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
