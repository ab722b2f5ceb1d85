"""The format of a model's messages, and the parser of an answer's text into a message.

    <think>\\n2 + 2 is 4.\\n</think>\\n\\nIt is 4.<tool_call>{"name": ...
           reasoning_content          content   tool_calls

`AnswerForm` is the format of calls and reasoning, from flags or from words of the chat template. `Reply` parses text
that comes in pieces. A message has parts in order, and each part begins, grows and ends:

    Begin(0, thoughts), Grow(0, "2 + 2 is 4."), End(0), Begin(1, text), ... , End(1), Begin(2, call), ...

In OpenAI's form they are deltas: those of a stream, concatenated, are the message of a whole answer.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from specjax.checkpoint.prompts import HARMONY, THINK_MARKS, ThinkMarks, begins_thinking, prompt_tail, think_marks
from specjax.engine.chat.calls import (
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
    Text,
    Thought,
)
from specjax.engine.chat.gemma_calls import Gemma4
from specjax.engine.text import Thoughts

AUTO, NONE, GPT_OSS = "auto", "none", "gpt-oss"
GPT_OSS_EFFORTS = ("low", "medium", "high")
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
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
    "gemma4": Gemma4,
    GPT_OSS: Harmony,
}
"""The formats of function calls by SGLang's names."""
# Words of a template, and the parser for a template that has them all; None: an unsupported format.
_FORMATS: tuple[tuple[tuple[str, ...], type[CallParser] | None], ...] = (
    (("<|channel|>", "<|message|>", "<|call|>"), Harmony),
    (("<|tool_call>", "<|tool_response>"), Gemma4),
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
        marks: tokens around reasoning, other than in the Harmony format.
        special: markers of calls and reasoning that are special tokens.
        tokens: ids of the markers that are tokens.
    """

    parser: type[CallParser] | None = None
    takes_tools: bool = False
    thinks: bool = False
    harmony: bool = False
    efforts: tuple[str, ...] | None = ("none", "medium")
    marks: ThinkMarks = THINK_MARKS
    special: frozenset[str] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def end_think(self) -> int | None:
        """The token that ends reasoning, if there is one."""
        return self.tokens.get("<|end|>" if self.harmony else self.marks.end)

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

    def is_open(self, prompt: Sequence[int], tokenizer: Any) -> bool:
        """True if the prompt ends inside reasoning or, in the Harmony format, where a header follows."""
        header = self.harmony and prompt_tail(prompt, tokenizer).endswith(HARMONY)
        return header or bool(begins_thinking(prompt, tokenizer))

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
    vocabulary, marks = tokenizer.get_added_vocab(), think_marks(tokenizer)
    parser = next((kind for words, kind in _FORMATS if all(word in source for word in words)), None)
    if tool_call_parser not in (AUTO, NONE):
        parser = PARSERS[tool_call_parser]
    if harmony := parser is Harmony or reasoning_parser == GPT_OSS:
        parser = Harmony
    thinks = reasoning_parser != NONE
    if reasoning_parser == AUTO:
        thinks = harmony or marks.end in source or marks.end in vocabulary
    markers = {*(parser.markers() if parser else ()), *(marks[:2] if thinks else ())}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return AnswerForm(
        parser=None if tool_call_parser == NONE else parser,
        takes_tools=_takes_tools(tokenizer, source),
        thinks=thinks,
        harmony=harmony,
        efforts=_efforts(tokenizer, source, harmony),
        marks=marks,
        special=frozenset(markers & special),
        tokens={marker: vocabulary[marker] for marker in sorted(markers) if marker in vocabulary},
    )


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Variables of the chat template for an effort of reasoning. `none` also closes thoughts that are open by default,
    as Qwen3.5's."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _efforts(tokenizer: Any, source: str, harmony: bool) -> tuple[str, ...] | None:
    """`AnswerForm.efforts`: those for which the template renders. Qwen3.8's refuses all but three."""
    if "reasoning_effort" not in source:
        return AnswerForm.efforts
    if harmony:
        return GPT_OSS_EFFORTS

    def accepts(effort: str) -> bool:
        try:
            messages = [{"role": "user", "content": "x"}]
            tokenizer.apply_chat_template(messages, tokenize=False, **effort_variables(effort))
        except Exception:  # as in `_takes_tools`
            return False
        return True

    return tuple(filter(accepts, get_args(Effort))) or None


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


def is_whole(arguments: str) -> bool:
    """True if the JSON object of a call's arguments is closed, not cut off."""
    reader = JsonObject()
    _, size = reader.read(arguments)
    return reader.ended and not arguments[size:].strip()


@dataclass
class Part:
    """A part of a message."""

    kind: Literal["thoughts", "text", "call"]
    text: str = ""  # so far; a call's arguments are JSON that may be cut off
    id: str = ""  # of a call
    name: str = ""  # of the called function

    @property
    def is_cut(self) -> bool:
        """True for a call with incomplete arguments."""
        return self.kind == "call" and not is_whole(self.text)

    def as_call(self, arguments: str) -> dict[str, Any]:
        """A call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class Begin(NamedTuple):
    number: int
    part: Part


class Grow(NamedTuple):
    number: int
    part: Part
    text: str


class End(NamedTuple):
    number: int
    part: Part


Change: TypeAlias = Begin | Grow | End
Delta: TypeAlias = dict[str, Any]


class _Trimmed:
    """Removes white space at the end, and at the `start`, of a text that comes in pieces."""

    def __init__(self, *, start: bool) -> None:
        self.start = start
        self._space = ""  # at the end so far, or before a part that was cut out

    def add(self, text: str) -> str:
        if self.start:
            text = text.lstrip()
            if not text:
                return ""
            self.start = False
        text = self._space + text
        self._space = text[len(text.rstrip()) :]
        return text[: len(text) - len(self._space)]

    def cut(self) -> None:
        """Marks the place of a part that is cut out. White space after it is dropped; white space before it is kept
        if more text follows."""
        self.start = True

    def end(self) -> str:
        return "" if self.start else self._space


@dataclass(frozen=True)
class ReplyOptions:
    """How the answers to one request become messages.

    Attributes:
        parser: parser of calls in the model's format; None: no functions were offered.
        names: names of the functions that may be called.
        most: maximum number of reported calls; None: all.
        hidden: special tokens that the text keeps for the parsers, and that never become content.
        reasoning: separate reasoning from content.
        thinks: the answer may begin with reasoning, whose calls are quotes.
        marks: tokens around reasoning.
        schemas: maps functions to the JSON schemas of their parameters.
    """

    parser: type[CallParser] | None = None
    names: tuple[str, ...] = ()
    most: int | None = None
    hidden: frozenset[str] = frozenset()
    reasoning: bool = False
    thinks: bool = False
    marks: ThinkMarks = THINK_MARKS
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def reply(self, *, thinking: bool) -> Reply:
        """`thinking`: the prompt ends inside reasoning or, in the Harmony format, where a header follows."""
        return Reply(self, thinking)


class Reply:
    """The message of one choice, in `parts`. `thinking`: as in `ReplyOptions.reply`."""

    def __init__(self, options: ReplyOptions, thinking: bool) -> None:
        more: dict[str, Any] = {"schemas": options.schemas}
        is_harmony = options.parser is Harmony
        if is_harmony:
            more["opened"] = thinking
        make = functools.partial(options.parser or CallParser, options.names, **more)
        self._parser = make(hidden=options.hidden, most=options.most)
        self._reasoning = options.reasoning
        searches = bool(options.names) and (options.reasoning or options.thinks)
        self._search = CallSearch(make) if searches else None  # finds calls in reasoning that has no end
        splits = not is_harmony and (searches or options.reasoning)
        self._split = Thoughts(thinking, marks=options.marks) if splits else None
        self._unsplit = ""  # text whose part is undecided, if reasoning is content
        self._markers = CallParser(hidden=options.hidden)  # of reasoning that is content
        self._begin_message()
        self.parts: list[Part] = []
        self._changes: list[Change] = []

    @property
    def called(self) -> str:
        """The text from the first call on, if it is in reasoning without an end."""
        is_open = self._split is not None and not self._split.ended
        return self._search.held if is_open and self._search is not None and self._search.found else ""

    @property
    def has_thought(self) -> bool:
        return self._reasoning and (bool(self._of("thoughts")) if self._split is None else self._split.begun)

    @property
    def has_called(self) -> bool:
        """True if there are calls, the last one is complete, and the text does not end where another one begins."""
        calls = self._of("call")
        return bool(calls) and not self._parser.is_cut and not calls[-1].is_cut

    def changes(self, text: str, *, last: bool = False) -> list[Change]:
        """Adds text, and returns the changes of the parts. `last`: no text follows; then there is at least one part."""
        if self._split is not None:
            text = self._think(text, last)
        if self._split is None or self._split.ended or (last and self.called):
            self._answer(text, last)
        elif last:
            self._put("text", self._text.end())
        if last and not self.parts:
            self._begin(Part("text"))
        if last:
            self._changes.append(End(len(self.parts) - 1, self.parts[-1]))
        changes, self._changes = self._changes, []
        return changes

    def feed(self, text: str, *, last: bool = False) -> list[Delta]:
        """As `changes`, in the form of OpenAI's deltas."""
        deltas = list[Delta]()
        for change in self.changes(text, last=last):
            part, index = change.part, len(self._of("call", change.number))
            match change:
                case Begin() if part.kind == "call":
                    deltas.append({"tool_calls": [{"index": index, **part.as_call("")}]})
                case Grow() if part.kind == "call":
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": change.text}}]})
                case Grow():
                    deltas.append({"content" if part.kind == "text" else "reasoning_content": change.text})
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole message in OpenAI's form, after the last text."""
        content, thoughts = ("".join(part.text for part in self._of(kind)) for kind in ("text", "thoughts"))
        calls = [part.as_call(part.text) for part in self._of("call")]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if self._reasoning:
            message["reasoning_content"] = thoughts or None
        if calls:
            message["tool_calls"] = calls
        return message

    def _of(self, kind: str, end: int | None = None) -> list[Part]:
        """The parts of a kind, up to the number `end`."""
        return [part for part in self.parts[:end] if part.kind == kind]

    def _begin_message(self) -> None:
        self._thoughts, self._text = _Trimmed(start=True), _Trimmed(start=False)
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
            self._put("thoughts", self._thoughts.add(thoughts))
        else:
            for part in self._markers.feed(thoughts, last=last or self._split.ended):
                assert isinstance(part, Text)
                self._put("text", self._text.add(part.text))
        return self.called if last and self.called else answer

    def _answer(self, text: str, last: bool) -> None:
        for part in self._parser.feed(text, last=last):
            match part:
                case Thought() if self._reasoning:
                    self._put("thoughts", self._thoughts.add(part.text))
                case Text() | Thought():
                    self._put("text", self._text.add(part.text))
                case Message():
                    self._begin_message()
                case Call():
                    self._text.cut()
                    self._begin(Part("call", id=f"call_{secrets.token_hex(12)}", name=part.name))
                case Arguments():
                    self._grow(part.text)
        if last:
            self._put("text", self._text.end())

    def _put(self, kind: Literal["thoughts", "text"], text: str) -> None:
        """Extends the last part, or begins another."""
        if not text:
            return
        if self._is_new and self._of(kind):
            text = "\n" + text
        self._is_new = False
        if not self.parts or self.parts[-1].kind != kind:
            self._begin(Part(kind))
        self._grow(text)

    def _begin(self, part: Part) -> None:
        if self.parts:
            self._changes.append(End(len(self.parts) - 1, self.parts[-1]))
        self.parts.append(part)
        self._changes.append(Begin(len(self.parts) - 1, part))

    def _grow(self, text: str) -> None:
        part, number = self.parts[-1], len(self.parts) - 1
        part.text += text
        if self._changes and isinstance(before := self._changes[-1], Grow):
            text = before.text + text
            self._changes.pop()
        self._changes.append(Grow(number, part, text))
