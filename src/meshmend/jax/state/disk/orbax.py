"""What meshmend asks of Orbax and TensorStore: to write chunks as an ordinary checkpoint, and to read some of them.

A checkpoint has two items: `state`, the user's own tree as Orbax's `PyTreeCheckpointHandler` writes one, and
`meshmend`, a JSON file with what only meshmend knows. Orbax makes and commits the folders, and merges what the
processes have written. It is imported when first needed: a job that restarts from memory does not wait for that.

Two things are known here that Orbax's pages do not promise: that each process writes zarr arrays to an OCDBT database
in `ocdbt.process_<n>`, which Orbax merges; and how it names the arrays of a tree, which every save compares.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.errors import MissingExtraError, RestartError
from meshmend.extras import install_hint
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.state.layout.rectangles import Box, ChunkGrid

STATE, FACTS = "state", "meshmend"
"""Items of a checkpoint."""
OCDBT = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
"""Orbax's own settings."""


def names_of(tree: Tree) -> list[str]:
    """Return the names that Orbax gives to the arrays of a tree.

    >>> names_of({"params": {"w": 1}, "opt_state": (2, [3])})
    ['opt_state.0', 'opt_state.1.0', 'params.w']
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [".".join(str(_key(entry)) for entry in path) for path in paths]


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))


def imported(name: str) -> Any:
    """Return a module of Orbax's, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("Checkpoints on disk", "orbax-checkpoint", install_hint("restart")) from error


