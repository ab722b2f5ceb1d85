"""What completes prompts: engines that share one target's weights, and transformers on the same weights."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax

from specjax import checkpoint
from specjax.bench.methods import Method, Outside
from specjax.compiling import use_compilation_cache
from specjax.drafters import Drafter, DraftOptions, NoDraft
from specjax.drafters.factories import load_drafter, make_drafter
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.engine.notes import drafting_summary
from specjax.engine.phases import PhaseTimes
from specjax.load import LoadedModel, load
from specjax.models.target import Target

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """One prompt's completion."""

    tokens: list[int]  # a stop token included
    arrivals: list[tuple[float, int]]  # seconds since the start, tokens so far; one entry a forward that was read
    histogram: list[int]  # forwards by drafts accepted, without the prompt's

    @property
    def forwards(self) -> int:
        return sum(self.histogram)


class Run(NamedTuple):
    """Prompts that were completed together."""

    answers: list[Answer]
    seconds: float
    drafted_steps: int | None  # steps of single requests that could draft; None: not known


@runtime_checkable
class Contender(Protocol):
    """Completes a batch of prompts."""

    def run(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run: ...

    def forget(self) -> None:
        """Forgets texts: a set must not remember the one before."""
        ...

    def note(self) -> str: ...


@dataclass
class EngineContender:
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
        while engine.programs.pending:  # what compiles in the background would slow down whoever is next
            time.sleep(0.02)
        for sequence in sequences:
            if sequence.output.finish_reason is not None and sequence.output.finish_reason.type == "abort":
                raise RuntimeError(f"a request failed: {sequence.output.finish_reason.message}")
        each = zip(sequences, arrivals, strict=True)
        answers = [Answer(list(one.output.tokens), seen, list(one.output.histogram)) for one, seen in each]
        return Run(answers, seconds, engine.counters.drafted_steps - drafted)

    def forget(self) -> None:
        if not self.engine.flush_cache():
            raise RuntimeError("requests still run")

    def note(self) -> str:
        """Why it may not draft in each step."""

        def as_written(reason: str) -> str:
            return reason.replace("TreeShape.nodes", "nodes=N").replace("EngineConfig.adaptive", "adaptive=on")

        return drafting_summary(self.engine.drafter, self.engine.buckets, 1, 0, as_written)["not_drafted"] or ""

    def phases(self) -> PhaseTimes:
        times = self.engine.programs.phase_times
        assert times is not None, "an engine with EngineConfig.time_phases"
        return replace(times)


class Source:
    """One target, loaded once, and the engines that decode it.

    Args:
        load_options: `specjax.load.load`'s, without the draft's.
        full_batches: compile steps of full batches alone, which also serve the last requests of a run.
    """

    def __init__(self, load_options: dict[str, Any], *, progress: bool = True, full_batches: bool = False) -> None:
        self._options, self._progress, self._full_batches = load_options, progress, full_batches
        self._loaded: dict[str, LoadedModel] = {}
        self._models: dict[str, Any] = {}  # of transformers, by dtype
        use_compilation_cache()

    @property
    def first(self) -> LoadedModel:
        """What was loaded first, whose target all share."""
        return next(iter(self._loaded.values()))

    def load(self, method: Method) -> LoadedModel:
        """The drafter and its weights, beside the target that is there already."""
        if method.text not in self._loaded:
            given: dict[str, Any] = {"draft": method.draft} if method.draft is not None else {}
            if method.drafter is not None:
                given["drafter"] = load_drafter(method.drafter)
            if method.verifier is not None:
                given["verify"] = load_drafter(method.verifier)
            found = load(**self._options, **given, progress=self._progress and not self._loaded)
            if self._loaded:  # one copy of the weights
                target = self.first.params.target
                found = found._replace(params=found.params._replace(target=target))
            self._loaded[method.text] = found
        return self._loaded[method.text]

    def derive(self, method: Method, of: Method) -> LoadedModel:
        """What `method` needs, made of the weights that are loaded for `of`: a drafter of another shape, or none."""
        if method.text not in self._loaded:
            base = self.load(of)
            draft = cast(DraftOptions, method.draft)
            if isinstance(draft, NoDraft):
                base = base._replace(params=base.params._replace(draft=None), draft_model=None)
            drafter = shaped(draft, base)
            self._loaded[method.text] = base._replace(drafter=drafter)
        return self._loaded[method.text]

    def engine(self, method: Method, config: EngineConfig, **changes: Any) -> Engine:
        """An engine that is compiled for what it will run. `changes`: fields of its config."""
        config = replace(config, adaptive=method.adaptive, **changes)
        engine = Engine(**self.load(method)._asdict(), config=config)
        keys = engine.single_request_keys() if config.max_running_requests == 1 else None
        if keys is None and self._full_batches:
            widths = {"step": (config.max_running_requests,), "prefill": engine.buckets.chunks}
            every = engine.buckets.all_keys()
            keys = [key for key in every if key.rows == 1 and key.width in widths.get(key.kind, ())]
        engine.warm_up(keys, progress=False)
        return engine

    def transformers(self, outside: Outside, stops: Sequence[int]) -> Contender:
        return TransformersContender(self._model(None, outside.dtype), self._how(outside), tuple(stops))

    def _how(self, outside: Outside) -> dict[str, Any]:
        if outside.lookup:
            return {"prompt_lookup_num_tokens": outside.lookup}
        if outside.assisted:
            return {"assistant_model": self._model(outside.assisted, outside.dtype)}
        return {}

    def _model(self, name: str | None, dtype: str) -> Any:
        """A model of transformers; None: the target, its weights dequantised."""
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging as messages

        messages.set_verbosity_error()  # its assisted decoding warns of its own calls
        messages.disable_progress_bar()  # in the midst of ours
        key = f"{name} {dtype}"
        if key not in self._models:
            revision = self._options.get("revision") if name is None else None
            files = checkpoint.resolve(name or self._options["model"], revision=revision)
            with tempfile.TemporaryDirectory() as folder:
                checkpoint.save_dequantised(files, Path(folder))
                model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            model = model.eval().to(_torch_device())
            model.generation_config = GenerationConfig()  # a checkpoint's may hold penalties, which ours does not apply
            self._models[key] = model
        return self._models[key]


def shaped(draft: DraftOptions, loaded: LoadedModel) -> Drafter:
    """A drafter with these options and the loaded weights; the algorithm is that which they were loaded for, or needs
    none."""
    given = loaded.draft_model
    head, model = (None, given) if isinstance(given, Target) else (given, None)
    return make_drafter(draft, target=loaded.target, head=head, model=model)


class _Arrivals:
    """A streamer that notes when tokens come. transformers hands it the prompt first."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.arrivals: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        before = self.arrivals[-1][1] if self.arrivals else 0
        self.arrivals.append((time.perf_counter() - self.started, before + value.numel()))

    def end(self) -> None:
        pass


@dataclass
class TransformersContender:
    """Greedy, one request after another."""

    model: Any
    how: dict[str, Any]
    stops: tuple[int, ...]  # tokens that end a text

    def run(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        import torch

        answers, seconds = [], 0.0
        for prompt, params in zip(prompts, sampling, strict=True):
            ids, streamer = torch.tensor([prompt], device=self.model.device), _Arrivals()
            stops = [] if params.ignore_eos else list(self.stops)
            with torch.inference_mode():
                done = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=params.max_new_tokens,
                    streamer=streamer, eos_token_id=stops or None, pad_token_id=0, **self.how,
                )  # fmt: skip
            tokens = done[0, len(prompt) :].tolist()
            seconds += time.perf_counter() - streamer.started
            answers.append(Answer(tokens, streamer.arrivals, _histogram(streamer.arrivals)))
        return Run(answers, seconds, None)

    def forget(self) -> None:
        pass

    def note(self) -> str:
        return ""


def _torch_device() -> str:
    """Where the engine runs, so that both are compared on one device; a torch that cannot leaves a warning."""
    import torch

    if jax.default_backend() == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    logger.warning("transformers runs on the CPU, the engine on %s: this torch finds no GPU", jax.default_backend())
    return "cpu"


def _histogram(arrivals: list[tuple[float, int]]) -> list[int]:
    """Forwards by drafts accepted: those after the prompt's."""
    counts = Counter(after[1] - before[1] - 1 for before, after in pairwise(arrivals))
    return [counts[drafts] for drafts in range(max(counts, default=0) + 1)] if counts else []


def make(source: Source, method: Method, config: EngineConfig, stops: Sequence[int]) -> Contender:
    """The contender of a method for batches of the config's `max_running_requests`; `stops`: tokens that end a text."""
    if method.outside is not None:
        return source.transformers(method.outside, stops)
    return EngineContender(source.engine(method, config))


def answer_text(tokenizer: Any, tokens: list[int], stops: Sequence[int]) -> str:
    """The text of an answer, for the prompt of the next turn."""
    if tokens and tokens[-1] in stops:
        tokens = tokens[:-1]
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()
