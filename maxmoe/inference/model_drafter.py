"""A small model of the same vocabulary as a drafter: its likeliest continuation, token by token."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from maxmoe.inference.steps import init_cache, on_mesh_of, prefill_in_place
from maxmoe.model.transformer import Transformer

_CHUNK = 128  # tokens that are read at a time; fewer are padded to it, or to _SHORT
_SHORT = 16


class ModelDrafter:
    """Drafts with a model; see `drafting.Drafter`. Give an engine `lambda: ModelDrafter(model, params, ...)`.

    A draft is a scan of the model's decode step over a copy of its state, so that what is not accepted leaves nothing.
    """

    def __init__(self, model: Transformer, params: dict[str, Any], max_len: int, num_tokens: int):
        """An empty sequence.

        Args:
          max_len: Tokens that a prompt and its answer may have together.
          num_tokens: Of the longest draft.
        """
        self._model, self._params, self._num_tokens, self._max_len = model, params, num_tokens, max_len
        self._cache = init_cache(model, 1, max_len + num_tokens, params["embedding"].dtype)
        self._logits, self._size = None, 0

    def extend(self, ids: Sequence[int]) -> None:
        """See `Drafter`.

        Raises: ValueError if the sequence would outgrow max_len.
        """
        ids = np.asarray(ids, np.int32)
        if self._size + ids.size > self._max_len:
            raise ValueError(f"ModelDrafter: {self._size} + {ids.size} tokens are more than max_len={self._max_len}")
        self._size += ids.size
        for first in range(0, ids.size, _CHUNK):
            part = ids[first : first + _CHUNK]
            padded = np.zeros((1, _SHORT if part.size <= _SHORT else _CHUNK), np.int32)
            padded[0, : part.size] = part
            lengths = np.array([part.size], np.int32)
            self._logits, self._cache = prefill_in_place(self._model, self._params, padded, self._cache, lengths)

    def propose(self, max_tokens: int) -> Int[np.ndarray, "W"]:
        """See `Drafter`."""
        with on_mesh_of(self._params):
            draft = _continue(self._model, self._params, self._logits, self._cache, self._num_tokens)
        return np.asarray(draft)[:max_tokens]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _continue(model, params, logits, cache, num_tokens):
    def step(carry, _):
        logits, cache = carry
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return model.apply({"params": params}, token, cache, method="decode"), token[0]

    return jax.lax.scan(step, (logits, cache), length=num_tokens)[1]
