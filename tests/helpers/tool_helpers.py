"""A model that answers from a script, and a tokenizer with the markers of all formats of function calls.

The last character of the last message, after a space, selects the answer. The model is a table
(`toy_models.table_model`): the last four tokens decide the next token, and after an answer comes the end token.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
from engine_helpers import END, LETTERS, NGRAM, SPECIAL, byte_level_bpe, make_engine
from toy_models import Toy, table_model, table_row
from transformers import PreTrainedTokenizerFast

from specjax.engine import Engine
from specjax.engine.chat.calls import Harmony
from specjax.engine.chat.message_format import PARSERS, Reply, ReplyOptions

PLAIN_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added tokens that are not special, as Qwen's
MARKERS = tuple(
    dict.fromkeys(
        marker
        for parser in PARSERS.values()
        if "<tool_call>" not in parser.begins and parser is not Harmony
        for marker in parser.markers()
        if "`" not in marker
    )
)
TEMPLATE = (
    '{% if tools %}# Tools\n<tool_call>{"name": ..., "arguments": {...}}</tool_call>\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ message.role }}:{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
ROWS = 4093

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOOP = {"type": "function", "function": {"name": "noop"}}
TOOLS = [WEATHER, NOOP]
FLAT: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
"""The tools in the form of `/v1/responses`."""
ANTHROPIC: list[Any] = [
    {"name": function["name"], "input_schema": function.get("parameters", {"type": "object"})}
    for function in (tool["function"] for tool in TOOLS)
]
"""The tools in the form of `/v1/messages`."""

CALLS = {  # the text of a call of NAME with the arguments JSON, by parser and further words
    "qwen": '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>',
    "qwen reversed": '<tool_call>{"arguments": JSON, "name": "NAME"}</tool_call>',
    "llama3": '{"name": "NAME", "parameters": JSON}',
    "llama3 tag": '<|python_tag|>{"name": "NAME", "parameters": JSON}',
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": JSON}]',
    "mistral named": "[TOOL_CALLS]NAME[ARGS]JSON",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "gpt-oss": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
}

# The answers, by the last character of the message before; "¦" separates tokens.
_SCRIPTS = {
    "a": 'Let me ¦look.¦\n¦<tool_call>¦\n{"name": ¦"get_weather", "ar¦guments": {"ci¦ty": "Par¦is"¦}}\n¦</tool_call>',
    "b": "It is ¦22 degrees¦ in Paris.",
    "c": '<tool_call>¦{"name": "noop", ¦"arguments": {}}¦</tool_call>¦\n\n¦<tool_call>¦{"name": "get¦_weather"¦, "argu'
    'ments": {"city": "Rome"¦}}\n\n¦</tool_call>',
    "d": '[TOOL_CALLS]¦ [{"name": "get_weather", "argum¦ents": {"city": "Bern"¦}}¦]',
    "e": "Hm.¦<｜tool▁calls▁begin｜>¦<｜tool▁call▁begin｜>¦function¦<｜tool▁sep｜>¦get_weather\n¦```json\n¦"
    '{"city": ¦"Oslo"}¦\n```¦<｜tool▁call▁end｜>¦<｜tool▁calls▁end｜>',
    "f": '<|python_tag|>¦{"name": "get_weather", "param¦eters": {"city": "Lima"¦}} ',
    "g": "<think>¦\nA city¦, so a call.\n¦</think>¦\n\n\n¦<tool_call>¦"
    '{"name": "noop"¦, "arguments"¦: {}¦}\n\n¦</tool_call>',
    "h": "[TOOL_CALLS]¦ none ¦[ARGS]¦ needed",
    "i": "<think>¦Nothing¦ to do.¦</think>¦Fine.",
    "s": "<think>¦The Ask: ¦goes easy.\n\n¦</think>¦\n\n¦It is four.¦ Ask: ¦me again.",
    "k": '<think>¦A city: ¦<tool_call>¦ {"name": "get¦_weather"¦, "arguments": {"ci¦ty": "Kyo¦to"¦}}\n¦</tool_call>',
    "l": '<think>¦Maybe ¦<tool_call>¦{"name": "noop", "arguments": {}}¦</tool_call>¦?¦</think>¦No.',
    "j": '<tool_call>¦{"name": "unknown", ¦"arguments": {}}!¦</tool_call>',
}
SCRIPTS: dict[str, list[str]] = {name: script.split("¦") for name, script in _SCRIPTS.items()}


@functools.cache
def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges. Markers and the pieces of the scripts are tokens."""
    pieces = dict.fromkeys(piece for script in SCRIPTS.values() for piece in script if piece not in MARKERS)
    core = byte_level_bpe(
        [*SPECIAL, *MARKERS], words=[*SPECIAL, *LETTERS], added=[*PLAIN_MARKERS, *pieces], merges=(), use_regex=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL[2], bos_token=SPECIAL[0], chat_template=TEMPLATE
    )


