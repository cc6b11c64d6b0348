"""An artefact: a proven all-reduce in a folder, for whoever has JAX and not meshmend.

    manifest.json         what it is, for which devices in which order, the versions, the proof, a digest per file
    all_reduce.exported   the collective as StableHLO, as `jax.export` serializes it
    table_0_send.npy …    what each device sends and receives: one row per device, an array per input
    plan.npz              the schedule that both were made from

`meshmend_lab.export.exporting` writes one; docs/export.md runs one with JAX and NumPy alone. A folder is
untrusted input. Names of files are matched and never followed out of the folder, sizes are checked before anything is
read, nothing is unpickled or executed. What the manifest says about the plan is not believed but derived again: the
plan is proven, its tables are made again, and each must be what is there to the last byte. Digests find damage; whoever
can change a file can change its digest as well, so they are no signature.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MeshError, ParameterError, ScheduleError, ScheduleFileError, VerificationError
from meshmend.files import write_whole
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.lanes import Lowered, lower, stays_folded
from meshmend.schedule.serialize import MAX_BYTES, open_regular, read_npz, save
from meshmend.schedule.verify import Proof, verify
from meshmend_lab.export.bystanders import inputs_of, with_bystanders

__all__ = ["Artefact", "read_artefact"]

FORMAT = 1
KIND = "meshmend all-reduce"
AXIS = "chip"
MANIFEST, PROGRAM, PLAN = "manifest.json", "all_reduce.exported", "plan.npz"
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "int32": 4}
"""What an artefact sums, and the bytes of an element."""
PLATFORMS = ("tpu", "cpu")
MAX_MANIFEST_BYTES = 2**24
MAX_ELEMENTS = 2**40

_FILE = re.compile(r"table_\d{1,3}_(?:send|receive|ops)\.npy|all_reduce\.exported|plan\.npz", re.ASCII)
_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class Payload:
    """What each device has of a payload."""

    elements: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ParameterError(f"The dtype is {self.dtype!r}, expected one of: {', '.join(DTYPES)}.")
        if not 1 <= self.elements <= MAX_ELEMENTS:
            raise ParameterError(f"The payload has {self.elements:,} elements, expected 1 to {MAX_ELEMENTS:,}.")

    @classmethod
    def of(cls, payload_bytes: float, dtype: str) -> Payload:
        """Return the payload of as many bytes, rounded up to whole elements.

        >>> Payload.of(100e6, "float32").elements
        25000000
        """
        size = DTYPES.get(dtype, 1)
        return cls(-(-round(payload_bytes) // size), dtype)

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return self.elements * DTYPES[self.dtype]


@dataclass(frozen=True)
class DeviceTables:
    """A plan's tables for a number of devices, which may be more than its chips: those stand by.

    `chips` has the coordinate of each device, in the order of the devices.
    """

    lowered: Lowered
    chips: NDArray[np.int64]
    stands_by: bool

    @classmethod
    def of(cls, schedule: Schedule, *, stand_by: bool = False) -> DeviceTables:
        """Lower a schedule for its live chips, or with `stand_by` for all chips of its mesh."""
        mesh, lowered = schedule.mesh, lower(schedule)
        if not stand_by:
            return cls(lowered, mesh.coords.astype(np.int64), False)
        places = np.flatnonzero(mesh.live.reshape(-1)).tolist()
        return cls(with_bystanders(lowered, places, mesh.size), np.argwhere(np.ones(mesh.shape)), True)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The tables by the names of their files, in the order in which the program takes them."""
        return {f"{name}.npy": table for name, table in inputs_of(self.lowered).items()}


@dataclass(frozen=True)
class Artefact:
    """An artefact that was read: its plan is proven and its tables are the plan's. Its program is bytes, not run yet.

    `digest` is that of the manifest, which has those of all files.
    """

    schedule: Schedule
    proof: Proof
    tables: DeviceTables
    payload: Payload
    program: bytes
    versions: Mapping[str, str]
    digest: str


