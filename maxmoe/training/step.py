"""The training step: gradients of micro-batches, one update of the masters.

Loss and gradients are sums over trained tokens divided by their number in the whole batch, however it is cut into
micro-batches. All chance comes from the seed and the step's number.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxmoe import axes
from maxmoe.model.transformer import Transformer
from maxmoe.sharding import activation_spec, constrain, current_mesh
from maxmoe.step_jit import StepJit
from maxmoe.training.forward import final_hidden, head_weight
from maxmoe.training.loss import next_token_loss
from maxmoe.training.masters import (
    MasterWeights,
    Trainable,
    declared_masters,
    is_declared,
    make_masters,
    master_shardings,
    path_names,
    split_masters,
)
from maxmoe.training.optimizer import OptimizerSettings, global_norm, make_optimizer


@flax.struct.dataclass
class Batch:
    """Sequences to train on, one per row, padded at the end.

    Attributes:
      ids: Of tokens; what padding holds does not matter, as long as it is in the vocabulary.
      lengths: Real tokens of each row; 0 for a row that is all padding.
      mask: Tokens to be predicted, each from those before it. The first of a row never is.
    """

    ids: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    mask: Bool[Array, "B T"]


@flax.struct.dataclass
class TrainState:
    """What training keeps between steps."""

    step: Int[Array, ""]
    masters: MasterWeights
    optimizer: Any


@flax.struct.dataclass
class Metrics:
    """Of one step.

    Attributes:
      loss: Mean over trained tokens, in nats, before the update.
      gradient_norm: Global, before clipping.
      skipped: Whether the gradient was not finite, so that nothing was updated but the step's number.
    """

    loss: Float[Array, ""]
    num_tokens: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    skipped: Bool[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """A training run's constants.

    Attributes:
      micro_batches: Parts of a batch whose gradients are computed one after the other; each takes every n-th row.
      stochastic_rounding: Of updates of bfloat16 masters: up or down by chance, so that steps far smaller than a
        master's last bit add up. To nearest they would be lost.
    """

    model: Transformer
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    trainable: Trainable = dataclasses.field(default_factory=Trainable)
    micro_batches: int = 1
    stochastic_rounding: bool = True
    seed: int = 0

    def init(self, params: Any, mesh: Mesh | None = None) -> TrainState:
        """The state before the first step, from the model's weights as `load_params` or `init_params` give them."""

        def make(params):
            masters = make_masters(params, self.trainable)
            wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), masters.trained)
            return TrainState(
                step=jnp.zeros((), jnp.int32), masters=masters, optimizer=self._optimizer(None).init(wide)
            )

        if mesh is None:
            return jax.jit(make)(params)
        return jax.jit(make, out_shardings=self.state_shardings(mesh, jax.eval_shape(make, params)))(params)

    def abstract_state(self, mesh: Mesh | AbstractMesh, dtype: Any = jnp.bfloat16) -> TrainState:
        """Shapes and shardings of a state; no array is made.

        Args:
          dtype: Of masters that the checkpoint stores in bfloat16, and of the experts'.
        """

        def shape(leaf):
            kept = dtype if leaf.dtype == jnp.bfloat16 else leaf.dtype
            return jax.ShapeDtypeStruct(leaf.shape, kept)

        declared = declared_masters(self.model)
        masters = split_masters(jax.tree.map(shape, declared, is_leaf=is_declared), self.trainable)

        def make(trained):
            wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)
            return jnp.zeros((), jnp.int32), self._optimizer(None).init(wide)

        step, optimizer = jax.eval_shape(make, masters.trained)
        state = TrainState(step=step, masters=masters, optimizer=optimizer)
        shardings = self.state_shardings(mesh, state)
        return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, shardings)

    def state_shardings(self, mesh: Mesh | AbstractMesh, state: TrainState) -> TrainState:
        """How a state lies on a mesh: masters split over all devices, and what the optimizer keeps as its master.

        Args:
          state: Arrays or shapes.
        """
        whole = master_shardings(self.model, mesh)
        by_path = {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(whole)}
        everywhere = NamedSharding(mesh, PartitionSpec())

        def place(path, leaf):
            names = path_names(path)
            endings = (names[start:] for start in range(len(names)))
            return next((by_path[ending] for ending in endings if ending in by_path), everywhere)

        return jax.tree_util.tree_map_with_path(place, state)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update. For `jax.jit` under `jax.set_mesh`; `train_step` is the compiled form."""
        mesh = current_mesh()
        shardings = None if mesh is None else master_shardings(self.model, mesh)
        loss, num_tokens, gradients = self._gradients(state.masters, batch)
        norm = global_norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        updates, optimizer = self._optimizer(shardings).update(gradients, state.optimizer, state.masters.trained)
        trained = self._apply(state.masters.trained, updates, state.step)
        masters = state.masters._replace(trained=trained)
        new, old = (masters, optimizer), (state.masters, state.optimizer)
        masters, optimizer = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        state = TrainState(step=state.step + 1, masters=masters, optimizer=optimizer)
        if mesh is not None:
            state = jax.lax.with_sharding_constraint(state, self.state_shardings(mesh, state))
        return state, Metrics(loss=loss, num_tokens=num_tokens, gradient_norm=norm, skipped=~finite)

    def _optimizer(self, shardings) -> optax.GradientTransformation:
        return make_optimizer(self.model, self.optimizer, self.trainable, shardings)

    def _gradients(self, masters, batch):
        """Mean loss, trained tokens, and the gradient of the mean loss."""
        rows = batch.ids.shape[0]
        if rows % self.micro_batches:
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into micro_batches={self.micro_batches} equal parts"
            )

        def loss_of(trained, batch):
            whole = masters._replace(trained=trained).whole()
            hidden = final_hidden(self.model, whole, batch.ids, batch.lengths)
            real = jnp.arange(batch.ids.shape[1]) < batch.lengths[:, None]
            return next_token_loss(hidden, head_weight(self.model, whole), batch.ids, batch.mask & real)

        differentiate = jax.value_and_grad(loss_of, has_aux=True)
        if self.micro_batches == 1:
            (loss, count), gradients = differentiate(masters.trained, batch)
        else:

            def one_part(sums, part):
                (loss, count), gradients = differentiate(masters.trained, jax.tree.map(_by_rows, part))
                return jax.tree.map(
                    lambda total, new: total + new.astype(total.dtype), sums, (loss, count, gradients)
                ), None

            wide = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), masters.trained)
            zero = jnp.zeros((), jnp.float32)
            parts = jax.tree.map(self._cut, batch)
            (loss, count, gradients), _ = jax.lax.scan(one_part, (zero, zero, wide), parts)
        count = jnp.maximum(count, 1)
        return loss / count, count, jax.tree.map(lambda g: g.astype(jnp.float32) / count, gradients)

    def _cut(self, x):
        """[B, ...] -> [parts, B / parts, ...]; each device's rows stay on it."""
        return jnp.swapaxes(x.reshape(-1, self.micro_batches, *x.shape[1:]), 0, 1)

    def _apply(self, trained, updates, step):
        leaves, treedef = jax.tree.flatten(trained)

        def one(number, master, update):
            wide = master.astype(jnp.float32) + update
            if self.stochastic_rounding and master.dtype == jnp.bfloat16:
                return round_by_chance(wide, (self.seed, step, number))
            return wide.astype(master.dtype)

        pairs = zip(leaves, jax.tree.leaves(updates), strict=True)
        return treedef.unflatten([one(number, *pair) for number, pair in enumerate(pairs)])


