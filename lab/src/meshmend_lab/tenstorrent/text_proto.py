"""Protobuf's text form, read without its schema: what descriptors of Tenstorrent machines are written in.

A small strict parser instead of `google.protobuf.text_format`, which can only read a message whose compiled schema it
has; these schemas change with every release of their owner, and nothing here needs more than names and values. A
message becomes a mapping from each field's name to the list of its values, since text alone does not tell whether a
field may repeat. Grammar: protobuf.dev/reference/protobuf/textformat-spec, without extensions and `Any`.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from meshmend.machines.entries import MAX_DEPTH, MAX_VALUES, Entry

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f\v]+|\#[^\n]*)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]{0,127})
    |(?P<number>[-+]?(0[xX][0-9a-fA-F]{1,32}|\d{1,40}(\.\d{0,40})?([eE][-+]?\d{1,3})?))[fF]?
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "\\": "\\"}


def read_text_proto(text: str, file: str) -> Entry:
    """Return a message: a mapping from names of fields to lists of their values, with their lines."""
    return _Parser(text, file).read()


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at, self.line = text, file, 0, 1
        self.lines: dict[str, int] = {}
        self.n_values = 0
        self._advance()

    def read(self) -> Entry:
        return Entry(self._message("", None, 0), self.file, "", self.lines)

    def _advance(self) -> None:
        """Read the next token into `kind` and `token`; at the end its kind is empty."""
        while True:
            self.start_line = self.line
            if self.at >= len(self.text):
                self.kind, self.token = "", ""
                return
            match = _TOKEN.match(self.text, self.at)
            if match is None:
                self._refuse("text protobuf", f"the character {self.text[self.at]!r}")
            self.at = match.end()
            self.kind = str(match.lastgroup)
            self.token = match[self.kind]
            self.line += match[0].count("\n")
            if self.kind != "space":
                return

    def _refuse(self, expected: str, got: str | None = None) -> NoReturn:
        shown = got if got is not None else f"{self.token[:60]!r}" if self.kind else "the end of the file"
        Entry(None, self.file, "", {"": self.start_line}).refuse(expected, shown)

    def _take(self, mark: str) -> bool:
        if self.kind == "mark" and self.token == mark:
            self._advance()
            return True
        return False

    def _message(self, where: str, end: str | None, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            self._refuse(f"at most {MAX_DEPTH} levels", "deeper nesting")
        found: dict[str, Any] = {}
        while True:
            if end is not None and self._take(end):
                return found
            if not self.kind:
                if end is not None:
                    self._refuse(f"{end!r} after the fields of {where}")
                return found
            if self.kind != "name":
                self._refuse("the name of a field")
            name = self.token
            self._advance()
            values = found.setdefault(name, [])
            step = f"{where}.{name}" if where else name
            has_colon = self._take(":")
            if self._take("["):
                self._list(values, step, depth)
            else:
                values.append(self._value(f"{step}[{len(values)}]", has_colon, depth))
            if not self._take(","):
                self._take(";")

    def _list(self, values: list[Any], where: str, depth: int) -> None:
        if self._take("]"):
            return
        while True:
            values.append(self._value(f"{where}[{len(values)}]", True, depth))
            if self._take("]"):
                return
            if not self._take(","):
                self._refuse("',' or ']' in a list")

    def _value(self, where: str, has_colon: bool, depth: int) -> Any:
        self.n_values += 1
        if self.n_values > MAX_VALUES:
            self._refuse(f"at most {MAX_VALUES:,} values", "more")
        self.lines[where] = self.start_line
        if self._take("{"):
            return self._message(where, "}", depth + 1)
        if self._take("<"):
            return self._message(where, ">", depth + 1)
        if not has_colon:
            self._refuse("':' or '{' after the name of a field")
        kind, token = self.kind, self.token
        if kind not in ("name", "number", "string"):
            self._refuse("a value")
        self._advance()
        if kind == "string":
            parts = [token]
            while self.kind == "string":  # adjacent strings are one
                parts.append(self.token)
                self._advance()
            return "".join(self._unquote(part) for part in parts)
        if kind == "name":
            return {"true": True, "false": False}.get(token, token)
        if re.fullmatch(r"[-+]?\d+", token):
            return int(token)
        return int(token, 16) if "x" in token.lower() else float(token)

    def _unquote(self, token: str) -> str:
        def one(match: re.Match[str]) -> str:
            if match[1] not in _ESCAPES:
                self._refuse('an escape such as \\n or \\"', f"\\{match[1]}")
            return _ESCAPES[match[1]]

        return re.sub(r"\\(.)", one, token[1:-1], flags=re.DOTALL)
