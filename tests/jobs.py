"""Runs a program as a job of several processes on loopback, with the variables that a scheduler sets."""

import os
import subprocess
import time
from pathlib import Path

from maxmoe.distributed import environment
from tests import distributed_job

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 90  # for what takes a few seconds on a quiet machine


def variables(port: int, num_processes: int, process: int) -> dict[str, str]:
    """As srun sets them on one node; the port follows from the job's number."""
    return {
        "SLURM_JOB_ID": str(port - environment._FIRST_PORT),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(num_processes),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def run(folder, commands, stopped=(), timeout_s=TIMEOUT_S, **more):
    """Runs one command for each process; `more` are further variables. Returns exit codes, outputs, and the seconds.

    What a process writes to standard error stands in its output too, where it was written. One that is stopped is
    killed once the others have ended; one that hangs is killed too, and fails the test.
    """
    port = distributed_job.free_port(environment._FIRST_PORT + os.getpid() % 3000, environment._FIRST_PORT + 4095)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "JAX_", "JOB_", "XLA_"))}
    began = time.monotonic()
    processes = []
    for i, command in enumerate(commands):
        env = clean | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables(port, len(commands), i) | more
        with open(folder / str(i), "w") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env))
    hung = []
    for i, process in enumerate(processes):
        if i not in stopped:
            try:
                process.wait(max(began + timeout_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                hung.append(i)
    took_s = time.monotonic() - began
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    outputs = [(folder / str(i)).read_text() for i in range(len(commands))]
    assert not hung, (hung, [output[-2000:] for output in outputs])
    return codes, outputs, took_s
