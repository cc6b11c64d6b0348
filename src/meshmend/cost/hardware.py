"""Hardware: what a link carries, what a step and a message cost, how many links a chip drives at once. Named presets.

Rates are of one link, that is, of one direction of a cable. Vendors quote them in three ways (a link one way, a
link both ways, a chip with all its links), so each preset says what was read and how it was divided.

Hardware is written to files as JSON, too, with how it was measured. A file is taken wherever a preset is:
`--hardware measured.json`, `plan(…, hardware="measured.json")`. It is read as untrusted input: its size is checked
before it is read, and every value before it is used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from meshmend.buckets import as_os_errors, as_path
from meshmend.cost.units import did_you_mean, name_rate, name_seconds, parse_rate, parse_seconds, split_settings
from meshmend.errors import ParameterError
from meshmend.files import write_whole
from meshmend.topology import Tiling, name_shape

Mode = Literal["lock-step", "asynchronous"]
"""How an engine waits: every chip for the end of each step, or each for its own data and links alone."""
MODES: tuple[Mode, ...] = ("lock-step", "asynchronous")


class Network(Enum):
    """What moves the bytes of a step, and so how long they take. There are these three kinds."""

    CABLES = "cables"
    """The mesh's own: what crosses a link shares it, and the busiest link counts, with a latency per hop."""
    PAIRS = "pairs"
    """Every pair of chips has a link of its own, one hop long: the longest message counts."""
    CORES = "cores"
    """The cores of one machine, for all its processes: the bytes of all chips together count."""


@dataclass(frozen=True)
class Hardware:
    """The numbers of a machine that the cost of a schedule depends on.

    `link_bytes_per_s` is b, the rate of one link (one direction of a cable). Every step costs `step_latency_s`
    once, and a transfer `hop_latency_s` for each link of its path. `links_at_once` is how many links' worth of
    data a chip can send at once, and receive at once; None means all its links. `start_s` is what a collective costs
    before its first step, and `message_s` what a chip pays for each message of a step besides its bytes. `sources` says
    where each number comes from.

    The last fields say which kind of `Network` it is, and who pays for messages:

    | `is_switched` | `shared_cores` | bytes                                     | `message_s` is paid                |
    |---------------|----------------|-------------------------------------------|------------------------------------|
    | no            | None           | `Network.CABLES`                          | by each chip, for its messages     |
    | no            | a number       | `Network.CABLES`                          | by the cores, for those of all     |
    | yes           | None           | `Network.PAIRS`                           | by each chip, for its messages     |
    | yes           | a number       | `Network.CORES`, each at a link's rate    | by the cores, for those of all     |

    With `runs_lanes` a schedule is priced as XLA runs it (`meshmend.schedule.lanes`). Each permute of a loop is a
    message in each of the loop's steps, and moves its bytes even where nothing is to be sent.

    >>> lab = Hardware("lab", link_bytes_per_s=5e6, step_latency_s=1e-3)
    >>> lab.links_at_once is None
    True
    """

    name: str
    link_bytes_per_s: float
    step_latency_s: float = 0.0
    hop_latency_s: float = 0.0
    links_at_once: int | None = None
    start_s: float = 0.0
    message_s: float = 0.0
    runs_lanes: bool = False
    is_switched: bool = False
    shared_cores: int | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.link_bytes_per_s < float("inf"):
            raise ParameterError(f"link_bytes_per_s is {self.link_bytes_per_s}, expected a positive number of bytes/s.")
        for field in ("step_latency_s", "hop_latency_s", "start_s", "message_s"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ParameterError(f"{field} is {getattr(self, field)}, expected seconds, 0 or more.")
        if self.links_at_once is not None and self.links_at_once < 1:
            raise ParameterError(f"links_at_once is {self.links_at_once}, expected at least 1, or None for all links.")
        if self.shared_cores is not None and self.shared_cores < 1:
            raise ParameterError(f"shared_cores is {self.shared_cores}, expected at least 1, or None for none shared.")

    def __str__(self) -> str:
        width = self.links_at_once
        at_once = "all links" if width is None else f"{width} link{'s' * (width > 1)}"
        message = f"{name_seconds(self.message_s)} per message, " if self.message_s else ""
        cores = (
            "" if self.shared_cores is None else f", {self.shared_cores} core{'s' * (self.shared_cores > 1)} for all"
        )
        return (
            f"{self.name}: {name_rate(self.link_bytes_per_s)} per link, {name_seconds(self.step_latency_s)} per step, "
            f"{message}{name_seconds(self.hop_latency_s)} per hop, {at_once} at once{cores}"
        )

    @property
    def network(self) -> Network:
        """The kind of network: who moves the bytes of a step."""
        if not self.is_switched:
            return Network.CABLES
        return Network.PAIRS if self.shared_cores is None else Network.CORES

    @property
    def priced(self) -> tuple[object, ...]:
        """All that a time depends on: two of the same are the same to a planner, whatever they are called."""
        words = ("name", "sources")
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in words)


