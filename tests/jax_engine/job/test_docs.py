"""The script of docs/jobs.md runs as it stands, and a plain script becomes one that survives by a few lines."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/jobs.md").read_text(encoding="utf-8")
LOSS = (ROOT / "docs/loss.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = (ROOT / "docs/index.md").read_text(encoding="utf-8")
PLAIN, SURVIVING = (
    (ROOT / "examples/jax" / name).read_text(encoding="utf-8")
    for name in ("data_parallel.py", "data_parallel_survives.py")
)


def run(script: str, folder: Path, devices: int | None = 8) -> list[list[float]]:
    """Run a script, of a hundred steps the first 20, on virtual devices; return the numbers of each line it prints.

    None for a script that says itself how many devices there are.
    """
    if devices is not None:
        script, count = re.subn(
            r"steps=100|range\(1, 101\)", lambda found: {"s": "steps=20"}.get(found[0][0], "range(1, 21)"), script
        )
        assert count == 1
    folder.mkdir()
    (folder / "train.py").write_text(script, encoding="utf-8")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "" if devices is None else f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MESHMEND_MEMORY": str(folder / "memory"),
    }
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in done.stdout.splitlines()]


def test_the_script_of_the_page_is_short_and_is_the_example(tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    for other in (README, HOME):
        # In a folder of its own: the README's job is done when a reader comes to the page.
        assert re.findall(r"```python\n(.*?)```", other, re.DOTALL)[0] == script.replace('"letters"', '"shared"')
    code = [line for line in script.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= 15
    example = (ROOT / "examples/jax/survive.py").read_text(encoding="utf-8")
    lines = [line.partition("  #")[0].replace('shared="letters", ', "") for line in code[:-1]]
    assert [line for line in lines if line not in example] == []
    ((number, loss, chips),) = run(script, tmp_path / "page")
    assert (number, chips) == (20, 8)
    assert loss < 3.2  # from the logarithm of 256, about 5.5


@pytest.mark.slow
def test_the_recipe_for_nnx_with_dropout_trains(tmp_path: Path) -> None:
    pytest.importorskip("flax.nnx", reason="needs flax: pip install flax")
    (script,) = re.findall(r"```python\n(import flax\.nnx.*?)```", LOSS, re.DOTALL)
    ((number, loss, chips),) = run(script, tmp_path / "nnx")
    assert (number, chips) == (20, 8)
    assert loss < 4  # from the variance of a sum of eight, 8


@pytest.mark.slow
def test_the_recipe_for_running_statistics_is_the_same_on_any_chips(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n((?:(?!```).)*?shared=\"statistics\".*?)```", LOSS, re.DOTALL)
    found = {}
    for chips in (1, 8):
        (text, n_changed) = re.subn(r'"jax_num_cpu_devices", 8', f'"jax_num_cpu_devices", {chips}', script)
        assert n_changed == 1
        found[chips] = run(text, tmp_path / str(chips), devices=None)
    for (number, alone, one), (same, together, eight) in zip(found[1], found[8], strict=True):
        assert (number, one, eight) == (same, 1, 8)
        assert abs(alone / together - 1) < 1e-4  # sums in another order round differently
    assert found[8][-1][1] < found[8][0][1] / 2


@pytest.mark.slow
def test_a_plain_script_survives_after_a_few_changed_lines(tmp_path: Path) -> None:
    # Without the docstrings that say which of the two it is.
    difference = list(difflib.unified_diff(PLAIN.splitlines()[1:], SURVIVING.splitlines()[1:], lineterm="", n=1))[2:]
    shown = [line for line in difference if not line.startswith("@@")]
    assert "```diff\n" + "\n".join(shown) + "\n```" in PAGE
    new = [line for line in shown if line.startswith("+") and line != "+"]
    gone = [line for line in shown if line.startswith("-") and line != "-"]
    assert len(new) <= 10
    assert (len(new), len(gone)) == (5, 15)
    assert "five lines are new, and fifteen" in " ".join(PAGE.split())
    ((_, plain),), ((_, surviving),) = run(PLAIN, tmp_path / "plain"), run(SURVIVING, tmp_path / "surviving")
    # Other samples in other steps, but the same model after as many.
    assert abs(surviving / plain - 1) < 0.15
