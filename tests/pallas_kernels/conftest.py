"""How kernels are run without their chip."""

import jax
import pytest

# A kernel in the interpreter calls back into Python from the CPU's few threads. With the caller's work queued on the
# same threads, all of them can end up waiting for each other.
jax.config.update("jax_cpu_enable_async_dispatch", False)


def pytest_collection_modifyitems(items):
    """Skips what needs the interpreter of a newer JAX; ahead-of-time compilation needs none."""
    if jax.__version_info__ >= (0, 12):
        return
    reason = f"the Pallas interpreter of jax {jax.__version__} can stop for ever on few cores; from 0.12 on it is used"
    for item in items:
        if item.path.parent.name == "pallas_kernels" and "compiled" not in item.path.name:
            item.add_marker(pytest.mark.skip(reason=reason))
