"""The published vocabulary, for tests that find it: in $MAXMOE_TIKTOKEN, or beside the project."""

import os
from pathlib import Path

import pytest

from maxmoe.chat.tokenizer import ByteTokenizer, TikTokenTokenizer

_BESIDE = Path(__file__).resolve().parents[3] / "shared/data/kimi_tokenizer/tiktoken.model"


@pytest.fixture(scope="module")
def published() -> TikTokenTokenizer:
    file = Path(os.environ.get("MAXMOE_TIKTOKEN", _BESIDE))
    if not file.is_file():
        pytest.skip(f"no published vocabulary: set MAXMOE_TIKTOKEN to a tiktoken.model (looked for {file})")
    return TikTokenTokenizer(file, 163_840)


@pytest.fixture(scope="module")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(512)
