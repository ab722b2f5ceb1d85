"""Request bodies of OpenAI's routes: chat messages, sampling parameters, and the tasks that they describe."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, model_validator
from pydantic_core import PydanticCustomError

from specjax.checkpoint.prompts import Chat
from specjax.engine.chat.message_format import AnswerForm, Effort, effort_variables
from specjax.engine.chat.tools import Tools
from specjax.engine.grammar import MAX_SOURCE, Grammar, GrammarError
from specjax.engine.sampling_params import GRAMMARS, SamplingParams
from specjax.limits import ParameterError, setting_of
from specjax.serve.errors import INVALID, ApiError, bad_request, shown
from specjax.serve.fields import (
    UNSUPPORTED,
    Bias,
    Body,
    Flag,
    Integer,
    Metadata,
    Number,
    Patterns,
    Salt,
    Stop,
    StopIds,
    Text,
    Values,
    at_most,
    texts,
)
from specjax.serve.tokenising import Rules, Task, check_capacity, read_prompts, refusal
from specjax.serve.tools import ToolFields, refused

MAX_MESSAGES = 2**14  # messages of a chat, parts of a message
MAX_CALLS = 2**10  # tool calls of a message
MAX_NAMES = 64  # variables of the chat template


def _arguments(value: Any, info: Any) -> Any:
    """Arguments of a call as an object, the form for templates. OpenAI's clients send the JSON text of a model.

    Text that is not a JSON object stays unchanged: a model's mistake must not end the conversation.
    """
    if not isinstance(value, str | dict | None):
        raise PydanticCustomError("arguments", "must be an object or a string")
    if not isinstance(value, str):
        return value or {}
    try:
        arguments = info.context.parse(value.encode()) if value.strip() else {}  # a function without parameters
    except ApiError as error:
        if error.status != 400:
            raise
        return value
    return arguments if isinstance(arguments, dict) else value


CallArguments = Annotated[
    Any,
    BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any] | None),
    Field(validate_default=True, description="An object, or its JSON text."),
]


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Text
    arguments: CallArguments = None


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: ToolFunction


class TextPart(Body):
    type: Literal["text"]
    text: Text


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
Content = Annotated[
    Parts, texts("text parts", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | Parts)
]


class Message(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {
        "refusal": ("",), "audio": (), "function_call": (), "tools": ([],), "prefix": (False,), "partial": (False,),
    }  # fmt: skip

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="Null only beside tool_calls.")
    name: Text | None = None
    reasoning_content: Text | None = Field(None, description="Reasoning of the assistant; templates may omit it.")
    reasoning: Text | None = Field(None, description="vLLM's name of `reasoning_content`.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    annotations: Any = None  # part of an answer that a client sends back; not used

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            problem = "has tool_calls, which belong to the assistant, not to {role}"
            raise PydanticCustomError("tool_calls", problem, {"role": self.role})
        if self.reasoning and self.reasoning_content not in (None, "", self.reasoning):
            raise PydanticCustomError(
                "reasoning", "has reasoning_content and reasoning, which differ: send one of them"
            )
        if self.reasoning:
            self.reasoning_content = self.reasoning
        if self.reasoning_content and self.role != "assistant":
            problem = "has reasoning_content, which belongs to the assistant, not to {role}"
            raise PydanticCustomError("reasoning_content", problem, {"role": self.role})
        if self.content is None and not self.tool_calls:
            problem = "needs a content: a string, a list of text parts, or null beside tool_calls"
            raise PydanticCustomError("content", problem)
        return self

    def for_template(self) -> dict[str, Any]:
        """The message with a string as content. `developer` is OpenAI's newer name of `system`."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content or ())}
        others = ("name", "tool_call_id", "reasoning_content")
        message |= {name: value for name in others if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class ChatFields(Body):
    """For all routes with messages."""

    sanitize_control_tokens: Flag | None = Field(
        None, description="Names of control tokens in the messages are text. Default: `--sanitize-control-tokens`."
    )

    def sanitized(self, chat: Chat, default: bool) -> Chat:
        chosen = self.sanitize_control_tokens
        return Chat(chat, chat.template, sanitize_control_tokens=default if chosen is None else chosen)


class TemplateFields(Body):
    """Arguments of the chat template."""

    add_generation_prompt: Flag | None = Field(
        None, description="Begin a message of the assistant. Default: true, false with `continue_final_message`."
    )
    continue_final_message: Flag | None = Field(
        None, description="Continue the last message, which is the assistant's."
    )
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_NAMES), at_most(MAX_NAMES)] | None = Field(
        None, description="Variables of the chat template."
    )

    def chat(self, messages: list[Message]) -> Chat:
        """The prompt. Raises an ApiError if fields exclude each other, or the last message cannot continue."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                problem = "and add_generation_prompt exclude each other: continue the last message, or begin a new one"
                raise bad_request(f"continue_final_message {problem}", "continue_final_message")
            if messages[-1].role != "assistant" or messages[-1].content is None:
                problem = f"needs an assistant's message with content at the end, not one of the {messages[-1].role}"
                raise bad_request(f"continue_final_message {problem}", "continue_final_message")
        fields = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        variables = self.chat_template_kwargs or {}
        if taken := next((name for name in (*fields, "tools") if name in variables), None):
            raise bad_request(f"chat_template_kwargs may not set {taken}, a field of the body", "chat_template_kwargs")
        fields = {name: value for name, value in fields.items() if value is not None}
        return Chat([message.for_template() for message in messages], {**variables, **fields})


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]


Source = Annotated[Text, Field(min_length=1, max_length=MAX_SOURCE)]


# `Grammar.json` checks the schema.
JsonSchema = SkipValidation[dict[str, Any] | str | None]


with warnings.catch_warnings():
    # pydantic's base class has a deprecated method of this name.
    warnings.filterwarnings("ignore", message='Field name "schema"')

    class JsonSchemaFormat(Body):
        name: Text | None = None
        description: Text | None = None
        schema: JsonSchema = Field(None, description="Default: any object.")  # type: ignore[assignment]
        strict: Flag | None = Field(None, description="Schemas are always followed.")


def grammar_of_type(name: str, schema: Any) -> Grammar | None:
    """The grammar of a format's `type`. Without a schema it is any JSON object."""
    if name == "text":
        return None
    return Grammar("json_schema") if name == "json_object" or schema is None else Grammar.json(schema)


