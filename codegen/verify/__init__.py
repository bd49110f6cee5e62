"""Proof that a model class is right, on the vLLM that a given interpreter has.

This side imports neither torch nor vLLM: it starts one process per rank in that interpreter and
reads back what they found.
"""

from .request import Check, Loads, Report, Request, Slot, Unusable
from .run import verify

__all__ = ["Check", "Loads", "Report", "Request", "Slot", "Unusable", "verify"]
