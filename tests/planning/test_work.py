"""What a step needs at the least, against figures worked out by hand for the full-size model."""

from pathlib import Path

import numpy as np
import pytest

from maxmoe.config import load_config
from maxmoe.model.transformer import Transformer
from maxmoe.planning.bound import Bound, roofline
from maxmoe.planning.capacity import capacity
from maxmoe.planning.chips import parse_topology
from maxmoe.planning.hlo import Collective
from maxmoe.planning.network import expected_collectives, floor_seconds, network_seconds
from maxmoe.planning.placement import abstract_mesh, placed_cache, placed_params
from maxmoe.planning.work import needed_work, num_moe_layers, touched_share

ROOT = Path(__file__).resolve().parents[2]
MODEL = Transformer(load_config(ROOT / "configs/k3_1_pro.py"))


def _work(phase, batch, context, chunk=1, **sizes):
    mesh = abstract_mesh(sizes)
    params, cache = placed_params(MODEL, mesh), placed_cache(MODEL, mesh, batch, context)
    return needed_work(MODEL.config, params, capacity(params, cache), mesh, phase, batch, context, chunk)


def test_touched_share_is_what_draws_give():
    rng = np.random.default_rng(0)
    draws = np.mean([len({e for _ in range(9) for e in rng.permutation(28)[:4]}) / 28 for _ in range(2000)])
    assert abs(touched_share(28, 4, 9) - draws) < 0.005  # 2000 draws of a share with a spread under 0.1
    assert touched_share(896, 16, 1) == pytest.approx(16 / 896)
    assert touched_share(896, 16, 0) == 0


def test_decode_of_one_sequence_reads_the_active_weights():
    """113 GB beside the experts, of which 2.35 are the embedding's; 92 x 16 experts of 33.03M weights at 4.25 bits."""
    found = _work("decode", 1, 8192)
    experts = 92 * 16 * 33_030_144 * 4.25 / 8
    weights = 56_921_000_000 * 2  # 55.55B + indexers and what is in float32; to a percent
    assert found.weight_bytes == pytest.approx(weights - 163_840 * 7168 * 2 + experts, rel=0.01)
    # 208 GFLOP with weights, and at 8k the mixers' own: 69 delta rules, 24 x (scores of 8k keys, 2048 rows attended).
    mixers = 69 * 7 * 96 * 128**2 + 24 * (2 * 32 * 128 * 8192 + 2 * 96 * 2048 * (576 + 512))
    assert found.flops == pytest.approx(208.4e9 + mixers, rel=0.005)


def test_decode_reads_index_keys_whole_and_selected_rows_only():
    found = _work("decode", 2, 1_048_576)
    state = 69 * 2 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2)
    keys, rows = 24 * 2 * 1_048_576 * 128 * 2, 24 * 2 * 2048 * 576 * 2
    written = 24 * 2 * (576 + 128) * 2
    assert found.cache_bytes == pytest.approx(2 * state + keys + rows + written, rel=1e-6)


def test_a_short_cache_is_read_whole_and_its_keys_are_not():
    found = _work("decode", 2, 1024)
    state = 69 * 2 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2)
    assert found.cache_bytes == pytest.approx(2 * state + 24 * 2 * (1024 * 576 + 576 + 128) * 2, rel=1e-6)


def test_needed_work_shrinks_with_the_mesh():
    one, many = _work("decode", 8, 65_536), _work("decode", 8, 65_536, expert=4, tensor=16)
    assert many.touched_experts == one.touched_experts
    assert one.flops / 64 <= many.flops < one.flops / 3  # what is not split is done by all
    # Over `data`, each replica of the experts sees half of the tokens, so touches fewer. Over `expert`, none does.
    assert _work("decode", 8, 65_536, data=2, tensor=32).touched_experts == touched_share(896, 16, 4)


def test_prefill_needs_the_head_for_last_tokens_only():
    one, two = (_work("prefill", 1, 65_536, chunk) for chunk in (1024, 2048))
    head = 2 * 163_840 * 7168
    assert (two.flops - head) / (one.flops - head) == pytest.approx(2, rel=1e-9)
    assert one.tokens == 1024


def test_roofline_names_the_longest():
    chips = parse_topology("v5p:2x2x1")
    gather = Collective("all-gather", 3, 8e9, 6e9, 4, False, "")
    found = roofline(chips, flops=459e12, moved_bytes=2 * 2765e9, collectives=[gather])
    assert found == Bound(memory=2.0, compute=1.0, network=3 * 6e9 / 600e9)
    assert (found.name, found.seconds, found.tokens_per_s(10)) == ("memory", 2.0, 5.0)
    assert Bound(1, 2, 3).name == "network" and Bound(1, 2, 1).name == "compute"


def test_collectives_across_nodes_are_slower():
    gpus = parse_topology("h200:16")
    near, far = (Collective("all-reduce", 1, 1e9, 1e9, 8, across, "") for across in (False, True))
    assert network_seconds(gpus, [near]) == 1e9 / 450e9 and network_seconds(gpus, [far]) == 1e9 / 50e9
    assert floor_seconds(gpus, [near, far]) == pytest.approx(2 * 6.5e-6)


def test_expected_collectives_follow_the_mesh():
    gpus = parse_topology("h200:16")

    def listed(phase, batch, chunk, **sizes):
        found = expected_collectives(MODEL.config, gpus, abstract_mesh(sizes), phase, batch, chunk)
        return sorted((c.kind, c.source, c.count, c.bytes, c.across_nodes) for c in found)

    assert num_moe_layers(MODEL.config) == 92
    assert listed("decode", 16, 1, data=16) == []
    stream, latent, query, partial, candidates = 7168 * 2, 3584 * 2, 96 * 576 * 2, 96 * 513 * 4, 2048 * 8
    # Eight sequences on each half. Sending a token to 16 experts in two halves is more than to both halves.
    assert listed("decode", 16, 1, expert=2, tensor=8) == [
        ("all-gather", "over expert", 92, 2 * 8 * latent, True),
        ("all-gather", "over tensor", 24, 8 * query, False),
        ("all-gather", "over tensor", 24, 8 * 8 * candidates, False),
        ("all-reduce", "over tensor", 24, 8 * partial, False),
        ("all-reduce", "over tensor", 92, 8 * latent, False),
        ("all-reduce", "over tensor", 186, 8 * stream, False),
        ("reduce-scatter", "over expert", 92, 2 * 8 * latent, True),
    ]
    assert listed("prefill", 64, 128, expert=64) == [("all-to-all", "over expert", 184, 128 * latent * 16, True)]
    # One sequence: every device has its token, holds a quarter of slots and experts, and adds up what these give.
    assert listed("decode", 1, 1, seq=4) == [
        ("all-gather", "over seq", 24, 4 * candidates, False),
        ("all-reduce", "over seq", 24, partial, False),
        ("all-reduce", "over seq", 92, latent, False),
    ]
