"""Methods that are compared, as a command line or a TOML file names them.

none   NGRAM   AUTO                                 an algorithm with its defaults
EAGLE3:path=FOLDER,steps=5,topk=8,nodes=32          with options, named as those of `specjax.Eagle3`
STANDALONE:model=FOLDER,vocabulary=intersection     model= is path=
AUTO:adaptive=on                                    drafts where the engine measures that to be faster
drafter=module:function                             a drafter from outside (docs/drafters.md)
EAGLE3:verifier=module:function                     a verifier from outside; also after drafter=...,
transformers                                        transformers' greedy decoding
transformers:prompt-lookup=10                       its prompt lookup, of so many tokens (default: 10)
transformers:assisted=MODEL                         its assisted decoding with this draft model
NGRAM:nodes=8,name=n-grams                          name= is what tables say; each must differ
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from specjax.drafters import DRAFTERS, Auto, DraftOptions, NoDraft
from specjax.drafters.factories import load_drafter
from specjax.drafters.table import CHOICES, algorithm, algorithms

OUTSIDE = "transformers"
LOOKUP_TOKENS = 10
DTYPES = ("float32", "bfloat16")
SWITCH = {"on": True, "off": False, "true": True, "false": False}


@dataclass(frozen=True)
class Outside:
    """A way of decoding of transformers."""

    lookup: int = 0  # tokens of its prompt lookup; 0: none
    assisted: str | None = None  # the draft model
    dtype: str = "float32"


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Attributes:
        text: as it was given.
        name: what tables call it.
        draft: the engine's options; None: a drafter from outside, or transformers.
        drafter, verifier: module:function.
        adaptive: draft only where the engine measures that to be faster.
        outside: how transformers decode; None: the engine does.
    """

    text: str
    name: str
    draft: DraftOptions | None = None
    drafter: str | None = None
    verifier: str | None = None
    adaptive: bool = False
    outside: Outside | None = None


def parse_method(text: str) -> Method:
    """A method as it is written. Raises ValueError, which names the method, for a wrong one."""
    try:
        return _parse(text.strip())
    except (TypeError, ValueError) as error:
        raise ValueError(f"--methods {text}: {error}") from None


def parse_methods(texts: Iterable[str]) -> list[Method]:
    """All of them. Raises ValueError if one is wrong, or if two have one name."""
    found: dict[str, Method] = {}
    for text in texts:
        method = parse_method(text)
        if method.name in found:
            raise ValueError(f"--methods: two are called {method.name}; add name=... to one of them")
        found[method.name] = method
    return [*found.values()]


def check_here(methods: Iterable[Method]) -> None:
    """Raises ValueError for what can be known to be missing before anything is loaded."""
    for method in methods:
        if method.outside is not None and importlib.util.find_spec("torch") is None:
            raise ValueError(f"--methods {method.text}: torch is not installed (pip install torch)")
        for name in filter(None, (method.drafter, method.verifier)):
            load_drafter(name)
        paths = getattr(method.draft, "path", None), method.outside and method.outside.assisted
        for path in filter(None, paths):
            looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
            if looks_local and not Path(path).expanduser().exists():
                raise ValueError(f"--methods {method.text}: {path} does not exist")


