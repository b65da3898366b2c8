"""python -m maxmoe.decode: what it prints and where, its exit codes, and that it stops when asked to."""

import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from maxmoe import decode
from maxmoe.chat.tokenizer import ByteTokenizer
from maxmoe.config import load_config
from maxmoe.inference import compilation_cache

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ROOT / "maxmoe/data/tiny"
SUMMARY = re.compile(
    r"\[(\d+) prompt tokens, (\d+) new tokens, first after [\d.]+ s, [\d.]+ tokens/s, ended by (\w+), seed (\d+)\]\n"
)


def _run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Runs the command. Returns its exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "maxmoe.decode", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        input=stdin,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def _main(capsys, *arguments: str) -> tuple[int, str, str]:
    """The same in this process, for runs that would spend their time on importing."""
    with flagsaver.flagsaver():
        code = decode.main(flags.FLAGS(["decode", *arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def greedy_json():
    """A prompt from standard input answered by the packaged checkpoint, as JSON."""
    code, out, error = _run("--prompt_file=-", "--temperature=0", "--max_tokens=9", "--json", stdin="hé\n".encode())
    assert code == 0, error
    return out


def test_json_is_one_object_and_all_of_standard_output(greedy_json):
    answer = json.loads(greedy_json)
    assert greedy_json.count("\n") == 1
    assert answer["num_prompt_tokens"] == 4 and answer["num_new_tokens"] == len(answer["ids"]) == 9
    assert answer["text"] == ByteTokenizer(512).decode(answer["ids"])
    assert answer["finish_reason"] == "length"
    assert answer["first_token_s"] > 0 and answer["tokens_per_s"] > 0 and answer["seed"] >= 0


def test_drafts_change_no_answer(capsys, greedy_json):
    given = ("--prompt=hé\n", "--temperature=0", "--max_tokens=9", "--json")
    code, out, error = _main(capsys, *given, "--num_draft_tokens=3")
    assert code == 0, error
    assert json.loads(out)["ids"] == json.loads(greedy_json)["ids"]
    code, _, error = _main(capsys, *given, "--num_draft_tokens=3", "--stream_weights")
    assert code == 2 and "leave out --stream_weights" in error


def test_text_streams_to_standard_output_and_ends_with_a_summary(greedy_json):
    code, out, error = _run("--prompt=hé\n", "--temperature=0", "--max_tokens=9", "--seed=5")
    assert code == 0
    text, summary = out[: out.rindex("\n[") + 1], out[out.rindex("\n[") + 1 :]
    assert text == json.loads(greedy_json)["text"] + "\n"
    assert SUMMARY.fullmatch(summary).groups() == ("4", "9", "length", "5")
    assert len(re.findall("weights are random", error)) == 1 and "Traceback" not in error


@pytest.fixture
def ctrl_c_interrupts():
    """Python ignores Ctrl-C where its shell has started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_interrupt_ends_with_what_there_is(capsys, monkeypatch):
    make_writer, written = decode._terminal_writer, []

    def make_interrupting_writer():
        write = make_writer()

        def write_and_interrupt(text):
            written.append(text)
            write(text)
            if len(written) == 3:
                signal.raise_signal(signal.SIGINT)

        return write_and_interrupt

    monkeypatch.setattr(decode, "_terminal_writer", make_interrupting_writer)
    code, out, error = _main(
        capsys, "--prompt=x", "--max_tokens=200", "--seed=7"
    )  # a seed whose answer is longer than three tokens
    assert code == 130 and "Traceback" not in error
    assert out.startswith("".join(written)) and "3 new tokens" in out
    assert SUMMARY.search(out)[3] == "interrupted"


def test_flags_of_sampling_reach_the_answer(capsys, greedy_json):
    arguments = ("--prompt=hé\n", "--temperature=0", "--max_tokens=9", "--json")
    text = json.loads(greedy_json)["text"]
    stop = text[3:6]
    code, out, error = _main(capsys, *arguments, f"--stop={stop}", "--thinking_token_budget=0")
    assert code == 0, error
    assert json.loads(out)["text"] == text[: text.index(stop)] and json.loads(out)["finish_reason"] == "stop"
    _, out, _ = _main(capsys, *arguments, "--presence_penalty=2", "--frequency_penalty=2", "--repetition_penalty=9")
    assert len(set(json.loads(out)["ids"])) == 9  # so strong that nothing comes twice
    code, _, error = _main(capsys, *arguments, "--min_tokens=10")
    assert code == 2 and "min_tokens=10: must be an integer in 0..max_tokens, which is 9" in error


def test_help_teaches_the_command():
    code, out, _ = _run("--help")
    assert code == 0 and "python -m maxmoe.decode --prompt" in out
    names = "checkpoint prompt prompt_file max_tokens temperature top_p seed max_len dtype implementation".split()
    names += "top_k min_p repetition_penalty presence_penalty frequency_penalty min_tokens stop".split()
    names += ["thinking_token_budget", "tools", "max_tool_rounds"]
    for name in names:
        assert f"  --{name}: " in out
    assert "--[no]json" in out and str(Path.home()) not in out.replace(str(ROOT), "")


MISTAKES = [
    ([], "--prompt_file"),
    (["--prompt=a", "--prompt_file=b"], "both are given"),
    (["--prompt=a", "b", "c"], "quotes"),
    (["--prompt=a", "--max_tokens=0"], "max_tokens"),
    (["--prompt=a", "--temperature=101"], "[0.0, 100.0]"),
    (["--prompt=a", "--seed=-1"], "seed"),
    (["--prompt=a", "--dtype=float64"], "float32|bfloat16|auto"),
    (["--prompt=a", "--implementation=pallas_tpu"], "runs on tpu, and this process computes on cpu"),
    (["--prompt=a", "--beam=3"], "beam"),
    (["--prompt_file=no/such/file"], "no/such/file"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_mistake_is_one_message_and_exit_code_2(arguments, says):
    code, out, error = _run(*arguments)
    assert code == 2 and out == ""
    assert says in error and "Traceback" not in error


def test_mistakes_that_the_checkpoint_decides(capsys, tmp_path):
    cases = [
        (["--prompt=a", f"--checkpoint={tmp_path}"], "config.json"),
        (["--prompt="], "empty"),
        (["--prompt=a", "--top_p=0"], "top_p=0.0"),
        (["--prompt=a", "--max_len=20"], "max_len is 20"),
        (["--prompt=a", "--max_tokens=8192"], "trained up to 8192"),
    ]
    for arguments, says in cases:
        code, out, error = _main(capsys, *arguments)
        assert code == 2 and out == "" and says in error, arguments


def test_prompt_file_that_is_not_text(capsys, tmp_path):
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    code, _, error = _main(capsys, f"--prompt_file={tmp_path}/prompt")
    assert code == 2 and "not UTF-8 text: see byte 2" in error


def test_damaged_checkpoint_is_one_message(capsys, tmp_path):
    shutil.copy(PACKAGED / "config.json", tmp_path)
    weights = (PACKAGED / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    code, out, error = _main(capsys, "--prompt=a", f"--checkpoint={tmp_path}")
    assert code == 2 and out == "" and "model.safetensors" in error


def test_packaged_checkpoint_is_the_tiny_config():
    assert load_config(PACKAGED) == load_config(ROOT / "configs/tiny.py")
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 3_000_000


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a␛[2J\tb\n␍�"), (False, "a\x1b[2J\tb\n\r\x9b")])
def test_control_characters_do_not_reach_a_terminal(monkeypatch, is_terminal, shown):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    out.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", out)
    decode._terminal_writer()("a\x1b[2J\tb\n\r\x9b")
    assert out.buffer.getvalue().decode() == shown


@pytest.fixture
def no_compilation_cache():
    """JAX without a folder for compiled programs, until the test ends."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilation_cache_chooses_a_folder(no_compilation_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MAXMOE_CACHE_DIR", raising=False)
    assert compilation_cache.enable_compilation_cache() == tmp_path / "xdg/maxmoe/xla"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xdg/maxmoe/xla")
    monkeypatch.setenv("MAXMOE_CACHE_DIR", str(tmp_path / "mine"))
    # What is set already, by the user or by us, stays.
    assert compilation_cache.enable_compilation_cache() == tmp_path / "xdg/maxmoe/xla"
    jax.config.update("jax_compilation_cache_dir", None)
    assert compilation_cache.enable_compilation_cache() == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()


def test_compilation_cache_goes_without_a_folder_it_cannot_write(no_compilation_cache, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAXMOE_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert compilation_cache.enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert "MAXMOE_CACHE_DIR" in caplog.text and str(tmp_path / "file") in caplog.text
