"""Compiled programs kept on disk, so that a command's second run does not compile again."""

import os
import tempfile
from pathlib import Path

import jax
from absl import logging

_MIN_COMPILE_S = 0.2  # quicker compilations are not worth a file


def enable_compilation_cache() -> Path | None:
    """Lets JAX keep what it compiles from now on; call it before the first computation.

    The folder is $MAXMOE_CACHE_DIR, or maxmoe/xla under $XDG_CACHE_HOME or ~/.cache. A user who has set JAX's own
    JAX_COMPILATION_CACHE_DIR keeps that.

    Returns: The folder in use; None, after a warning, where it cannot be written: then nothing is kept.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("MAXMOE_CACHE_DIR") or Path(base, "maxmoe", "xla"))
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logging.warning(
            "compiled programs are not kept, so every run compiles anew: %s cannot be written (%s). "
            "Set MAXMOE_CACHE_DIR to a folder that can",
            folder,
            error,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
    return folder
