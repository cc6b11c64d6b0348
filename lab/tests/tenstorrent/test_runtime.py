"""Tenstorrent's runtime: where its meshes lie in our layout, which of its answers are kept, and how it is asked."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import tenstorrent
from meshmend.errors import MachineError
from meshmend.machines import parse_description
from meshmend.topology import Mesh
from meshmend_lab.tenstorrent.numbered import NumberedMachine, numbered
from meshmend_lab.tenstorrent.runtime import RuntimeMesh, answer_of, ask, measured
from rows import others_slow
from runtime_losses import GALAXIES, KEPT, machine_without, sample_of

Pair = frozenset[int]


def joined(machine: NumberedMachine) -> set[Pair]:
    """Pairs of devices that a cable of our mesh joins."""
    mesh = machine.mesh
    return {frozenset(machine.devices[mesh.chip(end)] for end in cable) for cable in mesh.cables.tolist()}


def extra(name: str) -> set[Pair]:
    """Cables of the machine that are none of our mesh's."""
    return {frozenset(edge) for edge in sample_of(name).cables} - joined(machine_without(name))


def test_every_single_chip_and_every_board_of_both_galaxies_was_asked_about() -> None:
    for name in GALAXIES:
        lost = [frozenset(map(tuple, loss["lost"])) for loss in KEPT[name]["losses"]]
        chips = {frozenset([at]) for at in itertools.product(range(4), range(8))}
        boards = {frozenset(itertools.product((r, r + 1), (c, c + 1))) for r in range(3) for c in range(7)}
        assert set(lost) == chips | boards
        assert len(lost) == 32 + 21
        assert all(loss["opened"] is not None for loss in KEPT[name]["losses"])


@pytest.mark.parametrize("name", KEPT)
def test_the_whole_machine_is_laid_out_as_its_runtime_does(name: str) -> None:
    """Every pair of neighbours in its mesh are neighbours in ours; ours has the wrap cables besides, and no others."""
    kept, machine = KEPT[name], machine_without(name)
    theirs = {
        frozenset(pair)
        for pair in RuntimeMesh(tuple(kept["whole"]["shape"]), tuple(kept["whole"]["devices"])).neighbours
    }
    assert sorted(kept["whole"]["devices"]) == sorted(machine.devices.values())
    assert theirs <= joined(machine)
    n_wrap = sum(
        machine.mesh.size // length
        for length, wraps in zip(machine.mesh.shape, machine.mesh.wrap, strict=True)
        if wraps
    )
    assert len(joined(machine) - theirs) == n_wrap
    assert len(extra(name)) == {"blackhole galaxy": 68 - 64}.get(name, 0)


@pytest.mark.parametrize("name", others_slow(KEPT, quick=["galaxy"]))
def test_with_chips_lost_its_meshes_lie_on_cables_of_ours(name: str) -> None:
    unused = extra(name)
    for loss in KEPT[name]["losses"]:
        machine = machine_without(name, loss["chips"])
        cables, at = joined(machine), {device: at for at, device in machine.devices.items()}
        assert sorted(machine.failed_chips) == sorted(map(tuple, loss["lost"])), "where the script put it"
        for key in ("opened", "asked", "line"):
            if loss.get(key) is None:
                continue
            mesh = RuntimeMesh(tuple(loss[key]["shape"]), tuple(loss[key]["devices"]))
            assert len(set(mesh.devices)) == len(mesh.devices) == np.prod(mesh.shape)
            assert not set(mesh.devices) & set(loss["chips"])
            assert {frozenset(pair) for pair in mesh.neighbours} <= cables | unused
            if name == "galaxy" and min(mesh.shape) > 1:  # a rectangle of ours: all distances are the same
                places = list(itertools.product(*map(range, mesh.shape)))
                apart = [abs(a - c) + abs(b - d) for (a, b), (c, d) in itertools.product(places, repeat=2)]
                ours = [at[device] for device in mesh.devices]
                assert [abs(a - c) + abs(b - d) for (a, b), (c, d) in itertools.product(ours, repeat=2)] == apart


@pytest.mark.parametrize("name", KEPT)
def test_what_was_measured_is_found_for_every_loss_and_its_mirror_images(name: str) -> None:
    kept = KEPT[name]
    rows, columns = kept["shape"]
    for loss in kept["losses"]:
        for flip_rows, flip_columns in itertools.product((False, True), repeat=2):
            image = [
                (rows - 1 - r if flip_rows else r, columns - 1 - c if flip_columns else c) for r, c in loss["lost"]
            ]
            answer = measured(Mesh((rows, columns), wrap=kept["wrap"], failed=image), kept["hardware"])
            assert answer is not None
            assert (answer.opened and list(answer.opened.shape)) == (loss["opened"] and loss["opened"]["shape"])
            for mesh, key in ((answer.asked, "asked"), (answer.line, "line")):
                if loss.get(key) is not None:
                    assert mesh is not None
                    assert len(mesh.devices) == len(loss[key]["devices"])
                    assert list(mesh.shape) == loss[key]["shape"]


