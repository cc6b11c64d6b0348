"""What a job refuses, and that it says what to do: wrong arguments, other data, other parameters, other folders."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import meshmend.jax as mmj
from jax_engine.job.job_cases import DATASET, PARAMS, WHOLE, alone, job, loss, train
from meshmend.errors import ParameterError, PlanError, RestartError
from meshmend.jax.job.exit import Ending
from meshmend.jax.job.run import digest
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.shared_folder import open_shared
from meshmend.jax.session.single_process import initialize_alone, is_launched
from meshmend.planning import StepDemands
from meshmend.schedule import Collective


class TwoProcesses(Coordination):
    """Another process answers with what `change` makes of each fact."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(0, 1)
        self.change = change

    def decide(self, fact: Any, judge: Callable[[list[Any]], Any]) -> Any:
        return judge([fact] if self.change(fact) == fact else [fact, self.change(fact)])


def with_another(change: Callable[[Any], Any]) -> Any:
    return replace(alone(WHOLE), coordination=TwoProcesses(change))


def changed(name: str, value: Any) -> Callable[[Any], Any]:
    """Change a setting, which processes say together with the plan that they have."""
    return lambda fact: (
        [fact[0] | {name: value}, fact[1]] if isinstance(fact, list) and isinstance(fact[0], dict) else fact
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0, expected a number of samples per step of at least 1"),
        ({"global_batch": 2.5}, "global_batch is 2.5"),
        ({"memory_every": -1}, "memory_every is -1, expected a number of steps, or 0 for never"),
        ({"disk_every": True}, "disk_every is True"),
        (
            {"disk_every": "0min"},
            'disk_every is .0min., expected a number of steps, or 0 for never, or a time as in "10min"',
        ),
        ({"disk_every": "10 minutes"}, "'10 minutes' is not a time"),
        ({"memory_every": "10min"}, "memory_every is .10min., expected"),
    ],
)
def test_wrong_arguments_of_a_job(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"global_batch": 32, "session": alone(WHOLE)} | options
    with pytest.raises(ParameterError, match=message):
        mmj.Job(tmp_path / "shared", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {}}, "params has no arrays"),
        ({"params": {"w": loss}}, r"params\['w'\] is a function, expected an array"),
        ({"params": PARAMS | {"dropout": jax.random.key(0)}}, r"a random key \(key<fry>\).*nnx.Dropout.* without rngs"),
        ({"update": "split"}, "update is 'split', expected 'auto', 'replicated', 'sharded' or 'fsdp'"),
        ({"update": "sharded", "model_state": {"m": np.zeros(3)}}, "does not keep a model state yet"),
        ({"steps": -1}, "steps is -1"),
        ({"loss": lambda params, batch: loss(params, batch).mean()}, "Leave out the mean over the batch"),
        ({"loss": lambda w, state, batch: (loss(w, batch), {"m": batch["x"]}), "model_state": {"m": np.zeros(5)}},
         r"another model state than it was given: expected arrays of shapes {'m': \[5\]} .* got {'m': \[6\]}"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_training(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    surviving = job(tmp_path / "shared")
    with pytest.raises(ParameterError, match=message):
        train(surviving, **{"steps": 1} | options)
    with pytest.raises(RestartError, match="has not trained yet"):
        _ = surviving.params


def test_a_job_that_goes_on_must_be_the_same(tmp_path: Path) -> None:
    train(job(tmp_path / "shared"), 1)
    longer = {name: np.concatenate([array, array[:1]]) for name, array in DATASET.items()}
    for options, message in (
        ({"dataset": longer}, "trained 1 steps on a dataset whose samples was 100, but now .* 101.* start over"),
        ({"params": PARAMS | {"w": PARAMS["w"][:, :4], "out": PARAMS["out"][:4]}},
         r"A state of another model .*params\['out'\]: expected float32\[4\], got float32\[5\]"),
    ):  # fmt: skip
        with pytest.raises(RestartError, match=message):
            train(job(tmp_path / "shared"), 2, **options)


def test_processes_must_agree(tmp_path: Path) -> None:
    def mmj_job(change: Callable[[Any], Any]) -> mmj.Job:
        return mmj.Job(tmp_path / "shared", 32, session=with_another(change), disk_every=0, planner="hamiltonian")

    with pytest.raises(RestartError, match="shared is not one folder: processes 1 see another one than process 0"):
        train(mmj_job(changed("shared", "job-0")), 2)
    for name, value in (("steps", 3), ("samples", 7), ("batch", "KeepGlobal(8)"), ("sharded", True)):
        with pytest.raises(RestartError, match=f"different settings: {name} is .* on process 0 and .* on process 1"):
            train(mmj_job(changed(name, value)), 2)
    with pytest.raises(RestartError, match=r"Processes 0 and 1 begin with different parameters.* the same seed"):
        train(mmj_job(lambda fact: "another digest" if fact == digest(PARAMS) else fact), 2)


def test_a_planner_is_asked_about_losses_until_the_job_has_started_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Collective]] = []

    def refuse(session: Any, demands: StepDemands) -> None:
        asked.append((demands.planner, demands.workload.collective))
        raise PlanError(demands.planner, "a mesh", "so it is.", ["weave"])

    monkeypatch.setattr("meshmend.jax.job.run.check_losses", refuse)
    with pytest.raises(PlanError, match=r"so it is\. Planners that can serve this mesh: weave"):
        train(job(tmp_path / "shared"), 1)
    with monkeypatch.context() as patched:
        patched.setattr("meshmend.jax.job.run.check_losses", lambda *_: None)
        train(job(tmp_path / "shared"), 1)
    train(job(tmp_path / "shared"), 2)  # it may have lost a host already, and goes on as long as it can
    with pytest.raises(PlanError, match="row-pairs"):
        train(job(tmp_path / "shared", planner="row-pairs"), 3)
    assert asked == [("hamiltonian", Collective.ALL_REDUCE), ("row-pairs", Collective.ALL_REDUCE)]


