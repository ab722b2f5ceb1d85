"""Grammars that a text must follow.

A `Grammar` is compiled once for a tokenizer and kept for later requests (`Grammars`). A `Constraint` follows
one text. llguidance compiles the grammars and computes the masks; no other module calls it. This module runs
on the host and knows nothing of the device.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json_schema", "regex", "ebnf", "lark")
MAX_SOURCE = 2**16  # characters

KEPT = 64  # compiled grammars that are kept for later requests, those used last
KEPT_SOURCE = 2**19  # characters that their sources may have together
COMPILE_SECONDS = 0.5  # of the processor, for one grammar
SHORT = 256  # characters of a JSON schema or an expression up to which it cannot take long to compile
LEXER_STATES = 20_000  # of a compiled grammar, 1 to 2 kB each
LEXER = "lexer error"  # in llguidance's messages
SLOW_SECONDS = 0.005  # of the processor for a mask, from which on other threads compute a sequence's masks
SLOW_THREADS = 2
WORD = 32  # bits
ALL = np.uint32(2**32 - 1)
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's `json.dumps` writes it: a model cannot end in a loop of spaces, and the text
between two values is forced. A schema's own "x-guidance" goes first."""

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
        GrammarError: an unknown kind, or a source that is no text, empty or too long. Whether the source is
            right is known when a request is made of it.
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
        match given:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return cls("json_schema")
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return cls.json(schema)
        forms = '{"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
        raise GrammarError(f"must be {forms}, got {given!r:.60}")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"must be a list of texts that are not empty, got {texts!r:.60}")
        quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
        return cls("lark", "start: " + " | ".join(quoted).replace("\x7f", "\\u007f"))  # Lark takes no DEL


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
        self._tokenizer, self.vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # for `_kept`
        self.pool = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="specjax-mask")  # for slow masks

    def prepare(self) -> None:
        """Loads the tokenizer for which the first grammar would wait, half a second's work. A tokenizer that
        cannot have grammars is no error here: the first request with a grammar is refused."""
        with contextlib.suppress(GrammarError):
            _ = self.core

    def holds(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled."""
        return grammar in self._kept

    def constraint(self, grammar: Grammar, reasoning: Reasoning | None = None) -> Constraint:
        """For a new sequence. Raises GrammarError."""
        return Constraint(self, grammar, reasoning)

    def compiled(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        return self._keep(grammar, self._compile(grammar))

    def renewed(self, grammar: Grammar, worn: LLMatcher) -> tuple[LLMatcher, bool]:
        """A compiled grammar in place of one that has met a limit of its lexer; whether it is a new one.

        Sequences with one compiled grammar share its lexer, whose states the limits count, so a grammar that
        many have used wears out.
        """
        with self._lock:
            kept = self._kept.get(grammar)
        if kept is not None and kept.matcher is not worn:
            return kept.matcher, False
        found = Compiled(self._matcher(library_source(grammar)), kept is not None and kept.slow)
        return self._keep(grammar, found).matcher, True

    def _keep(self, grammar: Grammar, found: Compiled) -> Compiled:
        with self._lock:
            self._kept[grammar] = found
            while len(self._kept) > KEPT or sum(len(each.source) for each in self._kept) > KEPT_SOURCE:
                self._kept.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> Compiled:
        if not compiles_soon(grammar):
            fewer = "give fewer patterns for one place, or fewer rules"
            raise GrammarError(f"takes more than {COMPILE_SECONDS:g} s to compile: {fewer}")
        matcher = self._matcher(library_source(grammar))
        if matcher.is_error():
            raise GrammarError(f"is refused: {said(matcher)}")
        started, first = time.thread_time(), matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():  # some errors show with the first token
            raise GrammarError(f"cannot be followed: {said(first) or 'no token may come first'}")
        return Compiled(matcher, time.thread_time() - started > SLOW_SECONDS)

    def _matcher(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        return LLMatcher(self.core, source, log_level=0, limits=limits)

    @cached_property
    def core(self) -> LLTokenizer:
        """The tokenizer in llguidance's form, made in 0.3 s. Raises GrammarError: it is not supported."""
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
            text, eos_ids = _apart(copy.to_str()), self._eos_ids or None
            found = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos_ids)
        except Exception as error:
            raise GrammarError(f"cannot be used: {problem}: {str(error)[:200]}") from error
        if not all(0 <= token < self.vocab_size for token in found.eos_tokens):
            raise GrammarError(f"cannot be used: {problem}, which has no token that ends a text")
        return found


