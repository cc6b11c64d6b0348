"""`meshmend run` and `store`: everything that a user can get wrong is one line that says what to do."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshmend.cli import app
from meshmend.cli.run import Kill, parse_kill
from meshmend.cli.screen import SAME_S, Screen
from meshmend.launch.environment import find_domain
from meshmend.launch.timeline import Timeline, timeline_of
from meshmend.launch.watching import Watch

# command, what is wrong, the words, a part of the message
CASES: list[tuple[str, str, list[str], str]] = [
    ("run", "no script", ["--local", "4x4", "nowhere.py"], "There is no script 'nowhere.py'"),
    ("run", "no module", ["--local", "4x4", "-m"], "-m needs a module"),
    ("run", "bad shape", ["--local", "4y4", "file"], "'4y4' is not a shape"),
    (
        "run",
        "bad host",
        ["--local", "4x6", "--host", "4x4", "file"],
        "Hosts of 4x4 chips do not tile a 4x6 mesh. Give another shape for a host, as in 4x3, 2x6, 4x2, 4x6, 2x3 or "
        "1x6.",
    ),
    (
        "run",
        "another dimension",
        ["--local", "2x3", "--host", "2x2x1", "file"],
        "Give another shape for a host, as in 1x3, 2x3, 2x1 or 1x1.",
    ),
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
    (
        "run",
        "no place",
        ["file"],
        "Which host is this? None of MESHMEND_HOST, SLURM_NODEID, JOB_COMPLETION_INDEX, JOBSET_JOB_INDEX, "
        "TPU_WORKER_ID is in the environment. On a cluster, give its number, or the coordinate of its first chip, as "
        "in --host-index 5 or --host-index 4,2. For a job on this machine alone, give --local before the script, as in "
        "--local 4x4 --host 2x2, or start it with python.",
    ),
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
    (
        "run",
        "too few domains",
        ["--local", "4x4", "--host", "2x2", "--domain", "a,b", "file"],
        "--domain is 'a,b', expected a name for each of the 4 hosts, as in a,a,b,b.",
    ),
    ("run", "metrics of nothing", ["--local", "4x4", "--metrics", "a:1", "file"], "give --shared DIR as well"),
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hots 2x2 file", "No such option: --hots (Possible options: --host, --hosts)."),
        ("--local 4x4 --hosst=2x2 file", "No such option: --hosst (Possible options: --host, --host-index, --hosts)."),
        ("--local 4x4 -n 4 file", "No such option: -n."),
    ],
)
def test_an_unknown_option_is_named_with_those_that_are_near(words: str, message: str) -> None:
    """Before the script; those after it are the script's own."""
    done = CliRunner().invoke(app, ["run", *words.split()])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"Error: {message} See: {app.info.name} run --help\n"
    assert "4y4" in refused("run", "--local", "4y4", "file", *words.split())


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
    screen.flush()
    assert capsys.readouterr().out.splitlines() == [
        "meshmend │ round 2: hosts 0, 1, 2 start",
        "host  0 │ step 1\\x1b[2J of 0",
        "host  1 │ step 1\\x1b[2J of 1",
        "host  2 │ step 1\\x1b[2J of 2",
        "host 11 │ [/bold]",
    ]


def test_what_gloos_threads_tear_apart_is_left_out_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(2)
    for text in (
        "[Gloo] Rank [Gloo] Rank 5 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
        "6 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
        "7",
        "",
        "the store is connected to 3 peers",
        "7",
        "",
    ):
        screen.line(0, text)
    screen.flush()
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == ["host 0 │ the store is connected to 3 peers", "host 0 │ 7", "host 0 │"]


def starts(screen: Screen, *hosts: int, number: int = 1) -> None:
    for host in hosts:
        screen.event({"event": "round", "host": host, "number": number, "hosts": list(hosts), "cut_off": []})


