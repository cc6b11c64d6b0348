"""Saved plans, damaged and forged at random: an error, or a schedule with the right verdict.

`pytest -m slow tests/schedule/test_mutated_files.py` reads 10,000 of them.
"""

from __future__ import annotations

import io
import json
import random
import resource
import struct
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counting import is_right
from meshmend import Mesh, Schedule, load, plan, save, verify
from meshmend.errors import ScheduleFileError, VerificationError
from meshmend.schedule.serialize import COLUMNS
from random_schedules import random_schedule

Members = dict[str, bytes]
"""Names and contents of an archive."""


def schedules() -> list[Schedule]:
    """Some that planners made and some that they would not, all small enough to be counted by hand."""
    planned = [plan(Mesh("2x2"), "hamiltonian"), plan(Mesh("2x4", failed=["1x2@0,0"], wrap=True), "weave", chunks=3)]
    return planned + [random_schedule(seed, max_chips=8, max_chunks=6) for seed in range(12)]


def bits(rng: random.Random, data: bytes) -> bytes:
    """Flip a few bits, most of them near each other."""
    damaged = bytearray(data)
    at = rng.randrange(len(data))
    for _ in range(rng.randint(1, 8)):
        damaged[at % len(data)] ^= 1 << rng.randrange(8)
        at = rng.choice([at + 1, at + rng.randint(-20, 20), rng.randrange(len(data))])
    return bytes(damaged)


def cut(rng: random.Random, data: bytes) -> bytes:
    """Take out a piece: the end, the start, or something between."""
    first, last = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return rng.choice([data[:first], data[last:], data[:first] + data[last:], data[:last] + data[first:]])


def sizes(rng: random.Random, data: bytes) -> bytes:
    """Forge a field of the archive's own directory: sizes, offsets, flags, methods, counts."""
    damaged = bytearray(data)
    mark = rng.choice([b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"])
    places = [i for i in range(len(data)) if data.startswith(mark, i)]
    at = rng.choice(places) + 4 + rng.randrange(42)
    value = rng.choice([0, 1, 2**16 - 1, 2**31, 2**32 - 1, rng.getrandbits(32)])
    damaged[at : at + 4] = struct.pack("<I", value)[: rng.choice([1, 2, 4])].ljust(1, b"\0")
    return bytes(damaged)


def numbers(rng: random.Random, members: Members) -> Members:
    """Change numbers of one or more columns."""
    for name in rng.sample(list(COLUMNS), rng.randint(1, 2)):
        column = np.load(io.BytesIO(members[f"{name}.npy"])).copy()
        if not len(column):
            continue
        at = rng.randrange(len(column))
        match rng.choice(["one", "swap", "longer", "shorter", "all", "shuffle"]):
            case "one":
                column[at] = rng.choice([int(column[at]) ^ 1, 0, 1, 255 if name in ("op", "phase") else 2**31 - 1])
            case "swap":
                other = rng.randrange(len(column))
                column[[at, other]] = column[[other, at]]
            case "longer":
                column = np.append(column, column[at])
            case "shorter":
                column = np.delete(column, at)
            case "all":
                column[:] = column[at]
            case "shuffle":
                column = column[np.random.default_rng(rng.getrandbits(32)).permutation(len(column))]
        members[f"{name}.npy"] = npy(column)
    return members


def header(rng: random.Random, members: Members) -> Members:
    """Change a fact of the header."""
    facts = json.loads(np.load(io.BytesIO(members["header.npy"])).tobytes())
    key = rng.choice(list(facts))
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        2,
        2**31 - 1,
        2**63,
        10**400,
        float("nan"),
        float("inf"),
        1.5,
        "",
        "\x1b[2J",
    ]
    values += ["\x1b[2J", [], [1], [2, 2], [2**24, 2], [[1]], {"a": 1}, ["0,0"], ["9,9"], ["0,0-0,1"], ["x"]]
    values += ["all-reduce", "reduce-scatter", [True, False], ["9" * 5000], "[" * 100, [4, 4, 4, 4], ["x"] * 300]
    facts[key] = rng.choice(values)
    if rng.random() < 0.2:
        del facts[rng.choice(list(facts))]
    members["header.npy"] = npy(np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8))
    return members


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def packed(members: Members) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


ON_BYTES = (bits, cut, sizes)
ON_MEMBERS = (numbers, header)


def mutate(rng: random.Random, archive: bytes) -> tuple[str, bytes]:
    """Return the kind of damage and the file's content."""
    kind = rng.choice([*ON_BYTES, *ON_MEMBERS])
    if kind in ON_BYTES:
        return kind.__name__, kind(rng, archive)
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        members = {name: source.read(name) for name in source.namelist()}
    return kind.__name__, packed(kind(rng, members))  # type: ignore[operator]


def verdict_on(schedule: Schedule) -> str:
    try:
        verify(schedule)
    except VerificationError:
        return "wrong"
    return "proven"


@pytest.mark.parametrize("n_files", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_mutated_file_is_refused_or_gets_the_right_verdict(tmp_path: Path, n_files: int) -> None:
    rng = random.Random(n_files)
    path, sources = tmp_path / "plan.npz", []
    for source in schedules():
        save(source, path)
        sources.append(path.read_bytes())
    outcomes: Counter[tuple[str, str]] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(n_files):
        kind, content = mutate(rng, rng.choice(sources))
        path.write_bytes(content)
        started, message = time.process_time(), ""
        schedule: Schedule | None
        try:
            schedule = load(path)
            verdict = verdict_on(schedule)
        except ScheduleFileError as error:
            schedule, verdict, message = None, "refused", str(error)
        outcomes[kind, verdict] += 1
        assert time.process_time() - started < 20, (number, kind)
        assert message.isprintable(), (number, kind)
        if schedule is not None and schedule.mesh.n_chips * schedule.total_chunks < 10_000:
            assert is_right(schedule) == (verdict == "proven"), (number, kind)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    assert grown < 700, f"{grown:.0f} MB more than before"
    for verdict in ("refused", "wrong", "proven"):
        assert sum(n for (_, v), n in outcomes.items() if v == verdict) >= n_files // 100, outcomes
    assert len({kind for kind, _ in outcomes}) == len({*ON_BYTES, *ON_MEMBERS})
