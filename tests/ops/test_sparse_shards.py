"""Attention over a cache split over devices: the slots, numbers and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxmoe.ops import query_blocks, sparse_shards
from maxmoe.ops.indexer import index_scores, select_tokens
from maxmoe.ops.latent_cache import empty_rows
from maxmoe.ops.sparse_mla import combine, dense_context, sparse_context
from tests.ops import sparse_shards_on_devices as devices
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.eight_devices import run_on_eight_devices
from tests.ops.quick_jit import quick_jit

GRADIENTS = ("context", "gradient of q", "gradient of q_shared", "gradient of latents", "gradient of shared parts")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Name -> the arrays that a process of eight devices found."""
    path = tmp_path_factory.mktemp("sparse_shards") / "results.npz"
    run_on_eight_devices(devices.__file__, path)
    results = {}
    with np.load(path) as file:
        for name, x in file.items():
            results.setdefault(name.rpartition("#")[0], []).append(x)
    assert int(results["devices"][0]) == 8
    return results


# ---- Which slots ----------------------------------------------------------------------------------------------------


@functools.cache
def _chosen(case, top_k):
    """The slots of one device, best first; and the scores that they have there."""
    q, keys, weights, positions = devices.select_cases()[case]
    slots = quick_jit(lambda *args: select_tokens(*args, top_k))(q, keys, devices.LAYER, weights, positions)
    return np.asarray(slots), np.asarray(index_scores(q, keys[devices.LAYER], weights))


