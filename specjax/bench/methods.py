"""Methods of decoding: their names on a command line, and the engines or transformers that run them.

    NGRAM   EAGLE3:path=FOLDER,steps=5,topk=8,nodes=32   AUTO:adaptive=on   module:function   transformers:prompt-lookup

docs/bench.md has all of them. Options are named as the fields of the algorithm's class, such as `specjax.Eagle3`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args, get_origin, get_type_hints

import jax

from specjax import checkpoint
from specjax.compiling import use_compilation_cache
from specjax.drafters import DRAFTERS, Auto, DraftOptions, NoDraft
from specjax.drafters.factories import load_drafter, make_drafter
from specjax.drafters.options import CHOICES, algorithm, algorithms
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.engine.draft_policy import drafting_summary
from specjax.limits import check, check_value, setting
from specjax.load import LoadedModel, load
from specjax.models.target import Target
from specjax.settings import nearest

logger = logging.getLogger(__name__)

TRANSFORMERS = "transformers"
LOOKUP_TOKENS = 10  # default of prompt-lookup
SWITCH = {"on": True, "off": False, "true": True, "false": False}


@dataclass(frozen=True)
class Transformers:
    """Options of a method that decodes by transformers."""

    prompt_lookup: int | None = setting(None, "tokens of prompt lookup", minimum=1)
    assisted: str | None = setting(None, "the draft model of assisted decoding")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of weights and activations")

    def __post_init__(self) -> None:
        check(self)
        if self.prompt_lookup and self.assisted:
            raise ValueError("prompt-lookup and assisted exclude each other")


@dataclass(frozen=True)
class Method:
    """One way of decoding."""

    text: str  # on the command line
    name: str  # in tables
    draft: DraftOptions | None = None  # None: a custom drafter, or transformers
    drafter: str | None = None  # module:function
    verifier: str | None = None  # module:function
    adaptive: bool = False  # draft only in steps where the engine measures a gain
    transformers: Transformers | None = None  # None: an engine decodes

    @property
    def draft_path(self) -> str | None:
        """Folder or hub id of the draft head or draft model."""
        return self.transformers.assisted if self.transformers else getattr(self.draft, "path", None)


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
    """Raises ValueError if a package, a module or a local folder is missing."""
    for method in methods:
        if method.transformers is not None and importlib.util.find_spec("torch") is None:
            raise ValueError(f"--methods {method.text}: torch is not installed (pip install torch)")
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
    title, drafter = algorithm(head) or head.lower(), None
    if algorithm(head) is None and title != TRANSFORMERS:
        if not parts or not parts[0].isidentifier():
            raise ValueError(f"no method is called {head}; there are: {algorithms()}, {TRANSFORMERS}, module:function")
        drafter = f"{head}:{parts.pop(0)}"
    options: dict[str, str] = {}
    for key, _, value in (part.partition("=") for part in parts):
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    name = options.pop("name", None)
    if title == TRANSFORMERS:
        name = name or _title(TRANSFORMERS, options)
        if options.get("prompt-lookup") == "":
            options["prompt-lookup"] = str(LOOKUP_TOKENS)
        return Method(text, name, transformers=_typed(TRANSFORMERS, Transformers, options))
    verifier, switch = options.pop("verifier", None), options.pop("adaptive", "off").lower()
    if switch not in SWITCH:
        raise ValueError(f"adaptive must be on or off, got {switch!r}")
    adaptive = SWITCH[switch]
    if drafter and options:
        raise ValueError(f"a custom drafter has no option {min(options)}")
    words = [drafter or _title(title, options), *["adaptive"] * adaptive, *[f"verifier {verifier}"] * bool(verifier)]
    draft = None if drafter else _typed(title, {Auto.algorithm: Auto, **DRAFTERS}[title], options)
    return Method(text, name or " ".join(words), draft, drafter, verifier, adaptive)


def _title(name: str, options: Mapping[str, str]) -> str:
    """A name for tables: the tree as steps/top-k/nodes, then other options, paths by their last component."""
    rest, tree = dict(options), ("steps", "topk", "nodes")
    words = [name]
    if rest.keys() >= {*tree}:
        words.append("/".join(rest.pop(key) for key in tree))
    rest = {key: Path(value).name if key in ("path", "model", "assisted") else value for key, value in rest.items()}
    return " ".join([*words, *(f"{key}={value}" if value else key for key, value in rest.items())])


def _typed(name: str, kind: Any, options: Mapping[str, str]) -> Any:
    """An instance of the dataclass `kind` from the text of its fields."""
    classes = CHOICES if kind is Auto else (kind,)
    hints = {key: hint for options_class in classes for key, hint in get_type_hints(options_class).items()}
    fields = [key for key in hints if kind is Transformers or key in kind.names()]
    values: dict[str, Any] = {}
    for key, text in options.items():
        field = "path" if key == "model" else key.replace("-", "_")
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


class Answer(NamedTuple):
    """The completion of one prompt."""

    tokens: list[int]  # including a stop token
    arrivals: list[tuple[float, int]]  # (seconds since the start, tokens so far) of each forward with new tokens
    histogram: list[int]  # forwards by number of accepted drafts, without the prompt's forward


class Run(NamedTuple):
    """Prompts that were completed together."""

    answers: list[Answer]
    seconds: float
    drafted_steps: int | None  # steps of single requests that could draft; None: unknown


@dataclass
class EngineContender:
    """Runs a batch of prompts in an engine."""

    engine: Engine

    def run(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        engine, drafted = self.engine, self.engine.counters.drafted_steps
        started = time.perf_counter()
        sequences = [engine.add(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        arrivals: list[list[tuple[float, int]]] = [[] for _ in sequences]
        while any(sequence.output.finish_reason is None for sequence in sequences):
            engine.step()
            now = time.perf_counter() - started
            for seen, sequence in zip(arrivals, sequences, strict=True):
                if len(sequence.output.tokens) > (seen[-1][1] if seen else 0):
                    seen.append((now, len(sequence.output.tokens)))
        seconds = time.perf_counter() - started
        while engine.unfinished:  # steps dispatched ahead
            engine.step()
        while engine.programs.pending:  # background compilation slows down the next contender
            time.sleep(0.02)
        for sequence in sequences:
            if sequence.output.finish_reason is not None and sequence.output.finish_reason.type == "abort":
                raise RuntimeError(f"a request failed: {sequence.output.finish_reason.message}")
        outputs = zip((sequence.output for sequence in sequences), arrivals, strict=True)
        answers = [Answer(list(output.tokens), seen, list(output.histogram)) for output, seen in outputs]
        return Run(answers, seconds, engine.counters.drafted_steps - drafted)

    def forget(self) -> None:
        """Removes earlier texts from the drafter's memory."""
        if not self.engine.flush_cache():
            raise RuntimeError("requests still run")

    def note(self) -> str:
        """The reason why some steps may not draft; may be empty."""
        return drafting_summary(self.engine.drafter, self.engine.buckets, 1, 0)["not_drafted"] or ""


