"""What `bench_kernels.py` measures: every op at the shapes that one device of a K3.1 slice sees, and who computes it.

Shapes are per shard: 96 heads over 8 devices are 12, 896 experts over 128 devices are 7. Shapes named cpu_* compare
plain forms with the straightforward ones they replace, and say by how much they must win.
"""

import functools
import importlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from maxmoe.ops import attn_res, experts, indexer, kda, mxfp4, norm, short_conv
from tools import kernel_baselines
from tools.kernel_case import Case, Implementation, Target, kernel, normal, packed_weight, plain, uniform

LATENT, SHARED, TOP_K = 512, 64, 2048
INDEX_HEADS, INDEX_DIM = 32, 128
EXPERT_IN, EXPERT_HIDDEN, EXPERTS_PER_TOKEN = 3584, 3072, 16
PAGE = 64
GATE_BOUND = -5.0
# The two bounds of SiTU-GLU, whose values change no time.
BETAS = (8.0, 8.0)
MXFP4_BYTES = 0.5 + 1 / mxfp4.GROUP


def kda_cases() -> Iterator[Case]:
    """Prefill by chunks, and the same on a CPU beside the chunk scans that it replaces."""
    key_dim = 128

    def make(batch, num_tokens, heads, dtype, key):
        shape = (batch, num_tokens, heads, key_dim)
        q, k = (norm.l2_norm(normal(key, i, *shape, dtype=jnp.float32)) for i in range(2))
        q = q * key_dim**-0.5
        # Decays as K3's bound allows them, most of them weak.
        g = GATE_BOUND * jax.nn.sigmoid(normal(key, 2, *shape, dtype=jnp.float32) - 3)
        beta = uniform(key, 3, *shape[:3])
        state = jnp.zeros((batch, heads, key_dim, key_dim), jnp.float32)
        return q.astype(dtype), k.astype(dtype), normal(key, 4, *shape, dtype=dtype), g, beta, state

    def case(shape, batch, num_tokens, heads, dtype=jnp.bfloat16, **settings):
        rows = batch * num_tokens * heads
        kernels = (kernel("tpu", "kda_chunk_tpu"), kernel("gpu", "kda_chunk_gpu"))
        return Case(
            **{"op": "kda_chunk", "implementations": (plain(kda.kda_chunked), *kernels)} | settings,
            shape=shape,
            make=functools.partial(make, batch, num_tokens, heads, dtype),
            flops=7 * rows * key_dim**2,
            hbm_bytes=rows * key_dim * (4 * jnp.dtype(dtype).itemsize + 4) + 8 * batch * heads * key_dim**2,
        )

    yield case("T8192_H12", 1, 8192, 12)
    yield case("B8_T1024_H12", 8, 1024, 12)
    yield case("T8192_H96", 1, 8192, 96, only=("tpu", "gpu"))

    def gradients(fn):
        def loss(q, k, v, g, beta, state):
            return jnp.sum(fn(q, k, v, g, beta, state)[0].astype(jnp.float32) * v)

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))

    trainable = kernel("tpu", "kda_chunk_backward_tpu", gradients, function="kda_chunk_trainable_tpu")
    yield case(
        "T2048_H12", 1, 2048, 12, op="kda_chunk_grad", implementations=(plain(gradients(kda.kda_chunked)), trainable)
    )
    scans = (
        plain(kda.kda_chunked),
        plain(kernel_baselines.kda_chunk_scan, "pairwise_scan"),
        plain(functools.partial(kernel_baselines.kda_chunk_scan, decayed=kernel_baselines.middle_decay), "unsafe_scan"),
    )
    yield case(
        "cpu_T8192_H8",
        1,
        8192,
        8,
        jnp.float32,
        implementations=scans,
        only=("cpu",),
        target=Target(faster="xla", slower="pairwise_scan", ratio=1.5),
    )


