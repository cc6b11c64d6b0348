"""`meshmend run` and `store`: everything that a user can get wrong is one line that says what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.cli.run import Kill, Screen, parse_kill

# command, what is wrong, the words, a part of the message
CASES: list[tuple[str, str, list[str], str]] = [
    ("run", "no script", ["--local", "4x4", "nowhere.py"], "There is no script 'nowhere.py'"),
    ("run", "no module", ["--local", "4x4", "-m"], "-m needs a module"),
    ("run", "bad shape", ["--local", "4y4", "file"], "'4y4' is not a shape"),
    ("run", "bad host", ["--local", "4x4", "--host", "3x3", "file"], "do not tile"),
    ("run", "no such host", ["--local", "4x4", "--host", "2x2", "--kill", "4@20", "file"], "there is no host 4"),
    ("run", "no step", ["--local", "4x4", "--host", "2x2", "--kill", "4", "file"], "expected a host and a step"),
    (
        "run",
        "cut apart",
        ["--local", "2x6", "--host", "2x2", "--kill", "1@20", "file"],
        "--kill 1@20 leaves hosts 0, 2, and cut apart: no more than 1 of them are joined. A round needs 2",
    ),
    (
        "run",
        "too few",
        ["--local", "2x4", "--host", "2x2", "--hosts", "2:2", "--kill", "1@20", "file"],
        "--kill 1@20 leaves host 0. A round needs 2, so the job would wait for ever",
    ),
    ("run", "kill elsewhere", ["--kill", "1@2", "--hosts", "2", "file"], "--kill is for jobs on this machine"),
    ("run", "two stores", ["--local", "4x4", "--store", "a:1", "file"], "--local brings its own store"),
    ("run", "other hosts", ["--local", "4x4", "--host", "2x2", "--hosts", "2:3", "file"], "makes 4 hosts"),
    ("run", "half a machine", ["--shape", "4x4", "file"], "--shape and --host belong together"),
    ("run", "half a description", ["--host", "2x2", "file"], "--shape and --host belong together"),
    ("run", "two wraps", ["--local", "4x4", "--machine", "m", "--wrap", "0", "file"], "already says which axes wrap"),
    ("run", "bad wrap", ["--local", "4x4", "--wrap", "2", "file"], "'2', expected none, all, or axes from 0 to 1"),
    ("run", "no description", ["--local", "4x4", "--machine", "nowhere", "file"], "nowhere: No such file"),
    ("run", "no place", ["--hosts", "2", "file"], "Which host is this?"),
    ("run", "bad place", ["--hosts", "2", "--host-index", "1,2", "file"], "a host is given by its number"),
    ("run", "no store", ["--hosts", "2", "--host-index", "0", "file"], "Where is the store?"),
    (
        "run",
        "bad store",
        ["--hosts", "2", "--host-index", "0", "--store", "a:b", "file"],
        "expected an address and a port",
    ),
    ("run", "no hosts", ["--host-index", "0", "--store", "a:1", "file"], "How many hosts?"),
    ("run", "bad hosts", ["--hosts", "8:5", "--host-index", "0", "--store", "a", "file"], "the least and the most"),
    ("run", "metrics of nothing", ["--local", "4x4", "--metrics", "a:1", "file"], "give --shared DIR, too"),
    ("run", "bad metrics", ["--local", "4x4", "--shared", "s", "--metrics", "a:b", "file"], "--metrics is 'a:b'"),
    ("store", "bad address", ["--listen", "here:there"], "expected an address and a port"),
    ("store", "empty secret", ["--secret-file", "file"], "file is empty"),
    ("store", "no file", ["--secret-file", "nowhere"], "nowhere: No such file"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for name in ("MESHMEND_HOST", "MESHMEND_STORE", "MESHMEND_SECRET", "SLURM_NODEID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    assert re.fullmatch(r"Error: [^\n]+\n", done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [pytest.param(command, words, message, id=f"{command}: {what}") for command, what, words, message in CASES],
)
def test_a_failure_is_one_line(command: str, words: list[str], message: str) -> None:
    assert message in refused(command, *words)


def test_without_jax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.extras.find_spec", lambda name: None if name == "jax" else object())
    monkeypatch.setitem(sys.modules, "jax", None)
    error = refused("run", "--local", "4x4", "file")
    assert "`meshmend run` needs jax, which is not installed here" in error
    assert "pip install 'meshmend[launch]'" in error


def test_a_secret_that_others_can_read_is_refused() -> None:
    Path("secret").write_text("swordfish")
    Path("secret").chmod(0o644)
    assert "secret can be read by others on this machine" in refused("store", "--secret-file", "secret")


def test_a_kill_is_a_host_and_a_step() -> None:
    assert parse_kill("3@0", 4) == Kill(3, 0)


def test_what_all_hosts_report_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(12)
    for host in range(3):
        screen.event({"event": "round", "host": host, "number": 2, "hosts": [0, 1, 2], "cut_off": []})
        screen.line(host, f"step 1\x1b[2J of {host}")
        screen.line(
            host, "[Gloo] Rank 3 is connected to 15 peer ranks. Expected number of connected peer ranks is : 15"
        )
    screen.line(11, "[/bold]")
    assert capsys.readouterr().out.splitlines() == [
        "meshmend │ round 2: hosts 0, 1, 2 start",
        "host  0 │ step 1\\x1b[2J of 0",
        "host  1 │ step 1\\x1b[2J of 1",
        "host  2 │ step 1\\x1b[2J of 2",
        "host 11 │ [/bold]",
    ]
