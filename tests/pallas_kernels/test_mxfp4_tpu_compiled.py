"""MXFP4 kernels compiled for TPUs that this machine does not have: limits of cost, and no copy of a weight."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.moe_experts_tpu import Mxfp4Experts, moe_experts_tpu
from pallas_kernels.mxfp4_matmul_tpu import mxfp4_matmul_tpu
from tools.aot_compile import TOPOLOGIES, compile_for, is_available, static_cost

HERE = "tests.pallas_kernels.test_mxfp4_tpu_compiled"
DIM, HIDDEN, LAYERS = 3584, 3072, 2
CHIPS = [
    pytest.param(chip, marks=pytest.mark.skipif(bool(is_available(chip)), reason=str(is_available(chip))))
    for chip in TOPOLOGIES
]
# Bundles of one program on a block of 256 x 512 x 512, scales included, against those of the bfloat16 kernel.
LARGEST_RATIO = {"v5p": 1.25, "v6e": 1.6, "tpu7x": 1.4}
_array = jax.ShapeDtypeStruct


def bfloat16_matmul():
    """What the cost is compared with: blocks of the same size, weights [in, out]."""

    def kernel(x, weight, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x[...], weight[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    def run(x, weight):
        return pl.pallas_call(
            kernel,
            grid=(1, HIDDEN // 512, DIM // 512),
            in_specs=[
                pl.BlockSpec((256, 512), lambda i, j, k: (i, k)),
                pl.BlockSpec((512, 512), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((256, 512), lambda i, j, k: (i, j)),
            out_shape=_array((256, HIDDEN), jnp.bfloat16),
            scratch_shapes=[pltpu.VMEM((256, 512), jnp.float32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        )(x, weight)

    return run, (_array((256, DIM), jnp.bfloat16), _array((DIM, HIDDEN), jnp.bfloat16))


def matmul(num_rows="256"):
    """One weight of an expert."""
    x = _array((int(num_rows), DIM), jnp.bfloat16)
    return mxfp4_matmul_tpu, (x, _array((HIDDEN, DIM // 2), jnp.uint8), _array((HIDDEN, DIM // 32), jnp.uint8))


def matmul_gradient(num_rows="256"):
    """The product with the transpose."""

    def run(x, packed, scale, dout):
        return jax.vjp(lambda x: mxfp4_matmul_tpu(x, packed, scale), x)[1](dout)[0]

    return run, (*matmul(num_rows)[1], _array((int(num_rows), HIDDEN), jnp.bfloat16))


def experts(numbers):
    """Rows and experts of one device, as text."""
    rows, num_experts = map(int, numbers.split(","))

    def weight(num_outputs, num_columns):
        lead = (LAYERS, num_experts, num_outputs)
        return _array((*lead, num_columns // 2), jnp.uint8), _array((*lead, num_columns // 32), jnp.uint8)

    stack = Mxfp4Experts(*weight(HIDDEN, DIM), *weight(HIDDEN, DIM), *weight(DIM, HIDDEN))
    run = functools.partial(moe_experts_tpu, gate_beta=4.0, linear_beta=25.0)
    return run, (_array((rows, DIM), jnp.bfloat16), _array((num_experts,), jnp.int32), stack, _array((), jnp.int32))


def experts_gradient(numbers):
    """dx of `experts`; rows stand for their own gradient."""
    run, args = experts(numbers)
    return lambda x, *rest: jax.vjp(lambda x: run(x, *rest), x)[1](x)[0], args


def _cost(chip, spec):
    """The cost, and that of its one kernel; of two where what two cores computed is added up."""
    cost = static_cost(chip, f"{HERE}:{spec}")
    kernel, *sums = sorted(cost.kernels, key=lambda kernel: "sum_of_cores" in kernel.name)
    assert not sums or (chip == "v5p" and sums[0].spills == 0 and len(sums) == 1)
    return cost, kernel


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_mxfp4_matmul_tpu_costs_little_more_than_bfloat16(chip):
    _, plain = _cost(chip, "bfloat16_matmul")
    _, kernel = _cost(chip, "matmul")
    ratio = kernel.bundles / plain.bundles
    assert ratio <= LARGEST_RATIO[chip], f"{kernel.bundles} bundles are {ratio:.3f} of {plain.bundles}"
    assert kernel.spills == 0
    assert kernel.vmem_bytes < 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("spec", ["matmul:16", "matmul_gradient", "matmul_gradient:16"])
def test_mxfp4_matmul_tpu_spills_nothing(chip, spec):
    _, kernel = _cost(chip, spec)
    assert kernel.spills == 0
    assert kernel.vmem_bytes < 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("numbers", ["16,7", "64,56", "2048,7"])
@pytest.mark.parametrize("spec", ["experts", "experts_gradient"])
def test_moe_experts_tpu_spills_nothing_and_reads_its_weights_in_place(chip, numbers, spec):
    cost, kernel = _cost(chip, f"{spec}:{numbers}")
    rows, num_experts = map(int, numbers.split(","))
    one_scale = LAYERS * num_experts * HIDDEN * DIM // 32
    # On two cores each gives float32 sums, [2, rows, D]; besides that, plans of visits and padding. A copy of the
    # smallest of the stacked arrays would be more.
    sums = 2 * max(rows, 64) * DIM * 4 if chip == "v5p" else 0
    assert cost.temp_bytes - sums < min(one_scale, 2**20)
    assert kernel.spills == 0
    assert kernel.vmem_bytes < 48 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("rows, num_experts", [(4, 7), (2048, 7)])
def test_moe_experts_tpu_tells_the_compiler_what_it_reads(chip, rows, num_experts):
    fn, args = experts(f"{rows},{num_experts}")
    told = compile_for(chip, fn, *args).cost_analysis()["bytes accessed"]
    of_one = 3 * HIDDEN * DIM * (1 / 2 + 1 / 32)
    # Of 2 layers one is read, and of the experts those that rows find if each takes any, as plans count them; rows go
    # in and out, on two cores in float32.
    chosen = num_experts * (1 - (1 - 1 / num_experts) ** rows)
    expected = chosen * of_one + rows * DIM * 2 * 2
    # Besides, what XLA does to the rows and to plan the visits. All weights of both layers would be 246 MB.
    assert expected <= told <= 1.4 * expected + 5 * rows * DIM * 4
