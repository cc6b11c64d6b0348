"""What the engine takes: dense tensors, of CPUs or an accelerator, that torch can add up on a CPU.

Everything else is refused here, before a message is sent. A tensor that fails half-way would look like a lost chip to
the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import torch
import torch.distributed as dist

from meshmend.errors import ParameterError, PayloadError

Flat = Annotated[torch.Tensor, "[S]"]
"""A payload's elements in a row, or a run of them."""
Combine = Callable[[Flat, Flat], Flat]

_COMBINE: dict[Any, Combine] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MIN: lambda held, arriving: torch.minimum(held, arriving, out=held),
    dist.ReduceOp.MAX: lambda held, arriving: torch.maximum(held, arriving, out=held),
}
NAMES = {kind: kind.name for kind in _COMBINE}


def kind_of(op: Any) -> Any:
    """Return the kind of a reduction, however torch wraps it; raise if the engine does not support it."""
    kind = getattr(op, "op", op)
    if kind not in list(_COMBINE):
        raise ParameterError(f"The engine reduces by SUM, AVG, PRODUCT, MIN or MAX: got {op}.")
    return kind


def combine_of(kind: Any) -> Combine:
    """Return what adds (multiplies, …) what arrives to what is held, in place."""
    return _COMBINE[kind]


def check_tensor(tensor: Any, kind: Any) -> None:
    """Raise `PayloadError` for a tensor that cannot be reduced in place; without a kind, only moved."""
    if not isinstance(tensor, torch.Tensor):
        raise PayloadError("a torch.Tensor", type(tensor).__name__, "Convert it with torch.as_tensor.")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise PayloadError(
            "a plain tensor", type(tensor).__name__, "Pass the tensor inside it, such as DTensor's to_local()."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        layout = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise PayloadError("a dense tensor", f"a {layout} one", "Convert it with to_dense() and reduce that.")
    if not _is_served(tensor.device):
        raise PayloadError(
            "a tensor on the CPU or an accelerator",
            f"one on {tensor.device}",
            "Move it with .cpu(), and back afterwards.",
        )
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise PayloadError(
            "a tensor outside the autograd graph",
            f"the result of {tensor.grad_fn.name()}",
            "Gradients do not flow through an all-reduce: pass tensor.detach(), or call it under torch.no_grad().",
        )
    if _overlaps(tensor):
        raise PayloadError(
            "a place in memory for each element",
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
            "Elements of an expanded tensor share memory: reduce tensor.clone().",
        )
    why = _cannot(kind, tensor.dtype) if kind is not None else ""
    if why:
        raise PayloadError(f"a dtype that {NAMES[kind]} is right for", str(tensor.dtype), why)


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the accelerator that all tensors of a call are on, None for the CPU; raise if they are on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise PayloadError("tensors on one device", f"tensors on {found}", "Move them to one of these devices.")
    return next((device for device in devices if device.type != "cpu"), None)


def _is_served(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def check_payload(payload: Any, kind: Any) -> None:
    """Raise `PayloadError` for a tensor that the engine cannot reduce where it is."""
    check_tensor(payload, kind)
    if not payload.is_contiguous():
        raise PayloadError(
            "a contiguous tensor",
            f"strides {payload.stride()}",
            "meshmend.torch.all_reduce packs any tensor; or reduce tensor.contiguous().",
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory. Dimensions that do not nest in each other count as sharing."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return bool(tensor.numel() > 0)
            reach += stride * (size - 1)
    return False


@cache
def _cannot(kind: Any, dtype: torch.dtype) -> str:
    """Return why elements of a dtype cannot be reduced, or nothing."""
    sums = kind not in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    if dtype == torch.bool and sums:
        return "A sum of bools is not a bool: use MAX for any and MIN for all, or convert with .int()."
    if kind == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        return "A mean of integers is not an integer: use SUM and divide, or convert with .float()."
    one = torch.ones(1, dtype=torch.uint8).to(dtype)
    try:
        combine_of(kind)(one, one.clone())
    except RuntimeError as error:
        return f"torch cannot do it on a CPU ({error}): convert it to another dtype."
    return ""


def describe(tensors: Sequence[torch.Tensor], kind: Any, names: Any = None) -> str:
    """Describe what is reduced: members agree on this before any data moves."""
    name = NAMES.get(kind, "all-gather")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if len(shapes) == 1:
        return f"{name} of {dtype} {list(shapes[0])}"
    digest = hashlib.blake2b(repr((shapes, names)).encode(), digest_size=8).hexdigest()
    n_elements = sum(tensor.numel() for tensor in tensors)
    return f"{name} of {len(shapes)} {dtype} tensors, {n_elements:,} elements, names and shapes {digest}"


def memory_of(payload: Annotated[torch.Tensor, "[...]"]) -> Flat:
    """Return the payload's elements in a row: a plain tensor over the same memory, without autograd or other modes.

    A tensor that is conjugated or negated lazily has other values than its memory: it is copied, and `overwrite` puts
    the result back.
    """
    if payload.is_conj() or payload.is_neg():
        return payload.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.empty(0, dtype=payload.dtype, device=payload.device)
    return flat.set_(payload.untyped_storage(), payload.storage_offset(), (payload.numel(),), (1,))


def overwrite(tensor: Annotated[torch.Tensor, "[...]"], values: Flat) -> None:
    """Put reduced values into a tensor; autograd registers the change."""
    if tensor.data_ptr() == values.data_ptr() and not (tensor.is_conj() or tensor.is_neg()):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        return
    with torch.inference_mode(tensor.is_inference()):
        tensor.detach().copy_(values.view(tensor.shape))
