"""Where Pallas for NVIDIA GPUs is imported and called: the one file to change when JAX moves it.

The kernels here use the Triton lowering of `pl.pallas_call`: pointers gathered by index, `wgmma` and asynchronous
copies chosen by the compiler, one source for Hopper and later. JAX 0.12 announces that this lowering will be removed (a
DeprecationWarning of the name jax-pallas-triton, when a kernel is lowered), JAX 0.10 does not yet.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MIN_DOT = 16  # the smallest tile side that a matrix unit takes
WHOLE = pl.BlockSpec(memory_space=pl.ANY)  # an operand that the body indexes itself

load = triton.load
store = triton.store
inline_asm = triton.elementwise_inline_asm


def kernel_call(
    body: Callable[..., None],
    *,
    grid: Sequence[int],
    out_shape: Any,
    num_operands: int,
    num_warps: int,
    num_stages: int,
    interpret: Any,
    name: str,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` of a body that sees whole arrays, compiled by Triton, or run on any platform by `interpret`.

    Args:
      body: Takes references to the operands and then to the results; picks its part by `pl.program_id`.
      num_stages: Steps of a loop whose loads are in flight at once.
      interpret: None or False to compile; anything else is handed on, and fills results with NaN before the body runs.
      aliases: Result that takes over the memory of an operand, by position.
    """
    many = isinstance(out_shape, list | tuple)
    call = pl.pallas_call(
        body,
        grid=tuple(grid),
        in_specs=[WHOLE] * num_operands,
        out_specs=[WHOLE] * len(out_shape) if many else WHOLE,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        interpret=interpret or False,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name=name,
    )

    @functools.wraps(call)
    def without_notice(*operands):
        with warnings.catch_warnings():
            # Said once in this file; users of a kernel cannot act on it.
            warnings.filterwarnings("ignore", message=".*Triton backend is deprecated", category=DeprecationWarning)
            return call(*operands)

    return without_notice


def barrier(interpret: Any) -> None:
    """Makes what the program's threads wrote to memory visible to all of them. Interpreted, nothing is to be done."""
    if not interpret:
        triton.debug_barrier()


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product of two matrices into float32: float32 operands by full float32 arithmetic, bfloat16 ones on `wgmma`."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def split_bf16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two bfloat16 numbers, right to about 2^-17 of x."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def dot_three(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of float32 matrices by three of bfloat16: what is left out is about 2^-16 of the terms."""
    (a_high, a_low), (b_high, b_low) = split_bf16(a), split_bf16(b)
    return dot(a_high, b_high) + (dot(a_high, b_low) + dot(a_low, b_high))
