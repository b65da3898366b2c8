"""KDA of rows split over devices: the same numbers, states and gradients as on one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxmoe.ops import kda_shards
from maxmoe.ops.kda import kda_chunked
from maxmoe.ops.short_conv import short_conv
from tests.ops import kda_shards_on_devices as devices
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.eight_devices import run_on_eight_devices
from tests.ops.kda_reference import NAMES, random_inputs, reference_forward, reference_gradients
from tests.ops.quick_jit import quick_jit

KDA_CASES = ("bound", "uniform", "weak", "unbounded", "often kept, else forgotten", "repeated keys", "padded")
RUNS = [(mesh, vma) for mesh in devices.MESHES for vma in ((False, True) if mesh in devices.CHECKED else (False,))]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Name -> the arrays that a process of eight devices found."""
    path = tmp_path_factory.mktemp("kda_shards") / "results.npz"
    run_on_eight_devices(devices.__file__, path)
    with np.load(path) as file:
        arrays = dict(file)
    results = {}
    for name, x in arrays.items():
        if not name.endswith("@"):
            results.setdefault(name.rpartition("#")[0], []).append(x.astype(jnp.dtype(str(arrays[f"{name}@"]))))
    return results


@functools.cache
def _expected_kda(case):
    inputs, cotangents = devices.kda_cases()[case], devices.kda_cotangents()
    outputs, states = reference_forward(*inputs)
    return outputs, states[-1], *reference_gradients(*inputs, *cotangents)


@pytest.mark.multidevice
@pytest.mark.parametrize(("mesh", "check_vma"), RUNS)
def test_kda_over_shards_equals_the_recurrence_and_its_gradients(found, mesh, check_vma):
    assert set(KDA_CASES) == set(devices.kda_cases())
    for case in KDA_CASES:
        given, expected = found[f"kda/{mesh}/{check_vma}/{case}"], _expected_kda(case)
        for name, x, exact in zip(("output", "final state", *NAMES), given, expected, strict=True):
            # Float32 sums of some tens of terms of order 1, a few times over; the gradient of a gate is a
            # difference of such sums, hence relative to the largest value of the tensor.
            atol = 1e-5 * max(1, np.abs(exact).max())
            assert_close(x, exact, atol=atol, label=f"{case}: {name}")


@pytest.mark.multidevice
def test_kda_over_shards_leaves_the_state_of_a_row_without_tokens(found):
    state = devices.kda_cases()["padded"][5]
    row = devices.LENGTHS.index(0)
    for mesh in devices.MESHES:
        assert_same_bits(found[f"kda/{mesh}/False/padded"][1][row], state[row], mesh)


@pytest.mark.multidevice
@pytest.mark.parametrize("gate", ["uniform", "weak"])
def test_kda_over_shards_equals_one_device_at_the_width_of_the_model(found, gate):
    inputs = devices.wide_inputs(gate)
    expected, one_device = reference_forward(*inputs), quick_jit(kda_chunked)(*inputs)
    for name, given, exact, chunked in zip(
        ("output", "state"), found[f"wide/{gate}"], (expected[0], expected[1][-1]), one_device, strict=True
    ):
        # Products of 128 terms round in float32: within 1e-5 of the largest value, as kda_chunked is itself.
        assert_close(given, exact, atol=1e-5 * np.abs(exact).max(), label=name)
        assert_close(given, chunked, atol=1e-5 * np.abs(exact).max(), label=f"{name}, against one device")


@pytest.mark.multidevice
def test_kda_over_shards_hides_later_tokens_and_other_rows(found):
    (clean, clean_state), (later, _), (row, row_state) = found["clean"], found["later"], found["row"]
    assert np.isnan(later[:, -1]).all() and np.isnan(row[1]).all()
    assert_same_bits(later[:, :-9], clean[:, :-9], "outputs before the last shard, which is NaN")
    for i in (0, 2):
        assert_same_bits(row[i], clean[i], "outputs beside a row of NaN")
        assert_same_bits(row_state[i], clean_state[i], "state beside a row of NaN")


@pytest.mark.multidevice
def test_kda_over_shards_rounds_its_outputs_once(found):
    (half, half_state), (full, full_state) = found["bfloat16"], found["of bfloat16"]
    assert_same_bits(half, full.astype(jnp.bfloat16), "output")
    assert_same_bits(half_state, full_state, "state")


