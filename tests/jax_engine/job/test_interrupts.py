"""Ctrl-C and SIGTERM stop a loop after a step, whose state is saved; the next start goes on from exactly that step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
import pytest

from jax_engine.job import job_cases as cases
from rows import others_slow

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED, TERMINATED = "KeyboardInterrupt()", "SystemExit(143)"


def nothing(step: int) -> None:
    del step


def raising(number: signal.Signals, *, at: int) -> Callable[[int], None]:
    """A loop's body during which a signal arrives."""
    return lambda step: signal.raise_signal(number) if step == at else None


def steps_of(shared: Path, body: Callable[[int], None], steps: int = 40, **options: Any) -> list[Any]:
    """Train; return the numbers of the steps whose loop body has run to its end, and what the loop has raised."""
    seen: list[Any] = []
    job = cases.job(shared, **{"disk_every": 100, "memory_every": 0, **options})
    try:
        for step in job.train(cases.loss, optax.adam(0.02), cases.PARAMS, cases.DATASET, steps=steps):
            body(step.number)
            seen.append(step.number)
    except (KeyboardInterrupt, SystemExit) as error:
        seen.append(repr(error))
    return seen


@pytest.fixture(autouse=True)
def handlers() -> Any:
    # A shell that starts the tests in the background has them ignore SIGINT.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before, "whoever had them before has them again"
    signal.signal(signal.SIGINT, ignored)


@pytest.mark.parametrize("number", others_slow(SIGNALS, quick=[signal.SIGTERM]))
def test_a_loop_stops_after_its_step_and_goes_on_from_there(number: signal.Signals, tmp_path: Path) -> None:
    end = INTERRUPTED if number == signal.SIGINT else TERMINATED
    assert steps_of(tmp_path, raising(number, at=3)) == [1, 2, 3, end], "the body of the last step is not cut off"
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.name.isdecimal()] == ["3"]
    assert steps_of(tmp_path, nothing, 5) == [4, 5]
    cases.assert_same_bits(trained(tmp_path, 9), trained(tmp_path.parent / f"{tmp_path.name}-undisturbed", 9))


def trained(shared: Path, steps: int) -> Any:
    return cases.train(cases.job(shared, disk_every=100, memory_every=0), steps)[2]


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    def body(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    assert steps_of(tmp_path, body, memory_every=1) == [1, 2, INTERRUPTED]
    # What a loop that was left keeps in memory is there as before.
    assert steps_of(tmp_path, nothing, 5, memory_every=1) == [4, 5]


def test_an_interrupt_in_the_last_step_ends_the_script_after_it(tmp_path: Path) -> None:
    assert steps_of(tmp_path, raising(signal.SIGINT, at=2), 2) == [1, 2, INTERRUPTED]
    assert steps_of(tmp_path, nothing, 2) == []


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    assert steps_of(tmp_path, raising(signal.SIGTERM, at=2), disk_every=2) == [1, 2, TERMINATED]
    assert steps_of(tmp_path, nothing, 3) == [3]


def test_without_a_disk_the_step_is_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"disk_every": 0, "memory_every": 1000}
    assert steps_of(tmp_path, raising(signal.SIGINT, at=2), **options) == [1, 2, INTERRUPTED]
    assert "Stopped by SIGINT after step 2: its state is kept in memory" in caplog.text
    assert steps_of(tmp_path, nothing, 3, **options) == [3]


def test_a_scripts_own_handlers_stay(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        assert steps_of(tmp_path, raising(signal.SIGTERM, at=2), 3) == [1, 2, 3]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


SCRIPT = """
import sys, time
import numpy as np, optax
import meshmend.jax as mmj

x = np.arange(64, dtype=np.float32) / 64
job = mmj.Job("shared", global_batch=32)
loss = lambda w, x: (w * x - x) ** 2
for step in job.train(loss, optax.sgd(0.5), np.float32(0), x, steps=int(sys.argv[1])):
    print("step", step.number, flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_script_alone_ends_as_the_signal_would_end_it(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MESHMEND_MEMORY": str(tmp_path / "memory"),
        "JAX_PLATFORMS": "cpu",
    }
    hear = (
        "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", hear, sys.executable, "train.py"]
    with subprocess.Popen(
        [*command, "100000"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        seen = [next(script.stdout) for _ in range(8)]
        script.send_signal(number)
        rest, told = script.communicate(timeout=120)
    last = int([*seen, *rest.splitlines()][-1].split()[1])
    assert f"Stopped by {number.name} after step {last}: its state is saved in {tmp_path}/shared/disk." in told
    assert script.returncode == (-signal.SIGINT if number == signal.SIGINT else 143)
    again = subprocess.run(
        [*command, str(last + 2)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert again.stdout.split() == ["step", str(last + 1), "step", str(last + 2)]
