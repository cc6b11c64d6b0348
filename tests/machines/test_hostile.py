"""Descriptions are untrusted: what is damaged or malicious is read or refused in one line, and never takes long."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from descriptions import MESH_GRAPH, OWN, OWN_CABLES, SAMPLES
from meshmend.errors import LayoutError, MachineError
from meshmend.machines import machine_of, parse_description, read_machine
from meshmend.machines.entries import MAX_BYTES

TEXTS = {
    "cluster descriptor": SAMPLES["t3000"].text,
    "mesh graph": MESH_GRAPH,
    "physical system": SAMPLES["galaxy of four hosts"].without(chips=range(12, 32)).text,
    "neuron-ls": SAMPLES["trainium2"].text,
    "own": OWN,
    "own cables": OWN_CABLES,
}
PIECES = [
    "0",
    "-1",
    "99999999999999999999",
    "1e9",
    "null",
    "{}",
    "[]",
    "[[",
    "{{",
    '"',
    "'",
    ": ",
    "- ",
    "\n",
    "\t",
    "\x00",
]
PIECES += ["&a", "*a", "!!python/object/apply:os.system", "<<", "RING", "twisted", "4x4x4x4x4x4x4x4x4", "🦆", "%", "# "]


def mutated(text: str, rng: random.Random) -> str:
    """Cut, repeat, move, swap or replace some of it."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + 200)
        how = rng.randrange(6)
        if how == 0:
            text = text[:a] + text[b:]
        elif how == 1:
            text = text[:b] + text[a:b] + text[b:]
        elif how == 2:
            text = text[:a] + rng.choice(PIECES) + text[a:]
        elif how == 3:
            text = text[:a] + rng.choice(PIECES) + text[b:]
        elif how == 4 and any(map(str.isdigit, text)):
            at = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
            text = text[:at] + str(rng.randrange(100)) + text[at + 1 :]
        else:
            lines = text.split("\n")
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            text = "\n".join(lines)
    return text


def attack(kind: str, rounds: int, seed: int) -> int:
    """Read mutated descriptions; return how many were refused. Anything but the two errors is a failure."""
    rng, refused = random.Random(f"{kind} {seed}"), 0
    for _ in range(rounds):
        text = mutated(TEXTS[kind], rng)
        started = time.process_time()
        try:
            machine_of(parse_description(text, "mutated"))
        except (MachineError, LayoutError) as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > 2000:
                raise AssertionError(f"not one line: {error!r}") from error
        assert time.process_time() - started < 10
    return refused


@pytest.mark.parametrize("kind", TEXTS)
def test_100_mutated_descriptions(kind: str) -> None:
    assert parse_description(TEXTS[kind], "whole").file == "whole"
    # Cables leave a layout to be searched for, which may take a second.
    rounds = {"own cables": 10, "neuron-ls": 25}.get(kind, 100)
    assert attack(kind, rounds, seed=0) > rounds // 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_5000_mutated_descriptions(kind: str) -> None:
    assert attack(kind, 5000, seed=1) > 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [1]\nb: [*a, *a]", "line 1: expected plain values, got an anchor"),
        ("arch: !!python/object/apply:os.system [id]", "expected plain values, got the tag"),
        ("arch: " + "[" * 100 + "]" * 100, "expected at most 40 levels"),
        ("arch: {0: x, 0: y}", "expected each key once"),
        ("arch: {}\n---\narch: {}", "expected one YAML document"),
        ("{" + '"a":{' * 5000 + "}" * 5001, "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ('{"items": ' + "9" * 5000 + "}", "expected JSON"),
        ("system_graph {" + "a {" * 100 + "}" * 101, "expected at most 40 levels"),
        ("system_graph { a: \x00 }", "expected text protobuf"),
        ("system_graph { a: 'x", "expected text protobuf"),
        ("mesh_descriptors { device_topology { dims: [ 65536, 65536 ] } }", "at most 8 axes and 65,536 chips"),
        ("meshmend: 1\nshape: " + "x".join(["2"] * 20), "1 to 8 axes"),
        ("meshmend: 1\nshape: 256x256\nfailed: ['300x300@0,0']", "expected a box inside 256x256"),
        ("\n" * 20_000, "not a description of a machine"),
        (" \n" * 10_000 + "x: 1", "not a description of a machine"),
        ("mesh_descriptors" + "\n" * 40_000, "not a description of a machine"),
        ("asic_descriptors: " + " " * 40_000 + "1", "not a description of a machine"),
        ("x:\n" + "[\n" * 2000, "not a description of a machine|expected YAML"),
        ("'\n" * 2000 + "x", "expected YAML"),
    ],
)
def test_bombs_are_refused_at_once(text: str, words: str) -> None:
    started = time.process_time()
    with pytest.raises(MachineError, match=words):
        machine_of(parse_description(text, "bomb"))
    assert time.process_time() - started < 2


def test_files_are_limited(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(MachineError, match="is larger than 16 MiB"):
        read_machine(large)
    large.write_bytes(b"arch:\n  \xff")
    with pytest.raises(MachineError, match="line 2: expected UTF-8 text, got the byte 0xff"):
        read_machine(large)
