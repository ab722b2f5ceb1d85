"""Control tokens whose names no text spells: in the messages of a chat, and in grammars.

A control token is a special token of the tokenizer, or another added token that the chat template contains (`<think>`).
Usually the name of a control token is that token wherever it stands in a prompt. With `ControlTokens`, only the names
that the chat template writes are.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

PRIVATE = "\uf8ff"  # character for private use, with which no tokenizer's own tokens begin


def private_prefix() -> str:
    """Characters that no client can guess."""
    return f"{PRIVATE}{secrets.randbits(64):020}"


def with_prefix(core: str, names: Iterable[str], prefix: str) -> str:
    """The JSON of a tokenizer of the tokenizers library, with a prefix at these names of tokens."""
    data = json.loads(core)
    renamed = {name: prefix + name for name in names}
    model = data["model"]
    for token in data["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    if isinstance(vocabulary := model.get("vocab"), dict):
        model["vocab"] = {renamed.get(name, name): id for name, id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(name, name), *more] for name, *more in vocabulary]
    if "merges" in model:
        pairs = ((merge, tuple(merge.split(" ") if isinstance(merge, str) else merge)) for merge in model["merges"])
        model["merges"] = [merge for merge, pair in pairs if renamed.keys().isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return json.dumps(data)


def special_names(core: str) -> list[str]:
    return [token["content"] for token in json.loads(core)["added_tokens"] if token["special"]]


def _longest_of(names: Collection[str]) -> str:
    """A regular expression for the longest of these names. A text takes linear time, even with thousands of names."""
    first, last = min(names), max(names)
    prefix = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    tails = sorted(name.removeprefix(prefix) for name in names)
    groups = [list(group) for start, group in itertools.groupby(tails, key=lambda tail: tail[:1]) if start]
    if not groups:
        return re.escape(prefix)
    optional = "?" if "" in tails else ""
    return f"{re.escape(prefix)}(?:{'|'.join(map(_longest_of, groups))}){optional}"


class ControlTokens:
    """Encodes chats so that only the chat template writes control tokens. Thread-safe.

    The values of messages are marked before the template renders them. Then the template's names get a prefix, with
    which a copy of the tokenizer knows the control tokens. The copy encodes the whole text at once, so other text gets
    the same tokens as usual. Marks are digits, which survive a template's `trim`, `lower` and `tojson`:

        message                 marked                          text for the copy
        a<|im_end|>             a{key}1<|im_end|>{key}2         a<|im_end|>{prefix}<|im_end|>   (the second: template)
        a<|im_                  a<|im_{key}0                    as the message: nothing can complete the name
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        core, template = tokenizer.backend_tokenizer, str(tokenizer.chat_template)
        self._prefix, self._key = private_prefix(), f"{secrets.randbits(64):020}"
        added = core.get_added_tokens_decoder().items()
        ids = {t.content: id for id, t in added if t.special or (t.content in template and not t.content.isspace())}
        copy = Tokenizer.from_str(with_prefix(core.to_str(), ids, self._prefix))
        copy.no_padding()
        copy.no_truncation()
        if changed := [name for name, id in ids.items() if copy.token_to_id(self._prefix + name) != id]:
            raise ValueError(f"sanitize_control_tokens: this tokenizer is not supported: {changed[0]!r} changes its id")
        self._copy = copy
        names = _longest_of(ids) if ids else "(?!)"
        self._around = rf"{self._key}1\g<0>{self._key}2"
        self._named = re.compile(names, re.IGNORECASE)  # a template may change the case
        self._rendered = re.compile(f"{self._key}1((?i:{names})){self._key}2|{self._key}[012]|({names})")
        lower = [name.lower() for name in ids]
        self._starts = {name[:end] for name in lower for end in range(1, len(name))}
        self._ends = {name[start:] for name in lower for start in range(1, len(name))}
        self._longest = max(map(len, lower), default=0)

    def marked(self, value: Any) -> Any:
        """A value for a chat template, with marks around names of control tokens, and where a name may begin or end."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            names = {key: self._named.sub(self._around, key) if isinstance(key, str) else key for key in value}
            return {names[key]: self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with marks. A role that is a word has none: templates compare it, and make `<|user|>` of it."""
        role = message.get("role")
        is_word = isinstance(role, str) and role.isidentifier()
        return self.marked(message) | ({"role": role} if is_word else {})

    def _marked_text(self, text: str) -> str:
        lower, lengths = text.lower(), range(1, min(len(text) + 1, self._longest))
        begins = any(lower[-length:] in self._starts for length in lengths)
        ends = any(lower[:length] in self._ends for length in lengths)
        edge = f"{self._key}0"
        return edge * ends + self._named.sub(self._around, text) + edge * begins

    def without_marks(self, text: str) -> str:
        return re.sub(f"{self._key}[012]", "", text)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a chat that was rendered of marked messages."""

        def named(match: re.Match[str]) -> str:
            literal, written = match.groups()
            return literal or (self._prefix + written if written else "")

        return self._copy.encode(self._rendered.sub(named, rendered), add_special_tokens=False).ids