def kda_decode_cases() -> Iterator[Case]:
    """One token per sequence, from the projections to the gated norm, with states updated in place."""
    head_dim, taps, eps = 128, 4, 1e-6

    def make(batch, heads, key):
        inner = heads * head_dim
        tokens = [normal(key, i, batch, inner) for i in range(5)]
        weights = (
            normal(key, 6, 3, inner, taps, dtype=jnp.float32),
            normal(key, 7, inner, dtype=jnp.float32),
            jnp.zeros(heads),
            jnp.ones(head_dim),
        )
        state = normal(key, 8, batch, heads, head_dim, head_dim, dtype=jnp.float32)
        conv = normal(key, 9, batch, 3, taps - 1, heads, head_dim)
        return *tokens, normal(key, 5, batch, heads), *weights, state, conv, jnp.arange(batch, dtype=jnp.int32)

    def plain_form(q, k, v, z, gate, beta, conv_weight, dt_bias, a_log, out_norm, state, conv, slots):
        del slots  # all of them, in order
        batch, heads = beta.shape
        one = jnp.ones(batch, jnp.int32)
        last, mixed = [], []
        for i, x in enumerate((q, k, v)):
            earlier = conv[:, i].reshape(batch, taps - 1, -1)
            x, earlier = short_conv.short_conv(x[:, None], conv_weight[i], earlier, one)
            mixed.append(jax.nn.silu(x[:, 0]).reshape(batch, heads, head_dim))
            last.append(earlier.reshape(batch, taps - 1, heads, head_dim))
        q, k = norm.l2_norm(mixed[0]) * head_dim**-0.5, norm.l2_norm(mixed[1])
        logits = (z.astype(jnp.float32) + dt_bias).reshape(batch, 1, heads, head_dim)
        g = kda.bounded_gate(logits, a_log, GATE_BOUND)[:, 0]
        step = jax.nn.sigmoid(beta.astype(jnp.float32))
        out, state = kda.kda_step(q, k, mixed[2], g, step, state)
        out = norm.gated_rms_norm(out, gate.reshape(out.shape), out_norm, eps)
        return out.reshape(batch, -1), state, jnp.stack(last, axis=1)

    def fused(fn):
        return functools.partial(fn, lower_bound=GATE_BOUND, norm_eps=eps)

    in_place = {"donate": (10, 11), "feed": lambda args, results: (*args[:10], *results[1:3], args[12])}
    for batch in (1, 8, 64):
        heads = 12
        yield Case(
            op="kda_decode",
            shape=f"B{batch}_H{heads}",
            make=functools.partial(make, batch, heads),
            implementations=(
                plain(plain_form, **in_place),
                kernel("tpu", "kda_decode_tpu", fused, **in_place),
                kernel("gpu", "kda_decode_gpu", fused, **in_place),
            ),
            flops=7 * batch * heads * head_dim**2,
            hbm_bytes=batch * heads * head_dim * (8 * head_dim + 2 * 6 + 4 * 9),
        )


