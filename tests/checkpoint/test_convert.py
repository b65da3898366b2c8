"""Conversion keeps every bit, carries what belongs to the weights, and says what is wrong before it writes."""

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.export import export
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader
from maxmoe.checkpoint.safetensors_writer import write_checkpoint
from maxmoe.checkpoint.sources import INDEX_NAME, OrbaxSource, group_folder
from maxmoe.checkpoint.stored_arrays import manifest_path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"


def _tensors(folder):
    with CheckpointReader(folder) as reader:
        return {name: np.array(reader.read(name)) for name in reader.tensors}


def _publish(folder, tensors, name="tiny_k3", max_shard_bytes=None):
    write_checkpoint(folder, tensors, max_shard_bytes)
    shutil.copy(GOLDEN / name / "config.json", folder)
    return folder


def _assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert tensor.tobytes() == right[name].tobytes(), name


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A conversion of tiny K3 and what was said."""
    target, said = tmp_path_factory.mktemp("converted") / "orbax", []
    convert(GOLDEN / "tiny_k3", target, verify=True, say=said.append)
    return target, said


def test_every_weight_comes_back_from_orbax(converted):
    target, _ = converted
    model = mm.Transformer(mm.load_config(target))
    from_orbax, published = mm.load_params(target, model), mm.load_params(GOLDEN / "tiny_k3", model)
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), *map(jax.device_get, (from_orbax, published))
    )
    assert jax.tree.all(same)


def test_published_dtypes_are_kept(converted):
    target, _ = converted
    dtypes = {name: str(info.dtype) for (_, name), info in OrbaxSource(target).weights.items()}
    assert dtypes["experts/gate_packed"] == dtypes["experts/gate_scale"] == "uint8"
    assert dtypes["mixer/q_proj"] == "bfloat16" and dtypes["mixer/dt_bias"] == "float32"


@pytest.mark.parametrize("name", ["tiny_k3", "tiny_k31"])
@pytest.mark.parametrize("max_shard_bytes", [None, 200_000])
def test_there_and_back_is_bit_identical(tmp_path, name, max_shard_bytes):
    convert(GOLDEN / name, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back", max_shard_bytes=max_shard_bytes or 10**9)
    _assert_same_tensors(_tensors(tmp_path / "back"), _tensors(GOLDEN / name))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1 or max_shard_bytes is None
    model = mm.Transformer(mm.load_config(tmp_path / "back"))
    mm.load_params(tmp_path / "back", model)


def test_files_beside_the_weights_are_carried_and_the_licence_named(tmp_path):
    source = _publish(tmp_path / "source", _tensors(GOLDEN / "tiny_k3"))
    for name, text in {
        "LICENSE": "terms",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "x",
        "old.bin": "w",
    }.items():
        (source / name).write_text(text)
    said = []
    convert(source, tmp_path / "target", say=said.append)
    found = {path.name for path in (tmp_path / "target").iterdir() if path.is_file()}
    assert found == {"LICENSE", "tokenizer_config.json", "chat_template.jinja", "config.json", INDEX_NAME}
    assert [line for line in said if "terms" in line] == [
        f"the weights are under the terms of {source / 'LICENSE'}, copied along"
    ]
    export(tmp_path / "target", tmp_path / "back")
    assert (tmp_path / "back/LICENSE").read_text() == "terms"
    assert not (tmp_path / "back" / INDEX_NAME).exists()


def test_without_a_licence_file_it_is_said_where_the_terms_stand(converted):
    _, said = converted
    assert sum("has no licence file" in line and "proprietary" in line for line in said) == 1


def test_progress_is_in_bytes_with_the_time_left(converted):
    _, said = converted
    progress = [line for line in said if " GB/s, " in line]
    assert len(progress) == 10 and "100 %" in progress[-1] and progress[-1].endswith("0:00 left")


def test_vision_tensors_travel_along(tmp_path):
    vision = {"vision_tower.patch_embed.proj.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)}
    source = _publish(tmp_path / "source", _tensors(GOLDEN / "tiny_k3") | vision)
    convert(source, tmp_path / "orbax", verify=True)
    mm.load_params(tmp_path / "orbax", mm.Transformer(mm.load_config(source)))
    export(tmp_path / "orbax", tmp_path / "back")
    _assert_same_tensors(_tensors(tmp_path / "back"), _tensors(source))


def test_prefix_padding_and_absent_offsets_come_back_as_they_were(tmp_path):
    tensors = {name.removeprefix("language_model."): values for name, values in _tensors(GOLDEN / "tiny_k31").items()}
    offset = next(name for name in tensors if name.endswith("indexer.k_norm.bias"))
    decay = next(name for name in tensors if name.endswith("A_log"))
    del tensors[offset]
    tensors[decay] = np.pad(tensors[decay], (0, 9))
    source = _publish(tmp_path / "source", tensors, "tiny_k31")
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back")
    _assert_same_tensors(_tensors(tmp_path / "back"), tensors)


def test_a_second_run_keeps_what_is_complete(converted):
    target, _ = converted
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file() and path.name != INDEX_NAME}
    said = []
    convert(GOLDEN / "tiny_k3", target, say=said.append)
    assert sum("complete, kept" in line for line in said) == 10
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_killed_run_leaves_nothing_of_its_files(tmp_path):
    """The process was killed between writing a file under another name and renaming it."""
    target = tmp_path / "killed"
    target.mkdir()
    halves = [target / f"{INDEX_NAME}.e1d62f1a.tmp", target / "conversion.json.0123abcd.tmp"]
    for path in halves:
        path.write_text('{"half')
    convert(GOLDEN / "tiny_k3", target)
    assert not any(path.exists() for path in halves)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", INDEX_NAME, "weights"]


def test_an_unfinished_target_is_not_loaded(converted, tmp_path):
    target, _ = converted
    shutil.copytree(target, tmp_path / "half")
    (tmp_path / "half" / INDEX_NAME).unlink()
    model = mm.Transformer(mm.load_config(target))
    with pytest.raises(CheckpointError, match="was not finished: .* Run the conversion again"):
        mm.load_params(tmp_path / "half", model)


def test_target_of_another_source_is_refused(converted, tmp_path):
    target, _ = converted
    with pytest.raises(ValueError, match="was converted from another source"):
        convert(GOLDEN / "tiny_k31", target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"is not empty \(thesis.txt\)"):
        convert(GOLDEN / "tiny_k3", tmp_path / "full")


def test_two_writers_are_refused(tmp_path):
    (tmp_path / "target").mkdir()
    with open(tmp_path / "target" / ".conversion.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing it"):
            convert(GOLDEN / "tiny_k3", tmp_path / "target")


def test_unfit_source_is_refused_before_anything_is_written(tmp_path):
    tensors = _tensors(GOLDEN / "tiny_k3")
    del tensors["language_model.model.norm.weight"]
    tensors["language_model.extra"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError) as caught:
        convert(_publish(tmp_path / "source", tensors), tmp_path / "target")
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "target").exists()


def test_nan_scales_are_refused(tmp_path):
    tensors = _tensors(GOLDEN / "tiny_k3")
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name].flat[3] = 255
    with pytest.raises(CheckpointError, match="1 scale bytes are 255, which is NaN"):
        convert(_publish(tmp_path / "source", tensors), tmp_path / "target")


# ---- Damage done to a converted checkpoint ---------------------------------------------------------------------------


def _data_file(folder):
    return max(
        (path for path in Path(folder).rglob("*") if path.parent.name == "d"), key=lambda path: path.stat().st_size
    )


def test_a_damaged_layer_is_named(converted, tmp_path):
    target, _ = converted
    shutil.copytree(target, tmp_path / "damaged")
    for group in ("layer_003", "layer_006"):
        path = _data_file(group_folder(tmp_path / "damaged", group))
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 16
        path.write_bytes(raw)
    model = mm.Transformer(mm.load_config(target))
    with pytest.raises(CheckpointError) as caught:
        mm.load_params(tmp_path / "damaged", model)
    assert "layer_003: " in str(caught.value) and "layer_006: " in str(caught.value)
    assert "layer_004" not in str(caught.value)
    mm.load_params(tmp_path / "damaged", model, verify="off")  # by choice
    with pytest.raises(CheckpointError, match="layer_003"):
        convert(GOLDEN / "tiny_k3", tmp_path / "damaged", verify=True)


def test_layers_of_two_checkpoints_do_not_mix(converted, tmp_path):
    target, _ = converted
    tensors = _tensors(GOLDEN / "tiny_k3")
    other = {name: values ^ 1 if name.endswith("weight_packed") else values for name, values in tensors.items()}
    convert(_publish(tmp_path / "source", other), tmp_path / "mixed")
    for path in (
        group_folder(tmp_path / "mixed", "layer_004"),
        manifest_path(group_folder(tmp_path / "mixed", "layer_004")),
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(group_folder(target, "layer_004"), group_folder(tmp_path / "mixed", "layer_004"))
    shutil.copy(manifest_path(group_folder(target, "layer_004")), tmp_path / "mixed/weights")
    with pytest.raises(CheckpointError, match="layer_004.* damaged, or comes from another checkpoint"):
        mm.load_params(tmp_path / "mixed", mm.Transformer(mm.load_config(target)))


def test_a_missing_layer_is_named(converted, tmp_path):
    target, _ = converted
    shutil.copytree(target, tmp_path / "less")
    shutil.rmtree(group_folder(tmp_path / "less", "layer_002"))
    with pytest.raises(CheckpointError, match="layer_002"):
        mm.load_params(tmp_path / "less", mm.Transformer(mm.load_config(target)))


def test_checkpoint_of_another_model_lists_what_does_not_fit(converted):
    target, _ = converted
    model = mm.Transformer(mm.load_config(GOLDEN / "tiny_k31"))
    with pytest.raises(CheckpointError, match="does not hold this model"):
        mm.load_params(target, model)


# ---- The command -----------------------------------------------------------------------------------------------------


def test_command(tmp_path):
    command = [sys.executable, "-m", "maxmoe.checkpoint.convert", "--source", str(GOLDEN / "tiny_k3")]
    done = subprocess.run([*command, "--target", str(tmp_path / "new")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "100 %" in done.stdout and not done.stderr
    wrong = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert wrong.returncode == 2 and "--target is missing" in wrong.stderr
    unknown = subprocess.run([*command, "--targets=x"], capture_output=True, text=True, cwd=ROOT)
    assert unknown.returncode == 2 and "maxmoe.checkpoint.convert: Unknown command line flag" in unknown.stderr


MEMORY = """
import re, sys
from pathlib import Path
import maxmoe as mm
from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.hf_names import published_pieces
from maxmoe.config import load_config
list(published_pieces(mm.Transformer(load_config(sys.argv[1]))))
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
convert(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_group(tmp_path):
    # Eight layers of 25 MiB of experts in files of 8 MiB, after case F05: a converter that holds all of them fails.
    text = json.loads((GOLDEN / "tiny_k3/config.json").read_text())
    inner = text.get("text_config", text)
    inner |= {"moe_intermediate_size": 2048, "routed_expert_hidden_size": 1024}
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(text))
    from maxmoe.checkpoint.hf_names import PREFIX, published_pieces
    from maxmoe.checkpoint.safetensors_header import numpy_dtype

    rng = np.random.default_rng(0)
    tensors = {
        PREFIX + piece.name: rng.integers(100, 120, piece.shape, np.uint8).astype(np.uint8)
        if piece.dtypes[0] == "U8"
        else np.zeros(piece.shape, numpy_dtype(piece.dtypes[0]))
        for piece in published_pieces(mm.Transformer(mm.load_config(config_file)))
    }
    total = sum(values.nbytes for values in tensors.values())
    write_checkpoint(tmp_path / "source", tensors, 8 * 2**20)
    shutil.copy(config_file, tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "source"), str(tmp_path / "target")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    source = OrbaxSource(tmp_path / "target", "off")
    largest = max(sum(info.num_bytes for info in group.arrays.values()) for group in source.groups.values())
    grown = int(done.stdout.split()[-1]) * 1024
    assert total > 6 * largest > 100 * 2**20
    # Twice a group, and what threads and libraries of the first save take: about 80 MiB.
    assert grown < 2 * largest + 120 * 2**20
