"""Collectives, loops and layouts read from optimised programs: written out here, and compiled for TPU."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxmoe.planning import hlo, targets
from maxmoe.planning.chips import parse_topology
from maxmoe.sharding import make_mesh

# A loop of 5 rounds in one of 3, which hold an all-reduce; beside them one of each other form of groups.
PROGRAM = """\
HloModule jit_f, entry_computation_layout={(f32[3,130]{1,0:T(4,128)}, /*index=1*/bf16[7,33]{0,1:T(8,128)(2,1)}, \
u8[5]{0:T(512)(128)(4,1)}, s32[])->f32[3]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_cond (p: (s32[], f32[64])) -> pred[] {
  %limit = s32[] constant(5)
  %p = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%inner_body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]) parameter(0)
  %x = f32[64]{0} get-tuple-element(%p), index=1
  %ar = f32[64]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add, \
metadata={op_name="jit(f)/while/body/while/body/layer/psum"}, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[64]) tuple(%i, %ar)
}

%outer_cond (p: (s32[], f32[64])) -> pred[] {
  %p = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant(3)
  ROOT %gt = pred[] compare(%i, %limit), direction=LT
}

%outer_body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]) parameter(0)
  ROOT %w = (s32[], f32[64]) while(%p), condition=%inner_cond, body=%inner_body
}

%unknown_cond (p: (s32[], f32[64])) -> pred[] {
  %p = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%unknown_body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  ROOT %p = (s32[], f32[64]) parameter(0)
}

ENTRY %main (p0: f32[3,130]) -> f32[3] {
  %p0 = f32[3,130]{1,0} parameter(0)
  %w1 = (s32[], f32[64]) while(%t0), condition=%outer_cond, body=%outer_body
  %w2 = (s32[], f32[64]) while(%t0), condition=%unknown_cond, body=%unknown_body
  %ag = bf16[16,10]{1,0} all-gather(%x), channel_id=1, replica_groups=mesh['data'=2,'expert'=2,'tensor'=2] \
{'data','tensor'}, dimensions={0}
  %ags = (bf16[2,10]{1,0}, bf16[16,10]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %agd = bf16[16,10]{1,0} all-gather-done(%ags)
  %rs = f32[4]{0} reduce-scatter(%y), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %a2a = (f32[6]{0}, f32[6]{0}) all-to-all(%y, %y), replica_groups=[4,2]<=[2,4]T(1,0)
  %cp = (f32[10], f32[10], u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
  %slow = f32[3] fusion(%y), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"4611686018427387904"}
  ROOT %fast = f32[3] fusion(%y), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"7"}
}
"""


def test_collectives_counts_loops_and_reads_every_form_of_groups():
    program = hlo.parse(PROGRAM)
    found = {(c.kind, c.group_size): c for c in hlo.collectives(program, 8, node_size=4)}
    values = {key: (c.count, c.bytes, c.sent_bytes, c.across_nodes) for key, c in found.items()}
    assert values == {
        ("all-reduce", 4): (15, 256, 2 * 256 * 3 // 4, False),
        ("all-gather", 4): (1, 320, 320 * 3 // 4, True),
        ("all-gather", 8): (1, 320, 320 * 7 // 8, True),
        ("reduce-scatter", 2): (1, 32, 16, True),
        ("all-to-all", 2): (1, 48, 24, True),
        ("collective-permute", 2): (1, 40, 40, False),
    }
    assert found["all-reduce", 4].source == "jit(f)/layer/psum"
    assert program.unknown_trips == 1


def test_estimated_cycles_multiplies_loops_and_leaves_sentinels_out():
    assert hlo.estimated_cycles(hlo.parse(PROGRAM)) == 15 * 100 + 7
    assert hlo.estimated_cycles(hlo.parse("ENTRY %m () -> s32[] {\n  %c = s32[] constant(1)\n}\n")) is None


def test_largest_results_leaves_out_fusions_inside_and_what_only_passes_through():
    found = hlo.largest_results(hlo.parse(PROGRAM), 4)
    assert found == [
        (320, "all-gather-start", ""),
        (320, "all-gather-done", ""),
        (320, "all-gather", ""),
        (256, "all-reduce", "jit(f)/layer/psum"),
    ]


def test_argument_bytes_pads_tiles_in_the_order_of_the_layout():
    shapes = 3 * 130 * 4 + 7 * 33 * 2 + 5 + 4
    padded = 4 * 256 * 4 + 40 * 128 * 2 + 512 + 4
    assert hlo.argument_bytes(PROGRAM) == (shapes, padded)


def test_parse_refuses_a_text_without_entry():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("HloModule empty\n")


TPU = parse_topology("v6e:2x2")
needs_libtpu = pytest.mark.skipif(targets.missing_compiler(TPU) is not None, reason=str(targets.missing_compiler(TPU)))


@needs_libtpu
@pytest.mark.slow
def test_a_scanned_pair_of_sharded_products_sums_once_per_round():
    """x W1 W2 with W1 split by columns and W2 by rows over `tensor` has to sum over it, in each of 7 rounds."""
    targets.set_environment(os.environ)
    mesh = make_mesh({"data": 2, "tensor": 2}, targets.devices(TPU))

    def shape(dims, *spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def f(x, weights):
        def body(x, pair):
            x = jnp.tanh(x @ pair[0]) @ pair[1]
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data", None))), None

        return jax.lax.scan(body, x, weights)[0]

    weights = shape((7, 512, 1024), None, None, "tensor"), shape((7, 1024, 512), None, "tensor", None)
    with targets.nothing_cached():
        compiled = jax.jit(f).lower(shape((64, 512), "data", None), weights).compile()
    text = compiled.as_text()
    (found,) = hlo.collectives(hlo.parse(text), 4)
    assert (found.kind, found.count, found.group_size) == ("all-reduce", 7, 2)
    assert found.bytes in (32 * 512 * 2, 32 * 512 * 4)  # rounded before or after the sum
    assert hlo.argument_bytes(text)[1] == compiled.memory_analysis().argument_size_in_bytes
