"""The layout of a state, held to counting element by element: which device has which element of which array, and where.

The oracle here knows one sentence: replicated elements are split into equal shares, and those of a sharded array go
core by core, chunk by chunk, each chunk to the chip that owns it, in the row of its place among that chip's chunks.
Shares are the first parts of a copy, and the shards of the devices follow.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.restart_cases import read_vectors
from meshmend.errors import ParameterError, RestartError
from meshmend.jax.state.layout.flat import Outline, ShardedArray, dtype_named
from meshmend.jax.state.layout.state_layout import StateLayout, device_number, put
from meshmend.jax.state.memory.collect import aligned_empty
from meshmend.jax.train.step import TrainStep
from meshmend.schedule.split import reduce_scatter_of

Place = tuple[int, int]
"""(part, position in it)"""


def random_outline(seed: int) -> Outline:
    """Chips that own unequal numbers of chunks in no order; several arrays and dtypes; sizes that nothing divides."""
    rng = np.random.default_rng(seed)
    n_chips, n_cores, total = (int(rng.integers(1, high)) for high in (5, 4, 12))
    owners = rng.integers(0, n_chips, total)
    lists = [[int(c) for c in rng.permutation(total) if owners[c] == chip] for chip in range(n_chips)]
    room = max(len(row) for row in lists)
    owned = tuple(tuple(row + [total] * (room - len(row))) for row in lists)
    sizes = [int(rng.integers(1, 90)) for _ in range(int(rng.integers(0, 4)))]
    sharded = [
        ShardedArray(str(rng.choice(["float32", "int16"])), size, -(-size // (n_cores * total))) for size in sizes
    ]
    replicated = {
        str(dtype): tuple(rng.integers(0, 40, int(rng.integers(0, 4))).tolist())
        for dtype in rng.permutation(["int16", "float32", "uint8"])[:2]
    }
    n_shares = int(rng.integers(1, n_chips * n_cores + 1))
    return Outline(n_chips * n_cores, n_cores, total, owned, replicated, tuple(sharded), n_shares=n_shares)


def places(outline: Outline) -> dict[str, list[set[Place]]]:
    """For each vector the places of each of its elements, in order; and what each dtype's part must have room for."""
    found: dict[str, list[set[Place]]] = {}
    n, used = outline.n_shares, dict.fromkeys(outline.dtypes, 0)
    for dtype, sizes in outline.replicated.items():
        where = found[f"replicated {dtype}"] = []
        for size in sizes:
            share = next(length for length in range(size + 1) if length * n >= size)
            firsts = [min(number * share, size - share) for number in range(n)]
            where += [
                {(d, used[dtype] + element - first) for d, first in enumerate(firsts) if 0 <= element - first < share}
                for element in range(size)
            ]
            used[dtype] += share
    assert {dtype: outline.part_size(0, dtype) for dtype in outline.dtypes} == used
    room, used = len(outline.owned[0]), dict.fromkeys(outline.dtypes, 0)
    for number, array in enumerate(outline.sharded):
        where = found[f"sharded {number}"] = []
        for element in range(array.size):
            whole_chunk, offset = divmod(element, array.chunk)
            core, chunk = divmod(whole_chunk, outline.total_chunks)
            (chip,) = (i for i, row in enumerate(outline.owned) if chunk in row)
            row = outline.owned[chip].index(chunk)
            where.append({(n + chip * outline.n_cores + core, used[array.dtype] + row * array.chunk + offset)})
        used[array.dtype] += room * array.chunk
    assert {dtype: outline.part_size(n, dtype) for dtype in outline.dtypes} == used
    return found


def dtype_of(outline: Outline, name: str) -> str:
    kind, which = name.split()
    return which if kind == "replicated" else outline.sharded[int(which)].dtype