class ResponseFormat(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"schema": ()}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="Needs the type `json_schema`.")

    def chosen(self) -> Grammar | None:
        if self.type == "json_schema" and self.json_schema is None:
            raise bad_request("response_format.json_schema is required", "response_format")
        return grammar_of_type(self.type, None if self.json_schema is None else self.json_schema.schema)


Convert = Callable[[Any], Grammar | None]
FIELDS: dict[str, Convert] = {"response_format": ResponseFormat.chosen} | {
    name: GRAMMARS[name] for name in ("json_schema", "regex", "ebnf")
}
"""Maps fields to their grammar."""


def chosen(body: Body, fields: Mapping[str, Convert] = FIELDS, place: str = "") -> tuple[str | None, Grammar | None]:
    """The field that requests structured output, and its grammar. Raises an ApiError, a 400, if a field is wrong, or
    there are several."""
    grammars, root = dict[str, Grammar](), place.partition(".")[0]
    for name, convert in fields.items():
        if (value := getattr(body, name, None)) is None or name not in type(body).model_fields:
            continue
        try:
            grammar = convert(value)
        except GrammarError as error:
            raise bad_request(f"{place}{name} {error}", root or name, INVALID) from error
        if grammar is not None:
            grammars[name] = grammar
    if len(grammars) > 1:
        several = ", ".join(place + name for name in grammars)
        raise bad_request(f"{several} ask for different forms of output: give one", root or next(iter(grammars)))
    return next(iter(grammars.items()), (None, None))


COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for completions
DEFAULT_MODEL = "default"  # SGLang's clients call any model by this name

NewTokens = Annotated[Integer, Field(ge=1)]
Seed = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]
# `read_prompts` checks prompts against the limits of the server.
Texts: TypeAlias = str | list[str]
Ids: TypeAlias = list[int] | list[list[int]]


def parameter(name: str, description: str | None = None) -> Any:
    """An optional number in the range of the parameter `name` of `SamplingParams`."""
    limits = setting_of(SamplingParams, name).range
    return Field(None, ge=limits.minimum, gt=limits.above, le=limits.maximum, description=description)


EFFORT = "Variable `reasoning_effort` of the chat template; none = no thoughts. Also over `chat_template_kwargs`."


class StreamOptions(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"include_obfuscation": (False,)}

    include_usage: Flag | None = None


class CustomParams(Body):
    thinking_budget: Annotated[Integer, Field(ge=-1)] | None = Field(
        None, description="SGLang's name of `thinking_token_budget`."
    )


class SamplingFields(Body):
    """Fields whose names are equal in all interfaces, and in `SamplingParams`."""

    asked: ClassVar[Mapping[str, Convert]] = FIELDS  # fields that request structured output
    place: ClassVar[str] = ""  # prefix of the fields in messages

    n: Annotated[Integer, Field(ge=1, le=128)] | None = Field(
        None, description="Number of choices. Choice i uses seed + i."
    )
    stop: Stop | None = Field(None, description="The text ends before a stop string. Separated reasoning may hold one.")
    stop_regex: Patterns | None = Field(
        None,
        description="Regular expressions in RE2's syntax. The text ends before a match of at most 1,024 characters. "
        "Separated reasoning may hold one.",
    )
    temperature: Number | None = parameter("temperature", "0 = greedy.")
    top_p: Number | None = parameter("top_p")
    top_k: Integer | None = parameter("top_k", "-1 and 0 = off.")
    min_p: Number | None = parameter("min_p")
    frequency_penalty: Number | None = parameter("frequency_penalty")
    presence_penalty: Number | None = parameter("presence_penalty")
    repetition_penalty: Number | None = parameter("repetition_penalty")
    seed: Seed | None = Field(None, description="The answer has the seed. Default: a random one below 2^53.")
    sampling_seed: Seed | None = Field(None, description="SGLang's name for the seed.")
    logit_bias: Bias | None = Field(None, description="Token ids to numbers that are added to their logits.")
    ignore_eos: Flag | None = None
    stop_token_ids: StopIds | None = Field(
        None, description="Token ids that end the text, also in reasoning. Ids outside the vocabulary are ignored."
    )
    thinking_token_budget: Annotated[Integer, Field(ge=-1)] | None = Field(
        None,
        description="Maximum number of tokens of reasoning, after which its end is forced; -1 = no limit. Without "
        "effect if the model has no tokens around its reasoning.",
    )
    custom_params: CustomParams | None = None
    skip_special_tokens: Flag | None = None
    no_stop_trim: Flag | None = Field(None, description="Keep the stop string in the text.")
    draft_limit: Integer | None = parameter(
        "draft_limit", "Maximum number of drafts in a step, 0 = none. Changes the speed, never the text."
    )
    regex: Source | None = Field(None, description="Regular expression that the whole text matches.")
    ebnf: Source | None = Field(
        None, description="Grammar of the text: Lark with the rule `start`, or GBNF with the rule `root`."
    )

    @property
    def names(self) -> dict[str, str]:
        """Maps names of `SamplingParams` to names of the request, if they differ."""
        return {"grammar": chosen(self, self.asked, self.place)[0] or "grammar"}

    def params(self, rules: Rules, **more: Any) -> SamplingParams:
        """Sampling parameters: the request's values, else the model's defaults, else temperature 1. `more`: parameters
        without a field of the same name. Raises an ApiError."""
        more.setdefault("grammar", chosen(self, self.asked, self.place)[1])
        names = {field.name for field in dataclasses.fields(SamplingParams)} & set(type(self).model_fields)
        values = {name: getattr(self, name) for name in names} | more
        if self.sampling_seed is not None:
            if self.seed not in (None, self.sampling_seed):
                problem = f"sampling_seed and seed are the same parameter, got {self.sampling_seed} and {self.seed}"
                raise bad_request(problem, "sampling_seed")
            values["seed"] = self.sampling_seed
        if self.top_k == 0:
            values["top_k"] = -1
        custom = None if self.custom_params is None else self.custom_params.thinking_budget
        budgets = {self.thinking_token_budget, custom, more.get("thinking_token_budget")} - {None}
        if len(budgets) > 1:
            others = "custom_params.thinking_budget and thinking.budget_tokens"
            problem = f"and its other names {others} differ: {', '.join(map(str, sorted(budgets)))}"
            raise bad_request(f"thinking_token_budget {problem}", "thinking_token_budget")
        values["thinking_token_budget"] = next(iter(budgets - {-1}), None)
        # None is a value of these two parameters; for the others it means the default.
        optional = ("max_new_tokens", "logprobs")
        values = {name: value for name, value in values.items() if value is not None or name in optional}
        try:
            return SamplingParams.from_mapping({"temperature": 1.0, **rules.defaults, **values})
        except ParameterError as error:
            raise refusal(error, self.names) from error


