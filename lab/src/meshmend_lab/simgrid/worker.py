"""Run steps of flows in SimGrid. Executed by an interpreter that has `simgrid`; needs nothing else.

Reads one JSON object from standard input:
  links      one row per link: [rate, latency]
  paths      for each path the links that it crosses, in order
  steps      for each step its flows: [path, amount]
Writes one JSON list: the simulated clock at the end of each step.

Or, in place of steps:
  transfers  in the order in which links take them: [path, the transfers that must have arrived before]
  amount     what each of them weighs
  latency    what passes after a transfer has left its link, until it has arrived
Then it writes when each transfer has arrived.
"""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

# The parallel-task model shares every link fairly among its flows, with no TCP window and no cross traffic on the
# way back: the default model is off by 1.75×, and CM02 shares a link by latency.
SETTINGS = [
    "--cfg=host/model:ptask_L07",
    "--cfg=network/TCP-gamma:0",
    "--cfg=network/crosstraffic:0",
    "--log=root.thres:warning",
]


def main() -> None:
    """Build the platform, then run one step after the other."""
    from simgrid import Comm, Engine, LinkInRoute, NetZone

    job = json.load(sys.stdin)
    engine = Engine(["meshmend", *SETTINGS])
    new = hasattr(NetZone, "add_netzone_full")  # SimGrid 4 renamed what 3 calls create_…
    zone = engine.netzone_root.add_netzone_full("mesh") if new else NetZone.create_full_zone("mesh")
    links = []
    for number, (rate, latency) in enumerate(job["links"]):
        link = (zone.add_link if new else zone.create_link)(f"link {number}", rate)
        links.append(LinkInRoute(link.set_latency(latency).seal()))
    # A route in SimGrid belongs to a pair of hosts: every path gets a pair of dummies of its own.
    paths = job["paths"]
    n_hosts = math.isqrt(len(paths)) + 2
    hosts = [zone.add_host(f"h{i}", 1e9) if new else zone.create_host(f"h{i}", 1e9).seal() for i in range(n_hosts)]
    ends = []
    for number, path in enumerate(paths):
        a, b = divmod(number, n_hosts - 1)
        ends.append((hosts[a], hosts[(a + 1 + b) % n_hosts]))
        route = [links[link] for link in path]
        if new:
            zone.add_route(*ends[-1], route, False)
        else:
            zone.add_route(ends[-1][0].netpoint, ends[-1][1].netpoint, None, None, route, False)
    zone.seal()

    def clock() -> float:
        return float(Engine.clock if new else engine.clock)

    if "transfers" in job:
        json.dump(follow(engine, clock, hosts[0], ends, job), sys.stdout)
        return
    clocks = []
    for flows in job["steps"]:
        under_way = [Comm.sendto_async(*ends[path], amount) for path, amount in flows]
        engine.run()
        clocks.append(clock())
        del under_way
    json.dump(clocks, sys.stdout)


def follow(engine: Any, clock: Callable[[], float], host: Any, ends: list[Any], job: Any) -> list[float]:
    """Let every link take its transfers in order, each as soon as what it sends has arrived."""
    from simgrid import Actor, Comm, this_actor

    transfers, amount, latency = job["transfers"], job["amount"], job["latency"]
    left = [len(needs) for _, needs in transfers]
    frees: list[list[int]] = [[] for _ in transfers]
    of_link: dict[int, list[int]] = {}
    for number, (path, needs) in enumerate(transfers):
        of_link.setdefault(path, []).append(number)
        for other in needs:
            frees[other].append(number)
    arrived = [0.0] * len(transfers)
    waiting: dict[int, Any] = {}

    def deliver(number: int, due: float) -> None:
        this_actor.sleep_until(due)
        arrived[number] = clock()
        for other in frees[number]:
            left[other] -= 1
            if not left[other] and other in waiting:
                waiting.pop(other).resume()

    def serve(path: int) -> None:
        for number in of_link[path]:
            if left[number]:
                waiting[number] = Actor.self()
                this_actor.suspend()
            Comm.sendto(*ends[path], amount)
            Actor.create(f"t{number}", host, deliver, number, clock() + latency)

    for path in of_link:
        Actor.create(f"link {path}", host, serve, path)
    engine.run()
    return arrived


if __name__ == "__main__":
    main()
