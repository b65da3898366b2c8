"""One process of a job, for tests that start several.

distributed_job.py ACTION [KEY=VALUE...]

Which process of which job it is comes from the environment, as from a scheduler.
"""

import os
import signal
import socket
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmoe import distributed
from maxmoe.distributed import peers

DEVICES_PER_PROCESS = 2
GRACE_S = 1.0
HEARTBEAT_TIMEOUT_S = 4
LOOP_S = 100  # longer than any test waits


def free_port(first: int = 0, last: int = 0) -> int:
    """A port of a range that nobody listens on; by default any."""
    for port in range(first, last + 1):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return free.getsockname()[1]
    raise AssertionError("no port is free")


def summing():
    """A step that sums one number of each device, from 1 up, over all of them."""
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    numbers = np.arange(1, count + 1, dtype=np.int32)
    placed = jax.make_array_from_callback((count,), NamedSharding(mesh, P("x")), lambda index: numbers[index])
    step = jax.jit(total)
    return lambda: int(step(placed).addressable_data(0)[0])


def loop(step, settings: dict[str, str]) -> None:
    """Sums again and again; with a setting, only until what it says happens."""
    end = time.monotonic() + LOOP_S
    while time.monotonic() < end:
        step()
        if "error" in settings:
            raise RuntimeError(settings["error"])
        if "caught" in settings:
            distributed.fail(settings["caught"])
            sys.exit(2)
        if "signal" in settings:
            os.kill(os.getpid(), signal.Signals[settings["signal"]])


def main(argv: list[str]) -> None:
    """Starts, sums, agrees; `loop` sums until something ends it."""
    action, *rest = argv
    settings = dict(pair.split("=", 1) for pair in rest)
    peers.GRACE_S = GRACE_S
    distributed._HEARTBEAT_TIMEOUT_S = HEARTBEAT_TIMEOUT_S
    jax.config.update("jax_num_cpu_devices", DEVICES_PER_PROCESS)
    job = distributed.start(timeout_s=60)
    assert distributed.start() is job
    agree_s = float(settings.get("agree_s", 60))
    distributed.agree("config", settings.get("config", "layers=4"), timeout_s=agree_s)
    step = summing()
    print("sum", step(), flush=True)
    if action == "loop":
        loop(step, settings)
    if "hang" in settings:
        time.sleep(LOOP_S)
    distributed.agree("weights", b"\x01\x02", timeout_s=agree_s)
    print(distributed.describe(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
