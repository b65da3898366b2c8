"""Whether a conversation reaches the model whole: tool results beside their calls, thinking that was kept.

The family is trained on complete histories, earlier thinking included. What a request would lose is found here and
named by message: an error in strict use, a warning otherwise. Nothing is dropped without a word.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxmoe.chat.request import ChatRequest, RequestError
from maxmoe.chat.tool_calls import GivenCall, read_calls

_KNOWN_KEYS = {
    "system": {"tools"},
    "developer": {"tools"},
    "user": set(),
    "assistant": {"reasoning_content", "reasoning", "tool_calls", "partial"},
    "tool": {"tool_call_id", "tool"},
}
_KEYS_OF_ALL = {"role", "content", "name", "id"}


class Loss(NamedTuple):
    """Something of a message that the model will not see, or see changed.

    Attributes:
      index: Of the message.
      text: What is lost, with counts, and what to do.
      can_be_repaired: Whether the sender can do something about it; strict use refuses these.
    """

    index: int
    text: str
    can_be_repaired: bool = True

    def __str__(self) -> str:
        return f"messages[{self.index}]: {self.text}"


class HistoryError(RequestError):
    """A request that would lose history.

    Attributes:
      index: Of the first message concerned.
      losses: All that would be lost.
    """

    def __init__(self, losses: Sequence[Loss], num_messages: int):
        lines = "; ".join(str(loss) for loss in losses)
        count = len({loss.index for loss in losses})
        ValueError.__init__(self, f"{count} of {num_messages} messages would lose history: {lines}")
        self.index = losses[0].index
        self.losses = tuple(losses)


class ToolResult(NamedTuple):
    """How the result of a tool is announced: the tool's name, and its number since the last assistant message."""

    name: str
    number: int


def reasoning_of(message: Mapping[str, Any], index: int) -> str:
    """What an assistant thought in an earlier turn, verbatim; "" for nothing."""
    for key in ("reasoning_content", "reasoning"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{key} must be a string; got {value!r:.80}", index)
        if value:
            return value
    return ""


def place_results(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, ToolResult | None]]:
    """In which order messages are rendered, by index, and what each tool result is called.

    Tool results in a row come in the order of the calls of the assistant message before them, and under their names, if
    each of them names one by its id. Otherwise they stay where they are, and their position tells the call.

    Raises: HistoryError for a result of no call that has no name either.
    """
    placed: list[tuple[int, ToolResult | None]] = []
    calls: list[GivenCall] = []
    num_results, at = 0, 0
    while at < len(messages):
        if messages[at]["role"] != "tool":
            if messages[at]["role"] == "assistant":
                calls, num_results = read_calls(messages[at], at), 0
            placed.append((at, None))
            at += 1
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        row = [(_called(messages[i], calls), i) for i in range(at, end)]
        matched = all(call is not None for call, _ in row)
        if matched:
            row.sort(key=lambda entry: entry[0])  # stable
        for call, i in row:
            num_results += 1
            name = calls[call].name if matched else _given_name(messages[i], calls, num_results)
            if name is None:
                raise HistoryError([_result_without_call(messages, i, num_results, len(calls))], len(messages))
            placed.append((i, ToolResult(name, num_results)))
        at = end
    return placed


def _called(message: Mapping[str, Any], calls: Sequence[GivenCall]) -> int | None:
    """Which of the calls a result names by its id; the first of several with that id."""
    given = next((message[key] for key in ("tool_call_id", "id") if message.get(key) is not None), None)
    return next((i for i, call in enumerate(calls) if given is not None and call.id == str(given)), None)


def _given_name(message: Mapping[str, Any], calls: Sequence[GivenCall], number: int) -> str | None:
    by_position = calls[number - 1].name if number <= len(calls) else None
    return message.get("tool") or message.get("name") or by_position


