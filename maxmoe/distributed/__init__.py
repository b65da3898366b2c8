"""Jobs of several processes: starting them, making sure that they agree, and ending them all when one is gone.

The same command runs on every host. `start` finds out which process this is (see `environment`), waits for the others
(see `peers`) and starts `jax.distributed`. From then on, within seconds of the end of a process that was killed or
failed, every other one ends with exit code 1 and a message that names it; a host that vanishes from the network is
noticed by JAX's heartbeats within a minute.
"""

import atexit
import os
import sys
from types import TracebackType

import numpy as np
from absl import flags, logging

from maxmoe.distributed import peers
from maxmoe.distributed.environment import Job, ask_jax, detect, is_tpu_slice

__all__ = ["Job", "agree", "define_flags", "describe", "detect", "fail", "from_process_0", "start", "start_from_flags"]

_HEARTBEAT_TIMEOUT_S = 60
_MAX_VALUE_CHARACTERS = 2**18
_ALONE = Job("", 1, 0, "neither flags nor a scheduler")
_PLACE_FLAGS = ("coordinator", "num_processes", "process_id")

_job: Job | None = None
_peers: peers.Peers | None = None


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = 300,
) -> Job:
    """Joins the job that the arguments and the environment tell of; a second call returns the same.

    To be called before anything makes JAX look for devices. Nothing is started for a process that works alone.

    Args:
      coordinator: HOST:PORT of process 0, or "auto" for what JAX itself finds, see `environment.ask_jax`.
      timeout_s: How long to wait for the others.
    Raises: ValueError for values that contradict each other or do not suffice, also between processes; TimeoutError
      that names the processes that did not come.
    """
    global _job, _peers
    if _job is not None:
        for name, given in (("coordinator", coordinator), ("num_processes", num_processes), ("process_id", process_id)):
            if given not in (None, "auto", getattr(_job, name)):
                raise ValueError(f"start({name}={given!r}): this is already {name} {getattr(_job, name)!r}")
        return _job
    import jax  # here, so that --help answers at once

    nothing = coordinator is None and num_processes is None and process_id is None
    if coordinator == "auto" or (nothing and is_tpu_slice(os.environ)):
        job = ask_jax(timeout_s)
    else:
        job = detect(os.environ, coordinator=coordinator, num_processes=num_processes, process_id=process_id) or _ALONE
    if job.num_processes > 1:
        if jax.distributed.is_initialized():
            raise ValueError("jax.distributed was initialised by something else; leave that to maxmoe.distributed")
        _peers = (peers.Coordinator if job.process_id == 0 else peers.Member)(job, timeout_s)
        atexit.register(_peers.leave)  # runs before JAX's own, which waits for the others
        _report_uncaught_errors()
        _keep_stdout_for_answers()
        _initialize_jax(job, timeout_s)
    _job = job
    return job


def _initialize_jax(job: Job, timeout_s: float) -> None:
    import jax

    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # With it, SIGTERM would only be noted: a scheduler could not end this process other than by SIGKILL.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        job.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
    )


def _report_uncaught_errors() -> None:
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        previous(kind, error, where)
        fail(f"{kind.__name__}: {error}".splitlines()[0])

    sys.excepthook = report


def _keep_stdout_for_answers() -> None:
    """Standard output is for what Python prints: Gloo, below JAX, reports its connections there, now on stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def agree(what: str, value: str | bytes, timeout_s: float = 60) -> None:
    """Makes sure that every process gives the same value. Each must call it, in the same order.

    Args:
      what: Says what is compared, e.g. "config".
      value: The text or fingerprint itself.
      timeout_s: How long to wait for the others' values.
    Raises: ValueError, in every process, that names those that differ and shows both values; TimeoutError that names
      those that gave none; ConnectionError if one is gone. The job ends soon after, also where nothing was raised.
    """
    text = value.hex() if isinstance(value, bytes) else value
    if len(text) > _MAX_VALUE_CHARACTERS:
        raise ValueError(f"agree({what!r}): {len(text)} characters, at most {_MAX_VALUE_CHARACTERS}: give a digest")
    if _peers is not None:
        _peers.agree(what, text, timeout_s)


def from_process_0(number: int) -> int:
    """The number that process 0 gives, in every process; each must call it. For what is drawn at random.

    Args:
      number: In 0..2**64-1.
    """
    if _peers is None:
        return number
    from jax.experimental import multihost_utils

    high, low = multihost_utils.broadcast_one_to_all(np.array(divmod(number, 2**32), np.uint32))
    return (int(high) << 32) + int(low)


def fail(reason: str) -> None:
    """Tells the other processes that this one cannot go on, so that they end too; for errors that are caught.

    This process should end now: if something holds it back, it is ended within seconds. Uncaught errors are reported
    without this. Does nothing for a process that works alone.
    """
    if _peers is not None:
        _peers.fail(reason)


def describe() -> str:
    """One line for the log. Makes JAX look for devices."""
    import jax

    job = _job or _ALONE
    devices = f"{jax.local_device_count()} of {jax.device_count()} devices ({jax.devices()[0].device_kind})"
    if job.num_processes == 1:
        return f"one process, {devices}"
    return (
        f"process {job.process_id} of {job.num_processes}, {devices}, coordinator {job.coordinator}, known from "
        f"{job.source}"
    )


def define_flags() -> None:
    """Defines the flags of a command that may run as several processes."""
    flags.DEFINE_string(
        "coordinator",
        None,
        "For several processes: HOST:PORT at which process 0 listens, the same for all; or auto for what JAX finds. "
        "Default: from SLURM, Open MPI or the TPU slice; none of them means a single process.",
    )
    flags.DEFINE_integer(
        "num_processes", None, "How many processes there are. Default: what the scheduler says.", lower_bound=1
    )
    flags.DEFINE_integer(
        "process_id", None, "Which one this is, from 0. Default: what the scheduler says.", lower_bound=0
    )


def start_from_flags(timeout_s: float = 300) -> Job:
    """`start` with the flags of `define_flags`; logs what was started.

    Raises: What `start` and `agree` raise: all other flags that were given must be the same in every process.
    """
    values = flags.FLAGS
    job = start(*(values[name].value for name in _PLACE_FLAGS), timeout_s=timeout_s)
    if job.num_processes > 1:
        logging.info("%s", describe())
        others = [name for name in sorted(values) if values[name].present and name not in _PLACE_FLAGS]
        agree("command line", " ".join(f"--{name}={values[name].value}" for name in others))
    return job
