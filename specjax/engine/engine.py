"""The engine: plan -> dispatch -> collect.

One iteration (`step`) admits waiting requests, plans and dispatches at most one prefill, and decode steps in which each
running request takes part once at most, and then reads the results of the iteration before. So the device always has
its next step queued while the host looks at the last one. This is safe because a row that finishes on the device does
nothing in later steps, because pages are reserved for all that unread steps may commit, and because the device runs
steps in order: pages freed by a step that was read may be written by one dispatched later.

    iteration t     dispatch step t     collect step t - 1     (a row that ended in t - 1 was inactive in t)
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from functools import cached_property, partial
from time import sleep
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh
from specjax_kernels import skips_padding

from specjax import checkpoint, gpu
from specjax.cache import PoolShape, row_states
from specjax.checkpoint.prompts import Prompt, Prompts
from specjax.config import HeadConfig, MtpConfig
from specjax.costs import estimated_ratio
from specjax.drafters import Auto, Drafter, DrafterFactory, DraftOptions, Params, Speculation
from specjax.drafters.check import check_custom
from specjax.engine.chat.message_format import AnswerForm, Reply, answer_form
from specjax.engine.chat.tools import Tools
from specjax.engine.config import EngineConfig
from specjax.engine.device import Device, Resident, admission
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.generation import (
    ENGINE_FAILED,
    DeltaReader,
    EngineError,
    FairLock,
    StreamChunk,
    forget_frames,
)
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.engine.intake import Intake, Salts, Sampling, with_sampling
from specjax.engine.memory import Devices, MemoryPlan, held_by, keep_freed_memory, plan_memory
from specjax.engine.plan import Batch, Drafting, Key, plan
from specjax.engine.programs import Programs
from specjax.engine.runtime import Counters, Flights, Runtime, collect_all_but, dispatch
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import NO_SCORES, TEXT_FAILED, AbortCode, Completion, Sequence, Status
from specjax.load import declared_models, load, use_compilation_cache
from specjax.models.target import Target
from specjax.parallel.sharding import (
    check_experts,
    described,
    empty_state,
    make_mesh,
    on_first,
    place_params,
    several,
)
from specjax.state import DecodeState, init_state
from specjax.verify import Verifier, is_lossless

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = EngineConfig()
IDLE_SECONDS = 0.002  # pause of a step in which nothing can run

Samplings: TypeAlias = Sampling | List[Sampling | None] | None
Functions: TypeAlias = List[Mapping[str, Any] | Callable[..., Any]]
"""Functions that a model may call: in OpenAI's form, or of Python."""


