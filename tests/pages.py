"""Runs the pages of the documentation as a reader would: every block of code and every command, in order.

`python tests/pages.py docs/jax.md` runs one page in the folder where it is called. The blocks of a page are one
session: a Python block knows the names of those above it, a command finds the files that they wrote.

A block is `python` (run), `console` (its lines after `$ ` are run), `bash` (checked for syntax), `yaml` (parsed), or
`text` (shown, not run). A comment above it can say more: `<!-- run: slow -->` leaves it to the slow tests,
`<!-- run: elsewhere -->` to a test of its own, and `<!-- run first: … -->` holds lines of Python that the page need not
show.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KINDS = ("python", "console", "bash", "yaml", "text")
WHEN = ("always", "slow", "elsewhere")
BLOCK = re.compile(
    r"(?:^<!-- run: (?P<when>\w+) -->\n)?(?:^<!-- run first:\n(?P<first>.*?)-->\n)?"
    r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    first: str
    when: str
    line: int

    def commands(self) -> Iterator[str]:
        """Commands of a console block, without what they print; a line that ends in a backslash goes on."""
        for line in self.body.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield line[2:]


def read(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("body"))
        kind = found["kind"].strip()
        if kind not in KINDS:
            raise ValueError(f"{page.name}:{line}: a block is marked {kind!r}, expected one of {', '.join(KINDS)}.")
        when = found["when"] or "always"
        if when not in WHEN:
            raise ValueError(f"{page.name}:{line}: a block is to be run {when!r}, expected one of {', '.join(WHEN)}.")
        blocks.append(Block(kind, found["body"], found["first"] or "", when, line))
    if 2 * len(blocks) != len(re.findall(r"^```", text, re.M)):
        raise ValueError(f"{page.name}: {len(blocks)} blocks were read, but its fences do not come in as many pairs.")
    return blocks


def furnish(folder: Path) -> Path:
    """Make `folder` look like a checkout, so that a page can say `python examples/…`; what is written stays in it."""
    for name in ("benchmarks", "docs", "examples", "src", "tests", "pyproject.toml", "constraints.txt", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_in(folder: Path, page: Path, *options: str, **environment: str) -> None:
    """Run a page in a process of its own, in a folder that looks like a checkout."""
    done = subprocess.run(
        [sys.executable, __file__, str(page), *options],
        cwd=furnish(folder),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(page: Path, slow: bool) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read(page):
        if block.when == "elsewhere" or (block.when == "slow" and not slow):
            continue
        print(f"{page.name}:{block.line}: {block.kind}", flush=True)  # noqa: T201
        if block.kind == "python":
            exec(compile(block.first, f"{page.name}:{block.line} (first)", "exec"), names)  # noqa: S102
            # So that an error names the line of the page.
            exec(compile("\n" * block.line + block.body, page.name, "exec"), names)  # noqa: S102
        elif block.kind == "console":
            for command in block.commands():
                run_command(command)
        elif block.kind == "bash":
            subprocess.run(["bash", "-n"], input=block.body, text=True, check=True)
        elif block.kind == "yaml":
            import yaml

            list(yaml.safe_load_all(block.body))


def run_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[:2] == ["pip", "install"]:
        check_requirements(words[2:])
        return
    if words[0] == "sudo" and os.geteuid() == 0:
        command = command.split(None, 1)[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"$ {command}\n{done.stdout}{done.stderr}\nended with exit code {done.returncode}.")


def check_requirements(words: list[str]) -> None:
    """Installing is what CI begins with; here it is enough that whatever a page tells to install exists."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for word in words:
        if word.startswith("-") or word == "constraints.txt":
            continue
        name, _, extras = word.removesuffix("]").partition("[")
        if name == ".":
            missing = set(extras.split(",")) - {""} - set(project["optional-dependencies"])
        else:
            missing = set() if f"\n{name.lower().partition('=')[0]}==" in known else {name}
        if missing:
            raise SystemExit(f"pip install {word}: there is no {', '.join(missing)}.")


if __name__ == "__main__":
    run(Path(sys.argv[1]), slow="--slow" in sys.argv)
