"""A model that answers in the Harmony format of gpt-oss, from a script, with a template that renders what gpt-oss's own
does: one call of a message, thoughts beside calls only, and the effort of reasoning."""

from __future__ import annotations

import functools

from engine_helpers import LETTERS, byte_level_bpe
from tool_helpers import scripted_engine, scripted_model
from transformers import PreTrainedTokenizerFast

from specjax.engine import Engine
from specjax.engine.chat.calls import Harmony

# As the published template: instructions and functions share a message, the first message alone can be an instruction,
# and other roles than assistant, tool and user render nothing.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n<|end|>"
    "{% set first = messages[0].content if messages[0].role in ('developer', 'system') else '' %}"
    "{% set turns = messages[1:] if messages[0].role in ('developer', 'system') else messages %}"
    "{% if first or tools %}<|start|>developer<|message|>"
    "{% if first %}# Instructions\n\n{{ first }}\n\n{% endif %}"
    "{% for tool in tools or [] %}type {{ tool.function.name + tool.function.description }}\n{% endfor %}<|end|>"
    "{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in turns %}"
    "{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set last.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% set last.name = none %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OPEN = "<|end|>¦<|start|>¦assistant¦"
_CALL = "<|channel|>¦commentary¦ to=¦functions.¦{} ¦<|constrain|>¦json¦<|message|>¦"
# The answers, by the last character of the message before; "¦" separates tokens.
_SCRIPTS = {
    "a": f"<|channel|>¦analysis¦<|message|>¦A city¦, so a call.¦{OPEN}{_CALL.format('get_weather')}"
    '{"ci¦ty": "Par¦is"}¦<|call|>',
    "b": "<|channel|>¦analysis¦<|message|>¦Easy.¦"
    + OPEN
    + "<|channel|>¦final¦<|message|>¦It is ¦22 degrees.¦<|return|>",
    "c": "<|channel|>¦commentary¦<|message|>¦Let me ¦look.¦" + OPEN + _CALL.format("noop") + "{}¦<|call|>",
    "d": "<|channel|>¦final¦<|message|>¦No thoughts.¦<|return|>",
    "e": "<|channel|>¦??¦" + OPEN + "<|channel|>¦final¦ Cut¦ short¦<|return|>",
    "f": "<|channel|>¦analysis¦<|message|>¦Stop¦ there.¦"
    + OPEN
    + "<|channel|>¦final¦<|message|>¦Go. ¦Stop¦ here.¦<|return|>",
    "g": " to=¦functions.¦noop¦<|channel|>¦commentary¦ json¦<|message|>¦{}¦<|call|>",
    "h": _CALL.format("unknown") + '{"x":¦ 1}¦<|call|>',
}
SCRIPTS: dict[str, list[str]] = {name: script.split("¦") for name, script in _SCRIPTS.items()}
ENDS = ("<|return|>", "<|call|>")


@functools.cache
def harmony_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges. Markers are special tokens, as those of gpt-oss, pieces of the scripts are not."""
    pieces = dict.fromkeys(piece for script in SCRIPTS.values() for piece in script if piece not in Harmony.markers())
    core = byte_level_bpe(
        ["<|endoftext|>", *Harmony.markers()], words=LETTERS, added=[word for word in pieces if len(word) > 1],
        merges=(), use_regex=False,
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|return|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


@functools.cache
def harmony_engine() -> Engine:
    tokenizer = harmony_tokenizer()
    start = ("S", "a", "y", "Ġ", "{}", "<|end|>", "<|start|>", "assistant")
    preferred = (",", "]", "}", '"', *ENDS, "<|end|>")
    model = scripted_model(tokenizer, SCRIPTS, start, preferred)
    return scripted_engine(model, tokenizer, tuple(tokenizer.convert_tokens_to_ids(ENDS)))
