"""EPLB support for vLLM's mixture-of-experts models, written from the vLLM source at hand."""

__version__ = "0.1.0"
