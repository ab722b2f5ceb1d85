"""Prompts to token ids: text, the messages of a chat, or ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np

from specjax.limits import ParameterError

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of one chat."""
# Not `Sequence[Prompt]`: a string is a sequence of strings, and would count as several prompts.
Prompts: TypeAlias = (
    list[str] | list[Prompt] | tuple[Prompt, ...] | Iterator[Prompt] | Sequence[Sequence[int]]
    | Sequence[Sequence[Mapping[str, Any]]]
)  # fmt: skip
"""Several prompts."""

THINK, END_THINK = "<think>", "</think>"
HARMONY = "<|start|>assistant"  # ends the prompts of gpt-oss; the rest of a message's header follows
REASONING_TAIL = 8  # number of last tokens of a prompt in which a template opens or closes a block of reasoning


class Chat(list[Mapping[str, Any]]):
    """A prompt of messages, with arguments of the chat template.

    Attributes:
        template: `add_generation_prompt` (default: True), `continue_final_message` (False), `tools` (functions that the
            model may call, as objects with names and JSON schemas), and the template's own variables.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]], template: Mapping[str, Any] = MappingProxyType({})):
        super().__init__(messages)
        self.template = template


def begins_thinking(prompt: Sequence[int], tokenizer: Any) -> bool | None:
    """True if a prompt ends with `<think>`, False if with `</think>`, else None. Ignores trailing white space."""
    tail = prompt_tail(prompt, tokenizer)
    return tail.endswith(THINK) or (False if tail.endswith(END_THINK) else None)


def prompt_tail(prompt: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(prompt[-REASONING_TAIL:], skip_special_tokens=False).rstrip()


def encode(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    *,
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Token ids of a prompt. Raises ValueError if it is empty, not a `Prompt`, or has an id outside the vocabulary.

    Args:
        check: called with a text before it is tokenised; raises ValueError to refuse it.
    """
    if isinstance(prompt, str):
        check(prompt)
        tokens = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list | tuple) and prompt and all(isinstance(m, Mapping) for m in prompt):
        messages = cast(Any, prompt)
        variables = prompt.template if isinstance(prompt, Chat) else {}
        _check_variables(variables, tokenizer)
        text = render_chat(messages, tokenizer, variables)
        check(text)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(prompt, list | tuple) and all(
        isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt
    ):
        tokens = [int(cast(Any, token)) for token in prompt]
    else:
        raise ValueError(f"a prompt is a string, a list of token ids or a list of messages, got {prompt!r:.80}")
    if not tokens:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"the prompt holds token {outside[0]!s:.40}; ids of this model are 0 to {vocab_size - 1}")
    return list(tokens)


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, variables: Mapping[str, Any]) -> str:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a role and a content, both strings, got {dict(message)!r:.80}")
    if not tokenizer.chat_template:
        raise ValueError("this model has no chat template: pass text or token ids instead of messages")
    arguments = {"add_generation_prompt": not variables.get("continue_final_message"), **variables}
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
    except Exception as error:  # templates may raise any error about these messages
        raise ValueError(f"the chat template refused these messages: {error}") from error


def _check_variables(variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ParameterError if the name of a variable is reserved."""
    custom = variables.keys() - {"add_generation_prompt", "continue_final_message", "tools"}
    if not custom:
        return
    names = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if reserved := sorted(custom & (names | {"self", "messages", "conversations"})):
        problem = f"may not set {reserved[0]!r:.60}, which is no variable of the template's own"
        raise ParameterError("chat_template_kwargs", problem)
