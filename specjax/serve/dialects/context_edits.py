"""Anthropic's context editing (`context_management`): clears old thoughts and results of functions from a chat.

The edits apply in order to the messages before the chat template. An edit that clears nothing is not reported.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from specjax.checkpoint.prompts import Chat, encode
from specjax.engine.intake import Intake
from specjax.serve.errors import bad_request
from specjax.serve.fields import Body, Flag, Integer, Text, at_most
from specjax.serve.message_format import AnswerForm

CLEARED = "[Old tool result content cleared]"  # replaces the content of a result
MAX_EDITS = 16
MAX_NAMES = 2**10  # names of functions in an edit

Messages: TypeAlias = list[dict[str, Any]]
Count: TypeAlias = Callable[[Messages], int]  # number of tokens of a prompt with these messages
NotNegative = Annotated[Integer, Field(ge=0)]
Names = Annotated[list[Text], Field(max_length=MAX_NAMES, fail_fast=True), at_most(MAX_NAMES)]


@dataclass
class Counted:
    """Messages of a chat, whose tokens are counted once, and only if an edit asks for them."""

    messages: Messages
    count: Count

    @functools.cached_property
    def tokens(self) -> int:
        return self.count(self.messages)


class InputTokens(Body):
    type: Literal["input_tokens"]
    value: NotNegative


class ToolUses(Body):
    type: Literal["tool_uses"]
    value: NotNegative


class ThinkingTurns(Body):
    type: Literal["thinking_turns"]
    value: Annotated[Integer, Field(ge=1)]


class AllTurns(Body):
    type: Literal["all"]


class Edit(Body):
    counted: ClassVar[str] = ""  # name of the number of cleared parts in the answer
    type: Any

    @abstractmethod
    def clear(self, chat: Counted) -> tuple[Counted, int]:
        """Returns the messages after the edit, and the number of cleared parts. Raises an ApiError."""


def _as_object(value: Any) -> Any:
    return {"type": "all"} if value == "all" else value


class ClearThinking(Edit):
    counted = "cleared_thinking_turns"
    type: Literal["clear_thinking_20251015"]
    keep: Annotated[
        Annotated[ThinkingTurns | AllTurns, Field(discriminator="type")],
        BeforeValidator(_as_object, json_schema_input_type=Literal["all"] | ThinkingTurns | AllTurns),
    ] | None = Field(None, description="Last turns whose thoughts stay. Default: one.")  # fmt: skip

    def clear(self, chat: Counted) -> tuple[Counted, int]:
        if isinstance(self.keep, AllTurns):
            return chat, 0
        turns = [*itertools.accumulate(message["role"] == "user" for message in chat.messages)]
        numbered = [*zip(turns, chat.messages, strict=True)]
        thinking = {turn for turn, message in numbered if "reasoning_content" in message}
        old = sorted(thinking)[: -1 if self.keep is None else -self.keep.value]
        edited = [
            {name: value for name, value in message.items() if name != "reasoning_content" or turn not in old}
            for turn, message in numbered
        ]
        return replace(chat, messages=edited), len(old)


class ClearToolUses(Edit):
    counted = "cleared_tool_uses"
    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] | None = Field(
        None, description="Clear if the prompt has more than these tokens or calls. Default: 100,000 tokens."
    )
    keep: ToolUses | None = Field(None, description="Last calls whose results stay. Default: three.")
    clear_at_least: InputTokens | None = Field(None, description="Clear nothing if fewer tokens would go.")
    exclude_tools: Names | None = Field(None, description="Functions whose results stay.")
    clear_tool_inputs: Flag | Names | None = Field(
        None, description="true, or names of functions: their arguments are cleared, too."
    )

    def clear(self, chat: Counted) -> tuple[Counted, int]:
        names = {call["id"]: call["function"]["name"] for m in chat.messages for call in m.get("tool_calls", ())}
        trigger = self.trigger or InputTokens(type="input_tokens", value=100_000)
        size = len(names) if isinstance(trigger, ToolUses) else chat.tokens
        if size <= trigger.value:
            return chat, 0
        excluded, count_old = self.exclude_tools or (), len(names) - (3 if self.keep is None else self.keep.value)
        old = set([*names][: max(count_old, 0)])
        results = {m["tool_call_id"] for m in chat.messages if m["role"] == "tool" and m["content"] != CLEARED}
        old = {id for id in old & results if names[id] not in excluded}
        emptied = self.clear_tool_inputs if isinstance(self.clear_tool_inputs, list) else names.values()
        emptied = {id for id in old if self.clear_tool_inputs and names[id] in emptied}
        edited = Messages()
        for message in chat.messages:
            if message["role"] == "tool" and message["tool_call_id"] in old:
                message = message | {"content": CLEARED}
            elif own := message.get("tool_calls"):
                message = message | {"tool_calls": [_emptied(call) if call["id"] in emptied else call for call in own]}
            edited.append(message)
        after, least = replace(chat, messages=edited), 0 if self.clear_at_least is None else self.clear_at_least.value
        if least and chat.tokens - after.tokens < least:
            return chat, 0
        return after, len(old)


def _emptied(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": {}}}


class Compact(Edit):
    type: Literal["compact_20260112"]
    trigger: InputTokens | None = Field(None, description="Default: 150,000 tokens.")
    instructions: Text | None = None
    pause_after_compaction: Flag | None = None

    def clear(self, chat: Counted) -> tuple[Counted, int]:
        most = 150_000 if self.trigger is None else self.trigger.value
        if chat.tokens > most:
            problem = f"is supported only below its trigger of {most} tokens; this prompt has {chat.tokens}"
            hint = "compact the conversation in the client, or clear tool results (clear_tool_uses_20250919)"
            raise bad_request(f"context_management.edits: {self.type} {problem}: {hint}", "context_management")
        return chat, 0


Edits = Annotated[
    list[Annotated[ClearThinking | ClearToolUses | Compact, Field(discriminator="type")]],
    Field(max_length=MAX_EDITS, fail_fast=True),
    at_most(MAX_EDITS),
]


class ContextManagement(Body):
    edits: Edits | None = Field(None, description="Applied in order. Compaction is refused above its trigger.")


@dataclass
class EditedChat:
    """A chat whose edits need its number of tokens, and so the tokenizer.

    Attributes:
        applied: the edits that cleared something, in the form of Anthropic's answers.
    """

    edits: list[Edit]
    chat: Chat
    form: AnswerForm
    template: Mapping[str, Any]  # variables of the chat template
    applied: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, intake: Intake) -> Chat:
        """Returns the edited chat. Raises an ApiError for an edit that is unsupported for this chat, ValueError for a
        chat that the template refuses."""
        count = functools.partial(self.count, intake)
        messages, self.applied = apply_edits(self.edits, [*map(dict, self.chat)], count)
        return self._rendered(messages)

    def count(self, intake: Intake, messages: Iterable[Mapping[str, Any]]) -> int:
        """Number of tokens of the prompt with other messages. It may exceed the context, which edits can mend."""
        return len(encode(self._rendered(messages), intake.tokenizer, intake.vocab_size))

    def _rendered(self, messages: Iterable[Mapping[str, Any]]) -> Chat:
        return Chat(self.form.for_template([*messages]), self.template)


def apply_edits(edits: Iterable[Edit], messages: Messages, count: Count) -> tuple[Messages, list[dict[str, Any]]]:
    """Returns the edited messages, and the edits that cleared something in the form of Anthropic's answers. Raises an
    ApiError for an edit that is unsupported for these messages."""
    applied, chat = [], Counted(messages, count)
    for edit in edits:
        edited, parts = edit.clear(chat)
        if parts:
            tokens = max(chat.tokens - edited.tokens, 0)
            applied.append({"type": edit.type, edit.counted: parts, "cleared_input_tokens": tokens})
        chat = edited
    return chat.messages, applied