def scripted_model(
    tokenizer: Any,
    scripts: dict[str, list[str]],
    start: tuple[str, ...] = ("Ġ", "{}", "<|im_end|>", "<|im_start|>"),
    preferred: tuple[str, ...] = (",", "]", "}", '"', "<|im_end|>"),
) -> Toy:
    """A table model whose most likely text is the script, whatever comes before the last tokens of the prompt.

    `start`: these tokens; {} is the name of the script. `preferred`: tokens for other texts, the best last.
    """
    window = len(start)

    def ids(pieces: list[str]) -> list[int]:
        tokens = tokenizer.convert_tokens_to_ids(pieces)
        assert isinstance(tokens, list)
        return tokens

    answers = [(ids([token.format(key) for token in start]), ids(script)) for key, script in scripts.items()]
    return answering_model(len(tokenizer), answers, ids([*preferred]), window)


def answering_model(
    vocabulary: int, answers: list[tuple[list[int], list[int]]], preferred: list[int], window: int
) -> Toy:
    """A table model over the last `window` tokens. By its `answers`, tokens that end a prompt come before others; all
    other texts have the tokens `preferred`, the best last."""
    for stride in range(5, 400):
        following: dict[int, int] = {}
        for before, script in answers:
            tokens = list(before)
            for token in script:
                if following.setdefault(table_row(tokens, window, ROWS, stride), token) != token:
                    break
                tokens.append(token)
            else:
                continue
            break
        else:
            table = np.zeros((ROWS, vocabulary), np.float32)
            for preference, token in enumerate(preferred):
                table[:, token] = preference * 4  # ends the text of a grammar soon
            for row, token in following.items():
                table[row] = 0
                table[row, token] = 20
            return table_model(table, window, stride)
    raise AssertionError("every stride makes two contexts collide")


@functools.cache
def tool_engine() -> Engine:
    """An engine with n-gram drafts, and a context that is large enough for functions in the prompt."""
    model = scripted_model(tool_tokenizer(), {name: [*script, "<|im_end|>"] for name, script in SCRIPTS.items()})
    return scripted_engine(model, tool_tokenizer(), (END,))


def scripted_engine(model: Toy, tokenizer: Any, eos_ids: tuple[int, ...]) -> Engine:
    return make_engine(
        model, NGRAM, tokens=tokenizer, eos=eos_ids, page_size=16, max_total_tokens=8192, context_length=2048,
        chunked_prefill_size=256,
    )  # fmt: skip


def ask(last: str, **more: Any) -> dict[str, Any]:
    """Fields of a greedy chat whose answer is the script of this name."""
    return {"model": "toy", "messages": [{"role": "user", "content": f"Say {last}"}], "temperature": 0} | more


def hidden(name: str) -> frozenset[str]:
    """Markers of a parser that are special tokens; Qwen's are not."""
    parser = PARSERS[name]
    return frozenset() if "<tool_call>" in parser.begins else frozenset(parser.markers())


def divisions(text: str) -> list[list[str]]:
    """The text whole, by character, without its last character, and in random pieces."""
    cuts = sorted(random.Random(text).choices(range(len(text) + 1), k=6))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [[text], [*text], [text[:-1], text[-1:]], pieces]


def read_in_pieces(reply: Reply, pieces: list[str]) -> dict[str, Any]:
    """The message of an answer, without ids of calls, and what the reply says of it. The deltas add up to it."""
    deltas = [delta for piece in pieces for delta in reply.feed(piece)] + reply.feed("", last=True)
    message = reply.message()
    assert all(len(delta) == 1 and all(delta.values()) for delta in deltas)
    assert joined(deltas) == {"reasoning_content": None} | message
    assert reply.has_called <= ("tool_calls" in message)
    for call in message.get("tool_calls", ()):
        call["id"] = ""
    return message | {"has_called": reply.has_called, "has_thought": reply.has_thought}


def read(options: ReplyOptions, text: str, *, thinking: bool = False) -> dict[str, Any]:
    """The message, which is the same for all divisions of the text."""
    message, *others = (read_in_pieces(options.reply(thinking=thinking), pieces) for pieces in divisions(text))
    assert others == [message] * len(others)
    return message


def calls_of(message: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Names and arguments."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return tuple((function["name"], function["arguments"]) for function in functions)


def items_of(response: Any) -> list[tuple[str, str]]:
    """Kinds and texts of the parts of a response of OpenAI's client."""
    kinds = {"message": "text", "reasoning": "thoughts"}
    return [
        (item.name, item.arguments) if item.type == "function_call" else (kinds[item.type], item.content[0].text)
        for item in response.output
    ]


def blocks_of(message: Any) -> list[tuple[str, str]]:
    """Kinds and texts of the parts of a message of Anthropic's client."""
    parts = {
        "text": lambda block: ("text", block.text),
        "thinking": lambda block: ("thoughts", block.thinking),
        "tool_use": lambda block: (block.name, json.dumps(block.input)),
    }
    return [parts[block.type](block) for block in message.content]


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a chat's deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field) or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert piece["id"].startswith("call_") and piece["type"] == "function"
                assert piece["function"]["name"] and piece["function"]["arguments"] == ""
                calls.append({name: value for name, value in piece.items() if name != "index"})
                calls[-1]["function"] = dict(piece["function"])
            else:
                assert list(piece) == ["index", "function"] and list(piece["function"]) == ["arguments"]
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    message["reasoning_content"] = message["reasoning_content"] or None
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message
