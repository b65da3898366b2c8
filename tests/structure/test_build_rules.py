"""BUILD and its companions say what the sources say, and each rule can tell when they do not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure import build_rules

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / "tools" / "update_build.py"
FILES = {
    "maxmoe/__init__.py": '_HOME = {"load": "maxmoe.config", "kda": "ops.kda"}\n',
    "maxmoe/config.py": "from maxmoe import published\n\nC = 1\n",
    "maxmoe/published.py": "from maxmoe.config import C\n",
    "maxmoe/decode.py": 'import maxmoe as mm\nfrom absl import app\nif __name__ == "__main__":\n    app.run(mm.load)\n',
    "maxmoe/ops/__init__.py": "",
    "maxmoe/ops/norm.py": "import numpy as np\n",
    "maxmoe/ops/kda.py": "import math\nimport jax.numpy as jnp\ndef f():\n    from maxmoe.ops import norm\n",
    "tests/conftest.py": "import pytest\n",
    "tests/ops/test_kda.py": "import numpy as np\nfrom maxmoe.ops import kda\n",
    "tests/structure/test_x.py": "import maxmoe.decode\n",
}


@pytest.mark.parametrize("rule", build_rules.RULES, ids=lambda rule: rule.__name__)
def test_build_keeps_the_rule(rule):
    problems = rule(ROOT)
    assert not problems, "\n".join(problems)


@pytest.fixture
def tree(tmp_path):
    """A small project whose BUILD the generator wrote."""
    for name in ("BUILD", "MODULE.bazel", "setup.cfg", "requirements_lock.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    _generate(tmp_path)
    return tmp_path


def _generate(root: Path) -> None:
    subprocess.run([sys.executable, GENERATOR, root], check=True, capture_output=True, text=True)


def test_generator_writes_what_the_rules_ask_for(tree):
    assert [problem for rule in build_rules.RULES for problem in rule(tree)] == []
    found = {target.name: target for target in build_rules.targets(tree)}
    assert found["config"].srcs == ("maxmoe/config.py", "maxmoe/published.py")
    assert found["config"].deps == ()
    assert found["maxmoe"].deps == (":config", ":ops_kda")
    assert found["decode"].deps == (":maxmoe", "@pip//absl_py")
    assert found["ops_kda"].deps == (":ops_norm", "@pip//jax")
    assert found["all_tests"].srcs == ("tests/conftest.py", "tests/ops/test_kda.py")
    assert found["all_tests"].deps == (":ops_kda", "@pip//numpy", "@pip//pytest")


def test_generator_writes_the_same_again(tree):
    first = (tree / "BUILD").read_bytes()
    _generate(tree)
    assert (tree / "BUILD").read_bytes() == first


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"maxmoe/a.py": "import unheard_of\n"}, "unheard_of"),
        ({"maxmoe/a.py": "import maxmoe.gone\n"}, "no such module"),
        ({"maxmoe/a.py": "import maxmoe.ops.b\n", "maxmoe/ops/b.py": "import maxmoe.a\n"}, "circle"),
        ({"maxmoe/ops_norm.py": ""}, "two targets"),
    ],
)
def test_generator_refuses_by_name(tree, files, says):
    for path, text in files.items():
        (tree / path).write_text(text)
    done = subprocess.run([sys.executable, GENERATOR, tree], check=False, capture_output=True, text=True)
    assert done.returncode != 0 and says in done.stderr


# rule, file, text to replace (None: append), its replacement, what the problem must say
BAD_EDITS = [
    (
        "unowned_sources",
        "BUILD",
        '"maxmoe/ops/norm.py"',
        '"maxmoe/ops/kda.py"',
        "maxmoe/ops/norm.py is in 0 targets",
    ),
    (
        "unowned_sources",
        "BUILD",
        '"maxmoe/ops/norm.py"',
        '"maxmoe/ops/kda.py"',
        "maxmoe/ops/kda.py is in 2 targets",
    ),
    (
        "unowned_sources",
        "BUILD",
        '"maxmoe/ops/norm.py"',
        '"maxmoe/gone.py"',
        "maxmoe/gone.py, which does not exist",
    ),
    ("unowned_sources", "pallas_kernels/kda.py", None, "", "pallas_kernels/kda.py is in 0 targets"),
    ("untrue_deps", "BUILD", '        ":ops_norm",\n', "", "target ops_kda imports :ops_norm and lacks it"),
    ("untrue_deps", "BUILD", '        "@pip//jax",\n', "", "target ops_kda imports @pip//jax and lacks it"),
    ("untrue_deps", "BUILD", '"@pip//absl_py"', '"@pip//flax"', "target decode has the dep @pip//flax"),
    ("untrue_deps", "maxmoe/ops/norm.py", None, "import flax\n", "target ops_norm imports @pip//flax"),
    (
        "untrue_deps",
        "maxmoe/ops/norm.py",
        None,
        "from ..config import C\n",
        "target ops_norm imports :config",
    ),
    (
        "untrue_deps",
        "maxmoe/ops/norm.py",
        "import numpy as np\n",
        "",
        "ops_norm has the dep @pip//numpy and does not",
    ),
    ("untrue_deps", "maxmoe/__init__.py", "maxmoe.config", "maxmoe.decode", "target maxmoe imports :decode"),
    (
        "untrue_deps",
        "tests/ops/test_kda.py",
        None,
        "import hypothesis\n",
        "all_tests imports @pip//hypothesis",
    ),
    (
        "circles",
        "BUILD",
        '    deps = ["@pip//numpy"]',
        '    deps = [":ops_kda"]',
        "ops_kda -> ops_norm -> ops_kda",
    ),
    ("undeclared_requirements", "setup.cfg", "    absl-py>=2.1\n", "", "setup.cfg: neither"),
    ("undeclared_requirements", "requirements_lock.txt", "absl-py==", "abseil==", "lacks absl-py"),
    ("untrue_lock", "requirements_lock.txt", "flax==0.", "flax==0.0.", "flax 0.0."),
    ("untrue_lock", "requirements_lock.txt", "pytest==", "pytest-else==", "lacks pytest"),
    ("untrue_lock", "requirements_lock.txt", None, "--index-url somewhere\n", "neither"),
    ("untrue_lock", "requirements_lock.txt", None, "# https://somewhere\n", "neither"),
    ("unequal_versions", "MODULE.bazel", 'version = "0.1.0"', 'version = "0.1.1"', "0.1.1"),
]


@pytest.mark.parametrize(("rule", "file", "old", "new", "says"), BAD_EDITS)
def test_rule_reports_a_bad_edit(tree, rule, file, old, new, says):
    path = tree / file
    path.parent.mkdir(exist_ok=True)
    text = path.read_text() if path.exists() else ""
    assert old is None or text.count(old) == 1
    path.write_text(text + new if old is None else text.replace(old, new))
    problems = getattr(build_rules, rule)(tree)
    assert says in "\n".join(problems), problems


def test_every_rule_has_a_bad_edit():
    assert {rule.__name__ for rule in build_rules.RULES} == {case[0] for case in BAD_EDITS}
