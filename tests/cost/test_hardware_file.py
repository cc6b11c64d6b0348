"""Files of measured hardware: written and read back, and refused where they are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commandline import run_json
from meshmend.cost import PRESETS, Hardware, find_hardware
from meshmend.cost.hardware import MAX_BYTES, read_hardware, write_hardware
from meshmend.errors import ParameterError

MINE = Hardware(
    "mine",
    link_bytes_per_s=1e8,
    step_latency_s=1e-4,
    links_at_once=1,
    start_s=2e-4,
    message_s=3e-4,
    runs_lanes=True,
    is_switched=True,
    sources=(("message_s", "measured"),),
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    for number, hardware in enumerate([MINE, *PRESETS.values()]):
        path = tmp_path / f"{number}.json"
        write_hardware(hardware, path, {"device_kind": "cpu"})
        assert find_hardware(str(path)) == hardware
        assert json.loads(path.read_text())["measured"] == {"device_kind": "cpu"}


def damaged(**changes: Any) -> str:
    facts = {"name": "mine", "link_bytes_per_s": 1e8} | changes
    return json.dumps({"format": 1, "hardware": {key: value for key, value in facts.items() if value != "absent"}})


DAMAGED = [
    (damaged(shared_cores=1.5), "has shared_cores 1.5, expected a whole number"),
    ("", "is not JSON"),
    ('{"format": 1, "hardware": {"name"', "is not JSON"),
    ("\x00\xff binary", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    (" " * (MAX_BYTES + 1), "has more than 1,048,576 bytes"),
    ("[]", "is not one of ours: expected format 1"),
    ('{"format": 2, "hardware": {}}', "is not one of ours: expected format 1"),
    ('{"format": 1, "hardware": "tpu-v3"}', "is not one of ours: expected format 1"),
    (damaged(colour="red"), "has 'colour', which is not known"),
    (damaged(name=3), "has the name '3', expected a short text"),
    (damaged(name="x" * 3000), "expected a short text"),
    (damaged(link_bytes_per_s="absent"), "does not say link_bytes_per_s"),
    (damaged(link_bytes_per_s="fast"), "has link_bytes_per_s 'fast', expected a number"),
    (damaged(link_bytes_per_s=True), "has link_bytes_per_s True, expected a number"),
    (damaged(link_bytes_per_s=0), "link_bytes_per_s is 0.0, expected a positive number"),
    (damaged(link_bytes_per_s=float("nan")), "link_bytes_per_s is nan, expected a positive number"),
    (damaged(link_bytes_per_s=float("inf")), "link_bytes_per_s is inf, expected a positive number"),
    (damaged(link_bytes_per_s=10**400), "has a link_bytes_per_s that is too large"),
    (damaged(step_latency_s=-1e-6), "step_latency_s is -1e-06, expected seconds, 0 or more"),
    (damaged(message_s=float("nan")), "message_s is nan, expected seconds, 0 or more"),
    (damaged(start_s=[1]), "has start_s [1], expected a number"),
    (damaged(links_at_once=1.5), "has links_at_once 1.5, expected a whole number"),
    (damaged(links_at_once=0), "links_at_once is 0, expected at least 1"),
    (damaged(runs_lanes=1), "has runs_lanes 1, expected true or false"),
    (damaged(is_switched="yes"), "has is_switched 'yes', expected true or false"),
    (damaged(sources=["me"]), "has sources that are not short texts"),
    (damaged(sources={"name": 3}), "has sources that are not short texts"),
]


@pytest.mark.parametrize(("text", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_damaged_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ParameterError) as caught:
        read_hardware(path)
    assert message in str(caught.value)


def test_the_command_line_takes_a_file_and_names_one_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_hardware(MINE, path, {})
    words = ["plan", "2x3", "--payload", "4kB", "--hardware", path]
    assert run_json(*words)["hardware"]["name"] == "mine"
    path.write_text("{")
    assert f"The hardware file {path} is not JSON" in run_json(*words, code=1)["message"]
    path.unlink()
    assert f"The hardware file {path} cannot be read" in run_json(*words, code=1)["message"]
