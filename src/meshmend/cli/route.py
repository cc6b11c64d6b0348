"""`meshmend route`: the route of one packet round the holes, or statistics of a routing scheme over all pairs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from meshmend.cli.common import mesh_facts, print_result
from meshmend.cli.options import HoleOptions, JsonOption, ShapeArgument
from meshmend.cli.terminal import approved
from meshmend.errors import ParameterError, name_chip
from meshmend.routing import SCHEMES, Routes, choose, report, route
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
    mesh = holes.mesh(shape)
    if (from_ is None) != (to is None):
        raise ParameterError("--from and --to go together: give both for one route, neither for all pairs.")
    if scheme is not None and channels is not None:
        raise ParameterError("--channels limits the choice of a scheme; with --scheme there is nothing to choose.")
    routes, proof = choose(mesh, max_channels=channels) if scheme is None else route(mesh, scheme)
    if from_ is not None and to is not None:
        what, (found, shown) = "route", _one(routes, parse_chip(from_), parse_chip(to))
    else:
        what, (found, shown) = "routes", _all(routes)
    facts = {
        **mesh_facts(mesh),
        "scheme": routes.scheme,
        "virtual_channels": routes.n_channels,
        "deadlock_free": proof.deadlock_free,
        "dependencies": proof.n_dependencies,
    }
    print_result(json, facts | found, f"{routes.scheme} {what} on {mesh}", shown | {"proof": approved(proof)})


Rows = dict[str, str | Text]


def _one(routes: Routes, src: tuple[int, ...], dst: tuple[int, ...]) -> tuple[dict[str, Any], Rows]:
    """Return one route, for programs and for people."""
    path = routes.path(src, dst)
    used = routes.follow(routes.mesh.rank(src), routes.mesh.rank(dst)).channel.tolist()
    facts = {"from": list(src), "to": list(dst), "hops": len(used), "path": [list(chip) for chip in path]}
    return facts | {"channels": used}, {
        "path": " → ".join(name_chip(chip) for chip in path),
        "hops": str(len(used)),
        "channels": ", ".join(map(str, used)) or "none",
    }


def _all(routes: Routes) -> tuple[dict[str, Any], Rows]:
    """Return a report over all pairs, for programs and for people."""
    found = report(routes)
    pairs = Text(f"{found.pairs:,}")
    if found.pairs_without_route:
        pairs = pairs.append(", ").append(f"{found.pairs_without_route:,} without a route", style="red")
    busiest = "none"
    if found.busiest_link is not None:
        link = "→".join(name_chip(end) for end in found.busiest_link)
        busiest = f"{link} carries {found.busiest_link_flows:,} flows when every chip sends to every other"
    return asdict(found), {
        "pairs": pairs,
        "mean route": f"{found.mean_hops:.3f} hops, {found.mean_detour:.4f} times the shortest live path",
        "longest route": f"{found.longest_hops} hops",
        "longest detour": f"{found.longest_detour_hops} hops over the shortest live path",
        "busiest link": busiest,
        "virtual channels": str(routes.n_channels),
    }
