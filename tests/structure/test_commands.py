"""tools/demo and tools/test: which Pythons they refuse, when they install, and what they leave behind.

A shell script stands in for Python and writes down how it was called, so that nothing is installed here.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """#!/usr/bin/env bash
case "$*" in
  *"import venv"*) exit "${NO_VENV:-0}" ;;
  *hashlib*) echo key ;;
  *version_info*) echo "${VERSION:-3.12.1}" ;;
  "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"; : >"${@: -1}/pyvenv.cfg" ;;
  "-m pip --version") ;;
  "-m pip install"*) echo "$*" >>"$CALLS"; echo "said by pip" >&2; exit "${PIP_EXIT:-0}" ;;
  *) echo "$*" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A copy of what the commands read, at a path with a space in it."""
    root = tmp_path / "a project"
    (root / "tools").mkdir(parents=True)
    for name in ("tools/demo", "tools/test", "tools/venv.sh", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "stand_in").write_text(STAND_IN)
    (tmp_path / "stand_in").chmod(0o755)
    return root


def _run(project: Path, *command: str, **variables: str) -> tuple[int, str, list[str]]:
    """Runs a command from elsewhere: its exit code, its error output, and the calls of the stand-in."""
    calls = project.parent / "calls"
    calls.write_text("")
    settings = {"PYTHON": str(project.parent / "stand_in"), "CALLS": str(calls), **variables}
    env = {k: v for k, v in os.environ.items() if k != "VENV"} | settings
    done = subprocess.run(
        [project / "tools" / command[0], *command[1:]], env=env, cwd="/", capture_output=True, text=True
    )
    return done.returncode, done.stderr, calls.read_text().splitlines()


def _installs(calls: list[str]) -> list[str]:
    return [call.split()[-1] for call in calls if "pip install" in call]


@pytest.mark.parametrize("version", ["2.7.18", "3.10.13", "3.14.0"])
@pytest.mark.parametrize("command", ["demo", "test"])
def test_command_refuses_other_pythons(project, command, version):
    code, error, calls = _run(project, command, VERSION=version)
    assert code != 0 and calls == []
    for part in (version, "3.11 to 3.13", "PYTHON="):
        assert part in error
    assert not (project / ".venv").exists()


def test_command_refuses_a_python_that_is_not_there(project):
    code, error, _ = _run(project, "demo", PYTHON="no-such-python")
    assert code != 0 and "no-such-python" in error and "3.11 to 3.13" in error


def test_command_refuses_a_python_without_venv(project):
    code, error, _ = _run(project, "demo", NO_VENV="1")
    assert code != 0 and "venv module" in error and "python3-venv" in error


def test_command_refuses_an_environment_of_another_python(project):
    _run(project, "demo")
    (project / ".venv/bin/python").write_text(STAND_IN.replace("3.12.1", "3.11.9"))
    code, error, calls = _run(project, "demo")
    assert code != 0 and calls == [] and "3.11" in error and "3.12" in error


def test_command_leaves_a_folder_that_is_no_environment(project):
    (project / "mine").mkdir()
    (project / "mine" / "file").write_text("x")
    code, error, _ = _run(project, "demo", VENV=str(project / "mine"))
    assert code != 0 and "not a virtual environment" in error
    assert (project / "mine" / "file").exists()


def test_demo_installs_once_and_passes_its_arguments(project):
    code, _, calls = _run(project, "demo")
    assert code == 0 and _installs(calls) == ["."]
    assert calls[-1].startswith("-P -m maxmoe.decode --prompt")
    code, error, calls = _run(project, "demo", "--prompt", "two words", "--json")
    assert code == 0 and calls == ["-P -m maxmoe.decode --prompt two words --json"]
    assert "nstalling" not in error


def test_test_adds_its_extra_and_demo_keeps_it(project):
    _run(project, "demo")
    assert _installs(_run(project, "test")[2]) == [".[test]"]
    assert _run(project, "test", "-k", "kda")[2] == ["-m pytest -k kda"]
    assert _installs(_run(project, "demo")[2]) == []


def test_changed_requirements_install_again_with_the_extras(project):
    _run(project, "test")
    python = project / ".venv/bin/python"
    python.write_text(STAND_IN.replace("echo key", "echo another"))
    assert _installs(_run(project, "demo")[2]) == [".[test]"]


def test_failed_install_is_shown_and_tried_again(project):
    code, error, _ = _run(project, "demo", PIP_EXIT="3")
    assert code != 0 and "said by pip" in error and "failed" in error
    assert _installs(_run(project, "demo")[2]) == ["."]


def test_venv_names_the_place(project):
    place = project.parent / "else where"
    assert _run(project, "demo", VENV=str(place))[0] == 0
    assert (place / "bin/python").exists() and not (project / ".venv").exists()