def write_artefact(
    folder: Path,
    schedule: Schedule,
    tables: DeviceTables,
    payload: Payload,
    program: bytes,
    versions: Mapping[str, str],
) -> str:
    """Write an artefact into a new or empty folder, or over another one; return the manifest's digest."""
    check_replaceable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    save(schedule, folder / PLAN)
    content = {PROGRAM: program, PLAN: (folder / PLAN).read_bytes()}
    content |= {name: _as_npy(table) for name, table in tables.arrays.items()}
    for name, data in content.items():
        write_whole(folder / name, data)
    manifest = {
        **_described(schedule, tables, payload, verify(schedule)),
        "versions": dict(versions),
        "files": {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in content.items()},
    }
    text = json.dumps(manifest, indent=1).encode()
    write_whole(folder / MANIFEST, text)
    return _digest(text)


def check_replaceable(folder: Path) -> None:
    """Raise `ParameterError` if a folder holds anything but an artefact; called before the work as well."""
    others = [path.name for path in folder.iterdir() if not _is_known(path.name)] if folder.exists() else []
    if others:
        raise ParameterError(
            f"{folder} holds other files, such as {min(others)}. Name a new folder, or one with an artefact to replace."
        )


def read_artefact(folder: str | Path, *, max_bytes: int = MAX_BYTES) -> Artefact:
    """Read an artefact that may be damaged or hostile; prove its plan, and hold its tables to it.

    The program is not looked into: `check_program` compares it with the plan's own.
    """
    folder = Path(folder)
    try:
        return _read(folder, max_bytes)
    except OSError as error:
        where = f"{folder}/{Path(error.filename).name}" if error.filename else str(folder)
        raise ScheduleFileError(f"{where} cannot be read: {error.strerror or error}.") from error
    except (ScheduleFileError, ScheduleError, ParameterError, MeshError, VerificationError) as error:
        raise ScheduleFileError(f"{folder} is damaged or is not an artefact: {str(error)[:500]}") from error


