"""FLOPs of deep models from those of shallow ones."""

from pathlib import Path

import pytest

from maxmoe.config import load_config
from maxmoe.model.stacks import plan_stacks
from maxmoe.planning.depth import at_depth, flops_at_depth

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


def test_flops_at_depth_are_exact_where_flops_are_linear_in_layers():
    seen = []

    def flops_of(config):
        seen.append(config.num_layers)
        return 100.0 + 7.0 * config.num_layers

    assert flops_at_depth(FULL, flops_of) == 100.0 + 7.0 * 93
    assert seen == [9, 13]


def test_flops_at_depth_compiles_a_shallow_model_as_it_is():
    assert flops_at_depth(TINY, lambda config: float(config.num_layers)) == 9.0


@pytest.mark.parametrize("flops_of", [lambda config: 1e15 / config.num_layers, lambda config: None])
def test_flops_at_depth_gives_none_where_the_compiler_cannot_be_right(flops_of):
    assert flops_at_depth(FULL, flops_of) is None
