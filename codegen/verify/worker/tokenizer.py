"""A tokenizer for a tiny checkpoint: one token a byte, and none else."""

from __future__ import annotations

import json
from pathlib import Path


def write(folder: Path, vocabulary: int, bos: int, eos: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as both transformers 4 and 5 read them.

    The id of a byte is its value. Of 256 ids `bos` and `eos` take two from control characters.
    """
    # Byte-level tokens are spelt in printable letters; the other bytes borrow some from 256 on.
    spare = iter(range(256, 512))
    letters = [
        chr(b) if chr(b).isprintable() and b != ord(" ") else chr(next(spare)) for b in range(256)
    ]
    special = {bos: "<s>", eos: "</s>"}
    vocab = {special.get(b, letters[b]): b for b in range(min(256, vocabulary))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {
            "id": number,
            "content": text,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for number, text in special.items()
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[bos],
        "eos_token": special[eos],
        "model_max_length": 512,
    }
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
