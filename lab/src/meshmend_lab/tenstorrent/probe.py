"""Ask Tenstorrent's runtime which mesh it opens, without hardware. Executed by an interpreter that has `ttnn`.

The machine is what TT_METAL_MOCK_CLUSTER_DESC_PATH describes, and the mesh what TT_MESH_GRAPH_DESC_PATH asks for, if it
is set. `SystemMeshDescriptor` is where `ttnn.open_mesh_device` takes its devices from; no device is opened. Prints one
line of JSON: the shape, the device of each place in row-major order, and, with the word "directions", the code of the
Ethernet direction from each place to each of its neighbours.
"""

import importlib.metadata
import itertools
import json
import sys
from typing import Any

MARK = "MESHMEND "


def main(wants_directions: bool) -> None:
    """Ask, and print the answer."""
    import ttnn
    from ttnn._ttnn.multi_device import MeshCoordinate, SystemMeshDescriptor

    if wants_directions:
        ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_2D)  # without a fabric, no direction is known
    system = SystemMeshDescriptor()
    shape = [int(n) for n in system.shape()]
    places = list(itertools.product(*map(range, shape)))
    answer: dict[str, Any] = {
        "ttnn": importlib.metadata.version("ttnn"),
        "shape": shape,
        "devices": [int(system.get_device_id(MeshCoordinate(*place))) for place in places],
    }
    if wants_directions:
        nodes = [ttnn.FabricNodeId(ttnn.MeshId(0), number) for number in range(len(places))]
        answer["directions"] = [
            [a, b, int(ttnn.get_eth_forwarding_direction(nodes[a], nodes[b]))]
            for (a, one), (b, other) in itertools.permutations(enumerate(places), 2)
            if sum(abs(x - y) for x, y in zip(one, other)) == 1  # noqa: B905 - of one mesh, so of one length
        ]
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    main("directions" in sys.argv[1:])
