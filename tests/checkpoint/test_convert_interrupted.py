"""A converter that is killed, again and again: no half of a checkpoint is taken for one, and the end is the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.files import read_checked_json
from maxmoe.checkpoint.sources import INDEX_NAME, OrbaxSource

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20

# Starting Python takes longer than converting, so one process forks the converters that it kills. Nothing has
# started a thread of JAX's before the fork: only shapes were traced.
PROGRAM = """
import json, os, random, signal, sys, time
import maxmoe as mm
from etils import epath
from maxmoe.checkpoint.stored_arrays import is_complete
from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.hf_names import published_pieces
from maxmoe.checkpoint.safetensors_io import CheckpointError
from maxmoe.checkpoint.sources import group_folder, is_orbax

source, folder, kills, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
list(published_pieces(mm.Transformer(mm.load_config(source))))
moments, rounds, progress, finished = random.Random(0), 0, [], 0
target = os.path.join(folder, "0")
for kill in range(kills):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        convert(source, target)
        os._exit(0)
    time.sleep(moments.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        complete = os.path.exists(target) and is_orbax(target)
    except CheckpointError:
        complete = False
    done = sum(is_complete(group_folder(target, name)) for name in [f"layer_{i:03d}" for i in range(9)] + ["top"])
    assert done == 10 or not complete
    progress.append(done)
    if complete:
        finished += 1
        target = os.path.join(folder, str(finished))
print(json.dumps({"targets": finished + 1, "progress": progress}))
"""


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path):
    source = ROOT / "tests/golden/tiny_k3"
    convert(source, tmp_path / "whole")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(source), str(tmp_path), str(KILLS), "1.5"],
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert any(0 < count < 10 for count in facts["progress"]), "no kill fell into the writing"
    expected = _content(tmp_path / "whole")
    for number in range(facts["targets"]):
        said = []
        convert(source, tmp_path / str(number), verify=True, say=said.append)
        assert _content(tmp_path / str(number)) == expected
        names = {path.name for path in (tmp_path / str(number)).iterdir()}
        assert names == {"config.json", "weights", INDEX_NAME}
        groups = {path.name for path in (tmp_path / str(number) / "weights").iterdir()}
        assert len(groups) == 20  # ten groups, ten manifests, nothing left over


def _content(folder):
    """Every array's dtype, shape, chunks and the checksums of its bytes, and what else the index keeps.

    Orbax gives its files random names, so that folders of the same content never have the same files.
    """
    source = OrbaxSource(folder)
    arrays = {group: (stored.meta, stored.arrays) for group, stored in source.groups.items()}
    return arrays, read_checked_json(source.folder / INDEX_NAME)["published"]
