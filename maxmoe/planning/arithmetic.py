"""What is known of a plan before anything is compiled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxmoe.model.transformer import Transformer
from maxmoe.planning.bound import Bound, roofline
from maxmoe.planning.capacity import Capacity, capacity, training_capacity
from maxmoe.planning.chips import Topology
from maxmoe.planning.hlo import Collective
from maxmoe.planning.network import expected_collectives
from maxmoe.planning.placement import abstract_mesh, placed_cache, placed_params
from maxmoe.planning.work import Work, needed_work
from maxmoe.training.step import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned: a step of a model on a slice.

    Attributes:
      context: Tokens of each sequence that the caches have room for.
      chunk: Tokens per sequence in one step.
      cache_dtype: Of what the cache keeps per token.
    """

    model: Transformer
    topology: Topology
    phase: str
    batch: int
    context: int
    chunk: int
    cache_dtype: Any

    @property
    def tokens(self) -> int:
        """Of one step, over the whole mesh."""
        return self.batch * self.chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The answer for one mesh."""

    capacity: Capacity
    work: Work
    collectives: tuple[Collective, ...]
    bound: Bound


def arithmetic(question: Question, mesh_sizes: Mapping[str, int]) -> Arithmetic:
    """Capacity, needed work, expected collectives and the bound.

    Raises: ValueError if weights, caches or tokens do not divide over the mesh.
    """
    mesh = abstract_mesh(mesh_sizes)
    config = question.model.config
    params = placed_params(question.model, mesh)
    cache = None
    if question.phase != "train":
        cache = placed_cache(question.model, mesh, question.batch, question.context, question.cache_dtype)
    held = capacity(params, cache)
    work = needed_work(config, params, held, mesh, question.phase, question.batch, question.context, question.chunk)
    if question.phase == "train":
        held = training_capacity(Trainer(model=question.model).abstract_state(mesh))
    exchanged = expected_collectives(config, question.topology, mesh, question.phase, question.batch, question.chunk)
    bound = roofline(question.topology, work.flops, work.unavoidable_bytes, exchanged)
    return Arithmetic(capacity=held, work=work, collectives=tuple(exchanged), bound=bound)
