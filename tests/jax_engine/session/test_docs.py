"""The script in docs/recovery.md runs as it stands, and a second start goes on where the first one stopped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshmend.launch.processes import free_port

ROOT = Path(__file__).parents[3]
ROUND = {"number": 1, "hosts": [0], "process": 0}


@pytest.mark.slow
def test_the_script_trains_and_goes_on(tmp_path: Path) -> None:
    page = (ROOT / "docs/recovery.md").read_text(encoding="utf-8")
    (script,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "CompileAhead" in one)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")

    def start(steps: int) -> str:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MESHMEND_ROUND": json.dumps({**ROUND, "coordinator": f"127.0.0.1:{free_port()}"}),
            "MESHMEND_SHAPE": "8x8",
            "MESHMEND_HOST_SHAPE": "8x8",
            "MESHMEND_HOST": "0",
            "MESHMEND_MEMORY": str(tmp_path / "memory"),
        }
        command = [sys.executable, "train.py", str(steps)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1]  # Gloo, too, writes to stdout

    assert start(2) == "from start at step 0 to step 2 on 8x8"
    assert start(4) == "from memory at step 2 to step 4 on 8x8"
