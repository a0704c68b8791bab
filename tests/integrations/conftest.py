"""Tiny models and a tokenizer trained on the spot: nothing is downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest

pytest.importorskip("transformers")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = (
    "the import statement finds a module and binds a name in the local namespace",
    "a class definition defines a class object and executes the class body",
    "an exception is raised when the interpreter detects an error at run time",
    "a generator function yields values one at a time and keeps its state between calls",
    "the with statement wraps the execution of a block with methods defined by a context manager",
    "names refer to objects and are introduced by name binding operations",
    "a sequence supports indexing slicing and membership tests",
    "the assert statement is a convenient way to insert debugging assertions into a program",
)


@pytest.fixture(scope="session")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<pad>", "<eos>"]))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
