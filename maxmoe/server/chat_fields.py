"""The body of a chat completion."""

from typing import Annotated, Any, Literal

from pydantic import Field

from maxmoe.server.fields import Count, ExtendedSamplingFields, Fields, Items, OpenFields, PositiveCount, TokenId

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=256)]


class ContentPart(OpenFields):
    """Of a message's content."""

    type: str
    text: str | None = None


class CallFunction(OpenFields):
    """What a call calls, its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(OpenFields):
    """Of an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CallFunction


class Function(OpenFields):
    """Of a tool; it is told to the model as it is given."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = None


class Tool(OpenFields):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class Message(OpenFields):
    """Of the conversation. What the model cannot be told of it counts as lost history, and is judged as such."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="An assistant's thinking; send back what was received.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: Items[Tool] | None = Field(None, description="Of a system message without content: more tools.")
    partial: bool | None = Field(None, description="Of the last message: whether the model goes on with it.")


class ChosenFunction(Fields):
    """Its name."""

    name: str


class ChosenTool(Fields):
    """One tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Fields):
    """What answers shall conform to."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """The form of answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Fields):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(Fields):
    """Whether to think; earlier thinking is always kept."""

    type: Literal["enabled", "disabled"] | None = None
    keep: Literal["all"] | None = None
    effort: str | None = None


class TemplateKwargs(Fields):
    """Names that other servers have for settings of thinking."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None


class ResumeFields(ExtendedSamplingFields):
    """What a chat says besides the conversation."""

    max_tokens: PositiveCount | None = Field(None, description="Thinking included. Default: 131,072 or what fits.")
    max_completion_tokens: PositiveCount | None = Field(None, description="The newer name of max_tokens.")
    stream_options: StreamOptions | None = None
    logprobs: bool | None = Field(None, description="Of the tokens of visible text.")
    top_logprobs: Count | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false ends the answer after one call.")
    response_format: ResponseFormat | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Thinking is ended after so many tokens; -1 sets no limit."
    )
    thinking_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | str | None = Field(
        None, description="low, high or max: the same as reasoning_effort. A number: thinking_token_budget."
    )
    history: Literal["strict", "lenient"] | None = Field(
        None, description="Whether a request that would lose history is refused, or answered with warnings."
    )
    metadata: dict[str, str] | None = Field(None, description="Has no effect.")
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect: prefixes are found without.")


class ChatFields(ResumeFields):
    """A chat completion."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    tools: Items[Tool] | None = None
    reasoning_effort: str | None = Field(None, description="low, high, max (the default), or none for no thinking.")
    thinking: Thinking | bool | None = None
    thinking_effort: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None


class SessionResumeFields(ResumeFields):
    """Going on with a session: new messages alone; none where its last answer was cut off."""

    messages: Items[Message] | None = None


class TokenizeFields(Fields):
    """Text, or a conversation."""

    model: str | None = None
    prompt: str | None = Field(None, description="Text; markers in it are read as such.")
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Items[Tool] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """Ids to make text of."""

    model: str | None = None
    tokens: Items[TokenId]
