"""Costs of deep models from shallow ones."""

from pathlib import Path

import pytest

from maxmoe.config import load_config
from maxmoe.model.stacks import plan_stacks
from maxmoe.planning.depth import UNKNOWN_COSTS, Costs, at_depth, costs_at_depth, more_bank_bytes

ROOT = Path(__file__).resolve().parents[2]
FULL = load_config(ROOT / "configs/k3_1_pro.py")
TINY = load_config(ROOT / "configs/tiny.py")


@pytest.mark.parametrize(("superblocks", "layers"), [(1, 9), (2, 13), (22, 93)])
def test_at_depth_changes_only_the_longest_stack(superblocks, layers):
    found = at_depth(FULL, superblocks)
    assert found.num_layers == layers and found.num_dense_layers == 1
    kept = [(plan.layers, plan.count) for plan in plan_stacks(FULL)]
    assert [(plan.layers, plan.count) for plan in plan_stacks(found)] == [
        (kinds, superblocks if count == 22 else count) for kinds, count in kept
    ]
    assert found.num_attn_res_blocks == 1
    if superblocks == 22:
        assert found.full_attention_layers == FULL.full_attention_layers


def test_costs_at_depth_are_exact_where_costs_are_linear_in_layers():
    seen = []

    def costs_of(config):
        seen.append(config.num_layers)
        return Costs(100.0 + 7.0 * config.num_layers, 3.0 * config.num_layers)

    assert costs_at_depth(FULL, costs_of) == Costs(100.0 + 7.0 * 93, 3.0 * 93)
    assert seen == [9, 13]


def test_costs_at_depth_compiles_a_shallow_model_as_it_is():
    assert costs_at_depth(TINY, lambda config: Costs(float(config.num_layers), None)) == Costs(9.0, None)


def test_costs_at_depth_gives_none_where_the_compiler_cannot_be_right():
    def falling(config):
        return Costs(1e15 / config.num_layers, None)

    assert costs_at_depth(FULL, falling) == UNKNOWN_COSTS


def test_more_bank_bytes_counts_the_entries_that_shallow_models_lack():
    # 93 layers with two mixtures each read 8 entries, of which the shallow models have one.
    assert more_bank_bytes(FULL, 3, 2) == 2 * 93 * 7 * 3 * 7168 * 2
    assert more_bank_bytes(TINY, 3, 2) == 0