SEEDS = range(25)


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_are_where_counting_puts_every_element(seed: int) -> None:
    outline = random_outline(seed)
    expected = places(outline)
    assert {name: len(where) for name, where in expected.items()} == {n: v[1] for n, v in outline.vectors.items()}
    found: dict[str, list[set[Place]]] = {name: [set() for _ in where] for name, where in expected.items()}
    assert outline.n_parts == outline.n_shares + bool(outline.sharded) * outline.n_devices
    for part in range(outline.n_parts):
        for dtype in outline.dtypes:
            for name, start, at, length in outline.runs(part, dtype):
                assert length > 0
                assert dtype_of(outline, name) == dtype
                for i in range(length):
                    found[name][start + i].add((part, at + i))
    assert found == expected
    assert all(copies for where in found.values() for copies in where)
    outline.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_of_every_part_is_put_in_its_place(seed: int) -> None:
    outline, rng = random_outline(seed), np.random.default_rng(seed)
    vectors = {name: rng.integers(1, 100, size).astype(dtype) for name, (dtype, size) in outline.vectors.items()}
    for part in range(outline.n_parts):
        content = np.zeros(outline.part_bytes(part), np.uint8)
        before = 0
        for dtype in outline.dtypes:
            row = np.zeros(outline.part_size(part, dtype), dtype)
            for name, where in places(outline).items():
                for element, copies in enumerate(where):
                    for owner, at in copies:
                        if owner == part and dtype_of(outline, name) == dtype:
                            row[at] = vectors[name][element]
            content[before : before + row.nbytes] = row.view(np.uint8)
            before += row.nbytes
        assert before == outline.part_bytes(part)
        slices = outline.slices(part)
        assert slices[0][0] == 0
        assert slices[-1][1] == before
        assert all(one[1] == other[0] for one, other in itertools.pairwise(slices))
        for name, start, at, length in outline.byte_runs(part):
            found = vectors[name].view(np.uint8)[start : start + length]
            np.testing.assert_array_equal(content[at : at + length], found)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_element_is_written_by_the_device_that_counting_says(seed: int) -> None:
    outline = random_outline(seed)
    for name, where in places(outline).items():
        kind = name.split()[0]
        expected = [next(iter(copies))[0] - outline.n_shares for copies in where]
        if kind == "replicated":  # all devices have them: the first so many elements are the first device's
            share = next(n for n in range(len(where) + 1) if n * outline.n_devices >= len(where))
            expected = [element // share for element in range(len(where))]
        assert [outline.device_of(name, element) for element in range(len(where))] == expected


SMALL = Outline(
    4,
    2,
    3,
    ((0, 2), (1, 3)),
    {"uint8": (5,), "float32": (2, 7)},
    (ShardedArray("int16", 11, 2), ShardedArray("uint8", 3, 1)),
    n_shares=4,
)


def test_an_outline_in_small() -> None:
    assert SMALL.dtypes == ["float32", "int16", "uint8"]
    assert SMALL.n_rows == 2
    assert [SMALL.share(dtype) for dtype in SMALL.dtypes] == [3, 0, 2]
    assert [SMALL.shares(dtype) for dtype in SMALL.dtypes] == [[1, 2], [], [2]]
    assert SMALL.n_parts == 4 + 4
    assert [SMALL.part_size(3, dtype) for dtype in SMALL.dtypes] == [3, 0, 2]
    assert [SMALL.part_size(4, dtype) for dtype in SMALL.dtypes] == [0, 2 * 2, 2 * 1]
    assert [SMALL.part_bytes(part) for part in (0, 3, 4, 7)] == [3 * 4 + 2, 3 * 4 + 2, 4 * 2 + 2, 4 * 2 + 2]
    assert SMALL.first_slices == [8 * part for part in range(9)]
    assert replace(SMALL, sharded=()).n_parts == 4
    # Of one share there are as many slices as of four; of thousands of tiles, no more than 1,024.
    assert len(replace(SMALL, n_shares=1).slices(0)) == 32
    assert len(replace(SMALL, n_shares=1, n_devices=8000).slices(0)) == 1024
    assert SMALL.vectors == {
        "replicated uint8": ("uint8", 5),
        "replicated float32": ("float32", 9),
        "sharded 0": ("int16", 11),
        "sharded 1": ("uint8", 3),
    }
    assert replace(SMALL, owned=()).n_rows == 0
    assert replace(SMALL, replicated={}).dtypes == ["int16", "uint8"]


def test_an_outline_as_plain_values_and_its_name() -> None:
    facts = SMALL.as_json()
    plain = {
        "n_devices": 4,
        "n_cores": 2,
        "total_chunks": 3,
        "owned": [[0, 2], [1, 3]],
        "replicated": {"uint8": [5], "float32": [2, 7]},
        "sharded": [["int16", 11, 2, 1], ["uint8", 3, 1, 1]],
        "devices_per_tile": 1,
        "n_shares": 4,
    }
    assert json.loads(json.dumps(facts)) == plain
    again = Outline.from_json(json.loads(json.dumps(facts)))
    assert again == SMALL
    assert isinstance(again.owned, tuple)
    assert isinstance(again.owned[0], tuple)
    text = json.dumps(plain, sort_keys=True).encode()
    assert SMALL.digest == hashlib.sha256(text).hexdigest()[:16]
    other_order = replace(SMALL, replicated={"float32": (2, 7), "uint8": (5,)})
    assert other_order.digest == SMALL.digest
    assert replace(SMALL, n_devices=5).digest != SMALL.digest
    # Numbers and names of other types are those numbers and names, and not kept as they came.
    loose = {
        **plain,
        "n_devices": "4",
        "n_cores": 2.0,
        "total_chunks": "3",
        "owned": [["0", 2.0], [1, "3"]],
        "replicated": {"uint8": ["5"], "float32": [2.0, "7"]},
        "sharded": [["int16", "11", 2.0, 1], ["uint8", 3, "1", "1"]],
        "n_shares": "4",
    }
    found = Outline.from_json(loose)
    assert found == SMALL
    assert all(isinstance(n, int) for n in (found.n_cores, found.owned[0][1], found.sharded[0].chunk))
    assert [array.dtype for array in Outline.from_json({**plain, "sharded": [[1, 2, 3]]}).sharded] == ["1"]
    assert Outline.from_json({**plain, "replicated": {7: [1]}}).replicated == {"7": (1,)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_cores": 0, "n_devices": 0}, "expected 0 × 2 devices (cores × chips), got 0"),
        ({"n_devices": 5}, "expected 2 × 2 devices (cores × chips), got 5"),
        ({"n_shares": 0}, "expected 1 to 4 shares, got 0"),
        ({"n_shares": 5}, "expected 1 to 4 shares, got 5"),
        ({"owned": ((0, 2), (1,))}, "expected chips with room for equally many chunks"),
        ({"owned": (), "n_devices": 0}, "expected 1 to 0 shares, got 4"),
        ({"owned": ((0, 1), (1, 3))}, "expected each of 3 chunks with one chip, got [0, 1, 1] …"),
        ({"owned": ((0, 3), (1, 3))}, "expected each of 3 chunks with one chip, got [0, 1] …"),
        ({"owned": ((0, 2), (1, 4))}, "expected each of 3 chunks with one chip, got [0, 1, 2, 4] …"),
        ({"owned": ((0, 2), (1, -1))}, "expected each of 3 chunks with one chip, got [-1, 0, 1, 2] …"),
        ({"sharded": (ShardedArray("int16", 13, 2),)}, "expected at most 6 × 2 elements, got 13"),
        (
            {"sharded": (ShardedArray("int16", 0, 0), ShardedArray("int8", -1, 2))},
            "expected at most 6 × 2 elements, got -1",
        ),
        ({"sharded": (ShardedArray("int16", 12, 2, 0),)}, "expected at least one layer, got 0"),
        ({"replicated": {"uint8": (3, -1)}}, "expected no negative sizes, got {'uint8': (3, -1)}"),
    ],
)
def test_an_outline_that_does_not_have_every_element_once_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RestartError, match=f"^{re.escape(message)}$"):
        replace(SMALL, **changes).check()


