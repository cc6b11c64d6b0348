"""Train through the loss of a host: 8 hosts of 4×2 chips as an 8×8 mesh, one of them killed during training.

    python examples/jax/train_through_failure.py            # a few minutes on two cores

Needs meshmend[launch]. Each host is an agent and its worker, one process with eight virtual chips; the rendezvous
store is a separate process. A third of the way in, one
host gets SIGKILL and its memory is wiped. The others restart by themselves: they find the hole, take its plan and its
compiled program from the caches, restore the state from each other's memory, and continue. You see the mesh and the
loss while it runs; at the end there is a figure.

`train` below is the whole training script; the rest starts, kills and watches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE, HOST, N_HOSTS = "8x8", "4x2", 8
CONTEXT, WIDTH, BATCH = 12, 24, 128
TEXT = Path(__file__).parents[2] / "LICENSE"


def train(folder: Path, steps: int) -> None:
    """One host's worker: what the launcher starts and restarts."""
    import jax.numpy as jnp
    import optax

    import meshmend.jax as mmj
    from meshmend.jax.compile import CompileAhead, CompiledTrainStep, compile_train_step
    from meshmend.jax.session import initialize
    from meshmend.jax.state import Keeper, fetch, put
    from meshmend.jax.train.plan import TrainingPlan
    from meshmend.planning import PlanCache

    host = os.environ["MESHMEND_HOST"]
    with initialize(
        SHAPE, HOST, compile_cache=folder / "compiled", timeline=folder / f"timeline-{host}.jsonl", timeout_s=90
    ) as session:
        samples, n_letters = read_samples()
        weights = make_params(n_letters)
        feed = mmj.Feed(samples, mmj.KeepGlobal(BATCH), seed=0, threads=0, prefetch=0)
        optimizer = optax.adam(1e-2)

        def loss(params: Any, letters: Any) -> Any:
            x = params["embed"][letters[:, :-1]].reshape(len(letters), -1)
            logits = jnp.tanh(x @ params["hidden"] + params["bias"]) @ params["read"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, -1])

        def plan(fabric: mmj.Fabric, cache: PlanCache) -> TrainingPlan:
            """Plan for the bytes that these weights send, on a fabric's own hardware."""
            return mmj.plan(fabric, weights, update="sharded", cache=cache)

        def build(fabric: mmj.Fabric) -> CompiledTrainStep:
            """Plan and compile for a fabric: that of the survivors, or that after another failure."""
            program = plan(fabric, plans).install(fabric)
            training = mmj.train_step(loss, optimizer, fabric, per_example=True)
            return compile_train_step(training, program, weights, feed.like(fabric))

        fabric, plans = session.fabric, PlanCache(folder / "plans")
        session.agree_on_plan(lambda cache: plan(fabric, cache), plans)
        with session.timeline.timed("compile"):
            compiled = build(fabric)
        params = put(weights, fabric)
        keeper = Keeper(
            session,
            compiled.layout,
            disk=folder / "disk",
            disk_every=10,
        )
        found = keeper.restore(params, compiled.init(params), extra=mmj.Position())
        params, state = found.params, found.state
        ahead = None
        batches = feed.batches(fabric, at=mmj.Position(*found.extra))
        for number, batch in zip(range(found.step + 1, steps + 1), batches, strict=False):
            params, state, value = compiled.step(params, state, batch)
            keeper.keep(number, params, state, extra=batch.after)
            session.timeline.note(
                "step",
                step=number,
                loss=float(fetch(value)),
                chips=fabric.mesh.n_chips,
                examples=len(batch.indices),
            )
            if number == found.step + 2 and fabric.mesh.is_full:
                ahead = CompileAhead(session, build)
            if number == steps // 3 and ahead is not None:
                ahead.wait()  # in this example only: the host is killed when everything is compiled
        keeper.close()
        if ahead is not None:
            ahead.stop()


def read_samples() -> tuple[Any, int]:
    """Return pieces of text, a few letters and the one that follows, and how many letters there are."""
    import numpy as np

    text = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
    letters, text = np.unique(text, return_inverse=True)
    starts = np.arange(0, len(text) - CONTEXT - 1, 3)[:3200]
    return list(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)), len(letters)


