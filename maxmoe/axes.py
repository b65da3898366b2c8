"""The legend: dimension letters of shape annotations, and the logical axis names of weights.

Letters, as they stand in `Float[Array, "B T H K"]` and in names such as `scores_BTS`:

  B batch rows            T tokens of this call       S keys: cache slots or tokens seen so far
  D model width           H attention heads           K key width of a head     V value width of a head
  R latent width (MLA)    C channels of a short conv  W taps of a short conv
  N tokens, rows joined   E experts                   F hidden width of an FFN  G groups of 32 (MXFP4)
  L layers of a stack     A entries of the block-residual bank
"""

from typing import Final

# Logical axes of weights and activations. Rules in `sharding` map each one to mesh axes, or to none.
LAYERS: Final = "layers"  # stacked superblocks
VOCAB: Final = "vocab"
EMBED: Final = "embed"  # the residual stream
HEADS: Final = "heads"  # heads x width of a head, joined
LATENT: Final = "latent"  # low-rank bottlenecks (q_lora, kv_lora, decay gate)
EXPERT: Final = "expert"
EXPERT_EMBED: Final = "expert_embed"  # the narrow stream that routed experts read and write
EXPERT_MLP: Final = "expert_mlp"  # hidden width of one routed expert
MLP: Final = "mlp"  # hidden width of dense and shared FFNs
NORM: Final = "norm"  # what is never split: vectors of norms, and small matrices that every device needs whole
BATCH: Final = "batch"
TOKENS: Final = "tokens"  # of one call, along a sequence
SLOTS: Final = "slots"  # of a cache, along a sequence