def test_outlines_at_the_edge_are_whole() -> None:
    SMALL.check()
    replace(
        SMALL, sharded=(ShardedArray("int16", 12, 2), ShardedArray("int8", 0, 0)), replicated={"uint8": (0,)}
    ).check()
    replace(SMALL, n_cores=1, n_devices=2, n_shares=2, sharded=(ShardedArray("int16", 6, 2),)).check()
    Outline(3, 1, 0, ((), (), ()), {"float32": (7,)}, ()).check()
    long = tuple((chunk,) for chunk in [*range(25), 24])
    with pytest.raises(RestartError, match=re.escape(f"one chip, got {list(range(20))} …")):
        Outline(26, 1, 26, long, {}, ()).check()


# Real meshes from here on: a program decides the chunks, and JAX where arrays lie.


@cache
def machine(n_cores: int, failed: bool = False) -> tuple[mmj.Fabric, mm.Schedule, mmj.Program, mmj.Program]:
    chips = [chip for chip in np.ndindex(2, 3) if not (failed and chip == (0, 0))]
    coords = [chip for chip in chips for _ in range(n_cores)]
    fabric = mmj.discover(jax.devices()[: len(coords)], shape="2x3", coords=coords)
    schedule = mm.plan(fabric.mesh, "weave", chunks=2 * len(chips) + 3)
    return fabric, schedule, mmj.install(schedule, fabric, update="two-phase"), mmj.install(schedule, fabric)


