"""Positions in timelines, against jobs whose samples are counted one by one."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import RestartError
from meshmend.jax.data.exactly_once import check_positions
from meshmend.launch.timeline import condense

N = 83
Event = dict[str, Any]


class Job:
    """Rounds of steps on two hosts: what they write, and every sample that each step uses."""

    def __init__(self) -> None:
        self.used: list[range] = []
        self.events: list[list[Event]] = [[], []]
        self.round = 0

    @property
    def sample(self) -> int:
        """Of all epochs together."""
        return self.used[-1].stop if self.used else 0

    def train(self, batch: int, steps: int, lost: int, unwritten: int) -> None:
        """Do steps, of which the last ones are lost, and the very last ones of no host written."""
        self.round += 1
        self.say("feed", step=len(self.used), position=divmod(self.sample, N), batch=batch)
        for number in range(steps):
            at = self.sample
            self.used.append(range(at, at + min(batch, N - at % N)))
            if number < steps - unwritten:
                self.say("step", step=len(self.used), position=divmod(at, N), loss=0.5)
        del self.used[len(self.used) - min(lost, steps) :]

    def say(self, event: str, **facts: Any) -> None:
        for host in self.events:
            host.append({"at": float(len(host)), "event": event, "round": self.round, **facts})

    def check(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            for host, events in enumerate(self.events):
                lines = "".join(json.dumps(event) + "\n" for event in events)
                (Path(folder) / f"host-{host}.jsonl").write_text(lines)
            return check_positions(folder, N)


rounds = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 9), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=6
)


@given(rounds, st.booleans())
def test_a_job_that_fails_again_and_again_passes_the_check(found: list[Any], is_condensed: bool) -> None:
    job = Job()
    for one in found:
        job.train(*one)
    job.train(20, 3, 0, 0)
    if is_condensed:
        job.events[0] = list(condense(job.events[0]))
    assert job.check() == len(job.used)
    counts = Counter(sample for step in job.used for sample in step)
    assert counts == Counter(range(job.sample)), "the job that is made up uses each sample once"


@given(rounds, st.data())
def test_a_position_that_is_another_one_is_found(found: list[Any], data: st.DataObject) -> None:
    job = Job()
    for one in found:
        job.train(*one)
    job.train(20, 3, 0, 0)
    chosen = data.draw(st.integers(0, len(job.events[0]) - 1))
    event = job.events[0][chosen]
    event["position"] = divmod(event["position"][0] * N + event["position"][1] + data.draw(st.integers(1, 200)), N)
    with pytest.raises(RestartError, match="Samples are lost or used twice at step"):
        job.check()


def test_what_is_lost_or_done_twice_is_named() -> None:
    job = Job()
    job.train(20, 4, 1, 0)
    del job.used[-1]  # the checkpoint of step 2, but the position of step 3
    job.say("feed", step=2, position=(0, 60), batch=20)
    for host in job.events:
        host[-1]["round"] = 2
    with pytest.raises(
        RestartError, match=r"at step 2: round 2 starts from .*sample=60.*expected .*sample=40"
    ) as error:
        job.check()
    assert error.value.step == 2
    job = Job()
    job.train(20, 4, 0, 0)
    job.events[1].clear()
    del job.events[0][2]
    with pytest.raises(RestartError, match="No host has written step 2 of round 1"):
        job.check()
    job = Job()
    job.train(20, 4, 0, 0)
    job.events[1][0]["batch"] = 21
    with pytest.raises(RestartError, match="hosts start round 1 from"):
        job.check()
    with pytest.raises(RestartError, match="has a position"):
        Job().check()
