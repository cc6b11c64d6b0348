"""The layout of a state: parts that cover it on any mesh, rows of devices, and what is refused.

That every element comes back where it was is shown by bits, in test_state, test_tiled_state and test_orbax.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.restart_cases import read_vectors
from meshmend.errors import ParameterError, RestartError
from meshmend.jax.state.layout.flat import Outline, ShardedArray, dtype_named
from meshmend.jax.state.layout.state_layout import StateLayout, put
from meshmend.jax.state.memory.collect import aligned_empty
from meshmend.jax.train.step import TrainStep
from meshmend.schedule.split import reduce_scatter_of


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
        ShardedArray(
            str(rng.choice(["float32", "int16"])), size, -(-size // (n_cores * total)), int(rng.choice([1, 3]))
        )
        for size in sizes
    ]
    replicated = {
        str(dtype): tuple(rng.integers(0, 40, int(rng.integers(0, 4))).tolist())
        for dtype in rng.permutation(["int16", "float32", "uint8"])[:2]
    }
    n_slots = int(rng.choice([1, 1, 2, 4]))
    n_shares = int(rng.integers(1, n_chips * n_cores * n_slots + 1))
    n_devices = n_chips * n_cores * n_slots
    return Outline(n_devices, n_cores, total, owned, replicated, tuple(sharded), n_slots, n_shares)


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_all_elements_and_each_shard_is_its_device_s_alone(seed: int) -> None:
    outline, rng = random_outline(seed), np.random.default_rng(seed)
    outline.check()
    assert Outline.from_json(json.loads(json.dumps(outline.as_json()))) == outline
    vectors = {name: rng.integers(1, 100, size).astype(dtype) for name, (dtype, size) in outline.vectors.items()}
    found = {name: np.zeros_like(vector) for name, vector in vectors.items()}
    holders: dict[str, list[set[int]]] = {name: [set() for _ in vector] for name, vector in vectors.items()}
    for part in range(outline.n_parts):
        content = np.zeros(outline.part_bytes(part), np.uint8)
        slices = outline.slices(part)
        assert (slices[0][0], slices[-1][1]) == (0, len(content))
        assert all(one[1] == other[0] for one, other in itertools.pairwise(slices))
        for name, start, at, length in outline.byte_runs(part):
            assert not content[at : at + length].any(), "a byte of a part is of one element"
            content[at : at + length] = vectors[name].view(np.uint8)[start : start + length]
        for name, start, at, length in outline.byte_runs(part):
            found[name].view(np.uint8)[start : start + length] = content[at : at + length]
            size = vectors[name].itemsize
            for element in range(start // size, (start + length) // size):
                holders[name][element].add(part)
    for name, vector in vectors.items():
        assert found[name].tobytes() == vector.tobytes()
        writers = [outline.device_of(name, element) for element in range(len(vector))]
        assert all(0 <= device < outline.n_devices for device in writers)
        if name.startswith("sharded"):
            assert holders[name] == [{outline.shards_part(device)} for device in writers]


SMALL = Outline(
    4,
    2,
    3,
    ((0, 2), (1, 3)),
    {"uint8": (5,), "float32": (2, 7)},
    (ShardedArray("int16", 11, 2), ShardedArray("uint8", 3, 1)),
    n_shares=4,
)


def test_few_large_shares_have_as_many_slices_as_many_small_ones() -> None:
    assert len(replace(SMALL, n_shares=1).slices(0)) == 4 * len(SMALL.slices(0))
    assert len(replace(SMALL, n_shares=1, n_devices=8000).slices(0)) == 1024


def test_the_name_of_an_outline_is_that_of_its_content() -> None:
    assert replace(SMALL, replicated={"float32": (2, 7), "uint8": (5,)}).digest == SMALL.digest
    assert replace(SMALL, n_devices=5).digest != SMALL.digest


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


@pytest.mark.parametrize(("n_cores", "failed"), [(1, True), (2, False)])
def test_a_device_has_the_chunks_of_its_chip_and_core(n_cores: int, failed: bool) -> None:
    """The oracle: elements go core by core, chunk by chunk, each chunk to its owner, in the row of its place there."""
    job = Job(n_cores, failed)
    layout = job.layout()
    rng = np.random.default_rng(0)
    vectors = {name: rng.integers(1, 100, size).astype(dtype) for name, (dtype, size) in layout.outline.vectors.items()}
    found = layout.to_devices(read_vectors(vectors), (job.params, job.state))
    assert jax.tree.structure(found) == layout.structure
    old, new = jax.tree.leaves((job.params, job.state)), jax.tree.leaves(found)
    for before, after in zip(old, new, strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    sharded = [leaf for leaf, is_sharded in zip(new, layout.is_sharded, strict=True) if is_sharded]
    for which, after in enumerate(sharded):
        expected = np.full(after.shape, -1, after.dtype)  # what is padding keeps its values
        for element, value in enumerate(vectors[f"sharded {which}"]):
            whole_chunk, offset = divmod(element, after.shape[1])
            core, chunk = divmod(whole_chunk, job.chunks)
            (chip,) = (i for i, row in enumerate(job.owned) if chunk in row)
            expected[(chip * n_cores + core) * job.room + job.owned[chip].index(chunk), offset] = value
        assert np.array_equal(np.asarray(after), expected)


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
