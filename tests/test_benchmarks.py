"""Every script of benchmarks/ runs at its smallest size, so that the figures of the pages can be measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_scripts import FOLDER, MODULES, SCRIPTS

CASES = [pytest.param(name, marks=[pytest.mark.slow] * script.is_slow) for name, script in SCRIPTS.items()]


def test_every_script_has_a_smallest_size() -> None:
    found = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.py")}
    assert found == SCRIPTS.keys() | MODULES
    # A module that is run by itself would be a script, and a script that is not does nothing.
    runs = {name for name in found if '__name__ == "__main__"' in (FOLDER / f"{name}.py").read_text(encoding="utf-8")}
    assert runs == SCRIPTS.keys()


@pytest.mark.parametrize("name", CASES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    if why := script.skipped_because():
        pytest.skip(why)
    script.run(name, tmp_path)
