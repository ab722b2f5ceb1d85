"""Structured output: grammars that a text must match.

`Grammars` compiles each `Grammar` once for a tokenizer. A `Constraint` follows the text of one sequence. llguidance
compiles the grammars and computes the masks; only this module calls it. Independent of the device.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from specjax_kernels import mask_words

from specjax.checkpoint.control_tokens import private_prefix, special_names, with_prefix
from specjax.grammar_check import LIMITS, grammar_check
from specjax.packages import MissingPackage, need

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("json_schema", "regex", "ebnf", "lark")
MAX_SOURCE = 2**16  # characters

HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
MAX_COMPILED = 64  # compiled grammars that are cached for later requests
MAX_COMPILED_SOURCE = 2**19  # characters of their sources together
LEXER_STATES = 20_000  # limit for a compiled grammar; 1 to 2 kB each
SLOW_TOKEN = 0.005  # seconds of processor time; slower grammars take turns
TOKEN_SECONDS = 0.01  # average processor time for a token of a text
MAX_ALLOWANCE = 1.0  # seconds of processor time that a text may take at once
MAX_RENEWAL = 0.1  # seconds of processor time of a compilation that a step waits for
LEXER = "lexer error"  # in llguidance's messages
WORD = 32  # bits
ALL = np.uint32(2**32 - 1)
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's `json.dumps` writes it: the model cannot loop over spaces, and the text between two
values is forced. A schema's own "x-guidance" overrides it."""

GRAMMAR_FAILED = "the text cannot go on"  # start of the abort message
MISREAD = re.compile(r"(?<!\\)(?:\\\\)*\\u0")
"""An escape in GBNF that llguidance misreads: it drops the zeros."""


class GrammarError(ValueError):
    """A grammar is wrong, too large, or not supported; or the tokenizer is not supported."""


@dataclass(frozen=True)
class Grammar:
    """A grammar that the whole text must match.

    Attributes:
        kind: json_schema, regex (without look-around), lark (llguidance's dialect, with the rule `start`), or
            ebnf: Lark, or llama.cpp's GBNF with the rule `root`, which llguidance translates.
        source: the grammar's text; the JSON schemas "" and "{}" stand for any JSON object.
        turn: Lark of the whole output, where `@text` is this grammar; "": it is the output; None: the engine chooses.

    Raises:
        GrammarError: the kind is unknown, or the source is no string, empty or too long. Errors within the source are
            raised when a request uses it.
    """

    kind: str
    source: str = ""
    turn: str | None = None

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
            raise GrammarError(
                f"must be a JSON schema, as an object or a text, got {json.dumps(schema, default=repr):.60}"
            )
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def response_format(cls, form: Any) -> Grammar | None:
        """OpenAI's `response_format`; None: any text."""
        match form:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return cls("json_schema")
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return cls.json(schema)
        forms = '{"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
        raise GrammarError(f"must be {forms}, got {form!r:.60}")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"must be a list of texts that are not empty, got {texts!r:.60}")
        quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
        return cls("lark", "start: " + " | ".join(quoted).replace("\x7f", "\\u007f"))  # Lark takes no DEL


def harmony_turn(tokens: Mapping[str, int], final: str | None = "@text", *, calls: bool = False) -> str:
    """Lark of an output in the Harmony format of gpt-oss: messages with thoughts, then one with the text `final`, or
    with `calls` also messages to the user, then the rule of that name."""
    start, channel, message, end, _ = (f"<[{tokens[mark]}]>" for mark in HARMONY_MARKS)
    # A limit, because a model that cannot write to the channel of its choice may write thoughts forever.
    last = ["thought{0,4} final"] * (final is not None) + ["(thought | preamble){0,4} calls"] * calls
    rules = [f"start: {' | '.join(last)}", "TEXT: /(?s:.*)/"]
    rules += [f'final: {channel} "final" {message} {final}'] * (final is not None)
    for name, said in (("thought", "analysis"), ("preamble", "commentary"))[: 1 + calls]:
        rules.append(f'{name}: {channel} "{said}" {message} TEXT {end} {start} "assistant"')
    return "\n".join(rules)


