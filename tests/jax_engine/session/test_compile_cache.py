"""JAX's compile cache: JAX runs whatever it finds there, so nobody else may put anything there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax, jax.numpy as jnp
from meshmend.jax.session.compile_cache import use_compile_cache
use_compile_cache(None)
print(jax.config.jax_enable_compilation_cache)
jax.jit(lambda x: x + 1)(jnp.zeros(3))
"""
EARLIER = """
import jax, jax.numpy as jnp
jax.jit(lambda x: x - 1)(jnp.zeros(3))
"""
SAVED = """
import jax, numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from meshmend.jax.session.compile_cache import use_compile_cache, use_no_compile_cache

def saved(x):
    compiled = jax.jit(lambda x: (x * x).sum(0)).lower(x).compile()
    jax.clear_caches()
    return deserialize_and_load(*serialize(compiled), execution_devices=jax.devices()[:1])

x = np.arange(6, dtype=np.float32).reshape(3, 2)
use_compile_cache(None)
print(saved(x)(x))
try:
    saved(x)(x)
except jax.errors.JaxRuntimeError as error:
    print("not found" in str(error))
use_no_compile_cache()
for _ in range(2):
    print(saved(x)(x))
"""
"""The program is the same each time: the second one comes from JAX's cache. The setting is part of the cache's keys, so
that the third would not come from there, but the fourth."""


def compile_with(folder: Path, script: str = SCRIPT) -> tuple[str, str]:
    """What a process prints that compiles with this folder as its cache."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("mode", [pytest.param(0o770, marks=pytest.mark.slow), 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(mode)
    out, err = compile_with(folder)
    assert "can be written to by other users" in err
    assert out == "False\n"
    assert not list(folder.iterdir())


def test_a_folder_that_others_can_write_to_is_not_used_after_a_script_has_compiled(tmp_path: Path) -> None:
    """JAX asks once whether there is a cache: when it first compiles."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(0o770)
    early = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    settings = f"import os; os.environ |= {early}\n"
    compile_with(folder, settings + EARLIER)
    before = {path.name for path in folder.iterdir()}
    assert before, "the oracle: JAX has used it"
    compile_with(folder, settings + EARLIER + SCRIPT)
    assert {path.name for path in folder.iterdir()} == before


def test_a_program_that_is_compiled_after_the_cache_is_switched_off_can_be_saved(tmp_path: Path) -> None:
    """Also if the same program is in the cache, and JAX has used that: XLA saves none of its functions then."""
    out, _ = compile_with(tmp_path / "compiled", SAVED)
    assert out.splitlines() == ["[20. 35.]", "True", "[20. 35.]", "[20. 35.]"]


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    out, err = compile_with(tmp_path / "compiled")
    assert (out, "compiled" in err) == ("True\n", False)
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "compiled").iterdir()), "the oracle: what is compiled is kept there"
