"""A user's first hour: what is typed, what is shown, and the exit code; and the pages in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pages import read

ROOT = Path(__file__).parents[2]
TRAIN = """
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(global_batch=32)
x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
dataset = {"x": x, "y": np.tanh(x[:, 0])}


def loss(params, batch):
    hidden = batch["x"] @ params["w"]
    LINE
    return (jnp.tanh(hidden) @ params["out"] - batch["y"]) ** 2


params = {"w": np.eye(8, WIDTH, dtype=np.float32), "out": np.ones(WIDTH, np.float32) / 8}
for step in job.train(loss, optax.sgd(0.1), params, dataset, steps=STEPS):
    pass
print("trained", step.number if "step" in vars() else "nothing")
"""
BATCH_NORM = "hidden = (hidden - hidden.mean(axis=0)) / hidden.std(axis=0)"
LAYER_NORM = "hidden = (hidden - hidden.mean(axis=1, keepdims=True)) / (1 + hidden.std(axis=1, keepdims=True))"
TWO_HOSTS = ["-m", "meshmend", "run", "--local", "1x4", "--host", "1x2", "train.py"]
HIDDEN = ("XLA_FLAGS", "MESHMEND_SHAPE", "MESHMEND_HOST", "MESHMEND_SHARED", "JAX_NUM_CPU_DEVICES")


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    memory = {"MESHMEND_MEMORY": str(folder / "memory")}
    return kept | memory | {"JAX_PLATFORMS": "cpu", "NO_COLOR": "1", "COLUMNS": "300"} | more


def write(folder: Path, name: str = "train.py", line: str = "", steps: int = 6, width: int = 8) -> None:
    text = TRAIN.replace("LINE", line).replace("STEPS", str(steps))
    (folder / name).write_text(text.replace("WIDTH", str(width)), encoding="utf-8")


def typed(folder: Path, *words: str, code: int) -> str:
    """Run Python with these words; return all that is shown."""
    env = environment(folder, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, check=False, capture_output=True, text=True)
    shown = done.stdout + done.stderr
    assert (done.returncode == 0) == (code == 0), shown[-4000:]
    assert code in (0, done.returncode), shown[-4000:]
    return shown


def once(pattern: str, shown: str) -> re.Match[str]:
    """Check that something is shown once, and return it."""
    found = list(re.finditer(pattern, shown))
    assert len(found) == 1, f"{len(found)} times {pattern}\nin\n{shown}"
    return found[0]


@pytest.mark.slow
def test_batch_normalisation_ends_a_job_before_its_first_step(tmp_path: Path) -> None:
    write(tmp_path, line=BATCH_NORM)
    shown = typed(tmp_path, *TWO_HOSTS, code=1)
    said = (
        r"ParameterError: An example's loss depends on the other examples of its batch: it is \S+, and \S+ when other "
        r"examples are beside it in the batch\. .* nnx\.LayerNorm and nnx\.GroupNorm .*\(docs/loss\.md, "
        r"\"Batch statistics\"\).* give train\(…, independent=False\)\.\n"
    )
    assert re.search(said, shown), shown
    assert "step 1 is done" not in shown
    assert "trained" not in shown
    assert "round 2" not in shown, "a restart would repeat it"
    write(tmp_path, line=LAYER_NORM)
    assert "trained 6" in typed(tmp_path, *TWO_HOSTS, code=0)


def test_another_scripts_folder(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, "wider.py", width=9)
    assert "trained 6" in typed(tmp_path, "train.py", code=0)
    again = typed(tmp_path, "train.py", code=0)
    once(r"All 6 steps of the job in \S+/shared are done already\. For more, ask for more steps; to begin anew", again)
    assert "trained nothing" in again
    said = (
        r"RestartError: A state of another model or optimizer is in this job's place: .*params\['out'\]: expected "
        r"float32\[9\], got float32\[8\]\. Give this job its own name"
    )
    assert re.search(said, typed(tmp_path, "wider.py", code=1))


def pages_in_order(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Return what README and five pages have a reader type, in that order: the block, a file to save, the words.

    A `python` block that makes a `Job` is saved as train.py and run, and so are commands that run a job here.
    """
    found: list[tuple[str, str, list[str]]] = []
    for page in ("README.md", "docs/start.md", "docs/jobs.md", "docs/loss.md", "docs/checkpoints.md", "docs/tiles.md"):
        for block in read(ROOT / page):
            if block.kind == "python" and "mmj.Job(" in block.body:
                found.append((block.name, block.body, [] if page == "README.md" else ["python", "train.py"]))
            elif block.kind == "bash" and re.match(r"meshmend run --local", block.body):
                found.append((block.name, "", block.body.split()))
    (folder / "examples").symlink_to(ROOT / "examples")
    return found


