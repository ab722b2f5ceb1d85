"""The token that a chat template writes after an assistant's turn ends a text: templates x vocabularies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from chat_templates import FAMILIES, family_tokenizer
from engine_helpers import byte_level_bpe, tokenizer
from tiny_checkpoints import byte_level_metadata, save_llama, write_gguf
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specjax.checkpoint import ModelFiles, load_tokenizer, resolve, stop_token_ids
from specjax.checkpoint.tokenizer import turn_end

ROLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
LAST = "{% if (loop.last and add_generation_prompt) or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
SYSTEM = "<s><|im_start|>system\nHelp.<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


class Case(NamedTuple):
    template: str | None
    end: str | None  # the token found
    tokens: tuple[str, ...] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")  # special tokens of the vocabulary


# Beside the families of `chat_templates`.
CASES: dict[str, Case] = {
    "chatml": Case(ROLES + "<|im_end|>\n{% endfor %}" + ASK, "<|im_end|>"),
    "newline before": Case(ROLES + "\n<|im_end|>\n{% endfor %}" + ASK, "<|im_end|>"),
    "default system": Case(SYSTEM + ROLES + "<|im_end|>\n{% endfor %}", "<|im_end|>"),
    "not at the end": Case(ROLES + LAST + ASK, "<|im_end|>"),  # Qwen's first template
    "always a prompt": Case(ROLES + "<|im_end|>\n{% endfor %}<|im_start|>assistant\n", "<|im_end|>"),
    "parts": Case(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
        "<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    "gemma 4": Case(
        "<s>{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}",
        "<turn|>", ("<s>", "</s>", "<|turn>", "<turn|>"),
    ),
    "cohere": Case(
        "<s>{% for m in messages %}<|START|><|{{ m.role }}|>{{ m.content }}<|STOP|>{% endfor %}",
        "<|STOP|>", ("<s>", "</s>", "<|START|>", "<|STOP|>", "<|user|>", "<|assistant|>"),
    ),
    "vicuna": Case(
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{% if m.role == 'assistant' %}</s>\n{% endif %}"
        "{% endfor %}",
        "</s>",
    ),
    "needs a system message": Case(
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + ROLES
        + "<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    "needs a system message in parts": Case(
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    # Tokens that close a part of the answer come before the end of the turn.
    "ernie's response": Case(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<response>\n{{ m.content }}\n"
        "</response>\n{% else %}{{ m.content }}{% endif %}<|im_end|>\n\n{% endfor %}" + ASK,
        "<|im_end|>", ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<response>", "</response>"),
    ),
    "command a": Case(
        "<s>{% for m in messages %}<|START|><|{{ m.role }}|>{% if m.role == 'assistant' %}<|START_RESPONSE|>"
        "{{ m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}<|STOP|>{% endfor %}",
        "<|STOP|>",
        ("<s>", "</s>", "<|START|>", "<|STOP|>", "<|user|>", "<|assistant|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "no calls": Case(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' %}<calls></calls>"
        "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
        "<|im_end|>", ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<calls>", "</calls>"),
    ),
    "a name after the token": Case(
        "A chat.{% for m in messages %}{{ ' USER: ' if m.role == 'user' else ' ASSISTANT: ' }}{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}",
        "</s>",
    ),
    "a name right after the token": Case(
        "<s>{% for m in messages %}{{ 'User:' if m.role == 'user' else 'Bot:' }} {{ m.content }}<|im_end|>{% endfor %}",
        "<|im_end|>",
    ),
    # Nothing is written after an answer, or the next turn's header.
    "nothing": Case(ROLES + "\n{% endfor %}" + ASK, None),
    "nothing, default system, always a prompt": Case("Help.\n" + ROLES + "\n{% endfor %}<|im_start|>assistant\n", None),
    "roles as tokens": Case(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}",
        None, ("<s>", "<|user|>", "<|assistant|>"),
    ),
    "roles as tokens, default system": Case(
        "<s><|system|>\nHelp.{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        None, ("<s>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "roles as text": Case("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    # The token is absent, or several tokens.
    "absent": Case(ROLES + "<|im_end|>\n{% endfor %}", None, ("<s>", "</s>", "<|im_start|>")),
    "several tokens": Case(ROLES + "### End\n{% endfor %}", None),
    "text before the token": Case(ROLES + " over<|im_end|>\n{% endfor %}", None),
    # Templates that fail, or do not write the messages.
    "refuses": Case("{{ raise_exception('no') }}", None),
    "refuses assistants": Case(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", None
    ),
    "syntax": Case("{% for m in messages %}", None),
    "unknown filter": Case("{{ messages | whatever }}", None),
    "drops answers": Case("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", None),
    "last message only": Case("{{ messages[-1].content }}<|im_end|>", None),
    "changes letters": Case("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", None),
    "empty": Case("", None),
    "none": Case(None, None),
}  # fmt: skip


def made(case: Case, special: bool = True) -> PreTrainedTokenizerFast:
    core = byte_level_bpe(())
    core.add_tokens([AddedToken(token, special=special, normalized=False) for token in case.tokens])
    eos = {"eos_token": "</s>"} if "</s>" in case.tokens else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=case.template, **eos)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_templates(name, special):
    case = CASES[name]
    found = turn_end(made(case, special))
    assert (None if found is None else made(case).convert_ids_to_tokens(found)) == case.end


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    family, made = FAMILIES[name], family_tokenizer(name)
    end = None if name == "gpt-oss" else family.end or None
    found = turn_end(made)
    assert (None if found is None else made.convert_ids_to_tokens(found)) == end


def test_stop_token_ids(tmp_path):
    """After the ids of the files and of the tokenizer, once, and below the vocabulary's size."""
    files, made_ = ModelFiles("it", tmp_path, {"eos_token_id": 0}, ()), tokenizer()
    assert (made_.eos_token, stop_token_ids(files, made_, 300)) == ("<|im_end|>", (0, 2))
    other = made(CASES["chatml"])
    eos, end = other.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    assert stop_token_ids(files, other, 300) == (0, eos, end)
    assert stop_token_ids(files, other, end) == (0, eos)
    assert stop_token_ids(files, SimpleNamespace(eos_token_id=7), 300) == (0, 7)
    # <|end|> ends each message of Harmony, not the turn, also where a template writes it last.
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    harmony = made(Case(template, None, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")))
    assert stop_token_ids(files, harmony, 300) == (0, harmony.convert_tokens_to_ids("<|return|>"))


NAMES = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
GGUF: dict[str, tuple[dict[str, Any], str | None, tuple[int, ...]]] = {
    "template only": ({"eos_token_id": 0}, CASES["chatml"].template, (0, 2)),
    "a token that is not marked": (
        {"eos_token_id": 0, "token_type": [3, 3, 1]}, CASES["chatml"].template, (0, 2)
    ),
    "a user-defined token": ({"eos_token_id": 0, "token_type": [3, 3, 4]}, CASES["chatml"].template, (0, 2)),
    "eos is the turn's end": ({"eos_token_id": 2}, CASES["chatml"].template, (2,)),
    "eot": ({"eos_token_id": 0, "eot_token_id": 2}, None, (0, 2)),
    "eot and template": ({"eos_token_id": 0, "eot_token_id": 2}, CASES["chatml"].template, (0, 2)),
    "eot without eos": ({"eos_token_id": None, "eot_token_id": 2}, None, (2,)),
    "eot outside": ({"eos_token_id": 0, "eot_token_id": 300}, None, (0,)),
    "eot is eos": ({"eos_token_id": 2, "eot_token_id": 2}, None, (2,)),
    "neither": ({"eos_token_id": None}, CASES["chatml"].template, (2,)),
    "no template": ({"eos_token_id": 0}, None, (0,)),
    "another end": ({"eos_token_id": 0}, FAMILIES["llama 3"].template, (0,)),
    "refuses": ({"eos_token_id": 0}, CASES["refuses"].template, (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_gguf(tmp_path, name):
    changes, template, expected = GGUF[name]
    metadata = byte_level_metadata() | changes
    metadata["token_type"] = metadata["token_type"][:3] + byte_level_metadata()["token_type"][3:]
    kept = {key: value for key, value in metadata.items() if value is not None}
    kept |= {"padding_token_id": 0} if template is None else {}
    extra = {} if template is None else {"tokenizer.chat_template": template}
    write_gguf(tmp_path / "tiny.gguf", save_llama(tmp_path / "source"), tokenizer=kept, metadata=extra)
    files = resolve(str(tmp_path / "tiny.gguf"), progress=False)
    assert stop_token_ids(files, load_tokenizer(files), 300) == expected
