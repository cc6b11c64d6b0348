"""Files are untrusted input: whatever is in them, `load` returns a schedule or raises ScheduleFileError, quickly."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend import Mesh, Schedule, load, plan, save, verify
from meshmend.errors import ScheduleFileError
from meshmend.schedule import serialize
from meshmend.schedule.serialize import COLUMNS, to_text

SCHEDULES = {
    "holed": plan(Mesh("6x6", failed=["2x2@2,2"]), "row-pairs"),
    "torus": plan(Mesh("3x4", wrap=True), "two-color"),
    "cable": plan(Mesh("4x4", failed_cables=["1,0-2,0"]), "hamiltonian"),
    "alone": plan(Mesh("1x1"), "two-color"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_saved_is_loaded(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.npz"
    save(SCHEDULES[name], path)
    again = load(path)
    assert again == SCHEDULES[name]
    assert verify(again).chips == SCHEDULES[name].mesh.n_chips


def archive(tmp_path: Path, *, drop: str = "", **changes: Any) -> Path:
    """A saved schedule with members replaced by other arrays, or by raw bytes."""
    path = tmp_path / "plan.npz"
    save(SCHEDULES["holed"], path)
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    for name, value in changes.items():
        if isinstance(value, bytes):
            members[f"{name}.npy"] = value
        else:
            stream = io.BytesIO()
            np.save(stream, value)
            members[f"{name}.npy"] = stream.getvalue()
    members.pop(f"{drop}.npy", None)
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            target.writestr(name, data)
    return path


def column(name: str) -> NDArray[Any]:
    return np.array(getattr(SCHEDULES["holed"], name)).astype(COLUMNS[name])


def header(**changes: Any) -> NDArray[np.uint8]:
    facts = {
        "format": 1,
        "shape": [6, 6],
        "wrap": [False, False],
        "failed": ["2x2@2,2"],
        "failed_cables": [],
        "chunks": SCHEDULES["holed"].total_chunks,
        "collective": "all-reduce",
        "planner": "row-pairs",
        "phases": ["x"] * 8,
    }
    return np.frombuffer(json.dumps(facts | changes).encode(), dtype=np.uint8)


def raw(claim: str) -> bytes:
    """An .npy member with any claim in its header and hardly any data behind it."""
    text = claim.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\x00" * 16


class Bomb:
    """Executes code when unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/meshmend-was-here",)  # noqa: S108


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ScheduleFileError, match="archive is damaged"):
        load(tmp_path / "a.npz")
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(ScheduleFileError, match=r"step holds \|O"):
        load(archive(tmp_path, step=stream.getvalue()))
    assert not Path("/tmp/meshmend-was-here").exists()  # noqa: S108


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path)
    with zipfile.ZipFile(path, "a") as target, pytest.warns(UserWarning, match="Duplicate name"):
        target.writestr("step.npy", b"")
    with pytest.raises(ScheduleFileError, match=r"look at 'step\.npy'"):
        load(path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_the_packing_of_save_is_unpacked(tmp_path: Path, packing: int) -> None:
    path = archive(tmp_path)
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", packing) as target:
        for name, data in members.items():
            target.writestr(name, data)
    with pytest.raises(ScheduleFileError, match="an unexpected compression method"):
        load(path)


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    for names in ({"planner": "\x1b"}, {"phase_names": ("[b]",)}):
        schedule = Schedule(
            Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0],
            **names,
        )  # fmt: skip
        with pytest.raises(ScheduleFileError, match="cannot be in a file"):
            save(schedule, tmp_path / "plan.npz")
    good = Schedule(
        Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0], planner="é" * 200,
        phase_names=("größer (1/2): x",),
    )  # fmt: skip
    save(good, tmp_path / "plan.npz")
    assert load(tmp_path / "plan.npz") == good
    with pytest.raises(ScheduleFileError, match="cannot be written: Not a directory"):
        save(good, tmp_path / "plan.npz" / "plan.npz")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    device, pipe, folder, link = (tmp_path / f"{kind}.npz" for kind in ("device", "pipe", "folder", "link"))
    device.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (device, pipe, folder):
        with pytest.raises(ScheduleFileError, match="not a regular file"):
            load(path)
    save(SCHEDULES["alone"], tmp_path / "plan.npz")
    link.symlink_to(tmp_path / "plan.npz")
    assert load(link) == SCHEDULES["alone"]
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ScheduleFileError, match="not a regular file"):
        load(tmp_path / "device.npz")
    with pytest.raises(ScheduleFileError, match="bytes; at most 10 are read"):
        load(tmp_path / "plan.npz", max_bytes=10)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def told(path: Path, **arguments: Any) -> str:
    """The whole of what is said of a file that is refused, without its path."""
    with pytest.raises(ScheduleFileError) as caught:
        load(path, **arguments)
    return str(caught.value).removeprefix(str(path))


