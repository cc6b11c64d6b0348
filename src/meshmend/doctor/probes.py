"""Probes: each runs one engine once. Run as `python -m meshmend.doctor.probes NAME`, in a separate process.

A probe prints one JSON object, with a sentence under `detail`, or raises. It imports what it tries inside the function.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.buckets import create, writable_path
from meshmend.errors import MeshmendError, ParameterError
from meshmend.planning import plan
from meshmend.topology import Mesh

HOLED = Mesh("4x4", failed=["2x2@0,0"])


def try_numpy() -> dict[str, Any]:
    """Plan round a hole, prove it, and run it."""
    import meshmend.numpy as mmn

    schedule = plan(HOLED, "weave", chunks=24)
    payload = np.arange(HOLED.n_chips * 100).reshape(HOLED.n_chips, 100)
    expect(bool((mmn.run(schedule, payload) == payload.sum(axis=0)).all()))
    return {"detail": f"all-reduce on {HOLED}: proven, run, correct"}


def see_jax() -> dict[str, Any]:
    """Report the devices that JAX sees, and the mesh and holes that `discover` finds."""
    import jax

    import meshmend.jax as mmj

    devices = jax.devices()
    first = devices[0]
    facts: dict[str, Any] = {
        "platform": first.platform,
        "kind": first.device_kind,
        "devices": len(devices),
        "coordinates": [list(d.coords) for d in devices] if getattr(first, "coords", None) is not None else None,
        "mesh": None,
        "holes": None,
        "wrong": None,
    }
    if facts["coordinates"] is not None or _is_described():
        try:
            mesh = mmj.discover(devices).mesh
        except MeshmendError as error:
            facts["wrong"] = str(error)
        else:
            facts |= {"mesh": repr(mesh), "holes": [str(hole) for hole in mesh.holes]}
    many = f"{len(devices)} device{'s' * (len(devices) > 1)}"
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        many += " with JAX_PLATFORMS=cpu"
    return {"detail": f"{first.platform}, {many} ({first.device_kind})", **facts}


def try_jax() -> dict[str, Any]:
    """Run an all-reduce round a hole on the TPU's chips, or else on virtual CPU devices."""
    import jax
    import jax.numpy as jnp

    import meshmend.jax as mmj

    devices = jax.devices()
    if devices[0].platform == "tpu":
        fabric, where = mmj.discover(devices), f"{len(devices)} {devices[0].device_kind} devices"
    else:
        fabric = mmj.discover(devices[: HOLED.n_chips], shape="4x4", failed=HOLED.holes, wrap=False)
        where = f"{HOLED.n_chips} virtual CPU devices"
    program = mmj.install(plan(fabric.mesh, "weave", chunks=24), fabric)
    by_device = fabric.sharding(program.axes).spec
    total = jax.jit(
        jax.shard_map(
            mmj.all_reduce,
            mesh=fabric.jax_mesh,
            in_specs=(by_device, program.spec),
            out_specs=by_device,
            check_vma=False,
        )
    )
    n_devices = int(fabric.jax_mesh.devices.size)
    payload = np.arange(n_devices * 100, dtype=np.int32).reshape(n_devices, 100)
    got = np.asarray(total(jnp.asarray(payload.ravel()), program)).reshape(n_devices, 100)
    expect(bool((got == payload.sum(axis=0)).all()))
    return {"detail": f"all-reduce on {fabric.mesh}: run on {where}, correct"}


def _is_described() -> bool:
    """Whether the environment says what mesh the devices form."""
    return bool(os.environ.get("MESHMEND_SHAPE") or os.environ.get("MESHMEND_MACHINE"))


