"""Chip programs: their JSON fits its schema, and an interpreter that reads nothing else ends with exact sums."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest

from meshmend.errors import MachineError, ScheduleError
from meshmend.planning import Planner, Weave, plan
from meshmend.schedule import Collective
from meshmend.topology import Mesh
from meshmend_lab.tenstorrent.chip_programs import chip_programs, chip_programs_schema
from meshmend_lab.tenstorrent.numbered import NumberedMachine
from runtime_losses import GALAXIES, KEPT, machine_without, sample_of

OPPOSITE = {"N": "S", "S": "N", "E": "W", "W": "E"}
RUNTIME_DIRECTIONS = {0: "E", 1: "W", 2: "N", 3: "S"}
"""`eth_chan_directions` of tt-metal."""
VALIDATOR = jsonschema.Draft202012Validator(chip_programs_schema())


def replay(text: str, payload: dict[int, Any]) -> dict[int, Any]:
    """Run programs on arrays of one row per chunk, by device; it knows the JSON, and nothing of meshmend."""
    programs = json.loads(text)
    held = {device: values.copy() for device, values in payload.items()}
    assert sorted(held) == sorted(chip["device"] for chip in programs["chips"])
    by_step: dict[int, dict[int, Any]] = {}
    for chip in programs["chips"]:
        numbers = [step["step"] for step in chip["program"]]
        assert numbers == sorted(set(numbers)), "steps in order, each once"
        near = {(one["device"], one["direction"]) for one in chip["neighbours"]}
        for step in chip["program"]:
            by_step.setdefault(step["step"], {})[chip["device"]] = step
            assert {(one["to"], one["direction"]) for one in step["sends"]} <= near
            assert {(one["from"], one["direction"]) for one in step["receives"]} <= near
    assert sorted(by_step) == list(range(programs["steps"]))
    for step in sorted(by_step):
        sent = Counter(
            (src, one["to"], one["first_chunk"], one["chunks"], one["direction"])
            for src, work in by_step[step].items()
            for one in work["sends"]
        )
        before = {device: values.copy() for device, values in held.items()}
        written: set[tuple[int, int]] = set()
        for dst, work in by_step[step].items():
            for one in work["receives"]:
                found = (one["from"], dst, one["first_chunk"], one["chunks"], OPPOSITE[one["direction"]])
                assert sent[found] == 1, f"step {step}: {found} is not sent once"
                del sent[found]
                run = range(one["first_chunk"], one["first_chunk"] + one["chunks"])
                assert not written & {(dst, chunk) for chunk in run}, "two writes of a chunk in a step"
                written |= {(dst, chunk) for chunk in run}
                for chunk in run:
                    arrived = before[one["from"]][chunk]
                    held[dst][chunk] = before[dst][chunk] + arrived if one["op"] == "add" else arrived
        assert not sent, f"step {step}: sent, and not received"
    return held


def check(machine: NumberedMachine, planner: Planner | str, **options: Any) -> dict[str, Any]:
    """Export, validate and replay; integers, so that sums are exact."""
    programs = chip_programs(plan(machine.mesh, planner, **options), machine)
    text = json.dumps(programs)
    VALIDATOR.validate(json.loads(text))
    assert {tuple(chip["at"]): chip["device"] for chip in programs["chips"]} == dict(machine.devices)
    rng = np.random.default_rng(1)
    payload = {device: rng.integers(-1000, 1000, (programs["chunks"], 3)) for device in machine.devices.values()}
    total = np.sum(list(payload.values()), axis=0)
    for device, values in replay(text, payload).items():
        assert (values == total).all(), device
    return programs


LOSSES = [(name, tuple(loss["chips"])) for name in GALAXIES for loss in KEPT[name]["losses"]]


@pytest.mark.parametrize(("name", "lost"), LOSSES[::9], ids=str)
def test_some_losses_of_both_galaxies_replay_to_exact_sums(name: str, lost: tuple[int, ...]) -> None:
    machine = machine_without(name, lost)
    assert len(check(machine, Weave(chunks=4))["chips"]) == 32 - len(lost)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lost"), LOSSES, ids=str)
def test_every_loss_of_both_galaxies_replays_to_exact_sums(name: str, lost: tuple[int, ...]) -> None:
    machine = machine_without(name, lost)
    assert len(check(machine, Weave(chunks=16))["chips"]) == 32 - len(lost)


@pytest.mark.slow
@pytest.mark.parametrize("name", GALAXIES)
def test_the_fastest_plan_for_a_real_payload_replays(name: str) -> None:
    machine = machine_without(name, [9])
    check(machine, "auto", payload_bytes=1e8, hardware=machine.hardware, neighbours_only=True)


def channels_of(name: str, lost: tuple[int, ...]) -> set[frozenset[tuple[int, int]]]:
    """The channels that `write_umd` gives each cable: it counts up the ports of each chip, cable by cable."""
    port: Counter[int] = Counter()
    found = set()
    for (a, b), n in sample_of(name).without(chips=lost).cables.items():
        for _ in range(n):
            found.add(frozenset([(a, port[a]), (b, port[b])]))
            port.update([a, b])
    return found


@pytest.mark.parametrize(("name", "lost"), [("galaxy", ()), ("galaxy", (9,)), ("t3000", (6,))], ids=str)
def test_neighbours_have_the_channels_of_their_cable(name: str, lost: tuple[int, ...]) -> None:
    programs = chip_programs(plan(machine_without(name, lost).mesh, Weave(chunks=1)), machine_without(name, lost))
    listed = Counter(
        frozenset([(chip["device"], mine), (near["device"], its)])
        for chip in programs["chips"]
        for near in chip["neighbours"]
        for mine, its in near["channels"]
    )
    assert listed == dict.fromkeys(channels_of(name, lost), 2), "once from either end"


@pytest.mark.parametrize("name", [name for name in KEPT if name != "8 p150"])
def test_directions_are_those_of_the_runtime_up_to_how_the_mesh_is_held(name: str) -> None:
    """One turn or reflection of the mesh makes ours its own, on every link of the whole machine.

    Not of eight p150 cards: their cables are the edges of a cube, of which any axis may be the short one of 2x4.
    """
    machine, whole = machine_without(name), KEPT[name]["whole"]
    programs = chip_programs(plan(machine.mesh, Weave(chunks=1)), machine)
    ours = {
        (chip["device"], near["device"]): near["direction"] for chip in programs["chips"] for near in chip["neighbours"]
    }
    device = whole["devices"]
    theirs = {(device[a], device[b]): RUNTIME_DIRECTIONS[code] for a, b, code in whole["directions"]}
    rows, columns = whole["shape"]
    assert len(theirs) == 2 * (rows * (columns - 1) + columns * (rows - 1))
    turn = {ours[link]: direction for link, direction in theirs.items()}
    assert sorted(turn) == sorted(turn.values()) == ["E", "N", "S", "W"]
    assert all(turn[ours[link]] == direction for link, direction in theirs.items())
    assert all(turn[OPPOSITE[one]] == OPPOSITE[turn[one]] for one in turn)


def test_the_interpreter_notices_what_is_wrong() -> None:
    machine = machine_without("t3000", [7])
    programs = chip_programs(plan(machine.mesh, Weave(chunks=2)), machine)
    payload = {device: np.ones((2, 1), int) for device in machine.devices.values()}
    replay(json.dumps(programs), payload)

    def broken(change: Any) -> str:
        other = copy.deepcopy(programs)
        steps = [step for chip in other["chips"] for step in chip["program"] if step["receives"]]
        change(steps[0])
        return json.dumps(other)

    with pytest.raises(AssertionError, match="sent, and not received"):
        replay(broken(lambda step: step["receives"].clear()), payload)
    with pytest.raises(AssertionError, match="is not sent once"):
        replay(broken(lambda step: step["receives"][0].update(first_chunk=7)), payload)
    wrong = replay(broken(lambda step: step["receives"][0].update(op="copy")), payload)
    assert any((values != 7).any() for values in wrong.values())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"collective": "all-gather"},
        {"chunks": 0},
        {"chips": []},
        {"unknown": 1},
        {"chips": [{"device": 0, "at": [0, 0, 0], "neighbours": [], "program": []}]},
        {
            "chips": [
                {
                    "device": 0,
                    "at": [0, 0],
                    "neighbours": [{"device": 1, "direction": "NE", "channels": [[0, 0]]}],
                    "program": [],
                }
            ]
        },
    ],
    ids=str,
)
def test_the_schema_refuses_other_files(change: dict[str, Any]) -> None:
    machine = machine_without("t3000", [7])
    programs = chip_programs(plan(machine.mesh, Weave(chunks=1)), machine)
    VALIDATOR.validate(programs)
    assert not VALIDATOR.is_valid({**programs, **change})


def test_what_has_no_programs_is_refused_with_its_remedy() -> None:
    machine = machine_without("galaxy", [9])
    far = plan(machine.mesh, "latency")
    with pytest.raises(ScheduleError, match=r"Step \d+ sends from .* not neighbours. Plan with --neighbours-only"):
        chip_programs(far, machine)
    with pytest.raises(ScheduleError, match="is for reduce-scatter; programs are written for an all-reduce"):
        chip_programs(plan(machine.mesh, "gather", collective=Collective.REDUCE_SCATTER), machine)
    with pytest.raises(MachineError, match=r"the plan is for 4x8\. Plan with --machine hurt"):
        chip_programs(plan(Mesh("4x8"), Weave(chunks=1)), machine)
    nameless = NumberedMachine(machine.mesh, "list of chips", "mine.yaml", {})
    with pytest.raises(MachineError, match=r"mine\.yaml: a list of chips has no device numbers"):
        chip_programs(far, nameless)
    cube = NumberedMachine(
        Mesh("2x2x2"),
        "cube",
        "cube.yaml",
        {},
        devices={at: n for n, at in enumerate(itertools.product((0, 1), repeat=3))},
    )
    with pytest.raises(MachineError, match="directions of two axes"):
        chip_programs(plan(cube.mesh, Weave(chunks=1)), cube)
