"""Sessions: what was interrupted goes on with the same bits, anywhere; what is not whole or not ours is refused."""

import dataclasses
import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint import session as session_lib
from maxmoe.checkpoint.array_store import remove_leftovers, save_arrays
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.session import Session, fingerprint_weights, grow_cache, load_session, save_session
from maxmoe.checkpoint.store import open_source
from maxmoe.checkpoint.stored_arrays import StoredArrays, is_complete, manifest_path
from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling import SamplingParams
from maxmoe.model.cache import from_plain, make_cache, to_plain

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("tiny_k3", "tiny_k31")
PROMPT = [(37 * i + 18) % 256 for i in range(30)]
BEFORE, TOTAL = 7, 24  # tokens of an answer until it is interrupted, and in all: the session has 37 tokens
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOTAL)
SAMPLED = SamplingParams(temperature=1.3, top_p=0.9, seed=2**40 + 3, max_tokens=TOTAL)
REST = TOTAL - BEFORE

CHILD = """
import sys, json, hashlib
import jax, numpy as np
import maxmoe as mm
from maxmoe.checkpoint.session import load_session, save_session
from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling import SamplingParams

def digests(session):
    leaves = jax.tree_util.tree_leaves_with_path((session.cache, session.logits))
    return {jax.tree_util.keystr(p): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for p, x in leaves}

source, folder = sys.argv[1:3]
model = mm.Transformer(mm.load_config(source))
"""


@functools.cache
def _model(name):
    return mm.Transformer(mm.load_config(ROOT / "tests/golden" / name))


@functools.cache
def _params(name):
    return mm.load_params(ROOT / "tests/golden" / name, _model(name), dtype="float32")


def _engine(name="tiny_k31"):
    return Engine(_model(name), _params(name), max_batch=1, max_len=300, prefill_chunk=16)


def _interrupted(name="tiny_k31", params=GREEDY):
    run = _engine(name).stream(PROMPT, params)
    for _ in range(BEFORE):
        next(run)
    return run.session()


@functools.cache
def _uninterrupted(name, params):
    steps = list(_engine(name).stream(PROMPT, params))
    assert len(steps) == TOTAL  # choose another prompt or seed where an answer ends early
    return steps


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A session of the tiny K3.1 after 37 tokens, drawn at random, and its folder. Nothing may continue it."""
    session = _interrupted(params=SAMPLED)
    folder = tmp_path_factory.mktemp("sessions") / "saved"
    save_session(folder, session, _model("tiny_k31"))
    return session, folder


def _leaves(session):
    leaves = jax.tree_util.tree_leaves_with_path((session.cache, session.logits))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _digests(session):
    return {name: hashlib.sha256(leaf.tobytes()).hexdigest() for name, leaf in _leaves(session).items()}


def _assert_same(got, wanted):
    left, right = _leaves(got), _leaves(wanted)
    assert left.keys() == right.keys()
    for name in right:
        assert (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape), name
        assert left[name].tobytes() == right[name].tobytes(), name
    assert [ids.tolist() for ids in got.token_ids] == [ids.tolist() for ids in wanted.token_ids]
    assert (got.seeds, dict(got.sampling), dict(got.meta)) == (wanted.seeds, dict(wanted.sampling), dict(wanted.meta))


def _noise(model, lengths, max_len, dtype):
    """A cache with random values, and zeros beyond the longest row."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        values = np.zeros(leaf.shape, leaf.dtype)
        used = values[:, :, : lengths.max()] if leaf.ndim == 4 else values
        used[...] = rng.integers(-1000, 1000, used.shape, np.int16)
        return jnp.asarray(values)

    shapes = jax.eval_shape(lambda: to_plain(make_cache(model.config, len(lengths), max_len, dtype)))
    return from_plain(jax.tree.map(fill, shapes), model.config.mla.kv_lora_rank).replace(lengths=jnp.asarray(lengths))


