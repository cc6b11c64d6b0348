"""The commands of docs/cluster.md, in order and from its own text, on two hosts of this machine in place of eight.

`sbatch` is a stand-in here, which only starts the script. `lab/tests/jobs/test_slurm.py` has a real Slurm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshmend.launch.processes import free_port
from pages import ROOT, Block, commands, read

BLOCKS = [block for block in read(ROOT / "docs/cluster.md") if block.kind == "bash"]
LIMIT_S = 400
# $1 is --nodelist, $2 the script, and $3 its argument.
SBATCH = '#!/bin/sh\nnode="$1"; shift; bash "$@" > "${node#--nodelist=}.log" 2>&1 &\n'


def block_with(words: str) -> Block:
    (found,) = (block for block in BLOCKS if words in block.body)
    return found


def smaller(block: Block, folder: Path, port: int) -> str:
    """Return a block's commands for two hosts of 2×2 chips, a store on loopback and a shared folder that is here."""
    text = re.sub(r"(?:10\.0\.0\.7|head|0\.0\.0\.0):29400", f"127.0.0.1:{port}", block.body)
    for old, new in (
        ("--hosts 5:8", "--hosts 2:2"),
        ("--shape 8x8", "--shape 2x4"),
        ("--host 4x2", "--host 2x2"),
        (" 0 1 2 3 4 5 6 7;", " 0 1;"),
        (" /shared", f" {folder}/shared"),
    ):
        text = text.replace(old, new)
    assert "29400" not in text
    assert "8x8" not in text
    return text


@contextmanager
def running(text: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run commands in a session of their own, and end what is left of it."""
    env = os.environ | {
        "PATH": f"{folder}/tools{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "MESHMEND_MEMORY": str(folder / "memory"),
    }
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=env | environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tools", "shared"):
        (tmp_path / name).mkdir()
    commands(tmp_path / "tools")
    (tmp_path / "tools/sbatch").write_text(SBATCH, encoding="utf-8")
    (tmp_path / "tools/sbatch").chmod(0o755)
    script = (ROOT / "examples/jax/survive.py").read_text(encoding="utf-8")
    script, n_changed = re.subn(r"steps=100\b", "steps=4", script)
    assert n_changed == 1
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    subprocess.run(["bash", "-euc", block_with("openssl rand").body], cwd=tmp_path, check=True)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_start_train(folder: Path) -> None:
    port = free_port("127.0.0.1")
    host = smaller(block_with("meshmend run --hosts 5:8 --shape 8x8 --host 4x2 --store 10"), folder, port)
    with (
        running(smaller(block_with("meshmend store --listen 10"), folder, port), folder) as store,
        running(host, folder, MESHMEND_HOST="0") as first,
        running(host, folder, MESHMEND_HOST="1") as second,
    ):
        assert [one.wait(LIMIT_S) for one in (first, second, store)] == [0, 0, 0]
    assert (folder / "shared/disk/4").is_dir()


def test_the_commands_under_slurm_train(folder: Path) -> None:
    text = smaller(block_with("sbatch"), folder, free_port("127.0.0.1"))
    with running(text, folder) as submitted:
        assert submitted.wait(LIMIT_S) == 0, (folder / "node0.log").read_text(encoding="utf-8")
    assert (folder / "shared/disk/4").is_dir()
    assert {path.name for path in folder.glob("node*.log")} == {"node0.log", "node1.log"}