def library_source(grammar: Grammar) -> tuple[str, str]:
    """The kind and text of the grammar for llguidance's `grammar_from`. Raises GrammarError; other errors appear when
    it is compiled."""
    need("llguidance", "llguidance", "grammars")
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import is_lark_syntax

    kind, source = grammar.kind, grammar.source
    if kind == "ebnf" and not is_lark_syntax(source) and MISREAD.search(source):
        raise GrammarError(r"is refused: \u0... is not supported in GBNF: write the character itself")
    if kind != "json_schema":
        return kind, source
    try:
        schema = json.loads(source or "{}")
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"must be a JSON schema, an object, got {source!r:.60}")
    try:
        schema = json.dumps({"type": "object"} if schema == {} else schema)
        return "llguidance", LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
    except ValueError as error:
        raise GrammarError(f"is refused: {str(error)[:200]}") from error


def with_turn(grammar: Grammar, source: str) -> str:
    """The grammar of the output around a text whose grammar is `source`, both in llguidance's form."""
    whole = grammar.kind in ("json_schema", "regex")
    (text,) = json.loads(source)["grammars"] if whole else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": grammar.turn}, text | {"name": "text"}]})


class Compiled(NamedTuple):
    """A compiled grammar."""

    matcher: LLMatcher  # in its initial state, never advanced
    source: str  # in llguidance's form
    seconds: float  # processor time of its compilation


class Grammars:
    """Compiled grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: V of the logits; at least the tokenizer's.
        eos_ids: tokens that may end a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self.vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # for `_cache`

    def prepare(self) -> None:
        """Converts the tokenizer (half a second) and starts the compiler, so that the first grammar does not wait. An
        unsupported tokenizer is no error here; requests with a grammar are refused."""
        with contextlib.suppress(GrammarError, MissingPackage):
            _ = self.core
            self._checked(Grammar("regex", "a"))

    def holds(self, grammar: Grammar) -> bool:
        """True if a grammar is compiled, in any `turn`."""
        with self._lock:
            return any((held.kind, held.source) == (grammar.kind, grammar.source) for held in self._cache)

    def compiled(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError."""
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return self._cache[grammar]
        return self._store(grammar, self._compile(grammar))

    def renewed(self, grammar: Grammar, worn: Compiled) -> tuple[Compiled, bool]:
        """Replaces a compiled grammar whose lexer has met a limit. Returns the replacement, and True if it is new.

        Sequences with one grammar share its lexer, whose states the limits count, so a much used grammar wears out.
        """
        with self._lock:
            cached = self._cache.get(grammar)
        if cached is not None and cached is not worn:
            return cached, False
        return self._store(grammar, worn._replace(matcher=self._matcher(worn.source))), True

    def forget(self, grammar: Grammar) -> None:
        """Frees a compiled grammar that no text can follow."""
        with self._lock:
            self._cache.pop(grammar, None)

    def _store(self, grammar: Grammar, compiled: Compiled) -> Compiled:
        with self._lock:
            self._cache[grammar] = compiled
            while len(self._cache) > MAX_COMPILED or sum(len(g.source) for g in self._cache) > MAX_COMPILED_SOURCE:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        if grammar.turn:  # errors of the text come before any thoughts
            source = with_turn(grammar, self.compiled(replace(grammar, turn=None)).source)
        else:
            source = self._checked(grammar)
        started = time.thread_time()
        matcher = self._matcher(source)
        if matcher.is_error():
            raise GrammarError(f"is refused: {error_of(matcher)}")
        seconds = time.thread_time() - started
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise GrammarError(f"cannot be followed: {error_of(first) or 'no token may come first'}")
        return Compiled(matcher, source, seconds)

    def _checked(self, grammar: Grammar) -> str:
        """The grammar in llguidance's form. Raises GrammarError if it does not compile within limits of time and
        memory, or if no process can be started to try it."""
        try:
            source, problem = grammar_check(self.vocab_size)(*library_source(grammar))
        except OSError as error:
            raise GrammarError(f"cannot be compiled: no process can be started for it: {error}") from error
        if problem:
            raise GrammarError(readable(problem))
        return source

    def _matcher(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=LEXER_STATES, **LIMITS)
        return LLMatcher(self.core, source, log_level=0, limits=limits)

    @cached_property
    def core(self) -> LLTokenizer:
        """The tokenizer in llguidance's form, made in 0.3 s. Raises GrammarError if it is not supported."""
        need("llguidance", "llguidance", "grammars")
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
            text = copy.to_str()
            # The text of a grammar never spells a special token: a choice of <|im_end|> is text.
            text = with_prefix(text, special_names(text), private_prefix())
            converted = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self._eos_ids or None)
        except Exception as error:
            raise GrammarError(f"cannot be used: {problem}: {str(error)[:200]}") from error
        if not all(0 <= token < self.vocab_size for token in converted.eos_tokens):
            raise GrammarError(f"cannot be used: {problem}, which has no token that ends a text")
        return converted