class TaskBody(Body):
    """A body that describes a task for the engine."""

    priority: Integer | None = parameter(
        "priority", "Waiting requests with a higher priority run first, as in SGLang. Default: 0."
    )
    stream: Flag | None = None
    cache_salt: Salt | None = Field(None, description="Requests with different salts share no cached text.")

    @abstractmethod
    def task(self, rules: Rules) -> Task:
        """The task for the engine, before its prompts are tokenised. Safe in any thread. Raises an ApiError for fields
        that exclude each other or exceed the server's limits."""


class UnusedFields(Body):
    """Fields of OpenAI's that are accepted and have no effect."""

    user: Text | None = None
    metadata: Metadata | None = None
    store: Flag | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None


class OpenAIRequest(SamplingFields, TaskBody, UnusedFields):
    """Fields that chat completions and completions share."""

    unsupported = UNSUPPORTED

    model: Text | None = None
    max_tokens: NewTokens | None = Field(None, description="New tokens.")
    min_tokens: Integer | None = parameter("min_new_tokens", "No stop id comes before.")
    stream_options: StreamOptions | None = Field(None, description="Needs `stream`.")
    return_speculative_metrics: Flag | None = Field(None, description="`speculative`, with SGLang's names.")
    return_speculative_tokens: Flag | None = Field(
        None, description="`choices[].speculative.tokens`: each token's text, and whether it was an accepted draft."
    )
    response_format: ResponseFormat | None = Field(None, description="JSON is written on one line.")

    def sampling(self, rules: Rules, logprobs: int | None, **more: Any) -> SamplingParams:
        """As `params`, after checking the model and relations between fields."""
        check_model(self.model, rules.model)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        return self.params(
            rules,
            max_new_tokens=getattr(self, self.names["max_new_tokens"]),
            min_new_tokens=self.min_tokens,
            logprobs=logprobs,
            origins=self.return_speculative_tokens,
            **more,
        )

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def check_model(name: str | None, served: str) -> None:
    """Raises an ApiError, a 404, if there is no model of that name."""
    if name not in (None, DEFAULT_MODEL, served):
        problem = f"no model {shown(name)} here; this server has {served!r}"
        raise ApiError(404, problem, param="model", code="model_not_found")