def _read(folder: Path, max_bytes: int) -> Artefact:
    text = _content(folder, MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleFileError(f"{MANIFEST} is not JSON ({str(error)[:80]}).") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise ScheduleFileError(f"{MANIFEST} is that of something else; expected the kind {KIND!r}.")
    if manifest.get("format") != FORMAT or type(manifest["format"]) is not int:
        found = str(manifest.get("format"))[:40]
        raise ScheduleFileError(f"its format is {found!r}; this version of meshmend reads {FORMAT}.")
    versions, stand_by = manifest.get("versions"), manifest.get("stand_by")
    if not isinstance(versions, dict) or not all(_is_word(word) for pair in versions.items() for word in pair):
        raise ScheduleFileError(f"versions in {MANIFEST} should be names with versions.")
    if type(stand_by) is not bool:
        raise ScheduleFileError(f"stand_by in {MANIFEST} should be true or false.")
    payload = _payload(manifest.get("payload"))
    content = _contents(folder, manifest.get("files"), max_bytes)
    schedule = read_npz(io.BytesIO(content.pop(PLAN)), max_bytes)
    if schedule.collective is not Collective.ALL_REDUCE:
        raise ScheduleFileError(f"{PLAN} is a {schedule.collective}, expected an all-reduce.")
    program = content.pop(PROGRAM)
    _check_size(schedule, payload, sum(map(len, content.values())))
    proof = verify(schedule)
    tables = DeviceTables.of(schedule, stand_by=stand_by)
    arrays = tables.arrays
    if content.keys() != arrays.keys():
        odd = min(content.keys() ^ arrays.keys())
        raise ScheduleFileError(f"its plan has {len(arrays)} tables; look at {odd}.{_ELSEWHERE}")
    for name, table in arrays.items():
        if content[name] != _as_npy(table):
            raise ScheduleFileError(f"{name} is not what the plan says.{_ELSEWHERE}")
    for key, expected in _described(schedule, tables, payload, proof).items():
        if manifest.get(key) != expected:
            raise ScheduleFileError(f"{key} in {MANIFEST} is not that of its plan.{_ELSEWHERE}")
    return Artefact(schedule, proof, tables, payload, program, versions, _digest(text))


_ELSEWHERE = " If another version of meshmend wrote it, export the plan again with this one."


def _payload(found: Any) -> Payload:
    keys = {"elements": int, "dtype": str, "bytes": int}
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != keys:
        raise ScheduleFileError(f"payload in {MANIFEST} should have {', '.join(keys)}.")
    return Payload(found["elements"], found["dtype"])


def _contents(folder: Path, files: Any, max_bytes: int) -> dict[str, bytes]:
    """Read the files that a manifest lists: only those of an artefact, in the folder itself, as it says they are."""
    if not isinstance(files, dict) or not {PROGRAM, PLAN} <= files.keys():
        raise ScheduleFileError(f"files in {MANIFEST} should list {PROGRAM}, {PLAN} and the tables.")
    total = 0
    for name, facts in files.items():
        if not _FILE.fullmatch(name):
            raise ScheduleFileError(f"{name[:40]!r} is no file of an artefact.")
        if not isinstance(facts, dict) or type(facts.get("bytes")) is not int or facts["bytes"] < 0:
            raise ScheduleFileError(f"files in {MANIFEST} should have the bytes and the sha256 of {name}.")
        total += facts["bytes"]
    if total > max_bytes:
        raise ScheduleFileError(f"it claims {total:,} bytes; at most {max_bytes:,} are read.")
    content = {}
    for name, facts in files.items():
        data = _content(folder, name, facts["bytes"])
        if len(data) != facts["bytes"]:
            raise ScheduleFileError(f"{name} has {len(data):,} bytes, expected {facts['bytes']:,}.")
        if _digest(data) != facts.get("sha256"):
            expected = str(facts.get("sha256"))[:64]
            raise ScheduleFileError(f"{name}: digest mismatch: expected {expected}, got {_digest(data)}.")
        content[name] = data
    return content


def _content(folder: Path, name: str, max_bytes: int) -> bytes:
    with open_regular(folder / name, max_bytes, flags=_NOT_FOLLOWED) as file:
        return file.read(max_bytes + 1)


def _check_size(schedule: Schedule, payload: Payload, table_bytes: int) -> None:
    """Refuse a plan whose tables would be larger than those that are there, before they are made."""
    if schedule.total_chunks > payload.elements:
        raise ScheduleFileError(f"its plan cuts {payload.elements:,} elements into {schedule.total_chunks:,} chunks.")
    if schedule.repeats > 1 and not stays_folded(schedule):
        raise ScheduleFileError("its plan has more chunks than 32 bits count.")
    rows = schedule.n_steps if schedule.repeats == 1 else schedule.period
    if rows * schedule.mesh.n_chips * np.dtype(np.int32).itemsize > table_bytes:
        raise ScheduleFileError(f"its tables have {table_bytes:,} bytes, too few for a plan of {rows:,} steps.")


def _described(schedule: Schedule, tables: DeviceTables, payload: Payload, proof: Proof) -> dict[str, Any]:
    """Return all of a manifest that follows from a plan and a payload."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "collective": str(schedule.collective),
        "planner": schedule.planner,
        "mesh": json.loads(json.dumps(schedule.mesh.to_dict())),
        "steps": schedule.n_steps,
        "chunks": schedule.total_chunks,
        "axis": AXIS,
        "devices": len(tables.chips),
        "chips": tables.chips.tolist(),
        "stand_by": tables.stands_by,
        "payload": {"elements": payload.elements, "dtype": payload.dtype, "bytes": payload.n_bytes},
        "platforms": list(PLATFORMS),
        "program": PROGRAM,
        "plan": PLAN,
        "tables": list(tables.arrays),
        "proof": {
            "method": proof.method,
            "transfers": schedule.n_transfers,
            "false_pass_probability": proof.false_pass_probability,
        },
    }


def _as_npy(table: NDArray[np.generic]) -> bytes:
    written = io.BytesIO()
    np.save(written, np.ascontiguousarray(table), allow_pickle=False)
    return written.getvalue()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_known(name: str) -> bool:
    return name == MANIFEST or _FILE.fullmatch(name) is not None


def _is_word(word: Any) -> bool:
    return isinstance(word, str) and re.fullmatch(r"[\w.+-]{1,100}", word, re.ASCII) is not None