class Job:
    """Parameters of three dtypes, and a state like an optimizer's: a count, and per group of weights its moments."""

    def __init__(
        self, n_cores: int = 1, failed: bool = False, sharded: bool = True, accumulate_dtype: Any = np.float32
    ) -> None:
        self.fabric, self.schedule, pair, program = machine(n_cores, failed)
        self.program = pair if sharded else program
        self.accumulate_dtype = accumulate_dtype
        chunks = pair.layout.shape.total_chunks
        owners = np.asarray(reduce_scatter_of(self.schedule).owners)
        lists = [[c for c in range(chunks) if owners[c] == chip] for chip in range(self.fabric.mesh.n_chips)]
        room = max(map(len, lists))
        self.owned = tuple(tuple(row + [chunks] * (room - len(row))) for row in lists)
        self.n_cores, self.chunks, self.room = n_cores, chunks, room
        self.n_devices = n_cores * self.fabric.mesh.n_chips
        # float32 and float16 travel as float32 together, int32 on its own; without accumulate_dtype each on its own.
        self.sizes = [6 + 77, 5] if accumulate_dtype is not None else [77, 6, 5]
        travels = ["float32", "int32"] if accumulate_dtype is not None else ["float32", "float16", "int32"]
        params = {
            "a": np.arange(77, dtype=np.float32).reshape(7, 11),
            "b": np.arange(6, dtype=np.float16),
            "c": np.arange(5, dtype=np.int32),
        }
        self.params = put(params, self.fabric)
        self.widths = [-(-size // (n_cores * chunks)) for size in self.sizes]
        shapes = [(self.n_devices * room, width) for width in self.widths]
        split = self.fabric.sharding(self.fabric.axes)
        moments = [
            jax.device_put(np.full(shape, -1, dtype), split) for shape, dtype in zip(shapes, travels, strict=True)
        ]
        self.state: Any = (put(np.int32(3), self.fabric), {"mu": moments, "nu": [m * 1 for m in moments]})
        if not sharded:
            self.state = (self.state[0], {"mu": [self.params["a"]], "nu": [self.params["b"]]})
        self.travels = travels

    def layout(self) -> StateLayout:
        return StateLayout.of(self.training(), self.program, self.params)

    def training(self) -> TrainStep:
        """A train step whose optimizer has this state."""

        def step(*_: Any) -> Any:
            raise AssertionError("a layout needs no step")

        return TrainStep(lambda _params, _program: self.state, step, self.fabric, self.accumulate_dtype)


CASES = [(1, False), (1, True), (2, False)]


@pytest.mark.parametrize(("n_cores", "failed"), CASES)
@pytest.mark.parametrize("accumulate_dtype", [np.float32, None], ids=["float32", "own"])
def test_a_sharded_layout_says_what_is_where(n_cores: int, failed: bool, accumulate_dtype: Any) -> None:
    job = Job(n_cores, failed, accumulate_dtype=accumulate_dtype)
    layout = job.layout()
    outline = layout.outline
    assert layout.fabric is job.fabric
    assert layout.structure == jax.tree.structure((job.params, job.state))
    leaves = jax.tree.leaves((job.params, job.state))
    assert [(leaf.shape, leaf.dtype) for leaf in layout.leaves] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    assert layout.is_sharded == (False,) * 4 + (True,) * 2 * len(job.sizes)
    assert (outline.n_devices, outline.n_cores, outline.total_chunks) == (job.n_devices, n_cores, job.chunks)
    assert outline.owned == job.owned
    assert all(isinstance(chunk, int) for row in outline.owned for chunk in row)
    assert outline.replicated == {"float32": (77,), "float16": (6,), "int32": (5, 1)}
    arrays = [ShardedArray(*array) for array in zip(job.travels, job.sizes, job.widths, strict=True)]
    assert outline.sharded == (*arrays, *arrays)
    outline.check()
    # The optimizer's matrices are the user's moments: as many arrays as there are weights, in the dtypes of the sums.
    dtypes = {"a": "float32", "b": job.travels[0 if accumulate_dtype else 1], "c": "int32"}
    for name, dtype in dtypes.items():
        shape = ",".join(map(str, job.params[name].shape))
        assert (f"opt_state[1]['nu']['{name}']", f"{dtype}[{shape}]") in layout.identity.entries
    assert ("params['a']", "float32[7,11]") in layout.identity.entries
    assert "identity" not in repr(layout)
    assert "Outline" not in repr(layout)


def test_a_layout_takes_the_dtype_that_its_train_step_sums_in() -> None:
    """float16 weights travel with the float32 ones only if sums are made in float32, the default of `train_step`."""
    job = Job()
    params = {name: job.params[name] for name in ("a", "b")}
    sizes = {}
    for dtype in (None, np.float32):
        training = mmj.train_step(lambda *_: 0.0, optax.adam(0.1), job.fabric, accumulate_dtype=dtype)
        outline = StateLayout.of(training, job.program, params).outline
        sizes[dtype] = [(array.dtype, array.size) for array in outline.sharded]
    assert sizes[None] == [("float32", 77), ("float16", 6)] * 2
    assert sizes[np.float32] == [("float32", 77 + 6)] * 2
    by_default = mmj.train_step(lambda *_: 0.0, optax.adam(0.1), job.fabric)
    assert by_default.accumulate_dtype == np.float32


def test_a_layout_needs_a_program_for_the_fabric_of_its_train_step() -> None:
    job = Job()
    for other in (Job(failed=True), Job(n_cores=2)):
        with pytest.raises(ParameterError, match=r"another fabric than the train step's, which is Fabric.*same fabric"):
            StateLayout.of(job.training(), other.program, job.params)
    with pytest.raises(ParameterError, match=r"Expected a Program, got a Schedule"):
        StateLayout.of(job.training(), job.schedule, job.params)  # type: ignore[arg-type]


def test_a_state_that_is_not_of_the_layout_is_refused_by_its_first_difference() -> None:
    job = Job()
    layout, (count, moments) = job.layout(), job.state
    layout.check(job.params, job.state)
    layout.check(*jax.tree.unflatten(layout.structure, layout.leaves))
    other = {**job.params, "b": job.params["b"].astype(np.float32)}
    for params, state, why in (
        (other, job.state, r"expected params\['b'\] float16\[6\], got params\['b'\] float32\[6\]\."),
        (job.params, (count, {"mu": moments["mu"]}), r"expected 8 arrays in .*, got 6 in"),
        (job.params, [count, moments], r"expected 8 arrays in .*, got 8 in"),
        (job.params, (moments, count), r"expected state\[0\] int32\[\], got state\[0\]\['mu'\]\[0\] float32\["),
    ):
        with pytest.raises(RestartError, match=why):
            layout.check(params, state)


@pytest.mark.parametrize("n_cores", [1, 2])
def test_a_replicated_layout(n_cores: int) -> None:
    job = Job(n_cores, sharded=False)
    sizes: dict[str, tuple[int, ...]] = {}
    for leaf in jax.tree.leaves((job.params, job.state)):
        sizes[leaf.dtype.name] = (*sizes.get(leaf.dtype.name, ()), leaf.size)
    assert {dtype: sum(of) for dtype, of in sizes.items()} == {"float32": 77 * 2, "float16": 6 * 2, "int32": 5 + 1}
    assert job.layout().outline == Outline(6 * n_cores, n_cores, 0, ((),) * 6, sizes, ())
    assert job.layout().is_sharded == (False,) * 6


@pytest.mark.parametrize(("n_cores", "failed"), CASES)
@pytest.mark.parametrize("sharded", [True, False], ids=["pair", "program"])
def test_vectors_are_laid_out_element_by_element(n_cores: int, failed: bool, sharded: bool) -> None:
    job = Job(n_cores, failed, sharded)
    layout = job.layout()
    rng = np.random.default_rng(0)
    vectors = {name: rng.integers(1, 100, size).astype(dtype) for name, (dtype, size) in layout.outline.vectors.items()}
    params, state = layout.to_devices(read_vectors(vectors), (job.params, job.state))
    old, new = jax.tree.leaves((job.params, job.state)), jax.tree.leaves((params, state))
    assert jax.tree.structure((params, state)) == layout.structure
    used = dict.fromkeys(layout.outline.replicated, 0)
    which = 0
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
        name = before.dtype.name
        if not layout.is_sharded[number]:
            assert layout.sharding(number).spec == PartitionSpec()
            start, used[name] = used[name], used[name] + before.size
            expected = vectors[f"replicated {name}"][start : used[name]].reshape(before.shape)
            for shard in after.addressable_shards:
                assert np.array_equal(shard.data, expected)
            continue
        assert layout.sharding(number).spec == PartitionSpec(job.fabric.axes)
        expected = np.full(before.shape, -1, before.dtype)  # what is padding keeps its values
        width = before.shape[1]
        for element, value in enumerate(vectors[f"sharded {which}"]):
            whole_chunk, offset = divmod(element, width)
            core, chunk = divmod(whole_chunk, job.chunks)
            (chip,) = (i for i, row in enumerate(job.owned) if chunk in row)
            expected[(chip * n_cores + core) * job.room + job.owned[chip].index(chunk), offset] = value
        assert np.array_equal(np.asarray(after), expected)
        which += 1
    with pytest.raises(ValueError, match="zip"):
        layout.to_devices(read_vectors(vectors), (params, (*state, state[0])))


def test_what_is_no_shard_of_these_parameters_is_refused() -> None:
    job = Job()
    shapes = [(job.n_devices * job.room, width) for width in job.widths]
    good = job.state
    for name, moments in (
        ("[1][1]['mu'][0]", [job.params["a"], good[1]["mu"][1]]),  # another shape
        ("[1][1]['mu'][0]", [*good[1]["mu"], good[1]["mu"][0]]),  # more groups than there are
        ("[1][1]['mu']['w']", {"w": good[1]["mu"][0]}),  # not a list of groups
    ):
        job.state = (good[0], {"mu": moments})
        message = (
            f"{name} has shape {jax.tree.leaves(moments)[0].shape}, which is no shard of "
            f"these parameters (expected one of {shapes}). Use an optimizer whose state has the shapes of the weights "
            "that it is given, or install(schedule, fabric), which does not shard it."
        )
        with pytest.raises(RestartError, match=f"^{re.escape(message)}$"):
            job.layout()


def test_the_first_array_of_a_state_is_sharded_too_and_a_flat_one_is_refused() -> None:
    job = Job()
    moments = job.state[1]["mu"]
    job.state = {"mu": moments}
    assert job.layout().is_sharded == (False,) * 3 + (True,) * 2
    job.state = {"mu": [put(np.zeros(4, np.float32), job.fabric)]}
    with pytest.raises(RestartError, match=r"\['mu'\]\[0\] has shape \(4,\), which is no shard"):
        job.layout()


def test_the_number_of_a_shards_device() -> None:
    for n_rows in (1, 2, 3):
        for device in range(3):
            shard = SimpleNamespace(index=(slice(device * n_rows or None, None), slice(None)))
            assert device_number(shard, n_rows) == device
    assert device_number(SimpleNamespace(index=(slice(None), slice(None))), 0) == 0


def test_typed_keys_are_refused_by_name() -> None:
    job = Job(sharded=False)
    job.state = (job.state[0], {"rng": jax.random.key(0)})
    message = "[1][1]['rng'] has dtype key<fry>, which cannot be kept. Use a raw key (jax.random.PRNGKey) in its place."
    with pytest.raises(RestartError, match=f"^{re.escape(message)}$"):
        job.layout()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "uint64"])
