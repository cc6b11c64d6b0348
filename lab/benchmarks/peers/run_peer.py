"""Run a peer's planner on a mesh, prove and price what it plans, and append a line to results.jsonl.

    python lab/benchmarks/peers/run_peer.py tacos "8x8 minus 2x2" --source ~/tacos --driver ~/tacos_driver --chunks 4
    python lab/benchmarks/peers/run_peer.py forestcoll "8x8 minus 2x2" --source ~/ForestColl --rounds 8 64
    python lab/benchmarks/peers/run_peer.py multitree "8x8 minus 2x2" --source ~/TTO_HPCA_2024
    python lab/benchmarks/peers/run_peer.py tto 8x8 --source ~/TTO_HPCA_2024 --rounds 128 1024
    python lab/benchmarks/peers/run_peer.py meshmend "8x8 minus 2x2"

README.md, beside this file, says where each is published and how it is built. CPU seconds are those of the peer's
planner alone: without reading the mesh, our conversion, the proof and the prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from meshmend import Mesh, Schedule, plan
from peer_plans import (
    LINKS_ALONE,
    MESHES,
    PAYLOAD_BYTES,
    WITH_LATENCY,
    breadth_first,
    from_gather,
    judge,
    one_pipeline,
    two_phases,
)

RESULTS = Path(__file__).with_name("results.jsonl")
PORTS = 4
"""Links of a chip, as the scripts of MultiTree's and TTO's authors have it for meshes."""
T = TypeVar("T")
Found = tuple[str, Schedule, dict[str, object]]
"""A name for the table, what was planned, and more to write down."""


class OutOfTimeError(Exception):
    """The peer used all CPU seconds that it was given."""


def tacos(mesh: Mesh, options: argparse.Namespace) -> Iterator[Found]:
    """TACOS draws its random numbers anew in each run: run it several times."""
    n_chunks = mesh.n_chips * options.chunks
    cables = "".join(f"{a} {b}\n" for a, b in mesh.cables)
    before = _child_seconds()
    done = subprocess.run(
        [options.driver, str(options.chunks), str(int(PAYLOAD_BYTES / n_chunks))],
        input=f"{mesh.n_chips}\n{cables}",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGXCPU:
        raise OutOfTimeError
    if done.returncode:
        raise SystemExit(f"{options.driver} ended with exit code {done.returncode}: {done.stderr}")
    seconds = _child_seconds() - before
    sends = np.array([line.split() for line in done.stdout.splitlines()], dtype=float)
    sends[:, 0] = np.unique(sends[:, 0], return_inverse=True)[1]
    own = 2e-6 * float(done.stderr) * LINKS_ALONE.link_bytes_per_s / PAYLOAD_BYTES
    schedule = from_gather(mesh, sends, np.arange(n_chunks) % mesh.n_chips, "tacos")
    yield "TACOS", schedule, {"cpu_seconds": seconds, "own_units": own, "chunks_per_chip": options.chunks}


def forestcoll(mesh: Mesh, options: argparse.Namespace) -> Iterator[Found]:
    """ForestColl plans trees, and how much goes down each; when a chunk is sent is our first fit, in random order."""
    networkx = importlib.import_module("networkx")
    sys.path.insert(0, str(options.source))
    planner = importlib.import_module("pipeline_allgather")
    graph = networkx.DiGraph()
    for a, b in mesh.cables.tolist():
        graph.add_edge(a, b, capacity=1)
        graph.add_edge(b, a, capacity=1)
    ((load, k), (links, copies)), seconds = _timed(lambda: planner.optimal_pipeline_spanning_trees(graph))
    trees = [
        breadth_first(root, [link for path in links[root, number] for link in path])
        for (root, number), n in sorted(copies.items())
        for _ in range(n)
    ]
    own = 2 * load / (k * mesh.n_chips)
    for rounds in options.rounds:
        sent = trees * rounds
        random.Random(0).shuffle(sent)  # noqa: S311
        more = {"cpu_seconds": seconds, "own_units": own, "trees_per_chip": k, "rounds": rounds}
        yield "ForestColl, two phases", two_phases(mesh, sent, "forestcoll"), more
        yield "ForestColl, one pipeline", one_pipeline(mesh, sent, "forestcoll"), more


def multitree(mesh: Mesh, options: argparse.Namespace) -> Iterator[Found]:
    """MultiTree plans trees and steps. Roots with the farthest chip come first, as on its own meshes.

    How good its trees are depends on the order of a chip's neighbours. This one, by rank, is better than its own.
    """
    module = _artifact(options.source, "multitree_allreduce")
    chips = range(mesh.n_chips)
    near: dict[int, list[int]] = {chip: [] for chip in chips}
    for a, b in mesh.cables.tolist():
        near[a].append(b)
        near[b].append(a)
    for neighbours in near.values():
        neighbours.sort()
    network = SimpleNamespace(
        nodes=mesh.n_chips,
        priority=[_farthest(near, chip) for chip in chips],
        node_to_switch={chip: (chip, PORTS) for chip in chips},
        switch_to_node={chip: [chip] * PORTS for chip in chips},
        switch_to_switch=near,
    )
    arguments = SimpleNamespace(load_tree=False, allreduce="multitree", num_hmcs=mesh.n_chips)
    planner = module.MultiTreeAllreduce(arguments, network)
    more: dict[str, object] = {}
    if options.saved:
        with (options.source / f"src/SavedTrees/multitree_{mesh.n_chips}").open("rb") as file:
            trees = pickle.load(file)["tree"]  # noqa: S301 (of the checkout whose code is run as well)
        more["saved"] = True
    else:
        with tempfile.TemporaryDirectory() as folder:  # it keeps its trees below $SIMHOME, and would replace the saved
            (Path(folder) / "src/SavedTrees").mkdir(parents=True)
            os.environ["SIMHOME"] = folder
            _, more["cpu_seconds"] = _timed(lambda: planner.compute_trees(PORTS + 1, alternate=True, sort=True))
        trees = planner.trees
    sends = [(step, parent, child, root) for root, links in trees.items() for child, parent, step in links]
    yield "MultiTree", from_gather(mesh, sends, np.arange(mesh.n_chips), "multitree"), more


def tto(mesh: Mesh, options: argparse.Namespace) -> Iterator[Found]:
    """TTO plans three trees on a full square mesh, and sends chunk after chunk down them as soon as it can."""
    if not mesh.is_full or len(set(mesh.shape)) > 1:
        raise SystemExit("TTO plans full square meshes only.")
    module = _artifact(options.source, "mesh_allreduce_2d_overlap_1")
    arguments = SimpleNamespace(num_hmcs=mesh.n_chips, total_partial_trees=0)
    planner = module.MeshAllreduce2DOverlap1(arguments, SimpleNamespace(nodes=mesh.n_chips))
    _, seconds = _timed(planner.compute_trees)
    trees = [breadth_first(root, [link[1::-1] for link in links]) for root, links in planner.template_trees.items()]
    everyone = set(range(mesh.n_chips))
    left_out = sorted({chip for root, links in trees for chip in everyone - {root, *(child for _, child in links)}})
    for rounds in options.rounds:
        more = {"cpu_seconds": seconds, "left_out": left_out, "rounds": rounds}
        yield "TTO", one_pipeline(mesh, trees * rounds, "tto"), more


def meshmend(mesh: Mesh, options: argparse.Namespace) -> Iterator[Found]:
    """What `plan` returns: as it is asked by default, or for asynchronous engines and 1 µs per hop."""
    hardware, mode = (WITH_LATENCY, "asynchronous") if options.latency else (LINKS_ALONE, "lock-step")
    schedule, seconds = _timed(
        lambda: plan(mesh, payload_bytes=PAYLOAD_BYTES, hardware=hardware, mode=mode, verify=False)
    )
    yield "meshmend", schedule, {"cpu_seconds": seconds, "planned_for": hardware.name, "planner": schedule.planner}


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returns and its CPU seconds; what it prints is dropped."""
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        made = call()
    return made, time.process_time() - began


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _artifact(source: Path, name: str) -> Any:
    """Import a planner from the artifact of TTO, which reads its own place from the environment."""
    os.environ["SIMHOME"] = str(source)
    sys.path[:0] = [str(source / "src/allreduce"), str(source / "src/allreduce/network")]
    importlib.import_module("allreduce")  # first, because its modules import each other
    return importlib.import_module(name)


