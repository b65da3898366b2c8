"""What a model generates, read while it arrives: reasoning, content and tool calls.

Driven by token ids. The three markers are ids that only the model can make, so the same characters spelled as ordinary
text are data, in an answer about the markup as in the argument of a tool. (Some models spell markers, see the option
`lenient_markers`.) After a prompt that begins the assistant's message, the model was trained to write

    reasoning </think> <response> content </response> [<tools> <call ...> <argument ...> value ... </tools>] </message>

What it leaves out, repeats or breaks off is read as it was most likely meant, and `Parser.warnings` says so.
"""

import enum
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from maxmoe.chat.markup import CLOSE, END_OF_MSG, OPEN, SEP, Tag, marker_ids, read_tag
from maxmoe.chat.spelled_markers import SpelledMarkers
from maxmoe.chat.tokenizer import StreamDecoder, Tokenizer
from maxmoe.chat.tool_calls import ArgumentsBuilder

Delta = dict[str, Any]
Message = dict[str, Any]

_END_NAMES = (END_OF_MSG, "[EOS]", "[EOT]")
_MAX_TAG_IDS = 4096  # beyond it, what looks like a tag is text: a stream must not wait for ever
_MAX_CALL_ID_CHARS = 64


class _Place(enum.Enum):
    """Where the next text belongs."""

    RAW = "outside of any channel"
    THINK = "think"
    AFTER_THINK = "after think"
    RESPONSE = "response"
    AFTER_RESPONSE = "after response"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    JSON = "json"
    AFTER_TOOLS = "after tools"


_CONTENT_PLACES = (_Place.RAW, _Place.AFTER_THINK, _Place.RESPONSE)
_SPELLED_PLACES = (_Place.THINK, _Place.AFTER_THINK, _Place.RESPONSE)
_VALUE_PLACES = (_Place.ARGUMENT, _Place.JSON)


class _Call:
    """A tool call on its way. Without an index it is read and dropped."""

    def __init__(self, name: str, call_id: str, index: int | None):
        self.name, self.id, self.index = name, call_id, index
        self.arguments = ArgumentsBuilder()

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments.json}}


