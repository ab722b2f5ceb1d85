"""Methods of decoding: their names on a command line, and the engines that run them.

    NGRAM   EAGLE3:path=FOLDER,steps=5,topk=8,nodes=32   AUTO:adaptive=off   module:function

docs/bench.md has all of them. Options are named as the fields of the algorithm's class, such as `specjax.Eagle3`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from specjax.acceptance import SyntheticAcceptance
from specjax.drafters import DRAFTERS, Auto, DraftOptions, NoDraft, load_drafter, make_speculation
from specjax.drafters.factories import CHOICES, algorithm, algorithms
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.engine.sequence import Status, completion
from specjax.limits import check_value
from specjax.load import LoadedModel, load, use_compilation_cache
from specjax.models.target import Target
from specjax.settings import nearest

SWITCH = {"on": True, "off": False, "true": True, "false": False}


@dataclass(frozen=True)
class Method:
    """One way of decoding."""

    text: str  # on the command line
    name: str  # in tables
    draft: DraftOptions | None = None  # None: a custom drafter
    drafter: str | None = None  # module:function
    verifier: str | None = None  # module:function
    rates: tuple[float, ...] = ()  # of `SyntheticAcceptance`
    adaptive: bool | None = None  # the engine chooses the nodes of each step; None: as `EngineConfig.adaptive`

    @property
    def draft_path(self) -> str | None:
        """Folder or hub id of the draft head or draft model."""
        return getattr(self.draft, "path", None)


def parse_methods(texts: Iterable[str]) -> list[Method]:
    """Parses methods. Raises ValueError for a wrong method, and for two with the same name."""
    methods: dict[str, Method] = {}
    for text in texts:
        method = parse_method(text)
        if method.name in methods:
            raise ValueError(f"--methods: two are called {method.name}; add name=... to one")
        methods[method.name] = method
    return list(methods.values())


def parse_method(text: str) -> Method:
    """Parses one method. Raises ValueError, which names the method."""
    try:
        return _parse(text.strip())
    except (TypeError, ValueError) as error:
        raise ValueError(f"--methods {text}: {error}") from None


def check_available(methods: Iterable[Method]) -> None:
    """Raises ValueError if a module or a local folder is missing."""
    for method in methods:
        for name in filter(None, (method.drafter, method.verifier)):
            load_drafter(name)
        if path := method.draft_path:
            looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
            if looks_local and not Path(path).expanduser().exists():
                raise ValueError(f"--methods {method.text}: {path} does not exist")


def _parse(text: str) -> Method:
    head, _, rest = text.partition(":")
    if not head:
        raise ValueError("a method has a name")
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    if text.endswith(":") and not parts:
        raise ValueError(f"nothing follows {head}:")
    title, drafter = algorithm(head), None
    if title is None:
        if not parts or not parts[0].isidentifier():
            raise ValueError(f"no method is called {head}; there are: {algorithms()}, module:function")
        drafter = f"{head}:{parts.pop(0)}"
    options: dict[str, str] = {}
    for key, _, value in (part.partition("=") for part in parts):
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    name = options.pop("name", None)
    verifier, switch = options.pop("verifier", None), options.pop("adaptive", None)
    synthetic = options.pop("acceptance", "")
    if verifier and synthetic:
        raise ValueError("verifier and acceptance exclude each other")
    rates = SyntheticAcceptance(tuple(map(float, synthetic.split("/")))).rates if synthetic else ()
    if switch is not None and switch.lower() not in SWITCH:
        raise ValueError(f"adaptive must be on or off, got {switch!r}")
    adaptive = None if switch is None else SWITCH[switch.lower()]
    if drafter and options:
        raise ValueError(f"a custom drafter has no option {min(options)}")
    words = [
        _title(title, options) if title else str(drafter),
        *{True: ["adaptive"], False: ["in every step"], None: []}[adaptive],
        *[f"verifier {verifier}"] * bool(verifier),
        *[f"synthetic {synthetic}"] * bool(synthetic),
    ]
    draft = _typed(title, {Auto.algorithm: Auto, **DRAFTERS}[title], options) if title else None
    return Method(text, name or " ".join(words), draft, drafter, verifier, rates, adaptive)


def _title(name: str, options: Mapping[str, str]) -> str:
    """A name for tables: the tree as steps/top-k/nodes, then other options, paths by their last component."""
    rest, tree = dict(options), ("steps", "topk", "nodes")
    words = [name]
    if rest.keys() >= {*tree}:
        words.append("/".join(rest.pop(key) for key in tree))
    rest = {key: Path(value).name if key in ("path", "model") else value for key, value in rest.items()}
    return " ".join([*words, *(f"{key}={value}" for key, value in rest.items())])


def _typed(name: str, kind: Any, options: Mapping[str, str]) -> Any:
    """An instance of the dataclass `kind` from the text of its fields."""
    classes = CHOICES if kind is Auto else (kind,)
    hints = {key: hint for options_class in classes for key, hint in get_type_hints(options_class).items()}
    fields = [key for key in hints if key in kind.names()]
    values: dict[str, Any] = {}
    for key, text in options.items():
        field = "path" if key == "model" else key
        if field not in fields:
            near = nearest(key, fields)
            hint = f"did you mean {near}?" if near else f"it has: {', '.join(fields) or 'none'}"
            raise ValueError(f"{name} has no option {key}; {hint}")
        if field in values:
            raise ValueError("model and path are one option")
        if not text:
            raise ValueError(f"{key} needs a value")
        values[field] = _value(hints[field], text)
        try:
            check_value(values[field], hints[field])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} must be {error}, got {text!r}") from None
    return kind(**values)


def _value(hint: Any, text: str) -> Any:
    """The number or the Literal's choice that the text means under an annotation, else the text."""
    for kind in (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,):
        if kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        for choice in get_args(kind):
            if text.lower() == choice.lower():
                return choice
    return text


