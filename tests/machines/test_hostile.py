"""Descriptions are untrusted: what is damaged or malicious is read or refused in one line, and never takes long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mutations import attack

from descriptions import OWN, OWN_CABLES, SAMPLES
from meshmend.errors import MachineError
from meshmend.machines import machine_of, parse_description, read_machine
from meshmend.machines.entries import MAX_BYTES

TEXTS = {
    "cluster descriptor": SAMPLES["t3000"].text,
    "neuron-ls": SAMPLES["trainium2"].text,
    "own": OWN,
    "own cables": OWN_CABLES,
}


@pytest.mark.parametrize("kind", TEXTS)
def test_100_mutated_descriptions(kind: str) -> None:
    assert parse_description(TEXTS[kind], "whole").file == "whole"
    # Cables leave a layout to be searched for, which may take a second.
    rounds = {"own cables": 10, "neuron-ls": 25}.get(kind, 100)
    assert attack(TEXTS[kind], rounds, seed=f"{kind} 0") > rounds // 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_5000_mutated_descriptions(kind: str) -> None:
    assert attack(TEXTS[kind], 5000, seed=f"{kind} 1") > 1000


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
        ("meshmend: 1\nshape: " + "x".join(["2"] * 20), "1 to 8 axes"),
        ("meshmend: 1\nshape: 256x256\nfailed: ['300x300@0,0']", "expected a box inside 256x256"),
        ("\n" * 20_000, "not a description of a machine"),
        (" \n" * 10_000 + "x: 1", "not a description of a machine"),
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