class ChatRequest(OpenAIRequest, ToolFields, TemplateFields, ChatFields):
    unsupported = UNSUPPORTED | {
        "modalities": (["text"],), "audio": (), "prediction": (),
        "verbosity": ("medium",), "web_search_options": (), "moderation": (),
        "add_special_tokens": (False,), "chat_template": (), "documents": ([],), "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},), "stream_reasoning": (True,),
    }  # fmt: skip

    messages: Messages
    reasoning_effort: Effort | None = Field(None, description=EFFORT)
    max_completion_tokens: NewTokens | None = Field(None, description="Wins over `max_tokens`. Default: what fits.")
    logprobs: Flag | None = None
    top_logprobs: Integer | None = parameter("logprobs", "Needs `logprobs`.")

    @property
    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().names | {"max_new_tokens": limit}

    def task(self, rules: Rules) -> Task:
        check_capacity(self.n or 1, 1, rules, "messages")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        make = functools.partial(self.sampling, rules, logprobs)
        effort = ("reasoning_effort", self.reasoning_effort)

        def chat() -> Chat:
            return self.sanitized(self.chat(self.messages), rules.sanitize_control_tokens)

        task = chat_task(self, self, chat, rules, make, "messages", effort)
        return dataclasses.replace(task, n=self.n or 1)


def with_tools(chat: Chat, form: AnswerForm, tools: Tools, effort: tuple[str, str | None]) -> Chat:
    """A chat for the model's template, with earlier calls in the model's form and the offered functions. `effort`: as
    in `chat_task`. Raises an ApiError for an unsupported effort."""
    field, value = effort
    if value is not None and form.efforts is not None and value not in form.efforts:
        problem = f"{field} {value!r} is not supported by this model's chat template; it supports"
        raise bad_request(f"{problem} {', '.join(form.efforts)}", field, "unsupported")
    return tools.chat(form, chat, chat, **effort_variables(value))


def chat_task(
    body: SamplingFields,
    functions: ToolFields,
    chat: Callable[[], Chat],
    rules: Rules,
    make: Callable[..., SamplingParams],
    field: str,
    effort: tuple[str, str | None],
) -> Task:
    """The task of a chat whose answer may hold calls and reasoning, and may follow a grammar.

    Args:
        functions: the functions of `body`, in the form of chat completions.
        make: makes the sampling parameters; called with the fields of `Tools.plan`.
        field: name of the field with the prompt, which `chat` makes.
        effort: the field with the effort of reasoning, and its value.
    """
    form, hide = rules.form, body.skip_special_tokens is not False
    tools = functions.chosen(form)
    asks, answer = chosen(body, body.asked)
    with refused():
        reply, fields = tools.plan(form, answer, asks, hide=hide)
    params = make(**fields)
    names = body.names | ({} if fields["grammar"] is answer else {"grammar": "tools"})
    return Task([with_tools(chat(), form, tools, effort)], [params], [names], prompt_field=field, reply=reply)


class CompletionRequest(OpenAIRequest):
    prompt: SkipValidation[Texts | Ids]
    max_tokens: Integer | None = parameter(
        "max_new_tokens", f"New tokens; 0 only with `echo`. Default: {COMPLETION_TOKENS}, or as many as fit."
    )
    echo: Flag | None = Field(None, description="Return the prompt before the text, with its `logprobs`.")
    logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = None  # OpenAI's limit

    def task(self, rules: Rules) -> Task:
        choices = self.n or 1
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens must be at least 1, got 0, without echo: true", "max_tokens")
        start = 0 if self.echo and self.logprobs is not None else None
        sampling = self.sampling(rules, self.logprobs, logprob_start_len=start)
        prompts = read_prompts(self.prompt, "prompt", choices, rules)
        every = len(prompts)
        return Task(prompts, [sampling] * every, [self.names] * every, choices, most=COMPLETION_TOKENS)
