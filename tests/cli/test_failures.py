"""Every command, every way to fail: one line on standard error, an exit code that is documented, nothing else.

With `--json`, standard output is one JSON object or nothing.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from cli.failures import CUT, check, run
from commandline import commands
from forged_plans import forge
from meshmend import Collective, Mesh, Op, load, plan, save
from meshmend.cli import common, terminal
from meshmend.cli.common import EXIT_CODES
from meshmend.cli.terminal import plain
from meshmend.errors import MeshmendError
from meshmend.schedule.split import reduce_scatter_of
from pages import ROOT

HOSTILE = "x\x1b]0;owned\x07\x1b[2J[/bold][red]\nproof  ✓ proven\u202e$\\frac$"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each case in a folder with a good plan, damaged ones, a wrong one, a folder and a file."""
    monkeypatch.chdir(tmp_path)
    save(PLAN, "plan.npz")
    Path("damaged.npz").write_bytes(Path("plan.npz").read_bytes()[:-100])
    save(WRONG, "wrong.npz")
    Path("folder.npz").mkdir()
    Path("file").touch()
    Path("damaged list").mkdir()
    Path("damaged list/quarantine.json").write_text("{")
    return tmp_path


PLAN = plan(Mesh("2x2"), "hamiltonian")
WRONG = PLAN.replace(op=[Op.COPY, *PLAN.op[1:]])

PLANNED = ("--planner", "hamiltonian")
PAID = ("--payload", "1MB")
ACROSS = ("--route", "1,0-1,2")
# command, what is wrong, the words, a part of the message
CASES: list[tuple[str, str, list[str], str]] = [
    ("plan", "cut mesh", ["4x4", *CUT], "cannot plan"),
    ("plan", "bad shape", ["4y4"], "'4y4' is not a shape"),
    ("plan", "bad name", ["4x4", "--planner", "[/bold]"], "There is no planner '[/bold]'"),
    ("plan", "half a block", ["8x8", "--fail", "1,1", *PLANNED], "has failed while"),
    ("plan", "no such parameter", ["8x8", "--planner", "hamiltonian:segments=2"], "has no parameter 'segments'"),
    ("plan", "nearest parameter", ["8x8", "--planner", "weave:chunk=2"], "Did you mean chunks?"),
    ("plan", "nearest planner", ["8x8", "--planner", "row-pair:segments=2"], "Did you mean row-pairs? Planners:"),
    ("plan", "no count", ["8x8", "--planner", "weave:chunks=many"], "chunks is 'many', expected a whole number"),
    ("plan", "no part of a name", ["8x8", "--planner", "auto:payload_bytes=9"], "no part of a planner's name"),
    ("plan", "bad wrap", ["8x8", *PLANNED, "--wrap", "2"], "expected none, all, or axes from 0 to 1"),
    ("plan", "no such unit", ["4x4", "--payload", "1XB"], "is no unit of bytes"),
    ("plan", "no unit", ["4x4", "--payload", "100"], "its unit is missing. Write bytes as 100B"),
    ("plan", "too many segments", ["4x4", "--planner", "row-pairs:segments=999999999"], "65,536 segments"),
    ("plan", "bad hardware", ["4x4", "--hardware", "abacus"], "There is no hardware 'abacus'"),
    ("plan", "no such number", ["4x4", "--hardware", "ideal:link_rate=1GB/s"], "Hardware has no number 'link_rate'"),
    ("plan", "nearest number", ["4x4", "--hardware", "ideal:hop_latency=1us"], "Did you mean hop_latency_s?"),
    ("plan", "file in place of folder", ["4x4", "--save", "file/plan.npz"], "--save: nothing can be written in file"),
    ("plan", "folder in place of file", ["4x4", "--save", "folder.npz"], "this is a folder"),
    ("plan", "bad ending", ["4x4", "--save", "plan.pkl"], "expected .npz or .txt"),
    ("machine", "no file", ["nowhere.yaml"], "nowhere.yaml: No such file"),
    ("machine", "empty file", ["file"], "not a description of a machine that is known here"),
    ("prepare", "bad host", ["4x4", "--host", "3x3"], "do not tile"),
    ("prepare", "host without chips", ["4x4", "--host", "0x2"], "do not tile"),
    ("draw", "routes, cut mesh", ["4x4", *CUT, "--route", "0,0-3,3"], "not connected"),
    ("draw", "failed chip", ["4x4", "--fail", "1,1", "--route", "1,1-0,0"], "(1,1)"),
    ("draw", "half a route", ["4x4", "--route", "0,0"], "'0,0' is not a route. Write its two chips"),
    ("verify", "missing", ["nowhere.npz"], "nowhere.npz"),
    ("verify", "damaged", ["damaged.npz"], "damaged.npz"),
    ("verify", "no all-reduce", ["wrong.npz"], "ends with a wrong chunk"),
    ("verify", "bad ending", ["file"], "file"),
    ("plan", "bad rate", ["4x4", "--hardware", "ideal:link_bytes_per_s=fast"], "is not a link rate"),
    ("plan", "bad time", ["4x4", "--hardware", "ideal:step_latency_s=1 fortnight"], "is not a time"),
    ("plan", "bad mode", ["4x4", *PAID, "--mode", "wild"], "expected one of"),
    ("plan", "damaged", ["damaged.npz", *PAID], "damaged.npz"),
    ("plan", "plan and holes", ["plan.npz", *PAID, "--fail", "0,0"], "leave out --fail"),
    ("compare", "cut mesh", ["4x4", *CUT, *PAID], "disconnected groups"),
    ("compare", "plan and holes", ["plan.npz", *PAID, "--fail-cable", "0,0-0,1"], "leave out --fail-cable"),
    ("draw", "nothing to draw", ["-o", "a.svg"], "Say which mesh to draw"),
    ("draw", "bad steps", ["4x4", "--steps", "3", "-o", "a.html"], "as in 0-40"),
    ("draw", "bad ending", ["4x4", "-o", "a.jpg"], "a.jpg ends in '.jpg'"),
    ("draw", "too large", ["200x200", "-o", "a.svg"], "has 40,000 chips; up to 16,384 fit on a picture"),
    ("draw", "bad name", ["4x4", "--what", "[/]", "-o", "a.svg"], "There is no picture '[/]'"),
    ("quarantine list", "no folder", ["nowhere"], "There is no folder nowhere. Give the job's shared folder"),
    ("quarantine add", "bad suspect", [".", "2;3"], "'2;3' is no suspect. Write a chip as 2,3"),
    ("quarantine add", "bad time", [".", "2,3", "--for", "soon"], "'soon' is not a time"),
    ("quarantine add", "no time", [".", "2,3", "--for", "0s"], "expected more than 0 s"),
    ("quarantine add", "damaged", ["damaged list", "2,3"], "Repair it, or move it away"),
    ("quarantine clear", "not there", [".", "2,3"], "2,3 is not in quarantine. quarantine.json lists: nothing"),
    ("quarantine clear", "none", ["."], "Give suspects, as in 2,3, or --all"),
    ("watch", "no folder", ["nowhere"], "There is no folder nowhere. Give that of the job's store"),
    (
        "watch",
        "metrics once",
        [".", "--once", "--metrics", "127.0.0.1:0"],
        "--metrics serves as long as the job is watched",
    ),
]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [pytest.param(command, words, message, id=f"{command}: {what}") for command, what, words, message in CASES],
)
def test_a_failure_is_one_line(command: str, words: list[str], message: str) -> None:
    check([*command.split(), *words], message)
    assert not Path("a.svg").exists()