def test_other_losses_were_not_measured() -> None:
    hardware = KEPT["galaxy"]["hardware"]
    whole = measured(Mesh("4x8"), hardware)
    assert whole is not None
    assert whole.opened is not None
    assert whole.opened.shape == (8, 4)
    assert measured(Mesh("4x8", failed=["0,0", "3,7"]), hardware) is None
    assert measured(Mesh("4x8", failed_cables=["0,0-0,1"]), hardware) is None
    assert measured(Mesh("4x8", cable_rates={"0,0-0,1": "1/2"}), hardware) is None
    assert measured(Mesh("4x8", failed=["0,0"]), "tpu-v6e") is None
    assert measured(Mesh("8x8", failed=["0,0"]), hardware) is None


def fake_python(folder: Path, script: str) -> str:
    """A program that answers in place of a Python with ttnn."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_another_loss_is_asked_about_if_a_python_with_ttnn_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_without("galaxy", [0, 31])
    monkeypatch.delenv("MESHMEND_TTNN", raising=False)
    assert answer_of(machine) is None
    answer = json.dumps({"ttnn": "9.9", "shape": [2, 1], "devices": [7, 8]})
    python = fake_python(tmp_path, f"basename $TT_METAL_MOCK_CLUSTER_DESC_PATH\necho 'MESHMEND {answer}'")
    monkeypatch.setenv("MESHMEND_TTNN", python)
    found = answer_of(machine)
    assert found is not None
    assert (found.opened, found.how) == (RuntimeMesh((2, 1), (7, 8)), "asked just now, ttnn 9.9")
    fake_python(tmp_path, "echo 'critical | TT_FATAL: no such thing (assert.hpp:104)'; exit 1")
    none = answer_of(machine)
    assert none is not None
    assert none.opened is None
    assert "TT" not in none.how
    assert "opens no mesh on this machine: no such thing" in none.how
    monkeypatch.setenv("MESHMEND_TTNN", str(tmp_path / "nothing"))
    with pytest.raises(MachineError, match=r"cannot ask ttnn: .*No such file"):
        answer_of(machine)


def test_the_users_own_mesh_graph_is_handed_over(tmp_path: Path) -> None:
    python = fake_python(tmp_path, 'echo "MESHMEND {\\"graph\\": \\"$(cat $TT_MESH_GRAPH_DESC_PATH)\\"}"')
    assert ask(tmp_path / "x.yaml", python, mesh_graph="dims 7 4") == {"graph": "dims 7 4"}


def test_lost_chips_leave_the_descriptor_and_the_others_are_numbered_without_gaps() -> None:
    whole = {
        "arch": {0: "w", 1: "w", 2: "w"},
        "chips": {},
        "chip_unique_ids": {0: 100, 1: 101, 2: 102},
        "ethernet_connections": [
            [{"chip": 0, "chan": 4}, {"chip": 1, "chan": 5}],
            [{"chip": 1, "chan": 6}, {"chip": 2, "chan": 7}],
            [{"chip": 2, "chan": 8}, {"chip": 0, "chan": 9}],
        ],
        "ethernet_connections_to_remote_devices": [[{"chip": 2, "chan": 1}, {"remote_chip_id": 7, "chan": 1}]],
        "chips_with_mmio": [{0: 0}, {1: 1}, {2: 2}],
        "boards": [[{"board_type": "x"}, {"chips": [0, 2]}], [{"board_type": "x"}, {"chips": [1]}]],
    }
    assert tenstorrent.without(whole, [1]) == {
        "arch": {0: "w", 1: "w"},
        "chips": {},
        "chip_unique_ids": {0: 100, 1: 102},
        "ethernet_connections": [[{"chip": 1, "chan": 8}, {"chip": 0, "chan": 9}]],
        "ethernet_connections_to_remote_devices": [[{"chip": 1, "chan": 1}, {"remote_chip_id": 7, "chan": 1}]],
        "chips_with_mmio": [{0: 0}, {1: 2}],
        "boards": [[{"board_type": "x"}, {"chips": [0, 1]}]],
    }


def test_devices_and_channels_are_todays() -> None:
    """The driver numbers what it finds: chips after the lost one move up, and keep their unique ids and channels."""
    sample = sample_of("galaxy")
    text = yaml.safe_dump(tenstorrent.without(yaml.safe_load(sample.text), [9]))
    whole = machine_without("galaxy")
    today = numbered(parse_description(text, "today"), parse_description(sample.text, "whole"))
    assert today.devices == {at: old - (old > 9) for at, old in whole.devices.items() if old != 9}
    lost = next(at for at, device in whole.devices.items() if device == 9)
    assert today.channels == {cable: ends for cable, ends in whole.channels.items() if lost not in cable}
    assert len(whole.channels) == 52
    assert {len(ends) for ends in whole.channels.values()} == {4}


PYTHON, FOLDER = os.environ.get("MESHMEND_TTNN"), os.environ.get("MESHMEND_MACHINES")


@pytest.mark.slow
@pytest.mark.skipif(
    PYTHON is None or FOLDER is None,
    reason="MESHMEND_TTNN names no Python with ttnn, or MESHMEND_MACHINES no folder of descriptors",
)
@pytest.mark.parametrize("name", KEPT)
def test_the_runtime_still_answers_what_is_kept(name: str) -> None:
    script = Path(tenstorrent.__file__)
    words = [sys.executable, script, "check", PYTHON, FOLDER, "--only", KEPT[name]["file"]]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("without") == len(KEPT[name]["losses"])


@pytest.mark.slow
def test_the_page_has_what_was_measured_and_predicted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tenstorrent.md").read_text(encoding="utf-8")
    assert tenstorrent.table(1e8) in page, "run: python lab/benchmarks/tenstorrent.py table"
