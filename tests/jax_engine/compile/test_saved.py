"""Saved programs: a restart loads them and traces nothing; what is not to be trusted or does not load is compiled."""

from __future__ import annotations

import hmac
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import jax
import numpy as np
import optax
import pytest
from etils.epath import backend

import meshmend as mm
import meshmend.jax as mmj
from meshmend.errors import RestartError
from meshmend.jax.compile import CompiledTrainStep, compile_train_step
from meshmend.jax.compile.fingerprint import fingerprint
from meshmend.jax.compile.saved import SavedSteps, shapes_of
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.job.model import Model
from meshmend.jax.job.run import TrainingRun
from meshmend.jax.session import Session, initialize_alone
from meshmend.jax.state.layout.state_layout import put as put_on
from meshmend.jax.state.timetable import Wishes
from meshmend.jax.state.voting import Ballot
from meshmend.jax.train.plan import TrainingPlan
from meshmend.launch.signing import FILE_KEY, KEY_ENDS

KEY = bytes(range(32))
SAMPLES = np.random.default_rng(0).integers(-3, 4, (64, 4)).astype(np.float32)
WEIGHTS = np.zeros(4, np.float32)
FEED = mmj.Feed(SAMPLES, mmj.KeepGlobal(24), threads=0, prefetch=0)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_KEY, KEY.hex())


@pytest.fixture(scope="module")
def planned() -> TrainingPlan:
    return mmj.plan(small(), WEIGHTS, update="sharded", planner="hamiltonian")


def small() -> Fabric:
    return mmj.discover(jax.devices()[:12], shape="3x4")


def steps_in(
    folder: Path, *, rate: float = 0.125, says: float = 0.0, prints: bool = False, session: Session | None = None
) -> SavedSteps:
    """A job on 12 devices, as a start of its script makes it; `says` is a rate that its fingerprint has instead."""

    def loss(w: Any, x: Any) -> Any:
        if prints:
            jax.debug.print("{}", w)
        return x @ w

    made_of = {"loss": loss, "optimizer": optax.adam(says or rate), "params": shapes_of(WEIGHTS)}

    def ingredients(fabric: Fabric, _: Any) -> tuple[Any, Any, Any]:
        return mmj.train_step(loss, optax.adam(rate), fabric, per_example=True), WEIGHTS, FEED.like(fabric)

    return SavedSteps(folder, session or initialize_alone(small()), made_of, ingredients)


def said(steps: SavedSteps) -> dict[str, Any]:
    """What the timeline says of the last start."""
    return [event for event in steps.session.timeline.events if event["event"] == "compile"][-1]


def train(compiled: CompiledTrainStep, n_steps: int = 3) -> bytes:
    """Train for a few steps; return the bits of the parameters."""
    fabric = compiled.layout.fabric
    params = jax.device_put(WEIGHTS, fabric.sharding())
    state, batches = compiled.init(params), FEED.batches(fabric)
    for _ in range(n_steps):
        params, state, _ = compiled.step(params, state, next(batches))
    compiled.layout.programs["cut"](params, state)
    assert Ballot(fabric, compiled.layout.programs["vote"])(Wishes(every=3))() == Wishes(every=3)
    return np.asarray(params).tobytes()


@contextmanager
def traced() -> Iterator[list[str]]:
    """Give a list that gets what JAX traces, lowers and compiles."""
    found: list[str] = []
    is_on = True

    def heard(event: str, duration_secs: float, **facts: Any) -> None:
        if is_on and event.startswith("/jax/core/compile/"):
            found.append(f"{event} {facts}")

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    is_on = False


