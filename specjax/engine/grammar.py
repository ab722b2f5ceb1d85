"""Grammars that a text must follow, and their compilation for one tokenizer.

A grammar is compiled once and kept for later requests (`Grammars`). The library is llguidance; beside this module only
`specjax.engine.constraint` knows it. Host side; knows nothing of the device.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.engine.constraint import SLOW_SECONDS, Constraint, Reasoning, said

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json_schema", "regex", "ebnf", "lark")
MAX_SOURCE = 2**16  # characters

KEPT = 64  # compiled grammars that are kept for later requests, those used last
KEPT_SOURCE = 2**19  # characters that their sources may have together
COMPILE_SECONDS = 0.5  # of the processor, for one grammar
SHORT = 256  # characters of a JSON schema or an expression up to which it cannot take long to compile
LEXER_STATES = 20_000  # of a compiled grammar, 1 to 2 kB each
SLOW_THREADS = 2
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's `json.dumps` writes it: a model cannot end in a loop of spaces, and what stands between
two values is forced. A schema's own "x-guidance" goes first."""

GRAMMAR_FAILED = "the text cannot go on"  # the start of an abort's message

PRIVATE = "\uf8ff"  # a character for private use, which no tokenizer's own tokens begin with
MISREAD = re.compile(r"(?<!\\)(?:\\\\)*\\u0")
"""An escape in GBNF that llguidance reads as another character: it drops the zeros."""


class GrammarError(ValueError):
    """A grammar is wrong, too large, or not supported; or the tokenizer is not supported."""


@dataclass(frozen=True)
class Grammar:
    """What a text must match as a whole.

    Attributes:
        kind: json_schema, regex (without look-around), lark (llguidance's dialect, with the rule `start`), or
            ebnf: Lark, or llama.cpp's GBNF with the rule `root`, which llguidance translates.
        source: the grammar's text; a JSON schema that is "" or "{}" stands for any JSON object.

    Raises:
        GrammarError: an unknown kind, or a source that is no text, empty or too long. Whether the source is right is
            known when a request is made of it.
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"has the kind {self.kind!r:.40}; there are: {', '.join(KINDS)}")
        if not isinstance(self.source, str):
            raise GrammarError(f"must be a text, got {self.source!r:.60}")
        if len(self.source) > MAX_SOURCE:
            raise GrammarError(f"has {len(self.source)} characters; at most {MAX_SOURCE} are supported")
        if not self.source.strip() and self.kind != "json_schema":
            raise GrammarError("is empty")

    @classmethod
    def json(cls, schema: Any) -> Grammar:
        """JSON that follows a schema, an object or its text."""
        if not isinstance(schema, dict | str) or schema == "":
            raise GrammarError(f"must be a JSON schema, as an object or a text, got {schema!r:.60}")
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def response_format(cls, given: Any) -> Grammar | None:
        """OpenAI's `response_format`; None: any text."""
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls("json_schema")
        found = given.get("json_schema") if kind == "json_schema" else None
        if not isinstance(found, dict) or "schema" not in found:
            forms = '{"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
            raise GrammarError(f"must be {forms}, got {given!r:.60}")
        return cls.json(found["schema"])

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"must be a list of texts that are not empty, got {texts!r:.60}")
        return cls("lark", "start: " + " | ".join(map(_quoted, texts)))


def _quoted(text: str) -> str:
    """A text as Lark quotes it, whose lexer takes no DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def library_source(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises GrammarError; some errors show only when it is compiled."""
    from llguidance import LLMatcher, grammar_from
    from llguidance.gbnf_to_lark import is_lark_syntax

    kind, source = grammar.kind, grammar.source
    if kind == "json_schema":
        try:
            schema = json.loads(source or "{}")
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"is not valid JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"must be a JSON schema, an object, got {source!r:.60}")
        source = json.dumps({"type": "object"} if schema == {} else schema)
    elif kind == "ebnf" and not is_lark_syntax(source) and MISREAD.search(source):
        raise GrammarError(r"is refused: \u0... is not supported in GBNF: write the character itself")
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
        return grammar_from(kind, source)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(f"is refused: {str(error)[:200]}") from error


_PROGRAM = f"""
import contextlib, signal, sys
from llguidance import LLMatcher, LLTokenizer, grammar_from
signal.setitimer(signal.ITIMER_PROF, {COMPILE_SECONDS})
source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
with contextlib.suppress(ValueError):
    LLMatcher(LLTokenizer("byte"), grammar_from(sys.argv[1], source), log_level=0)
"""
_LATEST = 20.0  # seconds, by the clock, on a machine that does other things


def compiles_soon(grammar: Grammar) -> bool:
    """Whether a grammar is compiled, or refused, within `COMPILE_SECONDS`. True where no process can be
    started to try it.

    Some schemas take exponential time: a place whose text must match twenty patterns at once takes a minute,
    one with forty patterns an age. Rules of EBNF that repeat each other take exponential time, too, and a
    chain of thousands of rules takes seconds to translate. The compiler cannot be interrupted within a
    process, and its limits do not hold there. So another process compiles the grammar first, and ends after
    that time.
    """
    is_ebnf = grammar.kind == "ebnf"
    kind, source = ("ebnf", grammar.source) if is_ebnf else ("llguidance", library_source(grammar))
    if (len(source) <= SHORT and not is_ebnf) or not sys.executable:
        return True
    command = [sys.executable, "-c", _PROGRAM, kind]
    data = source.encode("utf-8", "surrogatepass")
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_LATEST, check=False)
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True
    return done.returncode not in (-signal.SIGPROF, 128 + signal.SIGPROF)