def measure_jax(file: str, shape: str = "") -> dict[str, Any]:
    """Measure the devices that JAX has, and write the file: those of a TPU, or virtual ones that form `shape`."""
    import jax

    import meshmend.jax as mmj
    from meshmend.cost.hardware import hardware_facts

    is_placed = getattr(jax.devices()[0], "coords", None) is not None
    if not (shape or is_placed or _is_described()):
        raise ParameterError(
            f"{jax.devices()[0].device_kind} devices report no coordinates, so nobody knows which of them are "
            "neighbours. Say which mesh virtual CPU devices are to form: --shape 4x4."
        )
    fabric = mmj.discover(shape=shape, failed=(), wrap=False) if shape else mmj.discover()
    hardware = mmj.measure(fabric, file=file)
    detail = f"measured on {fabric.mesh} of {jax.devices()[0].device_kind}"
    return {"detail": detail, "mesh": str(fabric.mesh), **hardware_facts(hardware)}


def try_libtpu() -> dict[str, Any]:
    """Compile an all-reduce round a hole for a small TPU slice."""
    from meshmend.jax.compile.for_topology import compile_for, slice_fabric

    topology = "v3:4x4"
    fabric = slice_fabric(topology, failed=["2x2@0,0"])
    report = compile_for(topology, plan(fabric.mesh, "row-pairs"), fabric, payload_bytes=4096)
    return {"detail": f"all-reduce compiled for {topology} minus 2x2@0,0 ({report.chips} chips)"}


def try_torch() -> dict[str, Any]:
    """Run an all-reduce round a hole over Gloo, one process per chip, on the loopback interface."""
    import torch.multiprocessing as processes

    mesh = Mesh("2x2", failed=["0,0"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        # Forked: torch takes seconds to import, and has not started a thread yet.
        processes.start_processes(_be_a_chip, (mesh, folder), nprocs=mesh.n_chips, start_method="fork")
    return {"detail": f"all-reduce on {mesh}: run by {mesh.n_chips} processes over Gloo, correct"}


def _be_a_chip(rank: int, mesh: Mesh, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import meshmend.torch as mmt

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=mesh.n_chips)
    engine = mmt.Engine(plan(mesh, "weave", chunks=6), rank, dist.group.WORLD)
    payload = torch.arange(60) + rank
    mmt.all_reduce(payload, engine)
    expect(torch.equal(payload, mesh.n_chips * torch.arange(60) + sum(range(mesh.n_chips))))
    dist.destroy_process_group()


def try_torchft() -> dict[str, Any]:
    """Create the process group that survives failures; a quorum needs a lighthouse and is not tried."""
    import meshmend.torch as mmt

    mmt.MeshProcessGroup(shape=(2, 2), chip=(0, 0))
    return {"detail": "MeshProcessGroup created; a quorum of several replicas is not tried"}


def try_drawing() -> dict[str, Any]:
    """Draw a schedule."""
    from meshmend.drawing import draw

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rings.svg"
        draw(plan(HOLED, "hamiltonian"), path)
        expect(path.stat().st_size > 1000)
    return {"detail": "drew the rings of a plan"}


def try_shared() -> dict[str, Any]:
    """Create a file in the folder or bucket that MESHMEND_SHARED names, once and no second time, and remove it."""
    folder = writable_path(os.environ["MESHMEND_SHARED"])
    path = folder / f".doctor-{secrets.token_hex(8)}"
    create(path, "first")
    try:
        with contextlib.suppress(FileExistsError):
            create(path, "second")
        expect(path.read_text() == "first")
    finally:
        path.unlink()
    return {"detail": f"{folder}: a file was created, read and removed"}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (try_numpy, see_jax, try_jax, measure_jax, try_libtpu, try_torch, try_torchft, try_drawing, try_shared)
}


def expect(right: bool) -> None:
    """Raise `MeshmendError` if a result is wrong."""
    if not right:
        raise MeshmendError("It ran, and the result is wrong. Do not train with it; please report this.")


def main(probes: Mapping[str, Callable[..., dict[str, Any]]], name: str, *words: str) -> None:
    """Run one probe. Output of libraries goes to standard error, so that standard output has only the result."""
    with contextlib.redirect_stdout(sys.stderr):
        answer = probes[name](*words)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(PROBES, *sys.argv[1:])
