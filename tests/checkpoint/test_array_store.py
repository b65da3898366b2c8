"""Arrays come back bit for bit, in whole or in part, also through Orbax alone; and what cannot be saved is refused."""

import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxmoe.checkpoint import array_store, chunks, files, stored_arrays
from maxmoe.checkpoint.array_store import remove_leftovers, save_arrays
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.stored_arrays import StoredArrays, is_complete, manifest_path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/checkpoint/save_in_process.py"
DTYPES = ["uint8", "int8", "int32", "uint32", "float16", "bfloat16", "float32", "bool", "float8_e4m3fn"]


def same_bits(left, right) -> bool:
    """Equal dtype, shape and bytes: NaNs and signed zeros count too."""
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    target = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, [*shape, target.itemsize], np.uint8)
    return raw.view(target)[..., 0]


# Round trips


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_read_returns_the_bits_that_were_saved(tmp_path, kind):
    arrays = {}
    for i, dtype in enumerate(DTYPES):
        arrays[f"layers.{i}/mlp/{dtype}"] = random_array(dtype, (5, 3, 7), i)
        arrays[f"scalars/{dtype}.x"] = random_array(dtype, (), i)
    arrays["zeros"] = np.zeros((64, 64), np.float32)  # equal to what a missing chunk would mean
    arrays["a name with % # ? and é"] = np.arange(3, dtype=np.int32)
    given_arrays = {name: jnp.asarray(value) for name, value in arrays.items()} if kind == "jax" else arrays
    save_arrays(tmp_path / "x", given_arrays, {"step": 3, "words": ["é"]})
    stored = StoredArrays(tmp_path / "x")
    assert stored.meta == {"step": 3, "words": ["é"]}
    assert list(stored.arrays) == sorted(arrays)
    for name, value in arrays.items():
        got = stored.read(name)
        assert isinstance(got, np.ndarray) and same_bits(got, value), name
        assert (stored.arrays[name].shape, stored.arrays[name].num_bytes) == (value.shape, value.nbytes)
    assert stored.bytes_read == sum(value.nbytes for value in arrays.values())
    stored.check_everything()


def test_save_arrays_takes_arrays_in_any_memory_order(tmp_path):
    array = random_array("float32", (6, 10))
    arrays = {"fortran": np.asfortranarray(array), "strided": array[::2, ::3], "reversed": array[::-1], "view": array.T}
    save_arrays(tmp_path / "x", arrays, {})
    stored = StoredArrays(tmp_path / "x")
    for name, value in arrays.items():
        assert same_bits(stored.read(name), np.ascontiguousarray(value)), name


@pytest.mark.parametrize("name", ["plain", "a space", "50%", "per%20cent", "c#", "a&b=c", "ü", "x.y", "{1}"])
def test_folder_may_have_any_name(tmp_path, name):
    array = random_array("uint8", (4, 5))
    save_arrays(tmp_path / name / name, {"a": array}, {})
    assert same_bits(StoredArrays(tmp_path / name / name).read("a"), array)


def test_folder_may_be_relative_and_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = random_array("uint8", (4, 5))
    save_arrays("x", {"a": array}, {})
    stored = StoredArrays("x")
    assert stored.label == "x" and is_complete("x")
    monkeypatch.chdir("/")
    assert same_bits(stored.read("a"), array)
    assert is_complete(tmp_path / "x") and not is_complete("x")


def test_save_may_be_moved_with_its_manifest(tmp_path):
    array = random_array("uint8", (4, 5))
    save_arrays(tmp_path / "x", {"a": array}, {})
    (tmp_path / "x").rename(tmp_path / "y")
    manifest_path(tmp_path / "x").rename(manifest_path(tmp_path / "y"))
    assert same_bits(StoredArrays(tmp_path / "y").read("a"), array)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("/data/a b/c%", "file:///data/a%20b/c%25/"), ("/data/x/", "file:///data/x/"), ("/a#b", "file:///a%23b/")],
)
def test_kvstore_escapes_what_means_something_in_a_url(folder, expected):
    assert files.kvstore(folder) == expected


# Parts


SHAPE, CHUNK_BYTES = (6, 8, 5), 80


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """An array in 2 x 4 chunks per entry, a scalar, and what was saved of them."""
    arrays = {"a": random_array("float32", SHAPE), "s": random_array("bfloat16", ())}
    folder = tmp_path_factory.mktemp("parts") / "x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK_BYTES)
        save_arrays(folder, arrays, {}, frozenset({"a"}))
    stored = StoredArrays(folder)
    assert stored.arrays["a"].chunk == (1, 4, 5)
    return stored, arrays


def _indices(size):
    ends = st.one_of(st.none(), st.integers(-size - 2, size + 2))
    return st.one_of(st.integers(0, size - 1), st.slices(size).map(lambda s: slice(s.start, s.stop)), ends.map(slice))