def make_params(n_letters: int) -> Any:
    """Return the weights of a small network from a few letters to the next one."""
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = {
        "embed": (n_letters, WIDTH),
        "hidden": (CONTEXT * WIDTH, 4 * WIDTH),
        "bias": (4 * WIDTH,),
        "read": (4 * WIDTH, n_letters),
    }
    return {name: (rng.standard_normal(s) / max(s[0], 1) ** 0.5).astype(np.float32) for name, s in shapes.items()}


class Story:
    """What the hosts have written so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: dict[int, list[dict[str, Any]]] = {}

    def update(self) -> None:
        """Read the timelines."""
        from meshmend.launch.timeline import read_timeline

        self.events = {host: read_timeline(self.folder / f"timeline-{host}.jsonl") for host in range(N_HOSTS)}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps that count, in order, each as the first host wrote it."""
        found: dict[int, dict[str, Any]] = {}
        for events in self.events.values():
            for event in events:
                if event["event"] == "step":
                    known = found.get(event["step"])
                    if known is None or event["round"] > known["round"]:
                        found[event["step"]] = event
        return [found[step] for step in sorted(found)]

    def committed_without(self, victim: int, killed_at: float) -> tuple[float, int] | None:
        """Return when all survivors had kept a step of theirs for the first time, and which host was last."""
        first: dict[int, float] = {}
        for host, events in self.events.items():
            restored = [e["at"] for e in events if e["event"] == "restore" and e["at"] > killed_at]
            kept = [e["at"] for e in events if e["event"] == "kept" and restored and e["at"] > restored[-1]]
            if host != victim:
                first[host] = min(kept, default=float("inf"))
        last = max(first, key=lambda host: first[host])
        return (first[last], last) if first[last] < float("inf") else None