class Reasoning(NamedTuple):
    """Tokens around the thoughts before an answer. The grammar begins after `end`."""

    start: int
    end: int
    begun: bool  # by the prompt; else the model may begin them

    def turn(self, eos_ids: Sequence[int]) -> str:
        """Lark of an output with thoughts of any tokens but those that end a text."""
        thoughts = f"<[^{','.join(map(str, sorted({self.end, *eos_ids})))}]>* <[{self.end}]>"
        return f"start: {thoughts} @text" if self.begun else f"start: (<[{self.start}]> {thoughts})? @text"


class Constraint:
    """The tokens that one sequence may emit next. Raises GrammarError if the grammar cannot be compiled.

    It consumes emitted tokens and computes a bit for each token that may come next, at all nodes of a draft tree. The
    bits depend on the tokens so far only, so the text is the same with and without drafts.

    Attributes:
        failure: why the sequence cannot go on, set when its next mask is computed.
        eos_ids: tokens that end the text where the grammar may end.
        is_slow: the token before the last one took more than `SLOW_TOKEN`.
        advanced: time of `perf_counter` at the last emitted token.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self._grammars, self._grammar = grammars, grammar
        self._compiled = grammars.compiled(grammar)
        self._words = mask_words(grammars.vocab_size)
        self.eos_ids = tuple(grammars.core.eos_tokens)
        self._matcher: LLMatcher | None = None  # made at the first use: many sequences may wait
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._ahead: list[int] = []  # tokens on the path to a node, during the walk of a tree
        self._renewed_at = -1  # number of consumed tokens at the last `renewed`
        self._mask: np.ndarray | None = None  # cached mask of the next token
        self._forced: list[int] | None = None  # cached tokens that must come next
        self.failure: str | None = None
        self._ended = False  # by one of `eos_ids`
        self.is_slow, self.advanced = False, 0.0
        self._seconds = 0.0  # processor time for the last token
        self._allowance = MAX_ALLOWANCE  # processor time that is left

    def consume(self, tokens: Sequence[int]) -> None:
        """Consumes emitted tokens. A limit of the library that they exceed is a `failure`."""
        self._mask, self._forced, self.advanced = None, None, time.perf_counter()
        self.is_slow, self._seconds = self._seconds > SLOW_TOKEN, 0.0
        self._allowance = min(MAX_ALLOWANCE, self._allowance + TOKEN_SECONDS * len(tokens))
        with self._charged():
            for token in tokens:
                if self._ended or self.failure is not None:
                    return
                while not self._matching.consume_token(token):
                    if not self._recover():
                        self._fail()
                        return
                self._consumed.append(token)
                self._ended = token in self.eos_ids

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit ``v % 32`` of word ``v // 32`` is set if token v may come next. If none may, all
        bits are set, and `failure`."""
        if self._mask is None:
            with self._charged():
                bits = self._bits()
                while not bits.any() and self._recover():
                    bits = self._bits()
            if not bits.any():
                self._fail()
            if self.failure is not None:
                bits[:] = ALL
            self._mask = bits
        return self._mask

    def problem(self) -> str | None:
        """Computes the next mask and returns `failure`."""
        self.mask()
        return self.failure

    def forced(self, most: int) -> list[int]:
        """Returns up to `most` tokens that must come next."""
        if self.failure is not None:
            return []
        if self._forced is None:
            with self._charged():
                self._forced = self._matching.compute_ff_tokens()
        tokens = self._forced[:most]
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
        """Computes the bits of a draft tree's nodes.

        Args:
            tokens, parents, valid: [N], parents before children; node 0 is the root, the last emitted token.
            out: uint32 [N, ceil(V / 32)] of ones, which gets the bits of each node that is kept.
            deadline: time of `perf_counter` after which further nodes are dropped.

        Returns:
            bool [N]: nodes that are kept: the root, and valid nodes on paths that the grammar allows.
        """
        out[0], kept = self.mask(), np.zeros(len(tokens), bool)
        kept[0] = True

        def visit(node: int) -> None:
            """Visits the children of a node whose bits are in `out`."""
            for child in map(int, np.flatnonzero(valid & (parents == node))):
                token = int(tokens[child])
                word, bit = divmod(token, WORD)
                if not out[node, word] >> np.uint32(bit) & 1 or time.perf_counter() > deadline:
                    continue
                if token in self.eos_ids:  # nothing is emitted after it
                    kept[child] = True
                    continue
                self._ahead.append(token)
                if self._matching.consume_token(token):
                    bits = self._bits()
                    if bits.any():
                        out[child], kept[child] = bits, True
                        visit(child)
                self._ahead.pop()
                if self._matching.is_error() or not self._matching.rollback(1):
                    self._restore()

        if self.failure is None and not self.is_slow:
            visit(0)
        return kept

    @contextlib.contextmanager
    def _charged(self) -> Iterator[None]:
        """Counts the processor time of a block. The text fails once its tokens have taken too much."""
        started = time.thread_time()
        yield
        spent = time.thread_time() - started
        self._seconds += spent
        self._allowance -= spent
        if self._allowance < 0 and self.failure is None:
            most = f"{1000 * TOKEN_SECONDS:g} ms a token"
            self.failure = f"its grammar takes more than {most}: give shorter texts, or fewer choices for one place"

    @property
    def _matching(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        return self._matcher

    def _restore(self) -> None:
        """Makes a new matcher in the same state, since the library cannot recover from an error."""
        with self._charged():
            self._matcher = matcher = self._compiled.matcher.deep_copy()
            matcher.try_consume_tokens([*self._consumed, *self._ahead])

    def _recover(self) -> bool:
        """Continues with a renewed grammar after a limit of the lexer, which counts the states of all sequences with
        this grammar. False: a new grammar has met the limit, too, or the error is another one."""
        if LEXER not in self._matching.get_error() or self._renewed_at == len(self._consumed):
            return False
        if self._compiled.seconds > MAX_RENEWAL:  # the step would wait for it
            return False
        self._compiled, is_new = self._grammars.renewed(self._grammar, self._compiled)
        if is_new:
            self._renewed_at = len(self._consumed)
        self._restore()
        return True

    def _fail(self) -> None:
        self._grammars.forget(self._grammar)
        if self.failure is None:
            self.failure = f"its grammar cannot be followed: {error_of(self._matching) or 'no token may come next'}"

    def _bits(self) -> np.ndarray:
        """The bits of the next token, uint32 [ceil(V / 32)]; zeros after an error of the library."""
        bits = np.zeros(self._words, np.uint32)
        if not self._matching.is_error():
            self._matching.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matching.is_error():
            bits[:] = 0
        return bits


def error_of(matcher: LLMatcher) -> str:
    """The library's error message."""
    return readable(matcher.get_error())


def readable(message: str) -> str:
    """The start of a message of the library."""
    message = message.replace("<non-verbose/>", "").replace("NoExtensionBias", "no text, of any length, follows it")
    return message.strip()[:400]
