"""Goal: a policy's folder has the job's tokenizer in it, also where no package could read one.

Method: the files are written with `transformers` and `tokenizers` barred, and read as the JSON that
they are. That `transformers` reads them alike is tested where vLLM brings it (`tests/engines`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from shiftbook.jobs import tokenizer
from shiftbook.jobs.config import tokenizer_digest
from shiftbook.jobs.hf_policy import hf_config, save_hf
from shiftbook.jobs.hf_tokenizer import FILES
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import load_policy

CONFIG = ModelConfig()


def test_the_tokenizer_is_written_without_any_package_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "tokenizers", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)  # an import raises
    folder = save_hf(tmp_path / "policy", load_policy(), CONFIG)
    again = save_hf(tmp_path / "again", load_policy(), CONFIG)
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in FILES)
    read = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = read["model"]["vocab"]
    # The vocabulary is the one of the plan, to which traces and ledgers are held.
    symbols = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[symbol] for symbol in symbols] == list(range(CONFIG.vocabulary))
    assert hashlib.sha256("\n".join(symbols).encode()).hexdigest() == tokenizer_digest()
    # A byte that is none of them must not be dropped: the token that stands for it is missing.
    assert read["model"]["unk_token"] not in vocabulary
    assert not read["model"]["merges"]
    assert [t["id"] for t in read["added_tokens"]] == list(range(tokenizer.ERROR + 1))
    said = json.loads((folder / "tokenizer_config.json").read_bytes())
    model = hf_config(CONFIG)
    for kind in ("pad", "bos", "eos"):
        assert vocabulary[said[f"{kind}_token"]] == model[f"{kind}_token_id"]
    assert said["model_max_length"] == model["max_position_embeddings"]
