"""Compiling all that traffic will need before it comes: each program of the list is rehearsed with a request."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from maxmoe.inference.drafting import Drafts
from maxmoe.inference.sampling_params import SamplingParams

if TYPE_CHECKING:
    from maxmoe.inference.engine import Engine
    from maxmoe.inference.serving_loop import ServingLoop

_ANSWER_TOKENS = 4  # the first from a prefill, the second from a decode or with a draft behind it


class Program(NamedTuple):
    """A program that serving compiles.

    Attributes:
      name: "prefill", "decode", "choose" or "verify".
      num_rows, num_tokens: Of the batch, and per row.
      extras: Whether it has penalties, biases, early stops and top log-probabilities, which some request asked for.
    """

    name: str
    num_rows: int
    num_tokens: int
    extras: bool = False


Progress = Callable[[Program, int, int], None]


def list_programs(engine: "Engine") -> list[Program]:
    """Every program of the model that serving submitted requests ever compiles, whatever comes."""
    rows = engine.max_batch if engine.prefills_together else 1
    longest = engine.padded_chunk(np.zeros(min(engine.max_len, engine.prefill_widths[-1]), np.int32)).size
    prefills = [Program("prefill", rows, width) for width in engine.prefill_widths if width <= longest]
    programs = [*prefills, Program("decode", engine.max_batch, 1)]
    programs += [Program("choose", engine.max_batch, 1, extras) for extras in (False, True)]
    if engine.drafter is not None:
        width = engine.num_draft_tokens + 1
        programs += [Program("verify", engine.max_batch, width, extras) for extras in (False, True)]
    return programs


def warm_up(engine: "Engine", loop: "ServingLoop", progress: Progress | None) -> None:
    """Compiles all of `list_programs`, and what goes with them, on an idle loop.

    Args:
      progress: Called before each program with it, the number of programs that are ready, and that of all.
    """
    drafts = loop.drafts
    programs = list_programs(engine)
    for done, program in enumerate(programs):
        if progress is not None:
            progress(program, done, len(programs))
        if drafts is not None:
            loop.drafts = Drafts(_AnyDraft if program.name == "verify" else _NoDraft, drafts.max_tokens)
        num_tokens = program.num_tokens if program.name == "prefill" else 1
        _rehearse(engine, num_tokens, f"warm-up {done}", program.extras)
    if engine.prefixes is not None:
        for num_tokens in (2, 3):  # the second begins like the first
            _rehearse(engine, num_tokens, "warm-up")
        engine.prefixes.clear()
    loop.drafts = drafts
    jax.block_until_ready(loop.cache)


def _rehearse(engine: "Engine", num_tokens: int, cache_salt: str, extras: bool = False) -> None:
    """Serves a prompt of about so many tokens, and a few more if there is room."""
    prompt = [engine.model.config.bos_id] * min(num_tokens, engine.max_len - 1)
    room = min(_ANSWER_TOKENS, engine.max_len - len(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=room, top_logprobs=int(extras))
    engine.submit(prompt, params, cache_salt=cache_salt)
    while engine.has_work:
        engine.step()


class _NoDraft:
    def extend(self, ids) -> None:
        """Forgets them."""

    def propose(self, max_tokens: int):
        """Nothing."""
        return np.zeros(0, np.int32)


class _AnyDraft(_NoDraft):
    def propose(self, max_tokens: int):
        """Some ids, right or wrong."""
        return np.zeros(max_tokens, np.int32)
