"""Prompts to token ids: text, ids, or chat messages rendered with the model's template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from specjax.engine.plain import PlainText

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]


def encode(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    *,
    check: Callable[[str], None] = lambda text: None,
    plain: PlainText | None = None,
) -> list[int]:
    """Token ids of a prompt. Raises ValueError if it is empty, of no known form, or holds an id outside the vocabulary.

    Args:
        check: sees a text before it is tokenised, and raises a ValueError to refuse it.
        plain: encodes users' text without special tokens; a prompt that is a text is theirs as a whole. None: text
            that reads as a special token is one.
    """
    if isinstance(prompt, str):
        check(prompt)
        tokens = tokenizer(prompt)["input_ids"] if plain is None else plain.encode(prompt, add_special_tokens=True)
    elif isinstance(prompt, list | tuple) and prompt and all(isinstance(m, Mapping) for m in prompt):
        messages = cast(Any, prompt)
        text = _render(messages, tokenizer)
        check(text)
        if plain is None:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            render = partial(_render, tokenizer=tokenizer)
            tokens = plain.encode_chat(messages, text, render, tokenizer.get_chat_template())
    elif isinstance(prompt, list | tuple) and all(
        isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompt
    ):
        tokens = [int(cast(Any, token)) for token in prompt]
    else:
        raise ValueError(f"a prompt is a string, a list of token ids or a list of messages, got {prompt!r:.80}")
    if not tokens:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"the prompt holds token {outside[0]!s:.40}; ids of this model are 0 to {vocab_size - 1}")
    return list(tokens)


def _render(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a role and a content, both strings, got {dict(message)!r:.80}")
    if not tokenizer.chat_template:
        raise ValueError("this model has no chat template: pass text or token ids instead of messages")
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program: whatever it raises is about these messages
        raise ValueError(f"the chat template refused these messages: {error}") from error