@dataclass
class TransformersContender:
    """Greedy decoding by transformers, one request after another."""

    model: Any
    generate_options: dict[str, Any]
    stops: tuple[int, ...]  # tokens that end a text

    def run(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        import torch

        answers, seconds = [], 0.0
        for prompt, params in zip(prompts, sampling, strict=True):
            ids, streamer = torch.tensor([prompt], device=self.model.device), _Streamer()
            stops = [] if params.ignore_eos else list(self.stops)
            with torch.inference_mode():
                output = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=params.max_new_tokens,
                    streamer=streamer, eos_token_id=stops or None, pad_token_id=0, **self.generate_options,
                )  # fmt: skip
            seconds += time.perf_counter() - streamer.started
            accepted = Counter(after[1] - before[1] - 1 for before, after in pairwise(streamer.arrivals))
            histogram = [accepted[drafts] for drafts in range(max(accepted, default=-1) + 1)]
            answers.append(Answer(output[0, len(prompt) :].tolist(), streamer.arrivals, histogram))
        return Run(answers, seconds, None)

    def forget(self) -> None:
        pass

    def note(self) -> str:
        return ""


class _Streamer:
    """Records arrival times of tokens. The first call of transformers passes the prompt."""

    def __init__(self) -> None:
        self.started, self._count = time.perf_counter(), -1
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        if self._count >= 0:
            self.arrivals.append((time.perf_counter() - self.started, self._count + value.numel()))
        self._count = self.arrivals[-1][1] if self.arrivals else 0

    def end(self) -> None:
        pass


Contender: TypeAlias = EngineContender | TransformersContender


class Source:
    """One target, loaded once, and contenders that decode with its weights.

    Args:
        load_options: arguments of `specjax.load.load` except the draft's.
        full_batches: compile only the steps of full batches.
    """

    def __init__(self, load_options: dict[str, Any], *, progress: bool = True, full_batches: bool = False) -> None:
        self._options, self._progress, self._full_batches = load_options, progress, full_batches
        self._loaded: dict[str, LoadedModel] = {}  # by the method's text
        self._models: dict[str, Any] = {}  # of transformers, by name and dtype
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
            drafter = make_drafter(draft, target=loaded.target, head=head, model=model)
            self._loaded[method.text] = loaded._replace(drafter=drafter)
        return self._loaded[method.text]

    def contender(self, method: Method, config: EngineConfig) -> Contender:
        """A contender for batches of `config.max_running_requests` prompts."""
        if method.transformers is None:
            return EngineContender(self.engine(method, config))
        options, how = method.transformers, dict[str, Any]()
        if options.prompt_lookup:
            how["prompt_lookup_num_tokens"] = options.prompt_lookup
        if options.assisted:
            how["assistant_model"] = self._transformers_model(options.assisted, options.dtype)
        model = self._transformers_model(None, options.dtype)
        return TransformersContender(model, how, tuple(self.first.eos_ids))

    def engine(self, method: Method, config: EngineConfig) -> Engine:
        """An engine whose programs are compiled."""
        engine = Engine(**self.load(method)._asdict(), config=replace(config, adaptive=method.adaptive))
        batch = config.max_running_requests
        keys = engine.buckets.single_request_keys() if batch == 1 else None
        if keys is None and self._full_batches:
            widths = {"step": (batch,), "prefill": engine.buckets.chunks}
            keys = [key for key in engine.buckets.all_keys() if key.rows == 1 and key.width in widths.get(key.kind, ())]
        engine.warm_up(keys, progress=False)
        return engine

    def _transformers_model(self, name: str | None, dtype: str) -> Any:
        """A model of transformers; None: the target, its weights dequantised."""
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging as messages

        messages.set_verbosity_error()  # assisted decoding warns of its own calls
        messages.disable_progress_bar()  # it would interrupt ours
        key = f"{name} {dtype}"
        if key not in self._models:
            revision = self._options.get("revision") if name is None else None
            files = checkpoint.resolve(name or self._options["model"], revision=revision)
            with tempfile.TemporaryDirectory() as folder:
                checkpoint.save_dequantised(files, Path(folder))
                model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            on_gpu = jax.default_backend() != "cpu"
            if on_gpu and not torch.cuda.is_available():
                logger.warning("transformers runs on the CPU: this torch finds no GPU")
            model = model.eval().to("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
            model.generation_config = GenerationConfig()  # a checkpoint's may have penalties, which ours ignores
            self._models[key] = model
        return self._models[key]
