"""JAX's compile cache: JAX runs whatever it finds there, so nobody else may put anything there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax, jax.numpy as jnp
from meshmend.jax.job.compile_cache import use_compile_cache
use_compile_cache(None)
print(jax.config.jax_enable_compilation_cache)
jax.jit(lambda x: x + 1)(jnp.zeros(3))
"""


def compile_with(folder: Path) -> tuple[str, str]:
    """What a process prints that compiles with this folder as its cache."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(mode)
    out, err = compile_with(folder)
    assert "can be written to by other users" in err
    assert out == "False\n"
    assert not list(folder.iterdir())


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    out, err = compile_with(tmp_path / "compiled")
    assert (out, "compiled" in err) == ("True\n", False)
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "compiled").iterdir()), "the oracle: what is compiled is kept there"