def test_no_room_for_copies_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend.jax.state.memory.redundancy.shutil.disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(RestartError, match=r"need \S+ MB of memory, and process 0 has room for 0 MB.* memory_every=0"):
        train(job(tmp_path / "shared"), 1)
    train(job(tmp_path / "shared", memory_every=0), 1)


def test_shared_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RestartError, match=r"because .*/nowhere is missing on this host. Mount the disk"):
        open_shared(tmp_path / "nowhere/shared")
    (tmp_path / "file").write_text("")
    with pytest.raises(RestartError, match="file cannot be written to by this process"):
        open_shared(tmp_path / "file")
    first = open_shared(tmp_path / "shared")
    assert open_shared(tmp_path / "shared") == first
    assert open_shared(tmp_path / "other").name != first.name
    assert [path.name for path in first.path.iterdir()] == ["name"]
    (first.path / "name").write_text("job-1")
    with pytest.raises(RestartError, match=r"name is damaged: expected the job's name.* got 'job-1'"):
        open_shared(first.path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshmend.buckets.tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(RestartError, match=f"user {os.getuid()}.*Permission denied.* Give that user the right"):
        open_shared(tmp_path / "other")


def test_a_folder_has_one_name_however_many_open_it_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as threads:
        names = {found.name for found in threads.map(open_shared, [tmp_path / "shared"] * 64)}
    assert len(names) == 1


def test_a_process_alone_has_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHMEND_SHAPE", raising=False)
    assert initialize_alone().fabric.mesh.shape == (8, 8)  # 64 virtual chips without a description
    monkeypatch.setenv("MESHMEND_SHAPE", "4x16")
    monkeypatch.setenv("MESHMEND_FAILED", "2x2@0,0")
    assert initialize_alone().fabric.mesh.n_chips == 60
    assert not is_launched({})
    assert is_launched({"MESHMEND_ROUND": "{}"})
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(RestartError, match="SLURM_STEP_NUM_TASKS=4: this is one of several processes"):
        initialize_alone()


class Ended(BaseException):
    pass


def test_a_process_with_peers_ends_at_once_by_an_error_and_waits_for_all_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    def give_up(error: BaseException) -> None:
        happened.append(f"gave up: {error}")
        raise Ended

    coordination = SimpleNamespace(wait_for_all=lambda: happened.append("all are there"))
    session: Any = SimpleNamespace(launch=SimpleNamespace(n_processes=2), coordination=coordination, give_up=give_up)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: happened.append("shut down"))
    before = sys.excepthook
    with pytest.raises(Ended):
        Ending(session, lambda: False)._on_error(ValueError, ValueError("a typo"), None)
    ending = Ending(session, lambda: False)
    assert sys.excepthook == ending._on_error
    ending.close()
    ending.close()
    assert happened == ["gave up: a typo", "all are there", "shut down"]
    with pytest.raises(Ended):
        Ending(session, lambda: True).close()
    assert "The script ended in the middle of training" in happened[-1]
    with pytest.raises(Ended):
        Ending(session, lambda: False).close(ValueError("another"))
    assert happened[-1] == "gave up: another"
    monkeypatch.setattr(sys, "excepthook", before)


def test_an_error_while_the_links_are_measured_ends_the_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orderly end would wait for processes that still measure, with a peer that is gone, and they for it."""
    one = initialize_alone(mmj.discover(jax.devices()[:4], shape="2x2"))
    session = replace(one, launch=replace(one.launch, n_processes=2))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("connection reset by peer")

    monkeypatch.setattr("meshmend.jax.job.job._join", lambda _: session)
    monkeypatch.setattr("meshmend.jax.job.job.with_hardware", fail)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ValueError, match="connection reset"):
        mmj.Job(tmp_path, 8)
    ending = getattr(sys.excepthook, "__self__", None)
    assert isinstance(ending, Ending), "an error that nobody catches gives up"
    atexit.unregister(ending.close)


def test_a_process_alone_shows_the_error_of_its_script_and_leaves_other_hooks_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = SimpleNamespace(launch=SimpleNamespace(n_processes=1))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    for hook in (sys.__excepthook__, lambda *_: None):  # the second is of a debugger, or of a library for tracebacks
        monkeypatch.setattr(sys, "excepthook", hook)
        done, failed = Ending(session, lambda: False), Ending(session, lambda: False)
        assert (sys.excepthook == done._on_error) == (hook is sys.__excepthook__)
        done.close()
        failed.close(error := ValueError("a typo"))  # a `with` block is left, and the error goes on to the hook
        assert sys.excepthook is hook
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    Ending(session, lambda: False).close(error)
    sys.excepthook(ValueError, error, None)
    assert capsys.readouterr().err == "ValueError: a typo\n"
    assert sys.excepthook is not sys.__excepthook__
