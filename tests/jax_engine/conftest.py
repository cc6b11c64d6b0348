"""JAX reads its device count once, when it is imported: 64 virtual CPU devices, before any test does that."""

import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

CHIPS = "--xla_force_host_platform_device_count=64"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = CHIPS

COMPILE_QUICKLY = "--xla_backend_optimization_level=0"
if version("jax").startswith("0.10."):  # later ones may have no such flags
    COMPILE_QUICKLY += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Most of these tests' time is XLA's compiler, and this halves it; what programs mean does not depend on it. Jobs,
pages and examples, which run in processes of their own, have XLA as users have it, and so have all tests where
XLA_OPTIMIZER=on: `.ci/nightly` sets that."""

SAME_PROGRAMS = ("job", "state")
"""Tests that compile the same few train steps over and over, in jobs that start again."""


def flags() -> str:
    """Return XLA's flags for the tests of this process."""
    return CHIPS if os.environ.get("XLA_OPTIMIZER") == "on" else f"{CHIPS} {COMPILE_QUICKLY}"


def pytest_configure() -> None:
    """Set the flags before a module of tests is imported."""
    os.environ["XLA_FLAGS"] = flags()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let JAX read its flags now: libtpu refuses those that are for CPUs, and processes that tests start have none."""
    if any("jax_engine" in item.path.parts for item in items):
        import jax

        os.environ["XLA_FLAGS"] = flags()
        jax.devices()
    os.environ["XLA_FLAGS"] = CHIPS


@pytest.fixture(scope="module", autouse=True)
def compile_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled programs on disk for the tests of jobs: a program that was compiled before is loaded."""
    if request.path.parent.name not in SAME_PROGRAMS:
        yield
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_enable_compilation_cache": True,  # jobs with a key switch it off
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compiled"),  # of this process alone
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for settings in (options, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX asks once per process whether there is a cache
        if settings is options:
            yield