@given(st.integers(0, 3).flatmap(lambda count: st.tuples(*map(_indices, SHAPE[:count]))), st.booleans())
def test_read_of_a_part_equals_indexing(parts, index, checked):
    stored, arrays = parts
    part = StoredArrays(stored.folder, verify="full" if checked else "off").read("a", index)
    assert isinstance(part, np.ndarray) and same_bits(part, arrays["a"][index])


@given(st.integers(0, 3).flatmap(lambda count: st.tuples(*map(_indices, SHAPE[:count]))), st.integers(1, 1000))
def test_read_of_a_part_does_not_depend_on_how_much_is_fetched_at_once(parts, index, fetch_bytes):
    stored, arrays = parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "_FETCH_BYTES", fetch_bytes)
        assert same_bits(stored.read("a", index), arrays["a"][index])


def test_read_of_a_scalar(parts):
    stored, arrays = parts
    assert same_bits(stored.read("s", ()), arrays["s"])
    with pytest.raises(IndexError, match="1 indices for an array of shape"):
        stored.read("s", (0,))


@pytest.mark.parametrize("index", [(6,), (-1,), (0, 8), (0, 0, 0, 0), (slice(0, 6, 2),), (slice(None, None, -1),)])
def test_read_refuses_an_index_that_it_does_not_know(parts, index):
    with pytest.raises(IndexError, match="ind"):
        parts[0].read("a", index)


def test_read_refuses_an_unknown_name(parts):
    with pytest.raises(KeyError, match="no array 'b'"):
        parts[0].read("b")


def test_read_counts_whole_chunks_and_keeps_only_what_was_asked(parts):
    stored = StoredArrays(parts[0].folder)
    part = stored.read("a", (2, 1, 3))
    assert stored.bytes_read == CHUNK_BYTES
    assert part.base is None or part.base.nbytes < CHUNK_BYTES