def test_a_line_that_several_hosts_write_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As often as the host that writes it most often, under the first host of the round, whoever comes first."""
    screen = Screen(4)
    starts(screen, 1, 2, 3)
    for host in (3, 1, 2):
        for _ in range(2):
            screen.line(host, ".")
        screen.line(host, f"process {host}")
    screen.line(2, ".")
    screen.flush()
    assert capsys.readouterr().out.splitlines()[1:] == [
        *("host 1 │ .", "host 1 │ .", "host 1 │ process 1"),
        *("host 3 │ process 3", "host 2 │ process 2", "host 2 │ ."),
    ]
    starts(screen, 2, 3, number=2)
    screen.line(2, ".")
    assert capsys.readouterr().out.splitlines()[1:] == ["host 2 │ ."]


def test_a_line_of_another_host_waits_only_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(2)
    starts(screen, 0, 1)
    screen.line(1, "early")
    screen.flush(time.monotonic())
    assert "early" not in capsys.readouterr().out
    screen.flush(time.monotonic() + SAME_S)
    assert "host 1 │ early" in capsys.readouterr().out
    screen.line(0, "early")
    screen.flush()
    assert capsys.readouterr().out == ""


def test_an_error_is_shown_once_and_a_peer_that_is_gone_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(3)
    starts(screen, 0, 1, 2)
    for host in (1, 0):
        facts = {"kind": "lasting", "error": "ValueError: boom", "trace": "Traceback\nValueError: boom\n"}
        screen.event({"event": "raised", "host": host, **facts})
    screen.event({"event": "raised", "host": 2, "kind": "transient", "error": "lost a peer: Gloo", "trace": ""})
    assert capsys.readouterr().out.splitlines()[1:] == ["host 1 │ Traceback", "host 1 │ ValueError: boom"]


def test_a_store_that_is_away_is_named_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(2)
    away = {"event": "store", "type": "unreachable", "host": 0, "why": "timed out"}
    screen.event(away)  # it may be there within a moment
    for for_s, reached in ((3.2, False), (18.4, False), (3.0, True)):
        screen.event(away | {"where": "10.0.0.7:29400", "for_s": for_s, "reached": reached})
    begin = "meshmend │ host 0 has not reached the store at 10.0.0.7:29400 for"
    assert capsys.readouterr().out.splitlines() == [
        f"{begin} 3 s (timed out) and tries again: start `meshmend store` there, or give its address as --store",
        f"{begin} 18 s (timed out) and tries again: start `meshmend store` there, or give its address as --store",
        f"{begin} 3 s (timed out) and tries again: training goes on; start `meshmend store` there again",
    ]


@pytest.mark.parametrize(
    ("every", "last", "resumed", "source", "said"),
    [
        (77, 105, 28, "memory", "steps 29 to 105 are repeated, because copies in memory are kept every 77 steps"),
        (8, 105, 28, "memory", "steps 29 to 105 are repeated, because the next copy was not complete"),
        (1, 29, 28, "memory", "step 29 is repeated, because copies in memory are kept every step"),
        (8, 720, 700, "disk", "steps 701 to 720 are repeated, because the last checkpoint is of step 700"),
        (8, 3, 0, "start", "steps 1 to 3 are repeated, because there was no copy and no checkpoint"),
        (8, 28, 28, "memory", ""),
    ],
)
def test_steps_that_are_done_again_are_told_with_the_reason(
    every: int, last: int, resumed: int, source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = Timeline(timeline_of(tmp_path, 0), round=1)
    timeline.note("process", seconds=0.0)
    timeline.note("step", step=1)
    timeline.note("copies", step=1, every=every)
    timeline.note("step", step=last)
    timeline.facts["round"] = 2
    timeline.note("process", seconds=0.0)
    timeline.note("restore", seconds=0.0, step=resumed, source=source)
    timeline.note("step", step=resumed + 1)
    timeline.flush()
    watch, screen = Watch(tmp_path), Screen(1)
    watch.read()
    for _ in range(2):
        screen.look(watch, 0.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"meshmend │ round 2: step {resumed + 1} is done")
    assert lines[1:] == ([f"meshmend │ round 2: {said}"] if said else [])


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        ("rack 7", {"MESHMEND_DOMAIN": "rack 8", "SLURM_TOPOLOGY_ADDR": "row1.rack9.node3"}, "rack 7"),
        (None, {"MESHMEND_DOMAIN": "rack 8", "SLURM_TOPOLOGY_ADDR": "row1.rack9.node3"}, "rack 8"),
        (None, {"MESHMEND_DOMAIN": "", "SLURM_TOPOLOGY_ADDR": "row1.rack9.node3"}, "row1.rack9"),
        (None, {"SLURM_TOPOLOGY_ADDR": "node3"}, ""),  # Slurm knows no topology
        (None, {}, ""),
    ],
)
def test_a_failure_domain_is_given_or_the_launchers(given: str | None, environment: dict[str, str], found: str) -> None:
    assert find_domain(given, environment) == found


def test_a_start_says_once_what_copies_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline, watch, screen = Timeline(timeline_of(tmp_path, 0), round=1), Watch(tmp_path), Screen(1)
    for number in (1, 2):
        timeline.facts["round"] = number
        timeline.note("process", seconds=0.0)
        timeline.note(
            "restore", seconds=0.0, step=0, source="start", survives="the failure of any 5 of 6 hosts at once"
        )
        timeline.note("step", step=1)
        timeline.flush()
        watch.read()
        screen.look(watch, 0.0)
    told = [line for line in capsys.readouterr().out.splitlines() if "survive" in line]
    assert told == ["meshmend │ copies in memory survive the failure of any 5 of 6 hosts at once"]


def test_the_log_of_xla_is_shown_where_nothing_else_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(2)
    starts(screen, 0, 1)
    for host in (0, 1):
        screen.line(host, "F1118 01:02:03.000004   77 client.h:80] Terminating process because of errors")
        screen.line(host, "    @     0x7f01  xla::Client()")
    screen.event({"event": "failed", "host": 1, "why": "worker ended with SIGABRT", "left": 2})
    screen.flush()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:9] for line in lines] == ["host 1 │ ", "host 1 │ ", "meshmend "]
    assert lines[-1] == "meshmend │ host 1: worker ended with SIGABRT; 2 restarts left"


def test_only_a_start_that_measures_the_links_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen, job = Screen(1), Watch(tmp_path)
    notes = Timeline(timeline_of(tmp_path, 0), job="job", host=0)
    began = time.time() - 60

    def shown(number: int, *events: str) -> list[str]:
        for event in events:
            notes.note(event, at=began + 10 * number, round=number)  # long ago: what comes next takes long
        notes.flush()
        job.read()
        screen.look(job, began)
        return capsys.readouterr().out.splitlines()

    assert shown(1, "process", "join", "fabric", "measuring") == ["meshmend │ round 1: measuring the links …"]
    assert shown(1, "measure") == ["meshmend │ round 1: planning and compiling …"]
    assert shown(1, "plan", "compile") == ["meshmend │ round 1: restoring the state …"]
    assert shown(2, "process", "join", "fabric") == ["meshmend │ round 2: planning and compiling …"]
    assert shown(2, "plan") == []
