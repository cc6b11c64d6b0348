"""JAX reads its device count once, when it is imported: 64 virtual CPU devices, before any test does that."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

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

ABOUT_COMPILING = ("compile", "session", "test_cache.py", "test_compiler_options.py")
"""Folders and modules of tests that count compilations, or save what was compiled, which for CPUs cannot be a program
that came from JAX's cache."""


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


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of compiled programs. It begins with those of earlier runs where MESHMEND_TESTS_COMPILED names a folder.

    Each process has a folder of its own, as JAX may read a file of another one that is not yet whole.
    """
    if "MESHMEND_TESTS_COMPILED" not in os.environ:
        yield tmp_path_factory.getbasetemp() / "compiled"
        return
    kept = Path(os.environ["MESHMEND_TESTS_COMPILED"]) / f"optimizer-{os.environ.get('XLA_OPTIMIZER', 'off')}"
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        for old in kept.glob("*-cache"):
            os.link(old, Path(folder) / old.name)
        yield Path(folder)
        for new in Path(folder).glob("*-cache"):
            with contextlib.suppress(FileExistsError):
                os.link(new, kept / new.name)


@pytest.fixture(scope="module", autouse=True)
def compile_once(request: pytest.FixtureRequest, compiled: Path) -> Iterator[None]:
    """Keep compiled programs on disk: one that was compiled before, by another test or in a run before, is loaded."""
    if {request.path.name, request.path.parent.name} & set(ABOUT_COMPILING):
        yield
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_enable_compilation_cache": True,  # jobs with a key switch it off
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",  # their folder would be part of each program's key
    }
    before = {name: getattr(jax.config, name) for name in options}
    for settings in (options, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX asks once per process whether there is a cache
        if settings is options:
            yield