def indexer_cases() -> Iterator[Case]:
    """Scores of the indexer with the choice of its 2048 best keys; and the choice alone, on a CPU."""

    def make(batch, num_queries, num_keys, key):
        q = normal(key, 0, batch, num_queries, INDEX_HEADS, INDEX_DIM)
        keys = normal(key, 1, 1, batch, INDEX_DIM, num_keys)
        positions = jnp.broadcast_to(num_keys - num_queries + jnp.arange(num_queries), (batch, num_queries))
        return q, keys, jnp.int32(0), normal(key, 2, batch, num_queries, INDEX_HEADS), positions.astype(jnp.int32)

    def plain_form(*args):
        return indexer.select_tokens(*args, TOP_K)

    def slots_alone(fn):
        return lambda *args: fn(*args, TOP_K)[1]

    for batch, num_queries, num_keys in ((1, 1, 2**20), (8, 1, 2**17), (1, 64, 2**17)):
        pairs = batch * num_queries * num_keys
        yield Case(
            op="indexer_topk",
            shape=f"B{batch}_T{num_queries}_S{num_keys}",
            make=functools.partial(make, batch, num_queries, num_keys),
            implementations=(
                plain(plain_form),
                kernel("tpu", "indexer_topk_tpu", slots_alone),
                kernel("gpu", "indexer_topk_gpu", slots_alone),
            ),
            flops=2 * pairs * INDEX_HEADS * (INDEX_DIM + 1),
            hbm_bytes=2 * batch * num_keys * INDEX_DIM
            + batch * num_queries * (2 * INDEX_HEADS * INDEX_DIM + 4 * TOP_K),
        )
    num_keys = 2**20
    yield Case(
        op="select_topk",
        shape="cpu_S1048576",
        make=lambda key: (normal(key, 0, 1, num_keys, dtype=jnp.float32), jnp.ones((1, num_keys), bool)),
        implementations=(
            plain(lambda scores, valid: indexer.select_topk(scores, TOP_K, valid)),
            plain(lambda scores, valid: jax.lax.top_k(scores, TOP_K)[1], "lax_top_k"),
        ),
        flops=num_keys,
        hbm_bytes=5 * num_keys,
        only=("cpu",),
        target=Target(faster="xla", slower="lax_top_k", ratio=1.0),
    )


