"""What a person sees of a job: at a start, a loss, a return, an end, and when things go wrong, in order."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jax_restart.on_screen import TRAIN, environment, job_on_screen, matches, run, shown, write

ANSI = re.compile(r"\x1b\[[0-9;]*m")


STARTS = (
    r"meshmend │ 2x4 in hosts of 2x2: 2 hosts on this machine, files in \S+/shared",
    r"meshmend │ round 1: hosts 0, 1 start",
)
FIRST_STEP = (
    r"meshmend │ round 1: step 1 is done on 8 chips, x s after the start \(.*\)",
    r"meshmend │ copies in memory survive the failure of any 1 of 2 hosts at once: each keeps the whole state",
)

AGAIN = (
    r"meshmend │ round 2: training again on 4 chips: resumed from step \d+ \(memory\), step \d+ is done x s after "
    r"the failure \(.*\)"
)


def test_a_start_a_loss_a_return_and_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who was lost, what is left, from where it resumes and how long that took: and lines of one host."""
    go = tmp_path / "go"
    body = f"time.sleep(0.1 * (not os.path.exists({str(go)!r})))\n    if step.number == 2: print('two')"
    write(tmp_path, body, steps=500)
    with job_on_screen(tmp_path) as (job, watch, look):
        job.start()
        said: list[str] = []

        def has(text: str) -> Callable[[], bool]:
            def look_for() -> bool:
                said.append(capsys.readouterr().out)
                return text in "".join(said)

            return look_for

        look(lambda: watch.latest["0"].kept >= 4 if has("host 0 │ two")() else False)
        job.kill(1)
        look(has("training again on 4 chips"))
        (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + "\n# changed\n")
        job.start(1)
        look(has("round 3: step"))
        go.touch()
        look(lambda: False)
        assert dict(job.statuses) == {0: 0, 1: 0}
    lines = [ANSI.sub("", line) for line in shown("".join(said) + capsys.readouterr().out)]
    lines.remove("host 0 │ two")  # shown once, about when the first step is done
    matches(
        lines,
        STARTS[1],
        *FIRST_STEP,
        "meshmend │ round 1 ends: host 1 is lost: its connection to the store broke",
        "meshmend │ round 2: host 0 starts",
        AGAIN,
        "meshmend │ round 2 ends: host 1 has joined",
        r"meshmend │ .*/train.py has changed since this job started: it is run as it is now",
        "meshmend │ round 3: hosts 0, 1 start",
        r"meshmend │ round 3: step \d+ is done on 8 chips, from step \d+ \(memory\) x s after the start \(.*\)",
    )


@pytest.mark.slow
def test_a_script_that_raises_on_every_host_ends_with_its_error(tmp_path: Path) -> None:
    """Once, with its traceback, and not as a success: the body of that step is never done again."""
    write(tmp_path, "if step.number == 12: raise ValueError('boom')")
    lines = run(tmp_path, "train.py", code=1)
    # Hosts' own lines come as they are written, the job's as its timelines are read: each in order.
    matches(
        [line for line in lines if line.startswith("host")],
        r"host \d │ Traceback \(most recent call last\):",
        r'host \d │   File "train.py", line 8, in <module>',
        r"host \d │     if step.number == 12: raise ValueError\('boom'\)",
        r"host \d │ .*",  # Python's marks below it
        r"host \d │ ValueError: boom",
    )
    matches(
        [line for line in lines if not line.startswith("host")],
        *STARTS,
        *FIRST_STEP,
        "Error: The script raised an error on every host: ValueError: boom.",
    )


@pytest.mark.slow
def test_a_script_that_raises_on_one_host_starts_again(tmp_path: Path) -> None:
    body = "if step.number == 12 and os.environ['MESHMEND_HOST'] == '1' and not os.path.exists('once'):\n"
    write(tmp_path, f"{body}        open('once', 'w').close()\n        raise OSError(5, 'disk')")
    lines = run(tmp_path, "train.py", code=0)
    assert lines.count("host 1 │ OSError: [Errno 5] disk") == 1
    assert sum("Traceback" in line for line in lines) == 1
    # On a busy machine host 0 may notice first that its peer is gone.
    assert any(re.match(r"meshmend │ round 1 ends: host [01] starts again", line) for line in lines), lines
    assert lines[-2] == "meshmend │ host 1 raised OSError: [Errno 5] disk in round 1, and the job went on"
    assert re.fullmatch(r"meshmend │ done: 30 steps on 8 chips in \d+ s", lines[-1])


WRONG_SHAPE = TRAIN.replace("(batch @ w) ** 2", "mistaken(batch, w)").replace("STEPS", "30").replace("BODY", "pass")
WRONG_SHAPE = WRONG_SHAPE.replace("job =", "def mistaken(batch, w):\n    return batch @ w[:5]\n\njob =")
SHOWN = (  # of a mistake in the loss: the lines of the script, and none between them
    r"Traceback \(most recent call last\):",
    r'  File ".*train.py", line 10, in <module>',
    r"    for step in job.train\(.*",
    r" +\^+",
    r'  File ".*train.py", line 10, in <lambda>',
    r"    for step in job.train\(.*",
    r" +\^+",
    r'  File ".*train.py", line 6, in mistaken',
    r"    return batch @ w\[:5\]",
    r" +~+\^~+",
    r"(\w+: .*\(8,\) and \(5,\).*)",
    r"Frames of meshmend and JAX are left out: JAX_TRACEBACK_FILTERING=off shows them\.",
)


