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
    """Of `kda_chunk_tpu`. Heads of one program hide each other's latency; found by bundle counts."""

    heads_per_program: int  # at most; the largest such divisor of the head count is taken
    branch_per_stage: bool  # next to no spills, but a quarter to a half more bundles than one branch, spills included


KDA_CHUNK_TPU = KdaChunkTpuTiling(heads_per_program=8, branch_per_stage=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaSparseTiling:
    """Of `mla_sparse_tpu` and its backward kernel. Chosen by bundle counts; not yet timed on a chip."""

    num_slots: int  # blocks of 128 rows in vector memory: one in use, the others on their way
    sequences: int  # of one program where each has one query, at most 8; two programs keep both cores of a v5p busy


MLA_SPARSE_TPU = MlaSparseTiling(num_slots=4, sequences=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4MatmulTpuTiling:
    """Of `mxfp4_matmul_tpu`: the block of one kernel program, each at most this. Chosen by bundle counts."""

    rows: int  # multiples of 16
    outputs: int  # multiples of 128
    columns: int  # multiples of 256


MXFP4_MATMUL_TPU = Mxfp4MatmulTpuTiling(rows=256, outputs=512, columns=512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeExpertsTpuTiling:
    """Of `moe_experts_tpu`. Chosen by bundle counts; not yet timed on a chip."""

    rows: int  # of a tile at most, a multiple of 16
    hidden: int  # columns of the hidden axis that a step computes, a multiple of 256; their weights are one transfer
    width: int  # columns of x that are multiplied at a time, at most; bounds the unpacked weights that are live
    vmem_bytes: int  # what the compiler may use


# Few rows: what counts is the stream of weights, so transfers are large. Many: what is unpacked serves many rows.
MOE_EXPERTS_TPU_DECODE = MoeExpertsTpuTiling(rows=64, hidden=512, width=512, vmem_bytes=48 * 2**20)
MOE_EXPERTS_TPU_PREFILL = MoeExpertsTpuTiling(rows=256, hidden=256, width=512, vmem_bytes=48 * 2**20)


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
