"""Structured output: the grammar that a request's text must follow."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("json_schema", "regex", "ebnf", "lark")
MAX_SOURCE = 2**16  # characters


class GrammarError(ValueError):
    """A grammar is wrong, too large, or not supported; or the tokenizer is not supported."""


@dataclass(frozen=True)
class Grammar:
    """What a text must match as a whole.

    Attributes:
        kind: json_schema, regex (without anchors and look-around), ebnf (GBNF, as llama.cpp and SGLang take it, with
            the rule `root`), or lark (llguidance's dialect, with the rule `start`; `<|name|>` is a special token).
        source: the grammar's text; a JSON schema that is "" or "{}" stands for any JSON object.

    Raises:
        GrammarError: an unknown kind, or a source that is no text or too long. Whether the source is right is known
            when a request is made of it.
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
