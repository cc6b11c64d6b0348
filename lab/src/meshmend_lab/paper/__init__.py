"""The paper's tables and figures, each beside what our plans give for it."""

from meshmend_lab.paper.reproduce import Reproduction, reproduce

__all__ = ["Reproduction", "reproduce"]
