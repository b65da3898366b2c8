"""The optimizer: Muon for matrices, AdamW for everything else, clipping, and the schedule of the learning rate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxmoe import axes
from maxmoe.model.stacks import Mixer, plan_stacks
from maxmoe.model.transformer import Transformer
from maxmoe.training.masters import Declared, Trainable, declared_masters, is_declared, path_names, split_masters
from maxmoe.training.muon import Matrices, scale_by_muon

_MATRIX_AXES = {axes.EMBED, axes.HEADS, axes.LATENT, axes.EXPERT_EMBED, axes.EXPERT_MLP, axes.MLP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the optimizer is told.

    Attributes:
      peak_lr: After `warmup_steps` of linear increase; from there a cosine to `end_lr` at step `num_steps`.
      weight_decay: Of matrices, embedding and head, times the learning rate, apart from the gradient.
      clip_norm: The largest global norm of a gradient; a longer one is shortened to it.
      momentum_dtype: Of Muon's momentum, one value per matrix weight.
    """

    peak_lr: float = 2e-4
    end_lr: float = 2e-5
    warmup_steps: int = 100
    num_steps: int = 10_000
    muon_beta: float = 0.95
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    momentum_dtype: str = "float32"

    def __post_init__(self):
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}, num_steps={self.num_steps}: the first must be 0 or more, and less "
                "than the second"
            )
        if self.peak_lr <= 0 or self.clip_norm <= 0:
            raise ValueError(f"peak_lr={self.peak_lr}, clip_norm={self.clip_norm}: both must be above 0")

    def schedule(self) -> optax.Schedule:
        """Learning rate by step, from 0."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if self.warmup_steps else self.peak_lr,
            peak_value=self.peak_lr,
            warmup_steps=self.warmup_steps,
            decay_steps=self.num_steps,
            end_value=self.end_lr,
        )


def make_optimizer(
    model: Transformer, settings: OptimizerSettings, trainable: Trainable, shardings: Any = None
) -> optax.GradientTransformation:
    """The optimizer of the trained part of a master tree.

    Its state is in float32, but for the momentum, if it is initialised with float32 parameters.

    Args:
      shardings: Of the whole master tree, for a step on a mesh; None for one device.
    """
    declared = declared_masters(model)
    if shardings is None:
        shardings = jax.tree.map(lambda _: None, declared, is_leaf=is_declared)

    def of_trained(function):
        def of_leaf(path, leaf, sharding):
            return function(path_names(path), leaf, sharding)

        whole = jax.tree_util.tree_map_with_path(of_leaf, declared, shardings, is_leaf=is_declared)
        return split_masters(
            whole, trainable, is_leaf=lambda leaf: isinstance(leaf, Matrices | optax.MaskedNode)
        ).trained

    def matrices(path, leaf, sharding):
        return _matrices(model, path, leaf, sharding) if _is_matrix(leaf) else optax.MaskedNode()

    decayed = optax.add_decayed_weights(
        settings.weight_decay, of_trained(lambda path, leaf, _: _is_matrix(leaf) or axes.VOCAB in leaf.names)
    )
    rules = {
        "muon": scale_by_muon(of_trained(matrices), settings.muon_beta, jnp.dtype(settings.momentum_dtype)),
        "adamw": optax.scale_by_adam(*settings.adam_betas, eps=settings.adam_eps),
    }
    labels = of_trained(lambda path, leaf, _: "muon" if _is_matrix(leaf) else "adamw")
    return optax.chain(
        clip_by_global_norm(settings.clip_norm),
        optax.partition(rules, labels),
        decayed,
        optax.scale_by_learning_rate(settings.schedule()),
    )


def global_norm(tree: Any) -> Float[Array, ""]:
    """The Euclidean norm of all leaves together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Shortens gradients to a global norm of at most `limit`; norm and factor in float32, whatever the gradients are.

    `optax.clip_by_global_norm` sums squares in the gradients' own dtype, which in bfloat16 stops growing early.
    """

    def update(gradients, state, params=None):
        del params
        norm = global_norm(gradients)
        factor = jnp.where(norm > limit, limit / norm, 1.0)
        return jax.tree.map(lambda g: g.astype(jnp.float32) * factor, gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_matrix(leaf: Declared) -> bool:
    """Whether the last two axes are those of a matrix that maps between wide spaces, neither table nor convolution."""
    return len(leaf.names) >= 2 and _MATRIX_AXES.issuperset(leaf.names[-2:])


def _matrices(model, path, leaf, sharding):
    """How a matrix leaf is cut: attention projections into heads, as K3 was trained."""
    *_, rows, columns = leaf.names
    if axes.HEADS not in (rows, columns):
        return Matrices(spec=sharding)
    head_axis = -2 if rows == axes.HEADS else -1
    heads = _num_heads(model, path)
    # A projection to one value per head, such as beta's, is one matrix.
    return Matrices(heads if leaf.shape[head_axis] > heads else 1, head_axis, sharding)


def _num_heads(model, path):
    config = model.config
    if "indexer" in path:
        return config.indexer.num_heads
    stack = int(path[0].removeprefix("stacks_"))
    place = next(int(name.removeprefix("layers_")) for name in path if name.startswith("layers_"))
    mixer = plan_stacks(config)[stack].layers[place].mixer
    return config.kda.num_heads if mixer is Mixer.KDA else config.mla.num_heads
