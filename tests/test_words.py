"""Words that readers of this field do not know stay out: each has the field's own word in its place."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

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

RENAMED = {
    "ALL_REDUCE_WITH_TURN": "ALL_REDUCE_WITH_UPDATE",
    "ANSWERS": "POLICIES",
    "Aids": "RecoveryOptions",
    "Caller": "Peer",
    "CannotServe": "Unsupported",
    "Chooser": "AutoPlanner",
    "Footing": "Allocation",
    "HostBook": "HostHistory",
    "Introduction": "MemberInfo",
    "LoneSession": "SingleProcessSession",
    "Noted": "LogEntry",
    "Opinion": "Vote",
    "Ruling": "VoteResult",
    "SignBook": "FaultLog",
    "Strike": "FailureEvent",
    "Talk": "AuthenticatedChannel",
    "TurnError": "UpdateError",
    "compile_apart": "compile_in_subprocess",
    "dice": "rng",
    "find_place": "find_host_index",
    "for_now": "retryable",
    "got furthest": "progressed furthest",
    "live_through": "simulate_run",
    "n_places": "chips_per_tile, devices_per_tile",
    "name_bytes": "format_bytes",
    "pass_on": "ring_shift",
    "person who signs": "decision-maker",
    "sign book": "fault log",
    "strangers": "unauthenticated connections",
    "turn_tables": "update_tables",
    "why_not": "unsupported_reason",
    "with a turn": "with a fused update",
    "with_turn": "with_update",
}


@functools.cache
def texts() -> dict[Path, str]:
    """Every text file under version control. The changelog is history and stays as it was."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in listed.stdout.splitlines()] or list(ROOT.glob("[a-z]*/**/*"))
    kept = [path for path in paths if path.suffix in TEXT and path.is_file()]
    return {
        path: path.read_text(encoding="utf-8") for path in kept if path.name not in {"CHANGELOG.md", "test_words.py"}
    }


@pytest.mark.parametrize(("word", "instead"), INSTEAD.items())
def test_private_words_stay_out(word: str, instead: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts().items()
        for match in re.finditer(word, text, re.IGNORECASE)
    ]
    assert not found, f"write {instead!r} in place of these:\n" + "\n".join(found)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_what_was_renamed_is_gone(old: str, new: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path, text in texts().items()
        for match in re.finditer(rf"(?<!\w){re.escape(old)}(?!\w)", text)
    ]
    assert not found, f"{old!r} is {new!r} now:\n" + "\n".join(found)