@pytest.fixture(scope="module")
def saved(planned: TrainingPlan, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str, bytes]:
    """The bits that training ends with, and the name and the bytes of the file that was saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FILE_KEY, KEY.hex())
        folder = tmp_path_factory.mktemp("programs")
        steps = steps_in(folder)
        compiled = steps.start(planned)
        assert "was not saved" in said(steps)["why_not_loaded"]
        steps.keep_own()
    (path,) = folder.iterdir()
    return train(compiled), path.name, path.read_bytes()


def signed(name: str, body: bytes, key: bytes = KEY) -> bytes:
    """A file as process 0 writes it: the signature of its body, under a key for its kind and name, and the body."""
    key_of_file = hmac.digest(key, b"compiled train step " + name.encode(), "sha256")
    return hmac.digest(key_of_file, body, "sha256").hex().encode() + body


def put(folder: Path, saved: tuple[bytes, str, bytes], content: bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / saved[1]
    path.write_bytes(saved[2] if content is None else content)
    return path


def test_a_loaded_step_is_the_same_and_nothing_is_traced(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path
) -> None:
    put(tmp_path, saved)
    assert saved[1].startswith(f"3x4.sharded.jax-{jax.__version__}.")
    steps = steps_in(tmp_path)
    with traced() as found:
        compiled = steps.start(planned)
        bits = train(compiled)
    assert said(steps)["loaded"] == saved[1]
    assert (found, bits) == ([], saved[0])


class Marker:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_only_what_the_job_has_signed_is_unpickled(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path
) -> None:
    evil, marker = pickle.dumps(Marker(tmp_path / "was-run")), tmp_path / "was-run"
    frames = {
        "no signature": evil,
        "an empty file": b"",
        "half of it": saved[2][: len(saved[2]) // 2],
        "one bit": saved[2][:-1] + bytes([saved[2][-1] ^ 1]),
        "another key": signed(saved[1], evil, bytes(32)),
        "the body alone": hmac.digest(KEY, evil, "sha256").hex().encode() + evil,
        "another file of this key": signed("3x4.other.program", evil),
    }
    for what, frame in frames.items():
        put(tmp_path / "programs", saved, frame)
        steps = steps_in(tmp_path / "programs")
        steps.start(planned)
        assert "is damaged, or was signed with another key" in said(steps)["why_not_loaded"], what
        assert not marker.exists(), what
    put(tmp_path / "programs", saved, signed(saved[1], evil))
    steps_in(tmp_path / "programs").start(planned)
    assert marker.exists(), "the oracle: a right signature lets it through"


def test_a_signed_file_that_does_not_load_is_compiled_and_replaced(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path
) -> None:
    path = put(tmp_path, saved, signed(saved[1], pickle.dumps(({"init": 3}, None, ""))))
    steps = steps_in(tmp_path)
    compiled = steps.start(planned)
    assert "does not load: TypeError" in said(steps)["why_not_loaded"]
    assert train(compiled) == saved[0]
    steps.keep_own()
    again = steps_in(tmp_path)
    assert train(again.start(planned)) == saved[0]
    assert said(again)["loaded"] == path.name


def test_a_changed_script_or_setting_does_not_find_the_program(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, saved)
    names = {steps_in(tmp_path).name(small(), planned)}
    names.add(steps_in(tmp_path, rate=0.25).name(small(), planned))
    names.add(steps_in(tmp_path, prints=True).name(small(), planned))
    names.add(steps_in(tmp_path).name(mmj.discover(jax.devices()[:12], shape="4x3"), planned))
    names.add(steps_in(tmp_path).name(mmj.discover(jax.devices()[1:13], shape="3x4"), planned))
    with jax.default_matmul_precision("highest"):
        names.add(steps_in(tmp_path).name(small(), planned))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    names.add(steps_in(tmp_path).name(small(), planned))
    monkeypatch.setattr(jax, "__version__", "0.99")
    names.add(steps_in(tmp_path).name(small(), planned))
    assert len(names) == 8
    assert saved[1] in names


def test_a_program_that_the_script_no_longer_makes_ends_the_job(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path
) -> None:
    path = put(tmp_path, saved)
    steps_that_agree = steps_in(tmp_path)
    steps_that_agree.start(planned)
    steps_that_agree.confirm()
    steps_that_agree.keep_own()
    changed = steps_in(tmp_path, rate=0.25, says=0.125)  # in a way that the fingerprint does not show
    changed.start(planned)
    assert said(changed)["loaded"] == path.name
    changed.keep_own()
    with pytest.raises(RestartError, match="is not the one that this script makes now"):
        changed.session.check()
    assert not path.exists()


def test_a_program_that_has_finished_no_step_is_not_loaded_again(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path
) -> None:
    put(tmp_path, saved)
    steps_in(tmp_path).start(planned)  # and ends before it has made a step
    steps = steps_in(tmp_path)
    steps.start(planned)
    assert "that start did not finish a step" in said(steps)["why_not_loaded"]
    steps.keep_own()
    third = steps_in(tmp_path)
    third.start(planned)
    assert "loaded" in said(third)
    third.confirm()
    fourth = steps_in(tmp_path)
    fourth.start(planned)
    assert "loaded" in said(fourth)


def test_steps_that_call_back_are_not_saved(planned: TrainingPlan, tmp_path: Path) -> None:
    steps = steps_in(tmp_path, prints=True)
    facts = steps.prepare(small(), planned)
    assert "calls back" in facts["why_not_saved"]
    assert not list(tmp_path.iterdir())


def test_without_a_key_nothing_is_saved(planned: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_KEY)
    steps = steps_in(tmp_path)
    steps.start(planned)
    steps.keep_own()
    assert {"loaded", "why_not_loaded"}.isdisjoint(said(steps))
    assert not list(tmp_path.iterdir())


class Answers:
    """The words of two processes: this one's, and another's."""

    def __init__(self, other: list[str]) -> None:
        self.other = other

    def decide(self, mine: list[str], judge: Callable[[list[list[str]]], str]) -> str:
        return judge([mine, [other or own for other, own in zip(self.other, mine, strict=True)]])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (["", "", "no such file"], "process 1: no such file"),
        pytest.param(["another.program", "", ""], "processes have made different steps", marks=pytest.mark.slow),
        (["", "older", ""], "processes have read different files"),
    ],
)
def test_unless_all_processes_have_loaded_all_compile(
    planned: TrainingPlan, saved: tuple[bytes, str, bytes], tmp_path: Path, other: list[str], why: str
) -> None:
    put(tmp_path, saved)
    steps = steps_in(tmp_path)
    coordination: Any = Answers(other)
    steps.session = replace(steps.session, coordination=coordination)
    steps.start(planned)
    assert said(steps)["why_not_loaded"].startswith(why)


def test_what_makes_an_empty_state_is_compiled_for_all_devices() -> None:
    """Other processes load it, and have none of one device's."""
    fabric = small()
    training = mmj.train_step(lambda w, x: x @ w, optax.sgd(0.1), fabric, per_example=True)
    program = mmj.install(mm.plan(fabric.mesh, "weave"), fabric)
    compiled = compile_train_step(training, program, WEIGHTS, FEED.like(fabric))
    assert not jax.tree.leaves(compiled.init(put_on(WEIGHTS, fabric)))
    for executable in compiled.executables.values():
        assert {len(one.device_set) for one in jax.tree.leaves(executable.input_shardings)} == {12}


