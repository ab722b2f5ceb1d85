"""The engine: schedule -> dispatch -> collect.

One iteration (`step`) admits waiting requests, dispatches at most one prefill chunk and one decode step, and then reads
the results of the iteration *before*: the device always has its next step queued while the host looks at the last one.
That is safe because a row that finishes on the device does nothing in later steps, because pages are reserved for all
that unread steps may commit, and because the device runs steps in order: pages freed by a step that was read may be
written by one dispatched later.

    iteration t     dispatch step t     collect step t - 1     (a row that ended in t - 1 was inactive in t)
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from specjax import checkpoint
from specjax.cache import PoolShape
from specjax.drafters import Drafter, Params
from specjax.engine.batch import Buckets, admission_row, pool_tokens, prefill_input, step_input
from specjax.engine.compiled import Executables, Key, Output, unpack, use_compilation_cache
from specjax.engine.config import EngineConfig
from specjax.engine.counters import Counters
from specjax.engine.intake import Intake, with_sampling
from specjax.engine.loading import load
from specjax.engine.news import StreamChunk, take_news
from specjax.engine.prompt import Prompt
from specjax.engine.request import FAILED_TEXT, SamplingParams, Sequence, Status, completion, raw_logprobs
from specjax.engine.scheduler import Scheduler
from specjax.inspection import step_tree
from specjax.models.protocol import Target
from specjax.state import TOP_LOGPROBS
from specjax.step import FULL, STOPPED, DecodeState, init_state, ladder

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = EngineConfig()


class _InFlight(NamedTuple):
    output: Output
    sequences: list[Sequence]
    lengths: list[int] | None  # of a prefill: tokens committed after it; None: a decode step
    logprobs: bool


class Engine:
    """Continuous batching over one target and one drafter. Not thread-safe: one thread calls `step`."""

    def __init__(
        self,
        target: Target,
        params: Params,
        tokenizer: Any,
        drafter: Drafter,
        *,
        config: EngineConfig = DEFAULT_CONFIG,
        eos_ids: tuple[int, ...] = (),
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.target, self.params, self.tokenizer, self.drafter = target, params, tokenizer, drafter
        self.config, self.eos_ids = config, eos_ids
        self.sampling_defaults = sampling_defaults
        self.vocab_size = target.config.vocab_size
        self.context_length = config.context_length or target.config.max_positions
        if self.context_length > target.config.max_positions:
            raise ValueError(
                f"--context-length {self.context_length} exceeds the model's {target.config.max_positions} positions"
            )
        self._top = min(TOP_LOGPROBS, self.vocab_size)
        self.platform = jax.default_backend()
        rows = config.max_running_requests
        tokens = pool_tokens(target.config, config, self.context_length, self.platform, drafter, params)
        self.pool = PoolShape(max(tokens // config.page_size, 1), config.page_size)
        request_pages = min(-(-self.context_length // config.page_size), self.pool.pages)
        chunk = config.chunked_prefill_size
        self.buckets = Buckets.build(self.platform, drafter, rows=rows, request_pages=request_pages, chunk=chunk)
        self.lookahead = (2 if config.overlap else 1) * (drafter.depth + 1)
        self.scheduler = self._new_scheduler()
        # Zeroing the pool takes seconds on a CPU, in which executables can be compiled for its shapes.
        shapes = jax.eval_shape(self._new_state)
        beside = ThreadPoolExecutor(1)
        self._state = beside.submit(self._new_state)
        beside.shutdown(wait=False)  # its thread ends with that
        variants = {"trace": config.trace, "time_phases": config.time_phases}
        self.executables = Executables(target, drafter, self.buckets, params, shapes, **variants)
        self.counters = Counters()
        self._in_flight: deque[_InFlight] = deque()
        self._by_id: dict[str, Sequence] = {}
        self.intake = Intake(
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            pool_tokens=self.pool.pages * self.pool.page_size,
            eos_ids=eos_ids,
            depth=drafter.depth,
            seeds=None if config.random_seed is None else random.Random(config.random_seed),
        )
        self._unreported: list[Sequence] = []  # read while making room; reported by the iteration that did it

    @classmethod
    def from_pretrained(
        cls,
        model: str = checkpoint.BUILT_IN_MODEL,
        *,
        dtype: str = "auto",
        algorithm: str = "AUTO",
        algorithm_flags: Mapping[str, Any] | None = None,
        revision: str | None = None,
        tokenizer_path: str | None = None,
        chat_template: str | None = None,
        backend: str | None = None,
        config: EngineConfig = DEFAULT_CONFIG,
        compilation_cache: bool = True,
        progress: bool = True,
    ) -> Engine:
        """Loads a model (alias, .gguf, folder or hub id) and makes an engine for it.

        Args:
            dtype: auto (float32 on a CPU, the checkpoint's on a GPU), float32, bfloat16 or float16.
            algorithm: AUTO or a name in `DRAFTERS`.
            algorithm_flags: by their names without the prefixes `--speculative-` and `ngram-`: num_draft_tokens; for
                EAGLE and EAGLE3 draft_model_path (needed), num_steps, eagle_topk and token_map.
            tokenizer_path: a folder with another tokenizer than the model's own.
            chat_template: a file with another Jinja template than the tokenizer's own.
            backend: a `tree_attention` implementation; None or auto = what suits the device.
            compilation_cache: keep compiled programs on disk.

        Raises:
            CheckpointError: the model cannot be found or read. ValueError: a flag is wrong.
        """
        if compilation_cache:
            use_compilation_cache()
        loaded = load(
            model,
            dtype=dtype,
            algorithm=algorithm,
            algorithm_flags=algorithm_flags,
            revision=revision,
            tokenizer_path=tokenizer_path,
            chat_template=chat_template,
            backend=backend,
            progress=progress,
        )
        return cls(**loaded._asdict(), config=config)

    @property
    def state(self) -> DecodeState:
        """What lives on the device; donated to each step, which gives the next."""
        return self._state.result()

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = Future()
        self._state.set_result(state)

    def _new_state(self) -> DecodeState:
        rows = self.config.max_running_requests
        return init_state(self.params, self.target, self.drafter, rows=rows, pool=self.pool)

    def wait_until_allocated(self) -> None:
        """Block until the KV pool and the rows of the state are in memory.

        Raises:
            Exception: the allocation failed.
        """
        jax.block_until_ready(self.state)

    # Requests

    def add(self, prompt: Prompt, sampling: SamplingParams, *, id: str | None = None) -> Sequence:
        """Queues a request: text, token ids, or chat messages (rendered with the model's template).

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or more tokens than fit.
        """
        return self.enqueue(self.intake.sequence(prompt, sampling, id=id))

    def enqueue(self, sequence: Sequence) -> Sequence:
        """Queues what `intake` made.

        Raises:
            ValueError: a request with this id is waiting or running.
        """
        if sequence.id in self._by_id:
            raise ValueError(f"a request with id {sequence.id!r} is running")
        self.scheduler.add(sequence)
        self._by_id[sequence.id] = sequence
        return sequence

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; see `specjax.engine.prompt.encode`."""
        return self.intake.encode(prompt)

    def abort(self, id: str, message: str | None = None) -> bool:
        """Ends a request now; its pages come back at once. False: no such request is running or waiting.

        `message` is what its finish reason tells, where the fault is ours.
        """
        sequence = self._by_id.get(id)
        if sequence is None:
            return False
        sequence.abort(message)
        self._finish(sequence)
        return True

    def reset(self, message: str) -> list[Sequence]:
        """After a step that failed: ends all requests, with `message` as the reason, and starts from an empty state."""
        ended = list(self._by_id.values())
        for sequence in ended:
            sequence.abort(message)
            self._finish(sequence)
        self._in_flight.clear()
        self._unreported.clear()
        self._state = Future()  # the old one goes before the new one is allocated
        self.state = self._new_state()
        return ended

    def find(self, id: str) -> Sequence | None:
        """The request with this id, while it waits or runs."""
        return self._by_id.get(id)

    # The loop

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished or bool(self._in_flight)

    def step(self) -> list[Sequence]:
        """One iteration. Returns the sequences that have new tokens or have finished."""
        launched = self._launch_prefill() + self._launch_decode()
        news = {sequence.id: sequence for sequence in self._unreported}
        self._unreported.clear()
        if not launched and not self._in_flight and not news:
            time.sleep(0.005)  # all wait for a program that is compiled behind
        keep = launched if self.config.overlap else 0
        while len(self._in_flight) > keep:
            for sequence in self._collect():
                news[sequence.id] = sequence
        return list(news.values())

    def _launch_prefill(self) -> int:
        for sequence in self.scheduler.admit():
            self.state = self.executables.admit(
                self.state, np.int32(cast(int, sequence.slot)), admission_row(sequence, self.vocab_size)
            )
        for sequence in self.scheduler.prefilling():
            inputs = prefill_input(sequence, self.buckets, self.pool.pages)
            key = Key("prefill", inputs.tokens.shape[1], inputs.page_table.shape[1], sequence.wants_logprobs)
            if self.executables.has(key):
                break
        else:
            return 0
        length = int(inputs.length[0])
        self.state, output = self.executables.get(key)(self.params, self.state, inputs)
        self.counters.prefilled_sequences += sequence.prefilled == 0
        self.counters.prefilled_tokens += length
        sequence.prefilled += length
        if sequence.prefilled == len(sequence.context):
            # The device knows the first token; the host may learn it later.
            sequence.status = Status.RUNNING
            sequence.committed = sequence.prefilled
        self._in_flight.append(_InFlight(output, [sequence], [sequence.prefilled], key.logprobs))
        return 1

    def _launch_decode(self) -> int:
        while True:
            running = self.scheduler.running()
            if not running:
                return 0
            if self.scheduler.reserve(running):
                break
            # Retract only what has been read: its output must be complete, and reading may free pages.
            if self._in_flight:
                while self._in_flight:
                    self._unreported.extend(self._collect())
                continue
            self.scheduler.retract_youngest()
        table = self.buckets.table(max(len(sequence.pages) for sequence in running))
        logprobs = any(sequence.wants_logprobs for sequence in running)
        batch = self._batch_bucket(len(running), table, logprobs)
        there = self.executables.has(Key("step", batch, table, logprobs))
        plain = [sequence for sequence in running if not sequence.wants_logprobs]
        if logprobs and plain and (batch < len(running) or not there):  # others do not wait for that compiler
            running, logprobs = plain, False
            batch = self._batch_bucket(len(running), table, logprobs)
        elif not there:
            return 0
        running = running[:batch]
        inputs = step_input(running, batch, table, self.config.max_running_requests, self.pool.pages)
        self.state, output = self.executables.get(Key("step", batch, table, logprobs))(self.params, self.state, inputs)
        self._in_flight.append(_InFlight(output, running, None, logprobs))
        self.counters.steps += 1
        return 1

    def _batch_bucket(self, count: int, table: int, logprobs: bool) -> int:
        """The smallest bucket that fits and is compiled: an idle row costs less than waiting for a compiler.

        But not one that would draft less: at the end of a wide run the last requests speculate. While the larger
        buckets compile behind, the oldest requests go on in the largest that is there.
        """
        widths = {key.width for key in self.executables.compiled() if key == Key("step", key.width, table, logprobs)}
        fitting = self.buckets.substitutes(count, ladder(self.drafter))
        found = next((width for width in fitting if width in widths), None)
        if found is None and widths and self.executables.is_coming(Key("step", fitting[0], table, logprobs)):
            found = max((width for width in widths if width < count), default=None)
        return found or fitting[0]

    def _collect(self) -> list[Sequence]:
        """Reads the oldest step in flight: its one copy to the host."""
        flight = self._in_flight.popleft()
        read = unpack(np.asarray(flight.output.packed), self._top if flight.logprobs else None)
        news = []
        for i, sequence in enumerate(flight.sequences):
            emitted, finish = int(read.emitted[i]), int(read.finish[i])
            if sequence.status is Status.FINISHED or emitted == 0:
                continue
            try:
                kept = sequence.accept(read.tokens[i, :emitted].tolist(), finish == STOPPED, finish == FULL)
                if sequence.params.logprobs is not None and read.logprobs is not None:
                    sequence.logprobs += raw_logprobs(read.logprobs, i, kept, sequence.params.logprobs)
                if flight.output.trace is not None:
                    sequence.trees.append(step_tree(flight.output.trace, i, read.tokens[i, :kept]))
            except Exception:  # of its text; the others go on
                logger.exception("request %s failed", sequence.id)
                sequence.abort(FAILED_TEXT)
                kept = emitted
            self.counters.generated += kept
            if flight.lengths is None:
                sequence.verify_steps += 1
                sequence.histogram[kept - 1] += 1
                sequence.committed += emitted
                self.counters.verifications += 1
                self.counters.verified += kept
            if sequence.finish_reason is not None:
                self._finish(sequence)
            news.append(sequence)
        return news

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._by_id.pop(sequence.id, None)

    # Housekeeping

    @property
    def device_name(self) -> str:
        return jax.devices()[0].device_kind

    def warm_up(self, keys: Iterable[Key] | None = None, *, progress: bool = True) -> None:
        """Compiles executables ahead of their first use: all, or those given."""
        self.executables.warm_up(self.executables.all_keys() if keys is None else keys, progress=progress)

    def warm_up_behind(self, *, progress: bool = True) -> threading.Thread:
        """Compiles what is left while requests run; until it is there they share smaller batches."""
        return self.executables.warm_up_behind(self.executables.all_keys(), progress=progress)

    def single_request_keys(self) -> list[Key]:
        """Executables that one request at a time needs."""
        return self.executables.single_request_keys()

    def first_keys(self, sequences: Iterable[Sequence]) -> list[Key]:
        """Executables that these sequences will certainly need, if they are all that runs."""
        return self.executables.first_keys(sequences, self.pool.page_size, self.config.max_running_requests)

    def flush_cache(self) -> bool:
        """Forgets what requests have left behind (the drafter's memory). False, and nothing done, while one runs."""
        if self.scheduler.unfinished:
            return False
        while self._in_flight:  # steps dispatched ahead for requests that have ended
            self._collect()
        fresh = self.drafter.init(self.params, self.config.max_running_requests, self.pool)
        self.state = self.state._replace(draft=fresh)
        return True

    def check_integrity(self) -> None:
        """Counts every page and slot.

        Raises:
            AssertionError: one is lost, held twice, or held by nobody.
        """
        self.scheduler.check_integrity()
        assert set(self._by_id.values()) == {*self.scheduler.waiting, *self.scheduler.active}

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            rows=self.config.max_running_requests,
            pages=self.pool.pages,
            page_size=self.pool.page_size,
            lookahead=self.lookahead,
        )

    # Generation

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Mapping[str, Any] | List[SamplingParams] | None = None,
        *,
        stream: bool = False,
    ) -> Any:
        """Completes prompts.

        Args:
            prompts: a string, a list of token ids or a list of messages; or a list of any of these.
            sampling: one for all (or its fields by name), or one for each.
            stream: yield `StreamChunk`s as tokens come, instead of returning when all are done. The requests start
                with the first chunk that is asked for.

        Returns:
            A `Completion` for one prompt, a list of them in order for a list, or an iterator of `StreamChunk`.

        Raises:
            ValueError: a prompt or a parameter is wrong; nothing has been started then.
        """
        single, pairs = with_sampling(prompts, sampling)
        sequences = [self.intake.sequence(prompt, params) for prompt, params in pairs]
        if stream:
            return self._stream(sequences)
        try:
            for sequence in sequences:
                self.enqueue(sequence)
            while any(s.status is not Status.FINISHED for s in sequences):
                self.step()
        finally:  # an interrupt must not leave requests behind
            for sequence in sequences:
                self.abort(sequence.id)
        done = [completion(sequence) for sequence in sequences]
        return done[0] if single else done

    def _stream(self, sequences: list[Sequence]) -> Iterator[StreamChunk]:
        """Looks at its own sequences, not at what `step` reports: others may step the engine between two chunks."""
        left = dict(enumerate(self.enqueue(sequence) for sequence in sequences))
        try:
            while left:
                for index, sequence in list(left.items()):
                    chunk = take_news(sequence, index)
                    if chunk is None:
                        continue
                    if chunk.completion:
                        del left[index]
                    yield chunk
                if left:
                    self.step()
        finally:  # the caller may stop listening
            for sequence in left.values():
                self.abort(sequence.id)
