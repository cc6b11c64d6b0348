"""Tenstorrent's descriptors in text protobuf: what they say, and that damaged or malicious ones are refused at once."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from mutations import attack

from descriptions import PLAIN, Sample, grid_cables, sample_of
from meshmend.errors import MachineError
from meshmend.machines import Machine, machine_of, parse_description


def write_physical(sample: Sample) -> str:
    """A physical system descriptor with eight chips per host."""
    parts = ["system_graph {"]
    for host in sorted({chip // 8 for chip in sample.chips}):
        parts.append(f'  asic_connectivity_graph {{\n    host_name: "host{host}"')
        for chip in (chip for chip in sample.chips if chip // 8 == host):
            parts.append(f"    asic_topologies {{\n      asic_id: {100 + chip}\n      topology {{")
            for edge, channels in sample.cables.items():
                if chip in edge:
                    far = edge[0] + edge[1] - chip
                    parts.append(f"        asic_connections {{ dst_asic_id: {100 + far}")
                    parts += [
                        f"eth_connections {{ src_chan: {n} dst_chan: {n} is_local: true }}" for n in range(channels)
                    ]
                    parts.append("}")
            parts.append("      }\n    }")
        parts.append("  }")
    parts.append("}")
    for chip in sample.chips:
        about = f'tray_id: {chip // 8 + 1} asic_location: {chip % 8} host_name: "host{chip // 8}"'
        parts.append(f"asic_descriptors {{ asic_id: {100 + chip} asic_descriptor {{ {about} }} }}")
    return "\n".join(parts) + "\n"


GALAXY = sample_of("galaxy of four hosts", grid_cables((4, 8), PLAIN, 2), write_physical, shape=(4, 8), wrap=PLAIN)
MESH_GRAPH = """
mesh_descriptors {
  name: "M0"  # what was ordered
  arch: WORMHOLE_B0
  device_topology { dims: [ 4, 8 ], dim_types: [ LINE, LINE ] }
  host_topology { dims: [ 1, 2 ] }
  channels { count: 2 policy: STRICT }
}
top_level_instance { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
"""
TEXTS = {"mesh graph": MESH_GRAPH, "physical system": GALAXY.without(chips=range(12, 32)).text}


def read(text: str, intended: str | None = None) -> Machine:
    wanted = None if intended is None else parse_description(intended, "intended")
    return machine_of(parse_description(text, "file"), wanted)


def test_intended_minus_observed() -> None:
    sample = GALAXY
    whole = read(sample.text, MESH_GRAPH)
    assert str(whole.mesh) == "4x8"
    hurt = sample.without(chips=[10], cables=[(20, 21)])
    cables = {**hurt.cables, (28, 29): 1}
    text = type(hurt)(**{**hurt.__dict__, "cables": cables}).text
    machine = read(text, MESH_GRAPH)
    assert (machine.mesh.n_chips, len(machine.mesh.failed_cables)) == (31, 1)
    assert list(machine.mesh.cable_rates.values()) == [Fraction(1, 2)]
    by_names = read(text, sample.text)
    assert [by_names.host(at) for at in by_names.failed_chips] == ["host1"]
    assert by_names.mesh.n_cables == machine.mesh.n_cables


@pytest.mark.parametrize("kind", TEXTS)
def test_100_mutated_descriptions(kind: str) -> None:
    assert parse_description(TEXTS[kind], "whole").file == "whole"
    assert attack(TEXTS[kind], 100, seed=f"{kind} 0") > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_5000_mutated_descriptions(kind: str) -> None:
    assert attack(TEXTS[kind], 5000, seed=f"{kind} 1") > 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'mesh_descriptors {\n name: "M"\n device_topology { dims: [2] dim_types: [TORUS] } }',
            "line 3: expected LINE",
        ),
        ("system_graph {" + "a {" * 100 + "}" * 101, "expected at most 40 levels"),
        ("system_graph { a: \x00 }", "expected text protobuf"),
        ("system_graph { a: 'x", "expected text protobuf"),
        ("mesh_descriptors { device_topology { dims: [ 65536, 65536 ] } }", "at most 8 axes and 65,536 chips"),
        ("mesh_descriptors" + "\n" * 40_000, "not a description of a machine"),
        ("asic_descriptors: " + " " * 40_000 + "1", "not a description of a machine"),
        ("another_message { a: 1 }", "not a description of a machine"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    started = time.process_time()
    with pytest.raises(MachineError, match=words):
        read(text)
    assert time.process_time() - started < 2