def test_a_dtype_by_its_name(name: str) -> None:
    assert dtype_named(name) == jax.numpy.dtype(name)


@pytest.mark.parametrize(
    "name",
    ["(2,3", "2float32", "f4,f4", "(1<<99)f4", "float", "<f4", "f4", "object", "V8", "", "float33", "\x00", 3, None],
)
def test_text_that_is_no_dtype_is_refused(name: Any) -> None:
    """NumPy reads some of these as formulas, and raises SyntaxError, ValueError or nothing at all."""
    with pytest.raises(RestartError, match="is not the name of a dtype"):
        dtype_named(name)


def test_arrays_are_placed_on_every_device() -> None:
    fabric = machine(1)[0]
    tree = {"x": np.arange(6, dtype=np.int16).reshape(2, 3), "y": np.float32(2.5), "z": [1, 2]}
    placed = put(tree, fabric)
    assert list(placed) == ["x", "y", "z"]
    assert isinstance(placed["z"], list)
    for leaf, expected in zip(jax.tree.leaves(placed), jax.tree.leaves(tree), strict=True):
        assert leaf.sharding == fabric.sharding()
        assert len(leaf.addressable_shards) == 6
        assert leaf.shape == np.shape(expected)
        for shard in leaf.addressable_shards:
            assert np.array_equal(shard.data, expected)


@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_001])
def test_a_cpu_device_takes_what_is_restored_without_a_copy(size: int) -> None:
    """Half of a restart's memory, on CPU; and it is not written to again, as the device has it now."""
    values = aligned_empty(size, np.dtype(np.float32))
    values[:] = np.arange(size)
    on_device = jax.device_put(values, jax.devices("cpu")[0])
    assert on_device.unsafe_buffer_pointer() == values.ctypes.data
    np.testing.assert_array_equal(on_device, np.arange(size, dtype=np.float32))
