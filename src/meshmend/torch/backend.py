"""The `meshmend` backend of torch.distributed: process groups that plan for the mesh that their members form.

Importing this registers it. `torch.distributed.init_process_group("cpu:meshmend")` then makes a default group of one
process per live chip, each of which says where its chip is (`MeshOptions`, or the environment). Groups that are made
of it later (`new_group`, a `DeviceMesh`) know that already.

All-reduce, reduce-scatter, all-gather and broadcast run plans. Everything else is Gloo's, over the same connections:
barriers, sends and receives, all-to-all, gather, scatter, reduce. So is every collective of a group whose members form
no mesh, with a warning, and of a group of one. Tensors of an accelerator are staged in host memory (`staging`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from meshmend.cost import Hardware
from meshmend.errors import CollectiveError, Coordinate, ParameterError, PayloadError, name_chip
from meshmend.launch.cables import CableWatch, address_of
from meshmend.topology import Mesh, cut_into_tiles
from meshmend.torch.lost import Reports
from meshmend.torch.membership import MemberInfo, introduce, neighbours, survivors, with_rates
from meshmend.torch.mesh_group import MeshGroup
from meshmend.torch.options import MeshOptions
from meshmend.torch.payload import check_tensor, device_of, kind_of
from meshmend.torch.plans import Plans
from meshmend.torch.private import GlooBased, fail_future, gloo_group, name_group
from meshmend.torch.rendezvous import fresh_store
from meshmend.torch.subgroups import mesh_of
from meshmend.torch.work import MeshWork

NAME = "meshmend"


class MeshBackend(GlooBased):
    """A process group whose members are chips of a mesh. Made by torch, for the backend "meshmend".

    `mesh` is what its members form: that of the live chips for the default group, a part of it for others, None where
    they form none. Collectives have the names and arguments of torch's process groups.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: MeshOptions,
        parent: MeshBackend | None = None,
    ) -> None:
        self.options = options
        self.whole: Mesh
        self.chip: Coordinate
        self.whole, self.chip = options.position(rank, size) if parent is None else (parent.whole, parent.chip)
        self._plans: Plans = options.plans() if parent is None else parent._plans
        interface = options.socket_interface()
        own = MemberInfo.of(self.chip, self.whole, self._plans, address=address_of(interface))
        store = fresh_store(store, rank, size, timeout)
        members = introduce(store, rank, size, own, timeout)
        self.chips = [member.chip for member in members]
        gloo = gloo_group(store, rank, size, connect_timeout=timeout, timeout=timeout, interface=interface)
        super().__init__(gloo, store)
        self.live: Mesh = survivors(self.whole, members) if parent is None else parent.live
        mesh = mesh_of(self.chips, self.live)
        self._watch: CableWatch = CableWatch(self.chip) if parent is None else parent._watch
        if parent is None:
            self._watch.begin(own.address, neighbours(self.live, own, members))
        self._reports: Reports = Reports(store, self.chip, self.chips[0]) if parent is None else parent._reports
        self._timeout, self._n_splits, self._n_measured = timeout, 0, 0
        self._mesh, self._is_default = mesh, parent is None
        self.mesh_group: MeshGroup | None = None
        """The group that runs plans; None where the members form no mesh."""
        if mesh is not None and size > 1:
            self.mesh_group = MeshGroup(
                mesh,
                self.chips,
                gloo,
                self._plans,
                timeout,
                self._reports,
                self._watch,
                lambda rates: mesh_of(self.chips, with_rates(self.live, rates)),
            )
        elif size > 1 and rank == 0:
            _warn_once(
                f"The {size} members of this process group form no mesh (chips "
                f"{', '.join(map(name_chip, self.chips[:8]))}{' …' * (size > 8)}): its collectives are Gloo's. Groups "
                "that are rectangles of the mesh, or corresponding chips of its tiles, run plans."
            )

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the members form, with what is known of its cables by now; None where they form none."""
        return self._mesh if self.mesh_group is None else self.mesh_group.mesh

    @property
    def hardware(self) -> Hardware:
        """The hardware that plans are made for."""
        return self._plans.hardware

    @property
    def error(self) -> Exception | None:
        """The error that broke this group, if any; a `LostChipError` where a chip was lost."""
        return None if self.mesh_group is None else self.mesh_group.error

    def plan_for(self, hardware: Hardware) -> None:
        """Plan for other hardware from now on, in this group and all that share its plans; all members call this."""
        self._plans.hardware = hardware

    def count_measurement(self) -> int:
        """Return the number of a measurement of this group, the same on all members."""
        self._n_measured += 1
        return self._n_measured

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name of this kind of group in torch."""
        return NAME

    def _start(self, group: MeshGroup, results: list[torch.Tensor], job: Callable[[], None]) -> dist.Work:
        def run() -> list[torch.Tensor]:
            job()
            return results

        return MeshWork(group.start(run, device_of(results)), self.chip)

    def _gloo(self, name: str, *arguments: Any) -> dist.Work:
        """Call a collective of Gloo: with tensors of a device, on copies. The first argument holds the results."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def on_host(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [on_host(one) for one in value]
            if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
                return value
            copies.append((value, value.detach().cpu()))
            return copies[-1][1]

        first = on_host(arguments[0])
        results = [] if name == "send" else list(copies)
        work: dist.Work = getattr(self.gloo, name)(first, *map(on_host, arguments[1:]))
        if not copies:
            return work
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[copies[0][0].device])

        def finish() -> None:
            try:
                work.wait()
                with torch.no_grad():
                    for result, copy in results:
                        result.detach().copy_(copy)
            except Exception as error:
                fail_future(future, error)
            else:
                future.set_result([result for result, _ in results])

        threading.Thread(target=finish, daemon=True).start()
        return MeshWork(future, self.chip)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]  # as torch calls it
        """Reduce a tensor in place over all members; every member ends with the same bits."""
        tensors = _listed(tensors)
        opts = _options(opts, dist.AllreduceOptions)
        if self.mesh_group is None or len(tensors) != 1 or not _dense(tensors):
            return self._gloo("allreduce", tensors, opts)
        return self._reduce(self.mesh_group, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce tensors in place, as one payload."""
        opts = _options(opts, dist.AllreduceCoalescedOptions)
        if self.mesh_group is None or not _dense(tensors):
            return self._gloo("allreduce_coalesced", tensors, opts)
        return self._reduce(self.mesh_group, list(tensors), opts)

    def _reduce(self, group: MeshGroup, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        kind = _checked(tensors, opts.reduceOp)
        own = [tensor.detach() for tensor in tensors]
        return self._start(group, tensors, lambda: group.all_reduce(own, kind, _timeout(opts)))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Give every member the root's tensor."""
        tensors, group = _listed(tensors), self.mesh_group
        if isinstance(opts, int):
            opts, root = dist.BroadcastOptions(), opts
            opts.rootRank = root
            if timeout is not None:
                opts.timeout = timeout
        opts = _options(opts, dist.BroadcastOptions)
        if group is None or not _dense(tensors):
            return self._gloo("broadcast", tensors, opts)
        root = opts.rootRank
        if not 0 <= root < self.size():
            raise CollectiveError(f"The root of a broadcast is a rank from 0 to {self.size() - 1}: got {root}.")
        _checked(tensors)
        own = [tensor.detach() for tensor in tensors]
        return self._start(group, tensors, lambda: group.broadcast(own, root, _timeout(opts)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Give every member everybody's tensor, each in its own output."""
        opts = _options(opts, dist.distributed_c10d.AllgatherOptions)
        group = self.mesh_group
        if group is None or len(inputs) != 1 or len(outputs) != 1:
            return self._gloo("allgather", outputs, inputs, opts)
        shard, filled = inputs[0], list(outputs[0])
        if len(filled) != self.size():
            raise CollectiveError(f"An all-gather fills one tensor per member, {self.size()}: got {len(filled)}.")
        for output in filled:
            _expect(output, shard.dtype, shard.shape)
        _checked([*filled, shard])
        return self._start(group, filled, lambda: group.gather_lists(filled, shard, _timeout(opts)))

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        """Fill one tensor with everybody's shard, in order of rank."""
        return self.all_gather_single_coalesced([output], [shard], opts)

    def all_gather_single_coalesced(self, outputs: Any, shards: Any, opts: Any = None) -> dist.Work:
        """Fill each output with everybody's shard, as one payload."""
        opts = _options(opts, dist.distributed_c10d.AllgatherOptions)
        group, outputs, shards = self.mesh_group, list(outputs), list(shards)
        if group is None or len({tensor.dtype for tensor in shards}) != 1:
            return self._gloo("all_gather_single_coalesced", outputs, shards, opts)
        for output, shard in zip(outputs, shards, strict=True):
            _expect_shards(output, shard, self.size(), "output")
        _checked([*outputs, *shards])
        return self._start(group, outputs, lambda: group.all_gather(outputs, shards, _timeout(opts)))

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # other names

    def reduce_scatter(  # type: ignore[override]  # as torch calls it
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Fill the output with the sum of everybody's input for this rank."""
        opts = _options(opts, dist.ReduceScatterOptions)
        group = self.mesh_group
        if group is None or len(outputs) != 1 or len(inputs) != 1:
            return self._gloo("reduce_scatter", outputs, inputs, opts)
        output, parts = outputs[0], list(inputs[0])
        if len(parts) != self.size():
            raise CollectiveError(f"A reduce-scatter has one tensor per member, {self.size()}: got {len(parts)}.")
        if len({part.numel() for part in parts}) != 1:
            return self._gloo("reduce_scatter", outputs, inputs, opts)
        for part in parts:
            _expect(part, output.dtype, output.shape)
        kind = _checked([output, *parts], opts.reduceOp)
        return self._start(group, [output], lambda: group.reduce_scatter([output], [parts], kind, _timeout(opts)))

    def reduce_scatter_single(self, output: torch.Tensor, shards: torch.Tensor, opts: Any = None) -> dist.Work:
        """Fill the output with the sum of everybody's shard of this rank."""
        return self.reduce_scatter_single_coalesced([output], [shards], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Fill each output with the sum of everybody's shard of this rank, as one payload."""
        opts = _options(opts, dist.ReduceScatterOptions)
        group, outputs, inputs = self.mesh_group, list(outputs), list(inputs)
        if group is None or len({tensor.dtype for tensor in outputs}) != 1:
            return self._gloo("reduce_scatter_single_coalesced", outputs, inputs, opts)
        for output, payload in zip(outputs, inputs, strict=True):
            _expect_shards(payload, output, self.size(), "input")
        kind, payloads = _checked([*outputs, *inputs], opts.reduceOp), [[payload] for payload in inputs]
        return self._start(group, outputs, lambda: group.reduce_scatter(outputs, payloads, kind, _timeout(opts)))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # other names

    def barrier(  # type: ignore[override]  # as torch calls it
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Wait for all members' processes: not for their devices."""
        opts = opts or dist.BarrierOptions()
        opts.device = torch.device("cpu")
        if timeout is not None:
            opts.timeout = timeout
        return self.gloo.barrier(opts)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002  # a part of a mesh has no options of its own
        group_name: str | None = None,
        group_desc: str | None = None,  # noqa: ARG002  # a name is enough
        device_types: list[torch.device] | None = None,  # noqa: ARG002  # there is one
    ) -> dist.ProcessGroup | None:
        """Return the group of these ranks of this one, None on members that are not in it. All members call this."""
        self._n_splits += 1
        name = group_name or f"{self.group_name}:split:{self._n_splits}"
        if self.rank() not in new_ranks:
            return None
        store = dist.PrefixStore(f"{name}/", self.get_group_store())
        part = MeshBackend(
            store, new_ranks.index(self.rank()), len(new_ranks), timeout or self._timeout, self.options, self
        )
        name_group(part, name)
        return part

    def abort(self) -> None:
        """Close all connections: whatever waits, here and on other members, ends with an error."""
        self._end_watch()
        if self.mesh_group is not None:
            self.mesh_group.close(abort=True)

    def shutdown(self) -> None:
        """Take no more calls of collectives that run plans. The connections end with the group."""
        self._end_watch()
        if self.mesh_group is not None:
            self.mesh_group.close(abort=False)

    def _end_watch(self) -> None:
        if self._is_default:
            self._watch.end()


def _of_gloo(name: str) -> Callable[..., dist.Work]:
    def collective(self: MeshBackend, *arguments: Any) -> dist.Work:
        return self._gloo(name, *arguments)

    return collective


for _name in (
    *("all_to_all_single", "alltoall", "alltoall_base"),
    *("gather", "recv", "recv_anysource", "reduce", "scatter", "send"),
):
    setattr(MeshBackend, _name, _of_gloo(_name))


def tile_ranks(side: Sequence[int] | str) -> list[list[int]]:
    """Return the ranks of the default group by tile: one row per tile of `side` chips, its chips in row-major order.

    That is a `DeviceMesh` for models that are sharded inside tiles and replicated across them:
    `DeviceMesh("cpu", tile_ranks("2x2"), mesh_dim_names=("replicate", "shard"))`. Tiles are placed so that as many as
    possible are whole; live chips that belong to none are in no row.
    """
    world = dist.group.WORLD
    if not isinstance(world, MeshBackend) or world.mesh is None:
        raise ParameterError(
            'tile_ranks needs a default group of the meshmend backend: call init_process_group("cpu:meshmend") first.'
        )
    rank_of = {chip: rank for rank, chip in enumerate(world.chips)}
    tiling = cut_into_tiles(world.mesh, side)
    return [[rank_of[world.mesh.chip(rank)] for rank in tile] for tile in tiling.ranks.tolist()]


def make_group(asked: Any, options: MeshOptions | None) -> MeshBackend:
    """Make a group for torch; `asked` is what it tells a backend with an extended API."""
    if options is not None and not isinstance(options, MeshOptions):
        raise ParameterError(f"pg_options of the meshmend backend are MeshOptions, got {type(options).__name__}.")
    world = dist.group.WORLD
    parent = world if isinstance(world, MeshBackend) and options in (None, world.options) else None
    own = options or (MeshOptions() if parent is None else parent.options)
    return MeshBackend(asked.store, asked.group_rank, asked.group_size, asked.timeout, own, parent)


def register() -> None:
    """Make "meshmend" a backend of torch.distributed; once is enough."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)


def _listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(given: Any, kind: Callable[[], Any]) -> Any:
    """Return the options of a collective. torch's process groups also take an operation in their place."""
    if given is not None and hasattr(given, "timeout"):
        return given
    made = kind()
    if given is not None:
        made.reduceOp = given
    return made


def _timeout(opts: Any) -> timedelta | None:
    """Return the timeout of a call, None if it has none of its own."""
    return opts.timeout if opts.timeout > timedelta(0) else None


def _dense(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.layout is torch.strided for tensor in tensors)


def _checked(tensors: Sequence[torch.Tensor], op: Any = None) -> Any:
    """Return the kind of a reduction, or raise for an operation or tensors that cannot be served."""
    try:
        kind = None if op is None else kind_of(op)
        for tensor in tensors:
            check_tensor(tensor.detach(), kind)
        device_of(tensors)
    except (ParameterError, PayloadError) as error:
        raise CollectiveError(str(error)) from error
    return kind


def _expect(tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise CollectiveError(
            f"Expected tensors of {dtype} {list(shape)} for every member, got one of {tensor.dtype} "
            f"{list(tensor.shape)}."
        )


def _expect_shards(whole: torch.Tensor, shard: torch.Tensor, n_members: int, role: str) -> None:
    if whole.dtype != shard.dtype or whole.numel() != n_members * shard.numel():
        raise CollectiveError(
            f"Expected an {role} of {shard.dtype} with {n_members} × {shard.numel()} elements, one shard per member, "
            f"got {whole.dtype} {list(whole.shape)}."
        )


register()
