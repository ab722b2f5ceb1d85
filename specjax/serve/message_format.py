"""The format of a model's messages, and the parser of an answer's text into a message.

    <think>\\n2 + 2 is 4.\\n</think>\\n\\nIt is 4.<tool_call>{"name": ...
           reasoning_content          content   tool_calls

`AnswerForm` is the format of calls and reasoning, from flags or from words of the chat template. `Reply` parses text
that comes in pieces: the concatenated deltas of a stream are the message of a whole answer.
"""

from __future__ import annotations

import copy
import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from specjax.checkpoint.prompts import END_THINK, THINK
from specjax.engine.text import Thoughts
from specjax.serve.calls import (
    Arguments,
    Call,
    CallParser,
    CallSearch,
    DeepSeek,
    DeepSeek31,
    Glm,
    Harmony,
    Hermes,
    JsonObject,
    KimiK2,
    Llama3,
    Message,
    Mistral,
    MistralNamed,
    QwenCoder,
    TaggedCalls,
    Text,
    Thought,
)

AUTO, NONE, GPT_OSS = "auto", "none", "gpt-oss"
GPT_OSS_EFFORTS = ("low", "medium", "high")
PARSERS: dict[str, type[CallParser]] = {
    "qwen": Hermes,
    "qwen25": Hermes,
    "hermes": Hermes,
    "qwen3_coder": QwenCoder,
    "glm": Glm,
    "glm45": Glm,
    "kimi_k2": KimiK2,
    "llama3": Llama3,
    "mistral": Mistral,
    "deepseekv3": DeepSeek,
    "deepseekv31": DeepSeek31,
    GPT_OSS: Harmony,
}
"""The formats of function calls by SGLang's names."""
# Words of a template, and the parser for a template that has them all; None: an unsupported format.
_FORMATS: tuple[tuple[tuple[str, ...], type[CallParser] | None], ...] = (
    (("<|channel|>", "<|message|>", "<|call|>"), Harmony),
    (("<tool_call>", "<function=", "<parameter="), QwenCoder),
    (("<function=",), None),  # other models
    (("<tool_call>", "<arg_key>", "<arg_value>"), Glm),
    (("<|tool_call_argument_begin|>",), KimiK2),
    (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"), DeepSeek),
    (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), DeepSeek31),
    (("[TOOL_CALLS]", "[ARGS]"), MistralNamed),
    (("[TOOL_CALLS]",), Mistral),
    (("<tool_call>", '"arguments"'), Hermes),
    (("<|python_tag|>",), Llama3),
    (("ipython",), Llama3),  # Llama 3.2
)
_PROBE = {"name": "specjax_probe", "description": "d", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class AnswerForm:
    """Parts of a model's answers other than plain text.

    Attributes:
        parser: reads function calls; None: their format is unsupported.
        takes_tools: True if the chat template writes functions into the prompt.
        thinks: True if the model may reason before it answers.
        harmony: answers are messages in channels; `Harmony` parses them, with and without functions.
        efforts: supported efforts of reasoning, or those that change nothing; None: the chat template decides.
        special: markers of calls and reasoning that are special tokens.
        tokens: ids of the markers that are tokens.
    """

    parser: type[CallParser] | None = None
    takes_tools: bool = False
    thinks: bool = False
    harmony: bool = False
    efforts: tuple[str, ...] | None = ("none", "medium")
    special: frozenset[str] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def end_think(self) -> int | None:
        """The token that ends reasoning, if there is one."""
        return self.tokens.get("<|end|>" if self.harmony else END_THINK)

    def reasoning_tokens(self, tokens: Sequence[int], called: str = "") -> int:
        """Number of tokens up to the end of reasoning, in an answer that begins with reasoning.

        `called`: text from a call in reasoning without an end. All tokens count if its marker is not a token.
        """
        if self.end_think not in tokens:
            mark = next((mark for mark in self.tokens if called.startswith(mark)), "")
            places = [index for index, token in enumerate(tokens) if mark and token == self.tokens[mark]]
            return places[-called.count(mark)] if 0 < called.count(mark or " ") <= len(places) else len(tokens)
        return len(tokens) - tokens[::-1].index(self.end_think) if self.harmony else tokens.index(self.end_think) + 1

    @property
    def refusal(self) -> str | None:
        """The reason why requests cannot have functions; None if they can."""
        if not self.takes_tools:
            return "the chat template of this model has no place for functions; use another one (--chat-template)"
        if self.parser is None:
            return "the format of this model's calls is unknown; set it with --tool-call-parser"
        return None

    def for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages with earlier calls in the form of the model's template."""
        if self.harmony:
            return harmony_turns(messages)
        if self.parser is None:
            return list(messages)
        ids = dict[str, str]()
        return [_adapted(message, self.parser, ids) for message in messages]


PLAIN = AnswerForm()  # text without calls and reasoning


def answer_form(tokenizer: Any, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerForm:
    """The format of a model's messages. The parsers are values of the flags of these names."""
    if not getattr(tokenizer, "chat_template", None):
        return AnswerForm()
    try:
        source = tokenizer.get_chat_template(tools=[_PROBE])
    except Exception:  # several templates and no default
        source = str(tokenizer.chat_template)
    vocabulary = tokenizer.get_added_vocab()
    parser = next((kind for words, kind in _FORMATS if all(word in source for word in words)), None)
    if tool_call_parser not in (AUTO, NONE):
        parser = PARSERS[tool_call_parser]
    if harmony := parser is Harmony or reasoning_parser == GPT_OSS:
        parser = Harmony
    thinks = reasoning_parser != NONE
    if reasoning_parser == AUTO:
        thinks = harmony or END_THINK in source or END_THINK in vocabulary
    markers = {*(parser.markers() if parser else ()), *((THINK, END_THINK) if thinks else ())}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return AnswerForm(
        parser=None if tool_call_parser == NONE else parser,
        takes_tools=_takes_tools(tokenizer, source),
        thinks=thinks,
        harmony=harmony,
        efforts=AnswerForm.efforts if "reasoning_effort" not in source else GPT_OSS_EFFORTS if harmony else None,
        special=frozenset(markers & special),
        tokens={marker: vocabulary[marker] for marker in sorted(markers) if marker in vocabulary},
    )


def _takes_tools(tokenizer: Any, source: str) -> bool:
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template is a program, and may refuse the example
        return "tools" in source
    return _PROBE["name"] in text


def _adapted(message: Mapping[str, Any], parser: type[CallParser], ids: dict[str, str]) -> Mapping[str, Any]:
    """A message for the template. `ids`: ids of earlier calls, and the ids in the template, which are added here."""

    def new_id(id: Any) -> Any:
        return short_id(id, parser.id_length) if parser.id_length is not None and isinstance(id, str) else id

    message, calls = dict(message), []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if parser.text_arguments and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        id = new_id(call.get("id"))
        if parser.numbered_ids:
            ids[str(id)] = id = f"functions.{function['name']}:{len(ids)}"
        calls.append({**call, "function": function, **({} if id is None else {"id": id})})
    if calls:
        message["tool_calls"] = calls
    if (id := message.get("tool_call_id")) is not None:
        message["tool_call_id"] = ids.get(id, new_id(id))
    return message


def harmony_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages for the template of gpt-oss, which renders the first call of a message, and as the thoughts before it
    either `thinking` or the content. Each call becomes a message, followed by its results."""
    turns, placed = list[Mapping[str, Any]](), set[int]()
    for index, message in enumerate(messages):
        turn = dict(message)
        calls, thoughts = turn.pop("tool_calls", None) or (), turn.pop("reasoning_content", "")
        if calls and thoughts and turn["content"]:
            thoughts, turn["content"] = f"{thoughts}\n{turn['content']}", ""
        turn |= {"thinking": thoughts} if thoughts else {}
        if not calls and index not in placed:
            turns.append(turn)
        results, later = dict[Any, list[int]](), index + 1
        while len(calls) > 1 and later < len(messages) and messages[later]["role"] == "tool":
            results.setdefault(messages[later].get("tool_call_id"), []).append(later)
            later += 1
        for call in calls:
            own = results.pop(call.get("id"), ())
            placed.update(own)
            turns += [turn | {"tool_calls": [call]}, *(messages[later] for later in own)]
            turn = {"role": "assistant", "content": ""}
    return turns


def short_id(id: str, length: int) -> str:
    """The id if it has `length` letters and digits, else `length` digits of its hash."""
    if len(id) == length and id.isascii() and id.isalnum():
        return id
    return blake2b(id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()[:length]


Delta: TypeAlias = dict[str, Any]


class _Trimmed:
    """Removes white space at the start and the end of a text that comes in pieces."""

    def __init__(self, *, start: bool, end: bool) -> None:
        self.start, self._end = start, end
        self._space = ""  # at the end so far, or before a part that was cut out

    def add(self, text: str) -> str:
        if self.start:
            text = text.lstrip()
            if not text:
                return ""
            self.start = False
        text = self._space + text
        self._space = text[len(text.rstrip()) :] if self._end else ""
        return text[: len(text) - len(self._space)]

    def cut(self) -> None:
        """Marks the place of a part that is cut out. White space after it is dropped; white space before it is kept
        if more text follows."""
        self.start = True

    def end(self) -> str:
        return "" if self.start else self._space


class Reply:
    """The message of one choice.

    Args:
        reasoning: separate reasoning from content.
        thinking: the prompt ends inside reasoning.
        gathered: send reasoning as one delta, once content or a call follows.
        search: finds calls in reasoning that has no end. None: there are no calls.
    """

    def __init__(
        self,
        parser: CallParser,
        *,
        reasoning: bool,
        thinking: bool = False,
        gathered: bool = False,
        search: CallSearch | None = None,
    ) -> None:
        self._parser, self._gathered, self._search = parser, gathered, search
        self._reasoning = reasoning
        is_split = not isinstance(parser, Harmony) and (reasoning or search is not None)
        self._split = Thoughts(thinking) if is_split else None
        self._unsplit = ""  # text whose part is undecided, if reasoning is content
        self._markers = CallParser(hidden=parser.hidden)  # of reasoning that is content
        self._begin_message()
        self._deltas: list[Delta] = []
        self._content = ""
        self._thought = ""
        self._unsent = ""  # gathered reasoning
        self._calls: list[dict[str, Any]] = []

    @property
    def called(self) -> str:
        """The text from the first call on, if it is in reasoning without an end."""
        is_open = self._split is not None and not self._split.ended
        return self._search.held if is_open and self._search is not None and self._search.found else ""

    @property
    def has_thought(self) -> bool:
        return self._reasoning and bool(self._thought if self._split is None else self._split.begun)

    @property
    def has_called(self) -> bool:
        """True if there are calls, the last one is complete, and the text does not end where another one begins."""
        return bool(self._calls) and not self._parser.is_cut and is_whole(self._calls[-1]["function"]["arguments"])

    def feed(self, text: str, *, last: bool = False) -> list[Delta]:
        """Adds text, and returns new deltas of the message. `last`: no text follows."""
        if self._split is not None:
            text = self._think(text, last)
        if self._split is None or self._split.ended or (last and self.called):
            self._answer(text, last)
        elif last:
            self._emit("content", self._text.end())
        if last:
            self._send_gathered()
        deltas, self._deltas = self._deltas, []
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole message, after the last text."""
        content = None if self._calls and not self._content else self._content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            message["reasoning_content"] = self._thought or None
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _begin_message(self) -> None:
        self._thoughts, self._text = _Trimmed(start=True, end=True), _Trimmed(start=False, end=True)
        self._is_new = True  # the next text is not joined to the text before

    def _think(self, text: str, last: bool) -> str:
        """Reads text that may be reasoning. Returns the text of the answer."""
        assert self._split is not None
        self._unsplit += text
        thoughts, answer = self._split.split(text, last=last)
        if not self._reasoning:  # with its markers and white space
            thoughts = self._unsplit[: len(self._unsplit) - len(self._split.held) - len(answer)]
        self._unsplit = self._split.held
        if self._search is not None:
            thoughts = self._search.feed(thoughts, last=last)
            if self._split.ended:  # calls in it are quotes
                thoughts, self._search = thoughts + self._search.held, None
        if self._reasoning:
            self._emit("reasoning_content", self._thoughts.add(thoughts))
        else:
            for part in self._markers.feed(thoughts, last=last or self._split.ended):
                assert isinstance(part, Text)
                self._emit("content", self._text.add(part.text))
        return self.called if last and self.called else answer

    def _answer(self, text: str, last: bool) -> None:
        for part in self._parser.feed(text, last=last):
            match part:
                case Thought() if self._reasoning:
                    self._emit("reasoning_content", self._thoughts.add(part.text))
                case Text() | Thought():
                    self._emit("content", self._text.add(part.text))
                case Message():
                    self._begin_message()
                case Call():
                    self._text.cut()
                    self._call(part.name)
                case Arguments():
                    self._argue(part.text)
        if last:
            self._emit("content", self._text.end())

    def _emit(self, field: str, text: str) -> None:
        if not text:
            return
        if self._is_new and (self._content if field == "content" else self._thought):
            text = "\n" + text
        self._is_new = False
        if field == "content":
            self._send_gathered()
            self._content += text
        else:
            self._thought += text
            if self._gathered:
                self._unsent += text
                return
        if self._deltas and field in self._deltas[-1]:
            self._deltas[-1][field] += text
        else:
            self._deltas.append({field: text})

    def _send_gathered(self) -> None:
        if self._unsent:
            self._deltas.append({"reasoning_content": self._unsent})
            self._unsent = ""

    def _call(self, name: str) -> None:
        self._send_gathered()
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._deltas.append({"tool_calls": [{"index": len(self._calls), **copy.deepcopy(call)}]})
        self._calls.append(call)

    def _argue(self, text: str) -> None:
        self._calls[-1]["function"]["arguments"] += text
        piece = {"index": len(self._calls) - 1, "function": {"arguments": text}}
        before = self._deltas[-1].get("tool_calls", [{}])[0] if self._deltas else {}
        if before.get("index") == piece["index"] and "id" not in before:
            before["function"]["arguments"] += text
        else:
            self._deltas.append({"tool_calls": [piece]})


def is_whole(arguments: str) -> bool:
    """True if the JSON object of a call's arguments is closed, not cut off."""
    reader = JsonObject()
    _, size = reader.read(arguments)
    return reader.ended and not arguments[size:].strip()


@dataclass(frozen=True)
class ReplyOptions:
    """How the answers to one request become messages.

    Attributes:
        parser: parser of calls in the model's format; None: no functions were offered.
        names: names of the functions that may be called.
        most: maximum number of reported calls; None: all.
        hidden: special tokens that the text keeps for the parsers, and that never become content.
        reasoning, gathered: as `Reply`.
        thinks: the answer may begin with reasoning, whose calls are quotes.
        schemas: maps functions to the JSON schemas of their parameters.
    """

    parser: type[CallParser] | None = None
    names: tuple[str, ...] = ()
    most: int | None = None
    hidden: frozenset[str] = frozenset()
    reasoning: bool = False
    gathered: bool = False
    thinks: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def reply(self, *, thinking: bool) -> Reply:
        """`thinking`: the prompt ends inside reasoning or, in the Harmony format, where a header follows."""
        more: dict[str, Any] = {}
        if self.parser is not None and issubclass(self.parser, TaggedCalls):
            more["schemas"] = self.schemas
        if self.parser is Harmony:
            more["opened"] = thinking
        make = functools.partial(self.parser or CallParser, self.names, **more)
        search = CallSearch(make) if self.names and (self.reasoning or self.thinks) else None
        parser = make(hidden=self.hidden, most=self.most)
        return Reply(parser, reasoning=self.reasoning, thinking=thinking, gathered=self.gathered, search=search)
