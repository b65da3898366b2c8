"""The flags of every command that loads a model: which, from where, on what; and what they mean."""

import contextlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from absl import flags

_IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu", "tokamax")
_NO_CHECKPOINT = (
    "no --checkpoint, so the small one packaged with maxmoe is used; its weights are random for now, and its text is "
    "noise"
)


def define_flags() -> None:
    """Defines them."""
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Folder with config.json and safetensors files, as published, or one that maxmoe.checkpoint.convert made: a "
        "path, gs:// or s3://. Default: the small checkpoint packaged with maxmoe.",
    )
    flags.DEFINE_enum(
        "verify_checksums",
        "full",
        ["full", "sampled", "off"],
        "Compare every chunk of a converted checkpoint and of a session with its checksum, one in sixteen, or none for "
        "a fast start. Published folders have no checksums.",
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16", "auto"],
        "What weights that are published in bfloat16 become, and with them activations; auto leaves them as published. "
        "Default: float32 on a CPU, bfloat16 elsewhere. 4-bit experts stay as they are.",
    )
    flags.DEFINE_enum(
        "implementation", None, _IMPLEMENTATIONS, "What computes operations that have kernels. Default: the best."
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "Devices to share the work, as AXIS=SIZE,... with axes data, seq, expert and tensor: expert=4,tensor=2 for "
        "eight. Several processes need one that has all their devices. Default: the first device alone.",
    )
    flags.DEFINE_integer(
        "num_draft_tokens",
        0,
        "Guess up to so many tokens from what stands in prompt and answer, and verify them in one step; answers stay "
        "the same. Default: guess none.",
        lower_bound=0,
    )


@contextlib.contextmanager
def checkpoint_folder(tell: Callable[[str], None]) -> Iterator[str | Path]:
    """The folder that --checkpoint names, or of the packaged one, about which it tells."""
    given = flags.FLAGS["checkpoint"].value
    if given is not None:
        yield given
        return
    tell(_NO_CHECKPOINT)
    with resources.as_file(resources.files("maxmoe") / "data" / "tiny") as folder:
        yield folder


def dtype_from_flags() -> str | None:
    """What weights become; None for what they are."""
    import jax

    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = flags.FLAGS["dtype"].value or default
    return None if dtype == "auto" else dtype


def mesh_from_flags(num_processes: int = 1) -> Any:
    """The mesh that the flags ask for; None for one device.

    Raises: ValueError for several processes without one that has all their devices.
    """
    import jax

    from maxmoe.sharding import make_mesh, parse_mesh

    given = flags.FLAGS["mesh"].value
    if given is None and num_processes == 1:
        return None
    count = jax.device_count()
    if given is None:
        raise ValueError(
            f"{num_processes} processes need a --mesh of all their {count} devices, such as expert={count}"
        )
    return make_mesh(parse_mesh(given, count if num_processes > 1 else None))


def model_from_flags(config: Any) -> Any:
    """The model of a config, without weights. Raises: what `dispatch.check_platform` raises."""
    from maxmoe.model.transformer import Transformer
    from maxmoe.ops import dispatch

    implementation = flags.FLAGS["implementation"].value
    dispatch.check_platform(implementation)
    return Transformer(config, implementation=implementation)


def params_from_flags(folder: str | Path, model: Any, mesh: Any) -> Any:
    """The weights of a folder, checked as the flags say, on the mesh."""
    from maxmoe.checkpoint.store import load_params

    return load_params(folder, model, mesh, dtype=dtype_from_flags(), verify=flags.FLAGS["verify_checksums"].value)


def drafts_from_flags() -> dict[str, Any]:
    """What an engine is given for the drafts that the flags ask for."""
    from maxmoe.inference.drafting import NgramDrafter

    count = flags.FLAGS["num_draft_tokens"].value
    return {"drafter": NgramDrafter, "num_draft_tokens": count} if count else {}
