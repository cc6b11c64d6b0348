"""Reading untrusted files: limits on size and depth, no code, no aliases, and errors that say where and what.

A description comes from a machine's own tools, through mail and tickets. YAML is read from its events, so that nothing
is constructed but mappings, lists, strings and numbers: no tags, no anchors (a few hundred bytes of aliases can stand
for gigabytes), no duplicate keys. What is read is an `Entry`: a value that knows its file, its line and its path in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from meshmend.errors import MachineError
from meshmend.extras import require

MAX_BYTES = 16 * 2**20
"""A node list of a thousand hosts has about ten megabytes."""
MAX_DEPTH = 40
MAX_VALUES = 2_000_000
MAX_NUMBER = 2**64
"""Unique ids of chips have 64 bits."""


def read_text(path: Path) -> str:
    """Return the text of a file."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise MachineError(
            f"{path} is larger than {MAX_BYTES >> 20} MiB: a description of a machine is expected to be smaller.",
            file=str(path),
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MachineError(
            f"{path}, line {line}: expected UTF-8 text, got the byte 0x{data[error.start]:02x}.",
            file=str(path),
            line=line,
            expected="UTF-8 text",
        ) from None


@dataclass(frozen=True)
class Entry:
    """A value of a description, with its place in the file for errors."""

    value: Any
    file: str
    where: str = ""
    lines: dict[str, int] | None = None

    @property
    def line(self) -> int | None:
        """The line on which the value starts, where the format tells."""
        return None if self.lines is None else self.lines.get(self.where)

    def refuse(self, expected: str, got: str | None = None, advice: str = "") -> NoReturn:
        """Raise the error that says what was expected here."""
        shown = _short(self.value) if got is None else got
        at = f"{self.file}" + (f", line {self.line}" if self.line is not None else "")
        where = f" at {self.where}" if self.where else ""
        more = f" {advice}" if advice else ""
        raise MachineError(
            f"{at}: expected {expected}{where}, got {shown}.{more}",
            file=self.file,
            line=self.line,
            expected=expected,
            got=shown,
        )

    def _sub(self, value: Any, step: str) -> Entry:
        return Entry(value, self.file, f"{self.where}{step}" if self.where else step.lstrip("."), self.lines)

    def mapping(self) -> dict[Any, Any]:
        """Return the value as a mapping."""
        if not isinstance(self.value, dict):
            self.refuse("a mapping")
        return self.value

    def items(self, field: str | None = None) -> Iterator[tuple[Any, Entry]]:
        """Yield the keys and values of a mapping, or of the one in a field: none where that is not there."""
        found = self if field is None else self.get(field)
        if found is None:
            return
        for key, value in found.mapping().items():
            yield key, found._sub(value, f".{key}")

    def get(self, key: str) -> Entry | None:
        """Return a field of a mapping, None if it is not there or empty."""
        value = self.mapping().get(key)
        return None if value is None else self._sub(value, f".{key}")

    def need(self, key: str) -> Entry:
        """Return a field of a mapping that must be there."""
        found = self.get(key)
        if found is None:
            self.refuse(f"a field {key!r}", f"only {', '.join(map(str, list(self.mapping())[:8])) or 'nothing'}")
        return found

    def rows(self, field: str | None = None) -> Iterator[Entry]:
        """Yield the values of a list, or of the one in a field: none where that is not there."""
        found = self if field is None else self.get(field)
        if found is None:
            return
        if not isinstance(found.value, list):
            found.refuse("a list")
        for number, value in enumerate(found.value):
            yield found._sub(value, f"[{number}]")

    def matching(self, pattern: re.Pattern[str], expected: str) -> str:
        """Return the value as a text of that form, which may stand in a command."""
        text = self.text()
        return text if pattern.fullmatch(text) else self.refuse(expected)

    def whole(self, least: int = 0, most: int = MAX_NUMBER) -> int:
        """Return the value as a whole number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            self.refuse(f"a whole number from {least} to {most}" if most < MAX_NUMBER else "a whole number")
        return self.value

    def text(self, most: int = 256) -> str:
        """Return the value as a string; a number is one too, as a name."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        if not isinstance(self.value, str) or not 0 < len(self.value) <= most:
            self.refuse(f"a string of at most {most} characters")
        return self.value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    if isinstance(value, int) and abs(value) > 10 * MAX_NUMBER:
        return "a number that is too large"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def read_json(text: str, file: str) -> Entry:
    """Return a JSON document."""
    try:
        return Entry(json.loads(text), file)
    except json.JSONDecodeError as error:
        raise MachineError(
            f"{file}, line {error.lineno}: expected JSON, got: {error.msg}.",
            file=file,
            line=error.lineno,
            expected="JSON",
        ) from None
    except (RecursionError, ValueError):
        raise MachineError(
            f"{file}: expected JSON of ordinary depth and numbers, got one that is nested too deeply or has a number "
            f"of thousands of digits.",
            file=file,
        ) from None


