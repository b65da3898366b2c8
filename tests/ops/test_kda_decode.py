"""One-token KDA on slots, by every implementation, against the layer's ops taken row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops.kda_decode import kda_decode
from pallas_kernels import kda_decode_gpu, kda_decode_tpu
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.kda_decode_reference import BOUND, EPS, decode_inputs, plain_decode

TPU = pytest.param(
    "pallas_tpu",
    marks=pytest.mark.skipif(
        jax.__version_info__ < (0, 12), reason="the TPU interpreter before jax 0.12 can stop for ever"
    ),
)
IMPLEMENTATIONS = ("xla", TPU, "pallas_gpu")
FIELDS = ("output", "state", "conv")


@pytest.fixture
def interpreted(monkeypatch):
    """Makes the process believe in the platform of a kernel, whose memory is NaN before it is written."""
    kernels = {
        "pallas_tpu": (kda_decode_tpu, "kda_decode_tpu", pltpu.InterpretParams(uninitialized_memory="nan")),
        "pallas_gpu": (kda_decode_gpu, "kda_decode_gpu", True),
    }

    def become(implementation):
        if implementation in kernels:
            module, name, mode = kernels[implementation]
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=mode))
            monkeypatch.setattr(jax, "default_backend", lambda: implementation.removeprefix("pallas_"))

    return become


def _decode(implementation, lower_bound=BOUND):
    return jax.jit(functools.partial(kda_decode, lower_bound=lower_bound, norm_eps=EPS, implementation=implementation))


def _check(given, rows, weights, state, conv, slots, lower_bound=BOUND):
    """Named slots and their outputs as the layer's ops give them; all else as it was, and 0 for padding."""
    out, new_state, new_conv = given
    dtype = rows[0].dtype
    assert out.dtype == dtype and new_state.dtype == jnp.float32 and new_conv.dtype == conv.dtype
    real = np.flatnonzero(slots >= 0)
    named, others = slots[real], np.setdiff1d(np.arange(state.shape[0]), slots)
    assert not np.any(np.delete(np.asarray(out, np.float32), real, 0)), "output of padding"
    assert_same_bits(new_state[others], state[others], "states that are not named")
    assert_same_bits(new_conv[others], conv[others], "conv states that are not named")
    if not real.size:
        return
    expected, states, convs = plain_decode([x[real] for x in rows], weights, state[named], conv[named], lower_bound)
    # All float32: sums of 128 terms in another order. In bfloat16 q, k, v and o are rounded in both, and a sum that
    # stands at the middle between two values may fall to either.
    tolerance = {"atol": 2e-5, "rtol": 1e-5} if dtype == jnp.float32 else {"atol": 0.02, "rtol": 2**-7}
    assert_close(out[real], expected, **tolerance, label="output")
    assert_close(new_state[named], states, atol=1e-5 if dtype == jnp.float32 else 0.02, label="state")
    assert_same_bits(new_conv[named], convs, "conv")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "heads", "lower_bound"), [(jnp.float32, 3, BOUND), (jnp.float32, 1, None), (jnp.bfloat16, 8, BOUND)]
)
def test_kda_decode_equals_the_layer_and_touches_only_named_slots(
    implementation, dtype, heads, lower_bound, interpreted
):
    interpreted(implementation)
    slots = np.asarray([4, -1, 0, 2, -1], np.int32)
    rows, weights, state, conv = decode_inputs(0, 5, heads, 6, dtype)
    rows = [x.at[1].set(jnp.nan) for x in rows]  # padding may hold anything
    state, conv = state.at[np.array([1, 3, 5])].set(jnp.nan), conv.at[np.array([1, 3, 5])].set(jnp.nan)
    given = _decode(implementation, lower_bound)(*rows, *weights, state, conv, slots)
    _check(given, rows, weights, state, conv, slots, lower_bound)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [[-1, -1], [-1, 1], [2, -1], [1, 0]])