@pytest.mark.multidevice
def test_kda_over_shards_takes_less_memory_on_more_shards_in_few_rounds(found):
    bytes_by_shards = [int(found[f"compiled/{n}"][1]) for n in (1, 2, 4, 8)]
    # Tokens halve with every doubling; states and one chunk's products stay as they are. From one shard to two,
    # the columns that carry the map are added.
    for (fewer, more), share in zip(itertools.pairwise(bytes_by_shards), (0.75, 0.6, 0.65), strict=True):
        assert more < share * fewer, bytes_by_shards
    # Offsets move in log2(n) rounds, transitions in one less, and once to the next shard.
    for num_shards, permutes in ((1, 0), (2, 2), (4, 4), (8, 6)):
        counts = found[f"compiled/{num_shards}"][0].tolist()
        assert counts[0] == permutes and counts[1] <= 1 and counts[2] == 0, (num_shards, counts)


def test_kda_over_one_shard_is_kda_chunked():
    inputs = random_inputs(7, 13)
    for check_vma in (False, True):
        sharded = jax.jit(devices.sharded_kda(devices.make_mesh(1, 1), check_vma))
        one_device = jax.jit(functools.partial(kda_chunked, chunk_size=devices.CHUNK))
        for given, expected in zip(sharded(*inputs), one_device(*inputs), strict=True):
            assert_same_bits(given, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_of_a_kernel_equal_the_joined_run(dtype):
    q, k, v, g, beta, start = random_inputs(8, 11)
    tokens = (q, k, jnp.asarray(v, dtype), g, beta)
    run = functools.partial(kda_chunked, chunk_size=4, implementation="xla")
    joined = kda_shards._own_runs(run, tokens, start, None)
    apart = kda_shards._own_runs(run, tokens, start, "pallas_tpu")
    for given, expected in zip(jax.tree.leaves(apart), jax.tree.leaves(joined), strict=True):
        assert given.dtype == expected.dtype == jnp.float32
        assert_close(given, expected, atol=5e-6)  # other shapes, other orders of sums of order 1


@pytest.mark.multidevice
@pytest.mark.parametrize(("mesh", "check_vma"), RUNS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_conv_over_shards_equals_the_whole_row_and_its_gradients(found, mesh, check_vma, dtype):
    for per_shard in devices.CONV_TOKENS[mesh]:
        inputs, cotangents = devices.conv_inputs(per_shard * devices.MESHES[mesh][0], dtype)
        (y, state), grads = devices.conv_with_gradients(short_conv, inputs, cotangents)
        given_y, given_state, *given_grads = found[f"conv/{mesh}/{check_vma}/{per_shard}/{dtype}"]
        label = f"{per_shard} tokens per shard"
        assert_close(given_y, y, atol=1e-6, label=label)  # four products of order 1 in float32
        assert_same_bits(given_state, state, label)
        for name, given, expected in zip(("x", "weight", "state"), given_grads, grads, strict=True):
            # bfloat16 gradients sum up to 5 rounded terms of order 1, in an order of their own; those of the
            # taps are sums of up to a thousand products in float32.
            rounding = 2**-6 if dtype == "bfloat16" and name != "weight" else 1e-6
            size = np.abs(np.asarray(expected, np.float32)).max()
            assert_close(given, expected, atol=rounding * size, label=f"{label}: gradient of {name}")


@pytest.mark.multidevice
@pytest.mark.parametrize("num_shards", [2, 3, 6])
def test_short_conv_over_shards_counts_right_over_every_split(found, num_shards):
    y, state = found[f"counted/{num_shards}/6"]
    assert y.ravel().tolist() == [4, 11, 20, 30, 40, 50]
    assert state.ravel().tolist() == [4, 5, 6]
    assert found[f"counted/{num_shards}/2"][1].ravel().tolist() == [0, 1, 2]


def test_short_conv_over_one_shard_is_short_conv():
    for num_tokens in (1, 2, 7):
        inputs, _ = devices.conv_inputs(num_tokens, "float32")
        given = jax.jit(devices.sharded_conv(devices.make_mesh(1, 1), True))(*inputs)
        for x, expected in zip(given, jax.jit(short_conv)(*inputs), strict=True):
            assert_close(x, expected, atol=1e-6)  # as above


def test_conv_halo_refuses_shards_of_too_few_inputs():
    halo = jax.shard_map(
        lambda x, first: kda_shards.conv_halo(x, first, "seq"),
        mesh=devices.make_mesh(1, 1),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    first = np.arange(6, dtype=np.float32).reshape(1, 3, 2)
    assert_same_bits(halo(first + 1, first), first)
    with pytest.raises(ValueError, match=r"x_last of shape \(1, 2, 2\) and first of shape \(1, 3, 2\)"):
        halo(first[:, :2], first)
