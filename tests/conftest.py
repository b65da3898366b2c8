"""What every test runs under. Run as a program, this file runs all the tests: Bazel starts it so."""

import os
import sys
from pathlib import Path

import hypothesis
import pytest

_ROOT = Path(__file__).resolve().parent.parent
_CACHE = _ROOT / ".cache"

# JAX and libtpu read these when they are first imported, which is after this file.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # ahead-of-time compilation beside another process
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(_CACHE / "hypothesis"))

# A first call compiles, so no deadline; the same examples in every run.
hypothesis.settings.register_profile("maxmoe", deadline=None, derandomize=True)
hypothesis.settings.load_profile("maxmoe")


# Linux allows a process 65,530 memory mappings, and compiled programs of XLA's CPU backend hold many: after 1,800 tests
# in two processes one had 60,000. Beyond the limit the next program to be loaded ends in a segmentation fault.
@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_are_freed():
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()


if __name__ == "__main__":
    sys.exit(pytest.main(["--rootdir", str(_ROOT), str(_ROOT / "tests"), *sys.argv[1:]]))
