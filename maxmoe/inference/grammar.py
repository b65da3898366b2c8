"""Answers that must match a grammar: which tokens may come next, told by llguidance.

A grammar is text in llguidance's variant of Lark, such as `chat.grammars` writes. It begins behind thinking: while a
model thinks, any token may come. Compiling and matching are bounded: what needs more is refused, or fails its request
alone. llguidance (extra `maxmoe[grammar]`) is imported by the first `Grammars`.
"""

import collections
import concurrent.futures
import dataclasses
import threading
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt32

MAX_CACHED = 128
COMPILE_SECONDS = 10.0


class Vocabulary(Protocol):
    """What is asked of a tokenizer; see `chat.tokenizer.Tokenizer`."""

    vocab_size: int
    special_ids: Any  # mapping of names to ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for."""

    def encode(self, text: str) -> list[int]:
        """Ids of text without control."""


@dataclasses.dataclass
class GrammarStats:
    """Counts of a cache of compiled grammars."""

    num_compiled: int = 0
    num_cached: int = 0
    num_refused: int = 0


class Matcher:
    """How far one answer has come along its grammar.

    Attributes:
      words: Which tokens may come next: bit i % 32 of word i // 32 for token i.
    """

    def __init__(self, matcher: Any, num_words: int):
        """Made by `Grammars.matcher`, from llguidance's own."""
        self._matcher, self._num_words = matcher, num_words
        self.words = self._next_words()

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises: ValueError if the grammar does not allow it, or its matching needs more work than is allowed.
        """
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} does not fit the grammar: {self._matcher.get_error()}")
        self.words = self._next_words()

    def _next_words(self) -> UInt32[np.ndarray, "words"]:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {self._matcher.get_error()}")
        return words


class Grammars:
    """Compiled grammars of one vocabulary, the last used ones kept. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary, eos_id: int, *, compile_seconds: float = COMPILE_SECONDS):
        """Reads the vocabulary, which takes about a second for one of 160,000 tokens.

        Args:
          eos_id: That ends an answer whose grammar is complete.
          compile_seconds: After which a grammar that is still being compiled is refused.
        Raises: ImportError without llguidance.
        """
        try:
            import llguidance
        except ImportError as error:
            raise ImportError("grammars need llguidance: pip install 'maxmoe[grammar]'") from error
        self._library = llguidance
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary, eos_id))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.vocab_size, eos_token=eos_id)
        self._num_words, self._seconds = -(-vocabulary.vocab_size // 32), compile_seconds
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock, self.stats = threading.Lock(), GrammarStats()

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a grammar, which is compiled unless that was done before.

        Raises: ValueError for a grammar that is wrong, too large, or too slow to compile.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                self.stats.num_cached += 1
        if compiled is None:
            compiled = self._compile(grammar)
        return Matcher(compiled.deep_copy(), self._num_words)

    def _compile(self, grammar: str) -> Any:
        limits = self._library.LLParserLimits(verbose_errors=False)  # verbose ones hold what the answer says
        text = self._library.LLMatcher.grammar_from_lark(grammar)

        def work():
            matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            matcher.compute_bitmask()  # most of the work of a lexer is done at its first use
            return matcher

        # A thread of its own: one that cannot be stopped must keep no other grammar waiting.
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar")
        result = thread.submit(work)
        thread.shutdown(wait=False)
        try:
            compiled = result.result(self._seconds)
        except TimeoutError:
            problem = f"compiling it took longer than {self._seconds:g} s; make it smaller"
        else:
            problem = compiled.get_error()
        with self._lock:
            if problem:
                self.stats.num_refused += 1
                raise ValueError(f"grammar: {problem}")
            self.stats.num_compiled += 1
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, vocabulary: Vocabulary, eos_id: int):
        self.eos_token_id, self.bos_token_id = eos_id, None
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.vocab_size)]
        self.special_token_ids = sorted({*vocabulary.special_ids.values(), eos_id})
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