def _bytes_under(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _child(code, *arguments, devices=1):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
    command = [sys.executable, "-c", CHILD + code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _result(child):
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0, out
    return json.loads(out.splitlines()[-1])


# Resuming


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_saved_session_resumes_bit_for_bit(name, params, tmp_path):
    wanted = _uninterrupted(name, params)
    session = _interrupted(name, params)
    ids = PROMPT + [step.token_id for step in wanted[:BEFORE]]
    assert session.token_ids[0].tolist() == ids and session.num_tokens == 37
    save_session(tmp_path / "s", session, _model(name))
    loaded = load_session(tmp_path / "s", _model(name))
    _assert_same(loaded, session)
    rest = dataclasses.replace(params, seed=None, max_tokens=REST)  # the seed is the session's
    assert list(_engine(name).resume(loaded, [], rest)) == wanted[BEFORE:]


def test_resumes_in_a_larger_cache(saved):
    loaded = load_session(saved[1], _model("tiny_k31"), max_len=300)
    assert loaded.cache.max_len == 300
    steps = list(_engine().resume(loaded, [], dataclasses.replace(SAMPLED, max_tokens=REST)))
    wanted = _uninterrupted("tiny_k31", SAMPLED)[BEFORE:]
    assert [step.token_id for step in steps] == [step.token_id for step in wanted]
    # Sums over more slots may be rounded in another order.
    np.testing.assert_allclose([s.logprob for s in steps], [s.logprob for s in wanted], rtol=0, atol=1e-5)


def test_saving_is_over_before_buffers_are_donated(tmp_path):
    session = _interrupted()
    wanted = _digests(session)
    save_session(tmp_path / "s", session, _model("tiny_k31"))
    list(_engine().resume(session, [], GREEDY))  # overwrites the buffers that were saved
    assert _digests(load_session(tmp_path / "s", _model("tiny_k31"))) == wanted
    with pytest.raises(ValueError, match="continued already"):
        save_session(tmp_path / "t", session, _model("tiny_k31"))


# Forks


@pytest.mark.parametrize("n, seeds", [(0, None), (2, [1]), (1, [-1]), (1, [2**63])])
def test_fork_refuses(saved, n, seeds):
    with pytest.raises(ValueError, match="fork"):
        saved[0].fork(n, seeds)


# Other processes and meshes


def test_resumes_in_a_new_process_and_on_meshes(saved):
    session, folder = saved
    source = ROOT / "tests/golden/tiny_k31"
    resume = f"""
params = mm.load_params(source, model, dtype="float32")
engine = Engine(model, params, max_batch=1, max_len=300, prefill_chunk=16)
settings = SamplingParams(temperature=1.3, top_p=0.9, max_tokens={REST})
print(json.dumps(list(engine.resume(load_session(folder, model), [], settings))))
"""
    place = """
results = []
for shape in ((1, 4), (2, 2), (2, 1), (1, 2), (1, 3)):
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("seq", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    session = load_session(folder, model, mesh=mesh)
    kda, mla = session.cache.stacks[0][0], session.cache.stacks[0][-1]
    state, keys = (x.sharding.shard_shape(x.shape) for x in (kda.state, mla.index_keys))
    slots = mla.num_slots * mla.rows.latent.addressable_shards[0].data.size // mla.rows.latent.size
    results.append([[state[2], slots, keys[3]], digests(session)])
save_session(folder + "-again", session, model)
print(json.dumps(results))
"""
    children = _child(resume, source, folder), _child(place, source, folder, devices=8)
    steps = [mm.inference.request.Step(*step) for step in _result(children[0])]
    assert steps == _uninterrupted("tiny_k31", SAMPLED)[BEFORE:]
    results = _result(children[1])
    # Heads of KDA states, latent rows and index keys on one device, of 4, 256 and 256. Three do not divide these.
    assert [sizes for sizes, _ in results] == [
        [1, 64, 64],
        [2, 64, 64],
        [4, 128, 128],
        [2, 128, 128],
        [4, 256, 256],
    ]
    assert all(found == _digests(session) for _, found in results)
    _assert_same(load_session(f"{folder}-again", _model("tiny_k31")), session)


def test_a_kill_leaves_a_whole_session_or_none(saved, tmp_path):
    session, folder = saved
    code = """
session = load_session(folder, model)
print("ready", flush=True)
for i in range(10_000):
    save_session(f"{sys.argv[3]}/{i}", session, model)
"""
    rng = random.Random(7)
    for attempt in range(5):
        place = tmp_path / str(attempt)
        place.mkdir()
        child = _child(code, ROOT / "tests/golden/tiny_k31", folder, place)
        assert child.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.4))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        started = sorted({int(path.name.split(".")[0]) for path in place.iterdir()})
        for i in started:
            if not is_complete(place / str(i)):
                assert i == started[-1]  # those before it are whole
                with pytest.raises(CheckpointError, match="not a complete save"):
                    load_session(place / str(i), _model("tiny_k31"))
                save_session(place / str(i), session, _model("tiny_k31"))
                assert remove_leftovers(place / str(i)) == []
            if i >= started[-1] - 1:
                _assert_same(load_session(place / str(i), _model("tiny_k31")), session)


