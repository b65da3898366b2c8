"""Expert parallelism on eight CPU devices equals one device, and its plan moves every row once, there and back."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops import exchange_rounds
from maxmoe.ops.expert_exchange import choose_form, exchanged, gathered
from tests.ops.eight_devices import run_on_eight_devices
from tests.ops.expert_exchange_cases import CASES, FORMS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("expert_exchange_cases.py")


def _run(*arguments, **environment):
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": "", **environment}
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def facts():
    """What the program found, all cases in one process."""
    found = json.loads(run_on_eight_devices(PROGRAM).splitlines()[-1])
    assert found["devices"] == 8
    return found


@pytest.mark.multidevice
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_form_equals_one_device(facts, name, form):
    case, found = CASES[name], facts["differences"][name][form]
    if case.dtype == "bfloat16":
        # A rounding of 2^-9, and of the largest value at most; the gathered form skips one per expert, which weighs
        # in output and gradients, and the gradient to x sums rows in another order.
        assert max(found.values()) < 2**-7
    else:
        # float32 sums of under a hundred terms in another order: a few roundings of 2^-24.
        assert max(found.values()) < 1e-6
    if form != "gathered" and (not case.hidden_axes or case.dtype == "bfloat16"):
        # The join at home is that of one device. Only the sum over a split hidden width runs in another order, and
        # float32 roundings of it are too small to show in bfloat16.
        assert found["out"] == 0


@pytest.mark.multidevice
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_gathered_marks_a_token_beyond_the_worst_case_that_others_have_room_for(facts, form):
    assert facts["overflow"][form] == [False, form == "gathered", False, False]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'jax[tpu]'"
)
def test_exchanged_compiled_for_tpu():
    found = _run("tpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_ID="0", HOME="/nonexistent")
    # Counts, the way there, the way back. A gradient's rounds are sent rows and gradients, and send gradients home.
    assert found["forward"]["collectives"] == {"all-to-all": 1, "ragged-all-to-all": 2, "all-reduce": 1}
    assert found["gradient"]["collectives"] == {"all-to-all": 1, "ragged-all-to-all": 5, "all-reduce": 1}
    # Rows of its own, twice as many received, the outputs of both, and what the loop over rounds copies of them.
    assert found["forward"]["temp_bytes"] < 9 * found["row_bytes"]


@pytest.mark.parametrize(
    ("num_devices", "experts_here", "num_tokens", "top_k"), [(4, 3, 5, 4), (3, 1, 2, 3), (2, 4, 7, 1), (1, 3, 3, 2)]
)
def test_plan_moves_every_row_there_and_back(num_devices, experts_here, num_tokens, top_k):
    num_experts, rng = num_devices * experts_here, np.random.default_rng(0)
    shape = (num_devices, num_tokens, top_k)
    for routed in (0.0, 0.1, 0.5, 0.9, 0.9, 1.0, 1.0):
        ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_devices * num_tokens)]).reshape(shape)
        beyond = rng.choice([-1, num_experts, 2**31 - 1], shape)
        ids = np.where(rng.random(shape) < routed, ids, beyond).astype(np.int32)
        _assert_every_row_there_and_back(ids, num_devices, experts_here)
    # All to one device, and of it to as few experts as distinct ids allow.
    ids = np.broadcast_to(np.where(np.arange(top_k) < experts_here, np.arange(top_k), -1), shape).astype(np.int32)
    _assert_every_row_there_and_back(ids, num_devices, experts_here)


def _assert_every_row_there_and_back(ids, num_devices, experts_here):
    num_experts, (num_tokens, top_k) = num_devices * experts_here, ids.shape[1:]
    plans = [exchange_rounds.sort_by_expert(jnp.asarray(own), num_experts, num_devices) for own in ids]
    counts = np.stack([plan.counts for plan in plans])
    starts = np.stack([plan.starts for plan in plans])
    sizes, tags = counts.sum(axis=2), np.arange(ids.size).reshape(num_devices, -1)
    sent = [tags[d][plan.order] for d, plan in enumerate(plans)]  # each row says which assignment it is
    home = [np.full(num_tokens * top_k, -1) for _ in plans]
    pieces = [
        exchange_rounds.Pieces(starts[d], sizes[d], np.cumsum(counts[:, d], axis=1), starts[:, d], d, None)
        for d in range(num_devices)
    ]
    window = max(1, sizes.max() // 2)
    for step in range(-(-sizes.max() // window)):
        ways = [exchange_rounds.window_of(own, step, window) for own in pieces]
        there = _exchange_slices(sent, [way[0] for way in ways], [np.full(num_devices * window, -1)] * num_devices)
        for d in range(num_devices):
            local = np.asarray(exchange_rounds.ids_of_window(pieces[d], step, window)).reshape(-1)
            for tag, expert in zip(there[d], local, strict=True):
                assert expert == (experts_here if tag < 0 else ids.reshape(-1)[tag] - d * experts_here)
        home = _exchange_slices(there, [way[1] for way in ways], home)

    named = (ids >= 0) & (ids < num_experts)
    for d in range(num_devices):
        np.testing.assert_array_equal(plans[d].named, named[d])
        came = home[d][np.asarray(plans[d].row)]
        np.testing.assert_array_equal(came[named[d]], tags[d].reshape(num_tokens, top_k)[named[d]])
        assert (home[d] >= 0).sum() == named[d].sum()


def _exchange_slices(rows, slices, into):
    """`ragged_all_to_all` of one number a row, refusing what its documentation forbids; -1 where nothing came yet."""
    results = [buffer.copy() for buffer in into]
    for source, (sent, way) in enumerate(zip(rows, slices, strict=True)):
        for target, result in enumerate(results):
            start, size, place = (int(a[target]) for a in (way.home_offsets, way.send_sizes, way.slot_offsets))
            assert size == int(slices[target].recv_sizes[source])
            assert start >= 0 and start + size <= len(sent)
            assert place >= 0 and place + size <= len(result)
            assert (result[place : place + size] == -1).all(), "two slices overlap"
            result[place : place + size] = sent[start : start + size]
    return results


@pytest.mark.parametrize(
    ("num_tokens", "num_devices", "form"),
    [
        (2**20, 1, "gathered"),
        (2**20, 8, "gathered"),  # 16 rows of 2 x 2 bytes over 8 devices are more than one row of 2 + 4
        (1024, 32, "gathered"),  # 21 MB against 7 and 18 for the messages
        (2048, 32, "exchanged"),  # 43 MB against 14 and 18
        (1024, 128, "gathered"),  # 22 MB against 2 and 76
        (8192, 128, "exchanged"),  # 175 MB against 15 and 76
    ],
)
def test_choose_form_takes_the_cheaper(num_tokens, num_devices, form):
    assert choose_form(num_tokens, 16, 3584, 2, num_devices) == form


def test_choose_form_without_cost_of_messages_goes_by_rows():
    # 2 k/P itemsize = itemsize + 4 at P = 10 2/3 for k = 16 in bfloat16.
    assert choose_form(1, 16, 3584, 2, 10, message_bytes=0) == "gathered"
    assert choose_form(1, 16, 3584, 2, 11, message_bytes=0) == "exchanged"


@pytest.mark.parametrize("form", [gathered, lambda *a, **axes: exchanged(*a, ragged=False, **axes)])
@pytest.mark.parametrize(
    ("num_experts", "ids", "axes", "message"),
    [
        (8, (3, 5, 2), {"expert_axes": ("expert",)}, "8 experts do not divide over 3 .* devices that do: 1, 2, 4, 8"),
        (6, (3, 4, 2), {"expert_axes": ("expert",)}, r"x \(5, 4\), ids \(4, 2\) and weights \(4, 2\) do not fit"),
        (
            6,
            (3, 5, 2),
            {"expert_axes": ("expert",), "hidden_axes": ("expert",)},
            r"\['expert'\] are in expert_axes and",
        ),
    ],
)
def test_form_refuses_what_does_not_fit(form, num_experts, ids, axes, message):
    def run(x, ids, weights):
        return form(x, ids, weights, lambda x, ids: None, num_experts, **axes)

    with pytest.raises(ValueError, match=message):
        jax.vmap(run, axis_name="expert")(jnp.zeros((3, 5, 4)), jnp.zeros(ids, jnp.int32), jnp.zeros(ids))


def test_window_rows_hold_twice_the_mean_and_no_more_than_there_can_be():
    assert exchange_rounds.window_rows(2048, 16, 896, 128) == 2 * 256 + 16
    assert exchange_rounds.window_rows(3, 3, 16, 8) == 3 * 2  # three tokens, two experts a device
