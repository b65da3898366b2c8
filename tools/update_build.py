"""Writes the targets of BUILD from the sources and their imports: python tools/update_build.py [ROOT].

Each module becomes a py_library, or a py_binary where it has a main guard; modules of one folder that import
each other become one target. Imports inside functions count. So does a module named in a table of a package's
`__init__.py`, which is how names are imported lazily. Only the lines below BUILD's marker are rewritten.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("maxmoe", "pallas_kernels")
MARKER = "# Below this line everything is written by tools/update_build.py.\n"
TEST_MAIN = "tests/conftest.py"

# What a third-party import is called in the requirements.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "etils": "etils",
    "flax": "flax",
    "fsspec": "fsspec",
    "hypothesis": "hypothesis",
    "jax": "jax",
    "jaxtyping": "jaxtyping",
    "matplotlib": "matplotlib",
    "ml_dtypes": "ml_dtypes",
    "moto": "moto",
    "numpy": "numpy",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
    "pytest": "pytest",
    "s3fs": "s3fs",
    "selenium": "selenium",
    "starlette": "starlette",
    "tensorstore": "tensorstore",
    "tiktoken": "tiktoken",
    "uvicorn": "uvicorn",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
}
EXTRAS = {"llguidance", "tokamax"}  # imported where they are installed; what Bazel builds does without them


def module_name(path: Path) -> str:
    """The dotted name of the module at a path relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yields (module, name or None) for every import in a file, relative ones resolved."""
    package = list(path.parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(above + ([node.module] if node.module else []))
            for alias in node.names:
                yield base, alias.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            match node.args:
                case [ast.Constant(str(named)), *_]:
                    yield ".".join([*package, named[1:]]) if named.startswith(".") else named, None


def lazy_table_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yields the strings in the tables of a package's `__init__.py`, as they are and as relative names."""
    if path.name != "__init__.py":
        return
    package = module_name(path)
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for node in ast.walk(table):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
                yield f"{package}.{node.value.lstrip('.')}"


def imports_of(path: Path, text: str, modules: set[str]) -> set[str]:
    """The project's modules and the third-party import names that a file imports."""
    tree = ast.parse(text, str(path))
    found = {name for name in lazy_table_names(path, tree) if name in modules}
    for base, name in imported_names(path, tree):
        if name is not None and f"{base}.{name}" in modules:
            found.add(f"{base}.{name}")
        elif base in modules:
            found.add(base)
        elif base.split(".")[0] in PACKAGES:
            raise SystemExit(f"{path}: imports {base}, and there is no such module")
        else:
            found.add(base.split(".")[0])
    return found - {module_name(path)} - set(sys.stdlib_module_names) - EXTRAS


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Every module that `start` imports, directly or not."""
    seen, todo = set(), [start]
    while todo:
        for following in graph[todo.pop()] & graph.keys() - seen:
            seen.add(following)
            todo.append(following)
    return seen


def groups(graph: dict[str, set[str]], paths: dict[str, Path]) -> list[list[str]]:
    """The modules of each target: one, or those of one folder that import each other."""
    reach = {module: reachable(module, graph) for module in graph}
    found = {tuple(sorted({m} | {o for o in reach[m] if m in reach[o]})) for m in graph}
    for group in found:
        if len({paths[m].parent for m in group}) > 1 or (
            len(group) > 1 and any(paths[m].name == "__init__.py" for m in group)
        ):
            raise SystemExit(f"these modules import each other in a circle: {', '.join(group)}")
    return sorted(sorted(group, key=lambda m: (len(m), m)) for group in found)


def target_name(module: str) -> str:
    """maxmoe.ops.kda -> ops_kda; maxmoe.server.__main__ -> server_main; a package itself -> its own name."""
    parts = [part.strip("_") for part in module.split(".")]
    return "_".join(parts[1:] if parts[0] == "maxmoe" and len(parts) > 1 else parts)


def third_party_label(name: str, importer: str) -> str:
    """The label of a third-party package in the hub that MODULE.bazel sets up."""
    if name not in DISTRIBUTIONS:
        raise SystemExit(f"{importer} imports {name}: add its distribution to DISTRIBUTIONS in {__file__}")
    return "@pip//" + DISTRIBUTIONS[name].lower().replace("-", "_")


def rule_text(rule: str, fields: dict[str, str | list[str]]) -> str:
    """One rule in buildifier's layout; empty fields are left out."""
    lines = [f"{rule}("]
    for key, value in fields.items():
        if isinstance(value, list):
            if len(value) > 1:
                lines += [f"    {key} = [", *(f'        "{item}",' for item in value), "    ],"]
            elif value:
                lines.append(f'    {key} = ["{value[0]}"],')
        else:
            lines.append(f"    {key} = {value},")
    return "\n".join([*lines, ")\n"])


