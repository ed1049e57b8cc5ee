"""The job's vocabulary as a byte-level tokenizer in Hugging Face format, ids kept.

It is GPT-2's scheme without merges: text is cut into bytes, and each byte that the vocabulary has a
symbol for is one token. Those are 17 of the 256, digits and operators; the other seven ids are
control tokens, which are found in text before the bytes are. A byte without a symbol is an error,
as in ``jobs/tokenizer.py``: an unknown token that would stand for it is not in the vocabulary. Text
is what ``tokenizer.decode`` gives, and nothing is added to it: a prompt is written with its
``<bos>``.

The files are plain JSON and need no package to be written; ``transformers`` and vLLM read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shiftbook.jobs import tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json")
_FRAME = (tokenizer.PAD, tokenizer.BOS, tokenizer.END)
"""Control tokens that are no part of a text; calls, results, answers and errors are."""
_UNKNOWN = "<unk>"
"""Not in the vocabulary, so that an unknown byte is refused; without a name it would be dropped."""


def tokenizer_json() -> dict[str, Any]:
    """``tokenizer.json``, in the form of the ``tokenizers`` package."""
    controls = tokenizer.SYMBOLS[: tokenizer.ERROR + 1]
    bytes_ = {"trim_offsets": True, "use_regex": False, "add_prefix_space": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": symbol,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": index in _FRAME,
            }
            for index, symbol in enumerate(controls)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **bytes_},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **bytes_},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: index for index, symbol in enumerate(tokenizer.SYMBOLS)},
            "merges": [],
        },
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """``tokenizer_config.json``; ``context`` is the most tokens that the policy reads."""
    pad, bos, end = (tokenizer.SYMBOLS[index] for index in _FRAME)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }


def save_tokenizer(folder: Path, context: int) -> None:
    """Write ``FILES`` into an existing ``folder``."""
    for name, content in zip(FILES, (tokenizer_json(), tokenizer_config(context)), strict=True):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
