"""Hardware in files: what was measured on the devices at hand, with how it was measured, as JSON.

A file is taken wherever a preset is: `--hardware measured.json`, `plan(…, hardware="measured.json")`. It is read as
untrusted input: its size is checked before it is read, and every value before it is used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshmend.cost.hardware import Hardware
from meshmend.errors import ParameterError
from meshmend.files import write_whole

FORMAT = 1
MAX_BYTES = 2**20
"""Files that are longer are not read: a measurement takes a few kilobytes."""
MAX_TEXT = 2000
_SECONDS = ("step_latency_s", "hop_latency_s", "start_s", "message_s")
_KNOWN = {field.name for field in dataclasses.fields(Hardware)}


def hardware_facts(hardware: Hardware) -> dict[str, Any]:
    """Return hardware as what JSON can write and `parse_hardware` reads."""
    return {"format": FORMAT, "hardware": dataclasses.asdict(hardware) | {"sources": dict(hardware.sources)}}


def write_hardware(hardware: Hardware, path: str | Path, measured: Mapping[str, Any]) -> None:
    """Write a file atomically: the hardware, and what was measured (versions, devices, raw times)."""
    text = json.dumps(hardware_facts(hardware) | {"measured": dict(measured)}, indent=1)
    write_whole(Path(path), text + "\n")


def read_hardware(path: str | Path) -> Hardware:
    """Return the hardware that a file describes; raise `ParameterError` where it does not."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ParameterError(f"The hardware file {path} cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_BYTES:
        raise ParameterError(f"The hardware file {path} has more than {MAX_BYTES:,} bytes: it is no measurement.")
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"The hardware file {path} is not JSON: {error}.") from None
    return parse_hardware(facts, f"The hardware file {path}")


def parse_hardware(facts: Any, where: str) -> Hardware:
    """Return the hardware that parsed JSON describes; `where` begins the error messages."""
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or not isinstance(facts.get("hardware"), dict):
        raise ParameterError(
            f"{where} is not one of ours: expected format {FORMAT} and the hardware, as `meshmend doctor --measure F` "
            "writes them."
        )
    found: dict[str, Any] = facts["hardware"]
    unknown = sorted(set(found) - _KNOWN)
    if unknown:
        raise ParameterError(f"{where} has {unknown[0]!r}, which is not known: a later version may have written it.")
    name = found.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT:
        raise ParameterError(f"{where} has the name {str(name)[:80]!r}, expected a short text.")
    numbers = {key: _number(found, key, where) for key in ("link_bytes_per_s", *_SECONDS) if key in found}
    if "link_bytes_per_s" not in numbers:
        raise ParameterError(f"{where} does not say link_bytes_per_s, the rate of one link.")
    width = found.get("links_at_once")
    if width is not None and (not isinstance(width, int) or isinstance(width, bool)):
        raise ParameterError(f"{where} has links_at_once {width!r}, expected a whole number, or null for all links.")
    cores = found.get("shared_cores")
    if cores is not None and (not isinstance(cores, int) or isinstance(cores, bool)):
        raise ParameterError(f"{where} has shared_cores {cores!r}, expected a whole number, or null for none.")
    flags = {key: found.get(key, False) for key in ("runs_lanes", "is_switched")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ParameterError(f"{where} has {key} {value!r}, expected true or false.")
    sources = found.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(v, str) and len(v) <= MAX_TEXT for v in sources.values()):
        raise ParameterError(f"{where} has sources that are not short texts by name.")
    limits = {"links_at_once": width, "shared_cores": cores}
    values: dict[str, Any] = {**numbers, **flags, **limits, "sources": tuple(sources.items())}
    return Hardware(name, **values)


def _number(found: Mapping[str, Any], key: str, where: str) -> float:
    value = found[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ParameterError(f"{where} has {key} {value!r}, expected a number.")
    try:
        return float(value)
    except OverflowError:
        raise ParameterError(f"{where} has a {key} that is too large to be a number.") from None
