"""Files: a schedule on disk as `.npz`, and as `.txt` for people to read and compare, which is not read back.

A file is untrusted input. Nothing in it is executed (no pickle), and only regular files are opened. Sizes are checked
before anything is read, and numbers before they are used. Names may contain nothing that a terminal would act on.
Anything else raises `ScheduleFileError`. Loading checks that a file is well formed; only `verify` proves that it is a
correct all-reduce.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import zipfile
import zlib
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MeshError, ScheduleError, ScheduleFileError, name_chip
from meshmend.schedule import Collective, Op, Schedule
from meshmend.topology import Mesh, Region, name_shape

__all__ = ["load", "save", "to_text"]

FORMAT, REPEATED_FORMAT = 1, 2
"""Versions of the form: 2 is for a repeated schedule, whose rows are the template's, so that readers of 1 do not take
them for the whole. A reader refuses the versions that it does not know."""

MAX_BYTES = 2**31
"""Largest schedule, unpacked, that is read by default: 80 million transfers."""
MAX_NAME = 200
"""Characters of the name of a planner or of a phase."""

COLUMNS = {
    "step": "<i4",
    "src": "<i4",
    "dst": "<i4",
    "first_chunk": "<i4",
    "n_chunks": "<i4",
    "op": "|u1",
    "phase": "|u1",
    "owners": "<i4",
}
_MAX_HEADER_BYTES = 2**20
_MAX_MESSAGE = 500
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression methods that `save` uses, and that fail in few ways."""


def save(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as `.npz`, which `load` reads, or as `.txt`, for people only.

    >>> import meshmend as mm, tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "plan.npz"
    >>> schedule = mm.plan(mm.Mesh("4x4"), "two-color")
    >>> mm.save(schedule, path)
    >>> mm.load(path) == schedule
    True
    """
    path = Path(path)
    for name in (schedule.planner, *schedule.phase_names):
        _check_name(name)
    try:
        match path.suffix:
            case ".npz":
                header = np.frombuffer(json.dumps(_describe(schedule)).encode(), dtype=np.uint8)
                columns = {name: getattr(schedule.template, name).astype(dtype) for name, dtype in COLUMNS.items()}
                np.savez_compressed(path, header=header, **columns)
            case ".txt":
                path.write_text(to_text(schedule), encoding="utf-8")
            case other:
                raise ScheduleFileError(f"{path.name} ends in {other!r}; a schedule is saved as .npz or .txt.")
    except OSError as error:
        raise ScheduleFileError(f"{path} cannot be written: {error.strerror or error}.") from error


def load(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Schedule:
    """Read a schedule that `save` wrote as `.npz`, unpacking at most `max_bytes`; it may also be damaged or hostile."""
    path = Path(path)
    try:
        if path.suffix != ".npz":
            raise ScheduleFileError(f"its name ends in {path.suffix!r}, expected .npz. Save the schedule as .npz.")
        with open_regular(path, max_bytes) as file:
            return read_npz(file, max_bytes)
    except OSError as error:
        raise ScheduleFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ScheduleFileError, ScheduleError, MeshError) as error:
        why = str(error)
        if len(why) > _MAX_MESSAGE:
            why = why[:_MAX_MESSAGE] + " …"
        raise ScheduleFileError(f"{path} is damaged or is not a schedule: {why}") from error


def open_regular(path: Path, max_bytes: int, *, flags: int = 0) -> IO[bytes]:
    """Open a regular file of known size: no pipe that never ends and no device, even behind symbolic links."""
    # Without O_NONBLOCK, opening a pipe without a writer would block forever.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | flags)
    file = os.fdopen(handle, "rb") if stat.S_ISREG(os.fstat(handle).st_mode) else None
    if file is None:
        os.close(handle)
        raise ScheduleFileError("it is not a regular file.")
    size = os.fstat(handle).st_size
    if size > max_bytes:
        file.close()
        raise ScheduleFileError(f"it has {size:,} bytes; at most {max_bytes:,} are read.")
    return file


def _check_name(name: str) -> None:
    """Refuse names with control characters or markup: they are printed, and terminals and Rich act on those."""
    if not (1 <= len(name) <= MAX_NAME and name.isprintable()) or "[" in name or "]" in name:
        raise ScheduleFileError(
            f"the name {name[:MAX_NAME]!r} cannot be in a file: expected 1 to {MAX_NAME} printable characters "
            "without square brackets."
        )


def _describe(schedule: Schedule) -> dict[str, Any]:
    repeat = {} if schedule.repeats == 1 else {"repeats": schedule.repeats, "period": schedule.period}
    return {
        "format": REPEATED_FORMAT if repeat else FORMAT,
        **schedule.mesh.to_dict(),
        "chunks": schedule.template.total_chunks,
        "collective": str(schedule.collective),
        "planner": schedule.planner,
        "phases": list(schedule.phase_names),
        **repeat,
    }


def read_npz(file: IO[bytes], max_bytes: int) -> Schedule:
    """Read the `.npz` form from an open file."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [info.filename for info in archive.infolist()]
            wanted = [f"{name}.npy" for name in ("header", *COLUMNS)]
            if sorted(names) != sorted(wanted):
                odd = min(Counter(names) - Counter(wanted) or Counter(wanted) - Counter(names))
                raise ScheduleFileError(f"it should hold exactly the arrays of a schedule; look at {odd[:40]!r}.")
            members = dict(zip(names, archive.infolist(), strict=True))
            if any(info.compress_type not in _PACKED for info in members.values()):
                raise ScheduleFileError("its arrays use an unexpected compression method.")
            claimed = sum(info.file_size for info in members.values())
            if claimed > max_bytes:
                raise ScheduleFileError(f"it claims {claimed:,} bytes unpacked; at most {max_bytes:,} are read.")
            arrays: dict[str, Any] = {}
            for name, dtype in {"header": "|u1", **COLUMNS}.items():
                info = members[f"{name}.npy"]
                with archive.open(info) as stream:
                    arrays[name] = _read_array(stream, name, dtype, info.file_size)
    except ScheduleFileError:
        raise
    except _ZIP_ERRORS as error:
        raise ScheduleFileError(f"the archive is damaged ({error}).") from error
    header = _read_header(arrays.pop("header").tobytes())
    repeats, period = header.pop("repeats"), header.pop("period")
    template = Schedule(header.pop("mesh"), **header, **arrays, may_idle=repeats is not None)
    return template if repeats is None else template.repeated(repeats, period)


_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    IndexError,
)
"""What `zipfile` raises for archives that are damaged in one way or another."""

