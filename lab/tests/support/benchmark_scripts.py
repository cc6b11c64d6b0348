"""Every script of benchmarks/ at its smallest size: its words, what it needs, and a line that it has to print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from meshmend_lab import simgrid
from namespaces import WHY_NOT

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Script:
    """A run of a script: its words, a pattern of what it prints, the modules that it needs, and whether it takes long.

    The pattern is found `times` times at least.
    A script that is a job is started with the words of `launch`, and `before` is what has to run first, both after
    `meshmend run`. The status is that of a script whose figures are within its own limits, which few processors keep:
    with `judges`, it may be another one.
    """

    words: str
    prints: str
    needs: tuple[str, ...] = ()
    is_slow: bool = False
    launch: str = ""
    before: str = ""
    judges: bool = False
    times: int = 1

    def skipped_because(self) -> str | None:
        """Return what is missing here, None if nothing is."""
        for name in self.needs:
            if name == "lab":
                if WHY_NOT is not None:
                    return WHY_NOT
                continue
            module, _, version = name.partition(">=")
            if not (simgrid.is_available() if module == "simgrid" else find_spec(module)):
                return f"{module} is not installed"
            if version and tuple(map(int, metadata.version(module).split(".")[:2])) < tuple(
                map(int, version.split("."))
            ):
                return f"needs {name}, this is {metadata.version(module)}"
        return None

    def run(self, name: str, folder: Path) -> None:
        """Run it in a folder, and check what it prints."""
        script = [str(FOLDER / f"{name}.py"), *shlex.split(self.words)]
        if self.before:
            self._finish(["-m", "meshmend", "run", *shlex.split(self.before.format(benchmarks=FOLDER))], folder)
        launch = ["-m", "meshmend", "run", *shlex.split(self.launch)] if self.launch else []
        printed = self._finish([*launch, *script], folder, may_fail=self.judges)
        assert len(re.findall(self.prints, printed, re.M)) >= self.times, printed

    @staticmethod
    def _finish(words: list[str], folder: Path, *, may_fail: bool = False) -> str:
        command = [sys.executable, *words]
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert may_fail or done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


JAX, TPU_COMPILER, TORCH = ("jax", "optax"), ("jax", "optax", "libtpu"), ("torch",)
SMALL_MODEL = "--layers 2 --width 256 --sequence 128"

SCRIPTS: dict[str, Script] = {
    "bounds": Script("--chips 64", r"8x8 minus 2x2@2,2 │ +0\.6000 │"),
    "checkpoint_stall": Script("1", r"^fsdp +1 MB +holds", (*JAX, "orbax"), is_slow=True),
    "compile_ahead": Script("6", r"^\| 6 \| .* \| 2 of 6 \| 5 survivors loaded host [1-5]", JAX, is_slow=True),
    "feed": Script("8192", r"8,192 samples  dict   batch 8,192", JAX, is_slow=True),
    "first_minutes": Script("--here", r"^recovery +\d", JAX, is_slow=True),
    "fused_update": Script("--chips 64 --chunks 256", r"8x8 minus 2x2@2,2 │ +\d\.\d+ │", is_slow=True),
    "gather": Script("--chips 16", r"5 % of cables at random │ +0\.6556 │", is_slow=True),
    "jax_billion": Script(
        f"{SMALL_MODEL} --vocabulary 512 --machines v6e:8x8 --updates fsdp", r"fsdp", TPU_COMPILER, is_slow=True
    ),
    "jax_cable": Script("--steps 90", r"^losses differ .* by at most \d\.\de-0[5-9]", (*JAX, "lab"), is_slow=True),
    "jax_checks": Script(
        '--shape 2x2 --hole "" --width 16 --depth 1 --tokens 8 --rounds 1', r"^digests +\d", JAX, is_slow=True
    ),
    "jax_fsdp": Script(f"{SMALL_MODEL} --ways sharded --topology v6e:4x4", r"sharded", TPU_COMPILER, is_slow=True),
    "jax_fused_update": Script(
        "--shape 2x4 --hole 2x2@0,0 --chunks 12 --megabytes 0.1 --rounds 1", r"fused", JAX, is_slow=True
    ),
    "jax_job_step": Script("", r"ratio \d", JAX, is_slow=True, launch="--local 2x2 --host 1x2"),
    "jax_kernel_timing": Script("--chips 64", r"instructions in order \d\.\d+ M/b", JAX, is_slow=True),
    "jax_recompute": Script(
        '--shape 2x2 --hole "" --width 16 --layers 1 --rows 4 --every 4 --rounds 1', r"\d", JAX, is_slow=True
    ),
    "jax_shard_memory": Script("--quick", r"^v6e +8x8 .* 1\.000 ×$", TPU_COMPILER, is_slow=True),
    "job_processes": Script("4", r"^\| 4 \| two killed \|", JAX, is_slow=True),
    "job_scale": Script("200", r"^\| 200 \|", JAX, is_slow=True),
    "job_size": Script("steps 1", r"\d", JAX, is_slow=True, launch="--local 2x2 --host 1x2"),
    "latency": Script("--chips 64", r"^│ 8x8 torus │ +27\.1 │ +22\.6 │ +20\.0 │"),
    "overhead": Script("--groups 2 --hosts 1", r"^share of a step +\d", is_slow=True),
    "paper_workloads": Script(
        "--model gpt-small --topology v6e:4x4 --hole 0,1 --tile 2x2 --batch 1 --json",
        r"gpt-small",
        (*TPU_COMPILER, "flax"),
        is_slow=True,
    ),
    "peers/run_peer": Script(f"meshmend 4x4 --source {ROOT} --results results.jsonl", r"weave", is_slow=True),
    "peers/table": Script("--readme", r"^\| TACOS .* 0\.983 \|$"),
    "rates": Script("--chips 64 --chunks 64", r"^\| a column at 1/2 \| 0\.6154 \| 2 \|"),
    "replay": Script(
        "shared",
        r"steps",
        JAX,
        is_slow=True,
        before="--local 2x2 --host 1x2 --kill 1@5 --shared shared {benchmarks}/jax_job_step.py",
    ),
    "routing": Script("12x12", r"256x256 minus 4x2@6,8: 20,000 random flows", is_slow=True),
    "simulated_recovery": Script(
        "--failures 1 --jobs 20", r"^\| simulated, parts as measured \| 20 \|", JAX, is_slow=True, judges=True
    ),
    # 30 ratios of planners on 4x4, and 6 of a pipeline, of which the one over single links is 0.99.
    "simgrid_agreement": Script("--chips 16", r"1\.000000", ("simgrid",), times=35, is_slow=True),
    "slack": Script("--chips 64 --payload 1MB", r"4x4x4 torus +1 MB +\d\.\d+", is_slow=True),
    "slow_cable": Script("", r"^\| 16×16, corner \| 1/4 \|"),
    "store_scale": Script("100", r"^\| 100 \|", is_slow=True, judges=True),
    "tenstorrent": Script("table --only tt_umd_t3k_cluster_desc.yaml", r"^\| T3000 \| one chip \|", is_slow=True),
    "tls_join": Script(
        "--runs 1", r"^recovery: all have joined", ("jax>=0.12", "cryptography"), is_slow=True, judges=True
    ),
    "torch_agreement": Script("--shape 1x2 --payload 4000", r"4,000 bytes: \d", TORCH),
    "torch_backend": Script("--loopback 1x2 --payload 100kB --repeat 1", r"DDP step +\d", TORCH, is_slow=True),
    "torch_cable": Script("torchft", r"^planned around it from step \d+", (*TORCH, "torchft", "lab"), is_slow=True),
    "torch_failures": Script("2x4 --kills 1", r"\d", (*TORCH, "torchft"), is_slow=True),
    "torch_staging": Script("--shape 1x2 --payload 4000 --repeat 2", r"^ +4,000  ", TORCH, is_slow=True),
    "torch_steps": Script("--shape 1x2 --steps 5 --repeat 1", r"^seconds, start to end +\d", TORCH, is_slow=True),
    "weave": Script("--chips 64 --scale", r"8x8 minus 4x2@2,2 +│"),
}
"""By the path in the folder, without its suffix."""
MODULES = {"hidden", "layer_stack", "peers/peer_plans", "recorded_job", "tables", "workloads/__init__",
           "workloads/bert", "workloads/gpt", "workloads/resnet"}  # fmt: skip
"""What scripts import, and which is no script of its own."""
