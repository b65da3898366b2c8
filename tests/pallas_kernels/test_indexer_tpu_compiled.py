"""The indexer's kernels compiled for TPUs that this machine does not have: no spills, no matrix of scores."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.indexer_topk_tpu import indexer_topk_tpu
from tools.aot_compile import TOPOLOGIES, compile_for, is_available, static_cost

HERE = "tests.pallas_kernels.test_indexer_tpu_compiled"
CHIPS = [
    pytest.param(chip, marks=pytest.mark.skipif(bool(is_available(chip)), reason=str(is_available(chip))))
    for chip in TOPOLOGIES
]
TOP_K, WIDTH = 2048, 128
VMEM_BYTES = 16 * 2**20  # what the compiler grants a kernel that asks for nothing


def choice(shape):
    """The whole choice; shape is "queries,heads,keys,dtype"."""
    num_queries, heads, num_keys, dtype = shape.split(",")
    num_queries, heads, num_keys, dtype = int(num_queries), int(heads), int(num_keys), jnp.dtype(dtype)
    array = jax.ShapeDtypeStruct
    return functools.partial(indexer_topk_tpu, top_k=TOP_K), (
        array((1, num_queries, heads, WIDTH), dtype),
        array((2, 1, WIDTH, num_keys), dtype),
        array((), jnp.int32),
        array((1, num_queries, heads), jnp.float32),
        array((1, num_queries), jnp.int32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", ["512,64,131072,bfloat16", "512,64,1048576,bfloat16", "1,64,1048576,bfloat16"])
def test_indexer_topk_holds_no_matrix_of_scores(chip, shape):
    cost = static_cost(chip, f"{HERE}:choice:{shape}")
    assert len(cost.kernels) == 2  # of the candidates, and of the scores of a query that is done again
    for kernel in cost.kernels:
        assert kernel.spills == 0, kernel
        assert kernel.vmem_bytes < VMEM_BYTES, kernel
    # The candidates of one chunk of queries and their sort, whatever the number of keys.
    assert cost.temp_bytes < 80 * 2**20, f"{cost.temp_bytes / 2**20:.1f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("num_queries, num_keys", [(1, 65536), (1, 1048576), (3, 65536)])
def test_indexer_topk_cuts_no_layer_out_of_the_keys(chip, num_queries, num_keys):
    array, batch, heads = jax.ShapeDtypeStruct, 2, 32
    compiled = compile_for(
        chip,
        functools.partial(indexer_topk_tpu, top_k=TOP_K),
        array((batch, num_queries, heads, WIDTH), jnp.bfloat16),
        array((6, batch, WIDTH, num_keys), jnp.bfloat16),
        array((), jnp.int32),
        array((batch, num_queries, heads), jnp.float32),
        array((batch, num_queries), jnp.int32),
    )
    # The candidates, 13 x 1024 scores and slots a query, and their sort; the keys of a layer are 32 MiB or more.
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp < 2**20 * num_queries, f"{temp / 2**20:.1f} MiB"
    # The keys once per query, and the scores of a query that is done again for one tile of 8192.
    keys_bytes = 2 * batch * WIDTH * num_keys * num_queries
    accessed = compiled.cost_analysis()["bytes accessed"]
    assert keys_bytes <= accessed < keys_bytes + 6 * 2**20 * num_queries, f"{accessed} of {keys_bytes}"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "shape", ["9,32,131072,float32", "2,32,131072,float32", "64,32,300,bfloat16", "1,32,300,bfloat16"]
)
def test_indexer_topk_compiles_for_other_shapes(chip, shape):
    compile_for(chip, *_flat(choice(shape)))


def _flat(spec):
    fn, args = spec
    return fn, *args
