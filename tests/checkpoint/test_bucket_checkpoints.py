"""Whole checkpoints and sessions in a bucket: converted, loaded, exported, decoded from, resumed."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import maxmoe as mm
from maxmoe import decode
from maxmoe.checkpoint import convert as convert_module
from maxmoe.checkpoint import object_storage
from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.export import export
from maxmoe.checkpoint.safetensors_header import CheckpointError
from tests.checkpoint.s3_server import ROOT as BUCKET

GOLDEN = Path(__file__).resolve().parents[1] / "golden/tiny_k3"


@pytest.fixture(scope="module")
def published(client):
    """The golden checkpoint in the bucket, with a licence."""
    folder = object_storage.connect(f"{BUCKET}/whole/published")
    object_storage.upload_folder(GOLDEN, folder)
    (folder / "LICENSE").write_text("terms")
    return str(folder)


@pytest.fixture(scope="module")
def converted(published):
    """What was converted from bucket to bucket, and what was said."""
    said = []
    convert(published, f"{BUCKET}/whole/orbax", verify=True, say=said.append)
    return f"{BUCKET}/whole/orbax", said


def _assert_same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


def test_bucket_to_bucket_keeps_every_bit(published, converted, tmp_path):
    target, said = converted
    assert any("LICENSE" in line for line in said) and said[-1].endswith("verified")
    model = mm.Transformer(mm.load_config(target))
    wanted = mm.load_params(GOLDEN, model)
    _assert_same(mm.load_params(published, model), wanted)
    _assert_same(mm.load_params(target, model), wanted)
    export(target, tmp_path / "back")
    _assert_same(mm.load_params(tmp_path / "back", model), wanted)
    with pytest.raises(ValueError, match="export writes to a disk"):
        export(target, f"{BUCKET}/whole/back")


def test_conversion_into_a_bucket_goes_on_where_it_was(published, monkeypatch):
    folder = object_storage.connect(f"{BUCKET}/whole/again")
    save, saved = convert_module.save_arrays, []

    def stop_at_the_third(place, *arguments):
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(place)
        save(place, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "save_arrays", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            convert(published, folder)
    model = mm.Transformer(mm.load_config(GOLDEN))
    with pytest.raises(CheckpointError, match="was not finished"):
        mm.load_params(folder, model)
    said = []
    convert(published, folder, say=said.append)
    assert sum("complete, kept" in line for line in said) == 2
    _assert_same(mm.load_params(folder, model), mm.load_params(GOLDEN, model))


def test_damage_in_a_bucket_is_named(converted):
    target, _ = converted
    folder = object_storage.connect(f"{BUCKET}/whole/damaged")
    for name in object_storage.list_objects(target):
        (folder / name).write_bytes((object_storage.connect(target) / name).read_bytes())
    sizes = {name: info["size"] for name, info in object_storage.list_objects(folder).items()}
    data = max((name for name in sizes if "/d/" in name and "layer_002" in name), key=sizes.get)
    raw = bytearray((folder / data).read_bytes())
    raw[len(raw) // 2] ^= 16
    (folder / data).write_bytes(bytes(raw))
    with pytest.raises(CheckpointError, match="layer_002: .* is damaged"):
        mm.load_params(folder, mm.Transformer(mm.load_config(folder)))


def test_decode_from_a_bucket_and_keep_its_session_there(converted, capsys, tmp_path):
    target, _ = converted

    def answer(*arguments):
        with flagsaver.flagsaver():
            code = decode.main(flags.FLAGS(["decode", "--json", "--seed=3", "--max_len=64", *arguments]))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    shutil.copytree(GOLDEN, tmp_path / "local")
    prompt = ("--prompt=Once", "--max_tokens=6")
    wanted = answer(f"--checkpoint={tmp_path / 'local'}", *prompt)
    session = f"{BUCKET}/whole/session"
    begun = answer(f"--checkpoint={target}", "--prompt=Once", "--max_tokens=2", f"--save_session={session}")
    rest = answer(f"--checkpoint={target}", "--stream_weights", "--max_tokens=4", f"--resume_session={session}")
    assert begun["ids"] + rest["ids"] == wanted["ids"]