@pytest.mark.slow
def test_a_wrong_shape_in_the_loss_ends_the_job_at_once(tmp_path: Path) -> None:
    """Though only process 0 traces it, and the others wait for what it compiles."""
    (tmp_path / "train.py").write_text(WRONG_SHAPE)
    lines = run(tmp_path, "train.py", code=1)
    raised = lines[-3].removeprefix("host 0 │ ").rstrip(".")
    matches(
        lines,
        *STARTS,
        *(f"host 0 │ {line}" for line in SHOWN),
        rf"Error: {re.escape(raised)}\. A restart would raise it again\.",
    )


def test_a_script_that_runs_alone_shows_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRONG_SHAPE)
    shown_with = {}
    for filtering in ("auto", "off"):
        env = environment() | {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": filtering}
        command = [sys.executable, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        shown_with[filtering] = done.stderr.splitlines()
    matches(shown_with["auto"], *SHOWN)
    assert sum("meshmend/jax" in line for line in shown_with["off"]) > 5
    assert sum("jax/_src" in line for line in shown_with["off"]) > 5


ONE_HOST = {
    "the loop": ("if step.number >= 12 and os.environ['MESHMEND_HOST'] == '1': {}['accuracy']", "KeyError: 'accuracy'"),
    "the dataset": ("pass", "ValueError: sample 200 is damaged"),
}
DATA = """
class Samples:
    def __len__(self):
        return len(x)
    def __getitem__(self, index):
        if index == 200: raise ValueError("sample 200 is damaged")
        return x[index]
"""


# That an error which comes again ends a job is quick, too: tests/launch/test_agent.py has it without processes.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["the loop", "the dataset"])
def test_an_error_of_one_host_that_comes_again_ends_the_job(where: str, tmp_path: Path) -> None:
    """After one restart, not three, and with its traceback once."""
    body, error = ONE_HOST[where]
    write(tmp_path, body)
    text = (tmp_path / "train.py").read_text()
    if where == "the dataset":
        text = text.replace("for step in", f"{DATA}\nfor step in").replace("np.float32), x,", "np.float32), Samples(),")
    (tmp_path / "train.py").write_text(text)
    lines = run(tmp_path, "train.py", code=1)
    host = "0" if where == "the dataset" else "1"  # whose sample that is
    told = [line for line in lines if re.match(r"meshmend │ round \d( ends)?: host", line)]
    assert told == [
        "meshmend │ round 1: hosts 0, 1 start",
        f"meshmend │ round 1 ends: host {host} starts again: its script raised {error}",
        "meshmend │ round 2: hosts 0, 1 start",
    ], "\n".join(lines)
    assert f"meshmend │ host {host}: script raised {error}; 3 restarts left" in lines
    assert lines[-1] == f"Error: {error}. A restart has raised it again, at the same line."
    shown_of_it = [line for line in lines if line.startswith("host ") and ("Traceback" in line or error in line)]
    assert shown_of_it[-2:] == [f"host {host} │ Traceback (most recent call last):", f"host {host} │ {error}"]
    assert len(shown_of_it) == 2


def test_a_store_that_does_not_answer_is_named_within_seconds(tmp_path: Path) -> None:
    """Also where whatever listens there says nothing, until somebody gives up waiting."""
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ["run", "--hosts", "1:2", "--host-index", "0", "--store", where, "--cold", "train.py"]
        command = [sys.executable, "-m", "meshmend", *words]
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stdout is not None
            first = driver.stdout.readline()
            driver.send_signal(signal.SIGTERM)
            driver.communicate(timeout=60)
        assert driver.returncode == 143
    assert re.fullmatch(
        rf"meshmend │ host 0 has not reached the store at {where} for \d s \(no answer\) and tries again: start "
        r"`meshmend store` there, or give its address as --store\n",
        first,
    )


def test_mistakes_before_the_first_step_end_in_one_line(tmp_path: Path) -> None:
    """A name that is not there, and a folder that cannot be written to: the traceback that matters, once."""
    (tmp_path / "train.py").write_text("import json\nprint(no_such_name)\n")
    lines = run(tmp_path, "train.py", code=1)
    why = "NameError: name 'no_such_name' is not defined"
    assert [line for line in lines if "Error" in line] == [
        lines[-2],
        f"Error: The script raised an error on every host: {why}.",
    ]
    assert lines[-2].endswith(f" │ {why}")
    assert sum("Traceback" in line for line in lines) == 1
    (tmp_path / "train.py").write_text(
        'import meshmend.jax as mmj\nmmj.Job(shared="/proc/nowhere/job", global_batch=8)'
    )
    lines = run(tmp_path, "--shared", "other", "train.py", code=1)
    assert sum("Traceback" in line for line in lines) == 1
    assert 'File "train.py", line 2' in " ".join(lines)
    assert not any("meshmend/jax" in line for line in lines), "the frames of this package do not help"
    assert lines[-1].startswith(
        "Error: The script raised an error on every host: RestartError: The shared folder /proc/nowhere/job cannot be "
        "made, because /proc/nowhere is missing on this host."
    )
