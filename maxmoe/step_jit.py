"""`jax.jit` for whole steps of a model, with what the compiler of the chip at hand has to be told."""

import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILER_OPTIONS = {
    # The compiler wants 16-bit arrays in tiles of 16 rows, but arguments come in tiles of 8, as on every TPU: in every
    # step it copies whole stacks of weights before the loop over layers.
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
    # v5p. The gradient of a layer whose tokens are exchanged does not compile otherwise: "Assigned barrier is not
    # acceptable for opcode: ragged-all-to-all". On the sparse cores that operation takes another barrier.
    "TPU v5": {"xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all": "true"},
}


class StepJit:
    """`jax.jit(fn, **settings)`, with the options of the devices that each call runs on."""

    def __init__(self, fn: Callable, **settings: Any):
        self._compiled = functools.cache(
            lambda kind: jax.jit(fn, compiler_options=COMPILER_OPTIONS.get(kind), **settings)
        )
        functools.update_wrapper(self, fn)

    def __call__(self, *args):
        kind = _kind_with_options()
        # Only the outermost of nested programs may have options.
        if kind is not None and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            kind = None
        return self._compiled(kind)(*args)

    def __getattr__(self, name: str) -> Any:
        """Whatever else `jax.jit` gives, such as `lower`, for the devices at hand."""
        return getattr(self._compiled(_kind_with_options()), name)


def _kind_with_options() -> str | None:
    """The kind of devices that a call would run on; None for those that need no options."""
    kind = device_kind()
    return kind if kind in COMPILER_OPTIONS else None


def device_kind() -> str:
    """What the devices of the mesh that is set are called, or else this process's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0].device_kind if device is None else device.device_kind
