"""Words that readers of this field do not know stay out: each has the field's own word in its place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = {".py", ".md", ".yml", ".toml", ".cff"}
INSTEAD = {
    r"\bunless told\b": "by default",
    r"\btold_errors\b": "reported_errors",
    r"\bare_given\b": "given",
    r"\bworse days\b": "larger failures",
    r"\bclos(?:e|es|ing) on (?:itself|themselves)\b": "wrap",
    r"\bin a circle\b": "deadlock, or a cycle",
    r"\ba chip's turn\b": "the chip's slot",
    r"\boptimisers?\b": "optimizer",
    r"\b(?:one|a|two|few) (?:row|chunk|process|line|array)s? a (?:chip|rank|step|link|device|transfer|dtype)\b": "per",
    r"\b(?:bytes|steps|messages) a second\b": "per second",
    r"(?<!bench )(?<![\w.:/\"'`-])all ?reduces?\b(?![\w(=.\"'`])": "all-reduce",
}


def texts() -> dict[Path, str]:
    """Every text file under version control. The changelog is history and stays as it was."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in listed.stdout.splitlines()] or list(ROOT.glob("[a-z]*/**/*"))
    kept = [path for path in paths if path.suffix in TEXT and path.is_file()]
    return {
        path: path.read_text(encoding="utf-8") for path in kept if path.name not in {"CHANGELOG.md", "test_words.py"}
    }


def test_private_words_stay_out() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}, write {instead!r}"
        for path, text in texts().items()
        for word, instead in INSTEAD.items()
        for match in re.finditer(word, text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
