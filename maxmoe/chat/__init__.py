"""Text on one side, token ids on the other: tokenizer, chat encoding, and the parser of what comes back.

ids = chat.encode({"messages": [...], "tools": [...]}, tokenizer)
parser = chat.Parser(tokenizer, ids)
for step in steps:
    show(parser.feed([step.token_id]))  # what is new, as the deltas of a stream
messages.append(parser.finish())  # thinking included, for the next request
"""

from maxmoe.chat.encoding import ContextOverflowError, Prompt, encode, prepare, render
from maxmoe.chat.grammars import answer_grammar
from maxmoe.chat.history import HistoryError, Loss
from maxmoe.chat.images import image_prompt, num_vision_tokens
from maxmoe.chat.markup import Segment
from maxmoe.chat.parser import Parser
from maxmoe.chat.request import EFFORTS, PROMPT_KEYS, RequestError

__all__ = [
    "EFFORTS",
    "PROMPT_KEYS",
    "ContextOverflowError",
    "HistoryError",
    "Loss",
    "Parser",
    "Prompt",
    "RequestError",
    "Segment",
    "answer_grammar",
    "encode",
    "image_prompt",
    "num_vision_tokens",
    "prepare",
    "render",
]
