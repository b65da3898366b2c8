"""The rules on imports, checked by import-linter and by import itself; and what ruff says.

Each takes a project's root and returns its problems. The tools run as processes, since a package that this
process has imported already would hide the one under the root.
"""

import ast
import configparser
import json
import subprocess
import sys
from pathlib import Path

from tests.structure.sources import PACKAGES, sources

# Nothing of these may be loaded by `import maxmoe` alone: that must cost no seconds and touch no device.
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore", "tiktoken")


def broken_contracts(root: Path) -> list[str]:
    """The contracts of setup.cfg that the imports break."""
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(config_filename='setup.cfg', no_cache=True, no_logo=True))"
    )
    done = _run(root, "-c", code)
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


def unchecked_packages(root: Path) -> list[str]:
    """Packages of the tree that the contracts of setup.cfg do not look at."""
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    checked = settings.get("importlinter", "root_packages", fallback="").split()
    present = [package for package in PACKAGES if (root / package).is_dir()]
    return [f"setup.cfg: [importlinter] root_packages lacks {name}" for name in present if name not in checked]


def kernel_imports(root: Path) -> list[str]:
    """Imports of pallas_kernels other than JAX, NumPy, which comes with it, the standard library and itself."""
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    found = []
    for source in sources(root, ("pallas_kernels",)):
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found += [
                f"{source.path}:{node.lineno}: imports {name}, and kernels know only jax"
                for name in names
                if name.split(".")[0] not in allowed
            ]
    return found


def eager_imports(root: Path) -> list[str]:
    """Heavy packages, and maxmoe's own modules, that `import maxmoe` loads at once."""
    code = (
        "import json, sys; sys.path.insert(0, '.'); before = set(sys.modules); import maxmoe; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = _run(root, "-c", code)
    if done.returncode != 0:
        return [done.stderr]
    loaded = json.loads(done.stdout)
    found = {name.split(".")[0] for name in loaded} & set(HEAVY) | {n for n in loaded if n.startswith("maxmoe.")}
    return [f"import maxmoe loads {name}: import it where it is used" for name in sorted(found)]


def ruff_findings(root: Path) -> list[str]:
    """What `ruff check` and `ruff format --check` find."""
    found = []
    for arguments in (["check", "--quiet", "--output-format=concise"], ["format", "--check"]):
        done = _run(root, "-m", "ruff", *arguments, ".")
        if done.returncode != 0:
            found.append(done.stdout + done.stderr)
    return found


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True, check=False)