class Engine:
    """Continuous batching over one target and one drafter. Thread-safe: requests of several threads share batches.

    Args:
        speculation: a drafter, or one with its verifier and other facts.
        verify: overrides the verifier of `speculation`.

    Attributes:
        speculation: the drafter, and facts around it; its `params` are in `params.draft`.
        drafter: proposes draft trees.
        verify: decides which drafts are accepted.
        lossless: the verifier does not change the text. Otherwise the text depends on the drafts, so every step drafts
            the same tree, whatever else runs.
        lock: held by all changes of requests or of the device's state.
        flights: batches that are launched and not yet read.
    """

    def __init__(
        self,
        target: Target,
        params: Params,
        tokenizer: Any,
        speculation: Speculation | Drafter,
        *,
        verify: Verifier | None = None,
        config: EngineConfig = DEFAULT_CONFIG,
        eos_ids: tuple[int, ...] = (),
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        draft_model: HeadConfig | MtpConfig | Target | None = None,
    ) -> None:
        check_config(config)
        speculation = speculation if isinstance(speculation, Speculation) else Speculation(speculation)
        drafter, verify = speculation.drafter, verify or speculation.verify
        if speculation.params is not None:
            params, speculation = params._replace(draft=speculation.params), speculation._replace(params=None)
        self.lossless = is_lossless(verify)
        if not self.lossless:
            if config.adaptive:
                logger.warning("adaptive has no effect: with a verifier that changes the text every step drafts")
            speculation = speculation._replace(explicit_width=True, every_step=True)
            config = replace(config, adaptive=False)
        gpu.warn_of_problem()
        check_custom(drafter, target, params)
        self.lock = FairLock()
        self.mesh = self.make_mesh(config)
        self._models: Params | None = None  # declarations of both models' parameters
        if self.mesh is not None:
            check_experts(target.config, config.expert_parallel)
            self._models = declared_models(target, draft_model)
            params = place_params(self.mesh, params, self._models)
        self.target, self._params, self.tokenizer, self.drafter = target, params, tokenizer, drafter
        self.speculation, self.verify = speculation, verify
        self.config, self.eos_ids, self.sampling_defaults = config, eos_ids, sampling_defaults
        self.vocab_size = target.config.vocab_size
        self.platform = jax.default_backend()
        if self.platform == "cpu":
            keep_freed_memory()
        rows, size = config.max_running_requests, config.page_size
        snapshots = config.snapshot_rows if row_states(target.pages) else None
        self._sizes = {"rows": rows, "snapshots": snapshots or 0}  # of the state
        self.memory_plan = memory = self.make_plan(config.max_total_tokens).checked()
        self.pool, self.context_length = memory.pool, memory.context_length
        skips = memory.buckets.ragged and self.mesh is None and skips_padding(params.target)
        self.buckets = replace(memory.buckets, ragged=skips)
        check_custom(drafter, target, params, self.buckets.batches)
        lookahead = (2 if config.overlap else 1) * (drafter.depth + 1)
        self.scheduler = Scheduler(
            rows=rows, pages=self.pool.pages, page_size=size, lookahead=lookahead,
            reuse=config.prefix_cache and snapshots != 0, policy=config.schedule_policy, snapshots=snapshots,
            recomputed=drafter.depth if speculation.runs_model and not self.lossless else 0,
        )  # fmt: skip
        self.programs = Programs(
            target, speculation, params, self._state_shapes(self.pool), table=self.buckets.tables[-1],
            new_pages=-(-lookahead // size), verify=verify, trace=config.trace, room=memory.room, mesh=self.mesh,
        )  # fmt: skip
        self.device = self.new_device()
        self.flights, self.counters = Flights(), Counters()
        self._inconsistent = False  # an exception has left `_guarded`
        self.programs.busy = lambda: self.scheduler.unfinished
        self.intake = Intake(
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            pool_tokens=self.pool.pages * size,
            eos_ids=eos_ids,
            depth=drafter.depth,
            salts=Salts(isolate=config.isolate_ngrams, unique=not (self.lossless or speculation.runs_model)),
            seeds=random.SystemRandom() if config.random_seed is None else random.Random(config.random_seed),
        )
        sizes = {batch: self.buckets.sizes(batch) for batch in self.buckets.batches}
        options: Any = {"models": speculation.models, "by_request": speculation.costly_observe}
        policy = DraftPolicy(sizes, self._estimated_ratio, **options) if self.buckets.chooses else None
        self.runtime = Runtime(
            self.device, self.programs, self.buckets, self.scheduler, self.flights, self.counters, rows,
            self.pool.pages, self.vocab_size, lossless=self.lossless, policy=policy,
        )  # fmt: skip

    @classmethod
    def from_pretrained(
        cls,
        model: str = checkpoint.BUILT_IN_MODEL,
        *,
        draft: DraftOptions | str = Auto.algorithm,
        dtype: str = "auto",
        quantization: str = "auto",
        drafter: Drafter | DrafterFactory | None = None,
        verify: Verifier | None = None,
        revision: str | None = None,
        tokenizer_path: str | None = None,
        chat_template: str | None = None,
        sampling_defaults: str = "model",
        backend: str | None = None,
        config: EngineConfig = DEFAULT_CONFIG,
        compilation_cache: bool = True,
        progress: bool = True,
    ) -> Engine:
        """Loads a model (alias, .gguf, folder or hub id) and makes an engine for it.

        Args:
            draft: options such as `Eagle3(path, steps=5, topk=8, nodes=32)`, the name of an algorithm (`DRAFTERS`), or
                module:function for a function as in `drafter`. AUTO: the draft head that ships for the model, else the
                model's MTP layers, else n-grams.
            dtype: auto (float32 on a CPU, the checkpoint's on a GPU), float32, bfloat16 or float16.
            quantization: auto: matrices that the checkpoint holds in few bits stay so; none: they are dequantised; fp8,
                int8 or int4: the matrices of a float checkpoint are quantised. Activations never are.
            drafter: a `Drafter`, or a function of the `Target` that returns one or a `Speculation`, which adds
                parameters and a verifier; replaces `draft`. It drafts in every step, unless `EngineConfig.adaptive` is
                True; AUTO drafts only in steps where that is measured to be faster.
            verify: decides which drafts are accepted, and may change the text; None: the drafter's verifier, by default
                `verify_tree`. With a verifier that changes the text (`specjax.verify.is_lossless`) every step drafts.
            tokenizer_path: folder with another tokenizer.
            chat_template: file with another Jinja template.
            sampling_defaults: model: generation_config.json sets `engine.sampling_defaults`, the defaults of requests;
                openai: it is not read.
            backend: a `tree_attention` implementation; None or auto: by device.
            compilation_cache: keep compiled programs on disk.
            progress: show bars on stderr while weights load and while requests wait for a compilation; one line each if
                stderr is not a terminal.

        Raises:
            CheckpointError: the model cannot be found or read.
            ValueError: a value is out of range, or a draft head is missing.
            TypeError: an argument is of the wrong type.
        """
        check_config(config)
        if compilation_cache:
            use_compilation_cache()
        mesh = cls.make_mesh(config)
        with on_first(mesh):
            loaded = load(
                model, draft=draft, dtype=dtype, quantization=quantization, drafter=drafter, verify=verify,
                context_length=config.context_length,
                revision=revision, tokenizer_path=tokenizer_path, chat_template=chat_template,
                sampling_defaults=sampling_defaults, backend=backend, mem_fraction=config.mem_fraction,
                mesh=several(mesh), progress=progress,
            )  # fmt: skip
        engine = cls(**loaded._asdict(), config=config)
        engine.programs.progress = progress
        return engine

    @cached_property
    def form(self) -> AnswerForm:
        """The format of the model's calls and reasoning, from its chat template; replace it to set another parser:
        `answer_form(engine.tokenizer, tool_call_parser="llama3")` of `specjax.engine.chat.message_format`."""
        return answer_form(self.tokenizer)

    @property
    def params(self) -> Params:
        """Parameters of the target and the drafter. While no request runs (else RuntimeError) they can be replaced by
        others of the same shapes, which clears the prefix cache and the drafter's state."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        with self.lock:
            if self.scheduler.unfinished:
                raise RuntimeError("the parameters of an engine cannot be replaced while a request runs")
            if self.mesh is not None:
                params = place_params(self.mesh, params, self._models)
            self.device.replace_params(params)
            self._params = params
            self.flush_cache()

    @property
    def policy(self) -> DraftPolicy | None:
        """Chooses the nodes of the trees; None: each step drafts as its batch bucket says."""
        return self.runtime.policy

    @property
    def changed(self) -> dict[Sequence, None]:
        """Sequences with new tokens, or finished, that no `step` has returned."""
        return self.runtime.changed

    @property
    def state(self) -> DecodeState:
        """Donated to each step, which returns the next state."""
        return self.device.state.decode

    @property
    def device_name(self) -> str:
        return jax.devices()[0].device_kind

    def wait_until_allocated(self) -> None:
        """Blocks until the KV pool and the rows of the state are in memory. Raises the error of a failed allocation."""
        jax.block_until_ready(self.state)

    # Requests

    def add(self, prompt: Prompt, sampling: SamplingParams, *, id: str | None = None) -> Sequence:
        """Queues a request: text, token ids, or chat messages. Raises ValueError for a prompt that cannot run."""
        return self.enqueue(self.intake.sequence(prompt, sampling, id=id))

    def enqueue(self, sequence: Sequence) -> Sequence:
        """Queues a sequence that `intake` made. Raises ValueError while a request with its id waits or runs."""
        with self.lock:
            if sequence.id in self.runtime.sequences:
                raise ValueError(f"a request with id {sequence.id!r} is running")
            self.scheduler.add(sequence)
            self.runtime.sequences[sequence.id] = sequence
        return sequence

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; see `specjax.checkpoint.prompts.encode`."""
        return self.intake.encode(prompt)

    def abort(self, id: str, message: str | None = None) -> bool:
        """Ends a request and frees its pages at once. Returns True if it was running or waiting. `message`: why the
        server aborts it."""
        with self.lock:
            return (sequence := self.runtime.sequences.get(id)) is not None and self.end(sequence, message)

    def end(self, sequence: Sequence, message: str | None = None, code: AbortCode | None = None) -> bool:
        """`abort` of this sequence, but not of another one with the same id."""
        with self.lock:
            if self.runtime.sequences.get(sequence.id) is not sequence:
                return False
            sequence.abort(message, code)
            self.runtime.finish(sequence)
            return True

    def reset(self, message: str, code: AbortCode | None = None) -> list[Sequence]:
        """After a failed step: ends all requests with this reason, and starts from an empty state. Raises the error of
        its allocation, after the requests have ended; the next step then tries again."""
        with self.lock:
            ended = list(self.runtime.sequences.values())
            for sequence in ended:
                self.end(sequence, message, code)
            self.flights.clear()
            self.changed.clear()
            self.scheduler.start_over()
            self.device.renew()
            self._inconsistent = False
            return ended

    def retract_all(self) -> None:
        """Sends all running requests back to the queue, and frees all pages, also of the prefix cache. The requests go
        on later with the same text."""
        with self._guarded():
            collect_all_but(self.runtime, 0)
            self.scheduler.start_over()

    # The loop

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished or bool(self.flights)

    def step(self) -> list[Sequence]:
        """One iteration: plan, dispatch, collect. Returns the sequences that have new tokens or have finished.

        If nothing can run before a program is compiled, the step pauses for `IDLE_SECONDS`.
        """
        with self.lock, TraceAnnotation("step"):
            with self._guarded():
                self._admit()
                dispatched = sum(map(self._dispatch, self._plan()))
                if not dispatched and not self.flights and not self.changed:
                    sleep(IDLE_SECONDS)
                collect_all_but(self.runtime, dispatched if self.config.overlap else 0)
            changed = list(self.changed)
            self.changed.clear()
            return changed

    def _plan(self) -> list[Batch]:
        """The batches of one iteration."""
        waiting = self._read_grammars()
        self._reserve()
        unread = {s for flight in self.flights if flight.batch.key.verifies for s in flight.sequences} | waiting
        prefills = [flight.batch.key.size for flight in self.flights if not flight.batch.key.verifies]
        view = self.scheduler.view(
            unread, chunk=self.buckets.chunks[-1], depth=self.drafter.depth, prefilling=max(prefills, default=0)
        )
        drafting = Drafting(self.policy, always=self.speculation.costly_observe or not self.lossless)
        return plan(view, self.programs.ready(), self.buckets, drafting)

    def _dispatch(self, batch: Batch) -> bool:
        """Launches a batch, if its program is ready. Returns True if it is in flight."""
        if batch.wanted:
            self.programs.want(batch.wanted)
        if not batch.runs:
            return False
        try:
            dispatch(self.runtime, batch)
        except MemoryError as error:
            if batch.key.kind != "scoring":
                raise MemoryError(f"no size of batch can run ({error})") from error
            # Only this request needs such a program.
            sequence = self.runtime.sequences[batch.rows[0]]
            self.runtime.give_up(sequence, f"{NO_SCORES}: {error}", AbortCode.MEMORY)
            return False
        return True

    def _read_grammars(self) -> set[Sequence]:
        """Reads the steps in flight of sequences with a grammar, whose next masks need the tokens. Ends those whose
        grammar allows no next token. Returns those that wait for their turn: a step has one slow grammar."""
        while any(s.constraint for flight in self.flights if flight.batch.key.verifies for s in flight.sequences):
            collect_all_but(self.runtime, len(self.flights) - 1)
        followed = [(s, s.constraint) for s in self.scheduler.running() if s.constraint is not None]
        slow = sorted((each for each in followed if each[1].is_slow), key=lambda each: each[1].advanced)
        waiting = {sequence for sequence, _ in slow[1:]}
        for sequence, constraint in followed:
            if sequence not in waiting and (problem := constraint.problem()) is not None:
                after = f"after {len(sequence.output.tokens)} tokens"
                self.runtime.give_up(sequence, f"{GRAMMAR_FAILED} {after}: {problem}", AbortCode.GRAMMAR)
        return waiting

    def _reserve(self) -> None:
        """Reserves pages for all that the running requests may commit; retracts some if pages run out."""
        while not self.scheduler.reserve(self.scheduler.running()):
            # Read all steps before a retraction: the output must be complete, and reading may free pages.
            if self.flights:
                collect_all_but(self.runtime, 0)
            else:
                self.scheduler.retract_youngest()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Encloses all changes of the device's state and of `flights`. An exception leaves the two inconsistent, and
        the next call starts over."""
        with self.lock:
            if self._inconsistent or self.device.lost:
                self._start_over()
            self._inconsistent = True
            yield
            self._inconsistent = False

    def _start_over(self) -> None:
        """Sends all running requests back to the queue. They go on with the same text: unread tokens are drawn
        again."""
        self.flights.clear()
        self.scheduler.start_over()
        if self.device.poisoned:
            self.device.renew()

    def _admit(self) -> None:
        """Puts sequences that fit into rows of the state."""
        for sequence in self.scheduler.admit():
            if self.policy is not None and self.speculation.costly_observe and not sequence.output.tokens:
                batch = self.buckets.batch(min(len(self.scheduler.active), self.buckets.batches[-1]))
                sequence.drafts = sequence.drafts and self.policy.admit(batch, sequence.limit)
            self.device.wait()
            self.device.update(self.programs.admit, admission(sequence, self.vocab_size, self._fresh_drafts))
            self.counters.prefilled_sequences += 1
            self.counters.cached_tokens += sequence.active_slot.length

    def _estimated_ratio(self, batch: int, nodes: int) -> float:
        """Estimated duration of a step of N nodes relative to one of a single node."""
        if nodes == 1:
            return 1.0
        resized = self.speculation.within(nodes)._replace(width=nodes)
        device = None if self.platform == "cpu" else gpu.named(self.device_name)
        return estimated_ratio(batch, self.target, self.speculation._replace(drafter=resized), self.params, device)

    # State and programs

    def _empty(self, pool: PoolShape, **sizes: int) -> DecodeState:
        return init_state(self._params, self.target, self.drafter, pool=pool, **sizes)

    def _state_shapes(self, pool: PoolShape) -> DecodeState:
        """Shapes of the state with such a pool, and their shardings on a mesh."""
        shapes = jax.eval_shape(partial(self._empty, pool, **self._sizes))
        return shapes if self.mesh is None else described(shapes, self._small_state)

    @cached_property
    def _small_state(self) -> DecodeState:
        """A state on the mesh, for its shardings, which depend on neither rows nor pages."""
        return self._on_devices(partial(self._empty, PoolShape(1, self.config.page_size), rows=1))

    @classmethod
    def make_mesh(cls, config: EngineConfig) -> Mesh | None:
        """The devices of the engine; None: JAX's first device alone."""
        return make_mesh(config.tensor_parallel, config.first_device, groups=config.expert_parallel)

    def make_plan(self, tokens: int | None) -> MemoryPlan:
        """Plans the memory for a pool of `tokens` tokens; None: as many as fit."""
        config, devices = replace(self.config, max_total_tokens=tokens), Devices.of(self.platform, self.mesh)
        held = held_by(self._params, self._state_shapes, config.page_size)
        return plan_memory(config, self.target, self.speculation, devices, held)

    def new_device(self) -> Device:
        """Makes the `Device`, which begins to allocate the state."""
        return Device(self._params, self._new_state, self.programs.launch_lock)

    def _new_state(self) -> Resident:
        def make() -> Resident:
            tables = jnp.full((self._sizes["rows"], self.buckets.tables[-1]), self.pool.pages, jnp.int32)
            return Resident(self._empty(self.pool, **self._sizes), tables)

        state = self._on_devices(make)
        self._fresh_drafts = [np.array(leaf) for leaf in self.programs.draft_rows(state.decode)]
        return state

    def _on_devices(self, make: Callable[[], Any]) -> Any:
        return make() if self.mesh is None else empty_state(self.mesh, make)

    def without_drafts(self, state: Resident) -> Resident:
        """Returns the state with an empty state of the drafter."""
        draft = self._on_devices(partial(self.drafter.init, self.params, self._sizes["rows"], self.pool))
        return state._replace(decode=state.decode._replace(draft=draft))

    def flush_cache(self) -> bool:
        """Clears the prefix cache and the drafter's state. While a request runs it does nothing and returns False."""
        with self.lock:
            if self.scheduler.unfinished:
                return False
            with self._guarded():
                collect_all_but(self.runtime, 0)  # steps dispatched ahead for requests that have ended
            self.scheduler.prefix.clear()
            self.device.update(self.without_drafts)
            return True

    def warm_up(self, keys: Iterable[Key] | None = None, *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these programs, or all, before their first use. See `Programs.warm_up`."""
        if keys is None:
            keys = dict.fromkeys((*self.buckets.all_keys(), *self.buckets.all_steps()))
        self.programs.warm_up(keys, progress=progress, strict=strict)

    def warm_up_in_background(self, then: Callable[[], None] = lambda: None) -> None:
        """Compiles the remaining programs while requests run, which share smaller batches meanwhile; then calls `then`
        in another thread."""
        self.programs.compile_later(self.buckets.all_keys(), then)

    # Generation

    @overload
    def generate(
        self, prompts: Prompts, sampling: Samplings = None, *, stream: Literal[False] = False,
        tools: Functions = (), tool_choice: str = "auto",
    ) -> list[Completion]: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: Prompt, sampling: Samplings = None, *, stream: Literal[False] = False,
        tools: Functions = (), tool_choice: str = "auto",
    ) -> Completion: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: Prompt | Prompts, sampling: Samplings = None, *, stream: Literal[True],
        tools: Functions = (), tool_choice: str = "auto",
    ) -> Iterator[StreamChunk]: ...  # fmt: skip
    def generate(
        self,
        prompts: Any,
        sampling: Samplings = None,
        *,
        stream: bool = False,
        tools: Functions = (),
        tool_choice: str = "auto",
    ) -> Completion | list[Completion] | Iterator[StreamChunk]:
        """Completes prompts.

        Args:
            prompts: a string, a list of token ids or a list of messages; or a list of any of these.
            sampling: parameters for all prompts, or a list with one entry per prompt. Missing fields take the model's
                defaults (`sampling_defaults`), then `SamplingParams`' own; a `SamplingParams` is used unchanged.
            stream: yield `StreamChunk`s as tokens come. The requests start when the first chunk is taken.
            tools: functions that the model may call, in OpenAI's form, or as Python functions with annotations and a
                docstring that describes each argument. The prompts must be lists of messages, for which `message` and
                `tool_calls` of a completion are ready to use.
            tool_choice: auto: the model chooses; required, or the name of a function: the answer is a call; none: the
                model sees no functions.

        Returns:
            A `Completion` for one prompt, a list of them in order for a list, or an iterator of `StreamChunk`.

        Raises:
            ValueError: a prompt or a parameter is wrong; nothing has been started.
        """
        single, pairs = with_sampling(prompts, sampling, self.sampling_defaults)
        offered, sequences, replies = Tools.read(tools, tool_choice), list[Sequence](), list[Reply | None]()
        for prompt, params in pairs:
            options = None
            if offered.functions or offered.must:
                prompt, params, options = offered.applied(prompt, params, self.form)
            sequences.append(sequence := self.intake.sequence(prompt, params))
            thinking = options is not None and self.form.is_open(sequence.prompt, self.tokenizer)
            replies.append(options and options.reply(thinking=thinking))
        if stream:
            return self._stream(sequences, replies)
        done = self.complete(sequences, replies)
        return done[0] if single else done

    def complete(self, sequences: list[Sequence], replies: List[Reply | None] | None = None) -> list[Completion]:
        """Runs sequences to their end. Raises as `_stream` does. `replies`: as in `DeltaReader`, for each."""
        last = {chunk.prompt_index: chunk.completion for chunk in self._stream(sequences, replies, deltas=False)}
        return [done for _, done in sorted(last.items()) if done is not None]

    def _stream(
        self, sequences: list[Sequence], replies: List[Reply | None] | None = None, *, deltas: bool = True
    ) -> Iterator[StreamChunk]:
        """Yields the text of sequences as it comes, or without `deltas` once at its end. Reads the sequences, not the
        report of `step`, because other threads may step the engine between two chunks.

        Raises:
            ValueError: a request with one of their ids is running.
            EngineError: a step fails, in this thread or another.
        """
        parsed = zip(sequences, replies or [None] * len(sequences), strict=True)
        left = [DeltaReader(sequence, index, reply) for index, (sequence, reply) in enumerate(parsed)]
        try:
            for sequence in sequences:
                self.enqueue(sequence)
            while left:
                for reader in list(left):
                    ended = reader.sequence.status is Status.FINISHED
                    if not (deltas or ended) or (chunk := self._delta(reader)) is None:
                        continue
                    if chunk.completion is not None:
                        left.remove(reader)
                    yield chunk
                if left:
                    self._advance()
        finally:  # the caller may stop listening, and an interrupt must not leave requests behind
            for reader in left:
                self.end(reader.sequence)

    def _delta(self, reader: DeltaReader) -> StreamChunk | None:
        with self.lock:
            try:
                chunk = reader.take()
            except Exception:  # of this text; the other results are kept
                logger.exception("request %s failed", reader.sequence.id)
                reader.sequence.abort(TEXT_FAILED)
                self.end(reader.sequence, TEXT_FAILED)
                chunk = reader.take()
        reason = reader.sequence.output.finish_reason
        if reason is not None and reason.message == ENGINE_FAILED:
            raise EngineError(ENGINE_FAILED)
        return chunk

    def _advance(self) -> None:
        """Runs one step. Raises EngineError if it fails; the engine then starts from an empty state."""
        try:
            self.step()
        except Exception as error:
            forget_frames(error)
            try:
                self.reset(ENGINE_FAILED)
            except Exception as second:
                raise EngineError(
                    f"the engine failed ({error}), and no new state could be allocated ({second}): make a new engine"
                ) from error
            problem = f"{type(error).__name__}: {error}"
            if self.programs.is_broken(error):
                raise EngineError(f"a program that these requests need cannot be compiled: {problem}") from error
            raise EngineError(f"the engine failed and was reset; it can be used again: {problem}") from error


def check_config(config: object) -> None:
    """Raises TypeError unless `config` is an `EngineConfig`."""
    if not isinstance(config, EngineConfig):
        hint = "; write EngineConfig(**config)" if isinstance(config, dict) else ""
        raise TypeError(f"config must be an EngineConfig, got {type(config).__name__}{hint}")
