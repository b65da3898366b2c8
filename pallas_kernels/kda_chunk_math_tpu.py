"""What `kda_chunk_tpu` computes for 64 tokens: scores between them, the triangular solve, outputs and the new state.

With G the running sum of g inside the chunk:

    (I + L) U = diag(beta) (V - (K*e^G) S),   L_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd)  for j < i
    O = (Q*e^G) S + A U,                      A_ij = sum_d q_id k_jd e^(G_id - G_jd)         for j <= i
    S <- diag(e^G_last) S + (K*e^(G_last - G))^T U

Decays are never divided. Tokens whose chunk halves lie on two sides of a border use e^(G_i - border) e^(border - G_j),
for borders between 32, 16, 8 and 4 tokens; inside four tokens each distance 1, 2, 3 has its own sum of g. So every
exponent is a sum of some g, and never positive.

(I + L)^-1 is built from inverses of 4 x 4 blocks, in closed form, by doubling their size. A Neumann series would be
as short, but where keys repeat its terms grow like binomial coefficients and cancel.

Matrix products take both operands as a bfloat16 part and a bfloat16 rest and leave out only the product of the
rests: relative errors of 2^-16 per term, in three passes of the matrix unit instead of the six of full float32.

Two heads share the 128 lanes of a [64, 64] matrix: `pack` is one or two heads side by side.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CHUNK = 64  # tokens
DIM = 128  # channels of keys and of values
ROWS = 8  # sublanes of a float32 register: the rows of a block below
_BLOCKS = CHUNK // ROWS
_PACK = 2  # heads side by side
_WIDTHS = (4, 8, 16, 32)
_LOG2_E = 1.4426950408889634  # decays are kept in powers of 2, as the chip's unit computes them


class Scratch(NamedTuple):
    """What one stage of the work leaves to the next, so that no stage needs more registers than there are."""

    query: Any  # [group, 64, 128]: Q, and K without the rows of other sequences
    key: Any
    decay: Any  # [group, 7, 64, 128]: factors of scores across borders, and of those 1, 2, 3 tokens apart
    decayed: Any  # [group, 128, 128]: K*e^G above Q*e^G
    after: Any  # [group, 72, 128]: K*e^(G_last - G) above e^G_last
    turned: Any  # [group, 128, 72]: the same, transposed
    scores: Any  # [packs, 64, 128]: A
    lower: Any  # [packs, 64, 128]: L
    near: Any  # [packs, 3, 64, 128]: entries of L 1, 2, 3 left of the diagonal, in all lanes of their row
    inverse: Any  # [packs, 64, 128]: (I + L)^-1
    delta: Any  # [group, 64, 128]: beta (V - (K*e^G) S), then U
    out: Any  # [group, 64, 128]: (Q*e^G) S


def scratch(group: int) -> list:
    """VMEM that `chunk_stages` needs for `group` heads."""
    packs = pl.cdiv(group, _PACK)
    square = (CHUNK, _PACK * CHUNK)
    shapes = Scratch(
        query=(group, CHUNK, DIM),
        key=(group, CHUNK, DIM),
        decay=(group, len(_WIDTHS) + 3, CHUNK, DIM),
        decayed=(group, 2 * CHUNK, DIM),
        after=(group, CHUNK + ROWS, DIM),
        turned=(group, DIM, CHUNK + ROWS),
        scores=(packs, *square),
        lower=(packs, *square),
        near=(packs, 3, *square),
        inverse=(packs, *square),
        delta=(group, CHUNK, DIM),
        out=(group, CHUNK, DIM),
    )
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]


def chunk_cost() -> tuple[int, int]:
    """Operations on the matrix unit, every pass of every product counted, and exponentials: of one head's chunk."""
    scores = sum(2 * CHUNK if width == 4 else CHUNK for width in _WIDTHS) * DIM * CHUNK
    inverse = sum(CHUNK if width == 4 else CHUNK // 2 for width in _WIDTHS) * 2 * CHUNK * CHUNK
    errors, applied, update = 2 * CHUNK * DIM * DIM, 2 * CHUNK * CHUNK * DIM, DIM * CHUNK * DIM
    passes = 3
    return 2 * passes * (scores + inverse + errors + applied + update), (len(_WIDTHS) + 5) * CHUNK * DIM + DIM


def chunk_stages(q, k, v, g, beta, state, out, start, end, refs, tiling):
    """The work on one chunk, as functions to be called in turn.

    They take rows start..end of the chunk into `state` and write those rows of `out`. A stage runs over several heads,
    as one head's products wait for one another; within it every head's product comes before what is done with any,
    because the compiler hardly moves one past the other. In branches of their own stages keep to the registers; in
    one branch the compiler keeps in registers, or spills, what was stored in `refs`, and overlaps stages.

    Args: q, k, v, g, out: refs [64, group * 128]; beta [64, group]; state [group, 128, 128]; refs: of `scratch`;
      tiling: `KdaChunkTpuTiling`, the heads of each stage.
    """
    refs = Scratch(*refs)
    group = state.shape[0]
    packs = [range(h, min(h + _PACK, group)) for h in range(0, group, _PACK)]

    def real(width=DIM):
        row = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, width), 0)
        return (row >= start) & (row < end)

    def lanes(x, h):
        return x[:, h * DIM : (h + 1) * DIM]

    def numbered(heads):
        return [(p, packs[p]) for p in range(heads.start // _PACK, pl.cdiv(heads.stop, _PACK))]

    def near_decays(heads):
        for h in heads:
            _near_decays(h, jnp.where(real(), lanes(g, h) * _LOG2_E, 0), refs)

    def far_decays(heads):
        for h in heads:
            refs.query[h] = lanes(q, h).astype(jnp.float32)
            refs.key[h] = jnp.where(real(), lanes(k, h).astype(jnp.float32), 0)
            _far_decays(h, refs)

    def near_scores(heads):
        for h in heads:
            _near_scores(h, refs.query[h], refs)

    def scores(i, heads):
        _scores(i, numbered(heads), refs)

    def first_inverse(heads):
        step = jnp.where(real(group), beta[...], 0)
        for p, pack in numbered(heads):
            steps = [jnp.broadcast_to(step[:, h : h + 1], (CHUNK, len(pack) * CHUNK)) for h in pack]
            _first_inverse(p, _beside(steps), refs)

    def wider_inverse(width, heads):
        _wider_inverse(width, [(p, len(pack) * CHUNK) for p, pack in numbered(heads)], refs)

    def errors(heads):
        recalled = []
        for h in heads:
            from_state = _product(_split(refs.decayed[h]), _split(state[h]))
            refs.out[h] = from_state[CHUNK:]
            recalled.append(from_state[:CHUNK])
        for h, x in zip(heads, recalled, strict=True):
            error = lanes(v, h).astype(jnp.float32) - x
            refs.delta[h] = jnp.where(real(), beta[:, h : h + 1] * error, 0)

    def through(matrices, heads):
        """Each head's product of its matrix, two of which stand side by side, and its rows of `refs.delta`."""
        for p, pack in numbered(heads):
            matrix = _split(matrices[p, :, : len(pack) * CHUNK])
            for i, h in enumerate(pack):
                yield h, _product(matrix, _at_place(_split(refs.delta[h]), i, len(pack)))

    def deltas(heads):
        for h, delta in list(through(refs.inverse, heads)):
            refs.delta[h] = delta

    def outputs(heads):
        for h, inside in list(through(refs.scores, heads)):
            o = refs.out[h] + inside
            cols = slice(h * DIM, (h + 1) * DIM)
            out[:, cols] = jnp.where(real(), o.astype(out.dtype), out[:, cols])

    def turn(heads):
        for h in heads:
            refs.turned[h] = refs.after[h].T  # 64 keys and 8 times the decay of the whole chunk

    def new_states(heads):
        updates = [_product(_split(refs.turned[h][:, :CHUNK]), _split(refs.delta[h])) for h in heads]
        for h, update in zip(heads, updates, strict=True):
            state[h] = state[h] * refs.turned[h][:, CHUNK : CHUNK + 1] + update

    def each(together, stage, *args):
        return [functools.partial(stage, *args, range(h, min(h + together, group))) for h in range(0, group, together)]

    return [
        *each(1, near_decays),
        *each(tiling.far_decays, far_decays),
        *each(tiling.near_scores, near_scores),
        *each(tiling.first_scores, scores, 0),
        *(stage for i in range(1, len(_WIDTHS)) for stage in each(tiling.scores, scores, i)),
        *each(group, first_inverse),
        *each(tiling.first_inverse, wider_inverse, _WIDTHS[0]),
        *(stage for width in _WIDTHS[1:] for stage in each(tiling.inverse, wider_inverse, width)),
        *each(tiling.errors, errors),
        *each(tiling.deltas, deltas),
        *each(tiling.outputs, outputs),
        *each(group, turn),
        *each(tiling.new_states, new_states),
    ]


def _near_decays(h, g, refs):
    """Decays inside eight tokens of one head, from g / ln 2 [64, 128]; every exponent a sum of values <= 0."""
    g = g.reshape(_BLOCKS, ROWS, DIM)
    row = jax.lax.broadcasted_iota(jnp.int32, g.shape, 1)
    place = row % 4
    two = g + _back(g, 1)
    three = two + _back(g, 2)
    four = two + _back(two, 2)
    for i, x in enumerate((g, two, three)):  # of the last 1, 2, 3 tokens
        refs.decay[h, len(_WIDTHS) + i] = jnp.exp2(x).reshape(CHUNK, DIM)
    # Inside four tokens: up to and including each, and from the next one on.
    before = jnp.where(place == 0, g, jnp.where(place == 1, two, jnp.where(place == 2, three, four)))
    after = jnp.where(place == 0, _ahead(three, 3), jnp.where(place == 1, _ahead(two, 2), _ahead(g, 1)))
    after = jnp.where(place == 3, 0, after)
    refs.decay[h, 0] = jnp.exp2(jnp.where(row < 4, after, before)).reshape(CHUNK, DIM)
    refs.decay[h, 1] = (before + jnp.where(row < 4, 0, four[:, 3:4])).reshape(CHUNK, DIM)
    refs.decay[h, 2] = (after + jnp.where(row < 4, four[:, 7:8], 0)).reshape(CHUNK, DIM)


def _far_decays(h, refs):
    """Decays over longer stretches of one head, from the sums that `_near_decays` left; keys and queries with them."""

    def blocks(x):
        return [x[r : r + ROWS] for r in range(0, CHUNK, ROWS)]

    before, after = blocks(refs.decay[h, 1]), blocks(refs.decay[h, 2])
    for i, width in enumerate(_WIDTHS[1:], start=1):
        width //= ROWS
        pieces = []
        for r in range(0, _BLOCKS, 2 * width):
            up, low = slice(r, r + width), slice(r + width, r + 2 * width)
            pieces += after[up] + before[low]
            first, second = before[r + width - 1][7:8], before[r + 2 * width - 1][7:8]
            before[low] = [x + first for x in before[low]]
            after[up] = [x + second for x in after[up]]
        refs.decay[h, i] = jnp.exp2(jnp.concatenate(pieces))
    refs.after[h, CHUNK:] = jnp.broadcast_to(jnp.exp2(before[-1][7:8]), (ROWS, DIM))
    before, after = (jnp.exp2(jnp.concatenate(x)) for x in (before, after))
    refs.decayed[h, :CHUNK] = refs.key[h] * before
    refs.decayed[h, CHUNK:] = refs.query[h] * before
    refs.after[h, :CHUNK] = refs.key[h] * after


def _near_scores(h, q, refs):
    """Starts A and L / beta of one head with the scores of tokens less than four apart."""
    shape = (_BLOCKS, ROWS, CHUNK)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    q, k = (x.reshape(_BLOCKS, ROWS, DIM) for x in (q, refs.key[h]))
    a, c = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    p, at = h // _PACK, slice(h % _PACK * CHUNK, (h % _PACK + 1) * CHUNK)
    for d in range(4):
        other = _back(k, d) * refs.decay[h, len(_WIDTHS) + d - 1].reshape(k.shape) if d else k
        apart = _apart(d, CHUNK)
        a = jnp.where(apart, jnp.sum(q * other, axis=-1, keepdims=True), a)
        if d:
            near = jnp.broadcast_to(jnp.sum(k * other, axis=-1, keepdims=True), shape)
            near = jnp.where(row % 4 >= d, near, 0)
            c = jnp.where(apart, near, c)
            refs.near[p, d - 1, :, at] = near.reshape(CHUNK, CHUNK)
    refs.scores[p, :, at] = _own_columns(a)
    refs.lower[p, :, at] = _own_columns(c)


def _apart(d, lanes):
    """Where columns of the block a row belongs to stand d tokens before it, in the same four; alike in all blocks."""
    row = jax.lax.broadcasted_iota(jnp.int32, (1, ROWS, lanes), 1)
    col = jax.lax.broadcasted_iota(jnp.int32, (1, ROWS, lanes), 2) % ROWS
    return (row - col == d) & (row % 4 >= d)


def _own_columns(x):
    """[8 blocks, 8, lanes] as [64, lanes], 0 but in each block's own eight columns."""
    block = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    col = jax.lax.broadcasted_iota(jnp.int32, x.shape, 2) % CHUNK
    return jnp.where(col // ROWS == block, x, 0).reshape(CHUNK, x.shape[2])


def _back(x, tokens):
    """Row i holds what row i - tokens held; the first rows hold something else."""
    return pltpu.roll(x, tokens, 1)


def _ahead(x, tokens):
    """Row i holds what row i + tokens held; the last rows hold something else."""
    return pltpu.roll(x, ROWS - tokens, 1)


def _scores(i, packs, refs):
    """Adds to A and L / beta of packs the entries across borders between `_WIDTHS[i]` tokens."""
    width = _WIDTHS[i]
    low = [r for r in range(_BLOCKS) if r * ROWS // width % 2 or width == 4]
    rows = [slice(r * ROWS, (r + 1) * ROWS) for r in low]

    def factors(h):
        e = refs.decay[h, i]
        q_e, k_e = refs.query[h] * e, refs.key[h] * e
        return _split(jnp.concatenate([x[r] for x in (q_e, k_e) for r in rows])), _split(k_e)

    products = [_product_nt(*zip(*[factors(h) for h in heads], strict=True)) for _, heads in packs]
    for (p, heads), both in zip(packs, products, strict=True):
        lanes = len(heads) * CHUNK
        both = both.reshape(2, len(low), ROWS, lanes)
        row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, lanes), 0)
        col = jax.lax.broadcasted_iota(jnp.int32, (ROWS, lanes), 1) % CHUNK
        for j, r in enumerate(low):
            border = r * ROWS // width * width if width > 4 else r * ROWS + 4
            across = (col < border) & (col >= border - width)
            if width == 4:
                across &= row >= 4
            at = rows[j]
            for x, ref in ((both[0, j], refs.scores), (both[1, j], refs.lower)):
                ref[p, at, :lanes] = jnp.where(across, x, ref[p, at, :lanes])


def _first_inverse(p, step, refs):
    """For one pack L itself, and inverses of its 4 x 4 diagonal blocks."""
    lanes = step.shape[1]
    shape = (_BLOCKS, ROWS, lanes)
    refs.lower[p, :, :lanes] = refs.lower[p, :, :lanes] * step
    one, two, three = ((refs.near[p, d, :, :lanes] * step).reshape(shape) for d in range(3))
    one_two = one * _back(one, 1)
    inverse = [
        jnp.ones_like(one),
        -one,
        one_two - two,
        one * _back(two, 1) + two * _back(one, 2) - one_two * _back(one, 2) - three,
    ]
    x = jnp.zeros_like(one)
    for d, entries in enumerate(inverse):
        x = jnp.where(_apart(d, lanes), entries, x)
    refs.inverse[p, :, :lanes] = _own_columns(x)


def _wider_inverse(width, packs, refs):
    """Makes of inverses of diagonal blocks of `width` rows those of blocks twice as wide."""
    pieces = [slice(r, r + width) for r in range(width, CHUNK, 2 * width)] if width >= ROWS else [slice(0, CHUNK)]

    def low(x):
        return jnp.concatenate([x[r] for r in pieces]) if len(pieces) > 1 else x[pieces[0]]

    firsts = []
    for p, lanes in packs:
        row = low(jax.lax.broadcasted_iota(jnp.int32, (CHUNK, lanes), 0))
        col = low(jax.lax.broadcasted_iota(jnp.int32, (CHUNK, lanes), 1)) % CHUNK
        corner = (row // width % 2 == 1) & (col // width == row // width - 1)
        middle = _split(jnp.where(corner, low(refs.lower[p, :, :lanes]), 0))
        firsts.append(_product(middle, _diagonal(_split(refs.inverse[p, :, :lanes]))))
    for (p, lanes), first in zip(packs, firsts, strict=True):
        if width >= ROWS:  # rows of the upper halves are 0 in it
            zero = jnp.zeros((width, lanes), jnp.float32)
            first = jnp.concatenate([y for j in range(len(pieces)) for y in (zero, first[j * width : (j + 1) * width])])
        x = refs.inverse[p, :, :lanes]
        second = _product(tuple(low(y) for y in _split(x)), _diagonal(_split(first)))
        for j, r in enumerate(pieces):
            refs.inverse[p, r, :lanes] = x[r] - second[j * width : j * width + (r.stop - r.start)]


def _beside(xs):
    """Head i of a pack takes its lanes from xs[i]."""
    if len(xs) == 1:
        return xs[0]
    lane = jax.lax.broadcasted_iota(jnp.int32, xs[0].shape, xs[0].ndim - 1)
    return jnp.where(lane < CHUNK, *xs)


def _split(x):
    """A float32 value as a bfloat16 part and a bfloat16 rest."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _product(left, right, contract=(((1,), (0,)), ((), ()))):
    """left @ right of `_split` values, float32; the small terms first."""

    def dot(x, y):
        return jax.lax.dot_general(x, y, contract, preferred_element_type=jnp.float32)

    return dot(left[1], right[0]) + dot(left[0], right[1]) + dot(left[0], right[0])


def _product_nt(lefts, rights):
    """left_i @ right_i^T [M, 64] of each head of a pack, side by side."""
    rights = [_at_place(y, i, len(rights)) for i, y in enumerate(rights)]
    return sum(_product(x, y, (((1,), (1,)), ((), ()))) for x, y in zip(lefts, rights, strict=True))


def _at_place(parts, i, heads):
    """Rows of head i of a pack, with zeros in the rows of the others."""
    return tuple(jnp.concatenate([x if j == i else jnp.zeros_like(x) for j in range(heads)], axis=0) for x in parts)


def _diagonal(parts):
    """[64, lanes] of a pack as a matrix with one diagonal block per head."""
    heads = parts[0].shape[1] // CHUNK
    lane = jax.lax.broadcasted_iota(jnp.int32, parts[0].shape, 1) // CHUNK
    return tuple(jnp.concatenate([jnp.where(lane == i, x, 0) for i in range(heads)], axis=0) for x in parts)
