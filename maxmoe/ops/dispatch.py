"""Which implementation of an op runs: the plain JAX form, or a kernel for the platform at hand.

`tokamax` names the kernels of the library of that name, which is an extra and never a default.
"""

from collections.abc import Callable, Mapping

import jax
from absl import logging

NAMES = ("xla", "pallas_tpu", "pallas_gpu", "tokamax")

_PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "tokamax": "tpu"}

# What None means, by op and platform. The plain form stands wherever a kernel has not yet been run on a device and
# been found the faster one: all of them so far.
DEFAULTS = {
    "kda_chunked": {"cpu": "xla", "tpu": "xla", "gpu": "xla"},
    "kda_decode": {"cpu": "xla", "tpu": "xla", "gpu": "xla"},
    "select_candidates": {"cpu": "xla", "tpu": "xla", "gpu": "xla"},
    "expert_outputs": {"cpu": "xla", "tpu": "xla", "gpu": "xla"},
    "sparse_context": {"cpu": "xla", "tpu": "xla", "gpu": "xla"},
    "mix_and_norm": {"cpu": "xla", "tpu": "xla", "gpu": "xla"},
}

_LACKING = {("select_candidates", "pallas_gpu"), ("mix_and_norm", "pallas_gpu")}
_LACKING |= {(op, "tokamax") for op in DEFAULTS if op != "kda_chunked"}

_logged: set[tuple[str, str]] = set()


def choose(op: str, implementation: str | None, kernels: Mapping[str, Callable[[], str | None]]) -> str:
    """The name of the implementation that runs. The choice is logged once per op.

    Args:
      implementation: A name, which runs or raises; or None for the platform's default, and for the plain form where
        the default cannot run.
      kernels: The op's kernels, each with what says why it cannot run for the shapes given, or None.
    Raises: ValueError for a name that no op has; NotImplementedError, with the reason, for a named kernel that cannot
      run here.
    """
    if implementation is None:
        chosen = DEFAULTS[op].get(platform(), "xla")
        if chosen != "xla" and _refusal(op, chosen, kernels):
            chosen = "xla"
    elif implementation not in NAMES:
        raise ValueError(f"implementation={implementation!r}: allowed are {', '.join(NAMES)}, and None for the best")
    else:
        chosen = implementation
        if chosen != "xla" and (reason := _refusal(op, chosen, kernels)):
            raise NotImplementedError(
                f"{op}: implementation={implementation!r} cannot run: {reason}. Give 'xla', or None for the best that "
                "can run here"
            )
    if (op, chosen) not in _logged:
        _logged.add((op, chosen))
        logging.info("%s: implementation %s on %s", op, chosen, platform())
    return chosen


def for_op(op: str, implementation: str | None) -> str | None:
    """What a model's one name means for an op: the name, or None, the best, where the op has no such kernel at all."""
    return None if (op, implementation) in _LACKING else implementation


def check_platform(implementation: str | None) -> None:
    """Raises NotImplementedError for a name whose kernels run on other devices than those here."""
    if implementation in _PLATFORMS and platform() != _PLATFORMS[implementation]:
        raise NotImplementedError(
            f"implementation={implementation!r} runs on {_PLATFORMS[implementation]}, and this process computes on "
            f"{platform()}: give 'xla', or leave it out for the best that can run here"
        )


def platform() -> str:
    """What the program being traced will run on: the devices of the mesh that is set, else this process's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _refusal(op, name, kernels) -> str | None:
    if name not in kernels:
        return f"{op} has no such kernel; it has {', '.join(('xla', *kernels))}"
    if platform() != _PLATFORMS[name]:
        return f"it runs on {_PLATFORMS[name]}, and this process computes on {platform()}"
    return kernels[name]()
