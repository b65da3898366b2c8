"""Tokens of one answer become what a client sees of it: thinking, text up to a stop string, tool calls.

Stop strings are sought in what is visible, not in thinking nor in arguments of calls, so a reader seeks them itself and
says by `done` that the engine may stop.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from maxmoe.chat import Parser
from maxmoe.chat.tokenizer import StreamDecoder, Tokenizer
from maxmoe.inference.answer import Step
from maxmoe.inference.stop_strings import StoppableText, StopStrings

Channel = Literal["reasoning_content", "content", "tool_calls"]


class Piece(NamedTuple):
    """Something new of an answer.

    Attributes:
      value: Text; of "tool_calls" the entries of a delta.
      steps: The tokens of visible text that it completes, where log-probabilities were asked for.
    """

    channel: Channel
    value: Any
    steps: tuple[Step, ...] = ()


class Finished(NamedTuple):
    """An answer that has ended.

    Attributes:
      message: As the next request takes it.
      finish_reason: "stop", "length" or "tool_calls".
      stop_string: That ended it.
      ids: All generated tokens, the stop id included; so many are counted in usage.
      warnings: Of what was dropped, for the client.
      steps: Those of visible text, where log-probabilities were asked for.
    """

    message: dict[str, Any]
    finish_reason: str
    stop_string: str | None
    ids: list[int]
    warnings: tuple[str, ...]
    steps: tuple[Step, ...]


class Reader(Protocol):
    """Reads one answer.

    Attributes:
      done: Whether nothing of what may still come is wanted.
      ids: The tokens that were read.
      num_reasoning_tokens: Of these, inside thinking, markers not counted.
    """

    done: bool
    ids: list[int]

    @property
    def num_reasoning_tokens(self) -> int:
        """See above."""

    def feed(self, steps: Sequence[Step]) -> list[Piece]:
        """Takes the next tokens."""

    def finish(self, ended_by: Literal["stop", "length"]) -> tuple[list[Piece], Finished]:
        """Ends the answer: what was held back, and the whole."""


class ChatReader:
    """Of a message in the family's markup."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        allow_tool_calls: bool = True,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        max_calls: int | None = None,
        keeps_steps: bool = False,
        lenient_markers: bool = False,
        force_nonempty_content: bool = False,
    ):
        """Starts where the prompt ends.

        Args:
          allow_tool_calls: See `chat.Parser`.
          min_tokens: A stop string within the first so many tokens does not count.
          max_calls: After so many tool calls the answer is over.
          keeps_steps: Whether pieces of text carry their tokens.
          lenient_markers, force_nonempty_content: See `chat.Parser`.
        """
        self._parser = Parser(
            tokenizer,
            prompt_ids,
            allow_tool_calls=allow_tool_calls,
            lenient_markers=lenient_markers,
            force_nonempty_content=force_nonempty_content,
        )
        self._special_ids = frozenset(tokenizer.special_ids.values())
        self._stops = StopStrings(stops)
        self._min_tokens, self._max_calls, self._keeps_steps = min_tokens, max_calls, keeps_steps
        self._content: list[str] = []
        self._unread: list[Step] = []  # no text of theirs has come out of the parser
        self._held: list[Step] = []  # their text may become a stop string
        self._steps: list[Step] = []
        self.ids: list[int] = []
        self.done = False

    def feed(self, steps: Sequence[Step]) -> list[Piece]:
        """See `Reader`."""
        pieces: list[Piece] = []
        for step in steps:
            self.done |= self._parser.ended and not step.is_stop_id  # the engine goes on after the message
            if self.done:
                break
            self.ids.append(step.token_id)
            deltas = self._parser.feed((step.token_id,))
            if self._keeps_steps:
                self._note(step, deltas)
            for delta in deltas:
                ((channel, value),) = delta.items()
                if not self.done:
                    self._add(channel, value, pieces)
        return pieces

    def finish(self, ended_by: Literal["stop", "length"]) -> tuple[list[Piece], Finished]:
        """See `Reader`."""
        pieces: list[Piece] = []
        self._flush(pieces)
        message = self._parser.finish("stop" if self.done else ended_by)
        reason = self._parser.finish_reason
        if self._stops.matched is not None:
            message |= {"content": "".join(self._content), "tool_calls": []}
            reason = "stop"
        elif self._max_calls is not None and len(message["tool_calls"]) > self._max_calls:
            message["tool_calls"] = message["tool_calls"][: self._max_calls]
        # Where this reader broke off, so did the call that was on its way.
        warnings = () if self.done else tuple(f"tool calls: {w}" for w in self._parser.warnings if "call" in w)
        finished = Finished(
            message=message,
            finish_reason=reason,
            stop_string=self._stops.matched,
            ids=self.ids,
            warnings=warnings,
            steps=tuple(self._steps),
        )
        return pieces, finished

    @property
    def num_reasoning_tokens(self) -> int:
        """See `Reader`."""
        return self._parser.num_reasoning_tokens

    def _note(self, step: Step, deltas: Sequence[dict[str, Any]]) -> None:
        """Sorts a token by whether its text is visible; what waits for the rest of a character waits here, too."""
        is_special = step.token_id in self._special_ids
        if not is_special:
            self._unread.append(step)
        if any("content" in delta for delta in deltas):
            self._held += self._unread
        if is_special or deltas:
            self._unread = []

    def _add(self, channel: Channel, value: Any, pieces: list[Piece]) -> None:
        if channel == "content":
            text = self._stops.feed(value, may_stop=len(self.ids) > self._min_tokens)
            self.done = self._stops.matched is not None
            self._show(text, pieces)
            return
        self._flush(pieces)
        begins_too_many = (
            self._max_calls is not None and channel == "tool_calls" and value[0]["index"] >= self._max_calls
        )
        if begins_too_many:
            self.done = True
        else:
            pieces.append(Piece(channel, value))

    def _flush(self, pieces: list[Piece]) -> None:
        self._show(self._stops.finish(), pieces)

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._content.append(text)
            pieces.append(Piece("content", text, tuple(self._held)))
            self._steps += self._held
            self._held = []


class TextReader:
    """Of plain text, in which markers are nothing special but the end."""

    num_reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), min_tokens: int = 0):
        """Starts at the end of a prompt; see `ChatReader`."""
        self._text = StoppableText(StreamDecoder(tokenizer), stops, min_tokens)
        self._pieces: list[str] = []
        self._steps: list[Step] = []
        self._num_told = 0  # of the steps
        self.ids: list[int] = []
        self.done = False

    def feed(self, steps: Sequence[Step]) -> list[Piece]:
        """See `Reader`."""
        texts = []
        for step in steps:
            if self.done:
                break
            self.ids.append(step.token_id)
            if step.is_stop_id:
                continue
            self._steps.append(step)
            texts.append(self._text.feed(step.token_id))
            self.done = self._text.stop_string is not None
        return self._show("".join(texts))

    def finish(self, ended_by: Literal["stop", "length"]) -> tuple[list[Piece], Finished]:
        """See `Reader`."""
        pieces = self._show(self._text.finish())
        finished = Finished(
            message={"role": "assistant", "content": "".join(self._pieces)},
            finish_reason="stop" if self.done else ended_by,
            stop_string=self._text.stop_string,
            ids=self.ids,
            warnings=(),
            steps=tuple(self._steps),
        )
        return pieces, finished

    def _show(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._pieces.append(text)
        steps, self._num_told = tuple(self._steps[self._num_told :]), len(self._steps)
        return [Piece("content", text, steps)]