_HOP = (
    "hop_latency_s",
    "about 1 µs per hop over ICI, whatever the size: How to Scale Your Model (Austin et al., Google DeepMind, 2025), "
    "part 3, 'A note on ICI latency'; the book says it of ICI at large, not of one generation",
)
_ALL_LINKS = (
    "links_at_once",
    "all: the chip's router drives its links independently (Jouppi et al., CACM 63(7), 2020); the paper's own "
    "all-reduce uses the rings of both directions and both axes together",
)
_FABRIC_STEP = (
    "step_latency_s",
    "none: the figure for a hop is that of a whole exchange between neighbours, and nothing is published beyond it",
)
_XLA_STEP = (
    "step_latency_s",
    "an estimate, 2 µs: what one permute through XLA costs beside its hop; three hops of 32 kB were measured at "
    "8 µs where hops alone explain 3 µs (How to Scale Your Model, part 3, pop quiz 2)",
)
_ONE_AT_A_TIME = (
    "links_at_once",
    "one: on v2 and v3 the TPU compiler runs collective-permutes one after another, seen by compiling ahead of "
    "time with libtpu",
)
_V2_RATE = (
    "link_bytes_per_s",
    "496 Gbit/s per link and direction, 4 links per chip: Jouppi et al., 'A domain-specific supercomputer for training "
    "deep neural networks', CACM 63(7), 2020",
)
_V3_RATE = (
    "link_bytes_per_s",
    "656 Gbit/s per link and direction, 4 links per chip: Jouppi et al., CACM 63(7), 2020. The Scaling Book rounds it "
    "up to 100 GB/s",
)
_V4_RATE = (
    "link_bytes_per_s",
    "6 links of 50 GB/s per direction: Jouppi et al., 'TPU v4', ISCA 2023; 24 TB/s of bisection over the 512 cables "
    "that halve a 16x16x16 torus (cloud.google.com/tpu/docs/v4) gives 47 GB/s, and the Scaling Book writes 45",
)
_V5P_RATE = (
    "link_bytes_per_s",
    "1,200 GB/s per chip, 'bidirectional', over 6 links: 100 GB/s per link and direction "
    "(cloud.google.com/tpu/docs/v5p; its older wording, 4,800 Gbit/s per chip, is the same one way)",
)
_V6E_RATE = (
    "link_bytes_per_s",
    "800 GB/s per chip, 'bidirectional', over 4 links: 100 GB/s per link and direction, and 3.2 TB/s of bisection over "
    "the 32 cables that halve a 16x16 torus agrees (cloud.google.com/tpu/docs/v6e; earlier editions of that page "
    "said 3,584 Gbit/s per chip, which would be 112 GB/s)",
)
_V5E_RATE = (
    "link_bytes_per_s",
    "400 GB/s per chip, 'bidirectional', over 4 ports: 50 GB/s per link and direction, and 1.6 TB/s of bisection over "
    "the 32 cables that halve a 16x16 torus agrees (cloud.google.com/tpu/docs/v5e)",
)
_V7X_RATE = (
    "link_bytes_per_s",
    "published: 1,200 GB/s per chip, 'bidirectional' (docs.cloud.google.com/tpu/docs/tpu7x). Inferred: over 6 links, "
    "as on v5p, which gives 100 GB/s per link and direction",
)
_TRAINIUM2_RATE = (
    "link_bytes_per_s",
    "published: 1.28 TB/s of NeuronLink-v3 per chip and 4 links (awsdocs-neuron.readthedocs-hosted.com, Trainium2 "
    "architecture and its guide for NKI). Inferred: the figure counts both directions and all four links are equal, "
    "which gives 160 GB/s per link and direction",
)
_CHANNELS = "channels per cable: counted in a cluster descriptor of tenstorrent/tt-umd. "
_WORMHOLE_CHANNEL = "Published: 100 Gbit/s per Ethernet channel and direction (docs.tenstorrent.com/aibs/wormhole)"
_BLACKHOLE_CHANNEL = (
    "Published: 800 Gbit/s per QSFP-DD port (docs.tenstorrent.com, tt-system-firmware, Blackhole cards). Inferred: a "
    "port is two channels of 400 Gbit/s, and cables inside the machine have the rate of a port"
)
_ETHERNET_LATENCY = (
    ("step_latency_s", "none: nothing is published"),
    ("hop_latency_s", "an estimate, 1 µs, as for other links between chips: nothing is published"),
    ("links_at_once", "inferred, all: each channel has its own core and buffers"),
)
_CPU_MEASURED = (
    "about what `meshmend doctor --measure` finds for 24 to 60 virtual chips on two cores; measure your own, as jobs do"
)
_LOOPBACK_MEASURED = (
    "fitted to the times of 23 plans with 4 kB to 64 MB on six processes that share two cores; measure your own with "
    "meshmend.torch.measure"
)
_ASYNCHRONOUS = (
    "links_at_once",
    "all: on v4, v5p and v6e permutes in different directions are asynchronous and in flight together, seen by "
    "compiling ahead of time with libtpu; inferred for v5e and 7x",
)


