"""Artefacts as files: what was written is read, and whatever else is in the folder is refused, whatever its digest."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshmend as mm
from meshmend.errors import ParameterError, ScheduleFileError
from meshmend_lab.export.artefact import (
    MANIFEST,
    PLAN,
    PROGRAM,
    Artefact,
    DeviceTables,
    Payload,
    read_artefact,
    write_artefact,
)

VERSIONS = {"meshmend": "1.2", "jax": "0.10.2"}
MESH = mm.Mesh("4x4", failed=["2x2@0,0"])


@cache
def planned(planner: str) -> mm.Schedule:
    return mm.plan(MESH, planner, chunks=24) if planner == "weave" else mm.plan(MESH, planner)


def written(folder: Path, *, stand_by: bool = False, planner: str = "weave") -> Path:
    """An artefact whose program is any bytes: nothing here looks into it."""
    schedule = planned(planner)
    tables = DeviceTables.of(schedule, stand_by=stand_by)
    write_artefact(folder, schedule, tables, Payload(1000, "float32"), b"a program", VERSIONS)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None], *, digests: bool = True) -> None:
    """Change a manifest as an attacker would, who also mends sizes and digests."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    if digests:
        for name, facts in manifest["files"].items():
            data = (folder / name).read_bytes()
            facts |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest), encoding="utf-8")


def nothing(manifest: dict[str, Any]) -> None:
    """Only the digests are mended."""


@pytest.mark.parametrize("stand_by", [False, True])
def test_what_was_written_is_read(tmp_path: Path, stand_by: bool) -> None:
    read = read_artefact(written(tmp_path, stand_by=stand_by))
    assert isinstance(read, Artefact)
    assert read.schedule == planned("weave")
    assert (read.program, dict(read.versions), read.payload.n_bytes) == (b"a program", VERSIONS, 4000)
    assert read.digest == hashlib.sha256((tmp_path / MANIFEST).read_bytes()).hexdigest()
    assert [tuple(at) for at in read.tables.chips] == [
        (r, c) for r in range(4) for c in range(4) if stand_by or not (r < 2 and c < 2)
    ], "row by row, in the order of the devices"
    manifest = json.loads((tmp_path / MANIFEST).read_text(encoding="utf-8"))
    assert manifest["tables"] == list(read.tables.arrays)
    for name, table in read.tables.arrays.items():
        np.testing.assert_array_equal(np.load(tmp_path / name, allow_pickle=False), table)


@pytest.mark.parametrize("name", ["plan.npz", "all_reduce.exported", "table_0_send.npy"])
def test_a_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    path = written(tmp_path) / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ScheduleFileError, match=rf"not an artefact: {name}: digest mismatch: expected \w{{64}}, got"):
        read_artefact(tmp_path)
    path.write_bytes(data[:-1])
    with pytest.raises(ScheduleFileError, match=rf"{name} has [\d,]+ bytes, expected"):
        read_artefact(tmp_path)
    path.unlink()
    with pytest.raises(ScheduleFileError, match=rf"{name} cannot be read: No such file"):
        read_artefact(tmp_path)


def test_tables_are_those_of_the_plan_whatever_their_digests(tmp_path: Path) -> None:
    arrays = read_artefact(written(tmp_path)).tables.arrays
    for name, table in arrays.items():
        for other in (np.roll(table, 1, axis=0), table.astype(np.int64), table[:, :-1]):
            np.save(tmp_path / name, other)
            rewritten(tmp_path, nothing)
            with pytest.raises(ScheduleFileError, match=f"{name} is not what the plan says.*export the plan again"):
                read_artefact(tmp_path)
        np.save(tmp_path / name, table)
    rewritten(tmp_path, nothing)
    assert read_artefact(tmp_path).proof.chips == 12


def test_the_plan_is_proven_again(tmp_path: Path) -> None:
    schedule = planned("weave")
    short = schedule.replace(np.arange(schedule.n_transfers - 1))
    tables = DeviceTables.of(short)
    written(tmp_path)
    for path in tmp_path.glob("table*"):
        path.unlink()
    for name, table in tables.arrays.items():
        np.save(tmp_path / name, table)
    mm.save(short, tmp_path / PLAN)
    rewritten(tmp_path, lambda manifest: manifest.update(files={name: {} for name in [PLAN, PROGRAM, *tables.arrays]}))
    with pytest.raises(ScheduleFileError, match=r"not an artefact: Chip \(\d,\d\) ends with a wrong chunk"):
        read_artefact(tmp_path)


def test_only_an_all_reduce_is_one(tmp_path: Path) -> None:
    written(tmp_path)
    mm.save(mm.plan(MESH, collective="reduce-scatter"), tmp_path / PLAN)
    rewritten(tmp_path, nothing)
    with pytest.raises(ScheduleFileError, match=r"plan\.npz is a reduce-scatter, expected an all-reduce"):
        read_artefact(tmp_path)


