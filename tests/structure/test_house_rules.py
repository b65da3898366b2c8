"""The sources keep the house rules, and each rule can tell when they do not."""

from pathlib import Path

import pytest

from tests.structure import house_rules

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", house_rules.RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule):
    problems = rule(ROOT)
    assert not problems, "\n".join(problems)


def _function(lines: int) -> str:
    return '"""M."""\n\n\ndef f():\n    """F."""\n' + "    x = 1\n" * (lines - 2)


# rule, path, text that breaks the rule, what the problem must say, text that keeps it
CASES = [
    ("long_files", "maxmoe/a.py", "x = 1\n" * 421, "421 lines", "x = 1\n" * 420),
    ("long_functions", "maxmoe/a.py", _function(86), "f has 86 lines", _function(85)),
    ("long_functions", "pallas_kernels/a.py", _function(201), "f has 201 lines", _function(200)),
    ("vague_names", "maxmoe/utils.py", "", "'utils'", None),
    ("vague_names", "tests/helpers/test_a.py", "", "'helpers'", None),
    ("missing_docstrings", "maxmoe/a.py", "x = 1\n", "module", '"""M."""\n'),
    (
        "missing_docstrings",
        "maxmoe/a.py",
        '"""M."""\ndef f(): pass\n',
        "f has no",
        '"""M."""\ndef _f(): pass\n',
    ),
    (
        "missing_docstrings",
        "maxmoe/a.py",
        '"""M."""\nclass C:\n  """C."""\n  def g(self): pass\n',
        "g has no",
        '"""M."""\nclass C:\n  """C."""\n  def setup(self): pass\n  def __call__(self): pass\n',
    ),
    ("published_spellings", "maxmoe/model/a.py", "x = 'self_attn.q'\n", "self_attn", "x = 'attention'\n"),
    (
        "published_spellings",
        "configs/a.py",
        "num_hidden_layers = 3\n",
        "num_hidden_layers",
        "num_layers = 3\n",
    ),
    ("published_spellings", "maxmoe/a.py", "# input_layernorm\n", "input_layernorm", "# input_norm\n"),
    (
        "swallowed_exceptions",
        "maxmoe/a.py",
        "try: f()\nexcept (OSError, Exception): pass\n",
        "Exception",
        "try: f()\nexcept OSError: pass\n",
    ),
    (
        "swallowed_exceptions",
        "tools/a.py",
        "try: f()\nexcept: x = 1\n",
        "everything",
        "try: f()\nexcept Exception as e: raise ValueError from e\n",
    ),
    (
        "stray_prints",
        "maxmoe/a.py",
        "print(1)\n",
        "print",
        "def main(): print(1)\nif __name__ == '__main__':\n  main()\n",
    ),
    (
        "untyped_meshes",
        "maxmoe/a.py",
        "import jax\njax.make_mesh((1,), ('x',))\n",
        "jax.make_mesh",
        "import jax\njax.make_mesh((1,), ('x',), axis_types=t)\n",
    ),
    (
        "untyped_meshes",
        "tests/a.py",
        "from jax.sharding import Mesh\nMesh(d, ('x',))\n",
        "Mesh",
        "from maxmoe.sharding import make_mesh\nmake_mesh({'x': 1})\n",
    ),
]


@pytest.mark.parametrize(("rule", "path", "bad", "says", "good"), CASES)
def test_rule_reports_a_bad_tree_and_accepts_a_good_one(tmp_path, rule, path, bad, says, good):
    check = getattr(house_rules, rule)
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(bad)
    (problem,) = check(tmp_path)
    assert path in problem and says in problem
    if good is not None:
        file.write_text(good)
        assert check(tmp_path) == []


def test_every_rule_has_a_bad_tree():
    assert {rule.__name__ for rule in house_rules.RULES} == {case[0] for case in CASES}