def test_without_json_nothing_is_on_standard_output() -> None:
    for words, code in ((["plan", "4y4"], 1), (["plan", "--xyzzy"], 2)):
        got, out, err = run(words)
        assert (got, out) == (code, "")
        assert err == run([*words, "--json"])[2]


COMMANDS = [" ".join(words) for words, one in commands().items() if not hasattr(one, "commands") and not one.hidden]
WITHOUT_FAILURES = {"doctor"}
"""They find what is wrong with a machine and say so; that is no failure of theirs."""

ELSEWHERE = {"compile", "run", "store"}
"""What they refuse takes root or an extra: below. What `run` and `store` refuse is in test_run.py."""


def test_every_command_has_its_failures_here() -> None:
    assert {command for command, *_ in CASES} == set(COMMANDS) - WITHOUT_FAILURES - ELSEWHERE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_line_is_one_line(command: str) -> None:
    if command == "run":  # whatever follows is the command to run
        code, out, err = run(command.split())
        assert (code, out) == (2, "")
        assert re.fullmatch(r"Error: [^\n]+\n", err)
    else:
        check([*command.split(), "--xyzzy"], "No such option: --xyzzy. See: ", code=2)


@pytest.mark.parametrize(
    "words", [["nonsense"], ["plan"], ["quarantine", "nonsense"], ["plan", "4x4", "--chunks", "8"], ["draw", "4x4"]]
)
def test_usage_is_one_line(words: list[str]) -> None:
    check(words, "--help", code=2)


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["draw", "4x4", "-o", "a.svg"], "matplotlib", "draw"),
        (["compile", "--topology", "v3:4x4"], "jax", "tpu"),
        (["compile", "--topology", "v3:4x4"], "libtpu", "tpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_a_missing_extra_is_one_line(
    words: list[str], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"jax", "optax", "libtpu", "flax", "torch", "torchft", "orbax", "grain", "matplotlib"} - {module}
    monkeypatch.setattr(
        "meshmend.extras.find_spec", lambda name: None if name == module else object() if name in others else None
    )
    monkeypatch.setitem(sys.modules, module, None)
    check(words, f"needs {module}, which is not installed here")
    assert f"pip install 'meshmend[{extra}]' (in a checkout: pip install '.[{extra}]')" in run(words)[2]


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "4x4", "--save", "nowhere/plan.npz"],
        ["draw", "4x4", "-o", "nowhere/a.svg"],
        ["prepare", "4x4", "--host", "2x2", "--cache", "file"],
    ],
    ids=lambda words: words[0],
)
def test_where_results_go_is_checked_before_the_work(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    for place in (
        "plan.plan",
        "plan.choose",
        "draw.plan",
        "prepare.StepDemands",
        "compare.compare",
    ):
        module, _, name = place.partition(".")
        monkeypatch.setattr(f"meshmend.cli.{module}.{name}", work)
    check(words, "nothing can be written")


def test_a_disk_that_fills_up_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device", "plan.npz")

    monkeypatch.setattr("meshmend.cli.plan.save", fill)
    check(["plan", "2x2", *PLANNED, "--save", "plan.npz"], "plan.npz: No space left on device.")


def hostile_plan(name: str = HOSTILE) -> str:
    """Write a plan that is right and whose names are not; return its file."""
    return str(forge(Path("hostile.npz"), PLAN, planner=name, phases=[name for _ in PLAN.phase_names]))


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "FILE"],
        ["plan", "FILE", *PAID],
        ["compare", "FILE", *PAID],
        ["draw", "FILE", "-o", "a.html"],
    ],
    ids=lambda words: words[0],
)
def test_names_from_files_reach_the_terminal_as_text(words: list[str]) -> None:
    file = hostile_plan()
    code, out, err = run([file if word == "FILE" else word for word in words])
    if code:  # the reader may refuse such names; then it does so like everything else
        assert re.fullmatch(r"Error: [^\n]+\n", err)
    shown = out + err
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert not re.search(r"^proof +✓ proven\S", shown, re.M)