def _apart(text: str) -> str:
    """A tokenizer's JSON in which special tokens have names that no text of a grammar spells: a choice of
    <|im_end|> is text."""
    found = json.loads(text)
    special = (each["content"] for each in found["added_tokens"] if each["special"])
    renamed = {name: PRIVATE + name for name in special}
    for each in found["added_tokens"]:
        each["content"] = renamed.get(each["content"], each["content"])
    vocab = found["model"].get("vocab")
    if isinstance(vocab, dict):
        found["model"]["vocab"] = {renamed.get(name, name): id for name, id in vocab.items()}
    elif isinstance(vocab, list):
        found["model"]["vocab"] = [[renamed.get(name, name), *more] for name, *more in vocab]
    return json.dumps(found)


class Reasoning(NamedTuple):
    """Tokens around what a model thinks before it answers. The grammar begins after `end`."""

    start: int
    end: int
    begun: bool  # by the prompt; else the model may begin


class Constraint:
    """What one sequence may say next.

    It consumes the tokens that were emitted and gives a bit for each token that may come next, at the root of
    a draft tree and at all its nodes. The bits follow from the tokens so far and from nothing else, so that
    the text is the same with and without drafts.

    Attributes:
        failure: why the sequence cannot go on, found when its next mask was computed; None: it can.
        eos_ids: tokens that end the text where the grammar may end.
        slow: a mask took more than `SLOW_SECONDS`. From then on another thread computes them, so that other
            requests go on meanwhile; no tokens are forced, and none drafted.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, reasoning: Reasoning | None = None) -> None:
        self._grammars, self._grammar, self._reasoning = grammars, grammar, reasoning
        self._compiled, self.slow = grammars.compiled(grammar)
        self._words = -(-grammars.vocab_size // WORD)
        self.eos_ids = tuple(grammars.core.eos_tokens)
        self._matcher: LLMatcher | None = None  # made at the first use: many sequences may wait
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._ahead: list[int] = []  # further ones, of the path to a node while a tree is walked
        self._renewed_at = -1  # tokens that were consumed when a new matcher was compiled
        # Whether the reasoning goes on; None: the next token may begin it.
        self._thinks = False if reasoning is None else reasoning.begun or None
        self._mask: np.ndarray | None = None  # of the next token, once it is asked for
        self._pending: Future[None] | None = None  # computes `_mask`
        self.failure: str | None = None
        self._ended = False  # by one of `eos_ids`

    def consume(self, tokens: Sequence[int]) -> None:
        """After these tokens were emitted. A limit of the library that they exceed is a `failure`."""
        self._mask = None
        for token in tokens:
            if self._ended or self._is_thought(token):
                continue
            while not self._matching.consume_token(token):
                if not self._recover():
                    self._fail()
                    return
            self._consumed.append(token)
            self._ended = token in self.eos_ids

    def ready(self) -> bool:
        """Whether `mask` answers soon. Else another thread computes it, begun here if it was not, and until
        then nothing else may be asked of this constraint."""
        if self.slow and self._mask is None and self._pending is None:
            self._pending = self._grammars.pool.submit(self._compute)
        return self._pending is None or self._pending.done()

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit ``v % 32`` of word ``v // 32`` says whether token v may come next. All
        bits, and `failure`, where no token may. Waits for the thread that computes it, if one does."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        if self._mask is None:
            self._compute()
        assert self._mask is not None
        return self._mask

    def problem(self) -> str | None:
        """`failure`, once the next token's mask is known."""
        self.mask()
        return self.failure

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next, as far as they are known, at most so many."""
        if self._thinks is not False or self.failure is not None or self.slow:
            return []
        tokens = self._matching.compute_ff_tokens()[:most]
        count = self._matching.try_consume_tokens(tokens)
        if count == len(tokens) < most and len(self.eos_ids) == 1 and self._matching.is_stopped():
            tokens.append(self.eos_ids[0])
        if count and not self._matching.rollback(count):
            self._restore()
        return tokens

    def masks(
        self,
        tokens: np.ndarray,
        parents: np.ndarray,
        valid: np.ndarray,
        out: np.ndarray,
        deadline: float = math.inf,
    ) -> np.ndarray:
        """Walks a draft tree.

        Args:
            tokens, parents, valid: [N], of its nodes, parents before children; node 0 is the root, the last
                emitted token.
            out: uint32 [N, ceil(V / 32)], of ones: gets the bits of each node that is kept.
            deadline: of `perf_counter`, after which no more nodes are looked at.

        Returns:
            bool [N]: nodes that are kept: the root, and valid ones that the grammar allows below such.
        """
        out[0], kept = self.mask(), np.zeros(len(tokens), bool)
        kept[0] = True

        def visit(node: int) -> None:
            """The children of a node whose bits are in `out`."""
            for child in map(int, np.flatnonzero(valid & (parents == node))):
                token = int(tokens[child])
                word, bit = divmod(token, WORD)
                if not out[node, word] >> np.uint32(bit) & 1 or time.perf_counter() > deadline:
                    continue
                if token in self.eos_ids:  # nothing is emitted after it
                    kept[child] = True
                    continue
                thinks, is_thought = self._thinks, self._is_thought(token)
                if not is_thought:
                    self._ahead.append(token)
                if is_thought or self._matching.consume_token(token):
                    bits = self._bits()
                    if bits.any():
                        out[child], kept[child] = bits, True
                        visit(child)
                if not is_thought:
                    self._ahead.pop()
                    if self._matching.is_error() or not self._matching.rollback(1):
                        self._restore()
                self._thinks = thinks

        if self.failure is None and not self.slow:
            visit(0)
        return kept

    @property
    def _matching(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher

    def _restore(self) -> None:
        """After an error, from which the library knows no way back: makes a new matcher in the same state."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.try_consume_tokens([*self._consumed, *self._ahead])

    def _recover(self) -> bool:
        """After a limit of the lexer was met, which counts the states that all sequences with this compiled
        grammar have needed: goes on with another compiled form. False: a new form has met the limit, too, or
        another error is the reason."""
        if LEXER not in self._matching.get_error() or self._renewed_at == len(self._consumed):
            return False
        self._compiled, is_new = self._grammars.renewed(self._grammar, self._compiled)
        if is_new:
            self._renewed_at = len(self._consumed)
        self._restore()
        return True

    def _fail(self) -> None:
        self.failure = f"its grammar cannot be followed: {said(self._matching) or 'no token may come next'}"

    def _is_thought(self, token: int) -> bool:
        """Whether a token, which comes next, belongs to the reasoning; the grammar takes the others."""
        if self._thinks is False or self._reasoning is None:
            return False
        if self._thinks is None and token != self._reasoning.start:
            self._thinks = False
            return False
        self._thinks = token != self._reasoning.end
        return True

    def _compute(self) -> None:
        started, bits = time.thread_time(), self._bits()
        while not bits.any() and self._recover():
            bits = self._bits()
        if not bits.any():
            self._fail()
            bits[:] = ALL
        self._mask = bits
        self.slow = self.slow or time.thread_time() - started > SLOW_SECONDS

    def _bits(self) -> np.ndarray:
        """The bits of the next token, uint32 [ceil(V / 32)]; none where the library has an error."""
        bits = np.zeros(self._words, np.uint32)
        if self._thinks:
            bits[:] = ALL
            for token in self.eos_ids:
                bits[token // WORD] &= ~np.uint32(1 << token % WORD)
            return bits
        if not self._matching.is_error():
            self._matching.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matching.is_error():
            bits[:] = 0
        if self._thinks is None and self._reasoning is not None and bits.any():
            bits[self._reasoning.start // WORD] |= np.uint32(1 << self._reasoning.start % WORD)
        return bits


def said(matcher: LLMatcher) -> str:
    """The library's message."""
    message = matcher.get_error().replace("<non-verbose/>", "").strip()[:400]
    return "no text, of any length, follows it" if message == "NoExtensionBias" else message
