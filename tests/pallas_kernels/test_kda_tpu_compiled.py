"""KDA kernels compiled for TPUs that this machine does not have: cost, spills, and no copy of tokens or caches."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kda_chunk_tpu import kda_chunk_tpu
from pallas_kernels.kda_decode_tpu import kda_decode_tpu
from tools.aot_compile import TOPOLOGIES, is_available, static_cost

HERE = "tests.pallas_kernels.test_kda_tpu_compiled"
CHIPS = [
    pytest.param(chip, marks=pytest.mark.skipif(bool(is_available(chip)), reason=str(is_available(chip))))
    for chip in TOPOLOGIES
]
HEADS = 24  # of 96, four ways sharded
GROUPS = {"v5p": {6: 3, 12: 6, 24: 6}, "v6e": {6: 6, 12: 12, 24: 12}, "tpu7x": {6: 6, 12: 12, 24: 12}}  # heads together
# 0.6 of the bundles of a plain kernel of one head, all float32 products, and decays that overflow below -1.4 nats.
MOST_BUNDLES = {"v5p": 1760, "v6e": 1655, "tpu7x": 1116}


def chunk(heads=str(HEADS)):
    """Prefill of one sequence, tokens as projections give them: heads side by side."""
    array, heads = jax.ShapeDtypeStruct, int(heads)
    tokens = (1, 8192, heads * 128)

    def fn(q, k, v, g, beta, state):
        by_head = (x.reshape(1, 8192, heads, 128) for x in (q, k, v, g))
        out, state = kda_chunk_tpu(*by_head, beta, state)
        return out.reshape(tokens), state

    low = array(tokens, jnp.bfloat16)
    beta, state = array((1, 8192, heads), jnp.float32), array((1, heads, 128, 128), jnp.float32)
    return fn, (low, low, low, array(tokens, jnp.float32), beta, state)


def decode():
    """64 sequences, their states donated."""
    array = jax.ShapeDtypeStruct
    batch, channels = 64, HEADS * 128
    low = array((batch, channels), jnp.bfloat16)
    weights = [array(x, jnp.float32) for x in ((3, channels, 4), (channels,), (HEADS,), (128,))]
    caches = [array((batch, HEADS, 128, 128), jnp.float32), array((batch, 3, 3, HEADS, 128), jnp.bfloat16)]
    fn = functools.partial(kda_decode_tpu, lower_bound=-5.0, norm_eps=1e-5)
    args = (*[low] * 5, array((batch, HEADS), jnp.bfloat16), *weights, *caches, array((batch,), jnp.int32))
    return jax.jit(fn, donate_argnums=(10, 11)), args


@pytest.mark.slow
@pytest.mark.parametrize("heads", [6, 12, 24])
@pytest.mark.parametrize("chip", CHIPS)
def test_kda_chunk_costs_little_and_copies_no_tokens(chip, heads):
    cost = static_cost(chip, f"{HERE}:chunk:{heads}")
    (kernel,) = cost.kernels
    each = kernel.bundles / GROUPS[chip][heads]
    assert each <= MOST_BUNDLES[chip], f"{each:.0f} bundles per head and chunk"
    assert kernel.spills == 0
    assert kernel.vmem_bytes < 16 * 2**20, f"{kernel.vmem_bytes / 2**20:.1f} MiB"
    # Step sizes by program, 128 lanes per token, and the work list: no copy of q, k, v or g, of 12 MiB and more.
    beta_bytes = heads // GROUPS[chip][heads] * 8192 * 128 * 4
    assert cost.temp_bytes < beta_bytes + 2 * 2**20, f"{cost.temp_bytes / 2**20:.1f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_kda_decode_costs_little_and_copies_no_cache(chip):
    cost = static_cost(chip, f"{HERE}:decode")
    (kernel,) = cost.kernels
    assert kernel.spills == 0
    assert kernel.vmem_bytes < 16 * 2**20, f"{kernel.vmem_bytes / 2**20:.1f} MiB"
    # The rows of the tokens by head; states are 96 MiB, inputs of convolutions 3.4 MiB.
    assert cost.temp_bytes < 3 * 2**20, f"{cost.temp_bytes / 2**20:.1f} MiB"