def _by_rows(x):
    return constrain(x, *(axes.BATCH, axes.TOKENS)[: x.ndim])


def round_by_chance(x: Float[Array, "*b"], keys: tuple[int | Int[Array, ""], ...]) -> Float[Array, "*b"]:
    """float32 values to one of their two neighbours in bfloat16, the nearer the likelier: the mean is the value.

    The chance is a hash of the keys and of each element's place, a few integer operations that need no memory and
    give the same bits however the array is split; `jax.random` writes its bits out. NaN and infinities stay.
    """
    chance = jnp.zeros((1,) * x.ndim, jnp.uint32)
    for key in keys:
        chance = _mixed(chance ^ jnp.uint32(key))
    for dim in range(x.ndim):
        chance = _mixed(chance ^ jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (chance >> 16)
    cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def _mixed(x):
    """The 32-bit finaliser of MurmurHash3, of x plus a constant that keeps zero from staying zero."""
    x = x + jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def batch_shardings(mesh: Mesh | AbstractMesh, batch: Batch) -> Batch:
    """Rows and tokens of a batch as activations lie."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, activation_spec(mesh, (axes.BATCH, axes.TOKENS)[: x.ndim], x.shape)), batch
    )


@functools.partial(StepJit, static_argnums=0, donate_argnums=1)
def _step(trainer, state, batch):
    return trainer.step(state, batch)


def train_step(trainer: Trainer, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update, on the mesh that the state lies on. The state is used up.

    Raises: ValueError if the batch does not divide into micro-batches.
    """
    sharding = state.step.sharding
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        batch = jax.device_put(batch, batch_shardings(sharding.mesh, batch))
        with jax.set_mesh(sharding.mesh):
            return _step(trainer, state, batch)
    return _step(trainer, state, batch)