def claim(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = key.split("/")
        for step in path:
            manifest = manifest[step]
        manifest[last] = value

    return change


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kind", "another", "something else"),
        ("format", 2, "its format is '2'; this version of meshmend reads 1"),
        ("format", True, "its format is 'True'"),
        ("versions", {"jax": "\x1b[2J"}, "versions in manifest.json should be"),
        ("versions", None, "versions in manifest.json should be"),
        ("stand_by", 1, "stand_by in manifest.json should be true or false"),
        ("stand_by", True, r"table_0_ops.npy|is not what the plan says"),
        ("payload", {"elements": 1000}, "payload in manifest.json should have"),
        ("payload/elements", True, "payload in manifest.json should have"),
        ("payload/elements", 0, "0 elements, expected 1 to"),
        ("payload/elements", 2**70, "elements, expected 1 to"),
        ("payload/elements", 3, "its plan cuts 3 elements into"),
        ("payload/dtype", "object", "The dtype is 'object'"),
        ("payload/bytes", 4001, "payload in manifest.json is not that of its plan"),
        ("files", [], "files in manifest.json should list"),
        ("files", {}, "files in manifest.json should list"),
        ("files/plan.npz", 5, "the bytes and the sha256 of plan.npz"),
        ("files/plan.npz/bytes", -1, "the bytes and the sha256 of plan.npz"),
        ("files/plan.npz/bytes", 2**40, r"it claims [\d,]+ bytes; at most"),
        ("files/plan.npz/sha256", None, "plan.npz: digest mismatch: expected None"),
        ("files/..%2Fx", {"bytes": 0, "sha256": ""}, "is no file of an artefact"),
        ("mesh/failed", [], "mesh in manifest.json is not that of its plan"),
        ("chips", [[0, 0]], "chips in manifest.json is not that of its plan"),
        ("tables", ["table_0_send.npy"], "tables in manifest.json is not that of its plan"),
        ("program", "/bin/sh", "program in manifest.json is not that of its plan"),
        ("proof/false_pass_probability", 0.5, "proof in manifest.json is not that of its plan"),
        ("collective", "all-gather", "collective in manifest.json is not that of its plan"),
    ],
)
def test_what_a_manifest_claims_is_checked(tmp_path: Path, key: str, value: object, message: str) -> None:
    rewritten(written(tmp_path), claim(key, value), digests=False)
    with pytest.raises(ScheduleFileError, match=message):
        read_artefact(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/table_0_send.npy", ".hidden", "table_0_send.npy\n"])
def test_no_file_is_read_that_is_not_in_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("a secret")
    folder = written(tmp_path / "artefact")
    rewritten(folder, lambda manifest: manifest["files"].update({name: {"bytes": 8, "sha256": ""}}), digests=False)
    with pytest.raises(ScheduleFileError, match="is no file of an artefact"):
        read_artefact(folder)


@pytest.mark.parametrize("name", [PROGRAM, MANIFEST])
def test_links_and_pipes_are_refused(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "artefact")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ScheduleFileError, match=f"{name} cannot be read: Too many levels of symbolic links"):
        read_artefact(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ScheduleFileError, match="it is not a regular file"):
        read_artefact(folder)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", "nul", '{"kind": "meshmend all-reduce"}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (written(tmp_path) / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleFileError, match="is damaged or is not an artefact"):
        read_artefact(tmp_path)


def test_a_long_manifest_is_not_read(tmp_path: Path) -> None:
    with (written(tmp_path) / MANIFEST).open("ab") as file:
        file.truncate(2**30)
    with pytest.raises(ScheduleFileError, match="it has 1,073,741,824 bytes; at most 16,777,216 are read"):
        read_artefact(tmp_path)


def test_a_plan_with_tables_beyond_memory_is_refused_before_they_are_made(tmp_path: Path) -> None:
    """Two of 65,536 chips send each other one chunk, in 20,000 steps: kilobytes of plan, gigabytes of tables."""
    written(tmp_path)
    n = 20_000
    there = np.arange(n) % 2
    large = mm.Schedule(
        mm.Mesh("256x256"), total_chunks=1, step=np.arange(n), src=there, dst=1 - there,
        first_chunk=0, n_chunks=1, op=0, owners=[0],
    )  # fmt: skip
    mm.save(large, tmp_path / PLAN)
    assert (tmp_path / PLAN).stat().st_size < 100_000
    rewritten(tmp_path, nothing)
    with pytest.raises(ScheduleFileError, match=r"tables have [\d,]+ bytes, too few for a plan of 20,000 steps"):
        read_artefact(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, planner="hamiltonian")  # replaces it, and leaves no table of the first
    assert read_artefact(tmp_path).schedule.planner == "hamiltonian"
    (tmp_path / "thesis.tex").write_text("…", encoding="utf-8")
    with pytest.raises(ParameterError, match=r"holds other files, such as thesis\.tex"):
        written(tmp_path)
    assert read_artefact(tmp_path).schedule.planner == "hamiltonian"


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    "",
    "../..",
    "x" * 5000,
    "\x00",
    [],
    {},
    [[]],
    {"bytes": 1},
    ["plan.npz"],
]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(found for key, one in inside for found in places_in(one, (*path, key)))]


def test_a_manifest_with_anything_anywhere_is_refused_or_means_the_same(tmp_path: Path) -> None:
    text = (written(tmp_path) / MANIFEST).read_text(encoding="utf-8")
    same = read_artefact(tmp_path)
    rng = random.Random(0)
    places = [place for place in places_in(json.loads(text)) if place[0] != "chips" or rng.random() < 0.2]
    n_refused = 0
    for place in places:
        manifest = json.loads(text)
        holder = manifest
        for step in place[:-1]:
            holder = holder[step]
        old, holder[place[-1]] = holder[place[-1]], rng.choice(ODD)
        (tmp_path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        try:
            found = read_artefact(tmp_path)
        except ScheduleFileError:
            n_refused += 1
        else:
            assert place[0] == "versions" or holder[place[-1]] == old, place
            assert found.schedule == same.schedule
    assert n_refused > 50


def test_a_damaged_plan_with_the_right_digest_is_refused_or_proven(tmp_path: Path) -> None:
    data = (written(tmp_path) / PLAN).read_bytes()
    rng = random.Random(1)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / PLAN).write_bytes(damaged)
        rewritten(tmp_path, nothing)
        try:
            assert read_artefact(tmp_path).schedule == planned("weave")
        except ScheduleFileError:
            continue
