"""`meshmend lab simulate`: whole jobs from seeds, with faults of every kind, and the story of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.common import print_facts, print_json
from meshmend.cli.options import JsonOption
from meshmend.cli.terminal import approved, print_line, working
from meshmend.errors import ParameterError
from meshmend_lab.extras import require

if TYPE_CHECKING:
    from meshmend_lab.simulation.campaign import Campaign


def command(
    seeds: Annotated[str, typer.Option("--seeds", metavar="A:B", help="Seeds A to B - 1, one job each.")] = "0:100",
    hosts: Annotated[
        int | None,
        typer.Option("--hosts", metavar="N", min=2, help="Hosts of each job.", show_default="4 to 64, as drawn"),
    ] = None,
    faults: Annotated[int, typer.Option("--faults", metavar="N", min=1, help="Faults per job, about.")] = 50,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Processes at once.")] = 1,
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="SEED", help="The story of one job, with as few faults as fail."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="With --replay: with all of its faults.")] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="List the branches of the product's decisions that no job takes.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Simulate jobs from seeds: the product's decisions, with clock, network, disk and processes replaced.

    Hosts die, freeze, restart with and without their memory, the store dies and pauses, networks are cut, disks hang.
    After every change it checks that one round trains at a time, that no committed step is lost, that each sample is
    used once, and more (docs/trust.md). After the last fault the job must train again and end. The same seed gives the
    same job. Needs the extra named restart.

    Example: meshmend lab simulate --seeds 0:200 --jobs 2
    Example: meshmend lab simulate --replay 17
    """
    require("jax", needed_for="A simulated recovery", extra="restart")
    from meshmend_lab.simulation import campaign
    from meshmend_lab.simulation import coverage as branches
    from meshmend_lab.simulation.plan import draw

    if replay is not None:
        plan = draw(replay, n_hosts=hosts, n_faults=faults)
        outcome = campaign.replay(plan if whole else campaign.shrink(plan), print_line)
        raise typer.Exit(int(outcome.violation is not None))
    first, last = _range(seeds)
    if coverage:
        found = branches.untaken(draw(seed, n_hosts=hosts, n_faults=faults) for seed in range(first, last))
        for line in found:
            print_line(line)
        raise typer.Exit(int(bool(branches.unexplained(found))))
    total = campaign.Campaign()
    options = "".join(f" --{name} {value}" for name, value in (("hosts", hosts),) if value)
    options += f" --faults {faults}" * (faults != 50)
    seed = first
    try:
        with working("simulating", json, total=last - first) as tell:
            for outcome in campaign.run(first, last, n_hosts=hosts, n_faults=faults, n_processes=jobs):
                total.add(outcome)
                seed = outcome.seed + 1
                tell(advance=1)
                if outcome.violation is not None and not json:
                    print_line(f"seed {outcome.seed}: {outcome.violation}")
                    print_line(f"  meshmend lab simulate --replay {outcome.seed}{options}")
    except KeyboardInterrupt:
        print_line(f"Go on with --seeds {seed}:{last}", stderr=True)
    if json:
        print_json({"seeds": [first, seed], **total.facts()})
    else:
        _show(total)
    raise typer.Exit(int(bool(total.violations)))


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ParameterError(f"--seeds {text}: expected the first seed and the one after the last, as in 0:100.")
    return int(first), int(last)


def _show(total: Campaign) -> None:
    facts: dict[str, Any] = total.facts()
    recovery = facts["recovery_s"]
    spread = f": median {recovery['median']:.1f} s, 99 % within {recovery['p99']:.1f} s" if recovery else ""
    shown = {
        "jobs": f"{facts['jobs']:,} of {facts['hosts'] / max(1, facts['jobs']):.1f} hosts on average: "
        + ", ".join(f"{n} {end}" for end, n in facts["ends"].items()),
        "simulated": f"{facts['simulated_h']:,} h, {facts['steps']:,} steps, {facts['events']:,} events",
        "faults": f"{facts['faults']:,}",
        "recoveries": f"{facts['recoveries']:,}{spread}",
        "two rounds at once": f"in {facts['splits']:,} jobs whose rounds need no more than half of the hosts",
    }
    n = len(facts["violations"])
    print_facts("simulated jobs", {**shown, "promises": approved("all kept") if not n else f"broken in {n} jobs"})
