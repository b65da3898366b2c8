"""Bytes to and from HBM, of a program written out here and of one compiled for TPU."""

import os

import jax
import jax.numpy as jnp
import pytest

from maxmoe.ops.linear import linear
from maxmoe.planning import hlo, targets
from maxmoe.planning.chips import parse_topology
from maxmoe.planning.step import Step, compile_on
from maxmoe.planning.traffic import Move, moves, silent_kernels
from maxmoe.sharding import make_mesh

HBM, VMEM = "{1,0:T(8,128)}", "{1,0:T(8,128)S(1)}"

# A loop of 3 rounds: a product with a layer sliced out of a stack, which a fusion in the fusion shows in other tiles,
# and a row written into a cache in place.
PROGRAM = f"""\
HloModule jit_f

%tiles (stack: f32[3,128,128]) -> f32[3,128,128] {{
  %stack = f32[3,128,128]{{2,1,0:T(16,128)}} parameter(0)
  ROOT %shown = f32[3,128,128]{{2,1,0:T(8,128)}} copy(%stack)
}}

%product (a: f32[8,128], w: f32[3,128,128], i: s32[]) -> f32[8,128] {{
  %a = f32[8,128]{VMEM} parameter(0)
  %w = f32[3,128,128]{{2,1,0:T(8,128)}} parameter(1)
  %i = s32[]{{:T(128)}} parameter(2)
  %v = f32[3,128,128]{{2,1,0:T(8,128)}} fusion(%w), kind=kLoop, calls=%tiles
  %layer = f32[1,128,128]{{2,1,0:T(8,128)}} dynamic-slice(%v, %i, %zero, %zero), dynamic_slice_sizes={{1,128,128}}
  %matrix = f32[128,128]{HBM} bitcast(%layer)
  ROOT %dot = f32[8,128]{HBM} convolution(%a, %matrix), dim_labels=bf_io->bf
}}

%write (cache: f32[1024,128], row: f32[1,128], i: s32[]) -> (f32[1024,128], f32[1,128]) {{
  %cache = f32[1024,128]{HBM} parameter(0)
  %row = f32[1,128]{HBM} parameter(1)
  %i = s32[]{{:T(128)}} parameter(2)
  %written = f32[1024,128]{HBM} dynamic-update-slice(%cache, %row, %i, %zero)
  %twice = f32[1,128]{HBM} add(%row, %row)
  ROOT %both = (f32[1024,128]{HBM}, f32[1,128]{HBM}) tuple(%written, %twice)
}}

%cond (p: (s32[], f32[8,128])) -> pred[] {{
  %p = (s32[], f32[8,128]) parameter(0)
  %limit = s32[] constant(3)
  %j = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}}

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %p = (s32[], f32[8,128]) parameter(0)
  %a = f32[8,128]{VMEM} get-tuple-element(%p), index=1
  %w = f32[3,128,128]{{2,1,0:T(8,128)}} get-tuple-element(%p), index=2
  %j = s32[]{{:T(128)S(6)}} get-tuple-element(%p), index=0
  %cache = f32[1024,128]{HBM} get-tuple-element(%p), index=3
  %row = f32[1,128]{HBM} get-tuple-element(%p), index=4
  %f = f32[8,128]{HBM} fusion(%a, %w, %j), kind=kOutput, calls=%product, metadata={{op_name="jit(f)/while/body/dot"}}
  %g = (f32[1024,128]{HBM}, f32[1,128]{HBM}) fusion(%cache, %row, %j), kind=kLoop, calls=%write
  %h = ((f32[8,128]{VMEM}, f32[3,128,128]{{2,1,0:T(8,128)}}, s32[]), f32[8,128]{HBM}, u32[]) \
fusion-start(%a, %w, %j), kind=kOutput, calls=%product, metadata={{op_name="jit(f)/while/body/apart"}}
  ROOT %t = (s32[], f32[8,128]) tuple(%j, %f)
}}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {{
  %a = f32[8,128]{HBM} parameter(0)
  %wide = f32[64,128]{HBM} parameter(1)
  %few = f32[4,128]{HBM} parameter(2)
  %rows = s32[8]{{0}} parameter(3)
  %far = (f32[8,128]{VMEM}, f32[8,128]{HBM}, u32[]{{:S(2)}}) copy-start(%a)
  %near = f32[8,128]{VMEM} copy-done(%far)
  %part = ((f32[64,128]{HBM}), f32[8,128]{VMEM}, u32[]{{:S(2)}}) slice-start(%wide), slice={{[0:8], [0:128]}}
  %begun = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), to_apply=%elsewhere
  %given = ((f32[4,128]{HBM}, s32[8]{{0}}), f32[8,128]{HBM}) call-update(%begun, %few, %rows), to_apply=%elsewhere
  %done = f32[8,128]{HBM} call-done(%given)
  %loop = (s32[], f32[8,128]) while(%t0), condition=%cond, body=%body
  %kernel = f32[8,128]{HBM} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={{\
"cost_estimate":{{"flops":"5","bytes_accessed":"77"}}}}
  ROOT %sum = f32[8,128]{HBM} add(%kernel, %near)
}}
"""


