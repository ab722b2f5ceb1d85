"""Structured output: the grammar that a request's text must follow, and what it allows after each token.

A grammar is compiled once and kept for later requests (`Grammars`). Each sequence has a `Constraint`, which consumes
the tokens that were emitted and gives a bit for each token that may come next: at the root of a draft tree, and at all
its nodes. What it allows depends on the tokens so far and on nothing else, so that the text is the same with and
without drafts. The library is llguidance; nothing else imports it. Host side; knows nothing of the device.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specjax.engine.grammar_check import SECONDS, compiles_soon

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json_schema", "regex", "ebnf", "lark")
MAX_SOURCE = 2**16  # characters

KEPT = 64  # compiled grammars that are kept for later requests, those used last
KEPT_SOURCE = 2**19  # characters that their sources may have together
LEXER_STATES = 20_000  # of one sequence's grammar, 1 to 2 kB each
WALK_SECONDS = 0.05  # after which no more nodes below the roots of a step's trees are looked at
SLOW_SECONDS = 0.005  # of the processor for a mask, from which on a sequence's masks are computed by other threads
SLOW_THREADS = 2
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's `json.dumps` writes it: a model cannot end in a loop of spaces, and what stands between
two values is forced. A schema's own "x-guidance" goes first."""

GRAMMAR_FAILED = "the text cannot go on"  # the start of an abort's message

WORD = 32  # bits
PRIVATE = "\uf8ff"  # a character for private use, which no tokenizer's own tokens begin with
ALL = np.uint32(2**32 - 1)


class GrammarError(ValueError):
    """A grammar is wrong, too large, or not supported; or the tokenizer is not supported."""


@dataclass(frozen=True)
class Grammar:
    """What a text must match as a whole.

    Attributes:
        kind: json_schema, regex (without look-around), ebnf (GBNF, as llama.cpp and SGLang take it, with the rule
            `root`), or lark (llguidance's dialect, with the rule `start`; `<|name|>` is a special token).
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
    """The grammar in llguidance's form. Raises GrammarError if it is wrong; not all that is wrong is found here."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind != "json_schema":
        try:
            return grammar_from("ebnf" if grammar.kind == "ebnf" else _plain(grammar.kind), grammar.source)
        except Exception as error:  # of the translation from GBNF: whatever it raises is about this text
            raise GrammarError(f"is not right: {str(error)[:200] or type(error).__name__}") from error
    try:
        schema = json.loads(grammar.source or "{}")
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"must be a JSON schema, an object, got {grammar.source!r:.60}")
    text = json.dumps({"type": "object"} if schema == {} else schema)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)
    except ValueError as error:
        raise GrammarError(f"is refused: {error}") from error


def _plain(kind: str) -> Any:
    return kind


class Reasoning(NamedTuple):
    """Tokens around what a model thinks before it answers. The grammar begins after `end`."""

    start: int
    end: int
    begun: bool  # by the prompt; else the model may begin


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
        eos_ids = tuple(self._core.eos_tokens)
        return Constraint(matcher, self._vocab_size, eos_ids, reasoning, submit=self._submit, slow=slow)

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
        with self._lock:
            self._kept[grammar] = found
            while len(self._kept) > KEPT or sum(len(each.source) for each in self._kept) > KEPT_SOURCE:
                self._kept.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        if not compiles_soon(source := library_source(grammar)):
            raise GrammarError(f"takes more than {SECONDS:g} s to compile: give fewer patterns for one place")
        matcher = LLMatcher(self._core, source, log_level=0, limits=limits)
        started = time.thread_time()
        if not matcher.is_error():  # some errors show with the first token
            first = matcher.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                raise GrammarError(f"cannot be followed: {_said(first) or 'no token may come first'}")
        if matcher.is_error():
            raise GrammarError(f"is refused: {_said(matcher)}")
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


def _said(matcher: LLMatcher) -> str:
    """The library's message."""
    said = matcher.get_error().replace("<non-verbose/>", "").strip()[:400]
    return "no text, of any length, follows it" if said == "NoExtensionBias" else said


class Phase(Enum):
    START = "start"  # the next token may begin the reasoning
    REASONING = "reasoning"  # any token but an end may come
    ANSWER = "answer"  # follows the grammar