def test_kda_decode_padding_anywhere(implementation, slots, interpreted):
    interpreted(implementation)
    rows, weights, state, conv = decode_inputs(1, 2, 1, 3, jnp.float32)
    state, conv = state.at[0].set(jnp.nan), conv.at[0].set(jnp.nan)
    if 0 in slots:  # slot 0 is what an index of padding must not reach; named, it must hold numbers
        state, conv = decode_inputs(1, 2, 1, 3, jnp.float32)[2:]
    slots = np.asarray(slots, np.int32)
    _check(_decode(implementation)(*rows, *weights, state, conv, slots), rows, weights, state, conv, slots)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kda_decode_nan_of_one_sequence_stays_in_it(implementation, interpreted):
    interpreted(implementation)
    rows, weights, state, conv = decode_inputs(2, 3, 2, 3, jnp.float32)
    slots, decode = np.asarray([1, 2, 0], np.int32), _decode(implementation)
    clean = decode(*rows, *weights, state, conv, slots)
    bad = decode(*[x.at[1].set(jnp.nan) for x in rows], *weights, state, conv.at[2].set(jnp.nan), slots)
    for row in (0, 2):
        assert_same_bits(bad[0][row], clean[0][row], f"output of row {row}")
        assert_same_bits(bad[1][slots[row]], clean[1][slots[row]], f"state of row {row}")
    assert np.isnan(bad[0][1]).all() and np.isnan(bad[1][2]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kda_decode_in_slots_equals_rows_bit_for_bit(dtype):
    """Where the slots lie moves no bit: layers of one stack, all of one shape, share one program."""
    rows, weights, state, conv = decode_inputs(3, 3, 2, 12, dtype)
    decode = _decode("xla")
    given = [decode(*rows, *weights, state, conv, np.arange(first, first + 3, dtype=np.int32)) for first in (0, 3, 9)]
    for first, (out, new_state, new_conv) in zip((0, 3, 9), given, strict=True):
        here = slice(first, first + 3)
        moved = state.at[:3].set(state[here]), conv.at[:3].set(conv[here])
        wanted = decode(*rows, *weights, *moved, np.arange(3, dtype=np.int32))
        for name, x, y in zip(FIELDS, (out, new_state[here], new_conv[here]), wanted, strict=True):
            assert_same_bits(x, y if name == "output" else y[:3], f"{name} of slots from {first}")


def test_kda_decode_updates_donated_states_in_place():
    rows, weights, state, conv = decode_inputs(4, 2, 1, 64, jnp.bfloat16)
    fn = functools.partial(kda_decode, lower_bound=BOUND, norm_eps=EPS)
    lowered = jax.jit(fn, donate_argnums=(10, 11)).lower(*rows, *weights, state, conv, np.zeros(2, np.int32))
    memory = lowered.compile().memory_analysis()
    # Some copies of two of the 64 states; never a second cache of 4 MiB.
    assert memory.temp_size_in_bytes < state.nbytes / 4, f"{memory.temp_size_in_bytes} bytes beside {state.nbytes}"
    assert memory.alias_size_in_bytes >= state.nbytes + conv.nbytes


def test_kda_decode_says_what_does_not_belong_together():
    rows, weights, state, conv = decode_inputs(5, 2, 2, 3, jnp.float32)
    decode, slots = _decode(None), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="gate has shape"):
        decode(*rows[:4], rows[4][:, :128], rows[5], *weights, state, conv, slots)
    with pytest.raises(ValueError, match=r"\[N, 2, 128, 128\]"):
        decode(*rows, *weights, state[:, :1], conv, slots)
    with pytest.raises(NotImplementedError, match="kda_decode: implementation='pallas_tpu' cannot run: it runs on tpu"):
        _decode("pallas_tpu")(*rows, *weights, state, conv, slots)


@pytest.mark.parametrize(
    ("name", "heads", "says"), [("pallas_tpu", 25, "25 heads"), ("pallas_gpu", 2, "states of bfloat16")]
)
def test_kda_decode_named_kernel_says_why_it_cannot_run(name, heads, says, interpreted):
    interpreted(name)
    rows, weights, state, conv = decode_inputs(6, 1, heads, 1, jnp.float32)
    if name == "pallas_gpu":
        state = state.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=says):
        _decode(name)(*rows, *weights, state, conv, np.zeros(1, np.int32))


@pytest.mark.parametrize("lower_bound", [BOUND, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kda_decode_has_the_bits_of_the_layers_ops(dtype, lower_bound):
    rows, weights, state, conv = decode_inputs(7, 3, 4, 3, dtype)
    given = _decode("xla", lower_bound)(*rows, *weights, state, conv, np.arange(3, dtype=np.int32))
    wanted = jax.jit(functools.partial(plain_decode, lower_bound=lower_bound))(rows, weights, state, conv)
    for name, x, y in zip(FIELDS, given, wanted, strict=True):
        assert_same_bits(x, y, name)
