"""Byte tokenizer: specials where there is room, ids that stand for nothing, wrong numbers, light import."""

import subprocess
import sys
from pathlib import Path

import pytest

from maxmoe.chat.tokenizer import ByteTokenizer


def test_byte_tokenizer_below_512_has_no_special_strings():
    tokenizer = ByteTokenizer(320, bos_id=1, end_of_msg_id=2)
    assert tokenizer.special_ids == {}
    assert (tokenizer.bos_id, tokenizer.end_of_msg_id, tokenizer.pad_id) == (1, 2, None)
    assert tokenizer.encode("<|open|>\u00e9", allow_special=True) == list("<|open|>\u00e9".encode())


def test_byte_tokenizer_shows_ids_that_stand_for_nothing():
    assert ByteTokenizer(320).decode([72, 300, 105]) == "H<|unused_300|>i"
    assert ByteTokenizer(1024).decode([767, 768, 1023]) == "<|unused_767|>[BOS][PAD]"


@pytest.mark.parametrize(
    "vocab_size, ids, message",
    [
        (255, {}, "at least 256"),
        (320, {"bos_id": 320}, "0 to 319"),
        (320, {"pad_id": -1}, "0 to 319"),
        (512, {"bos_id": 1}, "special slots fix"),
    ],
)
def test_byte_tokenizer_rejects_wrong_numbers(vocab_size, ids, message):
    with pytest.raises(ValueError, match=message):
        ByteTokenizer(vocab_size, **ids)


def test_byte_tokenizer_does_not_import_tiktoken():
    code = "import sys, maxmoe.chat.tokenizer as t; t.ByteTokenizer(512); assert 'tiktoken' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
