"""`meshmend route`: the route of one packet round the holes, or statistics of a routing scheme over all pairs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from meshmend.cli.common import exit_on_error, mesh_facts, print_facts, print_json
from meshmend.cli.options import HoleOptions, JsonOption, ShapeArgument
from meshmend.cli.terminal import approved
from meshmend.errors import ParameterError, name_chip
from meshmend.routing import SCHEMES, DeadlockProof, Routes, choose, report, route
from meshmend.topology import parse_chip

SchemeOption = Annotated[
    str | None, typer.Option("--scheme", metavar="NAME", help=f"One of: {', '.join(SCHEMES)}. Default: the best.")
]
ChannelsOption = Annotated[
    int | None,
    typer.Option("--channels", metavar="N", min=1, help="Virtual channels of the network; limits the choice."),
]


def command(
    shape: ShapeArgument,
    holes: HoleOptions,
    from_: Annotated[str | None, typer.Option("--from", metavar="r,c", help="Show one route, from this chip.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="r,c", help="Show one route, to this chip.")] = None,
    scheme: SchemeOption = None,
    channels: ChannelsOption = None,
    json: JsonOption = False,
) -> None:
    """Route packets round the holes, with the proof that they cannot deadlock.

    With --from and --to it shows one route; without, it reports over all pairs.

    Example: meshmend route 8x8 --fail 2x2@2,2 --from 2,1 --to 2,4
    """
    with exit_on_error(json):
        mesh = holes.mesh(shape)
        if (from_ is None) != (to is None):
            raise ParameterError("--from and --to go together: give both for one route, neither for all pairs.")
        if scheme is not None and channels is not None:
            raise ParameterError("--channels limits the choice of a scheme; with --scheme there is nothing to choose.")
        routes, proof = choose(mesh, max_channels=channels) if scheme is None else route(mesh, scheme)
        facts = scheme_facts(routes, proof)
        if from_ is not None and to is not None:
            _tell_one(routes, proof, facts, parse_chip(from_), parse_chip(to), json)
        else:
            _tell_all(routes, proof, facts, json)


def scheme_facts(routes: Routes, proof: DeadlockProof) -> dict[str, Any]:
    """Return the JSON of the scheme, the same for one route and for all pairs."""
    return {
        **mesh_facts(routes.mesh),
        "scheme": routes.scheme,
        "virtual_channels": routes.n_channels,
        "deadlock_free": proof.deadlock_free,
        "dependencies": proof.n_dependencies,
    }


def _tell_one(
    routes: Routes,
    proof: DeadlockProof,
    facts: dict[str, Any],
    src: tuple[int, ...],
    dst: tuple[int, ...],
    as_json: bool,
) -> None:
    path = routes.path(src, dst)
    trace = routes.follow(routes.mesh.rank(src), routes.mesh.rank(dst))
    used = trace.channel.tolist()
    if as_json:
        more = {"from": list(src), "to": list(dst), "hops": len(used), "path": [list(chip) for chip in path]}
        print_json({**facts, **more, "channels": used})
        return
    print_facts(
        f"{routes.scheme} route on {routes.mesh}",
        {
            "path": " → ".join(name_chip(chip) for chip in path),
            "hops": str(len(used)),
            "channels": ", ".join(map(str, used)) or "none",
            "proof": approved(proof),
        },
    )


def _tell_all(routes: Routes, proof: DeadlockProof, facts: dict[str, Any], as_json: bool) -> None:
    found = report(routes)
    if as_json:
        print_json({**facts, **asdict(found)})
        return
    pairs = Text(f"{found.pairs:,}")
    if found.pairs_without_route:
        pairs = pairs.append(", ").append(f"{found.pairs_without_route:,} without a route", style="red")
    busiest = "none"
    if found.busiest_link is not None:
        link = "→".join(name_chip(end) for end in found.busiest_link)
        busiest = f"{link} carries {found.busiest_link_flows:,} flows when every chip sends to every other"
    print_facts(
        f"{routes.scheme} routes on {routes.mesh}",
        {
            "pairs": pairs,
            "mean route": f"{found.mean_hops:.3f} hops, {found.mean_detour:.4f} times the shortest live path",
            "longest route": f"{found.longest_hops} hops",
            "longest detour": f"{found.longest_detour_hops} hops over the shortest live path",
            "busiest link": busiest,
            "virtual channels": str(routes.n_channels),
            "proof": approved(proof),
        },
    )
