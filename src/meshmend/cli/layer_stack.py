"""`meshmend compile --workload transformer`: a train step of equal layers, what of it is sharded, and what hides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.common import mesh_facts, print_facts, print_json
from meshmend.cli.options import TuningOptions, completing
from meshmend.cli.terminal import working
from meshmend.cost.units import name_bytes, name_seconds
from meshmend.errors import ParameterError
from meshmend.planning import Auto, plan
from meshmend.schedule import Collective
from meshmend.topology import Mesh

if TYPE_CHECKING:
    from meshmend.jax.compiling.hidden import Overlap
    from meshmend.jax.compiling.layer_stack import StackPlans
    from meshmend.jax.fabric import Fabric

TRANSFORMER = "transformer"
SHARDS = ("none", "update", "fsdp")
CHUNKS_IN_A_LAYER = 16
"""Of an all-reduce that is written out inside a layer: few steps."""


@dataclass(frozen=True)
class StackOptions:
    """The sizes of the transformer, and what of it is sharded."""

    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="WHAT",
            help="transformer: shard none, update (the optimizer's state) or fsdp (weights, gradients and state).",
            autocompletion=completing(*SHARDS),
            show_default="none",
        ),
    ] = None
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", min=1, help="transformer: layers.")] = None
    width: Annotated[
        int | None, typer.Option("--width", metavar="N", min=64, help="transformer: a layer's width, a multiple of 64.")
    ] = None
    sequence: Annotated[
        int | None, typer.Option("--sequence", metavar="N", min=1, help="transformer: tokens per example.")
    ] = None
    unhidden: Annotated[
        bool | None,
        typer.Option(
            "--unhidden",
            help="transformer: communicate when a layer is needed, not one ahead and one behind; less memory.",
        ),
    ] = None
    in_turn: Annotated[
        bool | None,
        typer.Option("--in-turn", help="transformer: scatter one layer, then gather the next; less memory."),
    ] = None

    def check_unused(self, workload: str | None) -> None:
        """Refuse options that only the transformer has."""
        given = [
            f"--{one.name.replace('_', '-')}" for one in dataclasses.fields(self) if getattr(self, one.name) is not None
        ]
        if given:
            what = "the all-reduce alone" if workload is None else workload
            raise ParameterError(f"{given[0]} is for --workload {TRANSFORMER}, and this compiles {what}.")


def compile_transformer(
    topology: str,
    fabric: Fabric,
    options: StackOptions,
    planner: str,
    tuning: TuningOptions,
    *,
    failed: Sequence[str],
    wrap: bool | Sequence[bool] | None,
    cores: int | None,
    batch: int,
    dtype: str,
    json: bool,
) -> None:
    """Plan, compile in another process, and print memory, collectives, and how much computing lies beside them."""
    from meshmend.jax.compiling.apart import StackJob, compile_stack_apart
    from meshmend.jax.compiling.layer_stack import Shard, Transformer

    if options.shard is not None and options.shard not in SHARDS:
        raise ParameterError(f"--shard is {options.shard!r}, expected one of: {', '.join(SHARDS)}.")
    shard = Shard(options.shard or Shard.NONE)
    hide = not options.unhidden
    sizes = {name: getattr(options, name) for name in ("layers", "width", "sequence")}
    stated = {name: size for name, size in sizes.items() if size is not None}
    model = Transformer(**stated, batch=batch, dtype=dtype, wide_sums=dtype != "float32")
    with working(f"planning and proving {fabric.mesh}", json):
        plans = plan_stack(fabric.mesh, shard, hide, planner, tuning)
    in_turn = bool(options.in_turn)
    job = StackJob(topology, model, shard, hide, in_turn, failed=failed, wrap=wrap, cores=cores)
    with working("compiling the transformer's step: this may take minutes", json):
        report = compile_stack_apart(job, plans)
    half = plans.scatter or plans.whole
    facts: dict[str, Any] = {
        **mesh_facts(fabric.mesh),
        "planner": half.planner,
        "steps": half.n_steps,
        "chunks": half.total_chunks,
        "workload": TRANSFORMER,
        "shard": str(shard),
        "hide": hide,
        "in_turn": in_turn,
        "batch_per_device": batch,
        **dataclasses.asdict(model),
        "parameters": model.n_params,
        **dataclasses.asdict(report),
    }
    for body, overlap in zip(facts["bodies"], report.bodies, strict=True):
        body |= {"place": overlap.place, "share": overlap.share}
    if json:
        print_json(facts)
        return
    cores_of = f"{report.cores_per_chip} core{'s' * (report.cores_per_chip > 1)}"
    print_facts(
        f"transformer step, shard {shard}, on {topology}, {fabric.mesh}",
        {
            "chips": f"{report.chips:,} × {cores_of} ({report.device_kind})",
            "model": f"{model.layers} layers of width {model.width}, {model.n_params:,} parameters of {dtype}",
            "program": f"{half.planner}: {half.n_steps} steps, {half.total_chunks} chunks",
            "memory per device": f"{name_bytes(report.peak_bytes)} at the peak; {name_bytes(report.argument_bytes)} "
            f"arguments, {name_bytes(report.temporary_bytes)} temporaries, {name_bytes(report.aliased_bytes)} in place",
            "collectives": f"{report.permutes} permutes, {report.in_flight} in flight at once",
            **_bodies(report.bodies, hide),
            "compiled in": f"{name_seconds(report.compile_seconds)}, lowered in {name_seconds(report.lower_seconds)}",
        },
    )


def _bodies(bodies: Sequence[Overlap], hide: bool) -> dict[str, str]:
    """Describe what of each layer's communication hides in either direction.

    Unhidden, the steps of a plan are loops of their own, in which a chip computes no more than sums.
    """
    if not hide:
        return {"hidden": "nothing: each layer waits for its permutes"}
    names = {"backward": "backward, per layer", "forward": "forward, per layer", "outside": "outside the layers"}
    found: dict[str, str] = {}
    for place, name in names.items():
        ours = [body for body in bodies if body.place == place]
        if ours:
            found[name] = (
                f"{ours[0].covered} of {ours[0].permutes} permutes have computing beside them; "
                f"{ours[0].share:.0%} of the computing lies beside permutes"
            )
    return found


def plan_stack(mesh: Mesh, shard: str, hide: bool, planner: str, tuning: TuningOptions) -> StackPlans:
    """Return the schedules of a step; by default few steps, as they are written out in the body of a layer."""
    from meshmend.jax.compiling.layer_stack import StackPlans

    is_auto = planner == Auto.name
    if shard == "none":
        if is_auto and hide and tuning.chunks is None:
            return StackPlans(plan(mesh, "weave", chunks=CHUNKS_IN_A_LAYER))
        return StackPlans(plan(mesh, tuning.planner(planner)))
    chunks = tuning.chunks or mesh.n_chips
    if not is_auto and planner != "gather":
        return StackPlans(plan(mesh, tuning.planner(planner).with_even_owners()))
    scatter, gather = (
        plan(mesh, "gather", chunks=chunks, collective=what)
        for what in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    )
    return StackPlans(plan(mesh, "weave", chunks=1), scatter, gather)
