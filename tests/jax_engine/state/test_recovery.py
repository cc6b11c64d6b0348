"""Which state a job resumes from, decided by any number of hosts in a loop: no process, no socket, no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from meshmend.errors import RestartError, TransientError
from meshmend.jax.state.recovery import Answer, Holder, StateSearch, recover
from protocols import Spoken, run_together

SLICES = 8


@dataclass
class Host:
    """A light participant: the parts that it holds, by (attempt, step), and those of them that are damaged."""

    number: int
    parts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    disk: list[tuple[int, int]] = field(default_factory=list)
    unreadable: set[int] = field(default_factory=set)
    """Steps whose checkpoint this host cannot read."""
    late: bool = False
    """Whether that is because the disk does not answer."""
    others: dict[str, Any] = field(default_factory=dict)
    """Facts that differ from those of a usual host."""
    needed: set[int] = field(default_factory=set)
    """Parts that this host reads for itself: of others, it finds damage only when it is to send them."""
    n_parts: int = 0
    taken: list[str] = field(default_factory=list)

    def offers(self, n_parts: int, hosts: int) -> Iterator[dict[str, Any]]:
        for (attempt, step), parts in self.parts.items():
            yield {
                "attempt": attempt, "step": step, "kind": "memory", "generation": f"g{attempt}.{step}", "differs": "",
                "slices": [SLICES, SLICES], "n_shares": n_parts, "n_parts": n_parts, "parts": parts, "verified": -1,
                "run": f"run {attempt}", "hosts": [[0, hosts - 1]],
            }  # fmt: skip
        for attempt, step in self.disk:
            yield {
                "attempt": attempt, "step": step, "kind": "disk", "generation": f"c{step}", "differs": "",
                "verified": -1,
            }  # fmt: skip

    def have(self, n_parts: int, hosts: int) -> Answer:
        self.n_parts = n_parts
        usual = {
            "identity": "one model", "run": "a new run", "offers": list(self.offers(n_parts, hosts)), "problems": [],
            "claimed": 0, "untrusted": None, "start_over": 0,
        }  # fmt: skip
        return usual | self.others

    def take(self, what: Answer) -> Answer:
        source = what["source"]
        self.taken.append(source["name"])
        if source["kind"] == "disk":
            why = f"step {source['step']} cannot be read" if source["step"] in self.unreadable else ""
            return {"why": why, "is_late": self.late and why != "", "extra": {"position": source["step"]}}
        own = self.parts.get((source["attempt"], source["step"]), [])
        found = sorted(self.damaged & {*own} & self.needed)
        self.needed = set()  # it knows by now
        wants = np.zeros((self.n_parts, SLICES), bool)
        wants[:, :2] = True
        wants[[part for part in own if part not in self.damaged]] = False
        return {
            "why": f"part {found[0]} is damaged" if found else "",
            "damaged": found,
            "wants": np.packbits(wants).tobytes().hex(),
            **({"extra": {"position": source["step"]}} if own else {}),
        }

    def send(self, sent: list[list[int]], process: int) -> Answer:
        found = sorted({part for part, _, sender in sent if sender == process} & self.damaged)
        return {"why": f"part {found[0]} cannot be sent" if found else "", "damaged": found}


def job(hosts: list[Host], n_parts: int, *, were: int | None = None, round_: int = 2) -> Spoken[tuple[Answer, Answer]]:
    """Recover with these hosts, of which there `were` more when they kept their copies."""

    def participant(process: int, host: Host) -> Any:
        def described(source: Any) -> Answer | None:
            facts = source if isinstance(source, dict) else source.facts()
            return {"outline": "as it was"} if (facts["attempt"], facts["step"]) in host.parts else None

        judge = StateSearch([one.number for one in hosts], round_, "/memory", lambda rooms, _: len(rooms), described)
        said = Holder(
            lambda: host.have(n_parts, were or len(hosts)),
            lambda source: described(source) or {},
            host.take,
            lambda sent: host.send(sent, process),
        )
        return recover(process, judge, said)

    return run_together([participant(process, host) for process, host in enumerate(hosts)])


def replicated(n: int, *steps: int, n_parts: int = 4) -> list[Host]:
    return [Host(number, {(1, step): list(range(n_parts)) for step in steps}) for number in range(n)]


@pytest.mark.parametrize("n", [1, 2, 5, 200])
def test_two_questions_find_the_newest_state_that_everybody_has(n: int) -> None:
    hosts = replicated(n, 6, 7)
    spoken = job(hosts, 4)
    assert spoken.n_questions == 2
    for begun, last in spoken.results:
        assert (begun["attempt"], last["do"], last["source"]["step"], last["extra"]) == (2, "go", 7, {"position": 7})
        assert last["problems"] == []
        assert last["send"] == [], "each has all parts"


def test_a_new_job_starts_and_one_that_has_trained_does_not() -> None:
    spoken = job([Host(number) for number in range(3)], 4, round_=1)
    assert [last["do"] for _, last in spoken.results] == 3 * ["start"]
    assert spoken.n_questions == 1
    hosts = [Host(0, {(1, 7): [0, 1]}), Host(2, {(1, 7): [1, 2]})]
    spoken = job(hosts, 4, were=3)
    assert [(last["do"], last["hosts"], last["step"]) for _, last in spoken.results] == 2 * [("wait", [1], 7)]
    assert "lack 1 of 4 parts, which only host 1 has" in spoken.results[0][1]["missing"]
    assert "Nothing was removed from /memory" in spoken.results[0][1]["error"]
    with pytest.raises(RestartError, match=r"lack 1 of 4 parts\nNothing was removed"):
        job([hosts[0], Host(1, {(1, 7): [1, 2]})], 4, were=2)


def test_a_job_that_has_lost_all_copies_does_not_take_itself_for_new() -> None:
    """Process 0 has the record of a copy that was complete, and nobody has a part of it."""
    known = Host(0, {(1, 7): []})
    spoken = job([known, Host(2)], 4, were=3)
    assert [(last["do"], last["hosts"], last["step"]) for _, last in spoken.results] == 2 * [("wait", [1], 7)]
    assert "lack 4 of 4 parts, which only host 1 has" in spoken.results[0][1]["missing"]
    with pytest.raises(
        RestartError, match=r"step 7 \(attempt 1\) lack 4 of 4 parts\nNothing was removed.*--start-over"
    ):
        job([known, Host(1), Host(2)], 4, were=3)
    begun_anew = [Host(number, known.parts, others={"start_over": 2}) for number in range(3)]
    assert [last["do"] for _, last in job(begun_anew, 4, round_=2).results] == 3 * ["start"]
    on_disk = [Host(0, known.parts, disk=[(1, 5)]), Host(1)]
    assert {last["source"]["step"] for _, last in job(on_disk, 4).results} == {5}


@pytest.mark.parametrize("needed", [{2}, set[int]()])
def test_a_damaged_part_comes_from_another_host(needed: set[int]) -> None:
    """Whether its host finds out when it reads it for itself, or when it is to send it to a host that has nothing."""
    hosts = [*replicated(3, 7), Host(3)]
    hosts[0].parts[1, 7] = [0, 1, 3]
    for host in hosts:
        host.damaged, host.needed = ({2}, needed) if host.number == 1 else (set(), set())
    spoken = job(hosts, 4)
    last = spoken.results[0][1]
    assert last["source"]["step"] == 7
    assert last["problems"] == [f"host 1: part 2 {'is damaged' if needed else 'cannot be sent'}"]
    assert {process for part, _, process in last["send"] if part == 2} == {2}
    assert sorted({(part, which) for part, which, _ in last["send"]}) == [(p, w) for p in range(4) for w in (0, 1)]
    n_sent = Counter(process for _, _, process in last["send"])
    assert max(n_sent.values()) <= 3, "eight slices, by three hosts"
    # have, take, take again and send; or have, take, send, take again and send.
    assert spoken.n_questions == (4 if needed else 5)


def test_a_part_that_is_damaged_everywhere_leads_to_the_state_before_it() -> None:
    hosts = [Host(0, {(1, 7): [0, 1], (1, 6): [0, 1]}), Host(1, {(1, 7): [2, 3], (1, 6): [2, 3]})]
    hosts[1].damaged = hosts[1].needed = {3}
    hosts[1].parts[1, 6] = [2]
    hosts[0].disk = [(1, 5)]
    last = job(hosts, 4).results[1][1]
    assert (last["source"]["kind"], last["source"]["step"], last["checkpoints"]) == ("disk", 5, [5])
    assert last["problems"] == ["host 1: part 3 is damaged"]


def test_a_checkpoint_that_one_host_cannot_read_is_skipped_by_all() -> None:
    hosts = [Host(0, disk=[(1, 20), (1, 10)]), Host(1, unreadable={20}), Host(2)]
    spoken = job(hosts, 4)
    for _, last in spoken.results:
        assert (last["source"]["step"], last["checkpoints"]) == (10, [10])
        assert last["problems"] == ["host 1: step 20 cannot be read"]


def test_a_disk_that_does_not_answer_sends_no_job_back_to_an_older_checkpoint() -> None:
    hosts = [Host(0, disk=[(1, 20), (1, 10)]), Host(1, unreadable={20}, late=True), Host(2)]
    with pytest.raises(TransientError, match=r"host 1: step 20 cannot be read .*tries again") as raised:
        job(hosts, 4)
    assert raised.value.step == 20
    assert [one.taken for one in hosts] == [["the checkpoint on disk of step 20 (attempt 1)"]] * 3


def test_a_new_process_0_asks_one_that_has_a_copy_what_is_in_it() -> None:
    hosts = [Host(4), *replicated(3, 7)]
    spoken = job(hosts, 4)
    assert spoken.n_questions == 4
    for _, last in spoken.results:
        assert (last["do"], last["outline"]) == ("go", "as it was")
        # The newcomer has nothing: all slices that it wants are sent to it.
        assert sorted({part for part, _, _ in last["send"]}) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"identity": "another"}, "different models"),
        ({"error": "host 1: no room"}, "host 1: no room"),
    ],
)
def test_what_is_wrong_with_one_host_is_raised_on_all(facts: dict[str, Any], why: str) -> None:
    hosts = replicated(4, 7)
    hosts[1].others = facts
    with pytest.raises(RestartError, match=why):
        job(hosts, 4)


def test_a_state_of_another_model_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = replicated(2, 7)
    offers: Callable[..., Any] = hosts[0].offers
    monkeypatch.setattr(hosts[0], "offers", lambda *n: [one | {"differs": "w is (2,)"} for one in offers(*n)])
    with pytest.raises(RestartError, match=r"another model or optimizer .* w is \(2,\)"):
        job(hosts, 4)


def test_what_a_check_has_made_untrusted_is_passed_over() -> None:
    hosts = [Host(number, {(1, 7): [0, 1], (1, 3): [0, 1]}, others={"untrusted": [[1, 3]]}) for number in range(2)]
    spoken = job(hosts, 2)
    last = spoken.results[0][1]
    assert (last["source"]["step"], last["verified"]) == (3, 3)
    assert "not trusted are the copies in memory of step 7" in last["problems"][0]
    for host in hosts:
        del host.parts[1, 3]
    with pytest.raises(RestartError, match=r"Nothing .* step 3, the last verified one"):
        job(hosts, 2)


def test_starting_over_on_purpose_passes_over_everything() -> None:
    hosts = [Host(number, {(1, 7): [0, 1]}, others={"start_over": 2}) for number in range(2)]
    assert job(hosts, 2).results[0][1]["do"] == "start"


def test_a_pod_recovers_sharded_state_with_three_questions_and_small_answers() -> None:
    """2,239 of 2,240 hosts, each with the shards of its four chips and those of the host half-way around."""
    n, chips = 2240, 4
    hosts = [
        Host(h, {(1, 7): [chips * one + chip for one in (h, (h + n // 2) % n) for chip in range(chips)]})
        for h in range(n)
        if h != 1000
    ]
    spoken = job(hosts, n * chips, were=n)
    _, last = spoken.results[17]
    assert (spoken.n_questions, last["do"]) == (3, "go")
    keeper = next(process for process, one in enumerate(hosts) if one.number == 2120)
    assert {process for part, _, process in last["send"] if part // chips == 1000} == {keeper}
    assert len(last["send"]) == 2 * chips * n, "each host needs a bit of everybody's shards"
    assert max(spoken.fact_bytes) < 40_000
    assert max(spoken.answer_bytes) < 400_000, "before it is compressed"
