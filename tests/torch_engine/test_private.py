"""What meshmend uses of torch and torchft that is not public: each fails here, with what breaks, when it moves."""

from __future__ import annotations

import inspect
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft")

import torch
import torch.distributed as dist
import torchft
from torchft.manager import ExceptionWithTraceback
from torchft.process_group import ProcessGroupWrapper, create_store_client

from meshmend.torch.ddp import DistributedDataParallel
from meshmend.torch.manager import Manager
from meshmend.torch.private import GlooBased, Work, cpu_backend, gloo_backend, gloo_group, name_group
from meshmend.torch.private_torchft import HAS_CONFIGURE
from meshmend.torch.process_group import MeshProcessGroup
from torch_engine.processes import with_store

SECONDS = timedelta(seconds=10)
NO_GLOO = "MeshProcessGroup and the laboratory cannot make their Gloo groups. Change meshmend/torch/private.py."
NO_HOOK = "torchft would use its own hook instead of meshmend's. Change meshmend/torch/private_torchft.py."


def alone() -> dist.HashStore:
    return dist.HashStore()


def test_gloo_is_made_without_a_default_group() -> None:
    try:
        backend = gloo_backend(alone(), 0, 1, timeout=SECONDS)
    except (AttributeError, TypeError) as error:
        pytest.fail(f"{NO_GLOO} ({error})")
    assert not dist.is_initialized()
    assert (backend.rank(), backend.size()) == (0, 1)
    payload = torch.tensor([1.0, 2.0])
    backend.allreduce([payload]).wait()
    assert payload.tolist() == [1.0, 2.0]


def test_a_group_has_the_gloo_that_it_was_given() -> None:
    try:
        group = gloo_group(alone(), 0, 1, connect_timeout=SECONDS, timeout=SECONDS, interface="lo")
    except (AttributeError, TypeError) as error:
        pytest.fail(f"{NO_GLOO} ({error})")
    backend = cpu_backend(group)
    assert isinstance(backend, dist.ProcessGroupGloo), "engines find no transport in a group: see cpu_backend"
    assert all(hasattr(backend, name) for name in ("send", "recv", "rank", "size"))


def test_cpp_finds_the_methods_of_a_group_of_ours() -> None:
    class Counting(GlooBased):
        n_calls = 0

        def broadcast(self, tensors: Any, opts: Any = None) -> Any:
            self.n_calls += 1
            return self.gloo.broadcast(tensors, opts)

    why = "DDP and traced programs would use Gloo instead of plans. Change GlooBased in meshmend/torch/private.py."
    try:
        store = alone()
        group = Counting(gloo_group(store, 0, 1, connect_timeout=SECONDS, timeout=SECONDS, interface="lo"), store)
        name_group(group, "counting")
    except (AttributeError, TypeError) as error:
        pytest.fail(f"{why} ({error})")
    assert (group.rank(), group.size(), group.group_name) == (0, 1, "counting")
    assert group.get_group_store() is store
    dist._broadcast_coalesced(group, [torch.ones(3)], 100)
    assert group.n_calls == 1, why
    payload = torch.ones(2)
    group.allreduce([payload]).wait()  # which it does not define: Gloo's
    assert payload.tolist() == [1.0, 1.0]


def test_a_group_without_a_cpu_backend_says_so() -> None:
    with pytest.raises(RuntimeError):
        cpu_backend(dist.ProcessGroup(alone(), 0, 1))


@pytest.mark.parametrize("name", ["abort", "shutdown"])
def test_gloo_inherits_an_abort_and_a_shutdown_that_do_nothing(name: str) -> None:
    def main(chip: tuple[int, ...], number: int, address: str) -> float:
        group = gloo_backend(create_store_client(address, SECONDS), number, 2, timeout=SECONDS, interface="lo")
        word = torch.zeros(1)
        if number == 0:
            pending = group.recv([word], 1, 5)
            getattr(group, name)()
            group.send([word], 1, 6).wait()
            pending.wait()
        else:
            group.recv([word], 0, 6).wait()  # sent after the abort
            group.send([word + 1], 0, 5).wait()
        return float(word)

    found = with_store([(0, 0), (0, 1)], main)
    why = "Gloo can close its connections now: let Channel.close use that, in place of a wait that times out"
    assert found[0, 0] == 1, why


def test_a_started_collective_is_what_torch_waits_for() -> None:
    done = gloo_backend(alone(), 0, 1, timeout=SECONDS).allreduce([torch.zeros(1)])
    assert Work in type(done).__mro__, "torch would not take meshmend's work for a started collective: see Work"
    done.wait()


def test_torchft_forms_groups_and_reduces_buckets_through_the_hooks() -> None:
    assert "_create_pg" in vars(ProcessGroupWrapper), NO_HOOK
    forms = ProcessGroupWrapper.configure if HAS_CONFIGURE else ProcessGroupWrapper.reconfigure
    assert "_create_pg(" in inspect.getsource(forms), NO_HOOK
    assert "_comm_hook" in vars(torchft.DistributedDataParallel), NO_HOOK
    assert "self._comm_hook" in inspect.getsource(torchft.DistributedDataParallel.__init__), NO_HOOK
    parameters = list(inspect.signature(DistributedDataParallel._comm_hook).parameters.values())
    assert [parameter.name for parameter in parameters] == ["state", "bucket"]
    assert parameters[1].annotation is dist.GradBucket, "DDP refuses a hook without this annotation"


def test_torchft_says_when_it_has_received_a_state_and_what_went_wrong() -> None:
    calls = "self.load_state_dict(self._pending_state_dict"
    assert calls in inspect.getsource(torchft.Manager), "timelines would miss states from peers: see torch/manager.py"
    wrapped = ExceptionWithTraceback(ValueError("why"))
    assert isinstance(wrapped.original_exception, ValueError), "timelines would not say why a step was given up"


@pytest.mark.parametrize("ours", [MeshProcessGroup, DistributedDataParallel, Manager])
def test_no_private_method_of_torchft_is_overridden_elsewhere(ours: type) -> None:
    theirs = {
        name
        for base in ours.__mro__
        if base.__module__.startswith(("torchft", "torch."))
        for name in vars(base)
        if name.startswith("_") and not name.startswith("__") and not name.startswith("_abc")
    }
    assert not theirs & set(vars(ours))


class Doubling:
    """A manager whose all-reduce doubles what it gets, or fails as torchft's does: its work ends, without a result."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.buckets = 0

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.buckets += 1
        if not self.fails:
            tensor.mul_(2)
        return SimpleNamespace(wait=lambda: not self.fails, get_future=lambda: SimpleNamespace(_fut=None))


@pytest.mark.parametrize("fails", [False, True])
def test_torchfts_data_parallel_runs_the_hook_in_its_backward_pass(fails: bool) -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    manager = Doubling(fails)
    parallel = DistributedDataParallel(manager, layer)
    for rounds in (1, 2):
        layer.zero_grad()
        parallel(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
        assert manager.buckets == rounds, NO_HOOK
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.0, 2.0, 3.0] if fails else [2.0, 4.0, 6.0]]