class Compiled(NamedTuple):
    """A grammar."""

    matcher: LLMatcher  # at its start, never advanced
    slow: bool  # the first mask took more than `SLOW_SECONDS`


class Grammars:
    """Compiled grammars for one tokenizer. Safe to call from several threads.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: V, of the logits; at least the tokenizer's.
        eos_ids: tokens that may end a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # for `_kept`
        self._loading = threading.Lock()

    def prepare(self) -> None:
        """Loads what every grammar needs, half a second's work, which the first one would wait for. A tokenizer that
        cannot have grammars is no error here: the first request with one is told."""
        with contextlib.suppress(GrammarError):
            _ = self._core

    def holds(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled."""
        return grammar in self._kept

    def constraint(self, grammar: Grammar, reasoning: Reasoning | None = None) -> Constraint:
        """For a new sequence. Raises GrammarError."""
        matcher, slow = self._compiled(grammar)
        eos_ids, renew = tuple(self._core.eos_tokens), partial(self._renew, grammar)
        return Constraint(matcher, self._vocab_size, eos_ids, reasoning, submit=self._submit, renew=renew, slow=slow)

    def _renew(self, grammar: Grammar, worn: LLMatcher) -> tuple[LLMatcher, bool]:
        """A compiled grammar in place of one that has met a limit of its lexer; whether it is a new one.

        Sequences with one compiled grammar share its lexer, whose states the limits count, so a grammar that many have
        used wears out.
        """
        with self._lock:
            kept = self._kept.get(grammar)
        if kept is not None and kept.matcher is not worn:
            return kept.matcher, False
        found = Compiled(self._matcher(library_source(grammar)), kept is not None and kept.slow)
        self._keep(grammar, found)
        return found.matcher, True

    def _matcher(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        return LLMatcher(self._core, source, log_level=0, limits=limits)

    def _submit(self, task: Callable[[], None]) -> Future[None]:
        return self._pool.submit(task)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="specjax-mask")

    def _compiled(self, grammar: Grammar) -> Compiled:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        found = self._compile(grammar)
        self._keep(grammar, found)
        return found

    def _keep(self, grammar: Grammar, found: Compiled) -> None:
        with self._lock:
            self._kept[grammar] = found
            while len(self._kept) > KEPT or sum(len(each.source) for each in self._kept) > KEPT_SOURCE:
                self._kept.popitem(last=False)

    def _compile(self, grammar: Grammar) -> Compiled:
        if not compiles_soon(grammar):
            fewer = "give fewer patterns for one place, or fewer rules"
            raise GrammarError(f"takes more than {COMPILE_SECONDS:g} s to compile: {fewer}")
        matcher = self._matcher(library_source(grammar))
        started = time.thread_time()
        if not matcher.is_error():  # some errors show with the first token
            first = matcher.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                raise GrammarError(f"cannot be followed: {said(first) or 'no token may come first'}")
        if matcher.is_error():
            raise GrammarError(f"is refused: {said(matcher)}")
        return Compiled(matcher, time.thread_time() - started > SLOW_SECONDS)

    @property
    def _core(self) -> LLTokenizer:
        with self._loading:  # takes some 0.3 s
            return self._loaded

    @cached_property
    def _loaded(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        problem = "structured output is not available for this model's tokenizer"
        core = getattr(self._tokenizer, "backend_tokenizer", None)
        if core is None:
            raise GrammarError(f"cannot be used: {problem}, which is not one of the tokenizers library")
        try:
            copy = Tokenizer.from_str(core.to_str())
            copy.no_padding()
            copy.no_truncation()
            found = LLTokenizer(_apart(copy.to_str()), n_vocab=self._vocab_size, eos_token=self._eos_ids or None)
        except Exception as error:
            raise GrammarError(f"cannot be used: {problem}: {str(error)[:200]}") from error
        if not all(0 <= token < self._vocab_size for token in found.eos_tokens):
            raise GrammarError(f"cannot be used: {problem}, which has no token that ends a text")
        return found


def _apart(text: str) -> str:
    """A tokenizer's JSON in which special tokens have names that no text of a grammar spells: text that reads as one,
    such as a choice of <|im_end|>, is text."""
    found = json.loads(text)
    renamed = {each["content"]: PRIVATE + each["content"] for each in found["added_tokens"] if each["special"]}
    for each in found["added_tokens"]:
        each["content"] = renamed.get(each["content"], each["content"])
    vocab = found["model"].get("vocab")
    if isinstance(vocab, dict):
        found["model"]["vocab"] = {renamed.get(name, name): id for name, id in vocab.items()}
    elif isinstance(vocab, list):
        found["model"]["vocab"] = [[renamed.get(name, name), *more] for name, *more in vocab]
    return json.dumps(found)
