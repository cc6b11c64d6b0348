"""`meshmend prepare`: plan for the loss of every single host before it happens."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from meshmend.cli.common import exit_on_error, mesh_facts, print_facts, print_json
from meshmend.cli.options import (
    AutoOptions,
    HoleOptions,
    JsonOption,
    NeighboursOption,
    PlannerOption,
    ShapeArgument,
    TuningOptions,
)
from meshmend.cli.outputs import check_folder
from meshmend.cli.terminal import plain, working
from meshmend.cost.units import name_seconds
from meshmend.errors import CacheWarning, LoweringError, MeshError, PlanError
from meshmend.planning import Auto, PlanCache, plan
from meshmend.planning.cache import PREPARED_BUDGET_S
from meshmend.topology import Mesh, Region, all_placements, name_shape, parse_shape


def command(
    shape: ShapeArgument,
    host: Annotated[str, typer.Option("--host", metavar="HxW", help="Chips per host, as in 4x2; hosts tile the mesh.")],
    *,
    planner: PlannerOption = Auto.name,
    holes: HoleOptions,
    tuning: TuningOptions,
    auto: AutoOptions,
    neighbours_only: NeighboursOption = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Folder for plans; default: ~/.cache/meshmend.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Plan ahead for the loss of every single host, in addition to what has already failed.

    A job that loses a host then finds its plan in the cache.

    Example: meshmend prepare 16x32 --host 4x2
    """
    with exit_on_error(json):
        mesh = holes.mesh(shape)
        hosts = _hosts(mesh, host)
        store = PlanCache(cache)
        check_folder("--cache", store.folder, make=True)
        unhurried = dataclasses.replace(tuning, budget=PREPARED_BUDGET_S if tuning.budget is None else tuning.budget)
        chosen = unhurried.planner(planner, auto.payload, auto.hardware)
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
                        plan(survivors, chosen, cache=store, neighbours_only=neighbours_only)
                    if store.path(survivors, chosen, neighbours_only=neighbours_only).is_file():
                        ready += 1
                    else:
                        refused[str(lost or "nothing")] = " ".join(str(word.message) for word in warned)
                except (LoweringError, MeshError, PlanError) as error:
                    refused[str(lost or "nothing")] = error.why if isinstance(error, PlanError) else str(error)
                tell(advance=1)
        seconds = time.perf_counter() - started
        facts = {
            **mesh_facts(mesh),
            "host": host,
            "planner": chosen.name,
            "plans": ready,
            "refused": refused,
            "cache": str(store.folder),
            "seconds": seconds,
        }
        if json:
            print_json(facts)
        else:
            shown = [f"{lost}: {why}" for lost, why in refused.items()]
            print_facts(
                f"plans for {mesh} and for the loss of each of its {len(hosts)} hosts",
                {
                    "ready": Text.assemble((f"{ready}", "green"), f" of {len(hosts) + 1}"),
                    "no plan": "\n".join(shown) or "none",
                    "kept in": plain(store.folder),
                    "took": name_seconds(seconds),
                },
            )


def _hosts(mesh: Mesh, host: str) -> list[Region]:
    """Return the hosts that still have a live chip."""
    host_shape = parse_shape(host)
    if len(host_shape) != mesh.n_axes or any(h < 1 or n % h for n, h in zip(mesh.shape, host_shape, strict=False)):
        raise MeshError(f"Hosts of {host} chips do not tile a {name_shape(mesh.shape)} mesh.")
    places = all_placements(mesh.shape, host_shape, align=host_shape)
    return [place for place in places if mesh.live[place.slices].any()]
