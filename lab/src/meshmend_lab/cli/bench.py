"""`meshmend lab bench`: all-reduce times on real links, and survival of killed hosts; on JAX devices: `timing`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.common import print_facts, print_json
from meshmend.cli.options import FailOption, JsonOption
from meshmend.cli.root import Command, CommandGroup
from meshmend.cli.terminal import approved, print_rows, terminal
from meshmend.cost.units import format_bytes, parse_bytes
from meshmend.errors import ParameterError
from meshmend.topology import Mesh
from meshmend_lab.cli.options import LinkDelayOption, LinkRateOption
from meshmend_lab.extras import require
from meshmend_lab.mesh import Lab

if TYPE_CHECKING:
    from meshmend_lab.bench.allreduce import Result

LabOption = Annotated[
    str | None, typer.Option("--lab", metavar="SHAPE", help="Create a lab of this shape for the run. Needs root.")
]
LoopbackOption = Annotated[
    str | None, typer.Option("--loopback", metavar="SHAPE", help="No lab: processes on this host's loopback.")
]
RepeatOption = Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Runs per case; the best counts.")]

app = typer.Typer(
    cls=CommandGroup,
    help="Campaigns: all-reduces over real links and on JAX's devices, and jobs whose hosts are killed.",
    no_args_is_help=True,
)


@app.command("allreduce", cls=Command)
def allreduce(
    lab_shape: LabOption = None,
    loopback: LoopbackOption = None,
    fail: FailOption = None,
    rate: LinkRateOption = "40mbit",
    delay: LinkDelayOption = None,
    payload: Annotated[
        list[str] | None,
        typer.Option("--payload", metavar="BYTES", help="As in 32MB. Repeatable.", show_default="32MB"),
    ] = None,
    planner: Annotated[
        list[str] | None, typer.Option("--planner", metavar="NAME", help="Only these. Repeatable.", show_default="all")
    ] = None,
    repeat: RepeatOption = 3,
    json: JsonOption = False,
) -> None:
    """Time Gloo's own all-reduce and every plan, on the same links in the same run.

    With --fail the whole mesh is timed first; then the hole is cut out of the lab, routes go round it, and the
    survivors are timed too. "auto" is what process groups run by default; "× best" compares medians with that of the
    fastest planner.

    Example: meshmend lab bench allreduce --lab 4x4 --fail 2x2@0,0 --payload 32MB
    """
    if delay is not None and not lab_shape:
        raise ParameterError("--delay is of a lab's links: say --lab 4x4, or leave it out.")
    shape = _shape(lab_shape, loopback)
    sizes = [round(parse_bytes(text)) for text in payload or ["32MB"]]
    _require("torch")
    meshes = _meshes(shape, fail)
    from meshmend_lab.bench.allreduce import measure

    results = _on_links(
        meshes,
        sizes,
        rate if lab_shape else None,
        delay,
        partial(measure, planners=planner, repeat=repeat),
    )
    if json:
        links = {"rate": rate if lab_shape else None, "delay": delay}
        print_json({**links, "results": [result.facts() for result in results]})
    else:
        _show_times(results)


@app.command("restart", cls=Command)
def restart(
    failures: Annotated[int, typer.Option("--failures", metavar="N", min=1, help="How many times to kill hosts.")] = 20,
    unaided: Annotated[
        int,
        typer.Option(
            "--unaided", metavar="N", min=0, help="This many more from disk only, without caches, to compare."
        ),
    ] = 0,
    host: Annotated[str, typer.Option("--host", metavar="HxW", help="Chips per host.")] = "4x2",
    shard: Annotated[
        str,
        typer.Option("--shard", metavar="WHAT", help="update (the optimizer's state) or fsdp (also the parameters)."),
    ] = "update",
    store: Annotated[
        bool, typer.Option("--store", help="Also kill the store: every third time alone, every third with a host.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Random seed: which hosts, and when.")] = 0,
    json: JsonOption = False,
) -> None:
    """Kill hosts of a JAX job at random moments; time each recovery by stage and check the results.

    Four hosts, two by two; some die while the others recover, and with --store the store dies as well. No step may be
    missing, each sample must be used once per epoch, no committed step may be lost, and the loss must be that of an
    undisturbed run. Needs the extra named restart.

    Example: meshmend lab bench restart --failures 20 --unaided 4
    """
    _require("jax", "orbax", extra="restart")
    from meshmend_lab.bench.restart import Failure, campaign

    def show(failure: Failure) -> None:
        if not json:
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in failure.stages_s.items())
            who = "host " + " then ".join(map(str, failure.hosts)) + " and the store" * failure.of_store
            what = f"resumed from {failure.source} after {failure.total_s:.1f} s ({stages})"
            if not failure.hosts:
                who, what = "the store", f"all hosts went on, a step later after {failure.total_s:.1f} s"
            typer.echo(f"killed {who}: {what}")

    aided = campaign(failures, host=host, shard=shard, seed=seed, store=store, on_failure=show).facts()
    plain = (
        campaign(unaided, host=host, shard=shard, seed=seed, aided=False, second=False, on_failure=show).facts()
        if unaided
        else None
    )
    if json:
        print_json({"restart": aided, "unaided": plain})
    else:
        _show_restarts(aided, plain)


def _require(*modules: str, extra: str = "torch") -> None:
    require(*modules, needed_for="This measurement", extra=extra)
    # Read when torch is imported: without it, torch warns about every namespace without a name server.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _shape(lab_shape: str | None, loopback: str | None) -> str:
    """Return the shape to measure on: that of the lab, or that of the processes over loopback."""
    shape = lab_shape or loopback
    if shape is None or (lab_shape and loopback):
        raise ParameterError("Say where: --lab 4x4 for rate-limited links, or --loopback 2x4 for none.")
    return shape


def _meshes(shape: str, fail: list[str] | None) -> list[Mesh]:
    """Return the whole mesh and, with holes, the survivors."""
    whole = Mesh(shape)
    return [whole] + ([whole.fail(*fail)] if fail else [])


def _on_links(
    meshes: list[Mesh], sizes: list[int], rate: str | None, delay: str | None, measure: Callable[..., list[Result]]
) -> list[Result]:
    """Measure every mesh and payload, over loopback or in a lab that is made for it."""
    results = []
    status = terminal(stderr=True).status
    if rate is None:
        for mesh in meshes:
            for size in sizes:
                with status(f"{mesh}, {format_bytes(size)} over loopback"):
                    results += measure(mesh, size)
        return results
    links = f"links of {rate}" + (f" and {delay}" if delay else "")
    with Lab.temporary(meshes[0], rate=rate, delay=delay) as lab:
        for mesh in meshes:
            left = lab if mesh == lab.mesh else lab.kill(*mesh.holes)
            for size in sizes:
                with status(f"{mesh}, {format_bytes(size)} over {links}"):
                    results += measure(mesh, size, lab=left)
    return results


def _show_times(results: list[Result]) -> None:
    def number(value: float | None, form: str = ".2f") -> str | None:
        return None if value is None else f"{value:{form}}"

    columns: list[tuple[str, Callable[[Result], object]]] = [
        ("mesh", lambda row: row.mesh),
        ("payload", lambda row: format_bytes(row.payload_bytes)),
        ("case", lambda row: row.case),
        ("seconds", lambda row: number(row.seconds, ".4g")),
        ("M/b", lambda row: number(row.units, ".3f")),
        ("× bound", lambda row: number(row.to_bound)),
        ("× Gloo", lambda row: number(row.to_gloo)),
        ("median", lambda row: number(row.median_s, ".4g")),
        ("× best", lambda row: number(row.to_best)),
    ]

    print_rows(results, columns, title="all-reduce, best run", names=3)


def _show_restarts(aided: dict[str, Any], plain: dict[str, Any] | None) -> None:
    def figure(of: dict[str, Any], which: str) -> Callable[[str], object]:
        return lambda stage: f"{of[stage][which]:.1f}"

    columns: list[tuple[str, Callable[[str], object]]] = [("stage", str)]
    for name, facts in (("memory and caches", aided), ("disk only, no caches", plain)):
        if facts is not None:
            figures = facts["stages_s"] | {"total": facts["recovery_s"]}
            columns += [(f"{name}: median", figure(figures, "median")), ("worst", figure(figures, "worst"))]
    print_rows((*aided["stages_s"], "total"), columns, title="from SIGKILL to the next committed step, seconds")
    print_facts(
        "promises",
        {
            "failures": f"{aided['failures']} in {aided['runs']} runs: {aided['of_host_0']} of host 0, "
            f"{aided['during_recovery']} with a second host during recovery, {aided['of_store']} of the store, of "
            f"which {aided['of_store_and_host']} with a host",
            "resumed from": ", ".join(f"{source} {count}" for source, count in aided["sources"].items()),
            "steps": approved(f"{aided['steps']}, none missing, {aided['lost_steps']} committed ones repeated"),
            "samples": approved("each exactly once per epoch"),
            "loss": approved(f"within {aided['loss_difference']:.1e} of undisturbed runs"),
        },
    )