# What is refused


def test_another_model_is_refused_by_the_fields_that_differ(saved):
    _, folder = saved
    with pytest.raises(ValueError, match=r"another model.*indexer.head_dim.*absent here"):
        _load_flat(folder, _model("tiny_k3"))
    config = _model("tiny_k31").config.override("norm_eps=2e-5", "moe.top_k=2")
    with pytest.raises(ValueError) as caught:
        load_session(folder, mm.Transformer(config))
    text = str(caught.value)
    assert "norm_eps: 1e-05 in the session, 2e-05 here" in text and "moe.top_k: 3 in the session, 2 here" in text
    assert len(text.splitlines()) == 3
    with pytest.raises(ValueError, match="shapes"):
        save_session(f"{folder}-other", saved[0], _model("tiny_k3"))


def _load_flat(folder, model):
    try:
        load_session(folder, model)
    except ValueError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def test_other_weights_are_refused(saved, tmp_path):
    prints = {}
    for name in NAMES:
        with open_source(ROOT / "tests/golden" / name, _model(name)) as source:
            prints[name] = fingerprint_weights(source)
            assert prints[name] == fingerprint_weights(source)
    assert prints["tiny_k3"] != prints["tiny_k31"]
    ours = prints["tiny_k31"]
    save_session(tmp_path / "s", saved[0], _model("tiny_k31"), weights_fingerprint=ours)
    _assert_same(load_session(tmp_path / "s", _model("tiny_k31"), weights_fingerprint=ours), saved[0])
    for folder, given in ((tmp_path / "s", "other"), (tmp_path / "s", None), (saved[1], ours)):
        with pytest.raises(ValueError, match="other weights"):
            load_session(folder, _model("tiny_k31"), weights_fingerprint=given)


