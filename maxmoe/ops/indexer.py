"""Lightning indexer: scores every earlier token for each query and keeps the best `top_k`.

Keys of stacked layers lie with the sequence on the last axis, as the kernels read them: [L, B, J, S].
Source: DeepSeek-V3.2 (sparse attention), without RoPE as in K3.1.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from maxmoe.ops import dispatch
from maxmoe.ops.latent_cache import within_or_behind
from maxmoe.ops.mla import causal_mask, einsum
from maxmoe.ops.query_blocks import map_query_blocks


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B J S"], head_weights: Float[Array, "B T I"]
) -> Float[Array, "B T S"]:
    """sum_i head_weights_i relu(q_i . key), in float32: I index heads of width J share one key per token."""
    dots = einsum("btij,bjs->btis", q, keys.astype(q.dtype), dtype=jnp.float32)
    weights = head_weights.astype(jnp.float32)
    return jnp.einsum("btis,bti->bts", jax.nn.relu(dots), weights, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnums=1)
def select_topk(scores: Float[Array, "*b S"], k: int, valid: Bool[Array, "*b S"]) -> Int[Array, "*b k"]:
    """Indices of the k largest valid scores, best first: exact and deterministic.

    Order: score descending, then index ascending. NaN and -inf rank last among the valid, by index.
    Returns: int32 indices; -1 fills the end where fewer than k entries are valid.
    """
    return _top_k(scores, k, valid)[1]


def _top_k(scores, k, valid):
    """The k best ranked scores, -inf where there are fewer, and their indices."""
    num_keys, valid = scores.shape[-1], jnp.broadcast_to(valid, scores.shape)
    run = _run_length(num_keys, k)
    if run == 1:
        values, indices = jax.lax.top_k(_ranked(scores, valid), min(k, num_keys))
    else:
        values, indices = _top_k_of_runs(scores, k, valid, run)
    indices = jnp.where(values == -jnp.inf, -1, indices).astype(jnp.int32)
    missing = [(0, 0)] * (indices.ndim - 1) + [(0, max(0, k - indices.shape[-1]))]
    return jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(indices, missing, constant_values=-1)


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
    keys: Float[Array, "L B J S"],
    layer: int | Int[Array, ""],
    head_weights: Float[Array, "B T I"],
    positions: Int[Array, "B T"],
    top_k: int,
    implementation: str | None = None,
) -> Int[Array, "B T top_k"]:
    """The slots of `select_candidates` alone."""
    return select_candidates(q, keys, layer, head_weights, positions, top_k, implementation)[1]


def select_candidates(
    q: Float[Array, "B T I J"],
    keys: Float[Array, "L B J S"],
    layer: int | Int[Array, ""],
    head_weights: Float[Array, "B T I"],
    positions: Int[Array, "B T"],
    top_k: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T top_k"], Int[Array, "B T top_k"]]:
    """Chooses the slots each query may see, among those at and before its position, by the keys of one layer.

    The score matrix exists for one block of queries at a time, never whole at long context.

    Args:
      positions: A query whose position is negative sees none. Slots after a position may hold anything, NaN included.
      implementation: See `dispatch.choose`.
    Returns: Scores in float32 and slots in int32, best first, and of equal scores the lower slot first; -inf and -1
      where fewer than top_k slots are visible. NaN and -inf rank last among the visible: the lowest finite float32
      stands for them.
    """
    refusals = {"pallas_tpu": lambda: _tpu().indexer_topk_tpu_refusal(q, keys, top_k)}
    if dispatch.choose("select_candidates", implementation, refusals) == "pallas_tpu":
        return _tpu().indexer_topk_tpu(q, keys, layer, head_weights, positions, top_k)
    keys = keys[layer]

    def select(q, head_weights, positions):
        return _top_k(index_scores(q, keys, head_weights), top_k, causal_mask(positions, keys.shape[2]))

    elements = q.shape[0] * q.shape[2] * keys.shape[2]
    return map_query_blocks(select, elements, q, head_weights, positions)


def write_keys(
    keys: Float[Array, "L B J S"], layer: int | Int[Array, ""], slots: Int[Array, "B T"], new: Float[Array, "B T J"]
) -> Float[Array, "L B J S"]:
    """Puts index keys into their slots of one layer; in place where the array is donated.

    Args:
      slots: Those outside 0..S-1 are dropped. No slot may stand twice in a sequence.
    """
    return _write_keys(keys, layer, jnp.asarray(slots), new.astype(keys.dtype))


@jax.custom_vjp
def _write_keys(keys, layer, slots, new):
    # XLA for TPU scatters columns only after it has copied all keys into another layout, and back.
    return jax.lax.platform_dependent(keys, layer, slots, new, tpu=_write_windows, default=_write_columns)


def _write_keys_keep(keys, layer, slots, new):
    return _write_keys(keys, layer, slots, new), (layer, slots)


def _write_keys_back(kept, gradient):
    layer, slots = kept
    within = (slots >= 0) & (slots < gradient.shape[3])
    columns = gradient[layer, jnp.arange(slots.shape[0])[:, None], :, jnp.where(within, slots, 0)]
    columns = jnp.where(within[..., None], columns, 0)
    return _write_keys(gradient, layer, slots, jnp.zeros_like(columns)), None, None, columns


_write_keys.defvjp(_write_keys_keep, _write_keys_back)


def _write_columns(keys, layer, slots, new):
    batch = jnp.arange(slots.shape[0])[:, None]
    slots = within_or_behind(slots, keys.shape[3])
    return keys.at[layer, batch, :, slots].set(new, mode="drop")


def _write_windows(keys, layer, slots, new):
    """Window by window of neighbouring slots, each read, merged with all tokens that belong there, and put back."""
    width, num_slots = keys.shape[2:]
    batch, num_tokens = slots.shape
    window = min(num_slots, 128 if num_tokens == 1 else 512)

    def merge(keys, b, slot, pending):
        """Takes in the window around a slot; returns which tokens of sequence b stand in it."""
        start = jnp.clip(slot // window * window, 0, num_slots - window)
        hits = (slots[b][:, None] == start + jnp.arange(window)) & pending[:, None]
        at = (layer, b, 0, start)
        old = jax.lax.dynamic_slice(keys, at, (1, 1, width, window))
        fresh = _row_major(new[b][jnp.argmax(hits, axis=0)].T)  # else all keys take the layout of what is merged in
        merged = jnp.where(jnp.any(hits, axis=0), fresh, old)
        return _row_major(jax.lax.dynamic_update_slice(keys, merged, at)), jnp.any(hits, axis=1)

    def one_token(b, keys):
        return merge(keys, b, slots[b, 0], jnp.ones(1, bool))[0]

    def all_tokens(b, keys):
        def next_window(state):
            keys, pending = state
            keys, done = merge(keys, b, slots[b, jnp.argmax(pending)], pending)
            return keys, pending & ~done

        pending = (slots[b] >= 0) & (slots[b] < num_slots)
        return jax.lax.while_loop(lambda state: jnp.any(state[1]), next_window, (keys, pending))[0]

    return jax.lax.fori_loop(0, batch, one_token if num_tokens == 1 else all_tokens, _row_major(keys))


def _row_major(x):
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _tpu():
    """The kernel for TPU; importing Pallas takes a second that few need."""
    from pallas_kernels import indexer_topk_tpu

    return indexer_topk_tpu