def check_order(folder: Path, python: str, env: dict[str, str], *, quick: bool) -> list[str]:
    """Type it in one folder; return the pages of what was run. `quick`: few pages and steps, two hosts, none killed."""
    ran = []
    for name, script, words in pages_in_order(folder):
        given, page = list(words), name.partition(":")[0]
        if script:
            (folder / "train.py").write_text(_shorter(script) if quick else script, encoding="utf-8")
        if not given or (quick and page not in FIRST):
            continue
        if quick and "--kill" in given:
            at = given.index("--kill")
            del given[at : at + 2]
            given[given.index("--local") + 1], given[given.index("--host") + 1] = "2x4", "2x2"
            copied = folder / Path(given[-1]).name
            if copied.name != "train.py":
                copied.write_text(_shorter((folder / given[-1]).read_text(encoding="utf-8")), encoding="utf-8")
                given[-1] = copied.name
        start = [python] if given[0] == "python" else [python, "-m", "meshmend"]
        done = subprocess.run([*start, *given[1:]], cwd=folder, env=env, check=False, capture_output=True, text=True)
        shown = done.stdout + done.stderr
        assert done.returncode == 0, f"{name}\n{shown[-4000:]}"
        for unwanted in ("done already", "RestartError", "The state in", "keeps its state in"):
            assert unwanted not in shown, f"{name}\n{shown[-4000:]}"
        if given[0] == "meshmend":
            assert re.search(r"done: \d+ steps on \d+", shown), f"{name}\n{shown[-4000:]}"
        ran.append(page)
    return ran


def _shorter(script: str) -> str:
    for old, new in (
        (r"steps=(100|60)\b", "steps=4"),
        ("% 20 == 0", "% 2 == 0"),
        ("disk/60/", "disk/4/"),
        ("== 60", "== 4"),
    ):
        script = re.sub(old, new, script)
    return script


EXPECTED = ["README.md", "start.md", "jobs.md", "jobs.md", "loss.md", "loss.md", "checkpoints.md", "tiles.md"]
"""The README's command; that of the first ten minutes; the script alone and on six hosts; statistics, NNX and the
checkpoint that Orbax reads; tiles."""
FIRST = ("README.md", "start.md", "loss.md")
"""Pages whose commands `.ci/run` types; `.ci/nightly` types all."""


def test_the_pages_in_order_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("flax.nnx", reason="needs flax: pip install flax")
    env = environment(tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert check_order(tmp_path, sys.executable, env, quick=True) == [page for page in EXPECTED if page in FIRST]


@pytest.mark.slow
def test_the_pages_in_order_in_a_fresh_environment(tmp_path: Path) -> None:
    """As a reader has it: the wheel with its extra, flax where the page says so, and every command as it stands."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")
    (extra,) = set(re.findall(r"pip install '\.(\[launch\])'", (ROOT / "README.md").read_text(encoding="utf-8")))
    page = (ROOT / "docs/loss.md").read_text(encoding="utf-8")
    assert "`pip install flax` first: `.[launch]` does not bring it." in page
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*install, f"{ROOT}{extra}"], check=True)
    for package, is_there in (("meshmend", True), ("flax", False)):
        asked = subprocess.run([python, "-c", f"import {package}"], cwd=tmp_path, check=False, capture_output=True)
        assert (asked.returncode == 0) == is_there
    subprocess.run([*install, "flax"], check=True)
    (tmp_path / "work").mkdir()
    env = {name: value for name, value in environment(tmp_path).items() if name != "PYTHONPATH"}
    assert check_order(tmp_path / "work", python, env, quick=False) == EXPECTED
