"""The fused attention residual compiled for TPUs that this machine does not have: no spills, no copy of the bank."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attn_res_tpu import attn_res_norm_tpu
from tools.aot_compile import TOPOLOGIES, is_available, static_cost

HERE = "tests.pallas_kernels.test_attn_res_tpu_compiled"
CHIPS = [
    pytest.param(chip, marks=pytest.mark.skipif(bool(is_available(chip)), reason=str(is_available(chip))))
    for chip in TOPOLOGIES
]
PLACES, WIDTH = 9, 7168  # of K3.1


def mix(num_rows):
    """A step of that many tokens on one device."""
    array, rows = jax.ShapeDtypeStruct, int(num_rows)
    low = functools.partial(array, dtype=jnp.bfloat16)
    weight = array((WIDTH,), jnp.float32)
    fn = functools.partial(attn_res_norm_tpu, eps=1e-5, out_eps=1e-5)
    return fn, (low((rows, WIDTH)), low((PLACES, rows, WIDTH)), array((), jnp.int32), weight, weight)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [64, 1024])
@pytest.mark.parametrize("chip", CHIPS)
def test_attn_res_spills_nothing_and_copies_no_bank(chip, num_rows):
    cost = static_cost(chip, f"{HERE}:mix:{num_rows}")
    (kernel,) = cost.kernels
    assert kernel.spills == 0
    assert cost.temp_bytes < 2**20  # the bank has 8 MiB and more
