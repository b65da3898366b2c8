"""The step that a plan compiles: the model's own, with shapes and shardings for arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxmoe.inference import steps
from maxmoe.model.transformer import Transformer
from maxmoe.planning import targets
from maxmoe.planning.placement import placed_batch, placed_cache, placed_params, placed_rows
from maxmoe.step_jit import StepJit
from maxmoe.training.step import Trainer


class Step(NamedTuple):
    """A function with the shapes it is called with."""

    fn: Callable
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...]


def step_to_compile(
    model: Transformer, mesh: Any, phase: str, batch: int, context: int, chunk: int = 1, dtype: Any = jnp.bfloat16
) -> Step:
    """The step of a phase, with every argument placed on a mesh.

    Args:
      context: Tokens that the cache has room for; of each sequence, where training.
      chunk: Tokens per sequence that a prefill step appends.
      dtype: Of what the cache keeps per token.
    Raises: ValueError if something does not divide over the mesh; NotImplementedError for a phase without a step.
    """
    if phase == "train":
        trainer = Trainer(model=model)
        return Step(trainer.step, (trainer.abstract_state(mesh), placed_batch(mesh, batch, context)), (0,))
    params = placed_params(model, mesh)
    cache = placed_cache(model, mesh, batch, context, dtype)
    if phase == "decode":

        def decode(params, token, cache):
            return steps._decode_body(model, params, token, cache)

        return Step(decode, (params, placed_rows(mesh, batch), cache), (2,))
    if phase == "prefill":

        def prefill(params, ids, cache, lengths):
            return steps._prefill.__wrapped__(model, params, ids, cache, lengths)

        return Step(prefill, (params, placed_rows(mesh, batch, chunk), cache, placed_rows(mesh, batch)), (2,))
    raise NotImplementedError(
        f"phase {phase!r}: maxmoe has no such step yet; phases that compile are decode, prefill and train"
    )


def compile_on(mesh: Any, step: Step) -> jax.stages.Compiled:
    """Compiles a step for the devices of a mesh."""
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(targets.with_device_kind(mesh)):
        return StepJit(step.fn, donate_argnums=step.donate_argnums).lower(*step.args).compile()
