"""A case of `bench_kernels.py`: an op at a shape, its useful work, and the implementations that are measured on it."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxmoe.ops import mxfp4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute a case.

    Attributes:
      platforms: Where it runs: any of cpu, tpu, gpu.
      build: Imports what it needs and returns a function of the prepared arguments. Its first result is compared.
      prepare: Brings the case's arguments into the layout it wants. Not timed: a cache has it already.
      donate: Arguments that are updated in place.
      feed: Arguments of the next call, from those of the last one and its results, where some are donated.
      module: Of pallas_kernels, to say that it is not there.
    """

    name: str
    platforms: tuple[str, ...]
    build: Callable[[], Callable]
    prepare: Callable = lambda *args: args
    donate: tuple[int, ...] = ()
    feed: Callable[[tuple, Any], tuple] = lambda args, results: args
    module: str | None = None

    def missing(self) -> str | None:
        """Why it cannot be imported, or None."""
        if self.module and importlib.util.find_spec(f"pallas_kernels.{self.module}") is None:
            return f"there is no pallas_kernels/{self.module}.py"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """`faster` must take at most 1 / ratio of the time of `slower`."""

    faster: str
    slower: str
    ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape.

    Attributes:
      make: Arguments from a random key; also traced for shapes alone.
      flops: Multiplications and additions that the definition asks for. Recomputation is not in it.
      hbm_bytes: Arguments and results once each, of a gathered cache only the rows named.
      only: Platforms on which the case is run; all if empty.
    """

    op: str
    shape: str
    make: Callable[[jax.Array], tuple]
    implementations: tuple[Implementation, ...]
    flops: float
    hbm_bytes: float
    only: tuple[str, ...] = ()
    target: Target | None = None

    @property
    def name(self) -> str:
        """Op and shape, as the tables have it."""
        return f"{self.op}/{self.shape}"


def plain(fn: Callable, name: str = "xla", **settings) -> Implementation:
    """An implementation in JAX alone, which runs everywhere."""
    return Implementation(name=name, platforms=("cpu", "tpu", "gpu"), build=lambda: fn, **settings)


def kernel(
    platform: str,
    module: str,
    adapt: Callable[[Callable], Callable] = lambda fn: fn,
    function: str | None = None,
    **settings,
) -> Implementation:
    """An implementation in a module of pallas_kernels, adapted to a case's arguments.

    Args:
      function: Its name there; None for that of the module.
    """

    def build():
        return adapt(getattr(importlib.import_module(f"pallas_kernels.{module}"), function or module))

    return Implementation(name=f"pallas_{platform}", platforms=(platform,), build=build, module=module, **settings)


def normal(key: jax.Array, index: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normal numbers; `index` tells apart the arrays that are made from one key."""
    return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32).astype(dtype)


def uniform(key: jax.Array, index: int, *shape: int) -> jax.Array:
    """Uniform float32 numbers in [0, 1)."""
    return jax.random.uniform(jax.random.fold_in(key, index), shape)


def packed_weight(key: jax.Array, index: int, *shape: int) -> tuple[jax.Array, jax.Array]:
    """Random codes and scales of a weight [..., out, in]; scales around 2^-7 keep products near 1."""
    *lead, width = shape
    bits = jax.random.bits(jax.random.fold_in(key, 2 * index), (*lead, width // 2), jnp.uint8)
    scale = jax.random.randint(jax.random.fold_in(key, 2 * index + 1), (*lead, width // mxfp4.GROUP), 116, 121)
    return bits, scale.astype(jnp.uint8)


def find_cases(cases: list[Case], ops: list[str], shapes: list[str]) -> list[Case]:
    """The cases whose op contains one of `ops` and whose shape contains one of `shapes`; empty lists allow all.

    Raises: ValueError if there are none.
    """
    chosen = [
        case
        for case in cases
        if (not ops or any(op in case.op for op in ops)) and (not shapes or any(s in case.shape for s in shapes))
    ]
    if not chosen:
        raise ValueError(
            f"no case fits --ops {ops} and --shapes {shapes}; there are {', '.join(c.name for c in cases)}"
        )
    return chosen
