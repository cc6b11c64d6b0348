"""A job's checkpoints are ordinary ones: Orbax alone reads the user's tree, and what Orbax writes starts a job.

The oracle is optax on one device, with whole arrays and gradients written down by hand. Gradients are whole numbers and
rates powers of two, so that no number is rounded, however a step adds up: bits are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jax_engine.restart_cases import save
from jax_engine.state.trained import OPTIMIZER, Trained, params_tree, stacked_tree
from jax_engine.two_processes import run_two
from meshmend.errors import RestartError, TransientError
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.disk.orbax import names_of
from meshmend.jax.state.disk.read import read_foreign
from meshmend.jax.state.disk.write import ChunkWriter, VectorRun, copy_to_host
from meshmend.jax.state.layout.rectangles import Box, ChunkGrid, overlap, rectangles, size_of

pytest.importorskip("orbax.checkpoint")

KINDS = ["replicated", "fused", "two-phase", "fsdp", "tiled", "tiled fused", "tiled fsdp"]
BEFORE, AFTER = "2x2@0,0", "2x2@2,2"


@cache
def trained(kind: str, failed: str = BEFORE) -> Trained:
    return Trained(kind, [failed])


def oracle(kind: str) -> dict[str, Any]:
    """The tree that one device has after the same steps, in float32, by names as Orbax has them."""
    params: Any = {"ends": params_tree(), "layers": stacked_tree()} if "fsdp" in kind else params_tree()
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    state = OPTIMIZER.init(params)

    def number(tree: Any, factor: int) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [jnp.full_like(x, factor * (i + 1)) for i, x in enumerate(leaves)])

    for i in (1, 2):
        parts = params.items() if "fsdp" in kind else [("", params)]
        gradients: Any = {name: number(part, i) for name, part in parts}
        updates, state = OPTIMIZER.update(gradients if "fsdp" in kind else gradients[""], state)
        params = optax.apply_updates(params, updates)
    tree = {"params": params, "opt_state": state}
    return dict(zip(names_of(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    found, shapes = {}, {}
    with np.load(path) as file:
        for key in file.files:
            name, _, what = key.rpartition(" ")
            if what == "shape":
                shapes[name] = tuple(file[key])
            else:
                found[name] = np.frombuffer(file[key].tobytes(), jnp.dtype(what))
    return {name: values.reshape(shapes[name]) for name, values in found.items()}


@pytest.fixture(scope="module")
def orbax_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds on disk, and what a process without meshmend has made of them."""
    folder = tmp_path_factory.mktemp("orbax")
    pairs = []
    for kind in KINDS:
        job = trained(kind)
        disk = Disk(folder / kind)
        assert disk.steps() == []
        save(disk, job.layout, 2, job.after_two_steps(), ["extra"])
        disk.close()
        pairs.append((str(folder / kind / "2" / "state"), str(folder / f"{kind} by orbax")))
    (folder / "pairs.json").write_text(json.dumps(pairs))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    script = Path(__file__).with_name("orbax_alone.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "pairs.json")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_alone_reads_the_numbers_of_one_device(kind: str, orbax_alone: Path) -> None:
    found, expected = read_npz(orbax_alone / f"{kind} by orbax.npz"), oracle(kind)
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        assert np.array_equal(found[name].astype(values.dtype), values), name
    users = dict(zip(names_of(trained(kind).layout.tree), trained(kind).layout.users, strict=True))
    assert {name: values.dtype for name, values in found.items()} == {name: user.dtype for name, user in users.items()}
    if "fsdp" not in kind:
        assert found["params.pair.0"].dtype == jnp.bfloat16
    assert found["opt_state.1.count"].dtype == np.int32


@pytest.mark.parametrize("kind", KINDS)
def test_what_orbax_wrote_starts_a_job_on_another_mesh(kind: str, orbax_alone: Path) -> None:
    job, path = trained(kind, AFTER), orbax_alone / f"{kind} by orbax"
    read = read_foreign(job.layout, path)
    before = read_npz(orbax_alone / f"{kind} by orbax.npz")
    after = job.arrays(job.layout.to_devices(read, job.fresh))
    assert set(after) == set(before)
    for name, values in before.items():
        assert after[name].dtype == values.dtype
        assert after[name].tobytes() == (values + np.ones((), values.dtype)).tobytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_jobs_own_checkpoint_on_another_mesh(kind: str, orbax_alone: Path) -> None:
    job = trained(kind, AFTER)
    saved, read = Disk(orbax_alone / kind).load(2, job.layout)
    assert (saved.step, saved.attempt, saved.facts["extra"]) == (2, 1, ["extra"])
    with pytest.raises(RestartError, match=r"3/meshmend/metadata is damaged: .*No such file"):
        Disk(orbax_alone / kind).load(3, job.layout)
    assert not job.layout.identity.difference(saved.identity)
    found = job.arrays(job.layout.to_devices(read, job.fresh))
    expected = read_npz(orbax_alone / f"{kind} by orbax.npz")
    assert {name: values.tobytes() for name, values in found.items()} == {
        name: values.tobytes() for name, values in expected.items()
    }


def test_a_state_may_change_how_it_is_split(orbax_alone: Path) -> None:
    """Saved by a two-phase update, read by a fused one in tiles: the user's arrays are the same."""
    job = trained("tiled fused", AFTER)
    _, read = Disk(orbax_alone / "two-phase").load(2, job.layout)
    found = job.arrays(job.layout.to_devices(read, job.fresh))
    for name, values in oracle("fused").items():
        assert np.array_equal(found[name].astype(values.dtype), values), name


def test_the_ways_in_which_orbax_is_asked(orbax_alone: Path) -> None:
    import orbax.checkpoint as ocp

    root, expected = orbax_alone / "fused", oracle("fused")["params.matrix"]
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == 2
        assert np.array_equal(manager.restore(2)["state"]["params"]["matrix"], expected)
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(2, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        assert np.array_equal(found.state["params"]["matrix"], expected)
    assert np.array_equal(ocp.PyTreeCheckpointer().restore(root / "2" / "state")["params"]["matrix"], expected)
    # As the tree that a user has, with arrays that lie as the user's do.
    params = jax.tree.map(jnp.asarray, params_tree())
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    split = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), P())
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split),
        {"params": params, "opt_state": OPTIMIZER.init(wide)},
    )
    tree = ocp.StandardCheckpointer().restore(root / "2" / "state", like)
    structures: list[Any] = [jax.tree.structure(one) for one in (tree, like)]
    assert structures[0] == structures[1]
    assert np.array_equal(tree["params"]["matrix"], expected)
    assert not [path for path in root.rglob("*") if "unfinished" in path.name]