def _tpu(name: str, rate: float, source: tuple[str, str], *, one_at_a_time: bool = False) -> tuple[Hardware, Hardware]:
    """Return a TPU with all that its network can do, and as XLA drives it."""
    network = Hardware(name, rate, hop_latency_s=1e-6, sources=(source, _FABRIC_STEP, _HOP, _ALL_LINKS))
    through_xla = Hardware(
        f"{name}-xla",
        rate,
        step_latency_s=2e-6,
        hop_latency_s=1e-6,
        links_at_once=1 if one_at_a_time else None,
        sources=(source, _XLA_STEP, _HOP, _ONE_AT_A_TIME if one_at_a_time else _ASYNCHRONOUS),
    )
    return network, through_xla


def _tenstorrent(name: str, channels: int, channel_bytes_per_s: float, source: str) -> Hardware:
    return Hardware(
        name,
        link_bytes_per_s=channels * channel_bytes_per_s,
        hop_latency_s=1e-6,
        sources=(("link_bytes_per_s", f"{channels} {_CHANNELS}{source}"), *_ETHERNET_LATENCY),
    )


PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("ideal", 1e9, sources=(("link_bytes_per_s", "round: 1 GB/s, no latency, to compare schedules"),)),
        *_tpu("tpu-v2", 62e9, _V2_RATE, one_at_a_time=True),
        *_tpu("tpu-v3", 82e9, _V3_RATE, one_at_a_time=True),
        *_tpu("tpu-v4", 50e9, _V4_RATE),
        *_tpu("tpu-v5e", 50e9, _V5E_RATE),
        *_tpu("tpu-v5p", 100e9, _V5P_RATE),
        *_tpu("tpu-v6e", 100e9, _V6E_RATE),
        *_tpu("tpu-v7x", 100e9, _V7X_RATE),
        Hardware(
            "trainium2",
            link_bytes_per_s=160e9,
            hop_latency_s=1e-6,
            sources=(
                _TRAINIUM2_RATE,
                ("step_latency_s", "none: nothing is published"),
                ("hop_latency_s", "an estimate, 1 µs, as for other links between chips: nothing is published"),
                ("links_at_once", "inferred, all: 20 cores of the chip serve collectives alone"),
            ),
        ),
        _tenstorrent("tenstorrent-wormhole-galaxy", 4, 12.5e9, _WORMHOLE_CHANNEL),
        _tenstorrent("tenstorrent-t3000", 2, 12.5e9, _WORMHOLE_CHANNEL),
        _tenstorrent("tenstorrent-blackhole-galaxy", 2, 50e9, _BLACKHOLE_CHANNEL),
        Hardware(
            "ethernet-10g",
            link_bytes_per_s=1.25e9,
            step_latency_s=20e-6,
            hop_latency_s=5e-6,
            sources=(
                (
                    "link_bytes_per_s",
                    "10 Gbit/s line rate (IEEE 802.3ae); framing and TCP headers take about 5 % of it",
                ),
                ("step_latency_s", "an estimate, 20 µs: a small TCP message between two Linux processes"),
                ("hop_latency_s", "an estimate, 5 µs: a hop forwarded by the kernel of the chip in between"),
                ("links_at_once", "all: each cable has its own network interface"),
            ),
        ),
        Hardware(
            "cpu-xla",
            link_bytes_per_s=8e7,
            step_latency_s=5e-4,
            links_at_once=1,
            message_s=2.5e-3,
            runs_lanes=True,
            is_switched=True,
            sources=(
                ("link_bytes_per_s", _CPU_MEASURED),
                ("step_latency_s", _CPU_MEASURED),
                ("message_s", _CPU_MEASURED),
                ("hop_latency_s", "none: no device is farther than another in one memory"),
                ("links_at_once", "one: virtual devices of one machine share its cores and its memory"),
            ),
        ),
        Hardware(
            "gloo-loopback",
            link_bytes_per_s=2.1e9,
            step_latency_s=1e-5,
            start_s=1e-2,
            message_s=1.8e-4,
            is_switched=True,
            shared_cores=2,
            sources=(
                ("link_bytes_per_s", _LOOPBACK_MEASURED),
                (
                    "step_latency_s",
                    "10 µs: the fit finds none; of two plans that cost the same, the one of fewer steps counts",
                ),
                ("start_s", _LOOPBACK_MEASURED + "; it grows with the processes"),
                ("message_s", _LOOPBACK_MEASURED),
                ("shared_cores", "two: those of the machine that it was measured on"),
            ),
        ),
    )
}
"""Every preset by its name on the command line."""


