"""Prompts to token ids: text, the messages of a chat, or ids."""

from __future__ import annotations

import functools
import inspect
import json
import re
import secrets
import string
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
FLAG = "--plain-content"
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # private-use characters of planes 15 and 16

THINK, END_THINK = "<think>", "</think>"
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
    tail = tokenizer.decode(prompt[-REASONING_TAIL:], skip_special_tokens=False).rstrip()
    return tail.endswith(THINK) or (False if tail.endswith(END_THINK) else None)


def encode(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    *,
    check: Callable[[str], None] = lambda text: None,
    plain: PlainText | None = None,
) -> list[int]:
    """Token ids of a prompt. Raises ValueError if it is empty, not a `Prompt`, or has an id outside the vocabulary.

    Args:
        check: called with a text before it is tokenised; raises ValueError to refuse it.
        plain: encodes users' text (a whole prompt, or the contents of messages) without special tokens. None: names of
            special tokens in a text become special tokens.
    """
    if isinstance(prompt, str):
        check(prompt)
        tokens = tokenizer(prompt)["input_ids"] if plain is None else plain.encode(prompt, add_special_tokens=True)
    elif isinstance(prompt, list | tuple) and prompt and all(isinstance(m, Mapping) for m in prompt):
        messages = cast(Any, prompt)
        variables = prompt.template if isinstance(prompt, Chat) else {}
        _check_variables(variables, tokenizer, plain)
        render = functools.partial(render_chat, tokenizer=tokenizer, variables=variables)
        text = render(messages)
        check(text)
        if plain is None:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            if special := plain.special_token(tools := variables.get("tools")):
                raise ParameterError("tools", f"hold {special!r:.60}, a special token, which --plain-content refuses")
            tokens = plain.encode_chat(messages, text, render, tokenizer.get_chat_template(tools=tools))
    elif isinstance(prompt, list | tuple) and all(_is_integer(token) for token in prompt):
        tokens = [int(cast(Any, token)) for token in prompt]
    else:
        raise ValueError(f"a prompt is a string, a list of token ids or a list of messages, got {prompt!r:.80}")
    if not tokens:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"the prompt holds token {outside[0]!s:.40}; ids of this model are 0 to {vocab_size - 1}")
    return list(tokens)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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


def _check_variables(variables: Mapping[str, Any], tokenizer: Any, plain: PlainText | None) -> None:
    """Raises ParameterError if the name of a variable is reserved, or with `plain` if its value has text."""
    custom = variables.keys() - {"add_generation_prompt", "continue_final_message", "tools"}
    if not custom:
        return
    names = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if reserved := sorted(custom & (names | {"self", "messages", "conversations"})):
        problem = f"may not set {reserved[0]!r:.60}, which is no variable of the template's own"
        raise ParameterError("chat_template_kwargs", problem)
    if plain is not None and (text := next(strings_of([variables[name] for name in custom]), None)):
        problem = f"may hold no text with --plain-content, only numbers and true or false, got {text!r:.60}"
        raise ParameterError("chat_template_kwargs", problem)


