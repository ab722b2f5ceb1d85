"""Prompts that are far too long are refused before they are tokenised, for all normalizers."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import SPECIAL, TEMPLATE, VOCABULARY, byte_ids, byte_level_bpe
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerFast

from specjax.engine import SamplingParams
from specjax.engine.intake import DENSE, SHRINKS, Intake

CONTEXT = 128
LONGEST = len("<|endoftext|>")

NORMALIZERS: dict[str, Any] = {
    "none": lambda: None,
    "nfc": normalizers.NFC,
    "sentencepiece": lambda: normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")]),
    "spaces": lambda: normalizers.Replace(Regex(" +"), " "),
    "accents": lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "bert": normalizers.BertNormalizer,
}


class Counted(PreTrainedTokenizerFast):
    """Counts the characters that are tokenised."""

    seen = 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.seen += len(text)
        return super().__call__(text, **options)


def intake(normalizer: str = "none") -> Intake:
    core = byte_level_bpe()
    if (rule := NORMALIZERS[normalizer]()) is not None:
        core.normalizer = rule
    tokenizer = Counted(tokenizer_object=core, eos_token=SPECIAL[2], chat_template=TEMPLATE)
    return Intake(tokenizer, VOCABULARY, CONTEXT, 1024, (), 0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_long_texts(normalizer):
    ours = intake(normalizer)
    assert len(ours.encode("x" * (CONTEXT - 1))) >= CONTEXT - 1
    seen = ours.tokenizer.seen
    with pytest.raises(ValueError, match=r"5000000 characters.*context") as caught:
        ours.sequence("x" * 5_000_000, SamplingParams())
    assert ours.tokenizer.seen == seen and len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="tokens, but the context is 128"):
        ours.sequence("x" * 1_500, SamplingParams())


def test_texts_that_shrink():
    """Sixty spaces become one. Beyond SHRINKS a text is refused although it would fit."""
    ours = intake("spaces")
    assert len(ours.encode(("x" + " " * 60) * 50)) <= CONTEXT
    assert ours.most_characters == SHRINKS * LONGEST * CONTEXT
    with pytest.raises(ValueError, match="can hold no more"):
        ours.encode("x" + " " * ours.most_characters)


def test_long_messages(monkeypatch):
    ours = intake()
    monkeypatch.setattr(type(ours.tokenizer), "apply_chat_template", lambda *_, **__: pytest.fail("rendered"))
    many = [{"role": "user", "content": ""}] * (CONTEXT + 1)
    large = [{"role": "user", "content": "x" * 5_000}, {"role": "user", "content": "y" * 5_000}]
    for messages, message in ((many, "129 messages, but the context is 128"), (large, "characters; the context")):
        with pytest.raises(ValueError, match=message):
            ours.encode(messages)
    assert not ours.tokenizer.seen


def test_long_lists_of_tokens():
    class Ids(list):
        def __iter__(self):
            pytest.fail("looked at")

    with pytest.raises(ValueError, match="the prompt has 129 tokens, but the context is 128"):
        intake().encode(Ids(byte_ids(b"x") * 129))
    assert len(intake().encode(byte_ids(b"x") * 128)) == 128


def test_dense_texts():
    """Thirteen characters a token: more characters than one call tokenises."""
    text = "<|endoftext|>" * 100
    assert len(text) > DENSE * CONTEXT
    assert intake().encode(text) == [0] * 100
    with pytest.raises(ValueError, match="100000"):
        intake().encode(text[:1299] + "x" * 98_701)


def test_rendered_messages():
    ours = intake()
    with pytest.raises(ValueError, match="characters; the first 1024 alone make"):
        ours.encode([{"role": "user", "content": "x" * 1_500}])
    assert ours.tokenizer.seen <= DENSE * CONTEXT
