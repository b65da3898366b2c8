"""Checkpoint folders: which tokenizer they give, whose names win, what is said of files that are wrong."""

import base64
import json
from pathlib import Path

import pytest

from maxmoe.chat.tokenizer import ByteTokenizer, TikTokenTokenizer, load_tokenizer

_TOKENS = [bytes((i,)) for i in range(256)] + [b"he", b"th", b"the"]
_BASE = len(_TOKENS)


def _model_text(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def _write_folder(folder: Path, tokens: list[bytes], names: dict | None = None) -> Path:
    (folder / "tiktoken.model").write_bytes(_model_text(tokens))
    if names is not None:
        entries = {str(i): {"content": name, "special": True} for i, name in names.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    return folder


def test_load_tokenizer_lets_the_family_names_win(tmp_path):
    names = {_BASE + 2: "<|im_end|>", _BASE + 22: "<think>", _BASE + 255: "[PAD]"}
    tokenizer = load_tokenizer(str(_write_folder(tmp_path, _TOKENS, names)), _BASE + 256)
    assert isinstance(tokenizer, TikTokenTokenizer)
    assert tokenizer.special_ids["<|end_of_msg|>"] == _BASE + 2
    assert "<|im_end|>" not in tokenizer.special_ids
    assert tokenizer.special_ids["<think>"] == _BASE + 22
    assert f"<|reserved_token_{_BASE + 22}|>" not in tokenizer.special_ids
    assert tokenizer.special_ids[f"<|reserved_token_{_BASE + 23}|>"] == _BASE + 23


@pytest.mark.parametrize(
    "names, message",
    [
        ({_BASE - 1: "<x>"}, f"{_BASE - 1}.*special slots are ids {_BASE} to {_BASE + 255}"),
        ({_BASE + 256: "<x>"}, "special slots"),
        ({_BASE + 40: "<|open|>"}, "names must differ"),
        ({_BASE + 40: "<|o"}, "begin with"),
        ({_BASE + 40: ""}, "non-empty"),
        ({_BASE + 40: 7}, "non-empty"),
        ({"x": "<x>"}, "cannot read"),
    ],
)
def test_load_tokenizer_rejects_wrong_names(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(_write_folder(tmp_path, _TOKENS, names), _BASE + 256)


@pytest.mark.parametrize("text", ["{", "[]", '{"added_tokens_decoder": [1]}', '{"added_tokens_decoder": {"1": {}}}'])
def test_load_tokenizer_rejects_a_broken_names_file(tmp_path, text):
    _write_folder(tmp_path, _TOKENS)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer_config\.json"):
        load_tokenizer(tmp_path, _BASE + 256)


@pytest.mark.parametrize("vocab_size", [256, 320, 512, 1024])
def test_load_tokenizer_falls_to_bytes_for_tiny_models(tmp_path, vocab_size):
    (tmp_path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path, vocab_size)
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.vocab_size == vocab_size


@pytest.mark.parametrize("vocab_size", [255, 1025, 163_840])
def test_load_tokenizer_without_vocabulary_rejects_other_sizes(tmp_path, vocab_size):
    with pytest.raises(ValueError, match=f"{vocab_size} is not in 256..1024.*Copy the tiktoken.model"):
        load_tokenizer(tmp_path, vocab_size)


def test_load_tokenizer_does_not_take_bytes_beside_a_foreign_vocabulary(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json.*only tiktoken\.model"):
        load_tokenizer(tmp_path, 320)


def test_load_tokenizer_rejects_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        load_tokenizer(tmp_path / "nowhere", 320)


@pytest.mark.parametrize("vocab_size", [_BASE, _BASE + 255, _BASE + 257, 320])
def test_load_tokenizer_rejects_a_size_that_the_file_does_not_have(tmp_path, vocab_size):
    with pytest.raises(ValueError, match=f"{_BASE} base tokens.*vocab_size is {vocab_size}"):
        load_tokenizer(_write_folder(tmp_path, _TOKENS), vocab_size)


@pytest.mark.parametrize(
    "line, content, message",
    [
        (10, b"QQ==", "line 10: expected"),
        (10, b"QQ== 9 9", "line 10: expected"),
        (10, b"Q*== 9", "line 10: expected"),
        (10, b"QQ== -9", "line 10: expected"),
        (10, b"QQ== 9.0", "line 10: expected"),
        (10, b"QQ", "line 10: expected"),
        (258, b"dGg= 256", "line 258: rank 256 is already on line 257"),
        (258, b"aGU= 257", "line 258: token b'he' is already on line 257"),
        (258, b"", "line 259: rank 258, but no line has rank 257"),
        (100, b"enp6 99", "no token for byte 0x63"),
    ],
)
def test_read_ranks_names_the_line_that_is_wrong(tmp_path, line, content, message):
    lines = _model_text(_TOKENS).split(b"\n")
    lines[line - 1] = content
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path, _BASE + 256)


def test_read_ranks_takes_any_order_blank_lines_and_crlf(tmp_path):
    lines = _model_text(_TOKENS).split(b"\n")
    (tmp_path / "tiktoken.model").write_bytes(b"\r\n".join(reversed(lines)) + b"\r\n\r\n")
    assert load_tokenizer(tmp_path, _BASE + 256).encode("the") == [_TOKENS.index(b"the")]
