"""Speed and memory of converting and loading a checkpoint, beside what the same disk gives to plain reads.

    python tools/bench_checkpoint.py --work /scratch/folder
    python tools/bench_checkpoint.py --work /scratch/folder --experts 128 --layers 6

Makes a checkpoint in the published layout with the widths of K3, fewer experts and layers, and random bytes, which
nothing compresses; converts it; loads it from both forms, in turns with two plain ways to read the same files: into
one small buffer, as `dd` into /dev/null, and into memory that is kept, as `cp` into /dev/shm. Rounds and medians,
because the disks of virtual machines vary by a factor within minutes.

Every step runs in a process of its own, with the files dropped from the page cache before it. Before the clock
starts, the process imports what it needs, and touches and frees as much memory as the checkpoint has: a virtual
machine gets its memory from the host at the first touch, slower than from the disk. The shapes of the model's
weights are traced before the clock starts, too, and that time is shown apart: it is the same for any number of bytes.
Peak memory is the largest resident set of the process, from the start of the step on. /dev/shm needs room for the
checkpoint, the folder for twice as much; the folder is left in place for a second run; remove it yourself.
"""

import atexit
import dataclasses
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags, logging

ROOT = Path(__file__).resolve().parent.parent

_WORK = flags.DEFINE_string("work", None, "Folder for the checkpoints, on the disk to measure.", required=True)
_EXPERTS = flags.DEFINE_integer("experts", 64, "Routed experts per layer.", lower_bound=16)
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers; the first is dense, the last has full attention.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often everything is read.", lower_bound=1)
_STEP = flags.DEFINE_string("step", None, "Runs one step in this process; used by the tool itself.")


def main(argv):
    """Runs all steps, or the one that --step names."""
    del argv
    logging.set_verbosity(logging.WARNING)
    work = Path(_WORK.value)
    if _STEP.value:
        _get_ready(work)
        began = time.perf_counter()
        facts = STEPS[_STEP.value](work)
        print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": _peak_bytes()} | facts))
        return
    make_checkpoint(work / "published")
    size = _size(work / "published")
    print(f"published folder: {size / 2**30:.2f} GiB in {len(list((work / 'published').glob('*.safetensors')))} files")
    _report("convert", _run("convert"), size)
    rates = {step: [] for step in READS}
    for _ in range(_ROUNDS.value):
        for step in READS:
            facts = _run(step)
            _report(step, facts, size)
            rates[step].append(size / facts["seconds"] / 1e9)
    medians = {step: statistics.median(found) for step, found in rates.items()}
    for step, found in rates.items():
        spread = f"{min(found):.2f} to {max(found):.2f}"
        shares = ", ".join(f"{medians[step] / medians[plain]:.0%} of {plain}" for plain in ("dd", "cp to memory"))
        print(f"{step:22s} median {medians[step]:.2f} GB/s ({spread}), {shares}")


def _report(step, facts, size):
    extra = "".join(f", {key} {value}" for key, value in facts.items() if key not in ("seconds", "peak_bytes"))
    rate, peak = size / facts["seconds"] / 1e9, facts["peak_bytes"] / 2**30
    print(f"{step:22s} {facts['seconds']:7.1f} s, {rate:.2f} GB/s, peak memory {peak:.2f} GiB{extra}", flush=True)


def _run(step):
    _drop_from_cache(Path(_WORK.value))
    command = [sys.executable, __file__, f"--work={_WORK.value}", f"--step={step}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def make_checkpoint(folder):
    """Writes the published layout with random bytes, unless it is there already."""
    import numpy as np

    from maxmoe.checkpoint.hf_names import PREFIX, published_pieces
    from maxmoe.checkpoint.safetensors_header import numpy_dtype
    from maxmoe.checkpoint.safetensors_writer import TensorOnDemand, write_checkpoint
    from maxmoe.config import load_config
    from maxmoe.model.transformer import Transformer
    from maxmoe.published_config import to_published

    if (folder / "config.json").exists():
        return
    full = load_config(ROOT / "configs/k3.py")
    config = dataclasses.replace(
        full,
        num_layers=_LAYERS.value,
        full_attention_layers=(_LAYERS.value - 1,),
        vocab_size=16_384,
        bos_id=1,
        eos_id=2,
        pad_id=0,
        moe=dataclasses.replace(full.moe, num_experts=_EXPERTS.value),
        vision=None,
    )
    rng = np.random.default_rng(0)

    def values(piece, dtype):
        if piece.is_scale:
            return rng.integers(110, 140, piece.shape, np.uint8)
        if piece.padded:
            return np.zeros(piece.shape, dtype)
        count = int(np.prod(piece.shape)) * dtype.itemsize
        return np.frombuffer(rng.bytes(count), dtype).reshape(piece.shape)

    tensors = {}
    for piece in published_pieces(Transformer(config)):
        dtype = numpy_dtype(piece.dtypes[0])
        tensors[PREFIX + piece.name] = TensorOnDemand(piece.shape, dtype, lambda p=piece, d=dtype: values(p, d))
    write_checkpoint(folder, tensors, max_shard_bytes=2 * 10**9)
    (folder / "config.json").write_text(json.dumps(to_published(config), indent=2))


def read_to_nowhere(work):
    """`dd bs=8M of=/dev/null` of every file."""
    for path in sorted((work / "published").glob("*.safetensors")):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M", "status=none"], check=True)
    return {}


def copy_to_memory(work):
    """`cp` into the file system that lies in memory; what was copied is removed after the clock has stopped."""
    target = tempfile.mkdtemp(prefix="bench_checkpoint_", dir="/dev/shm")
    atexit.register(shutil.rmtree, target)
    subprocess.run(["cp", "-r", work / "published", target], check=True)
    return {}


def convert(work):
    """Converts into a fresh target."""
    from maxmoe.checkpoint import convert, sources

    target = work / "orbax"
    shutil.rmtree(target, ignore_errors=True)
    convert.return_freed_memory()  # as the command does
    convert.convert(work / "published", target)
    source = sources.OrbaxSource(target, "off")
    group = max(sum(i.num_bytes for i in s.arrays.values()) for s in source.groups.values())
    return {"largest group GiB": round(group / 2**30, 2)}


def _load(folder, **options):
    import jax

    from maxmoe import Transformer, load_config, load_params
    from maxmoe.params import abstract_params

    model = Transformer(load_config(folder))
    began = time.perf_counter()
    abstract_params(model)
    traced = time.perf_counter()
    params = load_params(folder, model, **options)
    seconds = time.perf_counter() - traced
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"seconds": seconds, "loaded GiB": round(size / 2**30, 2), "traced before s": round(traced - began, 2)}


READS = {
    "dd": read_to_nowhere,
    "load safetensors": lambda work: _load(work / "published"),
    "cp to memory": copy_to_memory,
    "load orbax, verified": lambda work: _load(work / "orbax"),
    "load orbax, unverified": lambda work: _load(work / "orbax", verify="off"),
}
STEPS = {"convert": convert} | READS


def _get_ready(work):
    """Imports, memory from the host, and a fresh count of the largest resident set."""
    import numpy as np

    for name in ("convert", "store"):
        importlib.import_module(f"maxmoe.checkpoint.{name}")
    memory = np.empty(_size(work / "published") + 2**30, np.uint8)
    memory[::4096] = 1
    del memory
    Path("/proc/self/clear_refs").write_text("5")


def _size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _peak_bytes():
    """The largest resident set of this process; getrusage would count that of its parent."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _drop_from_cache(folder):
    """Asks the system to forget files, so that the next read comes from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    app.run(main)
