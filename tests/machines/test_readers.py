"""Every format: what its files say, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest

from descriptions import OWN, OWN_CABLES, SAMPLES, removed, write_umd
from meshmend.errors import LayoutError, MachineError
from meshmend.machines import Machine, machine_of, parse_description, read_machine
from meshmend.planning import plan
from meshmend.schedule.verify import verify


def read(text: str, intended: str | None = None) -> Machine:
    wanted = None if intended is None else parse_description(intended, "intended")
    return machine_of(parse_description(text, "file"), wanted)


def test_cluster_descriptor_has_boards_and_a_preset() -> None:
    machine = read(SAMPLES["t3000"].text)
    assert (str(machine.mesh), machine.hardware) == ("2x4", "tenstorrent-t3000")
    assert machine.chips[0, 1].name == "chip 0"
    assert machine.chips[0, 1].host == "n300 70000000000000000"
    assert machine.chips[0, 0].host == machine.chips[0, 1].host


def test_a_lost_channel_is_a_slow_cable_and_a_lost_cable_has_failed() -> None:
    galaxy = SAMPLES["galaxy"]
    cables = {**galaxy.cables, (0, 1): 3, (9, 10): 1}
    del cables[17, 18]
    text = write_umd(type(galaxy)(**{**galaxy.__dict__, "cables": cables}))
    machine = read(text)
    at = {chip.name: coordinate for coordinate, chip in machine.chips.items()}
    rates = {frozenset(cable): rate for cable, rate in machine.mesh.cable_rates.items()}
    assert rates == {
        frozenset((at["chip 0"], at["chip 1"])): Fraction(3, 4),
        frozenset((at["chip 9"], at["chip 10"])): Fraction(1, 4),
    }
    assert [set(cable) for cable in machine.mesh.failed_cables] == [{at["chip 17"], at["chip 18"]}]


@pytest.mark.parametrize("name", ["galaxy", "t3000", "trainium2"])
def test_a_description_from_when_it_was_whole_settles_everything(name: str) -> None:
    sample, rng = SAMPLES[name], random.Random(4)
    whole = read(sample.text)
    for _ in range(3):
        hurt = removed(sample, rng, 2, 1)
        machine = read(hurt.text, sample.text)
        lost = set(sample.chips) - set(hurt.chips)
        names = {machine.chips[at].name.split(" (")[0] for at in machine.failed_chips}
        assert {int(n.split()[1]) for n in names} == lost
        assert machine.mesh.n_cables == len(hurt.cables)
        assert machine.chips.keys() == whole.chips.keys()
    stranger = sample.text.replace("100000000000000031", "5").replace('"neuron_device": 3,', '"neuron_device": 99,')
    if stranger != sample.text:
        with pytest.raises(MachineError, match=r"expected chips of intended \(.*\), got"):
            read(stranger, sample.text)


def test_neuron_ls_in_both_forms() -> None:
    rows = json.loads(SAMPLES["trainium2"].text)
    wrapped = json.dumps({"instance_id": "i-0abc", "instance_type": "trn2.48xlarge", "neuron_devices": rows})
    machine = read(wrapped)
    assert (str(machine.mesh), machine.hardware, machine.host((0, 0))) == ("4x4 torus", "trainium2", "i-0abc")
    gone = [row for row in rows if row["neuron_device"] != 5]  # its neighbours still list it
    holed = read(json.dumps(gone))
    assert holed.mesh.n_chips == 15
    assert [holed.chips[at].name for at in holed.failed_chips] == ["device 5"]
    rows[2]["connected_to"].remove(3)
    one_way = read(json.dumps(rows))
    assert len(one_way.mesh.failed_cables) == 1
    assert "Device 3 lists 2" in one_way.notes[0]


def test_a_description_of_our_own() -> None:
    machine = read(OWN)
    assert str(machine.mesh) == "4x8 wrapped on axis 1 minus 1x1@0,3, 2x2@2,0, 1 cable with 1 slow cable"
    assert (machine.hardware, machine.host((0, 5))) == ("tpu-v3", "node1")
    assert read(OWN.replace("failed: [", "failed: [node1, ")).mesh.n_chips == 16 - 5
    cables = parse_description(OWN_CABLES, "file")
    assert machine_of(cables, parse_description("meshmend: 1\nshape: 3x4\nwrap: '0'", "x")).mesh.is_full
    for text, words in {
        "meshmend: 2": "expected version 1 at meshmend, got 2",
        "meshmend: 1\nshap: 4x4": "expected only the fields .* got 'shap'",
        "meshmend: 1\nshape: 4x4\nfailed: [node9]": r"line 3: expected a chip, a host or a cable .* got 'node9'",
        "meshmend: 1\nshape: 4x4\nfailed: ['3x3@2,2']": "expected a box inside 4x4",
        "meshmend: 1\nshape: 4x4\nrates: {'0,0-0,1': 7}": "from 0 to 1",
        "meshmend: 1\nshape: 4x4\nrates: {'0,0-1,1': 1/2}": "not neighbours in 4x4",
        "meshmend: 1\nshape: 4x4x8_twisted": "twisted torus",
        "meshmend: 1\nshape: 99999x99999": "at most 65,536 chips",
        "meshmend: 1": "expected a field 'shape' or 'cables'",
        "meshmend: 1\ncables: [[a, a]]": "two different chips",
    }.items():
        with pytest.raises(MachineError, match=words):
            read(text)


def test_what_is_not_a_description_is_refused() -> None:
    with pytest.raises(MachineError, match="not a description of a machine that is known here"):
        read("hello: world")
    with pytest.raises(MachineError, match="line 3: expected YAML"):
        read("arch:\n  - {")
    with pytest.raises(MachineError, match="expected a chip that `arch` lists"):
        read("arch: {0: wormhole_b0}\nethernet_connections: [[{chip: 0, chan: 1}, {chip: 7, chan: 1}]]")
    with pytest.raises(LayoutError, match=r"the 2 parts \{chip 0, chip 1\} and \{chip 2, chip 3\}"):
        read(SAMPLES["2 n300"].without(cables=[(0, 3), (1, 2)]).text)


@pytest.mark.parametrize("name", ["galaxy", "blackhole galaxy", "trainium2"])
def test_a_proven_plan_comes_out(name: str) -> None:
    machine = read(SAMPLES[name].without(chips=[10]).text)
    started = time.process_time()
    schedule = plan(machine.mesh, payload_bytes=1e8, hardware=machine.hardware)
    assert time.process_time() - started < 3
    assert verify(schedule).method


FOLDER = os.environ.get("MESHMEND_MACHINES")
EXPECTED = {
    "tt_umd_6u_cluster_desc.yaml": "4x8",
    "tt_umd_blackhole_galaxy.yaml": "4x8 torus",
    "tt_umd_blackhole_8xP150.yaml": "2x4 wrapped on axis 1",
    "tt_umd_t3k_cluster_desc.yaml": "2x4",
    "tt_umd_2x2_n300_cluster_desc.yaml": "2x2",
    "neuron_ls_trn2.json": "4x4 torus",
    "tt_umd_wormhole_2xN300_unconnected.yaml": None,
}


@pytest.mark.skipif(FOLDER is None, reason="MESHMEND_MACHINES names no folder of descriptors")
@pytest.mark.parametrize("name", EXPECTED)
def test_descriptors_of_real_machines(name: str) -> None:
    assert FOLDER is not None
    if EXPECTED[name] is None:
        with pytest.raises(LayoutError, match="No cable joins the 2 parts"):
            read_machine(Path(FOLDER) / name)
    else:
        assert str(read_machine(Path(FOLDER) / name).mesh) == EXPECTED[name]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("meshmend: 1\nshape: 4x4\nfaild: []", "got 'faild'. Is failed meant"),
        ("meshmend: 1\nshape: 4x4\nfailed: [0,3]", r"line 3: .* got 0. Quote what has a comma in it: .0,3."),
        ("meshmend: 1\nshape: 4x4\nrates: {0,0-0,1: 1/2}", "expected a rate at rates.0, got nothing. Quote what has"),
        (
            "meshmend: 1\nshape: 4x4\nhosts: {a: '2x2@0,0', b: '2x2@1,1'}",
            r"one host at hosts.b, got \(1,1\), which a has",
        ),
        ('{"a": 1}', "not a description of a machine that is known here"),
        ("[]", "not a description of a machine that is known here"),
        ("meshmend: 1\nshape: 4by4", "^file: '4by4' is not a shape"),
        ("meshmend: 1\nshape: '0x4'", "1 to 8 axes and at most 65,536 chips"),
    ],
)
def test_mistakes_are_told_with_their_remedy(text: str, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        read(text)


def test_another_shape_than_the_files_own_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("meshmend: 1\nshape: 4x8\nwrap: '1'\nfailed: ['0,3']")
    with pytest.raises(
        MachineError, match="says that it is 4x8 wrapped on axis 1, got a 4x4 mesh as what was intended"
    ):
        read_machine(mine, shape="4x4")
    with pytest.raises(MachineError, match="got a 4x8 mesh as what was intended"):
        read_machine(mine, shape="4x8")
    assert read_machine(mine, shape="4x8", wrap=[False, True]).mesh == read_machine(mine).mesh


def test_cables_that_were_plugged_in_elsewhere_are_told() -> None:
    sample = SAMPLES["galaxy"]
    cables = {edge: n for edge, n in sample.cables.items() if edge != (0, 1)} | {(0, 18): 4}
    machine = read(dataclasses.replace(sample, cables=cables).text, sample.text)
    assert [sorted(machine.chips[end].name for end in c) for c in machine.mesh.failed_cables] == [["chip 0", "chip 1"]]
    assert machine.mesh.n_cables == 51
    assert any("1 cables are not in intended" in note and "chip 0 – chip 18" in note for note in machine.notes)
    with pytest.raises(MachineError, match=r"expected chips of intended \(a, b, …\), got chip 0.*matched by the ids"):
        read(sample.text, "meshmend: 1\nshape: 4x8\nchips: {a: [0, 0], b: [0, 1]}")
