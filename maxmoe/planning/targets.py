"""What this Python can compile for without the chips: the settings that takes, and the devices of a slice."""

import contextlib
import importlib.util
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from maxmoe.planning.chips import Topology

if TYPE_CHECKING:
    import jax

# Read when jax, libtpu or the CUDA plugin is loaded. Without them libtpu asks a metadata server for a TPU that is not
# there and refuses a second process, and the plugin looks for a driver.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

# From NVIDIA's data sheet of the H200 and the limits of compute capability 9.0.
GPU_TARGETS = {
    "h200": """
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  device_memory_size: 151397597184  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
"""
}


def set_environment(environment: MutableMapping[str, str]) -> None:
    """Adds the settings; to be called before jax is imported. What the user has set stands, but for the platform."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)
    environment["JAX_PLATFORMS"] = "cpu"


def missing_compiler(topology: Topology) -> str | None:
    """None if this Python can compile for the slice, else what is missing and how to install it."""
    chip = topology.chip
    if chip.platform == "gpu" and chip.name not in GPU_TARGETS:
        return f"no target description of {chip.name} comes with maxmoe, so that steps are compiled for h200 only"
    package, extra = ("libtpu", "jax[tpu]") if chip.platform == "tpu" else ("jax_cuda13_plugin", "jax[cuda13]")
    if importlib.util.find_spec(package) is None:
        return (
            f"{package} is not installed in this Python, and compiling for {chip.name} needs it: "
            f"pip install '{extra}=={_jax_version()}'"
        )
    return None


def _jax_version():
    import jax

    return jax.__version__


def devices(topology: Topology) -> list[Any]:
    """The devices of a slice, in the order of their numbers.

    Raises: ModuleNotFoundError if the compiler is not installed; ValueError if it knows no such slice.
    """
    if reason := missing_compiler(topology):
        raise ModuleNotFoundError(reason)
    import jax
    from jax.experimental import topologies

    chip = topology.chip
    try:
        if chip.platform == "tpu":
            found = topologies.get_topology_desc(topology_name=str(topology), platform="tpu")
        else:
            node = min(chip.node_size, topology.num_chips)
            found = topologies.get_topology_desc(
                topology_name=chip.name,
                platform="cuda",
                topology=f"1x{topology.num_chips // node}x{node}",
                target_config=GPU_TARGETS[chip.name],
            )
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"the compiler does not describe a slice {topology}: {error}") from error
    if len(found.devices) != topology.num_devices:
        raise ValueError(
            f"the compiler describes {topology} with {len(found.devices)} devices, not {topology.num_devices}"
        )
    return sorted(found.devices, key=lambda device: device.id)


def with_device_kind(mesh: "jax.sharding.Mesh") -> "jax.sharding.AbstractMesh":
    """The mesh as kernels see it when they are traced, for they ask what kind of device it has.

    A GPU that only its target describes has no name of its kind; all that are described so are H200s.
    """
    from jax.sharding import AbstractDevice

    found = mesh.abstract_mesh
    device = found.abstract_device
    if device is None or device.platform != "gpu" or device.device_kind:
        return found
    named = AbstractDevice(device_kind="NVIDIA H200", num_cores=device.num_cores, platform="gpu")
    return found.update(abstract_device=named)


@contextlib.contextmanager
def nothing_cached() -> Iterator[None]:
    """Keeps executables out of the persistent cache: without their chips they cannot be read back."""
    import jax

    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
