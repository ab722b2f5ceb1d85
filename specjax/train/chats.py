"""Chats in OpenAI's form as the text that the target reads, and where assistants speak in it. Knows no token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.train.corpus import read_json, read_text

ROLES = {"developer": "system"}
"""New role names -> the ones that templates know, as in the server."""


class Text(NamedTuple):
    """A chat, or running text."""

    text: str
    spans: list[tuple[int, int]] | None  # characters that the target wrote; None: running text
    lost: int = 0  # assistants' turns without a place in the text


class Chats:
    """Renders chats with the template of a tokenizer."""

    def __init__(self, tokenizer: Any, *, everything: bool) -> None:
        self._tokenizer, self._everything = tokenizer, everything
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {each.content: token for token, each in added.items() if each.special}
        if tokenizer.eos_token:
            special[tokenizer.eos_token] = tokenizer.eos_token_id
        self._special = set(special.values())
        names = sorted(special, key=len, reverse=True)
        # The group is the end token of a turn, without the line end that ChatML puts after it.
        self._end = re.compile(rf"({'|'.join(map(re.escape, names)) or '(?!)'})\s*\Z")

    def render(self, messages: list[dict[str, Any]], *, cut: bool) -> Text:
        """The chat up to its last answer; with `cut`, this answer has no end.

        A turn starts where the server lets the target continue: after the earlier messages and the header of an answer.
        It ends where its own message ends. If a template renders this part differently once more messages follow (for
        example without earlier reasoning), the turn has no place in the text and no loss: the server would not show it
        to the target in this form either.

        Raises:
            ValueError: the template refuses the messages, or no turn has a place.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns and not self._everything:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(f"no message has the role assistant; there are {roles:.60}")
        if not self._everything:
            messages = messages[: turns[-1] + 1]
        text = self._rendered(messages)
        spans, reason = [], ""
        for index in turns:
            try:
                start = self._rendered(messages[:index], answer=True)
                end = text if index == len(messages) - 1 else self._rendered(messages[: index + 1])
            except ValueError as error:
                reason = str(error)
                continue
            if not (text.startswith(end) and end.startswith(start) and len(start) < len(end)):
                reason = f"the chat template writes messages[{index}], or what is before it, in another way later on"
                continue
            turn = end[len(start) :]
            close = self._end.search(turn)
            if cut and index == len(messages) - 1:
                body = turn[: close.start()] if close else turn
                body = body if body.endswith(messages[index]["content"]) else body.rstrip()
                text = start + body
                spans.append((len(start), len(text)))
            else:
                spans.append((len(start), len(start) + (close.end(1) if close else len(turn))))
        if not spans and not self._everything:
            raise ValueError(f"no answer can be found in the chat: {reason}")
        text.encode()  # a role, or other output of a template, can hold half a surrogate
        return Text(text, spans, 0 if self._everything else len(turns) - len(spans))

    def _rendered(self, messages: list[dict[str, Any]], *, answer: bool = False) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template: give text or token ids instead of messages")
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False)
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def shows_no_end(self, row: Mapping[str, Any], response: str) -> bool:
        """Whether the response's ids show that the target did not stop. Ids of another tokenizer show nothing."""
        ids = row.get("response_ids")
        if row.get("finish_reason") is not None or not isinstance(ids, list) or set(map(type, ids)) != {int}:
            return False
        if ids[-1] in self._special or not 0 <= min(ids) <= max(ids) < 1 << 32:
            return False
        found = self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        return found.strip("\ufffd \n\t") == response.strip("\ufffd \n\t")


# Fields.


def read_messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of messages, got {value!r:.60}")
    return [_read_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    """The message with its content as one text; other fields stay for the template."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with role and content, got {message!r:.60}")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(read_text(f"{where}.content", part.get("text"), empty=True) for part in content)
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    kept = {key: each for key, each in message.items() if each is not None}
    if calls is not None:
        kept["tool_calls"] = _read_calls(where, calls)
    text = read_text(f"{where}.content", content, empty=True)
    return kept | {"role": ROLES.get(message["role"], message["role"]), "content": text}


def _read_calls(where: str, calls: Any) -> list[Any]:
    """Templates want the arguments as an object; OpenAI writes them as a string of JSON."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}.tool_calls must be a list of objects, got {calls!r:.60}")
    found = []
    where = f"{where}.tool_calls: the arguments"
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            call = call | {"function": function | {"arguments": read_json(where, function["arguments"])}}
        found.append(call)
    return found
