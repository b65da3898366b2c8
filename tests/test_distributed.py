"""Jobs of several processes: real ones on loopback, all of which end when one is gone or different."""

import os
import signal
import sys
from pathlib import Path

import jax
import pytest
from absl import flags

from maxmoe import distributed
from maxmoe.distributed.environment import Job
from tests import distributed_job, jobs

SCRIPT = Path(__file__).with_name("distributed_job.py")


# A single process


def test_start_alone_starts_nothing(monkeypatch):
    monkeypatch.setattr(distributed, "_job", None)
    for name in [n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "JAX_COORD", "JOB_COMPLETION"))]:
        monkeypatch.delenv(name)
    job = distributed.start()
    assert job.num_processes == 1 and not jax.distributed.is_initialized()
    assert distributed.start() is job
    distributed.agree("config", "x")
    distributed.fail("no one hears this")
    assert distributed.describe().startswith("one process, ")
    with pytest.raises(ValueError, match="num_processes=2.*already num_processes 1"):
        distributed.start(num_processes=2)


def test_start_refuses_flags_that_do_not_suffice(monkeypatch):
    monkeypatch.setattr(distributed, "_job", None)
    with pytest.raises(ValueError, match="missing"):
        distributed.start("127.0.0.1:1", 2)
    assert distributed._job is None


def test_agree_refuses_values_that_are_too_long():
    with pytest.raises(ValueError, match="give a digest"):
        distributed.agree("weights", b"x" * 2**18)


def test_flags_reach_start(monkeypatch):
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    for define in ("DEFINE_string", "DEFINE_integer"):
        original = getattr(flags, define)
        monkeypatch.setattr(flags, define, lambda *a, o=original, **k: o(*a, flag_values=values, **k))
    distributed.define_flags()
    values(["command", "--coordinator=a:1", "--num_processes=2", "--process_id=1"])
    asked = []
    monkeypatch.setattr(distributed, "start", lambda *a, **k: asked.append((a, k)) or Job("", 1, 0, "test"))
    distributed.start_from_flags(timeout_s=9)
    assert asked == [(("a:1", 2, 1), {"timeout_s": 9})]


# Whole jobs


def _run(folder, action, num_processes, special, *common):
    """Runs a job of the script; `special` are settings by process."""
    commands = [[sys.executable, str(SCRIPT), action, *common, *special.get(i, [])] for i in range(num_processes)]
    return jobs.run(folder, commands, stopped=[i for i, settings in special.items() if "signal=SIGSTOP" in settings])


@pytest.mark.multidevice
@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_sum_over_all_devices(tmp_path, num_processes):
    codes, outputs, _ = _run(tmp_path, "once", num_processes, {})
    devices = num_processes * distributed_job.DEVICES_PER_PROCESS
    for i, output in enumerate(outputs):
        assert codes[i] == 0, output
        assert f"sum {devices * (devices + 1) // 2}" in output
        assert f"process {i} of {num_processes}, 2 of {devices} devices (cpu), coordinator 127.0.0.1:" in output
        assert "known from SLURM" in output


@pytest.mark.multidevice
def test_processes_end_when_one_has_another_config(tmp_path):
    codes, outputs, _ = _run(tmp_path, "once", 3, {2: ["config=layers=5"]})
    for code, output in zip(codes, outputs, strict=True):
        assert code not in (0, -signal.SIGKILL), output
        assert "ValueError: config differs: 'layers=4' on process 0 (" in output
        assert "'layers=5' on process 2 (" in output


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("victim", "settings", "code", "message"),
    [
        (2, ["signal=SIGKILL"], -signal.SIGKILL, "process 2 ("),
        (2, ["signal=SIGTERM"], -signal.SIGTERM, "process 2 ("),
        (1, ["error=no more memory"], None, "failed: RuntimeError: no more memory"),
        (0, ["caught=the disk is full"], None, "failed: the disk is full"),
        # Of process 0, JAX's own message may come first; it calls it the leader.
        (0, ["signal=SIGKILL"], -signal.SIGKILL, None),
    ],
)
def test_processes_end_when_one_is_gone(tmp_path, victim, settings, code, message):
    codes, outputs, _ = _run(tmp_path, "loop", 3, {victim: settings})
    assert code is None or codes[victim] == code, outputs[victim]
    for i, output in enumerate(outputs):
        assert codes[i] != 0
        assert "sum 21" in output  # it was at work
        if i != victim:
            assert codes[i] != -signal.SIGKILL
            assert (message in output) if message else ("process 0 (" in output or "leader" in output), output


@pytest.mark.multidevice
def test_processes_end_when_one_no_longer_answers(tmp_path):
    """Stopped, it is like a host that is cut off: its connections are not closed."""
    codes, outputs, _ = _run(tmp_path, "loop", 2, {1: ["signal=SIGSTOP"]})
    assert codes[0] not in (0, -signal.SIGKILL)
    assert "unhealthy (stopped sending heartbeats):\n1\n" in outputs[0], outputs[0]


@pytest.mark.multidevice
def test_processes_end_when_one_hangs_elsewhere(tmp_path):
    codes, outputs, _ = _run(tmp_path, "once", 3, {2: ["hang=1"]}, "agree_s=8")
    for i, output in enumerate(outputs):
        assert codes[i] not in (0, -signal.SIGKILL), output
        assert "weights: no answer within 8 s from process 2 (" in output
