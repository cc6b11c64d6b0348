from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import meshmend.jax as mmj
from meshmend.jax.data.read_ahead import Submit, read_ahead
from rows import others_slow
from waiting import until


def feeding() -> int:
    return sum(thread.name.startswith("meshmend-feed") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = feeding()
    yield
    gc.collect()
    until(lambda: feeding() <= before)


@pytest.mark.parametrize(
    ("threads", "depth"), others_slow([(0, 3), (1, 0), (1, 1), (2, 3), (4, 20)], quick=[(0, 3), (1, 1), (4, 20)])
)
def test_steps_come_in_order_and_no_more_are_begun_ahead_than_asked_for(threads: int, depth: int) -> None:
    begun: list[int] = []

    def begin(step: int, submit: Submit) -> Callable[[], int]:
        begun.append(step)
        parts = [submit(lambda part: 10 * step + part, part) for part in range(3)]
        return lambda: sum(part.result() for part in parts)

    ahead = read_ahead(begin, 9, threads=threads, depth=depth)
    depth = depth if threads else 0
    assert len(begun) == min(9, depth), "before the first is asked for"
    for step in range(9):
        assert next(ahead) == 30 * step + 3
        assert len(begun) == min(9, step + 1 + depth)
    assert list(ahead) == []


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_where_its_step_is_asked_for(threads: int) -> None:
    class Source(list[float]):
        def __getitem__(self, number: Any) -> Any:
            if number == wanted[1]:
                raise OSError("the file of this sample is gone")
            return super().__getitem__(number)

    fabric = mmj.discover(jax.devices()[:4], shape="2x2")
    feed = mmj.Feed(Source(np.arange(100.0)), mmj.KeepGlobal(1), threads=threads)
    wanted = feed.records(0)[:2].tolist()
    batches = feed.batches(fabric)
    assert next(batches).indices.tolist() == wanted[:1]
    with pytest.raises(OSError, match="the file of this sample is gone"):
        next(batches)


def test_an_array_is_read_in_one_thread_that_ends_with_the_batches() -> None:
    gc.collect()
    before, fabric = feeding(), mmj.discover(jax.devices()[:16], shape="4x4")
    feed = mmj.Feed(np.arange(1000), mmj.KeepGlobal(16))
    batches = feed.batches(fabric)
    assert feeding() == before + 1, "reading ahead begins at once"
    del batches
    until(lambda: feeding() == before)  # never iterated
    batches = feed.batches(fabric)
    next(batches)
    next(batches)
    assert feeding() == before + 1
    batches.close()  # type: ignore[attr-defined]
    until(lambda: feeding() == before)


@pytest.mark.slow
def test_a_process_exits_while_threads_are_at_work() -> None:
    """A thread that is killed inside C++ code, such as JAX's pytrees, would abort it."""
    program = (
        "import jax, numpy as np\n"
        "from meshmend.jax.data.read_ahead import read_ahead\n"
        "x = {str(i): np.arange(9) for i in range(999)}\n"
        "read = lambda: jax.tree.map(lambda y: y[[1, 2]], x)\n"
        "ahead = read_ahead(lambda step, submit: submit(read).result, 10**6, threads=2, depth=1000)\n"
        "next(ahead)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
