"""`python -m maxmoe.decode` as one command on several hosts: here processes on loopback, with one CPU device each."""

import json
import sys

import pytest

from tests import jobs

PROMPT = "Ab 1, cd 2;"
SETTINGS = ("--temperature=0", "--max_tokens=3", "--max_len=64", "--json")
TIMEOUT_S = 900  # for what takes half a minute on a quiet machine


def _decode(folder, checkpoint, num_processes, *arguments, **special):
    """Runs the command; `special` are arguments of one process. Returns exit codes and outputs."""
    command = [
        sys.executable,
        "-m",
        "maxmoe.decode",
        f"--checkpoint={checkpoint}",
        f"--prompt={PROMPT}",
        *SETTINGS,
        *arguments,
    ]
    commands = [[*command, *special.get(f"process_{i}", ())] for i in range(num_processes)]
    codes, outputs, _ = jobs.run(folder, commands, timeout_s=TIMEOUT_S)
    return codes, outputs


def _answers(outputs):
    return [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.multidevice
def test_two_and_four_processes_give_the_answer_of_one(tmp_path, short_folder):
    wanted = None
    for num_processes, mesh in ((1, []), (2, ["--mesh=seq=2"]), (4, ["--mesh=expert=2,tensor=2"])):
        codes, outputs = _decode(tmp_path, short_folder, num_processes, *mesh)
        assert not any(codes), outputs
        answers = _answers(outputs)
        assert len(answers) == 1  # process 0 alone writes
        assert len(answers[0]["ids"]) == 3
        wanted = wanted or answers[0]
        assert answers[0]["ids"] == wanted["ids"]


@pytest.mark.slow
@pytest.mark.multidevice
def test_processes_with_different_arguments_end_with_a_message(tmp_path, short_folder):
    codes, outputs = _decode(tmp_path, short_folder, 2, "--mesh=seq=2", process_1=["--prompt=Something else"])
    for code, output in zip(codes, outputs, strict=True):
        assert code not in (0, -9) and "command line differs" in output and not _answers([output]), output


@pytest.mark.multidevice
def test_several_processes_need_a_mesh(tmp_path, short_folder):
    codes, outputs = _decode(tmp_path, short_folder, 2)
    for code, output in zip(codes, outputs, strict=True):
        assert code not in (0, -9), output
    assert any("2 processes need a --mesh of all their 2 devices, such as expert=2" in output for output in outputs)
