"""Log-probabilities of tokens in the forms of OpenAI's two interfaces."""

from collections.abc import Sequence
from typing import Any

from maxmoe.chat.tokenizer import Tokenizer
from maxmoe.inference.answer import Step

_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, steps: Sequence[Step]) -> dict[str, Any]:
    """Of visible tokens, with the likeliest ones beside each."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = tokenizer.decode([token_id]), list(tokenizer.token_bytes(token_id))
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": raw}

    content = [
        entry(step.token_id, step.logprob) | {"top_logprobs": [entry(*top) for top in step.top_logprobs]}
        for step in steps
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, steps: Sequence[Step], offset: int) -> dict[str, Any]:
    """Of a text's tokens.

    Args:
      offset: Characters of the text before them.
    """
    tokens = [tokenizer.decode([step.token_id]) for step in steps]
    offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    top = [
        {tokenizer.decode([token_id]): max(logprob, _LEAST) for token_id, logprob in step.top_logprobs}
        for step in steps
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [max(step.logprob, _LEAST) for step in steps],
        "top_logprobs": top,
        "text_offset": offsets,
    }
