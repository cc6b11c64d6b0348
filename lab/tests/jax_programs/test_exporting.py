"""Exports: run by JAX alone against NumPy's sums, compiled by the real TPU compiler, compared byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typer.testing import CliRunner

import meshmend as mm
import pages
from meshmend.cli import app
from meshmend.errors import ParameterError, ScheduleFileError
from meshmend.jax.compile.for_topology import CompilerError, compile_step, has_libtpu, slice_fabric
from meshmend.schedule.lanes import lower
from meshmend_lab.export.artefact import DeviceTables, Payload, read_artefact
from meshmend_lab.export.bystanders import inputs_of, with_bystanders
from meshmend_lab.export.exporting import check_program, export_artefact, exported, summing, versions_here
from random_schedules import random_schedule

HOLED = mm.Mesh("8x8", failed=["2x2@2,2"])
PAGE = pages.ROOT / "docs" / "export.md"
NO_MESHMEND = "import sys; sys.modules['meshmend'] = None; sys.argv = sys.argv[1:]; exec(open(sys.argv[0]).read())"
JUDGE = """
rows = np.random.default_rng(1).integers(-99, 99, payload.shape).astype(payload.dtype)
found = np.asarray(jax.jit(program.call)(jax.device_put(rows, split), *tables))
assert found.shape == rows.shape and (found == rows.sum(axis=0)).all(), "not NumPy's sum"
assert not any(name.split(".")[0] == "meshmend" for name, module in sys.modules.items() if module is not None)
print("judged", jax.__version__, len(jax.devices()))
"""
"""After the page's block: other numbers, whose sums are exact in float32, against NumPy's, on every device."""


def documented() -> tuple[pages.Block, pages.Block]:
    """The command and the ten lines of the page that are left to this file."""
    here = [block for block in pages.read(PAGE) if block.by == "lab/tests/jax_programs/test_exporting.py"]
    (command,) = [block for block in here if block.kind == "bash"]
    (lines,) = [block for block in here if block.kind == "python"]
    return command, lines


def run_page(python: str, folder: Path) -> str:
    """Run the page's ten lines, and the judge after them, in a process that has no meshmend."""
    script = folder / "alone.py"
    script.write_text(documented()[1].body + JUDGE, encoding="utf-8")
    hidden = {*pages.HIDDEN, "PYTHONPATH"}
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"JAX_PLATFORMS": "cpu"}
    command = [python, "-c", NO_MESHMEND, str(script)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def on_the_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's command writes."""
    folder = tmp_path_factory.mktemp("page")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    (line,) = [line for line in documented()[0].body.splitlines() if line.startswith("meshmend lab export")]
    words = [sys.executable, "-m", *line.split()]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_jax_alone_runs_the_pages_ten_lines(on_the_page: Path) -> None:
    lines = [line for line in documented()[1].body.splitlines() if line.strip()]
    assert len(lines) == 10, "as the page says"
    assert not re.search("meshmend", documented()[1].body.replace("meshmend lab export", ""))
    shown, judged = run_page(sys.executable, on_the_page).splitlines()
    assert shown == "(60, 250000) 60.0", "sixty ones"
    assert judged == f"judged {jax.__version__} 60"


@pytest.mark.slow
@pytest.mark.skipif(
    "MESHMEND_OTHER_JAX" not in os.environ,
    reason="needs MESHMEND_OTHER_JAX, the Python of an environment with another JAX, NumPy and flatbuffers",
)
def test_another_jax_runs_what_this_one_wrote(on_the_page: Path) -> None:
    python = os.environ["MESHMEND_OTHER_JAX"]
    version = subprocess.run(
        [python, "-c", "import jax; print(jax.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert version != jax.__version__
    assert run_page(python, on_the_page).splitlines()[-1] == f"judged {version} 60"


def test_an_export_of_another_process_is_the_same_to_the_last_byte(on_the_page: Path) -> None:
    artefact = read_artefact(on_the_page / "plan-artefact")
    assert artefact.schedule.mesh == HOLED
    assert check_program(artefact)
    for trace in (b"/root", b"/tmp", b".py", str(pages.ROOT).encode()):
        assert trace not in artefact.program, "nothing of the machine that wrote it"


def summed(artefact_tables: DeviceTables, payload: Payload, rows: np.ndarray) -> np.ndarray:
    """Run an export on this process's CPU devices."""
    program = jax.export.deserialize(bytearray(exported(artefact_tables, payload)))
    split = NamedSharding(Mesh(np.array(jax.devices()[: len(rows)]), ("chip",)), PartitionSpec("chip"))
    tables = [jax.device_put(table, split) for table in artefact_tables.arrays.values()]
    return np.asarray(jax.jit(program.call)(jax.device_put(rows, split), *tables))


@pytest.mark.parametrize("planner", ["weave", "hamiltonian", pytest.param("row-pairs", marks=pytest.mark.slow)])
def test_four_of_64_devices_stand_by(planner: str) -> None:
    """The healthy chips that are left out join every permute, keep their bits, and add nothing."""
    schedule = mm.plan(HOLED, planner, chunks=60) if planner == "weave" else mm.plan(HOLED, planner)
    tables = DeviceTables.of(schedule, stand_by=True)
    assert len(tables.chips) == 64
    rows = np.random.default_rng(0).integers(-99, 99, (64, 1201)).astype(np.float32)
    left_out = [8 * r + c for r in (2, 3) for c in (2, 3)]
    rows[left_out] = np.nan  # would be seen in any sum
    found = summed(tables, Payload(1201, "float32"), rows)
    takes_part = np.setdiff1d(np.arange(64), left_out)
    assert (found[takes_part] == rows[takes_part].sum(axis=0)).all()
    assert np.array_equal(found[left_out], rows[left_out], equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_may_be_any_of_the_devices(seed: int) -> None:
    """As a launcher numbers them; of a schedule that repeats as well."""
    rng = np.random.default_rng(seed)
    template = random_schedule(seed, collective=mm.Collective.ALL_REDUCE, max_chips=6, max_chunks=4)
    whole = template.repeated(3, 1 + seed % template.n_steps)
    n = whole.mesh.n_chips + 3
    places = rng.permutation(n)[: whole.mesh.n_chips].tolist()
    lowered = with_bystanders(lower(whole), places, n)
    mesh = Mesh(np.array(jax.devices()[:n]), ("chip",))
    tables = list(inputs_of(lowered).values())
    rows = rng.integers(-99, 99, (n, 101)).astype(np.int32)
    found = np.asarray(jax.jit(summing(lowered, mesh))(rows, tables))
    expected = rows.copy()
    expected[places] = rows[places].sum(axis=0)
    assert np.array_equal(found, expected)


def test_groups_of_devices_sum_side_by_side() -> None:
    """Three groups of two: the first of each sum among themselves, and so do the second. One device stands by."""
    groups = [[0, 1], [5, 2], [3, 6]]
    lowered = with_bystanders(lower(mm.plan(mm.Mesh("1x3"))), groups, 7)
    rows = np.random.default_rng(0).integers(-99, 99, (7, 11)).astype(np.int32)
    total = jax.jit(summing(lowered, Mesh(np.array(jax.devices()[:7]), ("chip",))))
    expected = rows.copy()
    expected[[0, 5, 3]] = rows[0] + rows[5] + rows[3]
    expected[[1, 2, 6]] = rows[1] + rows[2] + rows[6]
    assert np.array_equal(np.asarray(total(rows, list(inputs_of(lowered).values()))), expected)


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 5], [0, 1, 2, -1]])
def test_places_that_are_none(places: list[int]) -> None:
    with pytest.raises(ParameterError, match="places should be 4 different numbers from 0 to 4"):
        with_bystanders(lower(mm.plan(mm.Mesh("2x2"))), places, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_other_dtypes(dtype: str) -> None:
    tables = DeviceTables.of(mm.plan(mm.Mesh("3x3", failed=["1,1"]), "weave", chunks=16))
    rows = np.random.default_rng(0).integers(-9, 9, (8, 999)).astype(jax.numpy.dtype(dtype))
    found = summed(tables, Payload(999, dtype), rows)
    assert found.dtype == rows.dtype
    assert (found.astype(int) == rows.astype(int).sum(axis=0)).all()


def test_a_program_that_is_another_is_refused(tmp_path: Path) -> None:
    schedule = mm.plan(mm.Mesh("4x4", failed=["2x2@0,0"]), "hamiltonian")
    digest = export_artefact(schedule, tmp_path, payload_bytes=4000)
    artefact = read_artefact(tmp_path)
    assert artefact.digest == digest
    assert check_program(artefact)
    other = exported(DeviceTables.of(mm.plan(schedule.mesh, "weave")), artefact.payload)
    for program in (other, artefact.program[:-1], b""):
        with pytest.raises(ScheduleFileError, match="not the all-reduce of the plan"):
            check_program(replace(artefact, program=program))
    older = replace(artefact, program=other, versions=versions_here() | {"jax": "0.9.9"})
    assert not check_program(older), "not an error, and not approved"


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    mesh = mm.Mesh("4x4")
    with pytest.raises(ParameterError, match="Expected an all-reduce, got a schedule of a reduce-scatter"):
        export_artefact(mm.plan(mesh, collective="reduce-scatter"), tmp_path / "a", payload_bytes=1e6)
    with pytest.raises(ParameterError, match=r"into 64 chunks, but 40 bytes are 10 elements of float32"):
        export_artefact(mm.plan(mesh, "weave", chunks=64), tmp_path / "a", payload_bytes=40)
    with pytest.raises(ParameterError, match="The dtype is 'float64', expected one of: float32, bfloat16, int32"):
        export_artefact(mm.plan(mesh), tmp_path / "a", payload_bytes=1e6, dtype="float64")
    assert not (tmp_path / "a").exists()


def test_command_line(on_the_page: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(on_the_page / "plan-artefact", tmp_path / "copy")
    run = CliRunner()
    verified = json.loads(run.invoke(app, ["lab", "verify", str(folder), "--json"]).stdout)
    assert (verified["chips"], verified["program"]) == (60, "that of the plan, byte by byte")
    with (folder / "all_reduce.exported").open("ab") as file:
        file.write(b"x")
    refused = run.invoke(app, ["lab", "verify", str(folder)])
    assert refused.exit_code == 1
    assert "is damaged or is not an artefact: it has" in refused.stderr.replace("\n", " ")
    words = ["lab", "export", "4x4", "--fail", "0,0", "--payload", "1MB", "--stand-by", "--json", "-o"]
    facts = json.loads(run.invoke(app, [*words, str(tmp_path / "new")]).stdout)
    assert (facts["chips"], facts["devices"], facts["elements"]) == (15, 16, 250_000)
    assert facts["manifest_sha256"] == hashlib.sha256((tmp_path / "new" / "manifest.json").read_bytes()).hexdigest()
    (tmp_path / "new" / "notes").touch()
    refused = run.invoke(app, [*words, str(tmp_path / "new")])
    assert refused.exit_code == 1
    assert "holds other files, such as notes" in json.loads(refused.stdout)["message"]


@pytest.mark.skipif(not has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
@pytest.mark.parametrize(
    ("topology", "hole", "stand_by"),
    [
        ("v6e:8x8", "2x2@2,2", False),
        pytest.param("v4:4x4x4", "2x2x1@1,1,1", False, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", "2x2x1@1,1,1", False, marks=pytest.mark.slow),
        pytest.param("v6e:8x8", "2x2@2,2", True, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", "2x2x1@1,1,1", True, marks=pytest.mark.slow),
        pytest.param("v5e:8x8", "2x2@2,2", True, marks=pytest.mark.slow),
    ],
)
def test_the_tpu_compiler_makes_our_permutes_of_it_and_nothing_else(topology: str, hole: str, stand_by: bool) -> None:
    """Devices are found by the coordinates of the manifest, as docs/export.md says."""
    fabric = slice_fabric(topology, cores=1)
    schedule = mm.plan(fabric.mesh.fail(hole), "weave", chunks=60)
    tables, payload = DeviceTables.of(schedule, stand_by=stand_by), Payload.of(1e6, "float32")
    at = {tuple(device.coords)[: fabric.mesh.n_axes]: device for device in fabric.jax_mesh.devices.flat}
    devices = np.array([at[tuple(chip)] for chip in tables.chips.tolist()])
    assert len(devices) == (64 if stand_by else 60)
    split = NamedSharding(Mesh(devices, ("chip",)), PartitionSpec("chip"))
    shapes = [((len(devices), payload.elements), "float32")]
    shapes += [(table.shape, str(table.dtype)) for table in tables.arrays.values()]
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=split) for shape, dtype in shapes]
    program = jax.export.deserialize(bytearray(exported(tables, payload)))
    report, _ = compile_step(topology, jax.jit(program.call), fabric, *given)
    lanes = [len(loop.lanes) for loop in tables.lowered.loops]
    links = 2 * fabric.mesh.n_axes
    assert (report.permutes, report.other_collectives) == (sum(lanes), 0)
    assert report.in_flight == max(lanes) == links, "all links of a chip at once"


@pytest.mark.slow
@pytest.mark.skipif(not has_libtpu(), reason="needs the TPU compiler: pip install 'meshmend[tpu]'")
def test_on_v5e_chips_may_stand_by_but_not_be_missing() -> None:
    """The reason to stand by: the same plan is refused where the program leaves the four chips out."""
    with pytest.raises(CompilerError, match="limited ICI routing"):
        test_the_tpu_compiler_makes_our_permutes_of_it_and_nothing_else("v5e:8x8", "2x2@2,2", False)
