"""The chat side of a command: its flags, the conversation they begin, and how an answer is shown.

On a terminal, thinking is dim and the answer is not. Elsewhere only the answer is written, with tool calls after it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from absl import flags

from maxmoe import chat, terminal
from maxmoe.chat.tokenizer import Tokenizer

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_FLAGS = ("effort", "system", "messages", "interactive")


def define_flags() -> None:
    """Defines the flags of a chat; each of them makes a command chat."""
    flags.DEFINE_enum(
        "effort",
        None,
        [*chat.EFFORTS, "none"],
        "Chat, with so much thinking before the answer; none for none. In a chat, the default is max.",
    )
    flags.DEFINE_string("system", None, "Chat, with this system message first.")
    flags.DEFINE_string(
        "messages",
        None,
        "Chat, and go on with the conversation in this JSON file: a list of messages, or an object with messages, "
        "tools and whatever else of an OpenAI-compatible request decides its prompt. --prompt adds a user's message.",
    )
    flags.DEFINE_boolean(
        "interactive",
        False,
        "Chat line by line: each line of standard input is a message of the user, and the history is kept until the "
        "input ends (Ctrl-D).",
    )


def is_asked_for() -> bool:
    """Whether any of the flags is given."""
    return any(flags.FLAGS[name].value not in (None, False) for name in _FLAGS)


def is_interactive() -> bool:
    """Whether --interactive is given."""
    return flags.FLAGS["interactive"].value


def has_messages() -> bool:
    """Whether the flags alone give something to answer, without a prompt."""
    return is_interactive() or flags.FLAGS["messages"].value is not None


def check_flags(resumes: bool, is_alone: bool) -> None:
    """Refuses flags of a chat beside others that do not go with them.

    Args:
      resumes: Whether a session of text is continued.
      is_alone: Whether a single process answers, and nothing is made of its answer.
    """
    if is_asked_for() and resumes:
        raise NotImplementedError("--resume_session continues text: leave it out, or the flags of a chat")
    if is_interactive() and not is_alone:
        raise NotImplementedError(
            "--interactive talks with a person in one process: leave out that, or --json, --save_session and others"
        )


def request_from_flags(prompt: str) -> dict[str, Any]:
    """The request that the flags and a prompt make: --system, --messages, then the prompt as the user's message.

    Raises: ValueError for a file that holds no conversation, or two system messages.
    """
    values = flags.FLAGS
    request = {"messages": []} if values["messages"].value is None else _read_request(Path(values["messages"].value))
    messages = list(request["messages"])
    if values["system"].value is not None:
        if any(isinstance(given, Mapping) and given.get("role") == "system" for given in messages):
            raise ValueError(
                f"--system: {values['messages'].value} has a system message already; leave out one of them"
            )
        messages.insert(0, {"role": "system", "content": values["system"].value})
    if prompt:
        messages.append({"role": "user", "content": prompt})
    request["messages"] = messages
    if values["effort"].value is not None:
        request = {
            key: value for key, value in request.items() if "thinking" not in key and key != "chat_template_kwargs"
        }
        request["reasoning_effort"] = values["effort"].value
    return request


def _read_request(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 included
        raise ValueError(f"--messages={file} is not JSON in UTF-8: {error}") from error
    request = {"messages": given} if isinstance(given, list) else given
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise ValueError(f'--messages={file} must hold a list of messages, or {{"messages": [...]}}')
    if unknown := sorted(request.keys() - chat.PROMPT_KEYS):
        raise ValueError(
            f"--messages={file}: {', '.join(unknown)} does not belong to a conversation; it may have "
            f"{', '.join(sorted(chat.PROMPT_KEYS))}. Sampling has flags"
        )
    return request


class Conversation:
    """A request whose history grows by each answer and each question."""

    def __init__(
        self, request: dict[str, Any], tokenizer: Tokenizer, max_len: int, tell: Callable[[str], None], styled: bool
    ):
        """Begins with a request; with --interactive, one without a question waits for it.

        Args:
          max_len: Of the engine, in tokens.
          tell: Called with each new warning about the history.
          styled: Whether to show answers for a person, thinking included.
        """
        self._request, self._tokenizer, self._max_len, self._tell = request, tokenizer, max_len, tell
        self._styled = styled
        self._told: set[str] = set()
        self._reader: Answer
        messages = request["messages"]
        asks = not messages or (isinstance(messages[-1], Mapping) and messages[-1].get("role") == "system")
        if is_interactive() and asks and not self.ask():
            raise ValueError("--interactive: the input ended before there was a question")

    def ask(self) -> bool:
        """Takes the next line of standard input that is not blank as the user's message; False at the input's end."""
        while True:
            try:
                line = input("\n> " if sys.stdin.isatty() else "")
            except EOFError:
                return False
            if line.strip():
                self._request["messages"].append({"role": "user", "content": line})
                return True

    def next_answer(self) -> "Answer":
        """Encodes the conversation so far, and begins to read the answer. Raises what `chat.prepare` raises."""
        prompt = chat.prepare(self._request, self._tokenizer, max_len=self._max_len)
        for warning in prompt.warnings:
            if warning not in self._told:
                self._tell(warning)
        self._told |= {*prompt.warnings}
        self._reader = Answer(self._tokenizer, prompt, self._styled)
        return self._reader

    def reader(self) -> "Answer":
        """What reads the answer that was begun last: the detokenizer of an engine."""
        return self._reader

    def add(self, message: dict[str, Any]) -> None:
        """Adds an answer."""
        self._request["messages"].append(message)


class Answer:
    """Reads an answer from ids, as `StreamDecoder` reads text: `feed` and `finish` give what to show.

    Attributes:
      prompt_ids: Of what it answers.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: chat.Prompt, styled: bool):
        """Starts where the prompt ends; `styled` shows it for a person."""
        self.prompt_ids = prompt.ids
        self._parser = chat.Parser(tokenizer, prompt.ids, allow_tool_calls=prompt.allows_tool_calls)
        self._styled, self._channel = styled, "content"

    def feed(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns what they add to what is shown."""
        return "".join(map(self._show, self._parser.feed(ids)))

    def finish(self) -> str:
        """Ends what is shown."""
        return self._switch("content")

    def message(self, finish_reason: str) -> tuple[dict[str, Any], str]:
        """The message, as the next request takes it, and why it ended.

        Args:
          finish_reason: "stop" where the engine saw the message's end; anything else cuts it off.
        """
        ended_by: Literal["stop", "length"] = "stop" if finish_reason == "stop" else "length"
        message = self._parser.finish(ended_by)
        cut_off = self._parser.finish_reason == "length"
        return message, finish_reason if cut_off else self._parser.finish_reason

    def _show(self, delta: dict[str, Any]) -> str:
        ((channel, value),) = delta.items()
        if channel == "reasoning_content":
            return self._switch(channel) + terminal.without_controls(value) if self._styled else ""
        if channel == "tool_calls":
            function = value[0]["function"]
            value = (f"\n{function['name']} " if "name" in function else "") + function["arguments"]
        return self._switch("content") + (terminal.without_controls(value) if self._styled else value)

    def _switch(self, channel: str) -> str:
        if not self._styled or channel == self._channel:
            return ""
        self._channel = channel
        return _DIM if channel == "reasoning_content" else _NORMAL + "\n"


def has_markers(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary can mark thinking."""
    return {"<|open|>", "<|close|>", "<|sep|>"} <= tokenizer.special_ids.keys()


def thinking_markers(tokenizer: Tokenizer) -> Any:
    """What opens and closes thinking. Raises: ValueError for a vocabulary without markers."""
    from maxmoe.inference.budget import ThinkingMarkers

    if not has_markers(tokenizer):
        raise ValueError("--thinking_token_budget: this checkpoint's vocabulary has no markers of thinking")
    markers = (tokenizer.encode(f"<|{word}|>think<|sep|>", allow_special=True) for word in ("open", "close"))
    return ThinkingMarkers(*map(tuple, markers))


def go_on(engine: Any, run: Any, prompt_ids: Sequence[int], params: Any) -> Any:
    """Answers a prompt that follows an earlier run, from the state of that run where the prompt begins with its tokens.

    It does not where the model wrote its text with other ids than the encoding gives, or was interrupted: then the
    prompt is read from its beginning.
    """
    try:
        session = run.session()
    except RuntimeError:  # interrupted in the middle of a step
        return engine.stream(prompt_ids, params)
    past = session.token_ids[0].tolist()
    if prompt_ids[: len(past)] != past or len(prompt_ids) == len(past):
        return engine.stream(prompt_ids, params)
    return engine.resume(session, prompt_ids[len(past) :], params)
