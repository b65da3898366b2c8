"""The lightning indexer with an exact top-k on TPU, without a matrix of scores.

Keys are dealt to groups by slot. A kernel streams the keys once, scores them, and keeps the best few of every group
(`indexer_candidates_tpu` for many queries, `indexer_decode_tpu` for few). A sort of these candidates gives the best
`top_k` of them, and a test that is exact whether a key left out could be among them: what a group dropped is worse
than all that it kept, so only a group whose kept keys are all better than the last one chosen can hold more. A query
that fails the test, one in four thousand where scores do not depend on slots (in 100,000 draws of 2048 keys into 1024
groups of 13), is scored again alone (`indexer_scores_tpu`) and all its scores are sorted, tile by tile: slow, but right
for any scores.

Source: DeepSeek-V3.2 (sparse attention); buckets that keep several of their best: arXiv:2506.04165.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_candidates_tpu import indexer_candidates_tpu
from pallas_kernels.indexer_decode_tpu import indexer_decode_tpu
from pallas_kernels.indexer_groups_tpu import ranked
from pallas_kernels.indexer_scores_tpu import indexer_scores_tpu
from pallas_kernels.tiling import INDEXER_TOPK_TPU, IndexerTopkTpuTiling

FEW_QUERIES = 3  # up to here reading the keys once per query costs less than a program's idle rows


def indexer_topk_tpu_refusal(q, keys, top_k: int, tiling: IndexerTopkTpuTiling = INDEXER_TOPK_TPU) -> str | None:
    """Why the kernel cannot run for these arguments, or None.

    Args:
      q, keys: Arrays or `jax.ShapeDtypeStruct`s, as in `indexer_topk_tpu`.
    """
    width, candidates = q.shape[-1], tiling.kept * tiling.groups
    if keys.ndim != 4 or keys.shape[1] != q.shape[0]:
        return f"the keys are {keys.shape}: [L, B, J, S] is allowed, with the batch of q, {q.shape[0]}"
    if width % 128 or keys.shape[2] != width:
        return f"index width {width} of q and {keys.shape[2]} of the keys; it must be one multiple of 128"
    if q.dtype != keys.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype} and the keys are {keys.dtype}; both must be bfloat16, or both float32"
    if not 0 < 2 * top_k <= candidates:
        return f"top_k={top_k}; from 1 to {candidates // 2} can be chosen among {candidates} candidates"
    return None


def indexer_topk_tpu(
    q,
    keys,
    layer,
    head_weights,
    positions,
    top_k: int,
    *,
    tiling: IndexerTopkTpuTiling = INDEXER_TOPK_TPU,
    interpret=None,
):
    """Scores and slots of the `top_k` keys that score best for each query, among those at and before its position.

        score_ts = sum_i head_weights_ti relu(q_ti . key_s)

    Products and sums are float32. The order is score descending, then slot ascending; 0 and -0 are equal; NaN and
    -inf rank last among the visible keys, by slot.

    Args:
      q: [B, T, I, J], bfloat16 or float32; J is a multiple of 128.
      keys: [L, B, J, S] of q's dtype: the keys of all layers, with the sequence along the lanes. Slots after a query's
        position may hold anything, NaN included. If S is no multiple of 128, XLA keeps them in another order where
        it is free to choose, and copies them all for the kernel.
      layer: An integer, or one that is traced: which keys are read.
      head_weights: [B, T, I].
      positions: [B, T], integers. A query sees slots 0 to its position.
      interpret: None compiles for TPU; else what `pallas_call` takes.
    Returns: Scores, float32, and slots, int32, both [B, T, top_k]; -inf and -1 fill the end where a query sees fewer
      keys. The lowest finite number stands for NaN and -inf.
    Raises:
      NotImplementedError: What `indexer_topk_tpu_refusal` says.
    """
    if reason := indexer_topk_tpu_refusal(q, keys, top_k, tiling):
        raise NotImplementedError(f"indexer_topk_tpu: {reason}")
    num_queries = q.shape[1]
    head_weights = head_weights.astype(jnp.float32)
    positions = jnp.minimum(positions.astype(jnp.int32), keys.shape[3] - 1)
    layer = jnp.reshape(layer, 1).astype(jnp.int32)
    choose = functools.partial(_choose, keys=keys, layer=layer, top_k=top_k, tiling=tiling, interpret=interpret)
    if num_queries <= tiling.chunk:
        return choose(q, head_weights, positions)
    pad = -num_queries % tiling.chunk

    def chunks(x, fill=0):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, tiling.chunk, *x.shape[2:]), 1, 0)

    # What a query's candidates take in HBM, the sort among it, is held for one chunk at a time.
    results = jax.lax.map(lambda args: choose(*args), (chunks(q), chunks(head_weights), chunks(positions, -1)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(q.shape[0], -1, top_k)[:, :num_queries] for x in results)


def _choose(q, head_weights, positions, *, keys, layer, top_k, tiling, interpret):
    batch, num_queries = positions.shape
    candidates = indexer_decode_tpu if num_queries <= FEW_QUERIES else indexer_candidates_tpu
    scores, slots = candidates(q, keys, layer, head_weights, positions, tiling=tiling, interpret=interpret)
    best, chosen = _sorted(scores, slots, top_k)
    last_best, last_slot = best[..., -1:], chosen[..., -1:]
    # The last place of every group's list: better than the last one chosen, it may hide others that are.
    end_scores, end_slots = scores[..., -tiling.groups :], slots[..., -tiling.groups :]
    hides = (end_scores > last_best) | ((end_scores == last_best) & (end_slots < last_slot))
    again = jnp.any(hides & (end_scores > -jnp.inf), axis=-1).reshape(-1)

    def one_again(state):
        again, best, chosen = state
        n = jnp.argmax(again)
        b, t = n // num_queries, n % num_queries
        query = q[b, t], keys, layer, b, head_weights[b, t], positions[b, t]
        row = _choose_among_all(*query, top_k=top_k, tiling=tiling, interpret=interpret)
        return again.at[n].set(False), best.at[n].set(row[0]), chosen.at[n].set(row[1])

    state = again, best.reshape(-1, top_k), chosen.reshape(-1, top_k)
    _, best, chosen = jax.lax.while_loop(lambda state: jnp.any(state[0]), one_again, state)
    chosen = jnp.where(best > -jnp.inf, chosen, -1)
    return best.reshape(batch, num_queries, top_k), chosen.reshape(batch, num_queries, top_k)


def _sorted(scores, slots, top_k):
    """The top_k best scores and their slots: score descending, then slot ascending."""
    scores = jnp.where(scores == 0, 0, scores)  # the sort would put -0 behind 0
    negative, slots = jax.lax.sort((-scores, slots), num_keys=2, is_stable=False)
    return -negative[..., :top_k], slots[..., :top_k]


def _choose_among_all(q, keys, layer, row, head_weights, position, *, top_k, tiling, interpret):
    """One query's choice [top_k]: the best so far are sorted with the scores of one tile of keys after another."""

    def take_in(n, best):
        scores = indexer_scores_tpu(q, keys, layer, head_weights, row, n, tiling=tiling, interpret=interpret)
        slots = n * tiling.key_tile + jnp.arange(tiling.key_tile, dtype=jnp.int32)
        tile = ranked(scores, slots <= position), slots
        return _sorted(*(jnp.concatenate(pair) for pair in zip(best, tile, strict=True)), top_k)

    nothing = jnp.full(top_k, -jnp.inf, jnp.float32), jnp.full(top_k, -1, jnp.int32)
    return jax.lax.fori_loop(0, position // tiling.key_tile + 1, take_in, nothing)
