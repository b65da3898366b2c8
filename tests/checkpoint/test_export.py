"""Export of trained weights: the published layout, and experts rounded to MXFP4 only when asked, by the stated rule."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint.export import export
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader
from maxmoe.checkpoint.save import save_params
from maxmoe.checkpoint.sources import OrbaxSource
from maxmoe.ops import mxfp4

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/tiny_k3"


@pytest.fixture(scope="module")
def model():
    return mm.Transformer(mm.load_config(GOLDEN))


@pytest.fixture(scope="module")
def params(model):
    return mm.load_params(GOLDEN, model)


def _with_float_experts(params, change=lambda values: values):
    """The tree as training holds it: experts dequantised, and changed."""
    trained = jax.tree.map(lambda leaf: leaf, params)
    for stack in trained.values():
        for weights in stack.values() if isinstance(stack, dict) else ():
            for name in ("gate", "up", "down") if isinstance(weights, dict) and "gate_packed" in weights else ():
                values = mxfp4.dequantize(weights.pop(f"{name}_packed"), weights.pop(f"{name}_scale"))
                weights[name] = change(values)
    return trained


def _tensors(folder):
    with CheckpointReader(folder) as reader:
        return {name: np.array(reader.read(name)) for name in reader.tensors}


@pytest.mark.parametrize("scan", [False, True])
def test_saved_weights_load_again_in_either_form(tmp_path, model, params, scan):
    other = mm.Transformer(model.config, scan)
    tree = mm.load_params(GOLDEN, other)
    save_params(tmp_path / "saved", tree, other, carried_from=GOLDEN)
    again = mm.load_params(tmp_path / "saved", model)
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), *map(jax.device_get, (again, params))
    )
    assert jax.tree.all(same)
    assert mm.load_config(tmp_path / "saved") == model.config


def test_a_tree_that_is_not_the_models_is_refused(tmp_path, model, params):
    less = {name: leaf for name, leaf in params.items() if name != "final_norm"} | {"bonus": params["final_norm"]}
    with pytest.raises(ValueError, match=r"missing \['final_norm'\], extra \['bonus'\]"):
        save_params(tmp_path / "saved", less, model)
    save_params(tmp_path / "once", params, model)
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        save_params(tmp_path / "once", params, model)


def test_float_experts_are_refused_unless_rounding_is_asked_for(tmp_path, model, params):
    save_params(tmp_path / "saved", _with_float_experts(params), model)
    with pytest.raises(ValueError, match="24 expert weights are stored as floats.* Give --requantize_experts"):
        export(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_untrained_experts_round_back_to_the_same_values(tmp_path, model, params):
    save_params(tmp_path / "saved", _with_float_experts(params), model)
    said = []
    export(tmp_path / "saved", tmp_path / "out", requantize_experts=True, say=said.append)
    back = mm.load_params(tmp_path / "out", model)
    values, expected = _with_float_experts(back), _with_float_experts(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), values, expected))
    assert sum("rounded to MXFP4, relative error 0.00%" in line for line in said) == 24


def test_rounding_is_that_of_an_independent_four_bit_float(tmp_path, model, params):
    noise = np.random.default_rng(0)
    trained = _with_float_experts(params, lambda v: v + 0.01 * noise.standard_normal(v.shape).astype(np.float32))
    save_params(tmp_path / "saved", trained, model)
    said = []
    export(tmp_path / "saved", tmp_path / "out", requantize_experts=True, say=said.append)
    export(tmp_path / "saved", tmp_path / "again", requantize_experts=True)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    tensors, source = _tensors(tmp_path / "out"), OrbaxSource(tmp_path / "saved")
    stem = "language_model.model.layers.3.block_sparse_moe.experts.5.w1.weight_"
    values = source.read("layer_003", "experts/gate", (5,)).reshape(-1, 32)
    largest = np.abs(values).max(axis=-1, keepdims=True).astype(np.float64)
    exponent = np.floor(np.log2(largest)) - 2
    codes = np.clip(values / 2.0**exponent, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    scale = tensors[stem + "scale"]
    np.testing.assert_array_equal(scale.reshape(-1, 1), exponent + 127)
    packed = codes.view(np.uint8).reshape(*scale.shape[:-1], -1) & 15
    np.testing.assert_array_equal(tensors[stem + "packed"], packed[..., 0::2] | packed[..., 1::2] << 4)
    errors = [float(line.split("relative error ")[1].split("%")[0]) for line in said if "rounded" in line]
    assert len(errors) == 24 and 1 < min(errors) <= max(errors) < 20


def test_values_that_are_not_finite_are_refused(tmp_path, model, params):
    save_params(tmp_path / "saved", _with_float_experts(params, lambda v: v.at[0, 1, 2, 3].set(jnp.nan)), model)
    with pytest.raises(
        CheckpointError, match=r"layer_\d+/experts/\w+, expert \(1,\): holds values that are not finite"
    ):
        export(tmp_path / "saved", tmp_path / "out", requantize_experts=True)
    assert not (tmp_path / "out/model.safetensors").exists()


def test_command(tmp_path, model, params):
    save_params(tmp_path / "saved", params, model)
    command = [sys.executable, "-m", "maxmoe.checkpoint.export", "--source", str(tmp_path / "saved")]
    done = subprocess.run([*command, "--target", str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "618 tensors" in done.stdout, done.stderr
    again = subprocess.run([*command, "--target", str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT)
    assert again.returncode == 2 and "already holds model.safetensors" in again.stderr
