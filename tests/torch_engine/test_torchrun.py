"""DDP under the real torchrun: the page's script, with Gloo and with meshmend, and a member that dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend import Mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

import meshmend.torch as mmt  # noqa: E402
from meshmend.errors import MeshError  # noqa: E402
from pages import ROOT, Block, read  # noqa: E402

HIDDEN = ("MESHMEND_SHAPE", "MESHMEND_CHIP", "MESHMEND_WRAP", "MESHMEND_MACHINE", "MESHMEND_FAILED")


def page_blocks() -> tuple[Block, Block]:
    """Return the script, as changes to one for Gloo, and the command."""
    script, command = (block for block in read(ROOT / "docs/torch.md") if block.by.endswith("test_torchrun.py"))
    assert (script.kind, command.kind) == ("diff", "bash")
    return script, command


def script_of(sign: str) -> str:
    """Return one side of the changes: `-` for Gloo's script, `+` for ours."""
    lines = page_blocks()[0].body.splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign)) + "\n"


def torchrun(script: str, folder: Path, command: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script as the page does, by default with the page's own command."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    (tools / "torchrun").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    env |= {"PATH": f"{tools}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-e", "-c", command or page_blocks()[1].body],
        cwd=folder,
        env=env | settings,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def weights(output: str) -> dict[int, list[float]]:
    found = re.findall(r"rank (\d): loss \S+, weights \[\[(.*?)\]\]", output)
    return {int(rank): [float(weight) for weight in text.split(",")] for rank, text in found}


def trained_alone() -> list[float]:
    """Return what the page's script learns in one process, from all samples: shards are of equal size."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inputs = torch.randn(400, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found: list[float] = model.weight.tolist()[0]
    return found


def test_the_page_changes_two_lines() -> None:
    lines = page_blocks()[0].body.splitlines()
    assert [line for line in lines if line.startswith("-")] == ['-dist.init_process_group("gloo")']
    assert len([line for line in lines if line.startswith("+")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["-", "+"], ids=["Gloo", "meshmend"])
def test_the_pages_script_learns_what_one_process_learns(sign: str, tmp_path: Path) -> None:
    done = torchrun(script_of(sign), tmp_path)
    assert done.returncode == 0, done.stderr
    found = weights(done.stdout)
    assert set(found) == {0, 1, 2, 3}
    for own in found.values():
        assert own == pytest.approx(trained_alone(), abs=1e-5)


DIES_ONCE = """
    if step == 3 and dist.get_rank() == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow  # twice three processes that import torch: 45 s of CPU
def test_a_member_that_dies_is_started_again_with_the_others(tmp_path: Path) -> None:
    script = "import os\n" + script_of("+").replace("range(50):\n", f"range(50):{DIES_ONCE}").replace(
        ', pg_options=mmt.MeshOptions("2x2")', ""
    )
    command = "torchrun --standalone --nproc-per-node 3 --max-restarts 1 train.py"
    settings = {"GLOO_SOCKET_IFNAME": "lo", "MESHMEND_SHAPE": "2x2", "MESHMEND_FAILED": "0,1"}
    script = script.replace('print(f"rank', 'print(f"{dist.group.WORLD.chip} rank')
    done = torchrun(script, tmp_path, command, **settings)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr, "a member died"
    assert "-11" not in done.stderr, "and no other crashed"
    chips = re.findall(r"\((\d), (\d)\) rank (\d)", done.stdout)
    assert sorted(chips, key=lambda found: found[2]) == [("0", "0", "0"), ("1", "0", "1"), ("1", "1", "2")]


def test_a_rank_says_which_chip_a_process_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    plain = mmt.MeshOptions("2x3")
    assert [plain.position(rank, 6)[1] for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mmt.MeshOptions("2x3", chip=(1, 1)).position(0, 6)[1] == (1, 1), "what is said comes first"
    with pytest.raises(MeshError, match=r"each of the 6 live chips of 2x3, got 4: .*MESHMEND_FAILED.*MESHMEND_CHIP"):
        plain.position(0, 4)
    monkeypatch.setenv("MESHMEND_FAILED", "2x1@0,1")
    assert [plain.position(rank, 4) for rank in (1, 2)] == [(Mesh("2x3"), (0, 2)), (Mesh("2x3"), (1, 0))]
    monkeypatch.setenv("MESHMEND_CHIP", "0,2")
    assert plain.position(0, 4)[1] == (0, 2)


def test_a_machine_says_which_chips_are_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "mine.yaml"
    file.write_text('meshmend: 1\nshape: 2x2\nfailed: ["0,1"]\n', encoding="utf-8")
    described = mmt.MeshOptions(machine=file)
    assert [described.position(rank, 3)[1] for rank in range(3)] == [(0, 0), (1, 0), (1, 1)]
