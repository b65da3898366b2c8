"""What the compiler says: messages about memory, and costs that cannot be."""

import jax
import pytest

from maxmoe.planning import measure

OOM = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (120.50G) exceeds available HBM (31.24G). HLO module: jit_f.\nSee the documentation."
)


def test_refused_bytes_reads_both_forms_of_the_message():
    assert measure.refused_bytes(OOM) == int(120.5 * 2**30)
    older = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.00M of 95.74G hbm."
    assert measure.refused_bytes(older) == 2**29


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 105.16M of 63.94M vmem.",
        "INVALID_ARGUMENT: the sizes (120.50G) exceeds available HBM (31.24G)",
        "RESOURCE_EXHAUSTED: HBM is gone",
    ],
)
def test_refused_bytes_is_none_for_other_messages(message):
    assert measure.refused_bytes(message) is None


def test_measure_answers_a_program_too_large_and_raises_the_rest():
    def too_large():
        raise jax.errors.JaxRuntimeError(OOM)

    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed")

    found = measure.measure(too_large, 4)
    assert found.memory is None and found.refused_bytes == int(120.5 * 2**30)
    assert found.refusal == OOM.splitlines()[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic failed"):
        measure.measure(broken, 4)


def test_sane_costs_drops_what_cannot_be():
    costs = {"flops": 3.0, "optimal_seconds": -6.1, "bytes accessed": 9.2e18, "transcendentals": float("nan")}
    assert measure.sane_costs(costs) == {"flops": 3.0}
    assert measure.sane_costs([costs]) == {"flops": 3.0}
    assert measure.sane_costs(None) == {} and measure.sane_costs([]) == {}
