from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from meshmend.cost import PRESETS, Hardware, find_hardware
from meshmend.cost.hardware import Network, adjusted, hardware_facts, parse_hardware, write_hardware
from meshmend.cost.units import format_bytes, name_seconds, parse_bytes, parse_rate, parse_seconds
from meshmend.errors import ParameterError

NUMBERS = {"link_bytes_per_s", "step_latency_s", "hop_latency_s", "links_at_once"}


@pytest.mark.parametrize(
    ("preset", "shared_cores", "network"),
    [
        ("tpu-v3", None, Network.CABLES),
        ("tpu-v3", 2, Network.CABLES),  # cores handle messages, and cables carry bytes
        ("cpu-xla", None, Network.PAIRS),
        ("gloo-loopback", 2, Network.CORES),
    ],
)
def test_there_are_three_kinds_of_network(preset: str, shared_cores: int | None, network: Network) -> None:
    assert replace(PRESETS[preset], shared_cores=shared_cores).network is network


def test_every_number_of_a_preset_has_a_source() -> None:
    for name, hardware in PRESETS.items():
        told = {field for field, source in hardware.sources if len(source) > 20}
        own = {field.name for field in fields(Hardware) if getattr(hardware, field.name) != field.default}
        assert own - {"name", "runs_lanes", "is_switched", "sources"} <= told, name
        if name not in ("ideal", "cpu-xla", "gloo-loopback"):
            assert told == NUMBERS, name


def test_tpu_v3_is_the_papers() -> None:
    v3, xla = PRESETS["tpu-v3"], PRESETS["tpu-v3-xla"]
    assert v3.link_bytes_per_s == parse_rate("656Gb/s")
    assert (v3.links_at_once, xla.links_at_once) == (None, 1)


def test_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ParameterError, match=r"There is no hardware 'gpu'. Presets: ideal, tpu-v2"):
        find_hardware("gpu")


def test_own_hardware_passes_through() -> None:
    own = Hardware("own", 5e6)
    assert find_hardware(own) is own


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("link_bytes_per_s", 0.0, "expected a positive number of bytes/s"),
        ("step_latency_s", -1.0, "step_latency_s is -1.0, expected seconds"),
        ("hop_latency_s", float("inf"), "hop_latency_s is inf"),
        ("links_at_once", 0, "links_at_once is 0, expected at least 1"),
        ("shared_cores", 0, "shared_cores is 0, expected at least 1"),
    ],
)
def test_senseless_hardware_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Hardware(**{"name": "own", "link_bytes_per_s": 1.0, field: value})  # type: ignore[arg-type]


def test_a_price_depends_on_every_number_and_on_no_word() -> None:
    """Wherever a field stands: a later one must neither be left out nor bring the sources in."""

    @dataclass(frozen=True)
    class Wider(Hardware):
        ports: int = 1

    plain = Wider("own", 1.0)
    assert replace(plain, name="mine", sources=(("ports", "counted"),)).priced == plain.priced
    other = {bool: True, int: 2, float: 2.0, type(None): 3}
    for field in fields(Wider):
        if field.name not in ("name", "sources"):
            changed = replace(plain, **{field.name: other[type(getattr(plain, field.name))]})  # type: ignore[arg-type]
            assert changed.priced != plain.priced, field.name


def test_adjusting_keeps_the_other_sources() -> None:
    changed = adjusted(PRESETS["tpu-v3"], step_latency_s=1e-6)
    assert changed.link_bytes_per_s == 82e9
    assert dict(changed.sources)["step_latency_s"] == "given by the caller"
    assert "656" in dict(changed.sources)["link_bytes_per_s"]


