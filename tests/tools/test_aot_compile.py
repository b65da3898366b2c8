"""Ahead-of-time compilation: what it counts, and what it says where it cannot."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tools import aot_compile

SPEC = f"{__name__}:matmul_kernel"


def matmul_kernel():
    """A block matmul of a known size, for the counts."""

    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32).astype(out.dtype)

    def fn(x, y):
        rows = pl.BlockSpec((256, 512), lambda i: (i, 0))
        whole = pl.BlockSpec((512, 512), lambda i: (0, 0))
        out = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
        return pl.pallas_call(
            kernel, grid=(4,), in_specs=[rows, whole], out_specs=rows, out_shape=out, name="block_matmul"
        )(x, y)

    return fn, (jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))


def gpu_kernel():
    """A block matmul in the form of Mosaic GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def kernel(x_gmem, y_gmem, out_gmem, x, y, out, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x, barrier)
        plgpu.copy_gmem_to_smem(y_gmem, y, barrier)
        plgpu.barrier_wait(barrier)

        def product(accumulator):
            plgpu.wgmma(accumulator, x, y)
            return accumulator[...]

        out[...] = pl.run_scoped(product, plgpu.ACC((64, 128), jnp.float32)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    def smem(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled)

    fn = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        scratch_types=[smem(64, 64), smem(64, 128), smem(64, 128), plgpu.Barrier(num_arrivals=2)],
    )
    return fn, (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16))


def scaled_copy():
    """A kernel whose argument is made by XLA first: 256 MiB, which fit into no vector memory."""

    def kernel(x, out):
        out[...] = x[...]

    block = pl.BlockSpec((256, 1024), lambda i: (i, 0))
    whole = jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    copy = pl.pallas_call(kernel, grid=(256,), in_specs=[block], out_specs=block, out_shape=whole)
    return (lambda x: copy(2 * x)), (whole,)


def wrong_block():
    """A kernel that no TPU takes: a block that does not divide into tiles."""

    def kernel(x, out):
        out[...] = x[...]

    block = pl.BlockSpec((12, 100), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct((24, 300), jnp.float32)
    return pl.pallas_call(kernel, grid=(2,), in_specs=[block], out_specs=block, out_shape=out), (out,)


def sized_add(rows):
    """A spec with a text argument."""
    return (lambda x: x + 1), (jax.ShapeDtypeStruct((int(rows), 128), jnp.float32),)


def available(*chips):
    return [
        pytest.param(
            chip,
            marks=pytest.mark.skipif(
                aot_compile.is_available(chip) is not None, reason=str(aot_compile.is_available(chip))
            ),
        )
        for chip in chips
    ]


TPUS = available("v5p", "v6e", "tpu7x")


@pytest.mark.parametrize("chip", TPUS)
def test_static_cost_counts_a_kernel(chip):
    cost = aot_compile.static_cost(chip, SPEC)
    (kernel,) = cost.kernels
    assert kernel.name.startswith("block_matmul") and cost.bundles == kernel.bundles
    # The smallest count seen is 284; a compiler that doubles or halves all of them has changed what is counted.
    assert 100 < kernel.bundles < 3000
    assert kernel.units["MXU"] > 0 and kernel.units["XLU"] == 0
    assert 0 < kernel.utilisation("MXU") <= 1
    # The second operand is one window of 512 KiB. The others may lie in vector memory already.
    assert 2**19 <= kernel.vmem_bytes < 16 * 2**20
    assert cost.argument_bytes == 2 * (1024 + 512) * 512 and cost.output_bytes == 2 * 1024 * 512
    assert cost.temp_bytes == 0
    assert kernel.name in aot_compile.describe(cost)


@pytest.mark.parametrize("chip", TPUS[1:2])
def test_static_cost_shows_temporary_memory_and_passes_text(chip):
    cost = aot_compile.static_cost(chip, f"{__name__}:scaled_copy")
    assert len(cost.programs) > len(cost.kernels) == 1
    assert cost.temp_bytes == 2**28
    assert aot_compile.static_cost(chip, f"{__name__}:sized_add:40").argument_bytes == 40 * 128 * 4


@pytest.mark.parametrize("chip", TPUS[1:2])
def test_static_cost_says_why_a_kernel_does_not_compile(chip):
    with pytest.raises(RuntimeError, match=r"wrong_block does not compile for v6e(?s:.)*divisible by 8"):
        aot_compile.static_cost(chip, f"{__name__}:wrong_block")


@pytest.mark.parametrize("chip", TPUS)
def test_compile_for_takes_trees_and_jitted_functions(chip):
    add = jax.jit(lambda pair: jax.tree.map(lambda x: x + 1, pair), donate_argnums=0)
    pair = {"a": jax.ShapeDtypeStruct((8, 128), jnp.float32), "b": jnp.zeros((16, 128))}
    compiled = aot_compile.compile_for(chip, add, pair)
    assert compiled.memory_analysis().alias_size_in_bytes == 24 * 128 * 4


def triton_kernel():
    """A block matmul in the form of Triton, between two programs of XLA."""
    from jax.experimental.pallas import triton

    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32).astype(out.dtype)

    out = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    multiply = pl.pallas_call(
        kernel,
        grid=(4, 4),
        in_specs=[pl.BlockSpec((64, 256), lambda i, j: (i, 0)), pl.BlockSpec((256, 64), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((64, 64), lambda i, j: (i, j)),
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="triton_matmul",
    )
    return (lambda x, y: jnp.sin(multiply(2 * x, y))), (out, out)


@pytest.mark.parametrize("chip", available("h200"))
def test_static_cost_tells_a_triton_kernel_from_programs_of_xla(chip):
    cost = aot_compile.static_cost(chip, f"{__name__}:triton_kernel")
    (kernel,) = cost.kernels
    assert kernel.name == "triton_matmul" and len(cost.programs) > 1
    # Two operand blocks of 32 KiB.
    assert kernel.shared_bytes >= 2**16
    assert "triton_matmul" in aot_compile.describe(cost)


@pytest.mark.parametrize("chip", available("h200"))
def test_static_cost_reads_the_report_of_a_gpu_kernel(chip):
    cost = aot_compile.static_cost(chip, f"{__name__}:gpu_kernel")
    (kernel,) = cost.kernels
    assert 0 < kernel.registers <= 255 and kernel.spill_bytes == 0
    # Three tiles of 8, 16 and 16 KiB and a barrier.
    assert 40 * 1024 <= kernel.shared_bytes < 42 * 1024


def test_an_unknown_chip_lists_the_known_ones():
    assert "v5p, v6e, tpu7x, h200" in aot_compile.is_available("v4")
    with pytest.raises(ValueError, match="choose one of"):
        aot_compile.compile_for("v4", jnp.sin, jnp.zeros(8))


@pytest.mark.parametrize("chip, extra", [("v6e", "jax[tpu]"), ("h200", "jax[cuda13]")])
def test_a_missing_compiler_says_what_to_install(chip, extra, monkeypatch):
    monkeypatch.setattr(aot_compile.importlib.util, "find_spec", lambda name: None)
    assert f"pip install '{extra}=={jax.__version__}'" in aot_compile.is_available(chip)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        aot_compile.static_cost(chip, SPEC)