def test_read_from_threads(parts):
    stored, arrays = StoredArrays(parts[0].folder), parts[1]
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(20):
            i = draw.randrange(SHAPE[0])
            if not same_bits(stored.read("a", (i,)), arrays["a"][i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert stored.bytes_read == 8 * 20 * arrays["a"][0].nbytes


def test_read_sees_what_was_saved_anew_in_the_same_place(tmp_path):
    """Nothing outlives a StoredArrays in a cache."""
    for seed in range(3):
        array = random_array("uint8", (40, 50), seed)
        save_arrays(tmp_path / "x", {"a": array}, {})
        for verify in ("full", "off"):
            assert same_bits(StoredArrays(tmp_path / "x", verify=verify).read("a"), array)
        manifest_path(tmp_path / "x").unlink()


# Orbax alone


def test_orbax_alone_reads_the_same_values(tmp_path):
    arrays = {"a/b.c": random_array("bfloat16", (8, 6)), "a/d": random_array("uint8", (4, 3)), "s": np.float32(3)}
    arrays["jax"] = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    save_arrays(tmp_path / "x", arrays, {}, frozenset({"a/d"}))
    with ocp.StandardCheckpointer() as checkpointer:
        standard = checkpointer.restore(tmp_path / "x")
    with ocp.PyTreeCheckpointer() as checkpointer:
        pytree = checkpointer.restore(tmp_path / "x")
    for restored in (standard, pytree):
        assert same_bits(restored["a"]["b.c"], arrays["a/b.c"])
        assert same_bits(restored["a"]["d"], arrays["a/d"])
        assert same_bits(restored["s"], arrays["s"])
        assert same_bits(restored["jax"], arrays["jax"])


# What cannot be saved, and what lies there already


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no arrays were given"),
        ({"a/b": np.ones(2), "a.b": np.ones(2)}, "would lie in the same place"),
        ({"a/b/c": np.ones(2), "a": np.ones(2)}, "'a' and 'a/b/c' would lie in the same place"),
        ({"a": np.ones(2), "a/b": np.ones(2)}, "'a' and 'a/b' would lie in the same place"),
        ({"": np.ones(2)}, "has an empty part"),
        ({"a//b": np.ones(2)}, "has an empty part"),
        ({"/a": np.ones(2)}, "has an empty part"),
        ({"a": np.ones((0, 3))}, r"a: shape \[0, 3\] holds no values"),
        ({"a": np.ones(3, ">i4")}, "not in this machine's byte order"),
    ],
)
def test_save_arrays_refuses_what_it_could_not_give_back(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message):
        save_arrays(tmp_path / "x", arrays, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a*", "a?", "[a]"])
def test_save_arrays_refuses_a_folder_that_orbax_takes_for_a_pattern(tmp_path, name):
    with pytest.raises(ValueError, match="give a folder without them"):
        save_arrays(tmp_path / name / "x", {"a": np.ones(2)}, {})
    assert not list(tmp_path.iterdir())


def test_save_arrays_refuses_to_overwrite(tmp_path):
    array = random_array("uint8", (4, 5))
    save_arrays(tmp_path / "x", {"a": array}, {})
    with pytest.raises(ValueError, match="already holds saved arrays"):
        save_arrays(tmp_path / "x", {"a": array + 1}, {})
    assert same_bits(StoredArrays(tmp_path / "x").read("a"), array)
    assert remove_leftovers(tmp_path / "x") == []


def test_stored_arrays_refuses_an_unknown_verify(tmp_path):
    with pytest.raises(ValueError, match="'full', 'sampled', 'off'"):
        StoredArrays(tmp_path, verify="yes")


def test_remove_leftovers_touches_nothing_else(tmp_path):
    """Names that only start alike belong to others: layer_0001 is not of layer_000."""
    array = random_array("uint8", (4, 5))
    save_arrays(tmp_path / "layer_0001", {"a": array}, {})
    others = ["layer_0001.part-3", "layer_000.txt", "layer_000.part-two", "layer_000.manifest.json.bak", "a_layer_000"]
    others += ["layer_00", "layer_000-old", "layer_0001.orbax-checkpoint-tmp", "Layer_000", "layer_000.manifest.jsonl"]
    own = ["layer_000", "layer_000.orbax-checkpoint-tmp", "layer_000.orbax-checkpoint-tmp-17", "layer_000.part-0"]
    own += ["layer_000.part-12.0a1b2c3d.tmp", "layer_000.manifest.json.89abcdef.tmp"]
    for name in (*others, *own):
        if "part" in name or "json" in name or name.endswith("txt"):
            (tmp_path / name).write_text("x")
        else:
            (tmp_path / name / "d").mkdir(parents=True)
            (tmp_path / name / "d/file").write_text("x")
    before = {path.name for path in tmp_path.iterdir()}
    removed = remove_leftovers(tmp_path / "layer_000")
    assert {path.name for path in removed} == set(own)
    assert {path.name for path in tmp_path.iterdir()} == before - set(own)
    StoredArrays(tmp_path / "layer_0001").check_everything()
    assert remove_leftovers(tmp_path / "not there/x") == []


def test_save_arrays_that_fails_leaves_no_complete_save(tmp_path, monkeypatch):
    array = random_array("uint8", (4, 5))

    def fail(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(array_store.chunks, "checksums", fail)
        with pytest.raises(OSError, match="No space left"):
            save_arrays(tmp_path / "x", {"a": array}, {})
    assert not is_complete(tmp_path / "x")
    with pytest.raises(CheckpointError, match="not a complete save"):
        StoredArrays(tmp_path / "x")
    save_arrays(tmp_path / "x", {"a": array}, {})
    assert same_bits(StoredArrays(tmp_path / "x").read("a"), array)
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.manifest.json"}


def test_save_arrays_leaves_a_programs_random_numbers_alone(parts):
    random.seed(5)
    expected = random.Random(5).random()
    StoredArrays(parts[0].folder, verify="sampled").read("a")
    assert random.random() == expected


# Donation and memory


def test_save_arrays_keeps_values_that_the_next_step_overwrites(tmp_path):
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    for seed in range(3):
        x = jnp.asarray(np.random.default_rng(seed).standard_normal((300, 257), np.float32))
        saved = np.array(x)
        save_arrays(tmp_path / f"{seed}", {"x": x}, {})
        for _ in range(3):
            x = step(x)
        x.block_until_ready()
        assert same_bits(StoredArrays(tmp_path / f"{seed}").read("x"), saved)


def test_save_arrays_keeps_values_that_the_program_overwrites(tmp_path):
    """The array is not copied before it is written, so the save must be over when the call returns."""
    x = random_array("uint8", (64, 1 << 16))
    saved = x.copy()
    save_arrays(tmp_path / "x", {"x": x}, {})
    x[:] = 0
    assert same_bits(StoredArrays(tmp_path / "x").read("x"), saved)


def test_save_gb_is_enough_for_the_largest_shard():
    """Orbax refuses an array of more bytes than it may have on its way."""
    shapes = {"small": (3,), "large": (896, 3072, 1792)}
    arrays = {name: jax.ShapeDtypeStruct(shape, np.uint8) for name, shape in shapes.items()}
    assert array_store._save_gb(arrays) == 5
    assert array_store._save_gb({"small": arrays["small"]}) == 1


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_save_and_read_need_little_more_memory_than_the_array(tmp_path, kind):
    num_bytes = 600_000_000
    grown = {}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    for action in ("save", "read"):
        command = [sys.executable, str(SCRIPT), "memory", action, str(tmp_path / "x"), str(num_bytes), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        grown[action] = int(done.stdout.split()[-1])
    shutil.rmtree(tmp_path)  # or pytest keeps it for three runs
    # Saving holds what TensorStore has not written yet, up to all of it. Reading holds the result, and two parts on
    # their way with what decoding them takes.
    assert grown["save"] < 1.25 * num_bytes, grown
    assert grown["read"] < num_bytes + 2**29, grown
