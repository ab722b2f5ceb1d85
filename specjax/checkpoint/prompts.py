"""Prompts to token ids: text, the messages of a chat, or ids."""

from __future__ import annotations

import inspect
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from specjax.checkpoint.control_tokens import ControlTokens
from specjax.limits import ParameterError

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of one chat."""
# Not `Sequence[Prompt]`: a string is a sequence of strings, and would count as several prompts.
Prompts: TypeAlias = (
    list[str] | list[Prompt] | tuple[Prompt, ...] | Iterator[Prompt] | Sequence[Sequence[int]]
    | Sequence[Sequence[Mapping[str, Any]]]
)  # fmt: skip
"""Several prompts."""
Turns: TypeAlias = Sequence[Mapping[str, Any]]
"""The messages of one chat."""

THINK, END_THINK = "<think>", "</think>"


class ThinkMarks(NamedTuple):
    """Tokens around the thoughts before an answer, and the title with which thoughts begin."""

    start: str = THINK
    end: str = END_THINK
    title: str = ""


THINK_MARKS, CHANNELS = ThinkMarks(), ThinkMarks("<|channel>", "<channel|>", "thought\n")  # the second: Gemma 4's


def think_marks(tokenizer: Any) -> ThinkMarks:
    names = getattr(tokenizer, "get_added_vocab", dict)()
    return CHANNELS if CHANNELS.start in names and END_THINK not in names else THINK_MARKS


HARMONY = "<|start|>assistant"  # ends the prompts of gpt-oss; the rest of a message's header follows
REASONING_TAIL = 8  # number of last tokens of a prompt in which a template opens or closes a block of reasoning


class Chat(list[Mapping[str, Any]]):
    """A prompt of messages, with arguments of the chat template.

    Attributes:
        template: `add_generation_prompt` (default: True), `continue_final_message` (False), `tools` (functions that the
            model may call, as objects with names and JSON schemas), and the template's own variables.
        sanitize_control_tokens: names of control tokens in the messages and in `template` are text, not tokens.
    """

    def __init__(
        self,
        messages: Iterable[Mapping[str, Any]],
        template: Mapping[str, Any] = MappingProxyType({}),
        *,
        sanitize_control_tokens: bool = False,
    ) -> None:
        super().__init__(messages)
        self.template, self.sanitize_control_tokens = template, sanitize_control_tokens


def begins_thinking(prompt: Sequence[int], tokenizer: Any) -> bool | None:
    """True if a prompt ends with `<think>`, False if with `</think>`, else None. Ignores trailing white space."""
    tail, channel = prompt_tail(prompt, tokenizer), CHANNELS.start
    begins = tail.endswith((THINK, channel, f"{channel}{CHANNELS.title.strip()}"))
    return begins or (False if tail.endswith((END_THINK, CHANNELS.end)) else None)


def prompt_tail(prompt: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(prompt[-REASONING_TAIL:], skip_special_tokens=False).rstrip()


def encode(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    *,
    check: Callable[[str], None] = lambda text: None,
    control_tokens: Callable[[], ControlTokens] | None = None,
) -> list[int]:
    """Token ids of a prompt. Raises ValueError if it is empty, not a `Prompt`, or has an id outside the vocabulary.

    Args:
        check: called with a text before it is tokenised; raises ValueError to refuse it.
        control_tokens: those of the tokenizer, which `Chat.sanitize_control_tokens` needs; default: made here, in up to
            a second.
    """
    if isinstance(prompt, str):
        check(prompt)
        tokens = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list | tuple) and prompt and all(isinstance(m, Mapping) for m in prompt):
        messages = cast(Any, prompt)
        variables = prompt.template if isinstance(prompt, Chat) else {}
        _check_variables(variables, tokenizer)
        if isinstance(prompt, Chat) and prompt.sanitize_control_tokens:
            control = ControlTokens(tokenizer) if control_tokens is None else control_tokens()
            tokens = _sanitized(messages, tokenizer, variables, control, check)
        else:
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


def _sanitized(
    messages: Turns,
    tokenizer: Any,
    variables: Mapping[str, Any],
    control: ControlTokens,
    check: Callable[[str], None],
) -> list[int]:
    """Token ids of a chat in which only the template writes control tokens."""
    try:
        text = render_chat(
            [control.marked_message(message) for message in messages], tokenizer, control.marked(variables)
        )
    except ValueError as error:  # may quote a message
        raise ValueError(control.without_marks(str(error))) from error
    check(control.without_marks(text))
    return control.encode(text)


def render_chat(messages: Turns, tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """The prompt of a chat. It holds the text of every instruction, which is a system or developer message.

    A template may refuse or leave out instructions: all but the first, or those of one role. The prompt is the first of
    `_arrangements` that loses none. Raises ValueError if there is no such arrangement.
    """
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a role and a content, both strings, got {dict(message)!r:.80}")
    if not tokenizer.chat_template:
        raise ValueError("this model has no chat template: pass text or token ids instead of messages")
    from specjax.checkpoint.template_sandbox import TemplateLimit, bound_templates

    bound_templates()
    continued = bool(variables.get("continue_final_message"))

    def render(turns: Turns) -> str:
        arguments = {"add_generation_prompt": not continued, **variables}
        return tokenizer.apply_chat_template(list(turns), tokenize=False, **arguments)

    for turns in _arrangements(messages, continued=continued):
        try:
            if not _lost(turns, render):
                return render(turns)
        except TemplateLimit:
            raise
        except Exception:  # templates may raise any error about these messages
            continue
    raise _refusal(messages, render)


def _arrangements(messages: Turns, *, continued: bool) -> Iterator[Turns]:
    """Yields the messages as they are; with the leading instructions joined; and with all instructions joined at the
    start. The role of the instructions is their own, then system, and developer if all of these are refused.

    `continued`: the last message keeps its place, because the answer continues it.
    """
    end = len(messages) - continued
    start = next((index for index in range(end) if not _is_instruction(messages[index])), end)
    leading, inner = messages[:start], messages[start:end]
    late = [message for message in inner if _is_instruction(message)]
    others = [message for message in inner if not _is_instruction(message)]
    forms = (
        messages,
        [*_joined(leading), *messages[start:]],
        [*_joined([*leading, *late]), *others, *messages[end:]],
    )
    tried: list[Turns] = []
    for roles in ((None, "system"), ("developer",)):
        for form, role in itertools.product(forms, roles):
            turns = [{**turn, "role": role} if role and _is_instruction(turn) else turn for turn in form]
            if turns not in tried:
                tried.append(turns)
                yield turns


def _joined(instructions: Turns) -> Turns:
    """One message with all texts; none if there is no text."""
    texts = [message["content"].strip("\n") for message in instructions if message["content"].strip()]
    return [{**instructions[0], "content": "\n\n".join(texts)}] if texts else []


def _is_instruction(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _lost(messages: Turns, render: Callable[[Turns], str]) -> list[int]:
    """Indices of the instructions whose text is not rendered. Renders nothing if there are no instructions.

    Each text gets a mark at both ends, which the prompt must hold. Without marks, the same text in another message
    would be mistaken for it, and a text that the template trims would be missed.
    """
    present = [i for i, message in enumerate(messages) if _is_instruction(message) and message["content"].strip()]
    if not present:
        return []
    key, marked = f"{secrets.randbits(64):020}", list(messages)
    for i in present:
        marked[i] = {**messages[i], "content": f"{key}:{i}:{messages[i]['content']}{key}:{i}:"}
    seen = Counter(part.partition(":")[0] for part in render(marked).split(f"{key}:")[1:])
    return [i for i in present if seen[str(i)] < 2]


def _refusal(messages: Turns, render: Callable[[Turns], str]) -> ValueError:
    """The error for messages that no arrangement renders. It names an instruction, unless the others are refused."""
    lost, reason = [i for i, message in enumerate(messages) if _is_instruction(message)], ""
    others = [message for message in messages if not _is_instruction(message)]
    try:
        if others:
            render(others)
    except Exception as error:
        return ValueError(f"the chat template refused these messages: {error}")
    try:
        render(messages)
        lost = _lost(messages, render) or lost
    except Exception as error:
        reason = f": {error}"
    role, text = messages[lost[0]]["role"], messages[lost[0]]["content"]
    return ValueError(
        f"the chat template has no place for messages[{lost[0]}] ({role}: {text!r:.60}){reason}; "
        "put its text into a user's message, or use another template (--chat-template)"
    )


def _check_variables(variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ParameterError if the name of a variable is reserved."""
    custom = variables.keys() - {"add_generation_prompt", "continue_final_message", "tools"}
    if not custom:
        return
    names = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if reserved := sorted(custom & (names | {"self", "messages", "conversations"})):
        problem = f"may not set {reserved[0]!r:.60}, which is no variable of the template's own"
        raise ParameterError("chat_template_kwargs", problem)