class Saver:
    """Orbax's manager of the checkpoints in a folder, which makes them of chunks that others write."""

    def __init__(self, folder: Any, preserved: Any, barriers: str) -> None:
        ocp = imported("orbax.checkpoint")
        # With processes named, Orbax's barriers are the coordinator's. Otherwise they are programs on the devices,
        # which must not run beside training: hosts would start them in different orders, and deadlock.
        beside = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())), barrier_sync_key_prefix=barriers
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preserved,
            enable_async_checkpointing=False,  # a thread of ours waits for all of it
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=beside,
        )
        of_jax = (jax.Array, ocp.type_handlers.ArrayHandler())  # none is saved, but Orbax warns if none could be
        arrays = ocp.type_handlers.create_type_handler_registry((_Leaf, self._arrays_handler(ocp)), of_jax)
        handlers = {
            STATE: ocp.PyTreeCheckpointHandler(type_handler_registry=arrays, multiprocessing_options=beside),
            FACTS: self._facts_handler(ocp),
        }
        self.manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
        self._names: list[str] = []
        self._write: Callable[[Any, Any], None] = lambda *_: None

    def save(self, step: int, tree: Tree, write: Callable[[Any, Any], None], facts: Callable[[], str]) -> bool:
        """Return whether a checkpoint was made and is committed.

        `write(folder, context)` writes the arrays of a tree, which has their shapes and dtypes; after that, `facts()`
        is the text that goes beside them, on process 0.
        """
        args = imported("orbax.checkpoint").args
        self._names, self._write = names_of(tree), write
        leaves = jax.tree.map(lambda user: _Leaf(user.shape, np.dtype(user.dtype)), tree)
        items = {STATE: args.PyTreeSave(leaves), FACTS: args.JsonSave(facts)}
        return bool(self.manager.save(step, args=args.Composite(**items), force=True))

    def _arrays_handler(self, ocp: Any) -> Any:
        saver = self

        class Arrays(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
            """Writes all arrays at once, as what Orbax takes for NumPy arrays: readable on any machine."""

            async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
                del values, args
                names = sorted(info.name for info in infos)
                if names != sorted(saver._names):
                    raise RestartError(f"Orbax names the arrays {names}, expected {sorted(saver._names)}.")
                saver._write(infos[0].parent_dir, infos[0].ts_context)
                return []

        return Arrays()

    def _facts_handler(self, ocp: Any) -> Any:
        async def async_save(directory: Any, item: Any = None, args: Any = None) -> list[Any]:
            del item
            return [_Last(lambda: (directory / "metadata").write_text(args.item()))] if jax.process_index() == 0 else []

        handler = ocp.JsonCheckpointHandler()
        handler.async_save = async_save
        return handler


@dataclass(frozen=True)
class _Leaf:
    """What Orbax sees of an array."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class _Last:
    """What Orbax takes for something under way: it is done when Orbax waits for it, after the arrays."""

    do: Callable[[], Any]

    def result(self, timeout: float | None = None) -> Any:
        del timeout
        return self.do()

    def cancel(self) -> None:
        """Do nothing instead."""


class ChunkStore:
    """Writes this process's chunks of a tree's arrays into the folder that Orbax merges. All of them at once."""

    def __init__(self, folder: Any, context: Any, tree: Tree, grids: Sequence[ChunkGrid]) -> None:
        self.names, self.users = names_of(tree), jax.tree.leaves(tree)
        self.grids = grids
        self._ts = imported("tensorstore")
        self._base = _base(folder / f"ocdbt.process_{jax.process_index()}")
        self._context = context
        self._all = self._ts.Transaction(atomic=True)
        self._arrays: dict[int, Any] = {}
        self._writes: list[Any] = []

    def _array(self, user: int) -> Any:
        if user not in self._arrays:
            store = {"driver": "ocdbt", "base": self._base, "path": self.names[user], "config": OCDBT}
            metadata = {"shape": self.grids[user].shape, "chunks": self.grids[user].chunk, "compressor": None}
            spec = {
                "driver": "zarr",
                "kvstore": store | {"assume_config": True},
                "metadata": metadata,
                "dtype": np.dtype(self.users[user].dtype).name,
                "store_data_equal_to_fill_value": True,  # Orbax misses what is not there
            }
            opened = self._ts.open(spec, create=True, open=True, context=self._context, transaction=self._all)
            self._arrays[user] = opened.result()
        return self._arrays[user]

    def write(self, user: int, box: Box, values: NDArray[Any]) -> None:
        """Begin to write a chunk."""
        where = self._array(user)[tuple(slice(*ends) for ends in box)]
        self._writes.append(where.write(values, can_reference_source_data_indefinitely=True).copy)

    def commit(self) -> None:
        """Return when all chunks are written."""
        for user, grid in enumerate(self.grids):
            if not grid.n_chunks and jax.process_index() == 0:
                # Of an array without elements there is no chunk, and Orbax would miss it.
                self._writes.append(self._array(user).kvstore.write(".".join("0" for _ in grid.shape), b""))
        for write in self._writes:
            write.result()
        self._all.commit_async().result()


class SavedArrays:
    """The arrays of a tree that Orbax has saved in a folder, by name: each can be read in chunks."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self._ts = imported("tensorstore")
        self._context = self._ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
        try:
            metadata = json.loads((folder / "_METADATA").read_text())
        except (OSError, ValueError) as error:
            raise RestartError(f"{folder} is no checkpoint of a tree as Orbax writes it: {error}") from error
        self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        self._has_database = (folder / "manifest.ocdbt").exists()
        self._opened: dict[str, Any] = {}
        keys = [entry["key_metadata"] for entry in metadata["tree_metadata"].values()]
        self.names = {".".join(str(one["key"]) for one in path) for path in keys}

    def array(self, name: str) -> Any:
        """Return an array, whose `shape`, `dtype` and `chunk_layout` say what it is."""
        if name not in self._opened:
            store: Any = _base(self.folder / name)
            if self._has_database:
                store = {"driver": "ocdbt", "base": _base(self.folder), "path": name, "cache_pool": "cache_pool#ocdbt"}
            self._opened[name] = self._ts.open(
                {"driver": self._driver, "kvstore": store, "fill_missing_data_reads": False}, context=self._context
            )
        return self._opened[name].result()


def _base(folder: Any) -> Any:
    """Return a folder as TensorStore has it."""
    return f"{folder}/" if "://" in str(folder) else {"driver": "file", "path": f"{folder}/"}
