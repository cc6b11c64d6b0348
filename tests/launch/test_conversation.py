"""What a host says to its store, and what it makes of the answers, with a clock of our own."""

from __future__ import annotations

from typing import Any

import pytest

from meshmend.errors import LaunchError
from meshmend.launch.member import AWAY_S, GONE_S, MOST_REFUSALS, STILL_AWAY_S, Conversation
from meshmend.launch.membership import RefusedError
from meshmend.launch.messages import MessageError

ROUND = {"type": "round", "number": 3, "name": "abc", "hosts": (0, 2), "cut_off": (), "before": 2}
ROUND |= {"coordinator": "10.0.0.1:7000", "store_at": ""}
STOP = {"type": "stop", "why": "host 0 is lost", "lost": 0, "number": 3}
AWAY = ConnectionError("Connection refused")


def make() -> Conversation:
    return Conversation(2, (1, 3), "", "10.0.0.9:29400", 100.0, uniform=lambda low, high: (low + high) / 2)


def in_round(**facts: Any) -> Conversation:
    talk = make()
    talk.greet("10.0.0.2")
    talk.join(7002)
    talk.hear({**ROUND, **facts})
    return talk


def test_a_store_that_takes_over_hears_what_this_host_runs_and_what_it_has_asked() -> None:
    talk = make()
    asked = talk.join(7002, "its worker ended with SIGKILL")
    hello, *again = talk.greet("10.0.0.2")
    assert (hello["host"], hello["hosts"], hello["running"], hello["number"]) == (2, (1, 3), None, 0)
    assert again == [asked]
    talk.hear(ROUND)
    hello, *again = talk.greet("10.0.0.2")
    assert (hello["running"], hello["number"]) == ({"number": 3, "name": "abc", "hosts": (0, 2)}, 3)
    assert again == []
    talk.hear(STOP)
    assert talk.greet("10.0.0.2")[0]["running"] is None


def test_an_error_of_the_worker_is_said_again_to_a_store_that_was_away() -> None:
    """It was said once, and lost with the store: all hosts had raised it, and the job started again all the same."""
    talk = in_round()
    raised = talk.raised("ValueError: boom")
    assert talk.greet("10.0.0.2")[1:] == [raised]
    talk.hear({**ROUND, "number": 4})
    assert talk.greet("10.0.0.2")[1:] == [], "it was of the round before"


@pytest.mark.parametrize("kind", ["fail", "finish"])
def test_the_end_of_a_host_is_said_again_to_a_store_that_was_away(kind: str) -> None:
    talk = in_round()
    said = talk.fail("no step was made") if kind == "fail" else talk.finish()
    assert talk.greet("10.0.0.2")[1:] == [said]


def test_no_worker_starts_for_a_round_that_has_ended_already() -> None:
    """The round and its end had come before the agent woke up, and a worker started for it, to be killed at once."""
    talk = in_round()
    assert talk.join_again() is None
    talk.hear(STOP)
    again = talk.join_again()
    assert again == {"type": "join", "port": 7002, "why": ""}
    assert (talk.assignment, talk.greet("10.0.0.2")[1:]) == (None, [again])
    talk.hear({**ROUND, "number": 4})
    assert talk.join_again() is None
    assert talk.assignment is not None
    assert talk.assignment.number == 4


def test_a_host_that_waits_for_a_store_that_never_comes_back_ends() -> None:
    """A host that was cut off near the end of the job looked for its store for ever."""
    talk = in_round()
    talk.hear(STOP)
    talk.join(7002)
    assert talk.beat(100.0) is None
    for second in range(101, 100 + int(GONE_S)):
        talk.lose(AWAY, second)
        talk.beat(second)
        talk.check()
    talk.beat(100.5 + GONE_S)
    with pytest.raises(
        LaunchError, match=r"has been away for 30 minutes \(Connection refused\).*start the store again"
    ):
        talk.check()


def test_a_host_that_trains_goes_on_without_a_store_for_ever() -> None:
    talk = in_round()
    talk.beat(100.0)
    talk.lose(AWAY, 101.0)
    talk.beat(100.0 + 100 * GONE_S)
    assert talk.goes_on
    assert talk.stopped is None


def test_a_host_says_now_and_then_that_the_store_is_away() -> None:
    talk = in_round()
    talk.beat(100.0)
    assert talk.lose(AWAY, 100.0) == 0.5
    told = [away for tenth in range(1000, 1400) if (away := talk.beat(tenth / 10)) is not None]
    assert [one["for_s"] for one in told] == pytest.approx(
        [AWAY_S, AWAY_S + STILL_AWAY_S, AWAY_S + 2 * STILL_AWAY_S], abs=0.2
    )
    assert {(one["why"], one["reached"]) for one in told} == {("Connection refused", True)}


def refuse(talk: Conversation, now: float, *, is_certain: bool, retryable: bool = True) -> None:
    talk.greet("10.0.0.2")
    try:
        talk.hear({"type": "refused", "why": "another process", "retryable": retryable, "is_certain": is_certain})
    except RefusedError as error:
        talk.lose(error, now)


def test_a_host_is_refused_for_good_only_by_one_that_is_certainly_there() -> None:
    """The rightful host gave up: pauses of the store had made what was left of its old process seem alive."""
    for is_certain in (True, False):
        talk = make()
        for second in range(MOST_REFUSALS + 1):
            assert talk.goes_on
            refuse(talk, 100.0 + second, is_certain=is_certain)
        assert talk.goes_on is not is_certain


def test_a_host_that_was_frozen_between_two_refusals_tries_on() -> None:
    """A simulated host gave up after two: between them it was frozen for half a minute, or its clock had jumped."""
    talk = make()
    refuse(talk, 100.0, is_certain=True)
    refuse(talk, 133.0, is_certain=True)
    assert talk.goes_on


def test_a_host_that_was_refused_by_a_store_that_has_gone_since_gives_up() -> None:
    """A simulated host waited for ever: it had come back in the last second of the job, and was to try again."""
    talk = make()
    refuse(talk, 100.0, is_certain=True)
    talk.lose(AWAY, 159.0)
    assert talk.goes_on
    talk.lose(AWAY, 161.0)
    with pytest.raises(LaunchError, match="No store answers"):
        talk.check()


def test_a_host_that_does_not_belong_gives_up_at_once() -> None:
    talk = make()
    refuse(talk, 100.0, is_certain=True, retryable=False)
    with pytest.raises(LaunchError, match=r"^The store at 10\.0\.0\.9:29400 refuses this host: another process\.$"):
        talk.check()


def test_a_host_that_never_reaches_a_store_gives_up_and_one_that_is_turned_away_does_not() -> None:
    for error, goes_on in ((AWAY, False), (MessageError("key"), False), (MessageError("full"), True)):
        talk = make()
        for second in range(62):
            talk.lose(error, 100.0 + second)
        assert talk.goes_on is goes_on, error