def read_yaml(text: str, file: str) -> Entry:
    """Return a YAML document of plain mappings, lists, strings and numbers."""
    require("yaml", needed_for="Reading a description in YAML", extra="machines")
    import yaml

    lines: dict[str, int] = {}
    try:
        return Entry(_YamlReader(yaml, text, file, lines).read(), file, "", lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        at = f"{file}, line {line}" if line is not None else file
        problem = " ".join(str(getattr(error, "problem", None) or error).split())[:120]
        raise MachineError(f"{at}: expected YAML, got: {problem}.", file=file, line=line, expected="YAML") from None


class _YamlReader:
    """Builds values from the events of the parser, with the line of each."""

    def __init__(self, yaml: Any, text: str, file: str, lines: dict[str, int]) -> None:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same parser, in C where it was built
        self.yaml, self.file, self.lines, self.n_values = yaml, file, lines, 0
        self.events = iter(yaml.parse(text, Loader=loader))

    def read(self) -> Any:
        event = self._next()
        while isinstance(event, self.yaml.StreamStartEvent | self.yaml.DocumentStartEvent):
            event = self._next()
        if isinstance(event, self.yaml.StreamEndEvent):
            return None
        value = self._value(event, "", 0)
        self._next()  # the end of the document
        after = self._next()
        if not isinstance(after, self.yaml.StreamEndEvent):
            self._refuse(after, "one YAML document", "a second one")
        return value

    def _next(self) -> Any:
        return next(self.events)

    def _refuse(self, event: Any, expected: str, got: str) -> NoReturn:
        Entry(None, self.file, "", {"": event.start_mark.line + 1}).refuse(expected, got)

    def _value(self, event: Any, where: str, depth: int) -> Any:
        self.n_values += 1
        if depth > MAX_DEPTH:
            self._refuse(event, f"at most {MAX_DEPTH} levels", "deeper nesting")
        if self.n_values > MAX_VALUES:
            self._refuse(event, f"at most {MAX_VALUES:,} values", "more")
        if isinstance(event, self.yaml.AliasEvent) or event.anchor is not None:
            self._refuse(event, "plain values", "an anchor or an alias; write the values out")
        if event.tag is not None:
            self._refuse(event, "plain values", f"the tag {event.tag[:60]!r}")
        self.lines[where] = event.start_mark.line + 1
        if isinstance(event, self.yaml.ScalarEvent):
            return _scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, self.yaml.SequenceStartEvent):
            return self._list(where, depth)
        return self._mapping(where, depth)

    def _list(self, where: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := self._next(), self.yaml.SequenceEndEvent):
            found.append(self._value(event, f"{where}[{len(found)}]", depth + 1))
        return found

    def _mapping(self, where: str, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while not isinstance(event := self._next(), self.yaml.MappingEndEvent):
            if not isinstance(event, self.yaml.ScalarEvent):
                self._refuse(event, "a plain key", "a list or a mapping as a key")
            key = self._value(event, f"{where} key", depth + 1)
            if key in found:
                self._refuse(event, "each key once", f"{str(key)[:60]!r} twice")
            step = f"{where}.{key}" if where else f"{key}"
            found[key] = self._value(self._next(), step, depth + 1)
        return found


def _scalar(text: str) -> Any:
    """Return a plain scalar as the core schema of YAML 1.2 reads it: no sexagesimal numbers, no yes and no."""
    if re.fullmatch(r"[-+]?\d{1,40}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"0x[0-9a-fA-F]{1,32}", text):
        return int(text, 16)
    if re.fullmatch(r"[-+]?(\d{1,40}\.\d{0,40}|\.\d{1,40})([eE][-+]?\d{1,3})?", text, re.ASCII):
        return float(text)
    return {"true": True, "false": False, "null": None, "~": None, "": None}.get(text, text)
