"""The form of a model's answers: the format of function calls and reasoning, from its chat template or flags.

A template that writes functions into the prompt also describes the format of calls: words in it select the parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from specjax.checkpoint.prompts import END_THINK, THINK
from specjax.serve.calls import (
    CallParser,
    DeepSeek,
    DeepSeek31,
    Glm,
    Hermes,
    KimiK2,
    Llama3,
    Mistral,
    MistralNamed,
    QwenCoder,
)

AUTO, NONE = "auto", "none"
PARSERS: dict[str, type[CallParser]] = {
    "qwen": Hermes,
    "qwen25": Hermes,
    "hermes": Hermes,
    "qwen3_coder": QwenCoder,
    "glm": Glm,
    "glm45": Glm,
    "kimi_k2": KimiK2,
    "llama3": Llama3,
    "mistral": Mistral,
    "deepseekv3": DeepSeek,
    "deepseekv31": DeepSeek31,
}
"""The formats of function calls by SGLang's names."""
# Words of a template, and the parser for a template that has them all; None: an unsupported format.
_FORMATS: tuple[tuple[tuple[str, ...], type[CallParser] | None], ...] = (
    (("<tool_call>", "<function=", "<parameter="), QwenCoder),
    (("<function=",), None),  # other models
    (("<tool_call>", "<arg_key>", "<arg_value>"), Glm),
    (("<|tool_call_argument_begin|>",), KimiK2),
    (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"), DeepSeek),
    (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), DeepSeek31),
    (("[TOOL_CALLS]", "[ARGS]"), MistralNamed),
    (("[TOOL_CALLS]",), Mistral),
    (("<tool_call>", '"arguments"'), Hermes),
    (("<|python_tag|>",), Llama3),
    (("ipython",), Llama3),  # Llama 3.2
)
_PROBE = {"name": "specjax_probe", "description": "d", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class AnswerForm:
    """Parts of a model's answers other than plain text.

    Attributes:
        parser: reads function calls; None: their format is unsupported.
        takes_tools: True if the chat template writes functions into the prompt.
        thinks: True if the model may reason before it answers.
        special: markers of calls and reasoning that are special tokens.
        tokens: ids of the markers that are tokens.
    """

    parser: type[CallParser] | None = None
    takes_tools: bool = False
    thinks: bool = False
    special: frozenset[str] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def end_think(self) -> int | None:
        """The token that ends reasoning, if there is one."""
        return self.tokens.get(END_THINK)

    @property
    def refusal(self) -> str | None:
        """The reason why requests cannot have functions; None if they can."""
        if not self.takes_tools:
            return "the chat template of this model has no place for functions; use another one (--chat-template)"
        if self.parser is None:
            return "the format of this model's calls is unknown; set it with --tool-call-parser"
        return None

    def for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages with earlier calls in the form of the model's template."""
        if self.parser is None:
            return list(messages)
        adapted = [_adapted(message, self.parser) for message in messages]
        return _numbered(adapted) if self.parser.numbered_ids else adapted


PLAIN = AnswerForm()  # text without calls and reasoning


def answer_form(tokenizer: Any, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerForm:
    """The form of a model's answers.

    Args:
        tool_call_parser: a name of `PARSERS`, or auto or none.
        reasoning_parser: auto, none, or any other value for a model that reasons.
    """
    if not getattr(tokenizer, "chat_template", None):
        return AnswerForm()
    source = _source(tokenizer)
    vocabulary = tokenizer.get_added_vocab()
    thinks = reasoning_parser != NONE
    if reasoning_parser == AUTO:
        thinks = END_THINK in source or END_THINK in vocabulary
    parser = PARSERS.get(tool_call_parser)
    if tool_call_parser == AUTO:
        parser = next((kind for words, kind in _FORMATS if all(word in source for word in words)), None)
    markers = {*(parser.markers() if parser else ()), *((THINK, END_THINK) if thinks else ())}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return AnswerForm(
        parser=parser,
        takes_tools=_takes_tools(tokenizer, source),
        thinks=thinks,
        special=frozenset(markers & special),
        tokens={marker: vocabulary[marker] for marker in sorted(markers) if marker in vocabulary},
    )


def _source(tokenizer: Any) -> str:
    """The chat template for requests with functions."""
    try:
        return tokenizer.get_chat_template(tools=[_PROBE])
    except Exception:  # several templates and no default
        return str(tokenizer.chat_template)


def _takes_tools(tokenizer: Any, source: str) -> bool:
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template is a program, and may refuse the example
        return "tools" in source
    return _PROBE["name"] in text


def _adapted(message: Mapping[str, Any], parser: type[CallParser]) -> Mapping[str, Any]:
    if parser.id_length is not None and isinstance(message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": short_id(message["tool_call_id"], parser.id_length)}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        call = dict(call)
        if parser.id_length is not None and isinstance(call.get("id"), str):
            call["id"] = short_id(call["id"], parser.id_length)
        if parser.text_arguments:
            call["function"] = {**call["function"], "arguments": _as_text(call["function"]["arguments"])}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _numbered(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose ids of calls and results name the function and the number of the call."""
    ids: dict[Any, str] = {}
    numbered: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                ids[call.get("id")] = id = f"functions.{call['function']['name']}:{len(ids)}"
                calls.append({**call, "id": id})
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        numbered.append(message)
    return numbered


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def short_id(id: str, length: int) -> str:
    """The id if it has `length` letters and digits, else `length` digits of its hash."""
    if len(id) == length and id.isascii() and id.isalnum():
        return id
    return blake2b(id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()[:length]
