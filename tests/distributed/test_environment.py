"""Which process of which job, by what schedulers set."""

import os
import socket

import pytest

from maxmoe.distributed import environment
from maxmoe.distributed.environment import Job, ask_jax, detect, first_node, is_tpu_slice

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[003-004,007],x1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, {}, None),
        ({"PATH": "/bin"}, {"num_processes": 1}, None),
        ({}, {"coordinator": "a:1", "num_processes": 2, "process_id": 0}, Job("a:1", 2, 0, "flags")),
        ({}, {"coordinator": "[fe80::1]:80", "num_processes": 2, "process_id": 1}, Job("[fe80::1]:80", 2, 1, "flags")),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"},
            {},
            Job("a:1", 3, 2, "JAX_* variables"),
        ),
        (SLURM, {}, Job("node003:61443", 4, 3, "SLURM")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "5"}, {}, Job("node003:61443", 5, 3, "SLURM", (0,))),
        (SLURM, {"coordinator": "ib0:9"}, Job("ib0:9", 4, 3, "SLURM and flags")),
        (SLURM, {"num_processes": 4}, Job("node003:61443", 4, 3, "SLURM and flags")),
        (SLURM, {"num_processes": 1}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}, None),
        # Two tasks on each node: each takes the GPU of its number, unless the launcher has given it one.
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, {}, Job("node003:61443", 4, 3, "SLURM", (0,))),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "5"}, {}, Job("node003:61443", 4, 3, "SLURM")),
        # A batch script outside of srun has these, on one node only.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {}, None),
        (OPEN_MPI, {"coordinator": "a:1"}, Job("a:1", 2, 1, "Open MPI and flags")),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
            {},
            Job("10.96.0.1:64591", 2, 1, "Open MPI"),
        ),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fe80::b9b,2620::2]:43370"},
            {},
            Job("[fe80::b9b]:62596", 2, 1, "Open MPI"),
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-x-9@1"},
            {},
            Job("127.0.0.1:62226", 2, 1, "Open MPI", (0,)),
        ),
        (SLURM | OPEN_MPI, {"coordinator": "a:1"}, Job("a:1", 2, 1, "Open MPI and flags")),
        (
            {"JOB_COMPLETION_INDEX": "5"},
            {"coordinator": "train-0.pods:1234", "num_processes": 8},
            Job("train-0.pods:1234", 8, 5, "Kubernetes and flags"),
        ),
        ({"JOB_COMPLETION_INDEX": "5"}, {"num_processes": 1}, None),
    ],
)
def test_detect_finds_the_job(environ, given, expected):
    assert detect(environ, **given) == expected


@pytest.mark.parametrize(
    ("environ", "given", "parts"),
    [
        ({}, {"num_processes": 2}, ["--num_processes=2", "missing: --coordinator, --process_id", "No scheduler"]),
        ({}, {"coordinator": "a:1", "process_id": 0}, ["--coordinator=a:1", "--process_id=0", "missing: --num_proc"]),
        ({}, {"coordinator": "a", "num_processes": 2, "process_id": 0}, ["--coordinator=a:", "HOST:PORT"]),
        ({}, {"coordinator": "a:99999", "num_processes": 2, "process_id": 0}, ["--coordinator=a:99999", "HOST:PORT"]),
        ({}, {"coordinator": "a:1", "num_processes": 2, "process_id": 2}, ["--process_id=2", "--num_processes=2"]),
        ({}, {"num_processes": 1, "process_id": 1}, ["--process_id=1", "--num_processes=1"]),
        ({}, {"num_processes": 0}, ["--num_processes=0"]),
        (SLURM, {"num_processes": 8}, ["--num_processes=8", "SLURM_NTASKS=4", "contradict"]),
        (SLURM, {"process_id": 0}, ["--process_id=0", "SLURM_PROCID=3", "contradict"]),
        (SLURM | {"SLURM_PROCID": "4"}, {}, ["SLURM_PROCID=4", "SLURM_NTASKS=4", "0 to 3"]),
        (SLURM | {"SLURM_NTASKS": "4x"}, {}, ["SLURM_NTASKS='4x'", "not a number"]),
        (SLURM | {"JAX_NUM_PROCESSES": "2"}, {}, ["JAX_NUM_PROCESSES=2", "SLURM_NTASKS=4"]),
        ({"JAX_PROCESS_ID": "1"}, {"process_id": 0}, ["--process_id=0", "JAX_PROCESS_ID=1", "contradict"]),
        (OPEN_MPI, {}, ["OMPI_COMM_WORLD_SIZE=2", "missing: --coordinator", "HOST_OF_RANK_0"]),
        (
            {"JOB_COMPLETION_INDEX": "5"},
            {},
            ["JOB_COMPLETION_INDEX=5", "missing: --coordinator, --num_processes", "headless service"],
        ),
    ],
)
def test_detect_says_what_is_wrong(environ, given, parts):
    with pytest.raises(ValueError) as caught:
        detect(environ, **given)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-004,007]", "node001"),
        ("node[007,001-004],host2", "node007"),
        ("rack[2-3]-n[08-09].dc,x", "rack2-n08.dc"),
    ],
)
def test_first_node_reads_slurm_lists(nodes, first):
    assert first_node(nodes) == first


TPU = {"TPU_ML_PLATFORM": "JAX"}


@pytest.mark.parametrize(
    ("environ", "metadata", "expected"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}, False),  # no TPU here
        (TPU | {"TPU_WORKER_HOSTNAMES": "a,b"}, {}, True),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, {}, False),
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, {"worker-network-endpoints": "a,b"}, False),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, {}, True),
        (TPU | {"TPU_PROCESS_ADDRESSES": "local"}, {}, False),
        (TPU, {"worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2"}, True),
        (TPU, {"worker-network-endpoints": "a:0:10.0.0.1"}, False),
        (TPU, {"tpu-env": "A: '1'\nMEGASCALE_NUM_SLICES: '2'\n", "worker-network-endpoints": "a"}, True),
        (TPU, {}, False),
        (TPU | {"TPU_SKIP_MDS_QUERY": "1"}, {"worker-network-endpoints": "a,b"}, False),
    ],
)
def test_is_tpu_slice_only_with_several_hosts(monkeypatch, environ, metadata, expected):
    monkeypatch.setattr(environment, "_metadata", lambda _, key: metadata.get(key, ""))
    assert is_tpu_slice(environ) is expected


def test_is_tpu_slice_does_not_wait_for_a_server_that_is_not_there():
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        assert not is_tpu_slice(TPU | {"GCE_METADATA_IP": f"127.0.0.1:{bound.getsockname()[1]}"})


def test_ask_jax_finds_what_jax_finds(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_COORD", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="JAX knows no scheduler here"):
        ask_jax(1)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    job = ask_jax(1)
    assert (job.coordinator.split(":")[0], job.num_processes, job.process_id) == ("node003", 4, 3)
