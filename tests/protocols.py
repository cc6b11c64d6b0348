"""Runs the participants of a protocol in a loop: any number of them, without processes, sockets or threads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from meshmend.errors import MeshmendError
from meshmend.jax.session.coordination import Protocol, Question

T = TypeVar("T")


@dataclass
class Spoken(Generic[T]):
    """What the participants have come to, and what was said on the way."""

    results: list[T]
    n_questions: int
    answer_bytes: list[int]
    """Of each answer, as JSON."""
    fact_bytes: list[int]
    """Of the longest fact of each question, as JSON."""


def run_together(participants: Sequence[Protocol[T]]) -> Spoken[T]:
    """Run all participants of a protocol in step: the first of them judges each question, and all hear its answer.

    All must ask equally many questions. An error that the judge raises is raised in each of them, and by this.
    """
    spoken: Spoken[T] = Spoken([], 0, [], [])
    questions: list[Question] = [next(one) for one in participants]
    while True:
        spoken.n_questions += 1
        facts = [json.dumps(question.fact) for question in questions]
        spoken.fact_bytes.append(max(map(len, facts)))
        try:
            answer = json.dumps(questions[0].judge([json.loads(fact) for fact in facts]))
        except MeshmendError as error:
            for one in participants[1:]:
                try:
                    one.throw(error)
                except type(error):
                    continue
                raise AssertionError("a participant goes on after an error of all") from error
            raise
        spoken.answer_bytes.append(len(answer))
        questions, spoken.results = [], []
        heard = json.loads(answer)  # once: nobody may change what all hear
        for one in participants:
            try:
                questions.append(one.send(heard))
            except StopIteration as end:
                spoken.results.append(end.value)
        if spoken.results:
            assert not questions, f"{len(questions)} participants ask on, {len(spoken.results)} are done"
            return spoken
