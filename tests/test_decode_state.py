"""python -m maxmoe.decode with sessions and streamed weights: the same answers, and clear refusals."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from maxmoe import decode
from maxmoe.checkpoint.convert import convert
from maxmoe.inference.run import Run

TINY = Path(decode.__file__).parent / "data/tiny"
PROMPT = "The quick brown fox"
# One cache size for all: sums over more slots may be rounded in another order.
SETTINGS = ("--json", "--seed=11", "--max_len=256")


def _main(capsys, *arguments):
    with flagsaver.flagsaver():
        code = decode.main(flags.FLAGS(["decode", *arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def _answer(capsys, *arguments):
    code, out, error = _main(capsys, *SETTINGS, *arguments)
    assert code == 0, error
    return json.loads(out), error


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The packaged checkpoint, converted."""
    target = tmp_path_factory.mktemp("converted") / "tiny"
    convert(TINY, target)
    return target


def test_resumed_answer_goes_on_as_the_uninterrupted_one(capsys, tmp_path, converted):
    whole, _ = _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=12")
    begun, error = _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=5", f"--save_session={tmp_path / 'a'}")
    assert len(whole["ids"]) == 12 and "saved 24 tokens" in error  # 19 bytes and five tokens
    # From the converted form and with streamed weights as well: a session belongs to weights, not to a folder.
    for more in ((), (f"--checkpoint={converted}",), ("--stream_weights",)):
        rest, _ = _answer(capsys, f"--resume_session={tmp_path / 'a'}", "--max_tokens=7", *more)
        assert begun["ids"] + rest["ids"] == whole["ids"], more
        assert rest["num_prompt_tokens"] == 24


def test_a_prompt_after_a_session_follows_its_tokens(capsys, tmp_path):
    begun, _ = _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=5", f"--save_session={tmp_path / 'a'}")
    folder = f"--resume_session={tmp_path / 'a'}"
    followed, _ = _answer(capsys, folder, "--prompt= And then?", "--max_tokens=6", f"--save_session={tmp_path / 'b'}")
    assert followed["num_prompt_tokens"] == 19 + 5 + 10
    text = bytes([*PROMPT.encode(), *begun["ids"], *b" And then?"]) if max(begun["ids"]) < 256 else None
    if text is not None:  # every id is a byte, so that the same can be asked at once
        at_once, _ = _answer(capsys, f"--prompt={text.decode('latin-1')}", "--max_tokens=6")
        assert at_once["ids"] == followed["ids"]


def test_refusals_name_the_session_and_what_to_do(capsys, tmp_path):
    folder = tmp_path / "a"
    _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=3", f"--save_session={folder}")
    code, _, error = _main(capsys, f"--prompt={PROMPT}", f"--save_session={folder}")
    assert code == 2 and "already holds a session; give a new folder" in error
    code, _, error = _main(capsys, f"--resume_session={tmp_path / 'none'}")
    assert code == 2 and "is not a complete save" in error
    other = Path(__file__).parent / "golden/tiny_k3"
    code, _, error = _main(capsys, f"--resume_session={folder}", f"--checkpoint={other}")
    assert code == 2 and "is a session of another model" in error
    large = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(large.read_bytes())
    raw[len(raw) // 2] ^= 1
    large.write_bytes(raw)
    code, _, error = _main(capsys, f"--resume_session={folder}")
    assert code == 2 and "damaged" in error


def test_other_weights_of_the_same_shape_are_refused(capsys, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in TINY.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    name = next(path for path in other.glob("*.safetensors"))
    raw = bytearray(name.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    begin, end = next(
        info["data_offsets"]
        for tensor, info in json.loads(raw[8 : 8 + header]).items()
        if tensor.endswith("embed_tokens.weight")
    )
    values = np.frombuffer(raw, np.uint8, end - begin, 8 + header + begin)
    values[:2] ^= 1
    name.write_bytes(raw)
    _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=3", f"--save_session={tmp_path / 'a'}")
    code, _, error = _main(capsys, f"--resume_session={tmp_path / 'a'}", f"--checkpoint={other}")
    assert code == 2 and "is a session of other weights" in error


def test_streamed_weights_give_the_resident_answer_and_report_the_cache(capsys, converted):
    wanted, _ = _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=6")
    for folder in (TINY, converted):
        for gib in (8.0, 0.001):
            got, error = _answer(
                capsys,
                f"--checkpoint={folder}",
                f"--prompt={PROMPT}",
                "--max_tokens=6",
                "--stream_weights",
                f"--expert_cache_gib={gib}",
            )
            assert got["ids"] == wanted["ids"]
            assert "found in the cache; read" in error


def test_streaming_says_when_the_expert_cache_is_too_small(capsys):
    code, _, error = _main(capsys, f"--prompt={PROMPT}", "--stream_weights", "--expert_cache_gib=0")
    assert code == 2 and "give at least" in error


def test_checksums_are_compared_unless_switched_off(capsys, tmp_path, converted):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(converted, folder)
    # Of a layer: how Orbax splits a group over files differs from run to run, so that the largest of all may be top's.
    data = max(folder.glob("weights/layer_*/**/d/*"), key=os.path.getsize)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    arguments = (f"--checkpoint={folder}", f"--prompt={PROMPT}", "--max_tokens=2", *SETTINGS)
    code, _, error = _main(capsys, *arguments)
    assert code == 2 and "is damaged" in error and "layer_" in error
    assert _main(capsys, *arguments, "--verify_checksums=off")[0] == 0


def test_ctrl_c_saves_what_there_is(capsys, tmp_path, monkeypatch):
    whole, _ = _answer(capsys, f"--prompt={PROMPT}", "--max_tokens=12")
    folder, step = tmp_path / "a", Run.__next__

    def interrupted_after_four(run):
        if len(run.steps) == 4:
            raise KeyboardInterrupt
        return step(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "__next__", interrupted_after_four)
        arguments = (*SETTINGS, f"--prompt={PROMPT}", "--max_tokens=12", f"--save_session={folder}")
        code, out, _ = _main(capsys, *arguments)
    begun = json.loads(out)
    assert code == 130 and begun["ids"] == whole["ids"][:4]
    rest, _ = _answer(capsys, f"--resume_session={folder}", "--max_tokens=8")
    assert begun["ids"] + rest["ids"] == whole["ids"]


def test_ctrl_c_before_the_prompt_is_read_says_that_nothing_was_saved(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "collect", lambda *arguments: None)
    code, _, error = _main(capsys, f"--prompt={PROMPT}", f"--save_session={tmp_path / 'a'}")
    assert code == 2 and "nothing was saved: no session: the run stopped before its prompt was read" in error
    assert list(tmp_path.iterdir()) == []
