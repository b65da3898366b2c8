"""The chat side of a command: its flags, the conversation they begin, and how an answer is shown.

On a terminal, thinking, tool calls and their results are dim, and the answer is not. Elsewhere thinking is left out.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from absl import flags

from maxmoe import chat, terminal
from maxmoe.chat.tokenizer import Tokenizer
from maxmoe.chat.tools import BUILT_IN, Toolbox

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_FLAGS = ("effort", "system", "messages", "tools", "interactive")


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
    flags.DEFINE_list(
        "tools",
        None,
        f"Chat, with these tools, which are run here when the model calls them: {', '.join(BUILT_IN)}.",
    )
    flags.DEFINE_integer(
        "max_tool_rounds", 8, "How many times in a row an answer may call tools before it ends.", lower_bound=1
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


def check_flags(resumes: bool, is_alone: bool, num_processes: int = 1) -> None:
    """Refuses flags of a chat beside others that do not go with them.

    Args:
      resumes: Whether a session of text is continued.
      is_alone: Whether a single process answers, and nothing is made of its answer.
      num_processes: That answer together.
    """
    toolbox_from_flags()
    if is_asked_for() and resumes:
        raise NotImplementedError("--resume_session continues text: leave it out, or the flags of a chat")
    if is_interactive() and not is_alone:
        raise NotImplementedError(
            "--interactive talks with a person in one process: leave out that, or --json, --save_session and others"
        )
    if flags.FLAGS["tools"].value and num_processes > 1:
        raise NotImplementedError(f"--tools runs in one process, and there are {num_processes}: leave it out")


def toolbox_from_flags() -> Toolbox | None:
    """The tools of --tools; None without. ValueError for a name that is unknown or comes twice."""
    names = flags.FLAGS["tools"].value
    if not names:
        return None
    try:
        return Toolbox.built_in(names)
    except ValueError as error:
        raise ValueError(f"--tools={','.join(names)}: {error}") from error


def request_from_flags(prompt: str) -> dict[str, Any]:
    """The request that the flags and a prompt make: --system, --messages, then the prompt as the user's message.

    Raises: ValueError for a file that holds no conversation, two system messages, or two tools of one name.
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
    if (toolbox := toolbox_from_flags()) is not None:
        declared = toolbox.declarations()
        if repeated := _names(request.get("tools") or []) & _names(declared):
            raise ValueError(f"--tools: {values['messages'].value} has {', '.join(repeated)} already; leave out one")
        request["tools"] = [*(request.get("tools") or []), *declared]
    if values["effort"].value is not None:
        request = {
            key: value for key, value in request.items() if "thinking" not in key and key != "chat_template_kwargs"
        }
        request["reasoning_effort"] = values["effort"].value
    return request


def _names(tools: Sequence[Any]) -> set[str]:
    """Of declared functions; what is none of them, the encoding refuses."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


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
    """A request whose history grows by each answer, each result of a tool and each question.

    Attributes:
      turn: The messages since the last question: answers that called tools, and the results.
    """

    def __init__(
        self, request: dict[str, Any], tokenizer: Tokenizer, max_len: int, tell: Callable[[str], None], styled: bool
    ):
        """Begins with a request; with --interactive, one without a question waits for it.

        Args:
          max_len: Of the engine, in tokens.
          tell: Called with each new warning about the history.
          styled: Whether to show answers for a person, thinking included.
        """
        self._toolbox = toolbox_from_flags()
        self._elsewhere: set[str] = set()  # tools that others run
        if self._toolbox is not None:
            self._elsewhere = _names(request.get("tools") or []) - _names(self._toolbox.declarations())
        self.turn: list[dict[str, Any]] = []
        self._num_rounds = 0
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
                self.turn, self._num_rounds = [], 0
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

    def add(self, *messages: dict[str, Any]) -> None:
        """Adds an answer, or what follows it."""
        self._request["messages"] += messages

    def run_tools(self, message: dict[str, Any]) -> str | None:
        """Runs the tools that an answer calls, and adds it and their results; returns what to show of these.

        None, and nothing is run, where it calls a tool that is run elsewhere, or after --max_tool_rounds.
        """
        calls = message["tool_calls"]
        if self._toolbox is None or any(call["function"]["name"] in self._elsewhere for call in calls):
            return None
        allowed = flags.FLAGS["max_tool_rounds"].value
        if self._num_rounds == allowed:
            self._tell(f"the model calls tools again, after {allowed} times: --max_tool_rounds allows no more")
            return None
        self._num_rounds += 1
        results = self._toolbox.run(calls)
        self.add(message, *results)
        self.turn = [*self.turn, message, *results]
        shown = "".join(f"\n-> {result['content']}" for result in results)
        return f"{_DIM}{terminal.without_controls(shown)}{_NORMAL}\n" if self._styled else f"{shown}\n"


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
        return self._switch(channel) + (terminal.without_controls(value) if self._styled else value)

    def _switch(self, channel: str) -> str:
        """What stands between two channels on a terminal; all but the content is dim."""
        was_dim, is_dim = self._channel != "content", channel != "content"
        self._channel = channel
        if not self._styled or was_dim == is_dim:
            return ""
        return _DIM if is_dim else _NORMAL + "\n"


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