_ARRAY_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?\w+)', 'fortran_order': (?:True|False), 'shape': \(([\d, ]*)\), \} *\n", re.ASCII
)


def _read_array(stream: IO[bytes], name: str, dtype: str, size: int) -> NDArray[Any]:
    """Read one `.npy` member without trusting its header: its claim must match the bytes that are there.

    The header is matched, not evaluated: NumPy's own reader parses it as Python.
    """
    prefix = stream.read(10)
    length = int.from_bytes(prefix[8:], "little")
    match = _ARRAY_HEADER.fullmatch(stream.read(length)) if prefix[:8] == b"\x93NUMPY\x01\x00" else None
    if match is None:
        raise ScheduleFileError(f"{name} has no readable array header.")
    found, shape = match[1].decode(), match[2].decode()
    if found != dtype:
        raise ScheduleFileError(f"{name} holds {found}, expected {dtype}.")
    if not re.fullmatch(r"\d{1,18},", shape):
        raise ScheduleFileError(f"{name} has shape ({shape}), expected one number per transfer.")
    claimed, there = int(shape[:-1]) * np.dtype(dtype).itemsize, size - 10 - length
    if claimed != there:
        raise ScheduleFileError(f"{name} claims {claimed:,} bytes, but {there:,} are there.")
    data = stream.read(claimed)
    if len(data) != claimed:
        raise ScheduleFileError(f"{name} is cut short: {len(data):,} of {claimed:,} bytes.")
    return np.frombuffer(data, dtype=dtype)


