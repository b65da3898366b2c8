"""The model's forward pass as training runs it: from masters, layer by layer, nothing of a layer kept but its input.

The layers are the model's own. Masters lie split over all devices; a layer's part is gathered when it runs, in both
passes, and its gradient is summed straight into each device's part.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.model.block import layer_of
from maxmoe.model.cache import Spans, make_layer_cache
from maxmoe.model.stacks import FFN, plan_stacks
from maxmoe.model.transformer import Transformer
from maxmoe.sharding import ShardingRules, constrain, current_mesh
from maxmoe.training.masters import declared_masters, expert_masters, is_declared

_TOP = ("embedding", "final_res_norm", "final_res_proj", "final_norm", "lm_head")


def final_hidden(
    model: Transformer, masters: Any, ids: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, "B T D"]:
    """What the head is applied to, of every token. Padding behind a row's `lengths[b]` tokens reaches none of them.

    Args:
      masters: A whole master tree.
    """
    declared = declared_masters(model)
    top = {name: _gathered(model, masters[name], declared[name]) for name in _TOP}
    spans = Spans(start=jnp.zeros_like(lengths), lengths=lengths)
    current, bank = model.apply({"params": top}, ids, method="begin")
    carry = _kept(current), _kept(bank)
    for number, plan in enumerate(plan_stacks(model.config)):
        name = f"stacks_{number}"
        carry = _run_stack(model, plan, masters[name], declared[name], carry, spans)
    return model.apply({"params": top}, *map(_whole, carry), method="final_hidden")


def head_weight(model: Transformer, masters: Any) -> Float[Array, "V D"]:
    """The head, each device's part of the vocabulary whole."""
    return _gathered(model, masters["lm_head"], declared_masters(model)["lm_head"])


def _run_stack(model, plan, weights, declared, carry, spans):
    experts = tuple(
        expert_masters(weights[f"experts_{place}"]) if kind.ffn is FFN.MOE else None
        for place, kind in enumerate(plan.layers)
    )
    if "scanned" in weights:

        def one_superblock(carry, step):
            layers, experts, superblock = step
            experts = jax.tree.map(lambda leaf: leaf[None], experts)
            return _run_superblock(model, plan, layers, declared["scanned"], carry, experts, superblock, spans), None

        carry, _ = jax.lax.scan(one_superblock, carry, (weights["scanned"], experts, jnp.arange(plan.count)))
        return carry
    for superblock in range(plan.count):
        name = f"superblocks_{superblock}"
        of_block = jax.tree.map(operator.itemgetter(slice(superblock, superblock + 1)), experts)
        carry = _run_superblock(model, plan, weights[name], declared[name], carry, of_block, superblock, spans)
    return carry


def _run_superblock(model, plan, weights, declared, carry, experts, superblock, spans):
    for place in range(plan.size):
        name = f"layers_{place}"
        depth = plan.first + superblock * plan.size + place
        run = functools.partial(_run_layer, model, plan, place, declared[name])
        carry = jax.checkpoint(run)(weights[name], carry, experts[place], depth, spans)
    return carry


def _run_layer(model, plan, place, declared, weights, carry, experts, depth, spans):
    """One layer of sequences that begin here. Its experts, and its cache, are a stack of one."""
    current, bank = map(_whole, carry)
    layer = layer_of(model.config, plan, place, model.implementation)
    cache = make_layer_cache(model.config, layer.kind.mixer, 1, *current.shape[:2], current.dtype)
    weights = jax.tree.map(lambda leaf, weight: _gathered(model, weight, leaf), declared, weights, is_leaf=is_declared)
    args = current, bank, cache, experts, depth, 0, spans
    current, bank, _ = layer.apply({"params": weights}, *args, method="prefill")
    return _kept(current), _kept(bank)


# ---- On a mesh ------------------------------------------------------------------------------------------------------


def _kept(x):
    """Residuals [..., B, T, D] between layers, split over all devices: they are most of what training keeps."""
    return constrain(x, *[None] * (x.ndim - 3), axes.BATCH, axes.TOKENS, axes.EMBED)


def _whole(x):
    """Residuals as layers take them: every token's whole."""
    return constrain(x, *[None] * (x.ndim - 3), axes.BATCH, axes.TOKENS, None)


def _gathered(model, weight, declared):
    """A weight as layers take it, from its master's parts; its gradient is summed into those parts."""
    mesh = current_mesh()
    if mesh is None:
        return weight
    names = declared.names[-weight.ndim :]  # without that of the layers, inside a scan over them
    whole, parts = (
        ShardingRules(mesh, model.config, fsdp=fsdp).sharding(names, weight.shape, "a weight") for fsdp in (False, True)
    )
    return _gather(whole, parts, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole, parts, weight):
    return jax.lax.with_sharding_constraint(weight, whole)


def _gather_forward(whole, parts, weight):
    return _gather(whole, parts, weight), None


def _gather_backward(whole, parts, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, parts),)


_gather.defvjp(_gather_forward, _gather_backward)