def test_old_files_are_pruned_and_what_was_used_last_stays(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    for number in range(30):
        path = tmp_path / f"{number}.program"
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    steps.prune()
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == list(range(10, 30))
    steps.prune(most_bytes=250)
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == [28, 29]
    steps.prune(most_bytes=50)
    assert len(list(tmp_path.iterdir())) == 2, "one for the mesh and one per host stay: other hosts have just made them"


def test_process_0_prunes_once_per_start(
    tmp_path: Path, planned: TrainingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned: list[int] = []
    monkeypatch.setattr(SavedSteps, "prune", lambda self: pruned.append(self.session.launch.process))
    for process in (0, 1):
        session = steps_in(tmp_path).session
        session = replace(session, launch=replace(session.launch, process=process, n_processes=2))
        steps = steps_in(tmp_path, session=session)
        for name in ("first.program", "second.program"):
            assert steps._save(name, small(), planned.install(small())) == {"saved": name}
    assert pruned == [0]


def test_programs_may_be_in_a_bucket(planned: TrainingPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which fsspec has one in memory: paths are no files, and nothing is linked, renamed or touched."""
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: memory)
    bucket: Any = "gs://bucket/programs"
    first = steps_in(bucket)
    bits = train(first.start(planned))
    assert "was not saved" in said(first)["why_not_loaded"]
    first.keep_own()
    assert first.session.timeline.events[-1]["saved"].startswith("3x4.sharded.")
    again = steps_in(bucket)
    assert train(again.start(planned)) == bits
    assert said(again)["loaded"] == first.session.timeline.events[-1]["saved"]
    third = steps_in(bucket)
    third.start(planned)
    assert "did not finish a step" in said(third)["why_not_loaded"]
    again.confirm()
    fourth = steps_in(bucket)
    fourth.start(planned)
    assert "loaded" in said(fourth)


def test_a_bucket_that_fails_costs_the_program_not_the_job(
    planned: TrainingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("503: try again later")

    bucket: Any = "gs://bucket/programs"
    steps = steps_in(bucket)
    for name in ("exists", "mkdir", "read_bytes", "write_bytes"):
        monkeypatch.setattr(type(steps.folder), name, fail)
    train(steps.start(planned))
    assert "cannot be read: 503: try again later" in said(steps)["why_not_loaded"]
    steps.keep_own()
    assert steps.session.timeline.events[-1]["why_not_saved"] == "503: try again later"


def test_a_job_names_its_program_after_the_shape_of_an_example_on_any_fabric() -> None:
    def made_of(samples: Any, fabric: Fabric) -> str:
        feed = mmj.Feed(samples, mmj.KeepGlobal(24), threads=0, prefetch=0)
        session = SimpleNamespace(fabric=fabric)
        run: Any = SimpleNamespace(model=model, feed=feed, session=session, is_sharded=True)
        return fingerprint(**TrainingRun._made_of(run))

    model = Model(lambda w, x: x.sum(axis=1) * w.sum(), optax.sgd(0.1), WEIGHTS)
    whole, left = small(), mmj.discover(jax.devices()[:12], shape="3x4", failed=["0,0"])
    assert made_of(SAMPLES, whole) == made_of(SAMPLES[:32] + 1, left)
    assert made_of(SAMPLES, whole) != made_of(SAMPLES[:, :3], whole)
    assert made_of(SAMPLES, whole) != made_of(SAMPLES.astype(np.int32), whole)


def run_job(shared: Path, steps: int, update: str, *, key: bytes = KEY) -> Any:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MESHMEND_MEMORY": str(shared.parent / f"memory-{key.hex()[:8]}"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        FILE_KEY: key.hex(),
        KEY_ENDS: "1",  # so that checkpoints are not signed with it, and the next run reads them
    }
    words = [sys.executable, "-m", "jax_engine.compile.saved_job", str(shared), str(steps), update]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_a_job_that_starts_again_traces_nothing(tmp_path: Path, update: str) -> None:
    run_job(tmp_path / "shared", 6, update)
    again = run_job(tmp_path / "shared", 12, update)
    assert again["compiled"] == []
    assert "loaded" in again["events"][0]
    assert again["params"] == run_job(tmp_path / "undisturbed", 12, update)["params"]


@pytest.mark.slow
def test_a_job_with_another_key_saves_a_program_of_its_own(tmp_path: Path) -> None:
    """What it compiles comes from no cache: XLA's programs for CPUs cannot be written again once they were read."""
    run_job(tmp_path / "shared", 6, "sharded")
    (tmp_path / "shared" / "kept.json").unlink()  # the state of the first run has the other key's signature
    other = run_job(tmp_path / "shared", 12, "sharded", key=bytes(32))
    assert "another key" in other["events"][0]["why_not_loaded"]
    last = run_job(tmp_path / "shared", 18, "sharded", key=bytes(32))
    assert (last["compiled"], "loaded" in last["events"][0]) == ([], True)