def _read_header(data: bytes) -> dict[str, Any]:
    """Return the schedule's arguments that are not columns, each checked for its type."""
    if len(data) > _MAX_HEADER_BYTES:
        raise ScheduleFileError(f"its header has {len(data):,} bytes; at most {_MAX_HEADER_BYTES:,} are read.")
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ScheduleFileError(f"its header is not JSON ({error}).") from error
    found = header.get("format") if isinstance(header, dict) else type(header).__name__
    if type(found) is not int or found not in (FORMAT, REPEATED_FORMAT):
        known = f"{FORMAT} and {REPEATED_FORMAT}"
        raise ScheduleFileError(f"its format is {found!r}; this version of meshmend reads {known}.")

    def listed(key: str, kind: type) -> list[Any]:
        values = header.get(key)
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise ScheduleFileError(f"{key} in its header should be a list of {kind.__name__}.")
        return values

    expected: list[tuple[str, type]] = [("chunks", int), ("collective", str), ("planner", str)]
    if found == REPEATED_FORMAT:
        expected += [("repeats", int), ("period", int)]
    elif "repeats" in header or "period" in header:
        raise ScheduleFileError(f"it repeats, which format {FORMAT} does not; expected format {REPEATED_FORMAT}.")
    for key, kind in expected:
        if type(header.get(key)) is not kind:
            raise ScheduleFileError(f"{key} in its header should be {kind.__name__}, got {header.get(key)!r}.")
    if found == REPEATED_FORMAT and header["repeats"] < 2:
        raise ScheduleFileError(f"repeats in its header is {header['repeats']}, expected 2 or more.")
    if header["collective"] not in tuple(Collective):
        raise ScheduleFileError(f"its collective {header['collective']!r} is none of {', '.join(Collective)}.")
    shape, failed, phases = listed("shape", int), listed("failed", str), listed("phases", str)
    for name in (header["planner"], *phases):
        _check_name(name)
    if sum(math.prod(Region.parse(hole).shape) for hole in failed) > math.prod(shape):
        raise ScheduleFileError("the holes in its header are larger than its mesh.")
    mesh: dict[str, Any] = {"shape": shape, "wrap": listed("wrap", bool), "failed": failed}
    mesh["failed_cables"] = listed("failed_cables", str)
    mesh["cable_rates"] = listed("cable_rates", str) if "cable_rates" in header else []
    if any("@" in text for text in mesh["cable_rates"]):
        raise ScheduleFileError("cable_rates in its header should name cables one by one, as in 0,4-0,5=1/2.")
    return {
        "mesh": Mesh.from_dict(mesh),
        "total_chunks": header["chunks"],
        "collective": Collective(header["collective"]),
        "planner": header["planner"],
        "phase_names": tuple(phases),
        "repeats": header.get("repeats"),
        "period": header.get("period"),
    }


def to_text(schedule: Schedule) -> str:
    """Return the text form: a header, the owners, and one line per transfer under its step.

    >>> import meshmend as mm
    >>> print(to_text(mm.plan(mm.Mesh("2x2"), "hamiltonian")).split("step 1")[0])
    meshmend schedule 1
    {"shape": "2x2", ...}
    owners (1,0) (0,0) (0,1) (1,1) (0,1) (1,1) (1,0) (0,0)
    step 0
      (0,0) -> (0,1)  chunk 0  reduce  phase 0
      ...
    """
    mesh, described, schedule = schedule.mesh, _describe(schedule), schedule.template
    header = {key: value for key, value in described.items() if key != "format"}
    header["shape"] = name_shape(mesh.shape)
    names = [name_chip(chip) for chip in mesh.coords.tolist()]
    owners = []
    for rank, group in groupby(schedule.owners.tolist()):
        count = len(list(group))
        owners.append(names[rank] + (f"*{count}" if count > 1 else ""))
    lines = [f"meshmend schedule {described['format']}", json.dumps(header), "owners " + " ".join(owners)]
    step = -1
    for row in zip(*(getattr(schedule, name).tolist() for name in COLUMNS if name != "owners"), strict=True):
        now, src, dst, first, count, op, phase = row
        if now != step:
            lines.append(f"step {now}")
            step = now
        chunks = f"chunk {first}" if count == 1 else f"chunks {first}..{first + count - 1}"
        lines.append(f"  {names[src]} -> {names[dst]}  {chunks}  {Op(op).name.lower()}  phase {phase}")
    return "\n".join(lines) + "\n"
