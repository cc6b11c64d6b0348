"""Suspects and observations: how they are written, and what is refused."""

from __future__ import annotations

import contextlib
import json
import random

import pytest

from meshmend.errors import QuarantineError
from meshmend.launch import Hosts
from meshmend.quarantine import Observation, Suspect

CHIP = Suspect.chip((2, 3))


@pytest.mark.parametrize(
    ("text", "written", "kind"),
    [
        ("2,3", "2,3", "chip"),
        (" 2,3 ", "2,3", "chip"),
        ("1,2,3", "1,2,3", "chip"),
        ("2,4-2,3", "2,3-2,4", "cable"),
        ("0,0-0,7", "0,0-0,7", "cable"),
        ("host 5", "host 5", "host"),
    ],
)
def test_what_is_written_is_read(text: str, written: str, kind: str) -> None:
    suspect = Suspect.parse(text)
    assert (str(suspect), suspect.kind) == (written, kind)
    assert Suspect.parse(str(suspect)) == suspect


@pytest.mark.parametrize(
    "text", ["", "2;3", "host", "host -1", "host x", "2,3-2,3", "2,3-2", "0,0-0,1-0,2", "-1,0", "٢,٣", "1," * 500 + "1"]
)
def test_what_is_no_suspect_is_refused(text: str) -> None:
    with pytest.raises(QuarantineError, match=r"is no suspect\. Write a chip as 2,3, a cable as"):
        Suspect.parse(text)


def test_a_machine_has_it_or_not() -> None:
    hosts = Hosts.of("8x8", "4x2")
    for text in ("7,7", "0,0-0,1", "0,0-0,7", "host 7"):  # a cable may wrap: the list does not know
        Suspect.parse(text).check(hosts.shape, len(hosts))
    for text, why in (("8,0", "There is no chip 8,0"), ("0,0-1,1", "No cable joins"), ("host 8", "hosts 0 to 7")):
        with pytest.raises(QuarantineError, match=why):
            Suspect.parse(text).check(hosts.shape, len(hosts))
    assert Suspect.parse("host 1").chips(hosts) == ((0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3))
    assert Suspect.parse("0,0-0,1").chips(hosts) == ()
    with pytest.raises(QuarantineError, match="Quarantine its chips, each by its coordinate"):
        Suspect.parse("host 1").chips(None)


def test_an_observation_survives_json() -> None:
    observation = Observation(
        "recompute", (CHIP, Suspect.parse("2,4")), 17, "chunk 3: ±1 ulp", {"wrong": 0.25, "chunk": 3}
    )
    again = Observation.of(json.loads(observation.to_json()))
    assert again == observation
    assert hash(again) == hash(observation)
    assert again.to_json() == observation.to_json()
    assert observation == Observation(
        "recompute", observation.suspects[::-1], 17, observation.evidence, {"wrong": 0.25, "chunk": 3}
    )


GOOD = {"kind": "digest", "suspects": ["2,3"], "step": 1, "evidence": "", "numbers": {"agree": 3}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "rumour"}, "expected one of digest, recompute"),
        ({"kind": ["digest"]}, "kind and evidence are texts"),
        ({"suspects": []}, "it names 0 suspects"),
        ({"suspects": ["2,3"] * 17}, "it names 17 suspects"),
        ({"suspects": "2,3"}, "a list of texts"),
        ({"suspects": ["2;3"]}, "is no suspect"),
        ({"suspects": ["2,3", "2,3-2,4"]}, "names a cable or a host"),
        ({"step": -1}, "its step is -1"),
        ({"step": 1.5}, "step is a whole number"),
        ({"step": True}, "step is a whole number"),
        ({"evidence": "x" * 2001}, "2,001 characters"),
        ({"numbers": {"a": float("nan")}}, "finite number"),
        ({"numbers": {"a": 10**400}}, "finite number"),
        ({"numbers": {"a": "1"}}, "finite number"),
        ({"numbers": {str(n): n for n in range(33)}}, "33 numbers"),
        ({"more": 1}, "exactly kind"),
    ],
)
def test_an_observation_from_elsewhere_is_checked(change: dict[str, object], why: str) -> None:
    assert Observation.of(GOOD).step == 1
    with pytest.raises(QuarantineError, match=why):
        Observation.of(GOOD | change)


def test_no_text_breaks_the_reader() -> None:
    others: tuple[object, ...] = ([], 1, None, "", {})
    for other in others:
        with pytest.raises(QuarantineError, match="no observation of a fault"):
            Observation.of(other)
    rng, good = random.Random(0), json.dumps(GOOD).encode()
    for _ in range(2000):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            facts = json.loads(damaged)
        except ValueError:
            continue
        with contextlib.suppress(QuarantineError):
            Observation.of(facts)
