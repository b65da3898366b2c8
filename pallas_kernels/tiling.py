"""Tuned block sizes: one frozen dataclass per kernel, with one instance per chip it was tuned for."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaChunkGpuTiling:
    """Of `kda_chunk_gpu`. Chosen by registers, shared memory and the count of programs; not yet timed on a chip."""

    prepare_warps: int
    walk_stages: int
    min_programs: int  # fewer programs than this leave the chip idle, so that value channels are split further

    def value_block(self, num_states: int, value_dim: int) -> int:
        """Value channels per program of the walk over chunks."""
        block = value_dim
        while block > 16 and num_states * (value_dim // block) < self.min_programs:
            block //= 2
        return block

    def walk_warps(self, block: int) -> int:
        """Warps that hold the float32 state [K, block] in registers."""
        return 8 if block > 64 else 4


KDA_CHUNK_H200 = KdaChunkGpuTiling(prepare_warps=8, walk_stages=2, min_programs=96)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaChunkTpuTiling:
    """Of `kda_chunk_tpu`: how many heads a branch of each stage takes, found by bundle counts; not yet timed on a chip.

    More heads hide each other's latency, fewer spare registers: these are the fewest bundles found without a spill.
    """

    heads_per_program: int  # at most
    far_decays: int  # of one branch from here on; even below, where heads work in pairs
    near_scores: int
    first_scores: int  # across borders between 4 tokens
    scores: int  # and between 8, 16 and 32
    first_inverse: int  # from blocks of 4 to blocks of 8
    inverse: int  # and on to 64
    errors: int
    deltas: int
    outputs: int
    new_states: int
    branch_per_stage: bool = True  # in one branch stages overlap: a quarter fewer bundles, and thousands of spills


KDA_CHUNK_V5P = KdaChunkTpuTiling(
    heads_per_program=6,
    far_decays=1,
    near_scores=2,
    first_scores=2,
    scores=4,
    first_inverse=2,
    inverse=4,
    errors=2,
    deltas=8,
    outputs=4,
    new_states=4,
)
KDA_CHUNK_V6E = KdaChunkTpuTiling(
    heads_per_program=12,
    far_decays=2,
    near_scores=2,
    first_scores=2,
    scores=4,
    first_inverse=4,
    inverse=8,
    errors=4,
    deltas=8,
    outputs=8,
    new_states=4,
)
KDA_CHUNK_TPU7X = KdaChunkTpuTiling(
    heads_per_program=12,
    far_decays=2,
    near_scores=6,
    first_scores=4,
    scores=4,
    first_inverse=2,
    inverse=8,
    errors=2,
    deltas=8,
    outputs=8,
    new_states=4,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaSparseTiling:
    """Of `mla_sparse_tpu` and its backward kernel. Chosen by bundle counts; not yet timed on a chip."""

    num_slots: int  # blocks of 128 rows in vector memory: one in use, the others on their way
    sequences: int  # of one program where each has one query, at most 8; two programs keep both cores of a v5p busy


MLA_SPARSE_TPU = MlaSparseTiling(num_slots=4, sequences=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4MatmulTpuTiling:
    """Of `mxfp4_matmul_tpu`: the block of one kernel program, each at most this. Chosen by bundle and spill counts."""

    rows: int = 256  # multiples of 16
    outputs: int = 512  # multiples of 128
    columns: int = 512  # multiples of 256
    at_a_time: int = 512  # outputs whose weights are unpacked before they are multiplied, multiples of 128
    width: int = 1024  # columns of those, multiples of 256
    buffers: int = 0  # in vector memory for that, used in turn; 0 leaves the weights to the compiler
    unrolled: bool = True  # else a loop: fewer registers, but the matrix unit runs dry between turns


# By how weights are unpacked, and then by rows: the first that holds all of them, else the last.
MXFP4_MATMUL_TPU = {
    "float4": (Mxfp4MatmulTpuTiling(),),  # tpu7x
    # Larger pieces spill registers on v6e, and have one bundle in a hundred less; a loop would have a fifth more.
    "float8": (Mxfp4MatmulTpuTiling(at_a_time=256, width=256),),
    "float8_f32": (Mxfp4MatmulTpuTiling(rows=64, buffers=1), Mxfp4MatmulTpuTiling(at_a_time=128)),  # v5p
}
MXFP4_MATMUL_GRADIENT_TPU = {
    "float4": (Mxfp4MatmulTpuTiling(at_a_time=256, unrolled=False),),
    "float8": (Mxfp4MatmulTpuTiling(at_a_time=256, unrolled=False),),
    "float8_f32": (Mxfp4MatmulTpuTiling(rows=64, buffers=1), Mxfp4MatmulTpuTiling(at_a_time=128, buffers=2)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeExpertsTpuTiling:
    """Of `moe_experts_tpu`. Chosen by bundle counts; not yet timed on a chip."""

    rows: int  # of a tile at most, a multiple of 16
    hidden: int  # columns of the hidden axis that a step computes, a multiple of 256; their weights are one transfer
    width: int  # columns of x that are multiplied at a time, at most, a multiple of 256
    units: int  # hidden units whose weights are unpacked at a time, at most, a multiple of 128
    outputs: int  # outputs whose weights are unpacked at a time, at most, a multiple of 128
    vmem_bytes: int = 48 * 2**20  # what the compiler may use


# By how weights are unpacked, and then by rows: the first that holds all of them, else the last. Few rows: what counts
# is the stream of weights, so transfers are large. Many: what is unpacked serves many rows.
MOE_EXPERTS_TPU = {
    "float4": (  # tpu7x
        MoeExpertsTpuTiling(rows=64, hidden=512, width=512, units=512, outputs=512),
        MoeExpertsTpuTiling(rows=256, hidden=256, width=512, units=256, outputs=512),
    ),
    "float8": (  # v6e
        MoeExpertsTpuTiling(rows=64, hidden=512, width=512, units=512, outputs=512),
        MoeExpertsTpuTiling(rows=256, hidden=256, width=512, units=256, outputs=512),
    ),
    "float8_f32": (  # v5p
        MoeExpertsTpuTiling(rows=64, hidden=512, width=512, units=256, outputs=256),
        MoeExpertsTpuTiling(rows=256, hidden=256, width=512, units=128, outputs=256),
    ),
}
# Loops of the gradient hold more at a time.
MOE_EXPERTS_GRADIENT_TPU = MOE_EXPERTS_TPU | {
    "float8": (
        MoeExpertsTpuTiling(rows=64, hidden=512, width=256, units=256, outputs=256),
        MoeExpertsTpuTiling(rows=256, hidden=256, width=256, units=256, outputs=256),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaDecodeTpuTiling:
    """Of `kda_decode_tpu`. Eight heads fill the sublanes of a register; windows on their states take 2 MiB."""

    heads_per_program: int
    most_odd_heads: int  # where the heads are no multiple of that, all of them are one program, up to this number
    heads_together: int  # at most, in one turn of the loop over a program's heads; more of them spill registers


KDA_DECODE_TPU = KdaDecodeTpuTiling(heads_per_program=8, most_odd_heads=24, heads_together=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerTopkTpuTiling:
    """Of the kernels behind `indexer_topk_tpu`. Chosen by bundle counts and by how rarely a query is done again."""

    queries: int  # of one program, a multiple of 8
    groups: int  # a key's slot modulo this is its group, a multiple of 1024
    kept: int  # best keys that each group keeps; a query whose choice may need more of one group is done again
    key_tile: int  # keys per grid step, a multiple of `groups`
    lanes: int  # keys per matrix product, a multiple of 128 that divides key_tile
    chunk: int  # queries whose candidates exist in HBM at one time, a multiple of `queries`


INDEXER_TOPK_TPU = IndexerTopkTpuTiling(queries=8, groups=1024, kept=13, key_tile=8192, lanes=2048, chunk=128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeExpertsGpuTiling:
    """Of `moe_experts_gpu`. Chosen by registers and shared memory; not yet timed on a chip. All powers of two."""

    rows: int  # of a block that shares one expert, at least 16
    outputs: int  # weight rows per program; 64 or more let `wgmma` work
    words: int  # of four weights along the inner axis per step; 64 are one cache line
    warps: int
    stages: int  # steps whose loads are in flight


MOE_EXPERTS_H200_DECODE = MoeExpertsGpuTiling(rows=16, outputs=64, words=64, warps=4, stages=4)
MOE_EXPERTS_H200_PREFILL = MoeExpertsGpuTiling(rows=64, outputs=128, words=32, warps=8, stages=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaSparseGpuTiling:
    """Of `mla_sparse_gpu`. Chosen by registers and shared memory; not yet timed on a chip. All powers of two."""

    heads: tuple[int, ...]  # of one program, as tiles whose context stands in registers
    keys: int  # rows gathered per step
    warps: int
    stages: int  # steps whose rows are on their way
    min_programs: int  # fewer programs than this leave the chip idle, so that keys are split over more


MLA_SPARSE_H200 = MlaSparseGpuTiling(heads=(32,), keys=64, warps=8, stages=2, min_programs=132)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaDecodeGpuTiling:
    """Of `kda_decode_gpu`. Chosen by registers; not yet timed on a chip."""

    warps: int  # that hold the float32 state of a head in registers


KDA_DECODE_H200 = KdaDecodeGpuTiling(warps=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttnResTpuTiling:
    """Of `attn_res_norm_tpu`. Chosen by bundles; not yet timed on a chip."""

    many_rows: int  # from here on blocks are twice as large, for fewer steps
    columns: int  # of one turn of a loop, a multiple of 128: fewer hide less latency


ATTN_RES_TPU = AttnResTpuTiling(many_rows=256, columns=1024)