@pytest.mark.multidevice
@pytest.mark.parametrize(("mesh", "slot_axes", "form", "check_vma"), devices.SELECT_RUNS)
def test_select_over_shards_chooses_the_slots_of_one_device(found, mesh, slot_axes, form, check_vma):
    sizes = dict(zip(("seq", "expert", "tensor"), devices.MESHES[mesh], strict=True))
    num_shards = np.prod([sizes[axis] for axis in slot_axes])
    per_shard = devices.NUM_SLOTS // num_shards
    for top_k, given in zip(devices.SELECT_TOP_K, found[f"select/{mesh}/{slot_axes}/{form}"], strict=True):
        given = given.reshape(-1, 2, 5, num_shards, top_k)
        assert given.dtype == np.int32 and (given >= -1).all() and (given < per_shard).all(), top_k
        for case, slots in zip(devices.select_cases(), given, strict=True):
            chosen, _ = _chosen(case, top_k)
            for b, t, shard in np.ndindex(2, 5, num_shards):
                # One device's list, best first, keeps its order within each shard's part.
                part = [s - shard * per_shard for s in chosen[b, t].tolist() if s >= 0 and s // per_shard == shard]
                expected = part + [-1] * (top_k - len(part))
                assert slots[b, t, shard].tolist() == expected, (case, top_k, b, t, shard, chosen[b, t])


def test_select_cases_reach_what_they_are_named_for():
    """So that the test above cannot pass for want of ties, of NaN, or of shards that give nothing."""
    _, scores = _chosen("many ties", 5)
    ordered = np.sort(scores[..., : devices.NUM_SLOTS], axis=-1)
    assert (ordered[..., -13] == ordered[..., -14]).mean() > 0.5  # rank 13 and 14 tie, and so the place decides
    slots, scores = _chosen("NaN scores", 13)
    assert np.isnan(np.take_along_axis(scores, np.maximum(slots, 0), -1))[slots >= 0].any()
    best, _ = _chosen("one device holds the best", 5)
    assert set(np.unique(best // 6)) == {3}
    assert (_chosen("few visible", 5)[0][1] == -1).all()


def _reference_counts(lists, top_k):
    """Sorts all entries by (score descending, list, place) and counts by list."""
    counts = np.zeros(lists.shape[:2], np.int32)
    for query in range(lists.shape[1]):
        entries = [(-x, p, i) for p, row in enumerate(lists[:, query]) for i, x in enumerate(row) if x > -np.inf]
        for _, p, _ in sorted(entries)[:top_k]:
            counts[p, query] += 1
    return counts


@pytest.mark.parametrize("top_k", [1, 4, 7, 30])
def test_num_selected_counts_as_a_sort_does(top_k):
    rng = np.random.default_rng(1)
    values = np.float32([-np.inf, np.finfo(np.float32).min, -2.5, -1, -1e-30, -0.0, 0, 1e-30, 1, 1.5, 3e38, np.inf])
    lists = -np.sort(-rng.choice(values, (3, 40, 7)), axis=-1)
    lists[:, 0], lists[:, 1], lists[1:, 2] = -np.inf, 1, -np.inf
    given = jax.jit(sparse_shards.num_selected, static_argnums=1)(lists, top_k)
    assert_same_bits(given, _reference_counts(lists, top_k))
    assert (np.asarray(given).sum(axis=0) == np.minimum(top_k, (lists > -np.inf).sum(axis=(0, 2)))).all()


def test_num_selected_of_the_case_report():
    lists = np.float32([[[5, 5, 1]], [[9, 5, 2]]])  # the best three of each half of 5 1 5 0 | 5 9 5 2
    assert np.asarray(sparse_shards.num_selected(lists, 3)).tolist() == [[2], [1]]


def test_choose_exchange_goes_by_bytes():
    assert sparse_shards.choose_exchange(1, 2048, 128) == "gathered"
    assert sparse_shards.choose_exchange(64, 2048, 16) == "gathered"
    assert sparse_shards.choose_exchange(78, 2048, 16) == "gathered"
    assert sparse_shards.choose_exchange(79, 2048, 16) == "exchanged"
    assert sparse_shards.choose_exchange(8192, 2048, 16) == "exchanged"


def test_queries_per_block_are_whole_tiles_with_little_padding():
    cases = ((1024, 445, 256), (1024, 256, 256), (1000, 445, 256), (1000, 76, 72), (5, 445, 5), (1024, 3, 3), (9, 8, 8))
    for num_queries, size, expected in cases:
        elements = query_blocks.BUDGET // size
        given = sparse_shards.queries_per_block(num_queries, elements)
        assert given == expected
        # What the blocks are made by gives this size again.
        assert min(num_queries, query_blocks.BUDGET // (query_blocks.BUDGET // given)) == given


def test_choose_movement_goes_by_bytes():
    def of_k3(num_queries, num_slots, heads=96, top_k=2048, devices=16):
        rows = jax.eval_shape(lambda: empty_rows(24, 1, num_slots, 512, 64, jnp.bfloat16))
        return sparse_shards.choose_movement(num_queries, heads, rows, top_k, devices)

    assert of_k3(1, 8192) == of_k3(64, 8192) == "queries"  # decode
    assert of_k3(8192, 8192) == "rows"  # prefill at 1M on 128 devices
    assert of_k3(8192, 65536) == "queries"  # the same on 16: 1.2 GB is more than may be gathered
    # 307,200 bytes a query against 151 MB of rows and 8 a slot chosen.
    assert of_k3(519, 8192) == "queries" and of_k3(520, 8192) == "rows"
    assert of_k3(491, 8192, top_k=0) == "queries" and of_k3(492, 8192, top_k=0) == "rows"


# ---- Attention ------------------------------------------------------------------------------------------------------


@functools.cache
def _on_one_device(kind, case, top_k=devices.ATTEND_TOP_K):
    def attend(q, q_shared, index_q, index_keys, weights, rows, positions):
        if kind == "dense":
            return dense_context(q, q_shared, rows, devices.LAYER, positions, devices.SCALE)[0]
        slots = select_tokens(index_q, index_keys, devices.LAYER, weights, positions, top_k)
        return sparse_context(q, q_shared, rows, devices.LAYER, slots, devices.SCALE)[0]

    run = quick_jit(functools.partial(devices.with_gradients, attend))
    return [np.asarray(x) for x in run(devices.attend_inputs(case), devices.attend_cotangent(case))]


def _assert_equal(given, expected, label):
    for name, x, exact in zip(GRADIENTS, given, expected, strict=True):
        # Sums of at most some hundred float32 products, joined in another order: a few roundings of 6e-8 of the
        # largest value. Gradients of rows add those of all queries and heads.
        rounding = 1e-6 if name == "context" else 3e-6
        assert_close(x, exact, atol=rounding * np.abs(exact).max(), label=f"{label}: {name}")


@pytest.mark.multidevice
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("number", range(len(devices.LAYOUTS)), ids=lambda n: "-".join(map(str, devices.LAYOUTS[n])))
def test_attention_over_shards_equals_one_device_and_its_gradients(found, kind, number):
    for case in devices.attend_cases(devices.LAYOUTS[number]):
        _assert_equal(found[f"{kind}/{number}/{case}"], _on_one_device(kind, case), case)


@pytest.mark.multidevice
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_attention_over_shards_gives_zeros_where_nothing_is_seen(found, kind):
    positions = devices.attend_inputs("prefill")[-1]
    for number in range(len(devices.LAYOUTS)):
        context, d_q, d_shared, *d_rows = found[f"{kind}/{number}/prefill"]
        for x in (context, d_q, d_shared):
            assert (x[positions < 0] == 0).all()
            assert (np.abs(x[positions > 0]).max(axis=(1, 2)) > 0).all()
        for x in d_rows:
            assert (x[devices.LAYER, 1, positions[1, -1] + 1 :] == 0).all() and (x[1 - devices.LAYER] == 0).all()


@pytest.mark.multidevice
def test_attention_over_all_slots_is_dense(found):
    _assert_equal(found["all slots"], _on_one_device("dense", "prefill"), "against dense_context")


@pytest.mark.multidevice
def test_attention_over_shards_rounds_bfloat16_a_few_times(found):
    *arrays, positions = devices.attend_inputs("prefill")
    q, q_shared, index_q, index_keys, weights, rows = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    slots = select_tokens(index_q, index_keys, devices.LAYER, weights, positions, devices.ATTEND_TOP_K)
    q, q_shared, rows = jax.tree.map(lambda x: x.astype(jnp.float32), (q, q_shared, rows))
    exact, _ = sparse_context(q, q_shared, rows, devices.LAYER, slots, devices.SCALE)
    # Probabilities, each device's context and the result are rounded to 8 bits.
    assert_close(found["bfloat16"][0], exact, atol=3 * 2**-8 * np.abs(exact).max())


@pytest.mark.multidevice
def test_attention_over_shards_holds_one_block_whatever_the_queries(found):
    few, many = (int(found[f"temp/{tokens}"][0]) for tokens in (1024, 4096))
    # Beside a block, of some 2 MB, there are the device's own queries: 4 of 16 per token for inputs and results.
    growth = 3072 // 4 * (2 * 3 * 16 + 4 * 16 + 4 * 16) * 4
    assert many - few < growth, (few, many)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_attention_over_one_shard_is_that_of_one_device(kind):
    for slot_axes in (devices.SLOTS, ()):
        layout = devices.Layout("one", slot_axes, "tensor", "seq", check_vma=True)
        run = quick_jit(functools.partial(devices.with_gradients, devices.sharded_attention(kind, layout)))
        given = run(devices.attend_inputs("prefill"), devices.attend_cotangent("prefill"))
        _assert_equal(given, _on_one_device(kind, "prefill"), f"slots over {slot_axes}")


def _mapped(function):
    """`function` in a mesh of one device."""
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=devices.make_mesh("one"), in_specs=spec, out_specs=spec, check_vma=False)


def test_combine_over_shards_ignores_a_shard_that_sees_nothing():
    rng = np.random.default_rng(2)
    contexts = rng.standard_normal((1, 2, 3, 4, 5)).astype(np.float32)
    log_sum_exps = rng.standard_normal((1, 2, 3, 4)).astype(np.float32) * 50
    log_sum_exps[0, 1], contexts[0, 1] = -np.inf, np.nan
    given = _mapped(lambda c, s: sparse_shards.combine_over_shards(c, s, ("seq",)))(contexts[0], log_sum_exps[0])
    expected, _ = combine(np.nan_to_num(contexts), log_sum_exps)
    assert_close(given, expected, atol=1e-6)  # one product and one division in float32
    assert (np.asarray(given)[1] == 0).all()


def test_combine_over_shards_refuses_axes_that_are_not_summed_over():
    context, log_sum_exp = np.zeros((1, 2, 4, 5), np.float32), np.zeros((1, 2, 4), np.float32)
    for heads, queries in (("tensor", None), (None, "tensor"), ("seq", "seq")):
        with pytest.raises(ValueError, match=r"give different ones of the axes \('seq',\) that are summed over"):
            _mapped(lambda c, s, h=heads, q=queries: sparse_shards.combine_over_shards(c, s, ("seq",), h, q))(
                context, log_sum_exp
            )


def test_attention_over_shards_refuses_one_axis_for_heads_and_queries():
    inputs = devices.attend_inputs("decode")
    for kind in ("sparse", "dense"):
        with pytest.raises(ValueError, match="head_axis and query_axis are both 'seq'"):
            _mapped(devices_layer(kind, head_axis="seq", query_axis="seq"))(inputs)


def test_attention_over_shards_refuses_keys_of_another_length():
    q, q_shared, index_q, keys, *rest = devices.attend_inputs("decode")
    with pytest.raises(ValueError, match="index_keys hold 47 slots and rows 48"):
        _mapped(devices_layer("sparse"))((q, q_shared, index_q, keys[..., 1:], *rest))


def devices_layer(kind, **roles):
    def attend(inputs):
        q, q_shared, index_q, keys, weights, rows, positions = inputs
        common = {"slot_axes": devices.SLOTS, **roles}
        if kind == "dense":
            return sparse_shards.dense_attention_over_shards(
                q, q_shared, rows, devices.LAYER, positions, devices.SCALE, **common
            )
        return sparse_shards.sparse_attention_over_shards(
            q, q_shared, index_q, keys, weights, rows, devices.LAYER, positions, 3, devices.SCALE, **common
        )

    return attend
