"""Goal: the tokenizer in the policy's folder is the job's own, as `transformers` reads it.

Method: the folder is written as for vLLM and opened with AutoTokenizer; ids and text are compared
with `jobs/tokenizer.py` on every symbol, on all prompts of the data set, on random sequences of
ids, and on text that neither of them may take.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.jobs import tokenizer
from shiftbook.jobs.config import DATASET_SIZE
from shiftbook.jobs.errors import TaskError
from shiftbook.jobs.hf_policy import save_hf
from shiftbook.jobs.hf_tokenizer import tokenizer_json
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.questions import question
from tests.engines.marks import WITHOUT_RAY

pytestmark = WITHOUT_RAY

PLAIN = "".join(tokenizer.SYMBOLS[tokenizer.ERROR + 1 :])
IDS = st.lists(st.integers(0, tokenizer.VOCABULARY_SIZE - 1), max_size=ModelConfig().context)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("policy"), load_policy(), ModelConfig())


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_the_file_is_what_the_tokenizers_package_itself_would_write(folder: Path) -> None:
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert json.loads(read.to_str()) == tokenizer_json()


def test_every_symbol_has_its_id_and_there_are_no_others(theirs: Any) -> None:
    assert len(theirs) == theirs.vocab_size == tokenizer.VOCABULARY_SIZE
    assert theirs.get_vocab() == {s: i for i, s in enumerate(tokenizer.SYMBOLS)}
    for index, symbol in enumerate(tokenizer.SYMBOLS):
        assert theirs.encode(symbol) == [index]
        assert theirs.decode([index]) == symbol
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (
        tokenizer.PAD, tokenizer.BOS, tokenizer.END,
    )  # fmt: skip
    assert theirs.unk_token is None
    assert theirs.model_max_length == ModelConfig().context


def test_all_prompts_of_the_data_set_have_the_same_ids(theirs: Any) -> None:
    asked = [question(0, index) for index in range(DATASET_SIZE)]
    assert theirs([q.text for q in asked])["input_ids"] == [tokenizer.encode(q.text) for q in asked]
    # With the token that a prompt begins with, which is written out: nothing is added to a text.
    whole = theirs([tokenizer.decode(q.tokens) for q in asked])["input_ids"]
    assert whole == [list(q.tokens) for q in asked]
    assert theirs.batch_decode(whole) == [tokenizer.decode(q.tokens) for q in asked]


@given(ids=IDS)
def test_any_sequence_of_ids_is_written_alike_and_read_back(theirs: Any, ids: list[int]) -> None:
    text = tokenizer.decode(ids)
    assert theirs.decode(ids) == text
    assert theirs.encode(text) == ids
    # What frames a text goes where it is asked for; calls, results and answers are said in it.
    framing = (tokenizer.PAD, tokenizer.BOS, tokenizer.END)
    bare = tokenizer.decode([token for token in ids if token not in framing])
    assert theirs.decode(ids, skip_special_tokens=True) == bare


@given(text=st.text(PLAIN, max_size=80))
def test_plain_text_has_the_same_ids(theirs: Any, text: str) -> None:
    assert theirs.encode(text) == tokenizer.encode(text)


@given(
    before=st.text(PLAIN, max_size=8),
    foreign=st.characters(exclude_characters=PLAIN, exclude_categories=("Cs",)),
    after=st.text(PLAIN, max_size=8),
)
def test_what_the_vocabulary_has_no_byte_for_is_refused_and_not_dropped(
    theirs: Any, before: str, foreign: str, after: str
) -> None:
    with pytest.raises(TaskError, match="expected characters among"):
        tokenizer.encode(before + foreign + after)
    with pytest.raises(Exception, match="not found in the vocabulary"):
        theirs.encode(before + foreign + after)