def mla_cases() -> Iterator[Case]:
    """Absorbed attention over 2048 selected latents: decode with all heads, prefill with a shard's."""

    def make(batch, num_queries, heads, num_keys, key):
        pages = normal(key, 0, batch * num_keys // PAGE, PAGE, LATENT + SHARED)
        q = normal(key, 1, batch, num_queries, heads, LATENT + SHARED)
        table = jax.random.permutation(jax.random.fold_in(key, 2), pages.shape[0]).astype(jnp.int32)
        # Ascending picks, a random one of each of 2048 stretches.
        stretch = num_keys // TOP_K
        picks = jax.random.randint(jax.random.fold_in(key, 3), (batch, num_queries, TOP_K), 0, stretch)
        indices = (picks + stretch * jnp.arange(TOP_K)).astype(jnp.int32)
        return q, pages, table.reshape(batch, -1), indices

    def plain_form(*args):
        return (kernel_baselines.paged_sparse_attention(*args, scale, LATENT),)

    def split(q, pages, table, indices):
        layout = importlib.import_module("pallas_kernels.mla_pages_tpu")
        return q[..., :LATENT], q[..., LATENT:], *layout.pack_pages(pages), table, indices

    scale = (128 + SHARED) ** -0.5
    for batch, num_queries, heads, num_keys in ((1, 1, 96, 2**20), (8, 1, 96, 2**16), (1, 256, 12, 2**17)):
        queries = batch * num_queries
        yield Case(
            op="mla_sparse",
            shape=f"B{batch}_T{num_queries}_H{heads}_S{num_keys}",
            make=functools.partial(make, batch, num_queries, heads, num_keys),
            implementations=(
                plain(plain_form),
                kernel("tpu", "mla_sparse_tpu", lambda fn: functools.partial(fn, scale=scale), prepare=split),
                kernel("gpu", "mla_sparse_gpu", lambda fn: functools.partial(fn, scale=scale), prepare=split),
            ),
            flops=2 * queries * TOP_K * heads * (2 * LATENT + SHARED),
            hbm_bytes=2 * queries * (TOP_K * (LATENT + SHARED + 2) + heads * (2 * LATENT + SHARED)),
        )

    def gradients(fn):
        def of_context(*args):
            return jnp.sum(jnp.square(fn(*args)[0].astype(jnp.float32)))

        # Of the queries and of every row of the cache, however the two are laid out.
        return lambda *args: jax.grad(of_context, argnums=tuple(range(len(args) - 2)))(*args)

    def plain_gradients(*args):
        q, pages = gradients(plain_form)(*args)
        return q[..., :LATENT], pages

    num_queries, heads, num_keys = 256, 12, 2**14
    trained = kernel("tpu", "mla_sparse_tpu", lambda fn: gradients(functools.partial(fn, scale=scale)), prepare=split)
    yield Case(
        op="mla_sparse_grad",
        shape=f"B1_T{num_queries}_H{heads}_S{num_keys}",
        make=functools.partial(make, 1, num_queries, heads, num_keys),
        implementations=(plain(plain_gradients), trained),
        flops=6 * num_queries * TOP_K * heads * (2 * LATENT + SHARED),
        hbm_bytes=6 * num_queries * TOP_K * (LATENT + SHARED),
    )


def mxfp4_cases() -> Iterator[Case]:
    """One weight of an expert, at the block that static costs are compared on and at a decode batch."""
    depth, width = EXPERT_IN, EXPERT_HIDDEN

    def make(num_rows, key):
        return normal(key, 0, num_rows, depth), *packed_weight(key, 1, width, depth)

    def plain_form(x, packed, scale):
        return mxfp4.matmul(mxfp4.packed_order(x), packed, scale)

    def dense(x, packed, scale):
        return x, jnp.swapaxes(mxfp4.dequantize(packed, scale, jnp.bfloat16), 0, 1)

    for num_rows in (256, 16):
        block = (min(256, num_rows), 512, 512)
        bf16 = Implementation(
            name="bf16_tpu",
            platforms=("tpu",),
            build=functools.partial(functools.partial, kernel_baselines.bf16_matmul_tpu, block=block),
            prepare=dense,
        )
        yield Case(
            op="mxfp4_matmul",
            shape=f"M{num_rows}_K{depth}_N{width}",
            make=functools.partial(make, num_rows),
            implementations=(
                plain(plain_form),
                bf16,
                kernel("tpu", "mxfp4_matmul_tpu"),
                kernel("gpu", "mxfp4_matmul_gpu"),
            ),
            flops=2 * num_rows * depth * width,
            hbm_bytes=depth * width * MXFP4_BYTES + 2 * num_rows * (depth + width),
        )


def expert_cases() -> Iterator[Case]:
    """The routed experts' FFN: a shard's seven experts on rows sorted by expert; and whole, on a CPU at decode."""

    def weights(num_experts, key):
        wide, tall = (1, num_experts, EXPERT_HIDDEN, EXPERT_IN), (1, num_experts, EXPERT_IN, EXPERT_HIDDEN)
        return experts.ExpertWeights(
            *packed_weight(key, 1, *wide), *packed_weight(key, 2, *wide), *packed_weight(key, 3, *tall)
        )

    def make_sorted(num_rows, num_experts, key):
        # Uneven groups; the last rows belong to none, as a capacity that is not used up leaves them.
        share = uniform(key, 0, num_experts) + 0.2
        sizes = (share / jnp.sum(share) * num_rows).astype(jnp.int32)
        return normal(key, 9, num_rows, EXPERT_IN), sizes, weights(num_experts, key)

    def plain_form(x, sizes, stack):
        ids = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right").astype(jnp.int32)
        out = experts.expert_outputs(x, ids[:, None], stack, 0, *BETAS)[:, 0]
        return jnp.where((ids < sizes.shape[0])[:, None], out, 0)

    def grouped(fn):
        return lambda x, sizes, stack: fn(x, sizes, stack, 0, *BETAS)

    matrices = 3 * EXPERT_IN * EXPERT_HIDDEN
    for num_rows in (16, 64, 1024):
        yield Case(
            op="moe_experts",
            shape=f"M{num_rows}_E7",
            make=functools.partial(make_sorted, num_rows, 7),
            implementations=(
                plain(plain_form),
                kernel("tpu", "moe_experts_tpu", grouped),
                kernel("gpu", "moe_experts_gpu", grouped),
            ),
            flops=2 * num_rows * matrices,
            hbm_bytes=7 * matrices * MXFP4_BYTES + 4 * num_rows * EXPERT_IN,
        )

    # Dequantised to bfloat16 these take 2 GiB. All 896 would take 55, and only widen the distance.
    num_experts = 32

    def make_routed(num_tokens, key):
        _, ids = jax.lax.top_k(uniform(key, 10, num_tokens, num_experts), EXPERTS_PER_TOKEN)
        routing = ids.astype(jnp.int32), uniform(key, 11, num_tokens, EXPERTS_PER_TOKEN)
        return normal(key, 12, num_tokens, EXPERT_IN), *routing, weights(num_experts, key)

    def routed(fn):
        return lambda x, ids, share, stack: fn(x, ids, share, stack, 0, *BETAS)

    for num_tokens in (1, 4, 16):
        used = num_experts * (1 - (1 - EXPERTS_PER_TOKEN / num_experts) ** num_tokens)
        yield Case(
            op="routed_experts",
            shape=f"cpu_N{num_tokens}_E{num_experts}",
            make=functools.partial(make_routed, num_tokens),
            implementations=(
                plain(routed(experts.routed_experts)),
                plain(routed(kernel_baselines.dequantize_then_ragged_dot), "ragged_dot"),
            ),
            flops=2 * num_tokens * EXPERTS_PER_TOKEN * matrices,
            hbm_bytes=used * matrices * MXFP4_BYTES + 4 * num_tokens * EXPERT_IN,
            only=("cpu",),
            target=Target(faster="xla", slower="ragged_dot", ratio=3.0),
        )


def norm_cases() -> Iterator[Case]:
    """RMSNorm, and block attention residuals with the RMSNorm behind them: rows of a decode batch, and of a prefill."""
    model_dim, entries, eps = 7168, 9, 1e-5

    def make_norm(num_rows, key):
        return normal(key, 0, num_rows, model_dim), jnp.ones(model_dim)

    def make_mix(num_rows, key):
        vectors = (normal(key, index, model_dim, dtype=jnp.float32) for index in (2, 3, 4))
        return normal(key, 0, num_rows, model_dim), normal(key, 1, entries, num_rows, model_dim), *vectors

    def mix_and_norm(current, bank, norm_weight, proj_weight, out_norm):
        args = current, bank, entries, norm_weight, proj_weight, eps, out_norm
        return attn_res.mix_and_norm(*args, implementation="xla")

    def fused(fn):
        def mix_and_norm(current, bank, norm_weight, proj_weight, out_norm):
            return fn(current, bank, jnp.int32(entries), norm_weight * proj_weight, out_norm, eps=eps, out_eps=eps)

        return mix_and_norm

    for num_rows in (64, 1024):
        size = num_rows * model_dim
        yield Case(
            op="rms_norm",
            shape=f"M{num_rows}_D{model_dim}",
            make=functools.partial(make_norm, num_rows),
            implementations=(plain(lambda x, weight: norm.rms_norm(x, weight, eps)),),
            flops=4 * size,
            hbm_bytes=4 * size,
        )
        yield Case(
            op="attn_res",
            shape=f"M{num_rows}_D{model_dim}_A{entries}",
            make=functools.partial(make_mix, num_rows),
            implementations=(plain(mix_and_norm), kernel("tpu", "attn_res_tpu", fused, "attn_res_norm_tpu")),
            flops=6 * (entries + 1) * size + 4 * size,
            hbm_bytes=2 * (entries + 2) * size,
        )


def all_cases() -> list[Case]:
    """Every case, in the order of the tables."""
    groups = (kda_cases, kda_decode_cases, indexer_cases, mla_cases, mxfp4_cases, expert_cases, norm_cases)
    return [case for group in groups for case in group()]


def static_spec(name: str) -> tuple[Callable, tuple]:
    """What `aot_compile.static_cost` compiles: "op/shape/implementation"."""
    op, shape, implementation = name.split("/")
    (case,) = (case for case in all_cases() if (case.op, case.shape) == (op, shape))
    (chosen,) = (one for one in case.implementations if one.name == implementation)
    args = jax.eval_shape(lambda key: chosen.prepare(*case.make(key)), jax.random.key(0))
    return jax.jit(chosen.build(), donate_argnums=chosen.donate), args