def test_names_from_files_are_no_formulas_in_a_drawing() -> None:
    code, _, err = run(["draw", hostile_plan(r"costs $\frac$ 5"), "-o", "a.svg"])
    assert (code, err) == (0, "")
    assert r"costs $\frac$ 5" in Path("a.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [HOSTILE, "[/bold]", "[red]", "\\", "[\\/]", ":smile:", "\udc80", "a\tb", "√ × ✓"])
def test_the_terminal_shows_what_is_there(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    for value in (text, Text(text), Text(text, style="bold red")):
        terminal.terminal().print(value, soft_wrap=True)
    printed = shown.getvalue()
    assert all(c.isprintable() or c == "\n" for c in printed)
    common.print_facts(text, {"name": plain(text)})
    assert plain(text) in shown.getvalue().replace("\n", "")
    assert plain(plain(text)) == plain(text)


def test_plan_compare_and_draw_take_a_saved_plan() -> None:
    shape = ["2x2", *PLANNED]
    by_file, by_shape = (json.loads(run(["plan", *words, *PAID, "--json"])[1]) for words in (["plan.npz"], shape))
    for one in (by_file, by_shape):
        for name in ("plan_seconds", "verify_seconds", "considered"):
            one.pop(name, None)
    assert by_file == by_shape
    entries = json.loads(run(["compare", "plan.npz", *PAID, "--json"])[1])["mesh"]["planners"]
    saved = {entry["planner"]: entry for entry in entries}["saved plan"]
    assert saved["seconds"] == by_file["seconds"]
    for words in (["plan.npz"], shape):
        assert run(["draw", *words, "-o", "a.html", "--json"])[0] == 0
        assert json.loads(run(["draw", *words, "-o", f"{len(words)}.html", "--json"])[1])["planner"] == "hamiltonian"
    assert run(["draw", "plan.npz", "--route", "0,0-1,1", "-o", "b.svg"])[0] == 0


def test_other_collectives_are_compared_with_their_like() -> None:
    save(reduce_scatter_of(PLAN), "half.npz")
    code, out, _ = run(["compare", "half.npz", *PAID, "--json"])
    assert code == 0
    assert json.loads(out)["collective"] == "reduce-scatter"
    check(["compare", "half.npz", "--collective", "all-gather", *PAID], "leave out --collective")
    assert run(["plan", "half.npz", *PAID])[0] == 0


@pytest.mark.parametrize("collective", list(Collective))
def test_every_command_takes_every_collective(collective: Collective) -> None:
    asked = ["1x3", "--collective", str(collective)]
    code, out, _ = run(["plan", *asked, *PAID, "--save", "asked.npz", "--json"])
    planned = json.loads(out)
    assert (code, planned["collective"], planned["verified"]) == (0, str(collective), True)
    assert all("planner" not in candidate["parameters"] for candidate in planned["considered"])
    verified = " ".join(run(["verify", "asked.npz"])[1].split())
    assert ("updated at its owner" in verified) == (collective is Collective.ALL_REDUCE_WITH_UPDATE)
    assert planned["seconds"] == pytest.approx(planned["considered"][0]["seconds"])
    compared = json.loads(run(["compare", *asked, *PAID, "--json"])[1])
    assert (compared["collective"], compared["mesh"]["bound"]) == (str(collective), planned["bound"])
    assert run(["draw", *asked, "--what", "trees", "-o", "trees.svg"])[0] == 0
    assert run(["draw", *asked, "-o", "steps.html"])[0] == 0


@pytest.mark.parametrize("command", ["plan", "compare", "draw"])
def test_collectives_that_there_are_not(command: str) -> None:
    output = {"draw": ["-o", "x.html"], "plan": []}.get(command, PAID)
    check(
        [command, "4x4", "--collective", "broadcast", *output], "There is no collective 'broadcast'. Collectives: all-"
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_is_one_line(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshmend.cli.plan.plan", interrupt)
    code, out, err = run(["plan", "4x4", *PLANNED, *(["--json"] if as_json else [])])
    assert (code, err) == (130, "Error: Interrupted.\n")
    assert out == "" if not as_json else json.loads(out)["error"] == "Interrupted"


def test_the_documentation_and_the_help_have_the_same_exit_codes() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.M))
    assert told == {str(code): meaning for code, meaning in EXIT_CODES.items()}
    shown = " ".join(run(["--help"])[1].split())
    assert all(f"{code} {meaning}" in shown for code, meaning in EXIT_CODES.items())


def process(*words: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command line as a shell does."""
    environment = os.environ | options.pop("environment", {})
    return subprocess.Popen(
        [sys.executable, "-m", "meshmend", *words], stderr=subprocess.PIPE, env=environment, **options
    )


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}


def test_an_ascii_terminal_gets_what_it_can_show() -> None:
    for words in (["plan", "2x2"], ["plan", "--help"]):
        with process(*words, stdout=subprocess.PIPE, environment=ASCII) as done:
            out, err = done.communicate(timeout=120)
        assert (done.returncode, err) == (0, b"")
        out.decode("ascii")
    assert b"? proven" in out or b"Usage" in out


@pytest.mark.parametrize("words", [["plan", "2x2"], ["plan", "2x2", "--json"]], ids=["table", "json"])
def test_a_closed_pipe_is_quiet(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with process(*words, stdout=writing) as done:
        os.close(writing)
        _, err = done.communicate(timeout=120)
    assert (done.returncode, err) == (141, b"")


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "wb") as full, process("plan", "2x2", "--json", stdout=full) as done:  # noqa: PTH123
        _, err = done.communicate(timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(rb"Error: [^\n]*No space left on device\.\n", err)


def test_control_c_in_a_real_process(here: Path) -> None:
    # A shell that runs the tests in the background lets all that they start ignore the signal.
    Path("wait.py").write_text(
        "import signal, sys, time\nimport meshmend.cli.plan as command\nfrom meshmend.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(*_, **__):\n    print('working', flush=True)\n    time.sleep(90)\n"
        "command.plan = wait\nsys.argv = ['meshmend', 'plan', '4x4', '--planner', 'weave']\nmain()\n"
    )
    with subprocess.Popen([sys.executable, "wait.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None
        assert done.stdout.readline() == b"working\n"
        done.send_signal(signal.SIGINT)
        _, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (130, b"Error: Interrupted.\n")


def test_every_meshmend_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MeshmendError("first line\nsecond line\x1b[2J [/bold]")

    monkeypatch.setattr("meshmend.cli.plan.plan", fail)
    check(["plan", "4x4", *PLANNED], r"first line\nsecond line\x1b[2J [/bold]")
    assert load("plan.npz") == PLAN
