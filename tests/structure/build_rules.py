"""The rules on BUILD, MODULE.bazel, requirements_lock.txt and setup.cfg: all say what the sources say.

BUILD and the imports are read here anew, without tools/update_build.py, so that a fault there is seen. The
Starlark that BUILD holds is also Python, so `ast` reads it. Each rule takes a project's root and returns its
problems, one line each.
"""

import ast
import configparser
import dataclasses
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.structure.sources import PACKAGES, Source, sources

REMEDY = "run python tools/update_build.py"


@dataclasses.dataclass(frozen=True)
class Target:
    """One Python rule of BUILD, its globs expanded."""

    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]


def targets(root: Path) -> list[Target]:
    """The py_library, py_binary and py_test rules of BUILD, in its order."""
    found = []
    for statement in ast.parse((root / "BUILD").read_text("utf-8")).body:
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("py_library", "py_binary", "py_test"):
            fields = {keyword.arg: keyword.value for keyword in call.keywords}
            names = {key: _names(root, fields[key]) if key in fields else () for key in ("srcs", "deps")}
            found.append(Target(ast.literal_eval(fields["name"]), **names))
    return found


def _names(root: Path, node: ast.expr) -> tuple[str, ...]:
    """A list of strings, or a glob call, which is expanded."""
    if not isinstance(node, ast.Call):
        return tuple(ast.literal_eval(node))
    patterns = ast.literal_eval(node.args[0])
    excluded = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}.get("exclude", [])
    out = {path for pattern in excluded for path in _matches(root, pattern)}
    return tuple(sorted({path for pattern in patterns for path in _matches(root, pattern)} - out))


def _matches(root: Path, pattern: str) -> Iterator[str]:
    if pattern.endswith("**"):
        pattern += "/*"
    return (path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file())


def unowned_sources(root: Path) -> list[str]:
    """Files of the packages that are not in exactly one target, and targets of files that do not exist."""
    owners: dict[str, list[str]] = {source.path: [] for source in sources(root, PACKAGES)}
    found = []
    for target in targets(root):
        for path in target.srcs:
            owners.setdefault(path, []).append(target.name)
            if not (root / path).is_file():
                found.append(f"BUILD: target {target.name} names {path}, which does not exist: {REMEDY}")
    for path, names in owners.items():
        if len(names) != 1:
            found.append(f"BUILD: {path} is in {len(names)} targets {names}, not in one: {REMEDY}")
    return found


def untrue_deps(root: Path) -> list[str]:
    """Deps that the imports of a target do not need, and imports without their dep."""
    by_path = {source.path: source for source in sources(root)}
    modules = {source.module for source in by_path.values()}
    owner = {by_path[path].module: t.name for t in targets(root) for path in t.srcs if path in by_path}
    found = []
    for target in targets(root):
        needed: list[frozenset[str]] = []
        for path in set(target.srcs) & by_path.keys():
            for name in _imports(by_path[path], modules):
                if name.split(".")[0] in PACKAGES:
                    needed.append(frozenset([":" + owner.get(name, f"(no target for {name})")]))
                elif name not in modules:
                    needed.append(_labels(name))
        needed = [labels for labels in needed if ":" + target.name not in labels]
        for labels in sorted({min(labels) for labels in needed if not labels & set(target.deps)}):
            found.append(f"BUILD: target {target.name} imports {labels} and lacks it in deps: {REMEDY}")
        for dep in sorted(set(target.deps) - frozenset().union(*needed)):
            found.append(f"BUILD: target {target.name} has the dep {dep} and does not import it: {REMEDY}")
    return found


def _imports(source: Source, modules: set[str]) -> set[str]:
    """What a file imports: modules of this project by full name, third-party packages by first name."""
    is_package = source.path.endswith("/__init__.py")
    parents = source.module.split(".") if is_package else source.module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
            base = ".".join(filter(None, [start, node.module]))
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & modules) or {base}
            if inner - modules:
                found.add(base)
        elif isinstance(node, ast.Dict) and is_package:  # a table of names that are imported when asked for
            strings = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            found |= modules & (strings | {f"{source.module}.{string.lstrip('.')}" for string in strings})
    ours = {name for name in found if name.split(".")[0] in PACKAGES or name in modules}
    tops = {name.split(".")[0] for name in found - ours} - sys.stdlib_module_names
    return (ours | {top for top in tops if not any(m.split(".")[0] == top for m in modules)}) - {source.module}


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _labels(name: str) -> frozenset[str]:
    """The labels that may stand for a third-party import: those of the installed packages that provide it."""
    providers = _distributions().get(name, [name])
    return frozenset("@pip//" + canonicalize_name(provider).replace("-", "_") for provider in providers)


