"""Read-only analyses: the anatomy of a model, and what the vLLM tree around it offers.

Both work on the standard library's syntax trees, which are several times faster to
get than LibCST's and carry line numbers for messages. Nothing of the tree is executed.
"""
