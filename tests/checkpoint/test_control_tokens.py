"""Names of control tokens in messages: text with `sanitize_control_tokens`, for every kind of tokenizer."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
from chat_templates import FAMILIES, family_tokenizer
from engine_helpers import shared_engine, tokenizer
from harmony_helpers import harmony_tokenizer
from test_text import tokenizer_of
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tool_helpers import tool_tokenizer
from transformers import PreTrainedTokenizerFast

from specjax.checkpoint.control_tokens import ControlTokens
from specjax.checkpoint.prompts import Chat, encode

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(c) for c in range(32, 127)]
WORDS = ["hello", "world", "<", "|", ">", "im", "end", "start", "_", "s", "/", "a", "b", "user", "\n", "think"]
TEMPLATE = (
    "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def _fast(core: Tokenizer, *, added: bool = True) -> PreTrainedTokenizerFast:
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")] * added)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def _spelling_bpe() -> PreTrainedTokenizerFast:
    """As converted from a GGUF file of Llama: merges spell the names of control tokens."""
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("<", "s>"), ("i", "m"), ("<", "|"), ("<|", "im")]
    words = [*SPECIAL, *LETTERS, *(a + b for a, b in merges if a + b not in SPECIAL), "\u2581"]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _fast(core)


def _unigram() -> PreTrainedTokenizerFast:
    """Sentencepiece's, whose best pieces are the names of control tokens."""
    core = Tokenizer(models.Unigram([(name, -0.1 * i) for i, name in enumerate([*SPECIAL, *LETTERS, "\u2581"])], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _fast(core)


def _words() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(core)


def _lower_case() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece({name: i for i, name in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    return _fast(core)


def _with_template(tokenizer: Any) -> Any:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return own


KINDS = {
    "byte-level BPE": tokenizer,
    "tools": tool_tokenizer,
    "gpt-oss": harmony_tokenizer,
    "merges spell names": _spelling_bpe,
    "unigram": _unigram,
    "words": _words,
    "lower case": _lower_case,
    "byte fallback": lambda: _with_template(tokenizer_of("llama")),
    "unigram with bytes": lambda: _with_template(tokenizer_of("first", "unigram")),
    "reserved tokens": lambda: _reserved(),
    **{f"family {name}": functools.partial(family_tokenizer, name) for name in FAMILIES},
}


def _reserved() -> PreTrainedTokenizerFast:
    own = _spelling_bpe()
    own.add_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(300)])
    return own


@functools.cache
def kind(name: str) -> tuple[Any, ControlTokens]:
    return KINDS[name](), ControlTokens(KINDS[name]())


def encoded(name: str, messages: list[dict[str, Any]], *, sanitize: bool = True, **variables: Any) -> list[int]:
    own, control = kind(name)
    chat = Chat(messages, variables, sanitize_control_tokens=sanitize)
    return encode(chat, own, len(own), control_tokens=lambda: control)


def controls(name: str) -> dict[str, int]:
    own = kind(name)[0]
    added = own.added_tokens_decoder.items()
    return {t.content: id for id, t in added if t.special or (t.content in own.chat_template and t.content.strip())}


def said(text: str, answer: str = "b") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": text},
    ]


@pytest.mark.parametrize("name", KINDS)
def test_only_the_template_writes_control_tokens(name):
    names = controls(name)
    assert names, "a tokenizer without control tokens tests nothing"

    def written(messages: list[dict[str, Any]], *, sanitize: bool = True) -> list[int]:
        return [id for id in encoded(name, messages, sanitize=sanitize) if id in names.values()]

    unknown = getattr(kind(name)[0], "unk_token_id", None)
    usual = [id for id in written(said("a")) if id != unknown]
    for control in list(names)[:20]:
        if names[control] == unknown:
            continue
        texts = (
            control,
            f"a{control}b",
            f"a {control} b",
            control.upper(),
            control * 3,
            f"{control[:2]}{control}{control[2:]}",
        )
        for text in texts:
            assert [id for id in written(said(text)) if id != unknown] == usual, (control, text)
    if name not in ("lower case", "gpt-oss"):
        first = next(control for control in names if names[control] != unknown)
        assert written(said(first), sanitize=False) != written(said("a"), sanitize=False)


@pytest.mark.parametrize("name", KINDS)
def test_other_text_has_the_usual_tokens(name):
    texts = ("hello world", "a < b > c | d", "<b>x</b>\n\n  [1]", "ünï ✓", "a", " a ", "end of <text", "> quoted")
    assert sum(not any(control in text for control in controls(name)) for text in texts) > 4
    for text, answer in itertools.product(texts, ("b", "x > y <")):
        if any(control in text + answer for control in controls(name)):
            continue
        assert encoded(name, said(text, answer)) == encoded(name, said(text, answer), sanitize=False)


@pytest.mark.parametrize("name", ["byte-level BPE", "gpt-oss", "family llama 3"])
def test_text_is_kept(name):
    own = kind(name)[0]
    for control in controls(name):
        messages = said(f"x{control}y {control.upper()}")
        rendered = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert own.decode(encoded(name, messages), skip_special_tokens=False) == rendered


def test_names_in_parts():
    """Parts of a name in neighbouring values, which a template joins."""
    own = copy.deepcopy(tokenizer())
    own.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ m.extra }}|im_end|>{{ m.more }}{% endfor %}"
        "{{ prefix }}im_end|>{{ '<|' ~ messages[0].content|lower }}"
    )
    end, control = own.convert_tokens_to_ids("<|im_end|>"), ControlTokens(own)
    for cut in range(1, 10):
        name = "<|im_end|>"
        messages = [
            {"role": "user", "content": name[:cut], "extra": name[cut:], "more": "x <"},
            {"role": "user", "content": "|im_end|>", "extra": "<", "more": "<|IM_END|>"},
            {"role": "user", "content": "im_end|>", "extra": name[:cut], "more": ""},
        ]
        for chosen in (messages, messages[1:], messages[2:]):
            chat = Chat(chosen, {"prefix": "<|"}, sanitize_control_tokens=True)
            assert end not in encode(chat, own, 512, control_tokens=lambda: control), (cut, chosen)


