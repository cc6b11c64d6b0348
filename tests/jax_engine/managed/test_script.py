"""A folder knows the script that trained in it, and another script that finds its state says whose it is."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jax_engine.managed.managed_cases import DATASET, PARAMS, job, train
from meshmend.errors import RestartError, TransientError
from meshmend.jax.job.script import FILE, Script, begin, naming_the_writer


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path / "memory"))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets this process be a script of that name and text; without a name, a session."""

    def become(name: str | None, text: str = "") -> str:
        path = None if name is None else tmp_path / name
        if path is not None:
            path.write_text(text)
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**({} if path is None else {"__file__": path})))
        return str(path)

    return become


def finish(shared: Path, steps: int, **options: Any) -> None:
    one = job(shared, "1x1", disk_every=100)
    train(one, steps, **options)
    one.close()


def test_another_scripts_state_is_named_where_it_is_refused_done_or_continued(
    tmp_path: Path, scripts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    first = scripts("train.py")
    finish(shared, 2)
    assert Script.of(shared) == Script.running()
    finish(shared, 4)
    assert "The state in" not in caplog.text

    second = scripts("nnx.py")
    whose = (
        rf"The state in {shared} is from {first}, which first trained there on 2\d{{3}}-.* UTC; this script is {second}"
    )
    advice = r"give each script a folder of its own: Job\(shared=…\), and the same to `meshmend run --shared`\."
    with pytest.raises(RestartError, match=rf"A state of another model .* {whose}\. Otherwise {advice}"):
        finish(shared, 4, params=PARAMS | {"more": np.zeros(3, np.float32)})
    with pytest.raises(
        RestartError, match=rf"a dataset whose samples was 100, but now .* {whose}\. Otherwise {advice}"
    ):
        finish(shared, 4, dataset={name: array[:50] for name, array in DATASET.items()})
    caplog.clear()
    finish(shared, 4)
    (said,) = [record.getMessage() for record in caplog.records if "done already" in record.getMessage()]
    assert said.startswith(
        f"All 4 steps of the job in {shared} are done already. The state in {shared} is from {first},"
    )
    assert said.endswith("give Job another folder, or remove this one.")
    kept = Script.of(shared)
    assert kept is not None
    assert kept.path == first, "who has trained nothing signs nothing"

    caplog.clear()
    finish(shared, 5)
    (said,) = [record.getMessage() for record in caplog.records if "The state in" in record.getMessage()]
    assert said.endswith(
        f"this script is {second}. It goes on after step 4. If that is not meant, give each script a "
        "folder of its own: Job(shared=…), and the same to `meshmend run --shared`."
    )
    assert Script.of(shared) == Script.running()


def test_a_script_that_was_changed_goes_on_and_is_named_where_it_is_refused(
    tmp_path: Path, scripts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = scripts("train.py", "old")
    begin(tmp_path, 0, 9)
    scripts("train.py", "new")
    whose = rf"^no\. The state in \S+ is from {path}, .* and has been changed since\. Otherwise give each"
    with pytest.raises(RestartError, match=whose), naming_the_writer(tmp_path):
        raise RestartError("no.", step=3)
    begin(tmp_path, 5, 9)
    assert not caplog.records
    with pytest.raises(RestartError, match=r"^no\.$"), naming_the_writer(tmp_path):
        raise RestartError("no.")


def test_errors_that_are_not_about_the_state_stay_as_they_are(tmp_path: Path, scripts: Any) -> None:
    scripts("one.py")
    begin(tmp_path, 0, 9)
    scripts("other.py")
    with pytest.raises(TransientError, match=r"^gone$"), naming_the_writer(tmp_path):
        raise TransientError("gone")


def test_a_session_without_a_script(tmp_path: Path, scripts: Any, caplog: pytest.LogCaptureFixture) -> None:
    scripts(None)
    begin(tmp_path, 0, 9)
    scripts("train.py")
    with caplog.at_level(logging.WARNING):
        begin(tmp_path, 5, 9)
    assert "is from an interactive session, which first trained" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 9_000, b'{"path": 1, "digest": "", "began": ""}',
        b'{"path": "\\u001b[2J", "digest": "", "began": ""}',
        b'{"path": "' + b"x" * 20_000 + b'", "digest": "", "began": ""}',
    ],
    ids=range(8),
)  # fmt: skip
def test_a_file_that_says_something_else_says_nothing(content: bytes, tmp_path: Path, scripts: Any) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert Script.of(tmp_path) is None
    scripts("train.py")
    begin(tmp_path, 5, 9)
    assert json.loads((tmp_path / FILE).read_text())["path"] == str(tmp_path / "train.py")