class Constraint:
    """What one sequence may say next.

    Attributes:
        failure: why the sequence cannot go on, found when its next mask was computed; None: it can.
        eos_ids: tokens that end the text where the grammar may end.
        slow: a mask took more than `SLOW_SECONDS`. From then on `submit` runs what computes them, in another thread, so
            that other requests go on meanwhile; no tokens are forced, and none drafted.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        reasoning: Reasoning | None = None,
        *,
        submit: Callable[[Callable[[], None]], Future[None]],
        slow: bool = False,
    ) -> None:
        self.slow, self._submit = slow, submit
        self._pending: Future[None] | None = None  # computes `_mask`
        self._compiled, self._words = compiled, -(-vocab_size // WORD)
        self._matcher: LLMatcher | None = None  # made at the first use: many sequences may wait
        self.eos_ids, self._reasoning = eos_ids, reasoning
        self._consumed: list[int] = []  # by the matcher
        self._ahead: list[int] = []  # and besides, while a tree is walked
        self._phase = Phase.ANSWER if reasoning is None else Phase.REASONING if reasoning.begun else Phase.START
        self._mask: np.ndarray | None = None  # of the next token, once it is asked for
        self.failure: str | None = None
        self._ended = False  # by one of `eos_ids`

    @property
    def over(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher is not None and self._matcher.is_stopped()

    def consume(self, tokens: Sequence[int]) -> None:
        """After these tokens were emitted. A limit of the library that they exceed is a `failure`."""
        self._mask = None
        for token in tokens:
            if self._ended or self._step_phase(token):
                continue
            if not self._matching.consume_token(token):
                self._fail()
                return
            self._consumed.append(token)
            self._ended = token in self.eos_ids

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit ``v % 32`` of word ``v // 32`` says whether token v may come next. All bits, and
        `failure`, where none may. Waits for the thread that computes it, if one does."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        if self._mask is None:
            self._compute()
        assert self._mask is not None
        return self._mask

    def ask(self) -> Future[None] | None:
        """What the next token's mask waits for, begun if it was not; None: `mask` answers soon.

        Until it is done nothing else may be asked of this constraint.
        """
        if self.slow and self._mask is None and self._pending is None:
            self._pending = self._submit(self._compute)
        return None if self._pending is None or self._pending.done() else self._pending

    def _compute(self) -> None:
        started, found = time.thread_time(), np.zeros(self._words, np.uint32)
        self._fill(found)
        if not found.any():
            self._fail()
            found[:] = ALL
        self._mask = found
        self.slow = self.slow or time.thread_time() - started > SLOW_SECONDS

    def _fail(self) -> None:
        self.failure = f"its grammar cannot be followed: {_said(self._matching) or 'no token may come next'}"

    def problem(self) -> str | None:
        """`failure`, once the next token's mask is known."""
        self.mask()
        return self.failure

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next, as far as they are known, at most so many."""
        if self._phase is not Phase.ANSWER or self.failure is not None or self.slow:
            return []
        tokens = self._matching.compute_ff_tokens()[:most]
        count = self._matching.try_consume_tokens(tokens)
        if count == len(tokens) < most and len(self.eos_ids) == 1 and self.over:
            tokens.append(self.eos_ids[0])
        if count and not self._matching.rollback(count):
            self._restore()
        return tokens

    def masks(
        self, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray, out: np.ndarray, deadline: float = math.inf
    ) -> np.ndarray:
        """Walks a draft tree.

        Args:
            tokens, parents, valid: [N], of its nodes, parents before children; node 0 is the root, the last emitted
                token.
            out: uint32 [N, ceil(V / 32)], of ones: gets the bits of each node that is kept.
            deadline: of `perf_counter`, after which no more nodes are looked at.

        Returns:
            bool [N]: nodes that are kept: the root, and valid ones that the grammar allows below such.
        """
        out[0] = self.mask()
        kept = np.zeros(len(tokens), bool)
        kept[0] = True
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            if valid[node]:
                children.setdefault(int(parents[node]), []).append(node)

        def visit(node: int) -> None:
            """The children of a node whose bits are in `out`."""
            for child in children.get(node, ()):
                token = int(tokens[child])
                if not out[node, token // WORD] >> np.uint32(token % WORD) & 1 or time.perf_counter() > deadline:
                    continue
                if token in self.eos_ids:  # nothing is emitted after it
                    kept[child] = True
                    continue
                phase = self._phase
                consumed = not self._step_phase(token)
                if not consumed or self._consume_ahead(token):
                    bits = np.zeros_like(out[child])
                    self._fill(bits)
                    if bits.any():
                        out[child], kept[child] = bits, True
                        visit(child)
                if consumed:
                    self._take_back()
                self._phase = phase

        if children and self.failure is None and not self.slow:
            visit(0)
        return kept

    @property
    def _matching(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher

    def _consume_ahead(self, token: int) -> bool:
        self._ahead.append(token)
        return self._matching.consume_token(token)

    def _take_back(self) -> None:
        """Undoes the last `_consume_ahead`."""
        self._ahead.pop()
        if self._matching.is_error() or not self._matching.rollback(1):
            self._restore()

    def _restore(self) -> None:
        """After an error, from which the library knows no way back: a new matcher in the state of this one."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.try_consume_tokens([*self._consumed, *self._ahead])

    def _step_phase(self, token: int) -> bool:
        """Before the grammar begins: whether the token belongs to the reasoning."""
        if self._reasoning is None or self._phase is Phase.ANSWER:
            return False
        if self._phase is Phase.START and token != self._reasoning.start:
            self._phase = Phase.ANSWER
            return False
        self._phase = Phase.ANSWER if token == self._reasoning.end else Phase.REASONING
        return True

    def _fill(self, words: np.ndarray) -> None:
        """Puts the bits of the next token into uint32 [ceil(V / 32)] of zeros; none where the library has an error."""
        if self._phase is Phase.REASONING:
            words[:] = ALL
            for token in self.eos_ids:
                words[token // WORD] &= ~np.uint32(1 << token % WORD)
            return
        if not self._matching.is_error():
            self._matching.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matching.is_error():
            words[:] = 0
        if self._phase is Phase.START and self._reasoning is not None and words.any():
            words[self._reasoning.start // WORD] |= np.uint32(1 << self._reasoning.start % WORD)