DEFAULT_HARDWARE = "tpu-v3"
"""The hardware that planning and prediction assume by default."""


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Return the preset of that name, the hardware in that file (….json), or the hardware itself.

    After a colon, numbers replace those that it has.

    >>> print(find_hardware("tpu-v3"))
    tpu-v3: 82 GB/s per link, 0 s per step, 1 µs per hop, all links at once
    >>> print(find_hardware("tpu-v3:link_bytes_per_s=40mbit,links_at_once=1"))
    tpu-v3, adjusted: 5 MB/s per link, 0 s per step, 1 µs per hop, 1 link at once
    """
    if isinstance(hardware, Hardware):
        return hardware
    name, settings = split_settings(hardware)
    if settings:
        numbers = {key: _read_number(key, text) for key, text in settings.items()}
        return adjusted(find_hardware(name), **numbers)
    if hardware in PRESETS:
        return PRESETS[hardware]
    if hardware.endswith(".json"):
        return read_hardware(hardware)
    raise ParameterError(
        f"There is no hardware {hardware!r}.{did_you_mean(hardware, PRESETS)} Presets: {', '.join(PRESETS)}; a file "
        f"that `meshmend doctor --measure FILE.json` has written; or describe your own with Hardware(…)."
    )


def _read_number(key: str, text: str) -> float:
    """Return a number of hardware as people write it: with its unit, or a count."""
    if key == "link_bytes_per_s":
        return parse_rate(text)
    if key in _SECONDS:
        return parse_seconds(text)
    if key not in _COUNTS:
        known = ("link_bytes_per_s", *_SECONDS, *_COUNTS)
        raise ParameterError(f"Hardware has no number {key!r}: it has {', '.join(known)}.{did_you_mean(key, known)}")
    if not text.isdecimal():
        raise ParameterError(f"{key} is {text!r}, expected a whole number.")
    return int(text)


def adjusted(hardware: Hardware, **changes: float) -> Hardware:
    """Return the hardware with some of its numbers replaced.

    >>> print(adjusted(PRESETS["ideal"], link_bytes_per_s=5e6))
    ideal, adjusted: 5 MB/s per link, 0 s per step, 0 s per hop, all links at once
    """
    return _changed(hardware, f"{hardware.name}, adjusted", dict.fromkeys(changes, "given by the caller"), changes)


def _changed(hardware: Hardware, name: str, sources: Mapping[str, str], changes: Mapping[str, Any]) -> Hardware:
    """Return the hardware by another name, with other numbers and what says so."""
    kept = [(number, source) for number, source in hardware.sources if number not in sources]
    return dataclasses.replace(hardware, name=name, sources=(*sources.items(), *kept), **changes)


def between_tiles(hardware: str | Hardware, tiling: Tiling) -> Hardware:
    """Return the hardware to plan and predict with on `tiling.tiles`, for a payload that is one chip's shard.

    Corresponding chips of neighbouring tiles all exchange their shards at once, over the same links. A link is shared
    by as many messages as a tile is long, and each message crosses as many links. The longest way counts for the
    latency of all. `links_at_once` stays: where a chip runs one permute at a time, it does so here too. Where every
    pair of chips is one hop apart (`is_switched`), tiles share nothing, and the hardware is what it was.

    >>> from meshmend.topology import Mesh, cut_into_tiles
    >>> print(between_tiles("tpu-v4", cut_into_tiles(Mesh("8x8"), "2x2")))
    tpu-v4 between 2x2 tiles: 25 GB/s per link, 0 s per step, 2 µs per hop, all links at once
    """
    chosen = find_hardware(hardware)
    if tiling.chips_per_tile == 1 or chosen.is_switched:
        return chosen
    side, shared, hops = name_shape(tiling.side), float(tiling.link_share), tiling.hops
    sources = {
        "link_bytes_per_s": f"a chip's part of {chosen.name}'s, between tiles of {side} chips",
        "hop_latency_s": f"{hops} hops of {chosen.name}, from a tile to the next",
    }
    changes = {
        "link_bytes_per_s": chosen.link_bytes_per_s * shared,
        "hop_latency_s": chosen.hop_latency_s * hops,
    }
    return _changed(chosen, f"{chosen.name} between {side} tiles", sources, changes)


FORMAT = 1
"""What files of hardware say that they are."""
MAX_BYTES = 2**20
"""Files that are longer are not read: a measurement takes a few kilobytes."""
MAX_TEXT = 2000
_SECONDS = ("step_latency_s", "hop_latency_s", "start_s", "message_s")
_COUNTS = ("links_at_once", "shared_cores")
_KNOWN = [field.name for field in dataclasses.fields(Hardware)]


def hardware_facts(hardware: Hardware) -> dict[str, Any]:
    """Return hardware as what JSON can write and `parse_hardware` reads."""
    return {"format": FORMAT, "hardware": dataclasses.asdict(hardware) | {"sources": dict(hardware.sources)}}


def write_hardware(hardware: Hardware, path: str | Path, measured: Mapping[str, Any]) -> None:
    """Write a file atomically: the hardware, and what was measured (versions, devices, raw times)."""
    text = json.dumps(hardware_facts(hardware) | {"measured": dict(measured)}, indent=1)
    write_whole(as_path(path), text + "\n")


def read_hardware(path: str | Path) -> Hardware:
    """Return the hardware that a file describes; raise `ParameterError` where it does not."""
    try:
        with as_os_errors(path), as_path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ParameterError(f"The hardware file {path} cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_BYTES:
        raise ParameterError(f"The hardware file {path} has more than {MAX_BYTES:,} bytes: it is no measurement.")
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"The hardware file {path} is not JSON: {error}.") from None
    return parse_hardware(facts, f"The hardware file {path}")


def parse_hardware(facts: Any, where: str) -> Hardware:
    """Return the hardware that parsed JSON describes; `where` begins the error messages."""
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or not isinstance(facts.get("hardware"), dict):
        raise ParameterError(
            f"{where} is not one of ours: expected format {FORMAT} and the hardware, as `meshmend doctor --measure F` "
            "writes them."
        )
    found: dict[str, Any] = facts["hardware"]
    unknown = sorted(set(found) - {*_KNOWN})
    if unknown:
        near = did_you_mean(unknown[0], _KNOWN)
        raise ParameterError(
            f"{where} has {unknown[0]!r}, which is not known: a later version may have written it. Hardware has "
            f"{', '.join(_KNOWN)}.{near}"
        )
    name = found.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT:
        raise ParameterError(f"{where} has the name {str(name)[:80]!r}, expected a short text.")
    numbers = {key: _number(found, key, where) for key in ("link_bytes_per_s", *_SECONDS) if key in found}
    if "link_bytes_per_s" not in numbers:
        raise ParameterError(f"{where} does not say link_bytes_per_s, the rate of one link.")
    for key, none in (("links_at_once", "all links"), ("shared_cores", "none")):
        if found.get(key) is not None and type(found[key]) is not int:
            raise ParameterError(f"{where} has {key} {found[key]!r}, expected a whole number, or null for {none}.")
    for key in ("runs_lanes", "is_switched"):
        if type(found.get(key, False)) is not bool:
            raise ParameterError(f"{where} has {key} {found[key]!r}, expected true or false.")
    sources = found.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(v, str) and len(v) <= MAX_TEXT for v in sources.values()):
        raise ParameterError(f"{where} has sources that are not short texts by name.")
    return Hardware(**{**found, **numbers, "sources": tuple(sources.items())})


def _number(found: Mapping[str, Any], key: str, where: str) -> float:
    value = found[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ParameterError(f"{where} has {key} {value!r}, expected a number.")
    try:
        return float(value)
    except OverflowError:
        raise ParameterError(f"{where} has a {key} that is too large to be a number.") from None
