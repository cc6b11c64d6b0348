"""`kubectl get nodes -o json` of a pool of TPU nodes on Google Kubernetes Engine.

Labels give the kind of TPU and the topology of the slice, conditions say which nodes are ready. Nothing there says
where in the slice a node is, so failed nodes have no place unless one node is the whole slice, or a description of
your own gives each node its place (`--intended`).
"""

from __future__ import annotations

import math

from meshmend.machines.description import MAX_CHIPS, Description, read_topology
from meshmend.machines.entries import Entry
from meshmend.machines.grid import Grid
from meshmend.machines.wiring import documented_axes
from meshmend.topology import name_shape

FORMAT = "GKE node list"
PREFIX = "cloud.google.com/"
ACCELERATOR, TOPOLOGY, POOL = f"{PREFIX}gke-tpu-accelerator", f"{PREFIX}gke-tpu-topology", f"{PREFIX}gke-nodepool"
KINDS = {
    "tpu-v4-podslice": ("TPU v4", "tpu-v4"),
    "tpu-v5-lite-podslice": ("TPU v5e", "tpu-v5e"),
    "tpu-v5-lite-device": ("TPU v5e", "tpu-v5e"),
    "tpu-v5p-slice": ("TPU v5p", "tpu-v5p"),
    "tpu-v6e-slice": ("TPU v6e", "tpu-v6e"),
    "tpu-v6e-device": ("TPU v6e", "tpu-v6e"),
    "tpu7x": ("TPU7x", "tpu-v7x"),
}
"""The accelerator's label, JAX's name for it (which the table of documented wiring uses), and the hardware preset."""
UNUSABLE = {"UNHEALTHY", "INCOMPLETE"}


def read(root: Entry) -> Description:
    """Return the slice that the nodes form, and which of them are not ready."""
    found = Description(FORMAT, root.file, lists_cables=False)
    nodes = [node for node in _nodes(root) if ACCELERATOR in _labels(node)]
    if not nodes:
        root.refuse(f"nodes with the label {ACCELERATOR}", "none", "List the TPU nodes: kubectl get nodes -o json")
    pools = sorted({(_label(node, POOL), _label(node, ACCELERATOR), _label(node, TOPOLOGY)) for node in nodes})
    if len(pools) > 1:
        listed = "; ".join(f"{pool} ({kind}, {shape})" for pool, kind, shape in pools[:4])
        root.refuse(
            "the nodes of one slice",
            f"{len(pools)} pools: {listed}",
            f"Choose one: kubectl get nodes -l {POOL}={pools[0][0]} -o json",
        )
    _, accelerator, topology = pools[0]
    if not topology:
        root.refuse(f"nodes with the label {TOPOLOGY}", "nodes without it")
    shape = read_topology(topology, root.file)
    if math.prod(shape) > MAX_CHIPS:
        root.refuse(f"a slice of at most {MAX_CHIPS:,} chips", name_shape(shape)[:60])
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    kind, found.hardware = KINDS.get(accelerator, (accelerator, None))
    wrap, doubt = documented_axes(kind, shape)
    if doubt is not None:
        found.notes.append(f"{doubt}.")
    found.grids = [Grid.of(shape, wrap)]
    _health(found, nodes, math.prod(shape))
    return found


def _nodes(root: Entry) -> list[Entry]:
    items = root.get("items")
    return list(items.rows()) if items is not None else [root]


def _labels(node: Entry) -> dict[object, object]:
    labels = node.need("metadata").get("labels")
    return {} if labels is None else labels.mapping()


def _label(node: Entry, name: str) -> str:
    labels = node.need("metadata").need("labels")
    entry = labels.get(name)
    return "" if entry is None else entry.text(128)


def _health(found: Description, nodes: list[Entry], size: int) -> None:
    chips = set()
    for node in nodes:
        name = node.need("metadata").need("name").text()
        status = node.get("status")
        if status is None:
            found.notes.append(f"Node {name} has no status; it counts as not ready.")
        why = "no status" if status is None else _why_not_ready(status)
        for label, value in _labels(node).items():
            text = str(label)
            if text.startswith(f"{PREFIX}gke-tpu-partition-") and text.endswith("-state"):
                if value in UNUSABLE:
                    why = why or f"{text.removeprefix(PREFIX)}={value}"
                elif value == "DEGRADED":
                    found.notes.append(f"Node {name}: {text.removeprefix(PREFIX)}=DEGRADED; it is used as it is.")
        if why is not None:
            found.bad_hosts[name] = why
        for where in ("capacity", "allocatable"):
            entry = None if status is None else status.get(where)
            tpus = None if entry is None else entry.get("google.com/tpu")
            if tpus is not None and tpus.text(8).isdigit():
                chips.add(int(tpus.text(8)))
    if len(chips) > 1:
        found.notes.append(f"Nodes offer different numbers of chips: {', '.join(map(str, sorted(chips)))}.")
    here = max(chips, default=0) * len(nodes)
    if here and here < size:
        found.bad_hosts["(nodes that are not listed)"] = f"{here} of {size} chips are on listed nodes"


def _why_not_ready(status: Entry) -> str | None:
    """Return why a node is not ready; None if it is."""
    for condition in status.rows("conditions"):
        kind, value = condition.get("type"), condition.get("status")
        if kind is not None and kind.value == "Ready":
            if value is not None and value.value == "True":
                return None
            reason = condition.get("reason")
            return "not Ready" if reason is None else f"not Ready: {reason.text(128)}"
    return "no Ready condition"
