"""The rules that keep the sources readable.

Each takes a project's root and returns its problems, one line each.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure.sources import FOLDERS, PACKAGES, Source, sources

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 85
MAX_KERNEL_LINES = 200

VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}

# Names of tensors and config keys that only the published layout uses; the code has its own words for them.
PUBLISHED_SPELLINGS = re.compile(
    r"""\b(?:
    self_attn | block_sparse_moe | \w+_layernorm | layernorm\.weight | kv_a_proj_with_mqa | embed_tokens |
    e_score_correction_bias | weight_packed | linear_attn_config | dsa_config | text_config | hidden_act |
    hidden_size | num_hidden_layers | num_attention_heads | num_key_value_heads | max_position_embeddings |
    moe_intermediate_size | routed_expert_hidden_size | routed_scaling_factor | first_k_dense_replace |
    short_conv_kernel_size
    )\b""",
    re.VERBOSE,
)
KNOW_PUBLISHED_SPELLINGS = {
    "maxmoe/checkpoint/hf_names.py",
    "maxmoe/published_config.py",
    "maxmoe/published_keys.py",
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_files(root: Path) -> list[str]:
    """Files over the limit of lines."""
    found = []
    for source in sources(root):
        lines = len(source.text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{source.path}: {lines} lines, at most {MAX_FILE_LINES}: split it by what it is about")
    return found


def long_functions(root: Path) -> list[str]:
    """Functions over the limit of lines, which is higher for kernel bodies."""
    found = []
    for source in sources(root):
        limit = MAX_KERNEL_LINES if source.path.startswith("pallas_kernels/") else MAX_FUNCTION_LINES
        for node in ast.walk(source.tree):
            if isinstance(node, _Function) and (lines := node.end_lineno - node.lineno + 1) > limit:
                found.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines, at most {limit}")
    return found


def vague_names(root: Path) -> list[str]:
    """Files and folders whose name says nothing about what is in them."""
    found = []
    for source in sources(root):
        vague = VAGUE_NAMES & set(source.path.removesuffix(".py").split("/"))
        found += [f"{source.path}: '{name}' is no home: name what the code is about" for name in vague]
    return found


def missing_docstrings(root: Path) -> list[str]:
    """Public modules, classes, functions and methods without a docstring; Flax's `setup` needs none."""
    found = []
    for source in sources(root, PACKAGES):
        if not ast.get_docstring(source.tree):
            found.append(f"{source.path}:1: the module has no docstring")
        for node in _public_definitions(source.tree):
            if not ast.get_docstring(node):
                found.append(f"{source.path}:{node.lineno}: {node.name} has no docstring")
    return found


def _public_definitions(parent: ast.Module | ast.ClassDef) -> Iterator[_Function | ast.ClassDef]:
    for node in parent.body:
        if not isinstance(node, _Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        is_further_form = any(d.endswith(("overload", ".setter", ".deleter", "override")) for d in decorators)
        if node.name != "setup" and not is_further_form:
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _public_definitions(node)


def published_spellings(root: Path) -> list[str]:
    """Spellings of the published layout outside the files that translate it."""
    found = []
    for source in sources(root, (*PACKAGES, "configs")):
        if source.path in KNOW_PUBLISHED_SPELLINGS:
            continue
        for number, line in enumerate(source.text.splitlines(), 1):
            for match in PUBLISHED_SPELLINGS.finditer(line):
                found.append(f"{source.path}:{number}: the published spelling '{match[0]}'")
    return found


def swallowed_exceptions(root: Path) -> list[str]:
    """Handlers of every exception that go on instead of raising."""
    found = []
    for source in sources(root):
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "everything"
            is_bare = re.search(r"\b(Exception|BaseException|everything)\b", caught)
            if is_bare and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                found.append(f"{source.path}:{node.lineno}: catches {caught} and goes on: name what can happen")
    return found


def stray_prints(root: Path) -> list[str]:
    """Calls of print in modules that are not commands."""
    found = []
    for source in sources(root, PACKAGES):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and not source.is_command:
                found.append(f"{source.path}:{node.lineno}: print belongs in commands: log or return it")
    return found


def untyped_meshes(root: Path) -> list[str]:
    """Meshes built by JAX without `axis_types`, whose default JAX has changed before."""
    found = []
    for source in sources(root, FOLDERS):
        builders = _mesh_builders(source)
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg for keyword in node.keywords}
            if called in builders and not given & {"axis_types", None}:
                found.append(f"{source.path}:{node.lineno}: {called}(...) without axis_types")
    return found


def _mesh_builders(source: Source) -> set[str]:
    """How the mesh builders of JAX are written in a file."""
    names = {"jax.make_mesh", "jax.sharding.Mesh", "jax.sharding.AbstractMesh"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("jax", "jax.sharding"):
            for alias in node.names:
                local = alias.asname or alias.name
                if alias.name in ("make_mesh", "Mesh", "AbstractMesh"):
                    names.add(local)
                elif alias.name == "sharding":
                    names |= {f"{local}.Mesh", f"{local}.AbstractMesh"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "jax.sharding" and alias.asname:
                    names |= {f"{alias.asname}.Mesh", f"{alias.asname}.AbstractMesh"}
    return names


RULES = (
    long_files,
    long_functions,
    vague_names,
    missing_docstrings,
    published_spellings,
    swallowed_exceptions,
    stray_prints,
    untyped_meshes,
)