def _farthest(near: dict[int, list[int]], chip: int) -> int:
    hops, reached = {chip: 0}, [chip]
    for one in reached:
        new = [other for other in near[one] if other not in hops]
        hops |= dict.fromkeys(new, hops[one] + 1)
        reached += new
    return max(hops.values())


def _commit(source: Path) -> str:
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Run one peer on one mesh."""
    peers = {one.__name__: one for one in (tacos, forestcoll, multitree, tto, meshmend)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=peers)
    parser.add_argument("mesh", choices=MESHES)
    parser.add_argument("--source", type=Path, default=Path(__file__).parent, help="your checkout of the peer")
    parser.add_argument("--driver", help="tacos: tacos_driver, built")
    parser.add_argument("--chunks", type=int, default=1, help="tacos: chunks per chip")
    parser.add_argument("--rounds", type=int, nargs="+", default=[8], help="forestcoll, tto: chunks per tree")
    parser.add_argument("--saved", action="store_true", help="multitree: the trees that its authors saved, of a square")
    parser.add_argument("--latency", action="store_true", help="meshmend: plan for 1 µs per hop")
    parser.add_argument("--limit", type=int, default=3600, help="CPU seconds until it is given up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where a line is appended")
    options = parser.parse_args()

    def give_up(_: int, __: FrameType | None) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGXCPU, give_up)
    resource.setrlimit(resource.RLIMIT_CPU, (options.limit, resource.RLIM_INFINITY))
    entry = {"peer": options.peer, "mesh": options.mesh, "commit": _commit(options.source)}
    try:
        for name, schedule, more in peers[options.peer](MESHES[options.mesh], options):
            resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            judged = judge(schedule, prove=not more.get("left_out"))
            _keep(options.results, {**entry, "peer": name, **more, **judged})
    except OutOfTimeError:
        _keep(options.results, {**entry, "gave_up_after": options.limit})


def _keep(path: Path, line: dict[str, object]) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(rounded))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
