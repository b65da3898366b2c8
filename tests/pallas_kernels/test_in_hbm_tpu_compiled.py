"""A kernel that reads one layer of a stack, in a loop over layers, for a chip whose vector memory holds the stack.

None of it may be moved there: the kernel reads little of it, and the loop would move it whole for every layer. What
comes of it in a whole model is in tests/planning/test_full_size.py.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.moe_experts_tpu import Mxfp4Experts, moe_experts_tpu
from tools.aot_compile import compile_for, is_available

LAYERS = 8


@pytest.mark.skipif(bool(is_available("v6e")), reason=str(is_available("v6e")))
def test_stacked_experts_stay_in_hbm():
    array, rows, num_experts, dim, hidden = jax.ShapeDtypeStruct, 16, 4, 512, 512
    shapes = 2 * [(hidden, dim // 2), (hidden, dim // 32)] + [(dim, hidden // 2), (dim, hidden // 32)]
    experts = Mxfp4Experts(*(array((LAYERS, num_experts, *shape), jnp.uint8) for shape in shapes))

    def fn(x, groups, experts):
        return jax.lax.fori_loop(0, LAYERS, lambda i, x: moe_experts_tpu(x, groups, experts, i, 4.0, 25.0), x)

    args = array((rows, dim), jnp.bfloat16), array((num_experts,), jnp.int32), experts
    text = compile_for("v6e", fn, *args).as_text()
    for stack in experts:
        *lead, rows, columns = stack.shape
        for dims in ((*lead, rows, columns), (*lead, columns, rows)):  # the kernel reads scales transposed
            on_chip = re.search(rf"\[{','.join(map(str, dims))}\]{{[^}}]*S\(1\)", text)
            assert on_chip is None, f"{on_chip[0]} of {stack}"
