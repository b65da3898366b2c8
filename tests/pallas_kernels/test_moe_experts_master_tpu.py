"""Training of experts against bfloat16 masters: the forward pass of the packed ones, gradients straight through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import mxfp4
from maxmoe.ops.situ import situ_glu
from pallas_kernels.moe_experts_master_tpu import MasterExperts, quantised_forward
from pallas_kernels.tiling import MoeExpertsTpuTiling
from tests.ops.closeness import assert_close

POISONED = pltpu.InterpretParams(uninitialized_memory="nan")
SMALL = MoeExpertsTpuTiling(rows=16, hidden=256, width=256, units=128, outputs=128)
DIM, HIDDEN = 512, 768


def _plain(x, weights, group_sizes):
    """float32 throughout."""
    dot, out, row = functools.partial(jnp.dot, precision="highest"), [], 0
    for expert, size in enumerate(group_sizes):
        gate, up = (dot(x[row : row + size], weight[expert].T) for weight in weights[:2])
        out.append(dot(situ_glu(gate, up, 4.0, 25.0), weights[2][expert].T))
        row += size
    return jnp.concatenate([*out, jnp.zeros((x.shape[0] - row, x.shape[1]))])


@pytest.mark.parametrize("method", ["float4", "float8"])
def test_quantised_forward_passes_gradients_straight_to_the_masters(method):
    rng = np.random.default_rng(0)
    group_sizes = (17, 0, 13)  # a tile is shared, an expert has no rows, rows follow the last group
    x, dout = (jnp.asarray(0.5 * rng.standard_normal((35, DIM)), jnp.bfloat16) for _ in range(2))
    masters = MasterExperts(
        *(
            jnp.asarray(0.05 * rng.standard_normal((3, *shape)), jnp.bfloat16)
            for shape in ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))
        )
    )

    @jax.jit
    def run(x, masters, dout):
        sizes = jnp.asarray(group_sizes, jnp.int32)
        ffn = functools.partial(quantised_forward, method=method, tiling=SMALL, interpret=POISONED)
        out, pull = jax.vjp(lambda x, m: ffn(x, sizes, m, mxfp4.quantize, 4.0, 25.0), x, masters)
        return out, *pull(dout)

    out, dx, dmasters = jax.block_until_ready(run(x, masters, dout))
    packed = MasterExperts(*(mxfp4.dequantize(*mxfp4.quantize(master)) for master in masters))
    expected, pull = jax.vjp(lambda x, w: _plain(x, w, group_sizes), x.astype(jnp.float32), packed)
    dx_expected, dmasters_expected = pull(dout.astype(jnp.float32))
    # What comes out after the last group means nothing.
    pairs = {"out": (out[:30], expected[:30]), "dx": (dx[:30], dx_expected[:30])}
    pairs |= {f"d{name}": (getattr(dmasters, name), getattr(dmasters_expected, name)) for name in MasterExperts._fields}
    for label, (given, wanted) in pairs.items():
        assert given.dtype == jnp.bfloat16
        # Hidden rows, their gradients and results each round to bfloat16 (2^-9): relative to the largest.
        assert_close(given, wanted, atol=2**-7 * float(jnp.abs(wanted).max()), label=label)
    assert not np.asarray(dmasters.gate[1]).any()


def test_quantised_forward_says_why_it_refuses():
    masters = MasterExperts(*(jnp.zeros((2, 320, 320), jnp.bfloat16) for _ in range(3)))
    with pytest.raises(NotImplementedError, match="D=320"):
        quantised_forward(
            jnp.zeros((4, 320), jnp.bfloat16), jnp.zeros(2, jnp.int32), masters, mxfp4.quantize, 4.0, 25.0
        )