def test_numbers_after_a_name_replace_those_of_the_preset_or_the_file(tmp_path: Path) -> None:
    wanted: dict[str, float] = {"link_bytes_per_s": 5e6, "message_s": 2e-6, "links_at_once": 1, "shared_cores": 2}
    text = "link_bytes_per_s=40mbit,message_s=2us,links_at_once=1,shared_cores=2"
    assert find_hardware(f"tpu-v3:{text}") == adjusted(PRESETS["tpu-v3"], **wanted)
    write_hardware(PRESETS["tpu-v6e"], tmp_path / "mine.json", {})
    assert find_hardware(f"{tmp_path}/mine.json:{text}") == adjusted(PRESETS["tpu-v6e"], **wanted)
    strange = tmp_path / "a:b.json"
    write_hardware(PRESETS["tpu-v6e"], strange, {})
    assert find_hardware(str(strange)) == PRESETS["tpu-v6e"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu-v6", r"There is no hardware 'tpu-v6'\. Did you mean tpu-v6e\? Presets: ideal"),
        ("tpu-v3:hop=1us", r"Hardware has no number 'hop': it has link_bytes_per_s, step_latency_s, hop_latency_s"),
        ("tpu-v3:message=1us", r"Did you mean message_s\?"),
        ("tpu-v3:links_at_once=0", "links_at_once is 0, expected at least 1"),
        ("tpu-v3:links_at_once=1.5", "links_at_once is '1.5', expected a whole number"),
        ("tpu-v3:hop_latency_s=1", "'1' is not a time"),
    ],
)
def test_mistakes_in_a_name_teach(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        find_hardware(text)


def test_an_unknown_field_of_a_file_is_answered_with_those_that_are_known() -> None:
    facts = hardware_facts(PRESETS["tpu-v3"])
    facts["hardware"]["hop_latency"] = 1
    with pytest.raises(ParameterError, match=r"'hop_latency', which is not known.*Did you mean hop_latency_s\?"):
        parse_hardware(facts, "It")


@pytest.mark.parametrize(
    ("text", "value"),
    [("102MB", 102e6), ("1.34GB", 1.34e9), ("1KB", 1e3), ("1kb", 1e3), ("64MiB", 2**26), ("17B", 17), ("1e9 B", 1e9)],
)
def test_payloads(text: str, value: float) -> None:
    assert parse_bytes(text) == value


NO_PAYLOADS = ["", "MB", "-1MB", "1XB", "nan", "1 MB MB", "1e999B", "1e308GB", "1.2.3MB", "1,5MB", "١MB"]
NO_RATES = ["40", "40m", "1gb", "1b", "fast", "1GBPS", "1Gib/s", "82GB/s/s", "1iB/s", "1e308GB/s", "1.2.3Gb/s"]
NO_TIMES = ["1.2.3µs", "...µs", "-5us", "1e400s", "", "us", "5ks", "10m", "1e307d"]


@pytest.mark.parametrize(
    ("parse", "texts", "kind"),
    [(parse_bytes, NO_PAYLOADS, "payload"), (parse_rate, NO_RATES, "link rate"), (parse_seconds, NO_TIMES, "time")],
)
def test_what_is_none(parse: Callable[[str], float], texts: list[str], kind: str) -> None:
    for text in texts:
        with pytest.raises(ParameterError, match=f"is not a {kind}"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40mbit", 5e6),
        ("40Mbit", 5e6),
        ("10Gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("8b/s", 1),
        ("1GB/s", 1e9),
        ("1GBps", 1e9),
        ("1KBps", 1e3),
        ("1kB/s", 1e3),
        ("1GB", 1e9),
        ("1GiB/s", 2**30),
    ],
)
def test_rates(text: str, value: float) -> None:
    assert parse_rate(text) == value


def test_times() -> None:
    assert parse_seconds("5us") == parse_seconds("5µs") == 5e-6
    assert parse_seconds("1.5ms") == 1.5e-3
    assert (parse_seconds("10min"), parse_seconds("1.5 h"), parse_seconds("7d")) == (600, 5400, 604_800)
    assert parse_seconds("0") == parse_seconds("0min") == 0
    assert parse_seconds("1e3μs") == parse_seconds("1.µs") * 1e3 == 1e-3
    with pytest.raises(ParameterError, match="Write it with its unit"):
        parse_seconds("5")


@pytest.mark.parametrize("text", ["100", " 1e9 ", "0"])
def test_a_payload_without_a_unit_is_asked_for_one(text: str) -> None:
    with pytest.raises(ParameterError, match=f"its unit is missing. Write bytes as {text.strip()}B, or 102MB"):
        parse_bytes(text)


def test_names() -> None:
    assert format_bytes(1.34e9) == "1.34 GB"
    assert format_bytes(999.9999e6) == "1 GB"
    assert name_seconds(9.5e-7) == "950 ns"