def test_what_orbax_may_have_written_and_is_not_this_tree(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    job = trained("replicated")
    params = jax.tree.map(lambda leaf: leaf if leaf.size else None, jax.tree.map(jnp.asarray, params_tree()))
    state = jax.tree.map(
        lambda leaf: leaf if leaf.size else None, OPTIMIZER.init(jax.tree.map(jnp.asarray, params_tree()))
    )
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "params", params)
        other = {"params": params | {"matrix": jnp.zeros((13, 9))}, "opt_state": state}
        saver.save(tmp_path / "shape", other)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        saver.save(tmp_path / "wide", {"params": wide, "opt_state": state})
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        for step in (9, 10):
            tree = {"params": jax.tree.map(lambda leaf, step=step: leaf * 0 + step, params), "opt_state": state}
            manager.save(step, args=ocp.args.StandardSave(tree))
    for name, why in (
        ("params", r"has no array opt_state\.0\.trace\.matrix and \d more: .*pass them to train"),
        ("shape", r"params\.matrix: expected float32\[13, 8\], got float32\[13, 9\]"),
        ("wide", r"params\.pair\.0: expected bfloat16\[6\], got float32\[6\]"),
        ("nothing", "has no tree that Orbax has saved"),
    ):
        with pytest.raises(RestartError, match=why):
            read_foreign(job.layout, tmp_path / name)
    found = job.arrays(job.layout.to_devices(read_foreign(job.layout, tmp_path / "manager"), job.fresh))
    assert set(found["params.matrix"].ravel()) == {10}