class PlainText:
    """Encodes users' text without special tokens, and the chat template's markup with them (`--plain-content`).

    A copy of the tokenizer, in which special tokens have random names, encodes users' text. To find the template's
    special tokens, the messages are rendered again with each of the users' characters replaced by a private-use one. If
    the reverse replacement gives the ordinary text, every remaining special token is the template's: it gets its random
    name, users' characters are restored, and the copy encodes the result.

        messages    [{"role": "user", "content": "a<|im_end|>"}]
        replaced    <|im_start|>user\n①②③④⑤⑥⑦⑧⑨②③<|im_end|>\n    (a sign for each distinct character)
        encoded     qzkwuser\na<|im_end|>bxjt\n                      (qzkw, bxjt: names of the two special tokens)

    If a template changes letters or searches for words, only characters that distinguish special tokens from words are
    replaced. If it searches for markup, text that could be a part of a special token is refused.

    Thread-safe. Raises ValueError if special tokens of the tokenizer cannot be distinguished from text.
    """

    def __init__(self, tokenizer: Any) -> None:
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is None:
            raise ValueError(f"{FLAG} needs a fast tokenizer, got a {type(tokenizer).__name__}")
        added = core.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        letters = string.ascii_lowercase
        self._names = {name: "".join(secrets.choice(letters) for _ in range(32)) for name in special}
        self._copy = _renamed(core, self._names)
        for name, id in special.items():
            renamed = self._names[name]
            expected = core.encode(f"a{name}b", add_special_tokens=False).ids
            encoded = self.encode(f"a{renamed}b", add_special_tokens=False)
            if name.isspace() or self._copy.token_to_id(renamed) != id or encoded != expected:
                problem = f"its special token {name!r:.60} (id {id}) is not matched literally"
                raise ValueError(f"{FLAG} does not work with this tokenizer: {problem}")
        # The tokenizer matches the leftmost token, then the longest, among all added tokens.
        contents = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        marks = [{c for c in name if not c.isalnum()} or set(name) for name in self._names]
        self._marks = frozenset[str]().union(*marks)
        self._parts = frozenset(part.casefold() for name in self._names for part in _ends(name))
        self._named = {str(name) for name in getattr(tokenizer, "special_tokens_map", {}).values()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of users' text. `add_special_tokens`: with the tokens that the tokenizer adds to any text."""
        # Unlike `encode`, `encode_batch` releases the GIL.
        return self._copy.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def special_token(self, value: Any) -> str | None:
        """A special token in a string or key of a JSON value, or None."""
        texts = (*strings_of([value]), *strings_of([value], keys=True))
        return next((name for name in self._names for text in texts if name in text), None)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], text: str, render: Callable[..., str], template: str
    ) -> list[int]:
        """Ids of messages, whose strings except roles are users' text. `text`: the rendered messages; `template`: the
        source of the template. Raises ValueError if users' text could become a special token."""
        contents = [{key: value for key, value in message.items() if key != "role"} for message in messages]
        for text_or_key in (*(str(message["role"]) for message in messages), *strings_of(contents, keys=True)):
            if special := next((name for name in self._names if name in text_or_key), None):
                raise ValueError(f"a role or a key of the messages holds {special!r:.60}, a special token ({FLAG})")
        users = list(strings_of(contents))
        seen = frozenset[str]().union(*users)
        letters = frozenset(character for character in seen if not character.isspace())
        for replaced in (letters, seen & self._marks):
            taken = seen.union(text)
            free = (chr(code) for codes in _PRIVATE for code in codes if chr(code) not in taken)
            table = dict(zip(sorted(replaced), free, strict=False))
            if len(table) < len(replaced):
                continue
            translate = str.maketrans(table)
            try:
                marked = render([_replaced(message, translate) | {"role": message["role"]} for message in messages])
            except Exception:  # templates may raise any error
                continue
            back = {ord(private): ord(character) for character, private in table.items()}
            if marked.translate(back) == text and (letters <= replaced or self._are_templates(marked, template)):
                return self._encode_markup(marked, back)
        folded = "\n".join(users).casefold()
        if part := next((part for part in self._parts if part in folded), None):
            problem = f"{part!r:.60}, which may be part of a special token, and the chat template changes their text"
            raise ValueError(f"the messages hold {problem} ({FLAG}); remove it, or give another --chat-template")
        return self._encode_markup(text, {})

    def _encode_markup(self, text: str, back: Mapping[int, int]) -> list[int]:
        """Ids of a text whose special tokens are all the template's. `back`: private-use to users' characters."""
        renamed = self._tokens.sub(lambda match: self._names.get(match[0], match[0]), text)
        return self.encode(renamed.translate(back), add_special_tokens=False)

    def _are_templates(self, text: str, template: str) -> bool:
        """True if the template's source names all special tokens of a text, so that none was built from other words."""
        specials = self._names.keys() & self._tokens.findall(text)
        return all(name in template or name in self._named for name in specials)


def _renamed(core: Any, names: Mapping[str, str]) -> Any:
    """A copy of a `tokenizers.Tokenizer` in which special tokens have other names and equal ids."""
    from tokenizers import Tokenizer

    try:
        state = json.loads(core.to_str())
        for token in state["added_tokens"]:
            if token["special"]:
                token["content"] = names[token["content"]]
        model = state["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): id for piece, id in vocabulary.items()}
        else:  # Unigram: pieces with their scores
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{FLAG} does not work with this tokenizer: it cannot be copied ({error})") from error


def _ends(name: str) -> Iterator[str]:
    """The shortest beginning and end of a special token that are not words, of at least two characters."""
    for parts in ((name[:size] for size in range(2, len(name))), (name[-size:] for size in range(2, len(name)))):
        yield next((part for part in parts if not part.isalnum()), name)


def _replaced(value: Any, table: Mapping[int, str]) -> Any:
    """A JSON value with the characters of its strings replaced; keys are unchanged."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {key: _replaced(element, table) for key, element in value.items()}
    return [_replaced(element, table) for element in value] if isinstance(value, list | tuple) else value


def strings_of(value: Any, *, keys: bool = False) -> Iterator[str]:
    """The strings of a JSON value, or the keys of its mappings."""
    if isinstance(value, Mapping):
        if keys:
            yield from (key for key in value if isinstance(key, str))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for element in value:
            yield from strings_of(element, keys=keys)
    elif isinstance(value, str) and not keys:
        yield value
