"""`meshmend prepare`: plan for the loss of every single host before it happens."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated

from rich.text import Text

from meshmend.buckets import as_path, own_folder
from meshmend.cli.common import check_folder, mesh_facts, print_result
from meshmend.cli.options import (
    AutoOptions,
    HoleOptions,
    JsonOption,
    NeighboursOption,
    PlannerOption,
    ShapeArgument,
    option,
)
from meshmend.cli.terminal import plain, working
from meshmend.cost import DEFAULT_HARDWARE, find_hardware
from meshmend.cost.units import format_bytes, name_seconds, parse_bytes
from meshmend.errors import CacheWarning, MeshError, ParameterError, PlanError
from meshmend.launch.hosts import Hosts
from meshmend.planning import Auto, PlanCache, StepDemands, Workload
from meshmend.planning.cache import PREPARED_BUDGET_S
from meshmend.planning.proven import DEFAULT_PAYLOAD_BYTES
from meshmend.schedule import Collective
from meshmend.schedule.lanes import MAX_UNROLLED

WAYS = (Collective.ALL_REDUCE.value, Collective.ALL_REDUCE_WITH_UPDATE.value, Collective.ALL_GATHER.value)
"""What a step may run: a replicated update, a fused one, sharded parameters."""


def command(
    shape: ShapeArgument,
    host: Annotated[str, option("--host", "HxW", "Chips per host, as in 4x2; hosts tile the mesh.")],
    *,
    holes: HoleOptions,
    planner: PlannerOption = Auto.name,
    neighbours_only: NeighboursOption = False,
    collective: Annotated[
        str, option("--collective", "NAME", f"The collective of a step: {', '.join(WAYS)}.")
    ] = Collective.ALL_REDUCE.value,
    auto: AutoOptions,
    tile: Annotated[str | None, option("--tile", "HxW", "Chips per tile; the payload is one chip's shard.")] = None,
    shared: Annotated[
        str | None,
        option("--shared", "DIR|URL", "A job's shared folder: what that job plans for is planned and kept there."),
    ] = None,
    cache: Annotated[Path | None, option("--cache", "DIR", "Folder for plans; default: ~/.cache/meshmend.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan ahead for the failure of every single host, in addition to what has already failed.

    A job that loses a host then finds its plans in the cache. Once it has begun to train, --shared is all that you have
    to say. Before that, give the bytes that a chip sends in a step, the collective and the tile. Sharded parameters
    (FSDP) send one layer at a time, in an all-gather and a reduce-scatter: --collective all-gather plans for both.
    Plans of a job in a bucket are kept on this machine: run it on one of the job's hosts, as the user of the job.

    Example: meshmend prepare 16x32 --host 4x2 --shared shared
    """
    mesh = holes.mesh(shape)
    hosts = [tile for tile in Hosts.of(mesh.shape, host).tiles if mesh.live[tile.slices].any()]
    store = PlanCache(own_folder(as_path(shared)) / "plans" if cache is None and shared is not None else cache)
    check_folder("--cache", store.folder, make=True)
    demands = _demands(shared, planner, auto, collective, tile)
    ready, refused = 0, {}
    started = time.perf_counter()
    with working("planning", json, total=len(hosts) + 1) as tell:
        for lost in (None, *hosts):
            tell(f"planning for the loss of {lost}" if lost else "planning the healthy mesh")
            try:
                survivors = mesh.fail(lost) if lost else mesh
                # The table reports the cache's warnings: a plan that is in the cache is ready, whatever they say.
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always", CacheWarning)
                    demands.plan(survivors, cache=store, budget_s=PREPARED_BUDGET_S, neighbours_only=neighbours_only)
                unkept = [str(word.message) for word in warned if "not kept" in str(word.message)]
                if unkept:
                    refused[str(lost or "nothing")] = " ".join(unkept)
                else:
                    ready += 1
            except (MeshError, PlanError) as error:
                refused[str(lost or "nothing")] = error.why if isinstance(error, PlanError) else str(error)
            tell(advance=1)
    seconds = time.perf_counter() - started
    facts = {
        **mesh_facts(mesh),
        "host": host,
        "planner": demands.planner,
        "payload_bytes": demands.workload.payload_bytes,
        "collective": demands.workload.collective.value,
        "tile": demands.tile,
        "hardware": demands.hardware.name,
        "plans": ready,
        "refused": refused,
        "cache": str(store.folder),
        "seconds": seconds,
    }
    print_result(
        json,
        facts,
        f"plans for {mesh} and for the loss of each of its {len(hosts)} hosts",
        {
            "planned for": _planned_for(demands),
            "ready": Text.assemble((f"{ready}", "green"), f" of {len(hosts) + 1}"),
            "no plan": "\n".join(f"{lost}: {why}" for lost, why in refused.items()) or "none",
            "kept in": plain(store.folder),
            "took": name_seconds(seconds),
        },
    )


def _demands(shared: str | None, planner: str, auto: AutoOptions, collective: str, tile: str | None) -> StepDemands:
    """Return what a job plans for: what it wrote down itself, or what the options say."""
    if shared is not None:
        said = {
            "--planner": None if planner == Auto.name else planner,
            "--payload": auto.payload,
            "--hardware": auto.hardware,
            "--tile": tile,
            "--collective": None if collective == Collective.ALL_REDUCE else collective,
        }
        for option, value in said.items():
            if value is not None:
                raise ParameterError(f"{shared} already says what its job plans for: leave out {option}.")
        return StepDemands.read(as_path(shared))
    if collective not in WAYS:
        raise ParameterError(f"A step runs no {collective}: --collective is one of {', '.join(WAYS)}.")
    payload = DEFAULT_PAYLOAD_BYTES if auto.payload is None else parse_bytes(auto.payload)
    hardware = find_hardware(auto.hardware or DEFAULT_HARDWARE)
    workload = Workload(payload, Collective(collective)).rounded()
    is_tpu = hardware.name.startswith("tpu")
    return StepDemands(workload, hardware, tile, MAX_UNROLLED if is_tpu else None, planner)


def _planned_for(demands: StepDemands) -> str:
    tiles = "" if demands.tile is None else f" between tiles of {demands.tile} chips"
    size = format_bytes(demands.workload.payload_bytes)
    return f"{demands.workload.collective.value} of {size}{tiles}, {demands.hardware.name}"
