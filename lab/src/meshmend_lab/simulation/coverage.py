"""Which branches of the product's decisions no simulated job has taken, and why that may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from meshmend.jax.state import recovery
from meshmend.launch import membership
from meshmend_lab.simulation.job import SimulatedJob
from meshmend_lab.simulation.plan import Plan

MODULES = (membership, recovery)
REASONS = {
    "if not 0 <= host < MAX_HOSTS": "a mistake in a command, not a fault: tests/launch/test_membership.py",
    "if (least, most) != (self.least, self.most)": "a mistake in a command: tests/launch/test_membership.py",
    "if machine != self.machine": "a mistake in a command: tests/launch/test_membership.py",
    "if len(self.members) >= self.most": "a mistake in a command: tests/launch/test_membership.py",
    'elif kind == "done"': "only a host that gives up says anything else: tests/launch/test_membership.py",
    'elif kind == "failed"': "a host gives up where its workers end too soon: tests/launch/test_membership.py",
    "if source.differs": "another script in this job's place: tests/jax_engine/state/test_identity.py",
}
"""Conditions that only ever go one way here, by the beginning of their line."""


class Tracer:
    """Counts which line followed which, in the functions of some modules."""

    def __init__(self) -> None:
        self.arcs: dict[str, set[tuple[int, int]]] = {str(module.__file__): set() for module in MODULES}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002
        """Trace a function of these modules, and no other."""
        arcs = self.arcs.get(frame.f_code.co_filename)
        if arcs is None:
            return None
        last = 0

        def local(frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG001
            nonlocal last
            if event == "line":
                arcs.add((last, frame.f_lineno))
                last = frame.f_lineno
            elif event == "return":
                arcs.add((last, 0))
            return local

        return local


def untaken(plans: Iterable[Plan]) -> list[str]:
    """Run these jobs; return the branches that none has taken, each with its reason, if there is one."""
    tracer, before = Tracer(), sys.gettrace()
    sys.settrace(tracer)
    try:
        for plan in plans:
            SimulatedJob(plan).run()
    finally:
        sys.settrace(before)
    found = []
    for path, arcs in tracer.arcs.items():
        found += _untaken(Path(path), arcs)
    return found


def unexplained(branches: Iterable[str]) -> list[str]:
    """Return those without a reason."""
    return [branch for branch in branches if " -- " not in branch]


def _untaken(path: Path, arcs: set[tuple[int, int]]) -> list[str]:
    """Return the conditions that went one way only, and the functions that never ran."""
    text = path.read_text(encoding="utf-8")
    lines, ran = text.splitlines(), {to for _, to in arcs}
    code = _lines_of(compile(text, str(path), "exec"))
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.If | ast.While | ast.For) or node.lineno not in code:
            continue
        head = range(node.lineno, node.body[0].lineno)
        body = node.body[0].lineno
        takes = any(to == body and source in head for source, to in arcs)
        skips = any(source in head and to != body and to not in head for source, to in arcs)
        line = lines[node.lineno - 1].strip()
        why = next((reason for start, reason in REASONS.items() if line.startswith(start)), "")
        if node.lineno not in ran:
            found.append(f"{path.name}:{node.lineno}: never asked: {line}" + f" -- {why}" * bool(why))
        elif not (takes and skips):
            way = "never true" if not takes else "never false"
            found.append(f"{path.name}:{node.lineno}: {way}: {line}" + f" -- {why}" * bool(why))
    return found


def _lines_of(code: CodeType) -> set[int]:
    found = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _lines_of(constant)
    return found