def test_places_sizes_and_kinds_are_checked(saved, tmp_path):
    session, folder = saved
    with pytest.raises(TypeError, match="JSON"):
        save_session(tmp_path / "s", dataclasses.replace(session, meta={"x": jnp}), _model("tiny_k31"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="already holds"):
        save_session(folder, session, _model("tiny_k31"))
    with pytest.raises(ValueError, match="max_len=36, and the session holds 37"):
        load_session(folder, _model("tiny_k31"), max_len=36)
    assert load_session(folder, _model("tiny_k31"), max_len=37).cache.max_len == 37
    with pytest.raises(CheckpointError, match="not a complete save"):
        load_session(tmp_path / "none", _model("tiny_k31"))
    save_arrays(tmp_path / "arrays", {"x": np.arange(3)}, {})
    with pytest.raises(CheckpointError, match="not a session"):
        load_session(tmp_path / "arrays", _model("tiny_k31"))
    wrong = dataclasses.replace(session, token_ids=(session.token_ids[0][:-1],))
    with pytest.raises(ValueError, match=r"holds \[37\] tokens, token_ids \[36\]"):
        save_session(tmp_path / "s", wrong, _model("tiny_k31"))


@pytest.mark.parametrize("kind", ["conv", "state", "rows", "index_keys", "lengths", "logits", "token_ids"])
def test_a_missing_array_is_named(saved, tmp_path, kind):
    _, folder = saved
    stored = StoredArrays(folder)
    gone = next(name for name in stored.arrays if name.split("/")[-1] == kind)
    arrays = {name: stored.read(name) for name in stored.arrays if name != gone}
    save_arrays(tmp_path / "s", arrays | {"stacks/9/0/rows": np.zeros(3)}, stored.meta)
    with pytest.raises(CheckpointError) as caught:
        load_session(tmp_path / "s", _model("tiny_k31"))
    assert f"{gone} is missing" in str(caught.value)
    assert "stacks/9/0/rows belongs to no layer" in str(caught.value)


def test_damage_is_found_and_named(saved, tmp_path):
    session, _ = saved
    folder = tmp_path / "s"
    save_session(folder, session, _model("tiny_k31"))
    state = np.asarray(session.cache.stacks[0][0].state).tobytes()
    data = next(path for path in folder.rglob("d/*") if state[:64] in path.read_bytes())
    content = bytearray(data.read_bytes())
    content[content.index(state[:64]) + 5] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="stacks/0/0/state is damaged"):
        load_session(folder, _model("tiny_k31"))
    manifest = manifest_path(folder)
    manifest.write_text(manifest.read_text().replace("37", "36", 1))
    with pytest.raises(CheckpointError, match="damaged"):
        load_session(folder, _model("tiny_k31"))


# Sizes


def test_several_rows_of_unequal_length(tmp_path):
    model, lengths = _model("tiny_k31"), np.array([5, 16, 1], np.int32)
    cache = _noise(model, lengths, 40, jnp.float32)
    rows = tuple(np.arange(num_tokens, dtype=np.int32) for num_tokens in lengths)
    session = Session(cache=cache, token_ids=rows, logits=jnp.ones((3, 320)), seeds=(1, 2, 3), meta={"name": "three"})
    save_session(tmp_path / "s", session, model)
    loaded = load_session(tmp_path / "s", model)
    _assert_same(loaded, session)
    with pytest.raises(ValueError, match="only one conversation"):
        loaded.fork(2)


def test_size_on_disk_does_not_depend_on_capacity(saved, tmp_path):
    session, folder = saved
    large = dataclasses.replace(session, cache=grow_cache(session.cache, 50_000))
    assert large.cache.max_len == 50_000
    save_session(tmp_path / "large", large, _model("tiny_k31"))
    # Orbax's own records vary by a kilobyte; the rows of the larger cache would be 34 megabytes.
    assert abs(_bytes_under(tmp_path / "large") - _bytes_under(folder)) < 10_000
    _assert_same(load_session(tmp_path / "large", _model("tiny_k31")), large)
    _assert_same(load_session(tmp_path / "large", _model("tiny_k31"), max_len=256), session)


@pytest.mark.slow
def test_a_long_session_in_a_cache_for_a_million_tokens(tmp_path):
    num_tokens, max_len = 200_003, 1_048_576
    model = mm.Transformer(mm.load_config(ROOT / "configs/tiny.py"))

    cache = _noise(model, np.array([num_tokens], np.int32), max_len, jnp.bfloat16)
    ids = np.arange(num_tokens, dtype=np.int32) % 500
    session = Session(cache=cache, token_ids=(ids,), logits=jnp.ones((1, 512)), seeds=(1,))
    save_session(tmp_path / "s", session, model)
    per_token = 3 * (40 + 16) * 2 + 4  # bytes: three full-attention layers, latent row and index key, and the id
    assert _bytes_under(tmp_path / "s") < 1.02 * num_tokens * per_token
    # An odd number of tokens does not make tiny chunks.
    assert max(info.num_bytes / len(info.checksums) * 16 for info in StoredArrays(tmp_path / "s").arrays.values()) > 4e6
    _assert_same(load_session(tmp_path / "s", model), session)


def test_module_knows_every_seed_that_sampling_allows():
    from maxmoe.inference.sampling import MAX_SEED

    assert session_lib._MAX_SEED == MAX_SEED
