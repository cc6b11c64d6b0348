"""The machines that Tenstorrent's runtime was asked about, as descriptions: whole, and with the chips lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from descriptions import SAMPLES, Sample
from meshmend.machines import parse_description
from meshmend_lab.tenstorrent.numbered import NumberedMachine, numbered
from meshmend_lab.tenstorrent.runtime import measured_machines

KEPT: dict[str, Mapping[str, Any]] = {
    name: kept
    for kept in measured_machines()
    for name, file in {
        "galaxy": "tt_umd_6u_cluster_desc.yaml",
        "blackhole galaxy": "tt_umd_blackhole_galaxy.yaml",
        "t3000": "tt_umd_t3k_cluster_desc.yaml",
        "8 p150": "tt_umd_blackhole_8xP150.yaml",
    }.items()
    if kept["file"] == file
}
GALAXIES = ("galaxy", "blackhole galaxy")


def sample_of(name: str) -> Sample:
    """The whole machine, with the cables that its real descriptor has."""
    cables = {(a, b): n for a, b, n in KEPT[name]["cables"]}
    return replace(SAMPLES[name], cables=cables)


def machine_without(name: str, lost: Collection[int] = ()) -> NumberedMachine:
    """What meshmend reads of the machine without some chips, and with its whole self as what was intended."""
    sample = sample_of(name)
    whole = parse_description(sample.text, "whole")
    return numbered(parse_description(sample.without(chips=lost).text, "hurt"), whole)
