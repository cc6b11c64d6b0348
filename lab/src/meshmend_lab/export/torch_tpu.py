"""An all-reduce round a hole inside PyTorch's graph on TPU, through torch_tpu: experimental, no TPU has run it.

torch_tpu, PyTorch's own TPU backend, takes a JAX function as an op (`torch.tpu.pallas.jax_op`): here the engine's, over
the whole world, each rank with its own rows of the plan's tables as tensors. Chips that are healthy and left out stay
ranks of the job: they *stand by*, which is to join every permute and do nothing. What this offers is a restart with a
plan for the ranks that are to train; torch_tpu 0.2 has no way to go on in place when one is lost.

    part = join(mm.plan(mm.Mesh("8x8", failed=["2x2@2,2"])), ranks=[…])    # the rank of each live chip
    model = DistributedDataParallel(model)
    model.register_comm_hook(part, comm_hook)

or, with FSDP2 inside groups of ranks, `model.set_all_reduce_hook(part.all_reduce_)`. A rank that stands by gets zeros
as its gradients, and its parameters mean nothing: let one that takes part save and report. Rank 0 should take part,
because DDP copies its buffers to all.
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshmend.errors import MissingExtraError, ParameterError
from meshmend.extras import require
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.lanes import Lowered, lower
from meshmend.schedule.verify import ensure_proven
from meshmend_lab.export.bystanders import inputs_of, with_bystanders

if TYPE_CHECKING:
    import jax

__all__ = ["RankPart", "comm_hook", "join", "over_ranks", "part_of", "tpu_op"]

AXIS = "chip"
Op = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""From this rank's payload, of shape (1, n), and its rows of the tables to the sums, of the payload's shape."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part in the all-reduce of a plan: the op, the rank's own rows, and whether it stands by."""

    op: Op
    rows: tuple[torch.Tensor, ...]
    n_chips: int
    stands_by: bool

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean over the chips that take part, in the tensor's shape and dtype; zeros on one that stands by.

        What is narrower than float32 is summed in float32.
        """
        if not tensor.is_floating_point():
            raise ParameterError(f"A mean of {tensor.dtype} is none: expected a tensor of floating-point numbers.")
        wide = torch.promote_types(tensor.dtype, torch.float32)
        total = self.op(tensor.detach().reshape(1, -1).to(wide), list(self.rows)).reshape(tensor.shape)
        return torch.zeros_like(tensor) if self.stands_by else (total / self.n_chips).to(tensor.dtype)

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Average in place: FSDP2's `set_all_reduce_hook` takes this, and gives it each shard of the gradients."""
        tensor.copy_(self.mean(tensor))


def comm_hook(part: RankPart, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP: `ddp_model.register_comm_hook(part, comm_hook)`."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(part.mean(bucket.buffer()))
    return future


def over_ranks(schedule: Schedule, ranks: Sequence[int] | Sequence[Sequence[int]] | None, world: int) -> Lowered:
    """Return a plan's tables with a row for each rank of the world; ranks that are not listed stand by.

    `ranks` has the rank of each live chip, in the plan's order (`schedule.mesh.coords`): by default 0, 1, 2, … if the
    world has one rank per live chip, or each chip's place in row-major order if it has one per chip of the mesh.
    Where a chip of the plan stands for a group of ranks, as those that FSDP2 shards over, it has all of them: the plan
    runs between the first of each group, the second of each, ….

    >>> import meshmend as mm
    >>> lowered = over_ranks(mm.plan(mm.Mesh("2x2", failed=["0,0"])), None, 4)
    >>> sorted({rank for lane in lowered.loops[0].lanes for pair in lane.pairs for rank in pair})
    [1, 2, 3]
    """
    if schedule.collective is not Collective.ALL_REDUCE:
        raise ParameterError(f"Expected an all-reduce, got a schedule of a {schedule.collective}.")
    ensure_proven(schedule)
    mesh = schedule.mesh
    if ranks is None:
        if world not in (mesh.n_chips, mesh.size):
            raise ParameterError(
                f"{mesh!r} has {mesh.n_chips} live of {mesh.size} chips, but the world has {world} ranks: say which "
                "rank each live chip is, as in ranks=[0, 1, 3]."
            )
        ranks = list(range(world)) if world == mesh.n_chips else mesh.live.ravel().nonzero()[0].tolist()
    return with_bystanders(lower(schedule), ranks, world)


def part_of(lowered: Lowered, rank: int, op: Op, device: torch.device | str) -> RankPart:
    """Return a rank's part: its own rows of the tables, on its device, and the op that runs all ranks' together."""
    rows = tuple(torch.from_numpy(table[rank : rank + 1].copy()).to(device) for table in inputs_of(lowered).values())
    takes_part = {end for loop in lowered.loops for lane in loop.lanes for pair in lane.pairs for end in pair}
    return RankPart(op, rows, lowered.shape.n_chips, bool(takes_part) and rank not in takes_part)


def _bridge() -> Any:
    """Return torch_tpu's public bridge to JAX, `torch.tpu.pallas`, which importing torch_tpu brings."""
    if find_spec("torch_tpu") is None:
        raise MissingExtraError(
            "meshmend_lab.export.torch_tpu", "torch_tpu", "pip install 'torch_tpu==0.2.*' (Python 3.12)"
        )
    require("jax", "optax", needed_for="meshmend_lab.export.torch_tpu", extra="jax")
    import_module("torch_tpu")
    return import_module("torch.tpu").pallas


def tpu_op(lowered: Lowered, mesh: "jax.sharding.Mesh") -> Any:
    """Register the all-reduce of a plan as an op of PyTorch, `torch.ops.meshmend.all_reduce_…`, and return it.

    `mesh` is over all ranks, in order of rank, with one axis: `torch.tpu.pallas.get_pallas_mesh("chip")` makes it. Each
    plan has an op of its own, whose name has the plan's digest.
    """
    bridge = _bridge()
    from jax.sharding import PartitionSpec

    from meshmend_lab.export.exporting import summing

    n_rows = lowered.loops[0].send.shape[0] if lowered.loops else mesh.size
    if mesh.axis_names != (AXIS,) or mesh.size != n_rows:
        raise ParameterError(
            f"The mesh has the axes {mesh.axis_names} and {mesh.size} devices, expected one axis {AXIS!r} over all "
            f"{n_rows} ranks: torch.tpu.pallas.get_pallas_mesh({AXIS!r})."
        )
    by_rank = PartitionSpec(AXIS)
    return bridge.jax_op(
        f"meshmend::all_reduce_{lowered.shape.digest[:12]}",
        summing(lowered, mesh),
        mesh=mesh,
        input_partition_specs=(by_rank, by_rank),
        output_partition_specs=[by_rank],
    )


def join(
    schedule: Schedule,
    ranks: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    mesh: "jax.sharding.Mesh | None" = None,
    device: torch.device | str = "tpu",
) -> RankPart:
    """Return this process's part, after `torch.distributed.init_process_group`; every rank calls it with the same plan.

    `ranks` is as in `over_ranks`, and `mesh` as in `tpu_op`.
    """
    lowered = over_ranks(schedule, ranks, dist.get_world_size())
    op = tpu_op(lowered, _bridge().get_pallas_mesh(AXIS) if mesh is None else mesh)
    return part_of(lowered, dist.get_rank(), op, device)
