"""Proof that a model class is right, on the vLLM that a given interpreter has.

This side imports neither torch nor vLLM: it starts one process per rank in that interpreter and
reads back what they found.
"""

from .outcome import Outcome
from .request import Check, Loads, Report, Request, Slot, Unusable
from .run import verify
from .subjects import Subject

__all__ = [
    "Check",
    "Loads",
    "Outcome",
    "Report",
    "Request",
    "Slot",
    "Subject",
    "Unusable",
    "verify",
]
