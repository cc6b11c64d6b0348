from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from meshmend.jax.data.read_ahead import ReadAhead

WITHIN_S = 10


def feeding() -> int:
    return sum(thread.name == "meshmend-feed" for thread in threading.enumerate())


def becomes(condition: Callable[[], bool]) -> bool:
    """Whether it is so before long."""
    end = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = feeding()
    yield
    gc.collect()
    assert becomes(lambda: feeding() <= before)


def counted(made: list[int], n: int | None = None) -> Iterator[int]:
    for number in range(10**9 if n is None else n):
        made.append(number)
        yield number


def test_items_come_in_order_and_no_more_are_made_ahead_than_asked_for() -> None:
    made: list[int] = []
    ahead = ReadAhead(counted(made), 3)
    for number in range(5):
        assert becomes(lambda wanted=number + 3: len(made) >= wanted)  # type: ignore[misc]
        time.sleep(0.02)
        assert len(made) == number + 3, "it waits for room"
        assert next(ahead) == number
    ahead.close()


def test_it_ends_with_its_items_and_stays_at_the_end() -> None:
    ahead, before = ReadAhead(counted([], 2), 5), feeding()
    assert [next(ahead), next(ahead)] == [0, 1]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    assert becomes(lambda: feeding() < before or before == 0)


def test_an_error_is_raised_where_the_item_is_asked_for() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the disk is gone")

    ahead = ReadAhead(items(), 2)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="the disk is gone"):
            next(ahead)


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    ahead = ReadAhead(counted([]), 2)
    next(ahead)
    assert feeding() == 1
    ahead.close()
    assert feeding() == 0, "close waits for it"
    ahead.close()


def test_an_object_that_nothing_refers_to_ends_its_thread() -> None:
    ahead = ReadAhead(counted([]), 1)
    next(ahead)
    assert feeding() == 1
    del ahead
    assert becomes(lambda: feeding() == 0)


def test_a_process_exits_while_the_thread_is_at_work() -> None:
    """A daemon thread that is killed inside C++ code, such as JAX's pytrees, would abort it."""
    program = (
        "import itertools, jax, numpy as np\n"
        "from meshmend.jax.data.read_ahead import ReadAhead\n"
        "x = {str(i): np.arange(9) for i in range(999)}\n"
        "ahead = ReadAhead((jax.tree.map(lambda y: y[[1, 2]], x) for _ in itertools.count()), 10**6)\n"
        "next(ahead)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
