"""An error of a callback: JAX raises it as one of its own, as it does where a peer is lost."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from meshmend.launch.failure import describe_failure


def test_an_error_of_a_callback_is_the_scripts_and_no_lost_peer() -> None:
    def log(_: Any) -> None:
        raise ValueError("no such run")

    def step(x: Any) -> Any:
        jax.experimental.io_callback(log, None, x)
        return x + 1

    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(jax.jit(step)(1.0))
    found = describe_failure(raised.value)
    assert (found.kind, found.error) == ("lasting", "ValueError: no such run")
    last = [line for line in found.trace.splitlines() if line.startswith("  File ")][-1]
    assert "test_callbacks.py" in last
    assert last.endswith(", in log")
    assert "jax/_src" not in found.trace
    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    assert describe_failure(lost).kind == "transient"
