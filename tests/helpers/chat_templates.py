"""Chat templates of model families: short, and faithful in what matters to training.

They differ in how they open, trim, drop and invent thoughts, in white space, in tools, and in what ends a turn.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from engine_helpers import MERGES, byte_level_bpe
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<｜User｜>",
    "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|user|>", "<|assistant|>", "<|end|>",
    "[gMASK]", "<sop>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>",
)  # fmt: skip
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # not special, as in Qwen's tokenizer

# A turn, and the beginning of an answer.
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
# Qwen3: thoughts are split off and trimmed, and written only after the last user's message, even if they are empty.
_QWEN3 = (
    _TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{% set thoughts = '' %}"
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}<think>\n{{ thoughts.strip('\n') }}\n</think>\n\n"
    "{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}" + _CALLS + "<|im_end|>\n"
    "{% else %}" + _CHATML + "{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ closed }}"
    "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>"
)
_DEEPSEEK31 = "{% set closed = '</think>' %}" + _DEEPSEEK + "{{ '<think>' if thinking else '</think>' }}{% endif %}"
_MISTRAL = "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"


class Family(NamedTuple):
    template: str
    end: str  # ends a turn
    thinks: str = "no"  # no; writes: the target writes <think> itself; opened: the prompt ends with it
    variables: Mapping[str, Any] = MappingProxyType({})
    tools: bool = False
    lead: str = ""  # written first by the target
    skips: bool = False  # True if `lead` is special tokens, which texts omit


FAMILIES = {
    "chatml": Family("{% for m in messages %}" + _CHATML + "{% endfor %}" + _ASK + "{% endif %}", "<|im_end|>"),
    "qwen2.5": Family(
        _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
        "{% endfor %}" + _ASK + "{% endif %}",
        "<|im_end|>", tools=True,
    ),
    "qwen3": Family(
        _QWEN3 + _ASK + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "<|im_end|>", "writes", tools=True,
    ),
    "qwen3, thinking off": Family(
        _QWEN3 + _ASK + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "<|im_end|>", variables={"enable_thinking": False},
    ),
    "qwen3-thinking": Family(_QWEN3 + _ASK + "<think>\n{% endif %}", "<|im_end|>", "opened", tools=True),
    "llama 3": Family(
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
    ),
    "mistral": Family(_MISTRAL + " {{ m.content }}</s>{% endif %}{% endfor %}", "</s>", lead=" "),
    "mistral, trimming": Family(_MISTRAL + " {{ m.content | trim }}</s>{% endif %}{% endfor %}", "</s>", lead=" "),
    "gemma": Family(
        "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
    ),
    "deepseek-r1": Family(_DEEPSEEK + "<think>\n{% endif %}", "<｜end▁of▁sentence｜>", "opened"),
    "deepseek-v3.1": Family(_DEEPSEEK31, "<｜end▁of▁sentence｜>"),
    "deepseek-v3.1, thinking": Family(_DEEPSEEK31, "<｜end▁of▁sentence｜>", "opened", {"thinking": True}),
    "phi 3": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        "<|end|>",
    ),
    "glm 4.5": Family(
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n"
        "{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "", "writes", lead="\n",
    ),
    "gpt-oss": Family(
        "{% set turns = messages %}{% if messages[0].role in ('developer', 'system') %}{% set turns = messages[1:] %}"
        "<|start|>developer<|message|># Instructions\n\n{{ messages[0].content }}\n\n<|end|>{% endif %}"
        "{% for m in turns %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>", skips=True, lead="<|channel|>final<|message|>",
    ),
}  # fmt: skip


@functools.cache
def _core() -> Tokenizer:
    return byte_level_bpe(SPECIAL, added=ADDED)


VOCABULARY = len(SPECIAL) + 256 + len(MERGES) + len(ADDED)


@functools.cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family; all have the same tokens."""
    family = FAMILIES[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(_core()), eos_token=family.end or "<|endoftext|>", chat_template=family.template
    )


def ids(text: str) -> list[int]:
    return _core().encode(text, add_special_tokens=False).ids
