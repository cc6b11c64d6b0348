"""Compiling for a slice in a process of its own: a compiler that aborts ends only that process.

libtpu aborts on some programs that it should refuse, as on collectives inside tiles of a slice with a hole. The parent
then raises a `CompilerError` with what the compiler said last and what to do.
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
from meshmend.jax.tiles import tile
from meshmend.schedule import Schedule
from meshmend.schedule.serialize import from_text, to_text

CHILD = "from meshmend.jax.compiling.apart import compile_from_stdin; compile_from_stdin()"


@dataclass(frozen=True)
class TileJob:
    """What to compile: the all-reduce of a payload on a slice that is cut into tiles."""

    topology: str
    side: str
    failed: Sequence[str] = ()
    wrap: bool | Sequence[bool] | None = None
    cores: int | None = None
    payload_bytes: int = 1
    dtype: str = "float32"


def compile_apart(job: TileJob, schedule: Schedule) -> Compiled:
    """Compile a plan of the mesh of tiles, in another process; raise `CompilerError` where the compiler aborts."""
    given = json.dumps({"job": dataclasses.asdict(job), "schedule": to_text(schedule)})
    done = subprocess.run(  # noqa: S603  # this interpreter, with code of ours
        [sys.executable, "-c", CHILD], input=given, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if "compiled" in answer:
        return Compiled(**answer["compiled"])
    if "error" in answer:
        raise CompilerError(job.topology, answer["error"], answer["advice"] or _advice(answer["error"]))
    said = re.findall(r"^.*(?:Check failed|Fatal|Error).*$", done.stderr, re.M) or [done.stderr.strip()[-300:]]
    how = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    raise CompilerError(job.topology, f"its compiler aborted ({how}): {said[0].strip()[:300]}", _advice(said[0]))


def _advice(said: str) -> str:
    if "device_id" in said:
        return (
            "It cannot place collectives inside tiles next to a hole by default. Compile with fabric.compiler_options, "
            "which sets xla_tpu_enable_glp_ring_reordering=false."
        )
    return "Try another tile or another sharding inside it: docs/jax.md lists what is known to work."


def compile_from_stdin() -> None:
    """Be the child: read a job and its schedule, print what became of it as one line of JSON."""
    given = json.load(sys.stdin)
    job = TileJob(**given["job"])
    try:
        fabric = tile(slice_fabric(job.topology, failed=job.failed, wrap=job.wrap, cores=job.cores), job.side)
        schedule = from_text(given["schedule"])
        report = compile_for(job.topology, schedule, fabric, payload_bytes=job.payload_bytes, dtype=job.dtype)
        answer: dict[str, Any] = {"compiled": dataclasses.asdict(report)}
    except CompilerError as error:
        answer = {"error": error.why, "advice": error.advice}
    except MeshmendError as error:
        answer = {"error": str(error), "advice": ""}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
