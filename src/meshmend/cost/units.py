"""Units: payloads, rates and times as people write them, and settings, as in `row-pairs:segments=2`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches

from meshmend.errors import ParameterError

__all__ = [
    "did_you_mean",
    "format_bytes",
    "name_rate",
    "name_seconds",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
    "parse_settings",
    "split_settings",
]

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµμ/]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BYTES = {prefix + "b": factor for prefix, factor in _DECIMAL.items()} | {
    f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", start=1)
}
_BYTE_RATE = re.compile(r"([KkMGT]?i?B)(?:/s|ps)?")
_BIT_RATE = re.compile(r"([KkMmGgTt]?)(?:b/s|bps|[Bb]it(?:/s|ps)?)")
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "μs": 10**6, "ns": 10**9}
_SECONDS = {"min": 60, "h": 3600, "d": 86400}
_TIMES = "5us, 1.5ms, 90s, 30min or 7d"


def parse_bytes(text: str) -> float:
    """Read a payload: `102MB`, `1.34GB`, `1KB` (decimal), `64MiB` (binary), `512B`. The unit must be there.

    >>> parse_bytes("102.4MB"), parse_bytes("64MiB")
    (102400000.0, 67108864.0)
    """
    what, examples = "a payload", "102MB, 1.34GB, 64MiB"
    number, unit = _split(text, what, examples)
    if not unit:
        raise ParameterError(
            f"{text!r} is not a payload: its unit is missing. Write bytes as {text.strip()}B, or {examples}."
        )
    if unit.lower() not in _BYTES:
        raise ParameterError(f"{text!r} is not a payload: {unit!r} is no unit of bytes. Write it as in 102MB or 64MiB.")
    return _finite(number * _BYTES[unit.lower()], text, what)


def parse_rate(text: str) -> float:
    """Read a link's rate in one direction, in bytes per second: `40mbit`, `656Gb/s` (bits), `82GB/s` (bytes).

    A capital B is bytes and a small b is bits, as usual, in `GBps` and `Gbps` too.

    >>> parse_rate("40mbit"), parse_rate("656Gb/s"), parse_rate("82GB/s")
    (5000000.0, 82000000000.0, 82000000000.0)
    """
    number, unit = _split(text, "a link rate", "40mbit, 656Gb/s, 82GB/s")
    if bits := _BIT_RATE.fullmatch(unit):
        return _finite(number * _DECIMAL[bits[1].lower()] / 8, text, "a link rate")
    if (in_bytes := _BYTE_RATE.fullmatch(unit)) and in_bytes[1].lower() in _BYTES:
        return _finite(number * _BYTES[in_bytes[1].lower()], text, "a link rate")
    raise ParameterError(f"{text!r} is not a link rate. Write bits, as in 40mbit or 656Gb/s, or bytes, as in 82GB/s.")


def parse_seconds(text: str) -> float:
    """Read a time: `5us`, `1.5ms`, `2s`, `10min`, `12h`, `7d`, `0`.

    >>> parse_seconds("5us"), parse_seconds("1.5h"), parse_seconds("0")
    (5e-06, 5400.0, 0.0)
    """
    number, unit = _split(text, "a time", _TIMES)
    unit = unit.lower()
    if unit not in _PER_SECOND | _SECONDS and (unit or number):
        raise ParameterError(f"{text!r} is not a time. Write it with its unit, as in {_TIMES}.")
    return _finite(number * _SECONDS.get(unit, 1) / _PER_SECOND.get(unit, 1), text, "a time")


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """Read a name and its settings; the name may have colons, as a file's may.

    >>> split_settings("row-pairs:segments=2,orientation=columns")
    ('row-pairs', {'segments': '2', 'orientation': 'columns'})
    >>> split_settings("C:/mine.json")
    ('C:/mine.json', {})
    """
    name, *settings = re.split(r":(?=\w+=)", text, maxsplit=1)
    return name, parse_settings(settings[0]) if settings else {}


def parse_settings(text: str) -> dict[str, str]:
    """Read settings: `name=value`, more of them after commas.

    >>> parse_settings("spares=1,host=2x2")
    {'spares': '1', 'host': '2x2'}
    """
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise ParameterError(f"{word!r} is not a setting. Write its name and its value, as in name=value.")
        if name in found:
            raise ParameterError(f"{text!r} sets {name} twice. Leave one of them out.")
        found[name] = value
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest of what is known, after a space; nothing if none is near.

    >>> did_you_mean("chunk", ["chunks", "trees"]), did_you_mean("hop", ["start_s", "hop_latency_s"])
    (' Did you mean chunks?', ' Did you mean hop_latency_s?')
    """
    names = list(known)
    near = get_close_matches(name, names, n=1) or [one for one in names if name in one or one in name]
    return f" Did you mean {near[0]}?" if near else ""


def format_bytes(n: float) -> str:
    """Write a payload.

    >>> format_bytes(102_400_000), format_bytes(1000)
    ('102.4 MB', '1 KB')
    """
    return _scaled(n, (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0)))


def name_seconds(seconds: float) -> str:
    """Write a time.

    >>> name_seconds(0.00125), name_seconds(0)
    ('1.25 ms', '0 s')
    """
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))) if seconds else "0 s"


def name_rate(bytes_per_s: float) -> str:
    """Write a link's rate.

    >>> name_rate(82e9)
    '82 GB/s'
    """
    return f"{format_bytes(bytes_per_s)}/s"


def _split(text: str, what: str, examples: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ParameterError(f"{text!r} is not {what}. Write a number and its unit, as in {examples}.")
    return _finite(float(match[1]), text, what), match[2]


def _finite(value: float, text: str, what: str) -> float:
    if not math.isfinite(value):
        raise ParameterError(f"{text!r} is not {what}: it is not a finite number.")
    return value


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    for unit, scale in units:
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.4g} {unit}"
    unit, scale = units[-1]
    return f"{value / scale:.4g} {unit}"