def view(story: Story, dead: list[int], what: str, steps: int) -> Any:
    """Draw the mesh and the loss."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from meshmend.launch import Hosts

    host_of = {chip: host for host in range(N_HOSTS) for chip in Hosts.of(SHAPE, HOST).chips(host)}
    grid = Table.grid(padding=(0, 1))
    for row in range(8):
        gone = [host_of[row, column] in dead for column in range(8)]
        grid.add_row(*(Text(" ✗ " if lost else " ● ", "white on red" if lost else "green") for lost in gone))
    done = story.steps
    bars = "▁▂▃▄▅▆▇█"
    line = "".join(bars[min(int(step["loss"] / 4.5 * 7), 7)] for step in done[-60:])
    now = f"step {done[-1]['step']} of {steps}, loss {done[-1]['loss']:.3f}" if done else "starting"
    return Group(grid, Text(f"{now}  {line}"), Text(what, "bold"))


def draw(story: Story, victim: int, killed_at: float, committed_at: float, path: Path) -> None:
    """Write the figure: loss and throughput over time."""
    from matplotlib.figure import Figure

    steps = story.steps
    begun = steps[0]["at"]
    seconds = [step["at"] - begun for step in steps]
    rate = [steps[i]["examples"] / (seconds[i] - seconds[i - 1]) for i in range(1, len(steps))]
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    top.plot(seconds, [step["loss"] for step in steps], ".-", markersize=4)
    top.set_ylabel("loss (nats per letter)")
    bottom.step(seconds[1:], rate, where="pre")
    bottom.set_ylabel("examples per second")
    bottom.set_ylim(0)
    bottom.set_xlabel("seconds since the first step")
    for axes in (top, bottom):
        axes.axvline(killed_at - begun, color="C3", linestyle="dashed", linewidth=1)
        axes.axvspan(killed_at - begun, committed_at - begun, color="C3", alpha=0.12, linewidth=0)
    chips = {step["chips"] for step in steps}
    label = f"host {victim} killed\n{committed_at - killed_at:.0f} s to the next step"
    top.annotate(label, (killed_at - begun, 0.98), (4, 0), ("data", "axes fraction"), "offset points", va="top")
    top.set_title(f"{max(chips)} chips, then {min(chips)}; every step once")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Start the hosts, kill one, and report what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--victim", type=int, default=5, help="the host that is killed, 0 to 7")
    parser.add_argument("--figure", type=Path, default=Path("train_through_failure.png"))
    parser.add_argument("--no-view", action="store_true", help="print one JSON object at the end instead")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.steps)
        return

    from rich.console import Console
    from rich.live import Live

    from meshmend.launch import Hosts
    from meshmend.launch.goodput import HostHistory, gave_up_at
    from meshmend.launch.local import LocalJob

    console = Console(quiet=options.no_view)
    with (
        tempfile.TemporaryDirectory(prefix="meshmend-") as name,
        Live(console=console, auto_refresh=False) as live,
    ):
        folder, story = Path(name), Story(Path(name))
        command = [str(Path(__file__).absolute()), "--worker", name, "--steps", str(options.steps)]

        def log(host: int, line: str) -> None:
            with (folder / f"host-{host}.log").open("a") as file:
                file.write(line + "\n")

        with LocalJob(command, Hosts.of(SHAPE, HOST), folder, on_line=log) as hosts:
            hosts.start()

            def until(condition: Any, dead: list[int], what: str, patience_s: float = 300.0) -> None:
                deadline = time.monotonic() + patience_s
                while True:
                    story.update()
                    live.update(view(story, dead, what, options.steps), refresh=not options.no_view)
                    if condition():
                        return
                    if time.monotonic() > deadline or not hosts.running:
                        for log in folder.glob("host-*.log"):
                            sys.stderr.write(f"== {log.name}\n{log.read_text()[-2000:]}\n")
                        raise SystemExit(f"gave up waiting: {what}")
                    hosts.watch(0.2)

            def ready() -> bool:
                compiled = [e for e in story.events[0] if e["event"] == "compile ahead"]
                done = story.steps
                return bool(done) and done[-1]["step"] >= options.steps // 3 and len(compiled) == N_HOSTS

            until(ready, [], "64 chips train; process 0 compiles for the loss of each host meanwhile")
            killed_step = story.steps[-1]["step"]
            killed_at = hosts.kill(options.victim)
            until(
                lambda: story.committed_without(options.victim, killed_at),
                [options.victim],
                f"SIGKILL for host {options.victim}, its memory wiped: the others restart round the hole",
            )
            committed_at, last = story.committed_without(options.victim, killed_at) or (0.0, 0)
            until(
                lambda: not hosts.running or story.steps[-1]["step"] >= options.steps,
                [options.victim],
                "56 chips continue training",
            )
            statuses = hosts.wait(120)
            story.update()
    histories = {host: HostHistory(events) for host, events in story.events.items() if host != options.victim}
    again = next(one for one in histories[last].rounds if one.started > killed_at)
    split = again.stages_since(killed_at, gave_up_at(histories.values()), until=committed_at)
    restored = next(e for e in story.events[last] if e["event"] == "restore" and e["at"] > killed_at)
    steps = story.steps
    draw(story, options.victim, killed_at, committed_at, options.figure)
    result = {
        "steps": [step["step"] for step in steps],
        "chips": [step["chips"] for step in steps],
        "killed_after_step": killed_step,
        "resumed_from": restored["source"],
        "resumed_step": restored["step"],
        "recovered_s": committed_at - killed_at,
        "stages_s": split,
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "statuses": sorted(set(statuses.values())),
        "figure": str(options.figure),
    }
    whole = result["steps"] == list(range(1, options.steps + 1)) and result["statuses"] == [0]
    if options.no_view:
        print(json.dumps(result))
    else:
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in split.items())
        console.print(
            f"{len(steps)} steps{', none missing' if whole else ' WITH GAPS'}. Host {options.victim} died after step "
            f"{killed_step}; the others resumed at step {restored['step']} from {restored['source']}, and "
            f"committed the next one {committed_at - killed_at:.1f} s after SIGKILL ({stages}). "
            f"Loss {result['first_loss']:.3f} → {result['last_loss']:.3f}. Figure: {options.figure}"
        )
    if not whole:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
