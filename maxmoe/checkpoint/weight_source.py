"""Where weights are read from, a piece at a time, by whoever does not hold them all."""

from typing import Protocol

import numpy as np


class WeightSource(Protocol):
    """Reads weights of one checkpoint by the names of the model. Several threads may read at once.

    Group "top" holds embedding, lm_head, final_norm, final_res_norm and final_res_proj. Group "layer_000" and so on,
    0-based, holds one layer each: "mixer_norm", "mixer/q_proj", "ffn/shared/gate", ... as its modules name them, and
    its routed experts as "experts/gate_packed" [E, F, D/2], "experts/gate_scale" [E, F, D/32] and so on.
    """

    def read(self, group: str, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Reads one weight, or what `index` selects on its leading axes and no more. Raises errors of its own."""
        ...