def test_moves_counts_slices_updates_and_loops_and_not_what_stays_on_the_chip():
    small, layer, row = 8 * 128 * 4, 128 * 128 * 4, 128 * 4
    assert set(moves(hlo.parse(PROGRAM))) == {
        Move(3 * (layer + small), 3, "fusion", "jit(f)/dot"),
        Move(3 * (layer + small), 3, "fusion-start", "jit(f)/apart"),
        Move(3 * (row + row + row), 3, "fusion", ""),  # the row is read, put into the cache, and doubled
        Move(small, 1, "copy-start", ""),  # the copy on the chip costs nothing
        Move(small, 1, "slice-start", ""),  # not all that is sliced from
        Move(small // 2 + 8 * 4 + small, 1, "call-update", ""),  # on another core of the chip: rows gathered
        Move(77, 1, "kernel", ""),  # what its author said
        Move(2 * small, 1, "add", ""),
        Move(3 * (1 + 2 * 4), 3, "compare", ""),
    }


def test_silent_kernels_are_named():
    call = '  %k = f32[8] custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/mla"}'
    program = hlo.parse("ENTRY %main (a: f32[8]) -> f32[8] {\n" + call + "\n}\n")
    assert silent_kernels(program) == {"jit(f)/mla"} and silent_kernels(hlo.parse(PROGRAM)) == set()


SLICES = [parse_topology(name) for name in ("v6e:2x2", "tpu7x:2x2x1")]


@pytest.mark.parametrize("topology", SLICES, ids=str)
def test_a_compiled_scan_reads_its_weights_once_and_writes_its_cache_in_place(topology):
    if missing := targets.missing_compiler(topology):
        pytest.skip(missing)
    targets.set_environment(os.environ)
    mesh = make_mesh({"data": 1}, targets.devices(topology))
    layers, width, slots = 5, 4096, 65536

    def step(x, weights, cache, slot):
        def body(carry, pair):
            x, cache = carry
            weight, layer = pair
            x = jnp.tanh(linear(x, weight))
            return (x, jax.lax.dynamic_update_slice(cache, x[None, :1], (layer, slot, 0))), None

        return jax.lax.scan(body, (x, cache), (weights, jnp.arange(layers)))[0]

    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = (16, width), (layers, width, width), (layers, slots, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated) for shape in shapes]
    args.append(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))
    with targets.nothing_cached():
        compiled = compile_on(mesh, Step(step, tuple(args), donate_argnums=(2,)))
    weight_bytes = 2 * layers * width * width
    moved = sum(move.bytes for move in moves(hlo.parse(compiled.as_text())))
    # Beside the weights a few activations and a row per layer, 128 KiB each; the cache alone would be 2.5 GiB.
    assert weight_bytes <= moved < 1.1 * weight_bytes
    # No copy of the weights into other tiles, which all of them together would be.
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes / 10
