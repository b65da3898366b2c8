"""The cache of latent rows in pages, in the layout from which TPU kernels fetch single rows.

A token's row is R latent values (512) and 64 shared ones. The parts lie in two arrays:

    latent_pages [num_pages, page_size, R / 128, 128]   a row is the last two axes
    shared_pages [num_pages, page_size / 4, 2, 128]     a group of four rows is the last two axes

A copy may start only between tiles of memory, and a tile covers the last two axes: so a row must fill them. 4 x 128 and
2 x 128 are tiles that XLA stores without padding, and in the second the shared parts of four rows lie one after the
other. Both arrays are reshapes of [num_pages, page_size, R] and [num_pages, page_size, 64], and together they hold 576
values per token and not one more. The price: a copy of a shared part brings along its three neighbours. (A row of
5 x 128 in one array would need one copy, not two; but XLA pads it to 8 x 128, and copies the whole cache to do so.)
"""

import jax
import jax.numpy as jnp

LANES = 128
SHARED_DIM = 64
GROUP_ROWS = 4  # tokens whose shared parts are copied together
GROUP_SHAPE = (2, LANES)


def pack_pages(rows: jax.Array, shared_dim: int = SHARED_DIM) -> tuple[jax.Array, jax.Array]:
    """Pages of whole rows [num_pages, page_size, R + 64] as (latent_pages, shared_pages), in plain JAX.

    On TPU this copies: use it to make a cache, not in a step.
    """
    num_pages, page_size, width = rows.shape
    latent, shared = jnp.split(rows, [width - shared_dim], axis=-1)
    latent = latent.reshape(num_pages, page_size, -1, LANES)
    return latent, shared.reshape(num_pages, page_size // GROUP_ROWS, *GROUP_SHAPE)


def unpack_pages(latent_pages: jax.Array, shared_pages: jax.Array) -> jax.Array:
    """The inverse of `pack_pages`: whole rows [num_pages, page_size, R + 64]."""
    num_pages, page_size = latent_pages.shape[:2]
    parts = (latent_pages, shared_pages.astype(latent_pages.dtype))
    return jnp.concatenate([part.reshape(num_pages, page_size, -1) for part in parts], axis=-1)


def pages_refusal(
    latent_pages: jax.ShapeDtypeStruct, shared_pages: jax.ShapeDtypeStruct, page_table: jax.ShapeDtypeStruct
) -> str | None:
    """Why rows cannot be fetched from pages of these shapes and dtypes, or None."""
    if latent_pages.dtype not in (jnp.bfloat16, jnp.float32) or shared_pages.dtype != latent_pages.dtype:
        return f"pages are {latent_pages.dtype} and {shared_pages.dtype}: both must be bfloat16 or both float32"
    if latent_pages.ndim != 4 or latent_pages.shape[2] not in (2, 4, 8) or latent_pages.shape[3] != LANES:
        return f"latent pages are {latent_pages.shape}: [num_pages, page_size, R/128 in 2, 4, 8, 128] is allowed"
    num_pages, page_size = latent_pages.shape[:2]
    if page_size < GROUP_ROWS or page_size & (page_size - 1):
        return f"page_size is {page_size}: a power of two, at least {GROUP_ROWS}, is allowed"
    expected = (num_pages, page_size // GROUP_ROWS, *GROUP_SHAPE)
    if shared_pages.shape != expected:
        return f"shared pages are {shared_pages.shape}: beside latent pages {latent_pages.shape} only {expected} fits"
    if num_pages * page_size >= 2**31:
        return f"the cache has {num_pages} pages of {page_size} rows: fewer than 2**31 rows are allowed"
    if page_table.shape[1] * page_size >= 2**31:
        return f"a sequence has {page_table.shape[1]} pages of {page_size} rows: fewer than 2**31 rows are allowed"
    return None