class Parser:
    """Reads one generated message.

    `feed` gives what is new as deltas of an OpenAI-compatible stream, each with one key: {"reasoning_content": text},
    {"content": text} or {"tool_calls": [entry]}. A call's first entry has its index, id and name, the following ones
    pieces of its arguments' JSON. `finish` gives the whole, in the form that the next request takes.

    The deltas, joined, are the message, but for three things that cannot be taken back: thinking that turns out to be
    the answer is repeated as content, a call that never ends is not in the message, and of an argument that comes twice
    the message has the last value.

    Attributes:
      finish_reason: "tool_calls", "stop" or "length", once finished.
      num_reasoning_tokens: Ids inside the thinking, markers not counted.
      ended: Whether the message is over: further ids are not read.
      warnings: What was not as trained, in order.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        allow_tool_calls: bool = True,
        lenient_markers: bool = False,
        force_nonempty_content: bool = False,
    ):
        """Starts where the prompt ends.

        Args:
          prompt_ids: The whole prompt: its last tag tells the channel that the model writes in, and the calls in it
            number those to come.
          allow_tool_calls: Whether calls are read, see `Prompt.allows_tool_calls`; else they are dropped.
          lenient_markers: Whether the end of thinking and the beginning of answer and tools also count where the model
            spells them as text. An answer about this markup then loses them.
          force_nonempty_content: Whether a message that ends by itself with thinking alone, neither answer nor calls,
            has the thinking as its content, for clients that cannot take an empty answer. A stream repeats it.
        Raises: ValueError for a vocabulary without markers.
        """
        ids = marker_ids(tokenizer)
        self._open, self._close, self._sep = ids[OPEN], ids[CLOSE], ids[SEP]
        self._end_ids = {tokenizer.special_ids[name] for name in _END_NAMES if name in tokenizer.special_ids}
        self._special_ids = frozenset(tokenizer.special_ids.values())
        self._tokenizer, self._allow_tool_calls = tokenizer, allow_tool_calls
        self._tag_ids: list[int] | None = None  # the marker, then its text; None outside of tags
        self._place, self._num_earlier_calls = self._read_prompt(prompt_ids)

        self._spelled = SpelledMarkers() if lenient_markers else None
        self._force_nonempty_content = force_nonempty_content
        self._decoder = StreamDecoder(tokenizer)
        self._reasoning: list[str] = []
        self._thought_from = 0  # where in `_reasoning` the open think channel begins
        self._thought_ids = 0  # ids in it
        self._content: list[str] | None = [] if self._place in (_Place.RAW, _Place.RESPONSE) else None
        self._calls: list[_Call] = []
        self._call: _Call | None = None
        self._num_slots = 0  # calls that the stream has shown
        self._json_body: list[str] = []
        self.ended = False
        self._deltas: list[Delta] = []
        self.finish_reason: Literal["stop", "length", "tool_calls"] | None = None
        self.num_reasoning_tokens = 0
        self.warnings: list[str] = []

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Takes the next ids, any number of them, and returns what is new. Ids after the message's end are not read.

        ValueError for an id outside the vocabulary.
        """
        self._deltas = []
        for token_id in ids:
            if self.ended:
                break
            self._take(token_id)
        return self._deltas

    def finish(self, ended_by: Literal["stop", "length"] = "stop") -> Message:
        """Ends the message and returns it: role, reasoning_content, content and tool_calls.

        Reasoning is None without any, content None where the message has no answer, or an empty one beside calls.

        Args:
          ended_by: Why the engine stopped. With "length", a message that has not ended by itself was cut off.
        """
        if self.finish_reason is None:
            cut_off = ended_by == "length" and not self.ended
            if self._decoder.finish():
                self._warn("it ends inside a character, which is dropped")
            if self._spelled is not None and self._spelled.take_held():
                self._warn("it ends inside a spelled marker, which is dropped")
            self._end_message(cut_off)
            self.finish_reason = "length" if cut_off else "tool_calls" if self._calls else "stop"
        content = None if self._content is None else "".join(self._content)
        return {
            "role": "assistant",
            "reasoning_content": "".join(self._reasoning) or None,
            "content": None if content == "" and self._calls else content,
            "tool_calls": [call.as_dict() for call in self._calls],
        }

    def _read_prompt(self, prompt_ids: Sequence[int]) -> tuple[_Place, int]:
        """Where a prompt stops, and how many tool calls it holds; a tag that it breaks off is gone on with."""
        place, num_calls, start = _Place.RAW, 0, None
        for i, token_id in enumerate(prompt_ids):
            if token_id in (self._open, self._close):
                start = i
            elif token_id == self._sep and start is not None:
                name = read_tag(self._tokenizer.decode(prompt_ids[start + 1 : i])).name
                is_open, start = prompt_ids[start] == self._open, None
                num_calls += is_open and name == "call"
                places = (_Place.THINK, _Place.RESPONSE) if is_open else (_Place.AFTER_THINK, _Place.AFTER_RESPONSE)
                place = dict(zip(("think", "response"), places, strict=True)).get(name, _Place.RAW)
        self._tag_ids = None if start is None else list(prompt_ids[start:])
        return place, num_calls

    def _take(self, token_id: int) -> None:
        if token_id in (self._open, self._close):
            if self._tag_ids is not None:
                self._restore_tag()  # a marker that began nothing
            self._end_text()
            self._tag_ids = [token_id]
        elif token_id in self._end_ids:
            self._end_text()
            self._end_message()
        elif token_id == self._sep:
            self._end_text()
            self._end_tag()
        elif token_id in self._special_ids:
            self._warn(f"id {token_id} ({self._tokenizer.decode([token_id])}) has no place in an answer; dropped")
        elif self._tag_ids is not None:
            self._tag_ids.append(token_id)
            if len(self._tag_ids) > _MAX_TAG_IDS:
                self._restore_tag()
        else:
            if self._place is _Place.THINK:
                self._thought_ids += 1
                self.num_reasoning_tokens += 1
            self._write(self._decoder.feed([token_id]))

    def _end_text(self) -> None:
        """Before a marker: what waits for the rest of a character waits in vain."""
        self._write(self._decoder.finish())
        if self._spelled is not None:
            self._write_text(self._spelled.take_held())

    def _restore_tag(self) -> None:
        ids, self._tag_ids = self._tag_ids, None
        self._warn("a marker without a tag is kept as text")
        self._write(self._tokenizer.decode(ids))

    def _end_tag(self) -> None:
        if self._tag_ids is None:
            self._warn(f"a {SEP} outside of a tag is dropped")
            return
        (marker, *ids), self._tag_ids = self._tag_ids, None
        tag = read_tag(self._tokenizer.decode(ids))
        handlers = self._OPENED if marker == self._open else self._CLOSED
        if tag.name in handlers:
            handlers[tag.name](self, tag)
        else:
            self._warn(f"unknown tag {tag.name!r:.80}: its text is kept")

    def _write(self, text: str) -> None:
        if self._spelled is None or self._place not in _SPELLED_PLACES:
            self._write_text(text)
            return
        for piece in self._spelled.feed(text):
            if piece in SpelledMarkers.MARKERS:
                self._warn(f"{piece} is spelled as text, and read as a marker")
                is_open = piece.startswith(OPEN)
                tag = read_tag(piece.removeprefix(OPEN if is_open else CLOSE).removesuffix(SEP))
                (self._OPENED if is_open else self._CLOSED)[tag.name](self, tag)
            else:
                self._write_text(piece)

    def _write_text(self, text: str) -> None:
        if not text:
            return
        if self._place is _Place.THINK:
            self._reasoning.append(text)
            self._emit("reasoning_content", text)
        elif self._place in _CONTENT_PLACES:
            self._add_content(text)
        elif self._place is _Place.ARGUMENT:
            self._emit_arguments(self._call.arguments.feed(text))
        elif self._place is _Place.JSON:
            self._json_body.append(text)
        elif text.strip():
            self._warn(f"text {self._place.value} is dropped: {text!r:.80}")

    def _add_content(self, text: str) -> None:
        self._content = self._content or []
        self._content.append(text)
        self._emit("content", text)

    def _emit(self, key: str, text: str) -> None:
        if self._deltas and key in self._deltas[-1]:
            self._deltas[-1][key] += text
        else:
            self._deltas.append({key: text})

    def _emit_arguments(self, piece: str) -> None:
        index = self._call.index
        if not piece or index is None:
            return
        (entry,) = self._deltas[-1].get("tool_calls", [{}]) if self._deltas else [{}]
        if entry.get("index") == index and "id" not in entry:
            entry["function"]["arguments"] += piece
        else:
            self._deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})

    def _warn(self, text: str) -> None:
        self.warnings.append(text)

    # What opening tags do.

    def _open_think(self, tag: Tag) -> None:
        if self._place is not _Place.THINK:
            self._drop_open_call()
            self._thought_from, self._thought_ids = len(self._reasoning), 0
            self._place = _Place.THINK

    def _open_response(self, tag: Tag) -> None:
        self._drop_open_call()
        self._content = self._content or []
        self._place = _Place.RESPONSE

    def _open_tools(self, tag: Tag) -> None:
        self._drop_open_call()
        self._place = _Place.TOOLS

    def _open_call(self, tag: Tag) -> None:
        self._drop_open_call()
        name = tag.attributes.get("tool", "")
        index = self._num_slots if name and self._allow_tool_calls else None
        self._call = _Call(name, _call_id(name, self._num_earlier_calls + self._num_slots), index)
        self._place = _Place.CALL
        if index is None:
            self._warn(f"a call {'that is not allowed' if name else 'without a tool name'} is dropped")
            return
        self._num_slots += 1
        function = {"name": name, "arguments": ""}
        entry = {"index": index, "id": self._call.id, "type": "function", "function": function}
        self._deltas.append({"tool_calls": [entry]})

    def _open_argument(self, tag: Tag) -> None:
        if not self._can_take(tag):
            return
        if "key" not in tag.attributes:
            self._warn("an argument without a key is dropped")
            return
        self._place = _Place.ARGUMENT
        self._emit_arguments(self._call.arguments.open(tag.attributes["key"], tag.attributes.get("type", "string")))

    def _open_json(self, tag: Tag) -> None:
        if self._can_take(tag):
            self._json_body, self._place = [], _Place.JSON

    def _can_take(self, tag: Tag) -> bool:
        """Whether there is a call for an argument; one that was not closed is closed."""
        if self._call is None:
            self._warn(f"an {tag.name} outside of a call: its tag is dropped")
            return False
        self._close_value(tag)
        if self._call.arguments.is_complete:
            self._warn("an argument beside arguments that are no JSON is dropped")
            return False
        return True

    def _open_message(self, tag: Tag) -> None:
        """Of a whole message, where the prompt does not begin it."""

    # What closing tags do.

    def _close_think(self, tag: Tag) -> None:
        if self._place is _Place.THINK:
            self._place = _Place.AFTER_THINK

    def _close_response(self, tag: Tag) -> None:
        if self._place is _Place.THINK:  # it answered without thinking, inside the channel that the prompt had opened
            self._warn("it answers inside its thinking: that text is content")
            self._answer_with_thinking(self._thought_from, self._thought_ids)
            self._place = _Place.AFTER_RESPONSE
        elif self._place in _CONTENT_PLACES:
            self._place = _Place.AFTER_RESPONSE

    def _answer_with_thinking(self, start: int, num_ids: int) -> None:
        """Makes content of the reasoning from a place on, which has that many ids."""
        text = "".join(self._reasoning[start:])
        del self._reasoning[start:]
        self.num_reasoning_tokens -= num_ids
        self._content = self._content or []
        if text:
            self._add_content(text)

    def _close_tools(self, tag: Tag) -> None:
        self._drop_open_call()
        if self._place is _Place.TOOLS:
            self._place = _Place.AFTER_TOOLS

    def _close_call(self, tag: Tag) -> None:
        if self._call is None:
            return
        self._close_value(tag)
        self._emit_arguments(self._call.arguments.end())
        if self._call.index is not None:
            self._calls.append(self._call)
        self._call, self._place = None, _Place.TOOLS

    def _close_value(self, tag: Tag) -> None:
        if self._place is _Place.ARGUMENT:
            self._emit_arguments(self._call.arguments.close())
        elif self._place is _Place.JSON:
            self._emit_arguments(self._call.arguments.add_object("".join(self._json_body)))
        if self._place in _VALUE_PLACES:
            self._place = _Place.CALL

    def _close_message(self, tag: Tag) -> None:
        self._end_message()

    def _end_message(self, cut_off: bool = False) -> None:
        if self._tag_ids is not None:
            self._warn("it ends inside a tag, which is dropped")
            self._tag_ids = None
        self._drop_open_call()
        self.ended = True
        is_empty = not (self._calls or "".join(self._content or []))
        if self._force_nonempty_content and not cut_off and is_empty and self._reasoning:
            self._warn("it ends without an answer: its thinking is the content")
            self._answer_with_thinking(0, self.num_reasoning_tokens)

    def _drop_open_call(self) -> None:
        if self._call is not None:
            self._warn(f"call {self._call.name!r:.80} is not closed; dropped")
            self._call, self._place = None, _Place.TOOLS

    _OPENED: ClassVar = {
        "think": _open_think,
        "response": _open_response,
        "tools": _open_tools,
        "call": _open_call,
        "argument": _open_argument,
        "json": _open_json,
        "message": _open_message,
    }
    _CLOSED: ClassVar = {
        "think": _close_think,
        "response": _close_response,
        "tools": _close_tools,
        "call": _close_call,
        "argument": _close_value,
        "json": _close_value,
        "message": _close_message,
    }


def _call_id(name: str, number: int) -> str:
    """Unique in the conversation: `number` counts its calls, from 0."""
    suffix = f"_{number}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[: _MAX_CALL_ID_CHARS - len(suffix)] + suffix