def has_main_guard(text: str) -> bool:
    """Whether a file is a command: whether it has a line `if __name__ == "__main__":`."""
    return any(line.startswith('if __name__ == "__main__"') for line in text.splitlines())


def targets(root: Path) -> str:
    """The generated part of BUILD for the sources under a root."""
    files = sorted(p.relative_to(root) for package in PACKAGES for p in (root / package).rglob("*.py"))
    paths = {module_name(path): path for path in files}
    texts = {module: (root / path).read_text("utf-8") for module, path in paths.items()}
    graph = {module: imports_of(paths[module], text, set(paths)) for module, text in texts.items()}
    target_of: dict[str, str] = {}
    for group in groups(graph, paths):
        name = target_name(group[0])
        if name in target_of.values():
            raise SystemExit(f"two targets would be named {name}: rename {paths[group[0]]}")
        target_of |= dict.fromkeys(group, name)

    def labels(imported: set[str], own: str, importer: str) -> list[str]:
        inner = {":" + target_of[name] for name in imported if name in target_of} - {":" + own}
        outer = {third_party_label(name, importer) for name in imported if name not in target_of}
        return sorted(inner) + sorted(outer)

    rules = []
    for name in sorted(set(target_of.values())):
        members = sorted(module for module in paths if target_of[module] == name)
        imported = set().union(*(graph[module] for module in members))
        srcs = [str(paths[module]) for module in members]
        fields: dict[str, str | list[str]] = {"name": f'"{name}"', "srcs": srcs}
        rule = "py_library"
        if any(has_main_guard(texts[module]) for module in members):
            rule = "py_binary"
            fields |= {"data": [":packaged_checkpoint"], "main": f'"{srcs[0]}"'}
        folder = (root / paths[members[0]]).parent
        if paths[members[0]].name == "__init__.py" and any(p.is_file() and p.suffix != ".py" for p in folder.iterdir()):
            fields["data"] = f'glob(\n        ["{folder.relative_to(root)}/*"],\n        exclude = ["**/*.py"],\n    )'
        rules.append(rule_text(rule, fields | {"deps": labels(imported, name, srcs[0])}))
    return "\n".join([*rules, test_target(root, set(paths), labels)])


def test_target(root: Path, modules: set[str], labels) -> str:
    """The py_test of all tests but tests/structure, which looks at a checkout and not at a package."""
    imported: set[str] = set()
    for path in sorted(p.relative_to(root) for p in (root / "tests").rglob("*.py")):
        if path.parts[1] != "structure":
            imported |= imports_of(path, (root / path).read_text("utf-8"), modules)
    local = {p.name for p in root.iterdir() if p.is_dir() and p.name not in PACKAGES}
    fields: dict[str, str | list[str]] = {
        "name": '"all_tests"',
        "size": '"large"',
        "srcs": 'glob(\n        ["tests/**/*.py"],\n        exclude = ["tests/structure/**"],\n    )',
        "data": [":packaged_checkpoint", ":test_data"],
        "main": f'"{TEST_MAIN}"',
        "deps": labels(imported - local, "all_tests", "a test"),
    }
    return rule_text("py_test", fields)


def main() -> None:
    """Rewrites BUILD below its marker."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    build = root / "BUILD"
    head, marker, _ = build.read_text("utf-8").partition(MARKER)
    if not marker:
        raise SystemExit(f"{build} lacks the line {MARKER.strip()!r}")
    build.write_text(head + MARKER + "\n" + targets(root), "utf-8")


if __name__ == "__main__":
    main()
