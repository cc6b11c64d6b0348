"""Runs the blocks of the documentation as a reader would: each one alone, as copied.

`python tests/pages.py docs/jax.md` runs one page. Every block gets a fresh process and a fresh folder that looks like a
checkout, so a block that needs a name, an import or a file of another one fails here as it would fail for its reader.

A block is `python` or `bash` (run), `yaml` (parsed), `text` or `diff` (shown). A comment above it can say more:

- `<!-- output -->` above a text block: the block above it prints these lines, in this order; … stands for anything.
- `<!-- run: slow -->` leaves it to the slow tests.
- `<!-- run: by tests/some/test_file.py -->` leaves it to a test of its own.
- `<!-- not run: the reason -->` checks its syntax only.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = ("python", "bash", "yaml", "text", "diff")
MARK = re.compile(r"(?P<output>output)|run: (?:(?P<slow>slow)|by (?P<by>\S+))|not run: (?P<reason>\S.*)")
BLOCK = re.compile(
    r"(?:^(?P<indent> *)<!-- (?P<mark>(?:output|run|not run)\b[^\n]*?) -->\n)?"
    r"^(?P<fence_indent> *)```(?P<kind>[^\n]*)\n(?P<body>.*?)^(?P=fence_indent)```$",
    re.M | re.S,
)
# These variables describe the machine, and would hide what a block forgets to set.
HIDDEN = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "MESHMEND_SHAPE", "MESHMEND_FAILED", "MESHMEND_WRAP")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    body: str
    slow: bool = False
    by: str = ""
    """The test that runs it."""
    reason: str = ""
    """Why it is not run."""
    output: bool = False
    """Whether it is what the block above it prints."""
    prints: str = ""
    """What it prints, where the page shows that."""

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def needs_lab(self) -> bool:
        """Whether it uses the laboratory, whose tests run it then."""
        return re.search(r"meshmend lab\b|meshmend_lab|\blab/", self.body) is not None

    @property
    def runs(self) -> bool:
        return self.kind in ("python", "bash") and not self.by and not self.reason


def read(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("body"))
        name, kind = f"{page.name}:{line}", found["kind"].strip()
        if kind not in KINDS:
            raise ValueError(f"{name}: a block is marked {kind!r}, expected one of {', '.join(KINDS)}.")
        mark = MARK.fullmatch(found["mark"] or "output")
        if mark is None:
            raise ValueError(f"{name}: the mark {found['mark']!r} is none of those that tests/pages.py lists.")
        block = Block(
            page=page,
            line=line,
            kind=kind,
            body=found["body"],
            slow=bool(mark["slow"]),
            by=mark["by"] or "",
            reason=mark["reason"] or "",
            output=bool(found["mark"] and mark["output"]),
        )
        if block.output:
            if kind != "text" or not blocks or not blocks[-1].runs:
                raise ValueError(f"{name}: output is a text block that follows a block that is run.")
            above = blocks.pop()
            blocks.append(Block(**{**vars(above), "prints": block.body}))
        blocks.append(block)
    if 2 * len(blocks) != len(re.findall(r"^ *```", text, re.M)):
        raise ValueError(f"{page.name}: {len(blocks)} blocks were read, but its fences do not come in as many pairs.")
    return blocks


def furnish(folder: Path) -> Path:
    """Make `folder` look like a checkout, so that a page can say `python examples/…`; what is written stays in it."""
    for name in ("docs", "examples", "lab", "src", "tests", "pyproject.toml", "constraints.txt", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def commands(folder: Path) -> Path:
    """The commands that pages use, in a folder of their own: this meshmend, no sudo for root, a pip that only looks.

    `meshmend doctor` shows its help only: it tries every engine, which tests/cli/test_doctor.py lets it do once.
    """
    scripts = {
        "meshmend": f'[ "$*" = doctor ] && set -- doctor --help\nexec "{sys.executable}" -m meshmend "$@"',
        "pip": f'exec "{sys.executable}" "{__file__}" --requirements "$@"',
        "python": f'exec "{sys.executable}" "$@"',
    }
    if os.geteuid() == 0:
        scripts["sudo"] = 'exec "$@"'
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def run(block: Block, environment: dict[str, str] | None = None) -> None:
    """Run a block in a process and a folder of its own, or check what is not run; raise AssertionError if it fails."""
    if block.kind == "yaml":
        import yaml

        list(yaml.safe_load_all(block.body))
    elif block.kind == "python" and not block.runs:
        ast.parse(block.body)
    elif block.kind == "bash":
        syntax = subprocess.run(["bash", "-n"], input=block.body, text=True, capture_output=True)
        assert syntax.returncode == 0, f"{block.name}\n{syntax.stderr}"
    if not block.runs:
        return
    with tempfile.TemporaryDirectory(prefix="meshmend-page-") as folder, tempfile.TemporaryDirectory() as tools:
        furnish(Path(folder))
        env = {name: value for name, value in os.environ.items() if name not in HIDDEN} | (environment or {})
        env |= {"PATH": f"{commands(Path(tools))}{os.pathsep}{env['PATH']}", "COLUMNS": "100"}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "src"), str(ROOT / "lab/src"), *filter(None, [env.get("PYTHONPATH")])]
        )
        if block.kind == "python":
            script = Path(tools) / f"{block.page.name}"
            # So that an error names the line of the page.
            script.write_text("\n" * block.line + block.body, encoding="utf-8")
            command = [sys.executable, str(script)]
        else:
            command = ["bash", "-euo", "pipefail", "-c", block.body]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{block.name} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}"
    check_output(block, done.stdout)


def check_output(block: Block, stdout: str) -> None:
    """Hold what was printed to what the page shows: these lines, in this order, … for anything."""
    printed = iter(" ".join(line.split()) for line in stdout.splitlines())
    for line in block.prints.splitlines():
        shown = " ".join(line.split())
        pattern = re.compile(re.escape(shown).replace("…", ".*"))
        assert any(pattern.fullmatch(other) for other in printed), (
            f"{block.name}: the page shows {shown!r}, but this was printed:\n{stdout}"
        )


def run_in(folder: Path, page: Path, *options: str, **environment: str) -> None:
    """Run every block of a page, each in a folder of its own inside `folder`."""
    for block in read(page):
        if not block.slow or "--slow" in options:
            run(block, environment | {"TMPDIR": str(folder)})


def check_requirements(words: list[str]) -> None:
    """Installing is what CI begins with; here it is enough that whatever a page tells to install exists."""
    import tomllib

    def extras_of(folder: str) -> set[str]:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return set(project["optional-dependencies"])

    known = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for word in words:
        if word.startswith("-") or word in ("install", "constraints.txt"):
            continue
        name, _, extras = word.removesuffix("]").partition("[")
        if name in (".", "./lab"):
            missing = set(extras.split(",")) - {""} - extras_of(name)
        else:
            missing = set() if f"\n{name.lower().partition('=')[0]}==" in known else {name}
        if missing:
            raise SystemExit(f"pip install {word}: there is no {', '.join(missing)}.")


if __name__ == "__main__":
    if sys.argv[1] == "--requirements":
        check_requirements(sys.argv[2:])
    else:
        run_in(Path(tempfile.gettempdir()), Path(sys.argv[1]), *sys.argv[2:])