DAMAGED = " is damaged or is not a schedule: "
N = SCHEDULES["holed"].n_transfers
NO_HEADER = "step has no readable array header."
TOO_MANY_HOLES = "the holes in its header are larger than its mesh."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "step"}, "it should hold exactly the arrays of a schedule; look at 'step.npy'."),
        ({"extra": np.arange(3)}, "it should hold exactly the arrays of a schedule; look at 'extra.npy'."),
        ({"y" * 99: np.arange(3)}, f"it should hold exactly the arrays of a schedule; look at {'y' * 40!r}."),
        ({"src": column("src")[:-1]}, f"src has shape ({N - 1},), expected {N} numbers."),
        ({"step": np.array([1.5])}, "step holds <f8, expected <i4."),
        ({"op": column("op").astype("|i1")}, "op holds |i1, expected |u1."),
        ({"src": column("src").astype(">i4")}, "src holds >i4, expected <i4."),
        ({"step": column("step").reshape(2, -1)}, f"step has shape (2, {N // 2}), expected one number per transfer."),
        ({"step": raw("__import__('os').mkdir('/tmp/meshmend-was-here')")}, NO_HEADER),
        ({"step": raw("(" * 110)}, NO_HEADER),
        (
            {"step": raw("{'descr': '<i4', 'fortran_order': False, 'shape': (-4,), }")},
            NO_HEADER,
        ),
        ({"step": b""}, NO_HEADER),
        (
            {"dst": raw("{'descr': '<i4', 'fortran_order': False, 'shape': (5,), }")},
            "dst claims 20 bytes, but 16 are there.",
        ),
        (
            {"dst": raw("{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }")},
            "dst claims 12 bytes, but 16 are there.",
        ),
        ({"header": header(format=99)}, "its format is 99; this version of meshmend reads 1 and 2."),
        ({"header": header(format="1")}, "its format is '1'; this version of meshmend reads 1 and 2."),
        ({"header": np.frombuffer(b"[1]", np.uint8)}, "its format is 'list'; this version of meshmend reads 1 and 2."),
        ({"header": np.zeros(2**20 + 1, np.uint8)}, "its header has 1,048,577 bytes; at most 1,048,576 are read."),
        ({"header": header(shape="6x6")}, "shape in its header should be a list of int."),
        ({"header": header(shape=[6, True])}, "shape in its header should be a list of int."),
        ({"header": header(wrap=[0, 1])}, "wrap in its header should be a list of bool."),
        ({"header": header(failed=[6])}, "failed in its header should be a list of str."),
        ({"header": header(failed_cables=[6])}, "failed_cables in its header should be a list of str."),
        ({"header": header(failed_cables=None)}, "failed_cables in its header should be a list of str."),
        ({"header": header(phases=["x", 1])}, "phases in its header should be a list of str."),
        ({"header": header(phases=None)}, "phases in its header should be a list of str."),
        (
            {"header": np.frombuffer(b"\xff\xfe", np.uint8)},
            "its header is not JSON (Expecting value: line 1 column 1 (char 0)).",
        ),
        ({"header": header(phases=["x"] * 300)}, "A schedule has 1 to 256 phases: got 300."),
        ({"header": header(chunks=True)}, "chunks in its header should be int, got True."),
        ({"header": header(chunks=2.0)}, "chunks in its header should be int, got 2.0."),
        ({"header": header(collective=1)}, "collective in its header should be str, got 1."),
        ({"header": header(planner=None)}, "planner in its header should be str, got None."),
        (
            {"header": header(collective="broadcast")},
            "its collective 'broadcast' is none of all-reduce, reduce-scatter, all-gather, all-reduce-with-update.",
        ),
        ({"header": header(failed=["2x2@2,2"] * 10)}, TOO_MANY_HOLES),
        # A number of chips that 64 bits do not hold.
        (
            {"header": header(failed=["9999999x9999999x9999999@0,0,0"])},
            TOO_MANY_HOLES,
        ),
        ({"header": header(failed=["6x6@0,0"])}, "All 36 chips of the 6x6 mesh have failed."),
        (
            {"header": header(planner="a\nb")},
            "the name 'a\\nb' cannot be in a file: expected 1 to 200 printable characters without square brackets.",
        ),
        (
            {"header": header(planner="x" * 300)},
            f"the name {'x' * 200!r} cannot be in a file: expected 1 to 200 printable characters without square "
            "brackets.",
        ),
    ],
)
def test_what_is_said_of_an_archive(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert told(archive(tmp_path, **changes)) == DAMAGED + message
    assert not Path("/tmp/meshmend-was-here").exists()  # noqa: S108


# A terminal would act on these.
@pytest.mark.parametrize("name", ["x\x1b]0;owned\x07", "[bold red]all is well[/]", "all is well]", "\u202eelif", ""])
def test_no_name_in_a_file_can_do_harm(tmp_path: Path, name: str) -> None:
    for facts in ({"planner": name}, {"phases": [name, *["x"] * 7]}):
        said = told(archive(tmp_path, header=header(**facts)))
        assert f"the name {name!r} cannot be in a file: expected 1 to 200 printable" in said
        assert said.isprintable()


def test_what_is_said_of_files_that_are_none(tmp_path: Path) -> None:
    assert told(tmp_path / "plan.pkl") == f"{DAMAGED}its name ends in '.pkl', expected .npz. Save the schedule as .npz."
    assert told(tmp_path / "none.npz") == " cannot be read: No such file or directory."
    (tmp_path / "bad.npz").write_bytes(b"PK")
    assert told(tmp_path / "bad.npz") == f"{DAMAGED}the archive is damaged (File is not a zip file)."
    (tmp_path / "folder.npz").mkdir()
    assert told(tmp_path / "folder.npz") == f"{DAMAGED}it is not a regular file."
    with pytest.raises(ScheduleFileError) as caught:
        save(SCHEDULES["alone"], tmp_path / "plan.pkl")
    assert str(caught.value) == "plan.pkl ends in '.pkl'; a schedule is saved as .npz or .txt."
    with pytest.raises(ScheduleFileError) as caught:
        save(SCHEDULES["alone"], tmp_path / "none" / "plan.npz")
    assert str(caught.value) == f"{tmp_path}/none/plan.npz cannot be written: No such file or directory."


def test_sizes_up_to_the_limits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    save(SCHEDULES["holed"], path)
    with zipfile.ZipFile(path) as source:
        unpacked = sum(info.file_size for info in source.infolist())
    assert load(path, max_bytes=unpacked) == SCHEDULES["holed"]
    assert told(path, max_bytes=unpacked - 1) == (
        f"{DAMAGED}it claims {unpacked:,} bytes unpacked; at most {unpacked - 1:,} are read."
    )
    size = path.stat().st_size
    assert told(path, max_bytes=size - 1) == f"{DAMAGED}it has {size:,} bytes; at most {size - 1:,} are read."


def test_an_array_that_is_cut_short_is_refused() -> None:
    whole = raw("{'descr': '<i4', 'fortran_order': True, 'shape': (4,), }")
    assert serialize._read_array(io.BytesIO(whole), "step", "<i4", len(whole)).tolist() == [0] * 4
    with pytest.raises(ScheduleFileError) as caught:
        serialize._read_array(io.BytesIO(whole[:-4]), "step", "<i4", len(whole))
    assert str(caught.value) == "step is cut short: 12 of 16 bytes."


def test_text_is_written_to_the_letter() -> None:
    torus = to_text(SCHEDULES["torus"]).split("\n")
    assert torus[1] == (
        '{"shape": "3x4", "wrap": [true, true], "failed": [], "failed_cables": [], "chunks": '
        f'{SCHEDULES["torus"].total_chunks}, "collective": "all-reduce", "planner": "two-color", "phases": '
        f"{json.dumps(list(SCHEDULES['torus'].phase_names))}}}"
    )
    cable = json.loads(to_text(SCHEDULES["cable"]).split("\n")[1])
    assert (cable["failed"], cable["failed_cables"]) == ([], ["1,0-2,0"])
    assert json.loads(to_text(SCHEDULES["holed"]).split("\n")[1])["failed"] == ["2x2@2,2"]
    runs = Schedule(
        Mesh("1x2"), total_chunks=5, step=[0, 1], src=[1, 0], dst=[0, 1], first_chunk=[0, 2], n_chunks=[5, 1],
        op=[0, 1], owners=[0, 0, 1, 1, 0], phase=[1, 0], phase_names=("a", "b"),
    )  # fmt: skip
    assert to_text(runs).split("\n")[2:] == [
        "owners (0,0)*2 (0,1)*2 (0,0)",
        "step 0",
        "  (0,1) -> (0,0)  chunks 0..4  reduce  phase 1",
        "step 1",
        "  (0,0) -> (0,1)  chunk 2  copy  phase 0",
        "",
    ]
