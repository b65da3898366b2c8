"""Imports point down, `import maxmoe` is light, ruff is content; and each rule can tell when it is not so."""

import shutil
from pathlib import Path

import pytest

from tests.structure import import_rules

ROOT = Path(__file__).resolve().parents[2]
RULES = (
    import_rules.broken_contracts,
    import_rules.unchecked_packages,
    import_rules.kernel_imports,
    import_rules.eager_imports,
    import_rules.ruff_findings,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps_the_rule(rule):
    problems = rule(ROOT)
    assert not problems, "\n".join(problems)


@pytest.fixture
def tree(tmp_path):
    """A small project with our settings, in which every rule holds."""
    for name in ("setup.cfg", "ruff.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("maxmoe", "maxmoe/ops", "maxmoe/model"):
        _write(tmp_path, f"{package}/__init__.py", '"""P."""\n')
    _write(tmp_path, "maxmoe/config.py", '"""C."""\n')
    _write(tmp_path, "maxmoe/ops/kda.py", '"""K."""\n')
    _write(tmp_path, "maxmoe/model/block.py", '"""B."""\n\nimport maxmoe.ops.kda\n\nused = maxmoe.ops.kda\n')
    return tmp_path


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_rules_accept_a_good_tree(tree):
    assert [problem for rule in RULES for problem in rule(tree)] == []


BAD_FILES = [
    (
        "broken_contracts",
        "maxmoe/ops/norm.py",
        "import maxmoe.model.block\n",
        "maxmoe.ops.norm -> maxmoe.model.block",
    ),
    (
        "broken_contracts",
        "maxmoe/ops/norm.py",
        "def f():\n    import flax.linen\n",
        "maxmoe.ops.norm -> flax",
    ),
    (
        "broken_contracts",
        "maxmoe/ops/norm.py",
        "from maxmoe import config\n",
        "maxmoe.ops.norm -> maxmoe.config",
    ),
    ("broken_contracts", "maxmoe/unheard_of.py", "", "unheard_of"),
    ("unchecked_packages", "setup.cfg", "[importlinter]\nroot_packages = pallas_kernels\n", "lacks maxmoe"),
    ("kernel_imports", "pallas_kernels/kda.py", "import jax\nfrom maxmoe import ops\n", "imports maxmoe"),
    ("kernel_imports", "pallas_kernels/kda.py", "import math, flax as np\n", "imports flax"),
    ("eager_imports", "maxmoe/__init__.py", "import jaxlib\n", "jaxlib"),
    ("eager_imports", "maxmoe/__init__.py", "from maxmoe import config\n", "maxmoe.config"),
    ("eager_imports", "maxmoe/__init__.py", "import not_there\n", "not_there"),
    ("ruff_findings", "maxmoe/ops/norm.py", '"""N."""\n\nimport os\n', "F401"),
    ("ruff_findings", "maxmoe/ops/norm.py", '"""N."""\n\nx = {  1:2 }\n', "would be reformatted"),
    ("ruff_findings", "maxmoe/ops/norm.py", '"""N."""\n\n\ndef f():\n    return 1\n', "D103"),
]


@pytest.mark.parametrize(("rule", "path", "text", "says"), BAD_FILES)
def test_rule_reports_a_bad_file(tree, rule, path, text, says):
    _write(tree, path, text)
    problems = getattr(import_rules, rule)(tree)
    assert problems and says in "".join(problems), problems


def test_every_rule_has_a_bad_file():
    assert {rule.__name__ for rule in RULES} == {case[0] for case in BAD_FILES}
