"""Compiling for a slice in a process of its own: a compiler that aborts ends only that process.

libtpu aborts on some programs that it should refuse: on collectives inside tiles of a slice with a hole, and now and
then on long unrolled ones. The parent then raises a `CompilerError` with what the compiler said last and what to do.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshmend.errors import MeshmendError
from meshmend.jax.compiling.ahead_of_time import Compiled, CompilerError, compile_for, slice_fabric
from meshmend.jax.compiling.hidden import Overlap
from meshmend.jax.compiling.layer_stack import Shard, StackPlans, Transformer, compile_stack
from meshmend.jax.tiles import tile
from meshmend.schedule import Schedule
from meshmend.schedule.serialize import from_text, to_text

CHILD = "from meshmend.jax.compiling.apart import compile_from_stdin; compile_from_stdin()"


@dataclass(frozen=True)
class TileJob:
    """What to compile: a slice cut into tiles, and the all-reduce alone or a workload's train step."""

    topology: str
    side: str
    failed: Sequence[str] = ()
    wrap: bool | Sequence[bool] | None = None
    cores: int | None = None
    payload_bytes: int = 1
    dtype: str = "float32"
    workload: str | None = None
    batch: int = 1


@dataclass(frozen=True)
class StackJob:
    """What to compile: a train step of a transformer's layers on chips alone, and what of it is sharded."""

    topology: str
    model: Transformer
    shard: Shard = Shard.FSDP
    hide: bool = True
    in_turn: bool = False
    gradients_only: bool = False
    failed: Sequence[str] = ()
    wrap: bool | Sequence[bool] | None = None
    cores: int | None = None


def compile_apart(job: TileJob, schedule: Schedule) -> Compiled:
    """Compile a plan of the mesh of tiles, in another process; raise `CompilerError` where the compiler aborts."""
    given = {"job": dataclasses.asdict(job), "schedule": to_text(schedule)}
    return _in_child(
        job.topology,
        given,
        "Try another tile or another sharding inside it: docs/adopt.md lists what is known to work.",
    )


def compile_stack_apart(job: StackJob, plans: StackPlans) -> Compiled:
    """Compile a transformer's train step, in another process; raise `CompilerError` where the compiler aborts."""
    texts = {
        name: None if schedule is None else to_text(schedule)
        for name, schedule in (("whole", plans.whole), ("scatter", plans.scatter), ("gather", plans.gather))
    }
    given = {"stack": dataclasses.asdict(job), "plans": texts}
    return _in_child(job.topology, given, "Try fewer chunks, or without hiding: docs/shard.md has sizes that compile.")


def _in_child(topology: str, given: dict[str, Any], otherwise: str) -> Compiled:
    done = subprocess.run(  # noqa: S603  # this interpreter, with code of ours
        [sys.executable, "-c", CHILD], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if "compiled" in answer:
        facts = answer["compiled"]
        return Compiled(**facts | {"bodies": tuple(Overlap(**body) for body in facts["bodies"])})
    if "error" in answer:
        raise CompilerError(topology, answer["error"], answer["advice"] or _advice(answer["error"], otherwise))
    said = re.findall(r"^.*(?:Check failed|Fatal|Error).*$", done.stderr, re.M) or [done.stderr.strip()[-300:]]
    how = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    raise CompilerError(topology, f"its compiler aborted ({how}): {said[0].strip()[:300]}", _advice(said[0], otherwise))


def _advice(said: str, otherwise: str) -> str:
    if "device_id" in said:
        return (
            "It cannot place collectives inside tiles next to a hole by default. Compile with fabric.compiler_options, "
            "which sets xla_tpu_enable_glp_ring_reordering=false."
        )
    return otherwise


def compile_from_stdin() -> None:
    """Be the child: read a job and its schedules, print what became of it as one line of JSON."""
    given = json.load(sys.stdin)
    try:
        report = _compile_stack(given) if "stack" in given else _compile_tiles(given)
        answer: dict[str, Any] = {"compiled": dataclasses.asdict(report)}
    except CompilerError as error:
        answer = {"error": error.why, "advice": error.advice}
    except MeshmendError as error:
        answer = {"error": str(error), "advice": ""}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _compile_tiles(given: dict[str, Any]) -> Compiled:
    job = TileJob(**given["job"])
    fabric = tile(slice_fabric(job.topology, failed=job.failed, wrap=job.wrap, cores=job.cores), job.side)
    schedule = from_text(given["schedule"])
    if job.workload is None:
        return compile_for(job.topology, schedule, fabric, payload_bytes=job.payload_bytes, dtype=job.dtype)
    # They need flax, an extra of their own.
    from meshmend.jax.workloads import compile_workload, find_workload

    return compile_workload(job.topology, find_workload(job.workload), schedule, fabric, batch=job.batch)


def _compile_stack(given: dict[str, Any]) -> Compiled:
    facts = given["stack"]
    job = StackJob(**facts | {"model": Transformer(**facts["model"]), "shard": Shard(facts["shard"])})
    fabric = slice_fabric(job.topology, failed=job.failed, wrap=job.wrap, cores=job.cores)
    texts = given["plans"]
    halves = (None if texts[name] is None else from_text(texts[name]) for name in ("scatter", "gather"))
    plans = StackPlans(from_text(texts["whole"]), *halves)
    return compile_stack(
        job.topology,
        job.model,
        plans,
        fabric,
        shard=job.shard,
        hide=job.hide,
        in_turn=job.in_turn,
        gradients_only=job.gradients_only,
    )