@pytest.mark.parametrize("kind", ["replicated", "tiled"])
def test_a_device_copies_the_rows_that_its_share_is_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator; and what was copied stays as it was when its array is overwritten."""
    monkeypatch.setattr("meshmend.jax.state.disk.write.SLICED_FROM_BYTES", 16)
    job = trained(kind)
    state = job.after_two_steps()
    expected = [(run.name, run.start, run.elements.tobytes()) for run in copy_to_host(job.layout, *state)]
    sliced = copy_to_host(job.layout, *state, slices=True)
    assert [(run.name, run.start, run.elements.tobytes()) for run in sliced] == expected
    kept = copy_to_host(job.layout, *state)
    jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)(state))
    assert [(run.name, run.start, run.elements.tobytes()) for run in kept] == expected


def test_a_folder_that_is_no_path_of_this_machine(tmp_path: Path) -> None:
    """Orbax's own paths, as those of buckets are: nothing asks more of them than they promise."""
    epath = pytest.importorskip("etils.epath")
    assert str(Disk("gs://bucket/job").folder / "3") == "gs://bucket/job/3"
    job, folder = trained("two-phase"), epath.Path(tmp_path)
    assert not isinstance(folder, Path)
    state = job.after_two_steps()
    disk = Disk(folder)
    disk.hold_claim(1)
    for step in (1, 2, 3):
        save(disk, job.layout, step, state)
    assert disk.steps() == [2, 3]
    disk.hold_claim(1)
    assert disk.set_aside_all_but({2}) == [3]
    save(disk, job.layout, 3, state)
    assert disk.set_aside_all_but({2}) == [3]
    disk.close()
    offers, problems, claimed = Disk(folder).offers(job.layout.identity)
    assert [(offer["step"], offer["differs"]) for offer in offers] == [(2, "")]
    assert (problems, claimed) == ([], 1)
    found = job.arrays(job.layout.to_devices(Disk(folder).load(2, job.layout)[1], job.fresh))
    expected = job.arrays(state)
    assert {name: values.tobytes() for name, values in found.items()} == {
        name: values.tobytes() for name, values in expected.items()
    }


# Several hosts, of which each has a part of the devices.