def _parse(text: str) -> Method:
    head, colon, rest = text.partition(":")
    if not head:
        raise ValueError("a method has a name")
    if head.startswith(("drafter=", "verifier=")):
        head, colon, rest = "", "", text
    elif head.lower() != OUTSIDE and algorithm(head) is None and colon and rest.replace("_", "").isalnum():
        head, rest = "", f"drafter={text}"  # module:function, as the server's flag has it
    given = _options(rest)
    if colon and not given:
        raise ValueError(f"nothing follows {head}:")
    name, verifier = given.pop("name", None), given.pop("verifier", None)
    if head.lower() == OUTSIDE:
        if verifier:
            raise ValueError("transformers take no verifier")
        return Method(text, name or _short(OUTSIDE, given), outside=_outside(given))
    adaptive = _switch("adaptive", given.pop("adaptive", "off"))
    shared: dict[str, Any] = {"verifier": verifier, "adaptive": adaptive}
    marks = ("adaptive " if adaptive else "") + (f"verifier {verifier}" if verifier else "")
    if drafter := given.pop("drafter", None):
        if given:
            raise ValueError(f"a drafter from outside has no option {min(given)}")
        return Method(text, name or " ".join(filter(None, (drafter, marks.strip()))), drafter=drafter, **shared)
    known = algorithm(head or NoDraft.algorithm)
    if known is None:
        raise ValueError(f"no method is called {head}; there are: {algorithms()}, {OUTSIDE}, drafter=module:function")
    title = " ".join(filter(None, (_short(known, given), marks.strip())))
    return Method(text, name or title, draft=_draft(known, given), **shared)


def _options(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key in found:
            raise ValueError(f"{key} is given twice")
        found[key] = value
    return found


def _short(title: str, given: dict[str, str]) -> str:
    """A name for tables: the tree's three numbers, other options as they are, of a path its last part."""
    parts = dict(given)
    tree = [parts.pop(key) for key in ("steps", "topk", "nodes")] if {"steps", "topk", "nodes"} <= given.keys() else []
    parts = {k: Path(v).name if k in ("path", "model", "assisted") else v for k, v in parts.items()}
    words = [f"{key}={value}" if value else key for key, value in parts.items()]
    return " ".join([title, *(["/".join(tree)] if tree else []), *words])


def _switch(name: str, text: str) -> bool:
    if text.lower() not in SWITCH:
        raise ValueError(f"{name} must be on or off, got {text!r}")
    return SWITCH[text.lower()]


def _outside(given: dict[str, str]) -> Outside:
    unknown = given.keys() - {"prompt-lookup", "assisted", "dtype"}
    if unknown:
        raise ValueError(f"transformers have no option {min(unknown)}; they have: prompt-lookup, assisted, dtype, name")
    if {"prompt-lookup", "assisted"} <= given.keys():
        raise ValueError("prompt-lookup and assisted exclude each other")
    dtype = given.get("dtype", DTYPES[0])
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if "assisted" in given and not given["assisted"]:
        raise ValueError("assisted= needs a draft model")
    lookup = 0
    if "prompt-lookup" in given:
        lookup = _number(int, "prompt-lookup", given["prompt-lookup"] or str(LOOKUP_TOKENS))
        if lookup < 1:
            raise ValueError(f"prompt-lookup must be at least 1, got {lookup}")
    return Outside(lookup, given.get("assisted"), dtype)


def _draft(name: str, given: dict[str, str]) -> DraftOptions:
    if "model" in given:
        if "path" in given:
            raise ValueError("model and path are one option")
        given = {"path" if key == "model" else key: value for key, value in given.items()}
    classes: tuple[type[DraftOptions], ...] = CHOICES if name == Auto.algorithm else (DRAFTERS[name],)
    hints = {key: hint for each in classes for key, hint in get_type_hints(each).items() if key in each.names()}
    if name == Auto.algorithm:
        hints = {key: hint for key, hint in hints.items() if key in Auto.names()}
    for key in given:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has: {', '.join(hints) or 'none'}"
            raise ValueError(f"{name} has no option {key}; {hint}")
    values = {key: _value(hints[key], key, value) for key, value in given.items()}
    return Auto(**values) if name == Auto.algorithm else DRAFTERS[name](**values)


def _value(hint: Any, key: str, text: str) -> Any:
    kinds = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    for kind in kinds:
        if kind in (int, float) and not (kind is int and str in kinds and not text.isdigit()):
            return _number(kind, key, text)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            for choice in choices:
                if text.lower() == choice.lower():
                    return choice
            raise ValueError(f"{key} must be one of {', '.join(choices)}, got {text!r}")
    if not text:
        raise ValueError(f"{key} needs a value")
    return text


def _number(kind: type, key: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key} must be {'an integer' if kind is int else 'a number'}, got {text!r}") from None
