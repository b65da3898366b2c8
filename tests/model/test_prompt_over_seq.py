"""A prompt split along `seq` over eight devices equals the prompt on one, and each device holds less.

The run of 65,536 tokens takes minutes: `python tests/model/prompt_over_seq.py 65536`.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 8192


@pytest.mark.slow
@pytest.mark.multidevice
def test_a_long_prompt_over_eight_devices():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/model/prompt_over_seq.py"), str(NUM_TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["tokens"] == NUM_TOKENS and facts["largest_logit"] > 0.1
    # Float32 sums in another order; and where two scores differ by less than that, at the edge of what is selected, a
    # query sees another token. That shows in its rows above, by a hundredth of their size, and in some tokens after it.
    assert facts["logits_differ_by"] < 1e-3 * facts["largest_logit"]
    assert facts["tokens_with_other_rows"] <= NUM_TOKENS // 100
    held = [facts["bytes_per_device"][count] for count in ("1", "2", "4", "8")]
    assert all(more > less for more, less in itertools.pairwise(held)), held