def _result_without_call(messages: Sequence[Mapping[str, Any]], index: int, number: int, num_calls: int) -> Loss:
    given = messages[index].get("tool_call_id")
    return Loss(
        index,
        f"result {number} after the last assistant message, which has {num_calls} tool calls: tool_call_id {given!r} "
        "belongs to none of them, and there is no name. Send the assistant message with its tool_calls",
    )


def find_losses(request: ChatRequest) -> list[Loss]:
    """All that the prompt of this request lacks or guesses, by message."""
    losses: list[Loss] = []
    calls: list[GivenCall] = []
    asked_at: int | None = None
    answered: set[int] = set()  # calls; a result that names none counts as one, by its negative index
    last = len(request.messages) - 1
    for i, message in enumerate(request.messages):
        role = message["role"]
        losses += _unknown_keys(message, i)
        if role == "tool":
            call = _called(message, calls)
            if call is None:
                given = message.get("tool_call_id")
                text = (
                    f"tool_call_id {given!r} is none of the {len(calls)} calls before it, so its place says whose it is"
                )
                losses.append(Loss(i, text))
            answered.add(-i if call is None else call)
            continue
        losses += _missing_results(asked_at, calls, answered)
        asked_at = None
        if role == "assistant":
            calls, answered, asked_at = read_calls(message, i), set(), i
            losses += _lost_reasoning(request, message, i)
            losses += _shared_ids(calls, i)
        elif message.get("tools") and message.get("content"):
            losses.append(Loss(i, "a system message with tools declares these alone, its content is left out"))
    if asked_at != last or request.add_generation_prompt:
        losses += _missing_results(asked_at, calls, answered)
    return sorted(losses, key=lambda loss: loss.index)


def _unknown_keys(message: Mapping[str, Any], index: int) -> list[Loss]:
    known = _KEYS_OF_ALL | _KNOWN_KEYS[message["role"]]
    unknown = sorted(str(key) for key in message if message[key] and key not in known)
    if not unknown:
        return []
    return [Loss(index, f"{', '.join(unknown)} of a message of role {message['role']} cannot be told to the model")]


def _missing_results(asked_at: int | None, calls: Sequence[GivenCall], answered: set[int]) -> list[Loss]:
    missing = len(calls) - len(answered)
    if asked_at is None or missing <= 0:
        return []
    return [Loss(asked_at, f"{missing} of its {len(calls)} tool calls have no result: send a tool message for each")]


def _shared_ids(calls: Sequence[GivenCall], index: int) -> list[Loss]:
    ids = [call.id for call in calls if call.id is not None]
    repeated = len(ids) - len(set(ids))
    if not repeated:
        return []
    return [
        Loss(index, f"{repeated} of {len(calls)} tool calls have the id of another: results go to the first of them")
    ]


def _lost_reasoning(request: ChatRequest, message: Mapping[str, Any], index: int) -> list[Loss]:
    if request.is_partial and index == len(request.messages) - 1:
        return []
    reasoning, other = reasoning_of(message, index), message.get("reasoning")
    if reasoning.strip() and not request.thinking:
        text = f"thinking is off, so its reasoning ({len(reasoning):,} characters) is left out"
        return [Loss(index, f"{text}: turn thinking on, or remove the reasoning")]
    if other and other != reasoning:
        return [
            Loss(
                index, f"reasoning_content and reasoning differ, and reasoning ({len(other):,} characters) is left out"
            )
        ]
    if not request.thinking or reasoning.strip():
        return []
    if reasoning:
        text = f"its reasoning is {len(reasoning)} blank characters, which the family writes as no reasoning"
        return [Loss(index, text, can_be_repaired=False)]
    if num_calls := len(message.get("tool_calls") or []):
        text = f"tool_calls ({num_calls}) without reasoning_content: send back the assistant message as it was returned"
        return [Loss(index, text)]
    return [Loss(index, "no reasoning_content: the model sees that it did not think", can_be_repaired=False)]
