"""What runs inside the interpreter whose vLLM is judged, one process per rank.

Imports nothing beyond the standard library, torch, vLLM and what vLLM itself needs, and is started
by path: the environment of the user's vLLM has no eplb_codegen.
"""
