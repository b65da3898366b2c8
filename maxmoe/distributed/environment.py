"""Which process of which job this is: from flags, and from what the scheduler has set in the environment.

The same command runs on every host, so at least the process id has to come from the scheduler:

- SLURM: all three, from the variables that srun sets for a step.
- Open MPI: count and id; the coordinator too, unless mpirun of version 5 spans several hosts.
- Kubernetes: the id, from JOB_COMPLETION_INDEX, which every pod of an indexed Job has, a Job of a JobSet included. The
  manifest gives the rest: --coordinator=JOB-0.SERVICE:PORT --num_processes=COMPLETIONS.
- Cloud TPU: all three, which JAX itself finds; see `is_tpu_slice` and `ask_jax`.

JAX finds these for itself on SLURM and Open MPI before version 5 too, but takes one GPU per process there even if a
host runs a single process, and says nothing of values that contradict each other.
"""

import dataclasses
import re
import urllib.request
import zlib
from collections.abc import Mapping

# Above the ports that Linux hands out, so that no other program holds the one that is computed.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
_FIELDS = {
    "coordinator": ("--coordinator", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("--num_processes", "JAX_NUM_PROCESSES"),
    "process_id": ("--process_id", "JAX_PROCESS_ID"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """This process's place in a job.

    Attributes:
      coordinator: HOST:PORT at which process 0 listens; empty for a single process.
      source: Where this is known from, for messages.
      local_device_ids: Which of the host's GPUs are this process's; None for all that it can see.
    """

    coordinator: str
    num_processes: int
    process_id: int
    source: str
    local_device_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Fact:
    value: str | int
    name: str  # the flag or variable that says so

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def detect(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Job | None:
    """The job that flags (the arguments) and environment tell of; None for a process that works alone.

    A flag stands for the variable JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES or JAX_PROCESS_ID. What neither gives is
    the scheduler's. A count of 1 makes a process work alone, whatever the scheduler says.
    Raises: ValueError for values that contradict each other, are out of range, or do not suffice.
    """
    flags = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    given: dict[str, _Fact] = {}
    for field, (flag, variable) in _FIELDS.items():
        facts = [] if flags[field] is None else [_Fact(flags[field], flag)]
        if environ.get(variable):
            facts.append(_fact(environ, variable, is_number=field != "coordinator"))
        if facts:
            given[field] = _agreed(facts)
    source, found, advice = _scheduler(environ)
    count = given.get("num_processes", found.get("num_processes"))
    if count is not None and count.value == 1:
        _check_range(count, given.get("process_id"))
        return None
    if not given and not found:
        return None
    for field in ("num_processes", "process_id"):
        if field in given and field in found:
            _agreed([given[field], found[field]])
    merged = found | given  # a coordinator that is given may be another than the scheduler's first host
    missing = [_FIELDS[field][0] for field in _FIELDS if field not in merged]
    if missing:
        known = ", ".join(str(merged[field]) for field in _FIELDS if field in merged)
        raise ValueError(f"{known} is not enough to start several processes; missing: {', '.join(missing)}. {advice}")
    _check_range(merged["num_processes"], merged["process_id"])
    host_and_port(str(merged["coordinator"].value), merged["coordinator"].name)
    sources = [source] * any(field not in given for field in _FIELDS)
    sources += ["flags" if any(f.name.startswith("--") for f in given.values()) else "JAX_* variables"] * bool(given)
    return Job(
        str(merged["coordinator"].value),
        int(merged["num_processes"].value),
        int(merged["process_id"].value),
        " and ".join(sources),
        _local_device_ids(environ),
    )


def host_and_port(coordinator: str, name: str = "--coordinator") -> tuple[str, int]:
    """Splits HOST:PORT, or [IPV6]:PORT.

    Raises: ValueError if it is something else.
    """
    match = re.fullmatch(r"\[?([^\[\]]+)\]?:(\d+)", coordinator)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"{name}={coordinator}: give HOST:PORT of process 0, such as node1:1234")
    return match[1], int(match[2])


def is_tpu_slice(environ: Mapping[str, str]) -> bool:
    """Whether this is one host of several that share a slice of Cloud TPUs, or one slice of several.

    Asks the metadata server of the machine where the environment does not tell. To be called after JAX is imported,
    which sets TPU_ML_PLATFORM where it finds TPUs, and TPU_SKIP_MDS_QUERY where it does not.
    """
    if "TPU_ML_PLATFORM" not in environ or "tpu" not in environ.get("JAX_PLATFORMS", "tpu"):
        return False
    if int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1 or environ.get("TPU_PROCESS_ADDRESSES_PATH"):
        return True
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES"))
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environ:
        slices = re.search(r"MEGASCALE_NUM_SLICES: *'(\d+)'", _metadata(environ, "tpu-env"))
        return (slices is not None and int(slices[1]) > 1) or "," in _metadata(environ, "worker-network-endpoints")
    return "," in (hosts or "")


def _metadata(environ: Mapping[str, str], key: str) -> str:
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.read().decode()
    except OSError:  # no such server or no such key: a TPU that is not part of a slice
        return ""


def ask_jax(timeout_s: float) -> Job:
    """What JAX's own detection finds: Cloud TPU slices, and Kubernetes jobs if jax[k8s] is installed.

    Raises: ValueError if it finds nothing.
    """
    from jax._src import clusters  # the public initialize() would also start, before anyone knows who is there

    coordinator, num_processes, process_id, local = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(timeout_s)
    )
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError("--coordinator=auto: JAX knows no scheduler here; give HOST:PORT of process 0")
    return Job(coordinator, num_processes, process_id, "JAX's detection", None if local is None else tuple(local))


def _scheduler(environ: Mapping[str, str]) -> tuple[str, dict[str, _Fact], str]:
    """A scheduler's name, what it says, and what to do if that is too little."""
    if "OMPI_COMM_WORLD_RANK" in environ:  # before SLURM, under which mpirun may run: there SLURM counts its daemons
        found = {
            "num_processes": _fact(environ, "OMPI_COMM_WORLD_SIZE"),
            "process_id": _fact(environ, "OMPI_COMM_WORLD_RANK"),
        }
        uri = environ.get(
            "OMPI_MCA_orte_hnp_uri", ""
        )  # where mpirun runs: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        address = re.search(r"tcp://([^,:]+)|tcp6://(\[[^,\]]+)", uri)
        port = _FIRST_PORT + zlib.crc32(environ.get("PMIX_NAMESPACE", uri).encode()) % _NUM_PORTS
        if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ["OMPI_COMM_WORLD_SIZE"]:
            found["coordinator"] = _Fact(f"127.0.0.1:{port}", "Open MPI's only host")
        elif address:
            host = address[1] or address[2] + "]"
            found["coordinator"] = _Fact(f"{host}:{port}", "OMPI_MCA_orte_hnp_uri")
        return "Open MPI", found, "Give --coordinator=HOST_OF_RANK_0:PORT, the same to every rank."
    if "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:  # not in a batch script, outside of srun
        count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        job, step = (_integer(environ.get(name, "0"), name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = _FIRST_PORT + (job + step) % _NUM_PORTS
        host = first_node(environ["SLURM_STEP_NODELIST"])
        found = {
            "coordinator": _Fact(f"{host}:{port}", "SLURM_STEP_NODELIST"),
            "num_processes": _fact(environ, count),
            "process_id": _fact(environ, "SLURM_PROCID"),
        }
        return "SLURM", found, ""
    if "JOB_COMPLETION_INDEX" in environ:
        advice = (
            "Give every pod --coordinator=JOB-0.SERVICE:PORT, with the Job's headless service, and --num_processes "
            "with its completions; or --num_processes=1 to pods that work alone."
        )
        return "Kubernetes", {"process_id": _fact(environ, "JOB_COMPLETION_INDEX")}, advice
    return "", {}, "No scheduler is known here, so give all three, or none for a single process."


def first_node(nodes: str) -> str:
    """First host of a SLURM node list: node001 of node[001-004,007],other3."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _local_device_ids(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """One GPU for each of several processes of a host, unless the launcher gave each its own."""
    if environ.get("JAX_LOCAL_DEVICE_IDS") or "," not in environ.get("CUDA_VISIBLE_DEVICES", ","):
        return None
    if "OMPI_COMM_WORLD_RANK" in environ:
        local = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)) > 1
        return (int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),) if local else None
    if "SLURM_STEP_NODELIST" in environ and "SLURM_LOCALID" in environ:
        count = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", 1)))
        local = count > int(environ.get("SLURM_STEP_NUM_NODES", count))
        return (int(environ["SLURM_LOCALID"]),) if local else None
    return None


def _fact(environ: Mapping[str, str], name: str, is_number: bool = True) -> _Fact:
    text = environ.get(name, "")
    return _Fact(_integer(text, name) if is_number else text, name)


def _integer(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not a number")
    return int(text)


def _agreed(facts: list[_Fact]) -> _Fact:
    if len({fact.value for fact in facts}) > 1:
        raise ValueError(f"{' and '.join(map(str, facts))} contradict each other")
    return facts[0]


def _check_range(num_processes: _Fact, process_id: _Fact | None) -> None:
    if int(num_processes.value) < 1:
        raise ValueError(f"{num_processes}: at least 1")
    if process_id is not None and not 0 <= int(process_id.value) < int(num_processes.value):
        raise ValueError(
            f"{process_id} and {num_processes} contradict each other: ids run from 0 to {int(num_processes.value) - 1}"
        )