class Hosts:
    """Threads that are hosts: each writes what its devices own, and all exchange facts."""

    def __init__(self, job: Trained, n_hosts: int, folder: Path) -> None:
        from etils import epath

        self.job, self.n_hosts, self.folder = job, n_hosts, epath.Path(folder)
        n_devices = len(job.layout.devices)
        self.process_of = [device * n_hosts // n_devices for device in range(n_devices)]
        self.told: list[list[Any]] = []
        self.barrier = threading.Barrier(n_hosts, timeout=60)
        self.chunks: list[list[tuple[int, Box, NDArray[Any]]]] = [[] for _ in range(n_hosts)]
        self.committed = [False] * n_hosts
        self.results: list[Any] = [None] * n_hosts
        self.fails = -1

    def exchange(self, host: int, fact: Any) -> list[Any]:
        with threading.Lock():
            self.facts[host] = json.loads(json.dumps(fact))
        self.barrier.wait()
        found = list(self.facts)
        self.barrier.wait()
        return found

    def run(self, runs: Sequence[VectorRun]) -> None:
        self.facts: list[Any] = [None] * self.n_hosts
        threads = [threading.Thread(target=self._host, args=(host, runs)) for host in range(self.n_hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

    def _host(self, host: int, runs: Sequence[VectorRun]) -> None:
        hosts = self

        class Store:
            def write(self, user: int, box: Box, values: NDArray[Any]) -> None:
                if host == hosts.fails:
                    raise OSError("full")
                hosts.chunks[host].append((user, box, values))

            def commit(self) -> None:
                hosts.committed[host] = True

        outline = self.job.layout.outline
        mine = [run for run in runs if self.process_of[outline.device_of(run.name, run.start)] == host]
        writer = ChunkWriter(
            self.job.layout,
            self.folder,
            lambda fact: self.exchange(host, fact),
            process=host,
            process_of_device=self.process_of,
        )
        try:
            self.results[host] = writer.run(mine, Store())
        except (OSError, RestartError) as error:
            self.results[host] = error


@pytest.mark.parametrize("n_hosts", [3, 4])
@pytest.mark.parametrize("kind", ["replicated", "fused", "tiled fsdp"])
def test_hosts_write_their_shares_and_together_every_chunk_once(
    kind: str, n_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many chunks have several owners.
    monkeypatch.setattr("meshmend.jax.state.layout.rectangles.chunk_shape.__defaults__", (40,))
    job = trained(kind)
    hosts = Hosts(job, n_hosts, tmp_path)
    state = job.after_two_steps()
    hosts.run(copy_to_host(job.layout, *state))
    assert all(hosts.committed), hosts.results
    users = job.layout.users
    found = [np.full(user.shape, -77, user.dtype) for user in users]
    written = 0
    for chunks in hosts.chunks:
        for user, box, values in chunks:
            where = tuple(slice(*ends) for ends in box)
            assert (found[user][where] == -77).all()
            found[user][where] = values
            written += values.size
    assert written == sum(array.size for array in found)
    expected = job.arrays(state)
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected.values()]
    checksums = hosts.results[0]
    assert hosts.results[1:] == [[]] * (n_hosts - 1)
    assert sum(map(len, checksums)) == sum(map(len, hosts.chunks))
    assert not list(tmp_path.iterdir()), "what hosts have sent each other is gone"
    share = max(sum(values.nbytes for *_, values in chunks) for chunks in hosts.chunks)
    assert share < 2 * sum(array.nbytes for array in found) / n_hosts + 400


def test_a_host_that_cannot_write_stops_all_of_them(tmp_path: Path) -> None:
    job = trained("fused")
    hosts = Hosts(job, 3, tmp_path)
    hosts.fails = 1
    hosts.run(copy_to_host(job.layout, *job.after_two_steps()))
    assert [type(result) for result in hosts.results] == [TransientError, OSError, TransientError]
    assert "process 1: full" in str(hosts.results[0])
    assert not any(hosts.committed)


@pytest.mark.slow
def test_two_processes_save_and_read_what_they_own() -> None:
    """One job of two processes: Orbax commits what both have written, and each reads chunks of its own devices only."""
    told = run_two("jax_engine.state.two_savers", timeout_s=240)
    assert all(one["same"] for one in told)
    for one in told:
        assert one["written"] < 0.6 * one["whole"]
        assert one["read"] < 0.75 * one["whole"], "sharded by owner: a process needs about half"
        # However many checkpoints there were: the last fact of the job and of the last save.
        assert [len(keys) for keys in one["keys"]] == 4 * [2], one["keys"]
    assert abs(told[0]["orbax"] - told[0]["sum"]) == 0


# Rectangles, held to counting.


def indices(box: Box) -> Iterator[tuple[int, ...]]:
    return (
        tuple(i + a for i, (a, _) in zip(index, box, strict=True)) for index in np.ndindex(*[b - a for a, b in box])
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_range_of_a_box_is_its_rectangles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    box = tuple((int(a), int(a + n)) for a, n in rng.integers(1, 5, (int(rng.integers(0, 4)), 2)))
    start, stop = sorted(int(n) for n in rng.integers(0, size_of(box) + 1, 2))
    found = [index for one in rectangles(box, start, stop) for index in indices(one)]
    assert found == list(indices(box))[start:stop]
    grid = ChunkGrid([end for _, end in box], [int(n) for n in rng.integers(1, 4, len(box))])
    touched = {number for number in range(grid.n_chunks) if overlap(grid.box(number), box) is not None}
    assert sorted(grid.chunks_of(box)) == sorted(touched)
    every = [index for number in range(grid.n_chunks) for index in indices(grid.box(number))]
    assert sorted(every) == sorted(np.ndindex(*grid.shape))
