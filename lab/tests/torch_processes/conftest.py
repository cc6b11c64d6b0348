"""Torch computes in one thread in these tests, as in those of the engine: processes are forked from this one."""

from torch_engine.conftest import compiler

__all__ = ["compiler"]
