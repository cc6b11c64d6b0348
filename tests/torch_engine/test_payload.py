"""Tensors of every kind: summed as NumPy sums them, or refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshmend import Mesh, plan
from meshmend.errors import ParameterError, PayloadError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from torch_engine.threads import Group, on_every_thread  # noqa: E402

N_CHIPS = 3
SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))


def on_engines(call: Callable[[int, mmt.Engine], Any]) -> list[Any]:
    """Run `call(rank, engine)` on three chips; an engine must work and have sent nothing after a payload is refused."""
    schedule = plan(Mesh((1, N_CHIPS)), "weave", chunks=4)

    def main(rank: int, group: Group) -> Any:
        torch.set_num_threads(1)
        engine = mmt.Engine(schedule, rank, group)
        posted = len(group.posted)
        try:
            found = call(rank, engine)
        except Exception as error:
            assert len(group.posted) == posted, "something was sent"
            found = error
        after = torch.ones(5)
        engine.all_reduce(after)
        assert after.tolist() == [N_CHIPS] * 5
        return found

    return on_every_thread(N_CHIPS, main)


def inference(rank: int) -> Any:
    with torch.inference_mode():
        return torch.full((6,), float(rank + 1))


def strided(rank: int) -> Any:
    return torch.full((5, 7), float(rank + 1)).t()[::2]


KINDS: dict[str, Callable[[int], Any]] = {
    "one number": lambda rank: torch.tensor(float(rank + 1)),
    "nothing": lambda rank: torch.zeros(0, rank * 0),
    "float16": lambda rank: torch.full((37,), rank + 1, dtype=torch.float16),
    "bfloat16": lambda rank: torch.full((37,), rank + 1, dtype=torch.bfloat16),
    "float64": lambda rank: torch.full((37,), rank + 1, dtype=torch.float64),
    "int64": lambda rank: torch.full((37,), (rank + 1) << 55, dtype=torch.int64),
    "uint8": lambda rank: torch.full((37,), rank + 1, dtype=torch.uint8),
    "complex64": lambda rank: torch.full((4,), complex(rank, 1)),
    "conjugated": lambda rank: torch.full((4,), 1j * (rank + 1)).conj(),
    "negated": lambda rank: torch._neg_view(torch.full((4,), float(rank + 1))),
    "the imaginary part of a conjugate": lambda rank: torch.full((4,), complex(0, rank + 1)).conj().imag,
    "a leaf that requires a gradient": lambda rank: torch.full((6,), float(rank + 1), requires_grad=True),
    "made in inference mode": inference,
    "strided": strided,
    "a slice": lambda rank: torch.full((10,), float(rank + 1))[2:7],
    "channels last": lambda rank: torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_gives_numpys_sums(kind: str) -> None:
    tensors = [KINDS[kind](rank) for rank in range(N_CHIPS)]
    own = [tensor.detach().resolve_conj().resolve_neg().clone() for tensor in tensors]
    wanted = sum(own[1:], own[0])
    on_engines(lambda rank, engine: mmt.all_reduce(tensors[rank], engine))
    for tensor in tensors:
        got = tensor.detach().resolve_conj().resolve_neg()
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted), kind


def test_what_lies_around_a_slice_is_left_alone() -> None:
    wholes = [torch.full((4, 6), float(rank + 1)) for rank in range(N_CHIPS)]
    on_engines(lambda rank, engine: engine.all_reduce(wholes[rank][1:3]))
    on_engines(lambda rank, engine: mmt.all_reduce(wholes[rank][:, 5], engine))
    for rank, whole in enumerate(wholes):
        wanted = np.full((4, 6), rank + 1.0)
        wanted[1:3] = 6
        wanted[:, 5] = [6, 18, 18, 6]
        assert np.array_equal(whole.numpy(), wanted)


def test_a_tree_of_everything() -> None:
    trees = [[make(rank) for make in KINDS.values()] for rank in range(N_CHIPS)]
    wanted = [sum(KINDS[kind](rank).detach() for rank in range(N_CHIPS)) for kind in KINDS]
    on_engines(lambda rank, engine: mmt.all_reduce(trees[rank], engine))
    for tree in trees:
        assert [torch.equal(got.detach(), right) for got, right in zip(tree, wanted, strict=True)] == [True] * len(
            KINDS
        )


def test_tensors_are_found_in_lists_tuples_and_dictionaries_and_in_nothing_else() -> None:
    class Held:
        values = torch.ones(2)

    def tree(rank: int, *more: Any) -> Any:
        one = torch.full((2,), rank + 1.0)
        return {"a": [one, (one + 1, 7, None)], 3: {"b": one + 2}, "name": "x", "more": more}

    trees = [tree(rank) for rank in range(N_CHIPS)]
    on_engines(lambda rank, engine: mmt.all_reduce(trees[rank], engine))
    for found in trees:
        tensors = found["a"][0], found["a"][1][0], found[3]["b"]
        assert [tensor.tolist() for tensor in tensors] == [[6.0, 6.0], [9.0, 9.0], [12.0, 12.0]]
    trees = [tree(rank, Held()) for rank in range(N_CHIPS)]
    for error in on_engines(lambda rank, engine: mmt.all_reduce(trees[rank], engine)):
        assert isinstance(error, PayloadError)
        assert "got a Held in them" in str(error)
        assert trees[0]["a"][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("op", "values", "wanted"),
    [
        (SUM, [1.0, -2.0, 5.0], 4.0),
        (AVG, [1.0, -2.0, 5.5], 1.5),
        (PRODUCT, [3, -2, 5], -30),
        (MIN, [3, -2, 5], -2),
        (MAX, [3, -2, 5], 5),
        (MAX, [False, True, False], True),
        (MIN, [True, True, False], False),
    ],
)
def test_operations(op: Any, values: list[Any], wanted: Any) -> None:
    tensors = [torch.full((9,), value) for value in values]
    on_engines(lambda rank, engine: engine.all_reduce(tensors[rank], op))
    for tensor in tensors:
        assert tensor.tolist() == [wanted] * 9


def test_autograd_learns_that_a_tensor_has_changed() -> None:
    def call(rank: int, engine: mmt.Engine) -> str:
        weight = torch.full((3,), 2.0, requires_grad=True)
        loss = (weight * weight).sum()
        engine.all_reduce(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return "told"

    assert on_engines(call) == ["told"] * N_CHIPS


class Wrapped(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor whose memory is somewhere else."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def wrapped() -> Any:
    return torch.Tensor._make_wrapper_subclass(Wrapped, (4,))


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "no tensor": (lambda: np.ones(4), SUM, "needs a torch.Tensor, got ndarray"),
    "sparse": (lambda: torch.eye(4).to_sparse(), SUM, "needs a dense tensor, got a torch.sparse_coo one"),
    "sparse rows": (lambda: torch.eye(4).to_sparse_csr(), SUM, "got a torch.sparse_csr one"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), SUM, "got a quantized one"),
    "meta": (lambda: torch.ones(4, device="meta"), SUM, "needs a tensor on the CPU or an accelerator, got one on meta"),
    "a wrapper": (wrapped, SUM, "needs a plain tensor, got Wrapped"),
    "part of a graph": (lambda: torch.ones(4, requires_grad=True) * 2, SUM, "Gradients do not flow through"),
    "expanded": (lambda: torch.ones(1).expand(6), SUM, "needs a place in memory for each element"),
    "overlapping": (lambda: torch.ones(9).as_strided((3, 3), (2, 1)), SUM, "with strides (2, 1)"),
    "an integer mean": (lambda: torch.ones(4, dtype=torch.int32), AVG, "A mean of integers is not an integer"),
    "a mean of bools": (lambda: torch.ones(4, dtype=torch.bool), AVG, "A sum of bools is not a bool"),
    "a sum of bools": (lambda: torch.ones(4, dtype=torch.bool), SUM, "A sum of bools is not a bool"),
    "the largest complex": (lambda: torch.ones(4, dtype=torch.complex64), MAX, "torch cannot do it on a CPU"),
    "float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), SUM, "torch cannot do it on a CPU"),
}
OF_THE_ENGINE = {"transposed": (lambda: torch.ones(4, 3).t(), SUM, "needs a contiguous tensor, got strides (1, 3)")}


@pytest.mark.filterwarnings("ignore")  # torch's, of sparse and quantized tensors
@pytest.mark.parametrize("kind", REFUSED | OF_THE_ENGINE)
def test_the_engine_refuses_before_anything_is_sent(kind: str) -> None:
    make, op, message = (REFUSED | OF_THE_ENGINE)[kind]
    for error in on_engines(lambda _, engine: engine.all_reduce(make(), op)):
        assert isinstance(error, PayloadError), error
        assert isinstance(error, TypeError)
        assert message in str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "a wrapper", "expanded", "an integer mean"])
def test_a_tree_is_refused_as_a_whole(kind: str) -> None:
    make, op, message = REFUSED[kind]
    for error in on_engines(lambda _, engine: mmt.all_reduce([torch.ones(3), make()], engine, mean=op == AVG)):
        assert isinstance(error, PayloadError), error
        assert message in str(error)


def test_under_no_grad_a_result_may_be_reduced() -> None:
    def call(rank: int, engine: mmt.Engine) -> list[float]:
        tensor = torch.full((4,), rank + 1.0, requires_grad=True) * 2
        with torch.no_grad():
            engine.all_reduce(tensor)
        return list(tensor.detach().tolist())

    assert on_engines(call) == [[12.0] * 4] * N_CHIPS


def test_operations_that_the_engine_does_not_know() -> None:
    for op in (dist.ReduceOp.BAND, "sum", None):
        for error in on_engines(lambda _, engine, op=op: engine.all_reduce(torch.ones(3), op)):  # type: ignore[misc]
            assert isinstance(error, ParameterError)
            assert "reduces by SUM, AVG, PRODUCT, MIN or MAX" in str(error)
    for found in on_engines(lambda _, engine: engine.all_reduce(torch.ones(3), dist.ReduceOp(dist.ReduceOp.SUM))):
        assert found is None