def circles(root: Path) -> list[str]:
    """Targets that depend on themselves through others."""
    deps = {target.name: [dep[1:] for dep in target.deps if dep.startswith(":")] for target in targets(root)}
    found, done = [], set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(f"BUILD: targets in a circle: {' -> '.join([*path[path.index(name) :], name])}")
        elif name not in done:
            for dep in deps.get(name, []):
                visit(dep, (*path, name))
            done.add(name)

    for name in deps:
        visit(name, ())
    return found


def undeclared_requirements(root: Path) -> list[str]:
    """Third-party deps of BUILD that setup.cfg does not require or the lock does not hold."""
    declared, locked = _requirements(root), _locked(root)
    found = []
    labels = {dep for target in targets(root) for dep in target.deps if dep.startswith("@pip//")}
    for label in sorted(labels):
        name = canonicalize_name(label.removeprefix("@pip//"))
        if name not in declared:
            found.append(f"setup.cfg: neither install_requires nor an extra has {name}, which BUILD depends on")
        if name not in locked:
            found.append(f"requirements_lock.txt: lacks {name}, which BUILD depends on")
    return found


def untrue_lock(root: Path) -> list[str]:
    """What the lock lacks, versions in it that setup.cfg excludes, and lines that name a place."""
    locked = _locked(root)
    found = []
    for name, requirement in _requirements(root, extras=("test",)).items():
        if name not in locked:
            found.append(f"requirements_lock.txt: lacks {requirement}")
        elif not requirement.specifier.contains(locked[name], prereleases=True):
            found.append(f"requirements_lock.txt: {name} {locked[name]}, and setup.cfg says {requirement}")
    for number, line in enumerate((root / "requirements_lock.txt").read_text("utf-8").splitlines(), 1):
        is_pin = re.fullmatch(r"[a-zA-Z0-9._-]+==[a-zA-Z0-9.+!]+( ;.*)?", line)
        if not is_pin and not re.fullmatch(r" *#[^/]*", line):
            found.append(f"requirements_lock.txt:{number}: neither 'name==version' nor a comment: {line}")
    return found


def _requirements(root: Path, extras: tuple[str, ...] | None = None) -> dict[str, Requirement]:
    """What setup.cfg requires, by name, with the named extras (default: all)."""
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    lines = settings["options"]["install_requires"].splitlines()
    for extra, text in settings["options.extras_require"].items():
        if extras is None or extra in extras:
            lines += text.splitlines()
    parsed = [Requirement(line) for line in lines if line.strip()]
    return {canonicalize_name(requirement.name): requirement for requirement in reversed(parsed)}


def _locked(root: Path) -> dict[str, str]:
    lines = (root / "requirements_lock.txt").read_text("utf-8").splitlines()
    pins = [line.split(";")[0].strip().split("==") for line in lines if re.match(r"[\w.-]+==", line)]
    return {canonicalize_name(name): version for name, version in pins}


def unequal_versions(root: Path) -> list[str]:
    """The version of MODULE.bazel where it is not setup.cfg's."""
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    version = settings["metadata"]["version"]
    calls = [n for n in ast.walk(ast.parse((root / "MODULE.bazel").read_text("utf-8"))) if isinstance(n, ast.Call)]
    (module,) = (call for call in calls if ast.unparse(call.func) == "module")
    stated = {keyword.arg: ast.literal_eval(keyword.value) for keyword in module.keywords}["version"]
    return [] if stated == version else [f"MODULE.bazel: version {stated}, and setup.cfg says {version}"]


RULES = (unowned_sources, untrue_deps, circles, undeclared_requirements, untrue_lock, unequal_versions)
