"""A newcomer's first minutes, timed: a fresh environment, the install, and the README's job until it has resumed.

    python lab/benchmarks/first_minutes.py
    python lab/benchmarks/first_minutes.py --here     only the job, in the environment of this Python

The clock runs from `pip install` on. What pip downloads is on the network's account, and is said as such: a second
install from pip's cache shows the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def readme() -> tuple[str, list[str], str]:
    """Return the README's script, the words of its command, and what it installs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(import argparse.*?)```", text, re.S)
    (command,) = re.findall(r"^meshmend (run .*? train\.py)$", text, re.M)
    extra = re.findall(r"pip install '\.(\[\w+\])'", text)[0]  # the first thing that it says
    return script, command.split(), extra


def megabytes(folder: Path) -> float:
    """Return the size of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def install(folder: Path, extra: str) -> dict[str, float]:
    """Install this checkout into a fresh environment in a folder; return what it took."""
    began, before = time.monotonic(), megabytes(folder)
    words = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*words, "--constraint", str(ROOT / "constraints.txt"), f"{ROOT}{extra}"], check=True)
    return {"install_s": time.monotonic() - began, "installed_mb": megabytes(folder) - before}


def first_minutes(folder: Path, *, here: bool) -> dict[str, float]:
    """Run the README's job in a folder, in a fresh environment or in this one; return what took how long."""
    script, words, extra = readme()
    python, began = Path(sys.executable), time.monotonic()
    found = {"install_s": 0.0, "installed_mb": 0.0}
    if not here:
        venv.create(folder / "venv", with_pip=True)
        python, began = folder / "venv" / "bin" / "python", time.monotonic()
        found = install(folder / "venv", extra)
    (folder / "train.py").write_text(script, encoding="utf-8")
    hidden = {"XLA_FLAGS"} if here else {"PYTHONPATH", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    command, started = [str(python), "-m", "meshmend", *words], time.monotonic()
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout or ():
            sys.stdout.write(line)
            now = time.monotonic()
            if "step 1 is done" in line:
                found["first_step_s"] = now - started
            if again := re.search(r"training again .* is done ([\d.]+) s after the failure", line):
                found |= {"recovery_s": float(again[1]), "resumed_s": now - began}
    if job.returncode or "resumed_s" not in found:
        raise SystemExit("The job has not resumed: see above.")
    return found | {"job_s": time.monotonic() - started}


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object after the job's lines")
    parser.add_argument("--here", action="store_true", help="install nothing: use the environment of this Python")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshmend-") as folder:
        found = first_minutes(Path(folder), here=asked.here)
    if asked.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(
        f"\npip install            {found['install_s']:.0f} s, {found['installed_mb']:,.0f} MB\n"
        f"first step of the job  {found['first_step_s']:.0f} s after its start\n"
        f"recovery               {found['recovery_s']:.1f} s\n"
        f"job, start to end      {found['job_s']:.0f} s\n"
        f"from pip install to the resumed job: {found['resumed_s']:.0f} s\n"
    )


if __name__ == "__main__":
    main()
