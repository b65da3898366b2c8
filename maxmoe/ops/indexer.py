"""Lightning indexer: scores every earlier token for each query and keeps the best `top_k`.

Source: DeepSeek-V3.2 (sparse attention), without RoPE as in K3.1.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe.ops import dispatch
from maxmoe.ops.mla import causal_mask
from maxmoe.ops.query_blocks import map_query_blocks


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B S J"], head_weights: Float[Array, "B T I"]
) -> Float[Array, "B T S"]:
    """sum_i head_weights_i relu(q_i . key), in float32: I index heads of width J share one key per token."""
    dots = jnp.einsum(
        "btij,bsj->btis", q.astype(jnp.float32), keys.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    weights = head_weights.astype(jnp.float32)
    return jnp.einsum("btis,bti->bts", jax.nn.relu(dots), weights, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnums=1)
def select_topk(scores: Float[Array, "*b S"], k: int, valid: Bool[Array, "*b S"]) -> Int[Array, "*b k"]:
    """Indices of the k largest valid scores, best first: exact and deterministic.

    Order: score descending, then index ascending. NaN and -inf rank last among the valid, by index.
    Returns: int32 indices; -1 fills the end where fewer than k entries are valid.
    """
    num_keys, valid = scores.shape[-1], jnp.broadcast_to(valid, scores.shape)
    run = _run_length(num_keys, k)
    if run == 1:
        values, indices = jax.lax.top_k(_ranked(scores, valid), min(k, num_keys))
    else:
        values, indices = _top_k_of_runs(scores, k, valid, run)
    indices = jnp.where(values == -jnp.inf, -1, indices).astype(jnp.int32)
    missing = k - indices.shape[-1]
    return jnp.pad(indices, [(0, 0)] * (indices.ndim - 1) + [(0, max(0, missing))], constant_values=-1)


def _ranked(scores, valid):
    """Scores as top-k shall compare them: -inf only where not valid, no NaN, one zero."""
    lowest = jnp.finfo(jnp.float32).min
    scores = scores.astype(jnp.float32)
    scores = jnp.where(scores == 0, 0, scores)  # -0 and 0 are one score
    return jnp.where(valid, jnp.where(scores > lowest, scores, lowest), -jnp.inf)  # NaN > lowest is false


def _run_length(num_keys, k):
    """Keys per run: num_keys / run + k * run, the candidates of both rounds, is least at the root of num_keys / k.

    1, for a single round, where two rounds save too little.
    """
    run = 1
    while k > 0 and 3 * run**2 * k <= num_keys:
        run *= 2
    return run if run >= 16 else 1


def _top_k_of_runs(scores, k, valid, run):
    """`lax.top_k` of the ranked scores in two rounds: over the maxima of runs of neighbours, then in the k best runs.

    Runs ordered by (maximum, position) are ordered as their best members are. A run behind k others has
    k better members before its own best one, so none of its members is among the k best.
    """
    whole = scores.shape[-1] // run * run
    runs = _ranked(scores[..., :whole], valid[..., :whole]).reshape(*scores.shape[:-1], -1, run)
    _, best_runs = jax.lax.top_k(jnp.max(runs, axis=-1), k)
    best_runs = jnp.sort(best_runs, axis=-1)  # ascending, so that ties among their members fall to the lowest index
    members = (run * best_runs[..., None] + jnp.arange(run)).reshape(*best_runs.shape[:-1], -1)
    rest = jnp.broadcast_to(jnp.arange(whole, scores.shape[-1]), (*members.shape[:-1], scores.shape[-1] - whole))
    members = jnp.concatenate([members, rest], axis=-1)
    candidates = (jnp.take_along_axis(x, members, axis=-1, mode="promise_in_bounds") for x in (scores, valid))
    values, places = jax.lax.top_k(_ranked(*candidates), k)
    return values, jnp.take_along_axis(members, places, axis=-1)


def select_tokens(
    q: Float[Array, "B T I J"],
    keys: Float[Array, "B S J"],
    head_weights: Float[Array, "B T I"],
    positions: Int[Array, "B T"],
    top_k: int,
    implementation: str | None = None,
) -> Int[Array, "B T top_k"]:
    """Chooses the slots each query may see, among those at and before its position.

    The score matrix exists for one block of queries at a time, never whole at long context.

    Args:
      implementation: See `dispatch.choose`. The TPU kernel takes keys with the sequence on the last axis: a copy of
        the cache unless the compiler lays it out so.
    """
    refusals = {"pallas_tpu": lambda: _tpu().indexer_topk_tpu_refusal(q, jnp.swapaxes(keys, 1, 2), top_k)}
    if dispatch.choose("select_tokens", implementation, refusals) == "pallas_tpu":
        return _tpu().indexer_topk_tpu(q, jnp.swapaxes(keys, 1, 2), head_weights, positions, top_k)

    def select(q, head_weights, positions):
        return select_topk(index_scores(q, keys, head_weights), top_k, causal_mask(positions, keys.shape[1]))

    elements = q.shape[0] * q.shape[2] * keys.shape[1]
    return map_query_blocks(select, elements, q, head_weights, positions)


def _tpu():
    """The kernel for TPU; importing Pallas takes a second that few need."""
    from pallas_kernels import indexer_topk_tpu

    return indexer_topk_tpu