class Run(NamedTuple):
    """A batch of prompts that was completed."""

    completions: list[Completion]
    seconds: float
    decoded: int  # tokens after the first ones of all prompts
    decode_seconds: float  # of these tokens
    nodes: Counter[int]  # number of steps, by N


class Source:
    """One target, loaded once, and engines that decode with its weights.

    Args:
        load_options: arguments of `specjax.load.load` except the draft's.
        full_batches: compile only the steps of full batches.
    """

    def __init__(self, load_options: dict[str, Any], *, progress: bool = True, full_batches: bool = False) -> None:
        self._options, self._progress, self._full_batches = load_options, progress, full_batches
        self._loaded: dict[str, LoadedModel] = {}  # by the method's text
        use_compilation_cache()

    @property
    def first(self) -> LoadedModel:
        """The first loaded model; the others share its target."""
        return next(iter(self._loaded.values()))

    def load(self, method: Method) -> LoadedModel:
        """Loads a method's drafter and its weights."""
        if method.text not in self._loaded:
            options: dict[str, Any] = {"draft": method.draft} if method.draft is not None else {}
            if method.drafter is not None:
                options["drafter"] = load_drafter(method.drafter)
            if method.verifier is not None:
                options["verify"] = load_drafter(method.verifier)
            if method.rates:
                options["verify"] = SyntheticAcceptance(method.rates)
            loaded = load(**self._options, **options, progress=self._progress and not self._loaded)
            if self._loaded:  # one copy of the weights
                loaded = loaded._replace(params=loaded.params._replace(target=self.first.params.target))
            self._loaded[method.text] = loaded
        return self._loaded[method.text]

    def derive(self, method: Method, base: Method) -> LoadedModel:
        """Like `load`, with the weights of `base`: the same draft with another tree, or no draft."""
        if method.text not in self._loaded:
            draft, loaded = cast(DraftOptions, method.draft), self.load(base)
            if isinstance(draft, NoDraft):
                loaded = loaded._replace(params=loaded.params._replace(draft=None), draft_model=None)
            weights = loaded.draft_model
            head, model = (None, weights) if isinstance(weights, Target) else (weights, None)
            made = make_speculation(draft, target=loaded.target, head=head, model=model)
            # The verifier is the base's.
            self._loaded[method.text] = loaded._replace(speculation=made._replace(verify=loaded.speculation.verify))
        return self._loaded[method.text]

    def engine(self, method: Method, config: EngineConfig) -> Engine:
        """An engine whose programs are compiled."""
        engine = Engine(**self.load(method)._asdict(), config=replace(config, adaptive=method.adaptive))
        batch = config.max_running_requests
        keys = None
        if self._full_batches:
            widths = {"step": (batch,), "prefill": engine.buckets.chunks}
            every = (*engine.buckets.all_keys(), *engine.buckets.all_steps())
            keys = [key for key in every if key.rows == 1 and key.width in widths.get(key.kind, ())]
        engine.warm_up(keys, progress=False)
        return engine

    def complete(self, engine: Engine, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        """Completes a batch of prompts. Raises RuntimeError if a request fails."""
        before, started, first, drawn = Counter(engine.counters.nodes), time.perf_counter(), 0.0, 0
        sequences = [engine.intake.sequence(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        try:
            for sequence in sequences:
                engine.enqueue(sequence)
            while any(sequence.status is not Status.FINISHED for sequence in sequences):
                engine.step()
                if not first and all(sequence.output.tokens for sequence in sequences):
                    first = time.perf_counter()
                    drawn = sum(len(sequence.output.tokens) for sequence in sequences)
        finally:  # an error or an interrupt must not leave requests behind
            for sequence in sequences:
                engine.end(sequence)
        ended = time.perf_counter()
        while engine.programs.pending:  # background compilation slows down the next engine
            time.sleep(0.02)
        completions = [completion(sequence) for sequence in sequences]
        for done in completions:
            if done.finish_reason["type"] == "abort":
                raise RuntimeError(f"a request failed: {done.finish_reason['message']}")
        decoded = sum(len(done.output_ids) for done in completions) - drawn
        return Run(completions, ended - started, decoded, ended - first, engine.counters.nodes - before)