def test_tools_and_variables_are_sanitized():
    own = copy.deepcopy(tokenizer())
    own.chat_template = (
        "{{ tools|tojson }}{{ note }}{% for m in messages %}{{ m.content }}{{ m.calls|tojson }}<|im_end|>{% endfor %}"
    )
    end = own.convert_tokens_to_ids("<|im_end|>")
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {"<|im_end|>": 1}}}
    messages = [
        {"role": "user", "content": "x", "calls": [{"arguments": {"role": "<|im_end|>", "<|im_end|>": ["<|im_end|>"]}}]}
    ]
    for sanitize, count in ((True, 1), (False, 7)):
        chat = Chat(messages, {"tools": [tool], "note": "<|im_end|>"}, sanitize_control_tokens=sanitize)
        assert encode(chat, own, 512).count(end) == count


def test_template_still_splits_thoughts():
    """Qwen3's template splits an answer at `</think>`."""
    messages = said("q", "<think>\nsecret\n</think>\n\nvisible")
    text = kind("family qwen3")[0].decode(encoded("family qwen3", messages), skip_special_tokens=False)
    assert "secret" not in text and "visible<|im_end|>" in text


def test_refused_message_is_quoted_without_marks():
    own = copy.deepcopy(tokenizer())
    own.chat_template = "{{ raise_exception('no ' ~ messages[0].content) }}"
    with pytest.raises(ValueError, match=r"refused these messages: no a<\|im_end\|>b$"):
        encode(Chat([{"role": "user", "content": "a<|im_end|>b"}], sanitize_control_tokens=True), own, 512)


def test_engine_counts_sanitized_text():
    intake = shared_engine("NONE").intake
    end = intake.tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = [{"role": "user", "content": "<|im_end|>"}]
    assert intake.encode(Chat(chat)).count(end) == 1 + intake.encode(Chat(chat, sanitize_control_tokens=True)).count(
        end
    )
    with pytest.raises(ValueError, match="the context"):
        intake.encode(Chat([{"role": "user", "content": "<|im_end|>" * 10**5}], sanitize_control_tokens=True))
