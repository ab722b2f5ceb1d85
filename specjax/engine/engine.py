"""The engine: schedule -> dispatch -> collect.

One iteration (`step`) admits waiting requests, dispatches at most one prefill chunk and one decode step, and then reads
the results of the iteration *before*: the device always has its next step queued while the host looks at the last one.
That is safe because a row that finishes on the device does nothing in later steps, because pages are reserved for all
that unread steps may commit, and because the device runs steps in order: pages freed by a step that was read may be
written by one dispatched later.

    iteration t     dispatch step t     collect step t - 1     (a row that ended in t - 1 was inactive in t)
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from specjax import checkpoint
from specjax.cache import PoolShape
from specjax.drafters import Auto, Drafter, DraftOptions, Params
from specjax.engine.batch import Buckets, admission_row, pool_tokens, prefill_input, step_input
from specjax.engine.compiled import Executables, Key, Output, read_output, use_compilation_cache
from specjax.engine.config import EngineConfig, check_config
from specjax.engine.counters import Counters
from specjax.engine.device import Device, OutOfMemory, classified
from specjax.engine.drafting import may_draft
from specjax.engine.generation import complete
from specjax.engine.generation import stream as stream_chunks
from specjax.engine.intake import Intake, with_sampling
from specjax.engine.prompt import Prompt
from specjax.engine.reading import take
from specjax.engine.request import SamplingParams, Sequence, Status
from specjax.engine.salts import Salts
from specjax.engine.scheduler import Scheduler
from specjax.engine.turns import FairLock
from specjax.load import load
from specjax.models.protocol import Target
from specjax.step import NOT_FINITE, DecodeState, init_state
from specjax.verify import TOP_LOGPROBS

DEFAULT_CONFIG = EngineConfig()


class _InFlight(NamedTuple):
    key: Key
    output: Output
    sequences: list[Sequence]


class Engine:
    """Continuous batching over one target and one drafter. Several threads may use it: their requests share batches.

    Attributes:
        lock: held by whatever changes requests or the device's state.
    """

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
        check_config(config)
        self.lock = FairLock()
        self.target, self.params, self.tokenizer, self.drafter = target, params, tokenizer, drafter
        self.config, self.eos_ids = config, eos_ids
        self.sampling_defaults = sampling_defaults
        self.vocab_size = target.config.vocab_size
        self.context_length = config.context_length or target.config.max_positions
        if self.context_length > target.config.max_positions:
            raise ValueError(
                f"EngineConfig.context_length {self.context_length} exceeds the model's "
                f"{target.config.max_positions} positions"
            )
        self._top = min(TOP_LOGPROBS, self.vocab_size)
        self.platform = jax.default_backend()
        rows = config.max_running_requests
        tokens = pool_tokens(target, config, self.context_length, self.platform, drafter, params)
        self.pool = PoolShape(max(tokens // config.page_size, 1), config.page_size)
        request_pages = min(-(-self.context_length // config.page_size), self.pool.pages)
        chunk = config.chunked_prefill_size
        self.buckets = Buckets.build(self.platform, drafter, rows=rows, request_pages=request_pages, chunk=chunk)
        self.lookahead = (2 if config.overlap else 1) * (drafter.depth + 1)
        pages, size = self.pool
        self.scheduler = Scheduler(rows=rows, pages=pages, page_size=size, lookahead=self.lookahead)
        shapes = jax.eval_shape(self._new_state)
        variants = {"trace": config.trace, "time_phases": config.time_phases}
        self.executables = Executables(target, drafter, self.buckets, params, shapes, **variants)
        self.device = Device(params, self._new_state, self.executables.turn)
        self.counters = Counters()
        self._salts = Salts(isolate=config.isolate_ngrams)
        self._in_flight: deque[_InFlight] = deque()
        self._at_odds = False  # `_guarded` has not come to its end
        self._by_id: dict[str, Sequence] = {}
        self.intake = Intake(
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            pool_tokens=self.pool.pages * self.pool.page_size,
            eos_ids=eos_ids,
            depth=drafter.depth,
            plain_content=config.plain_content,
            seeds=None if config.random_seed is None else random.Random(config.random_seed),
        )
        self._unreported: list[Sequence] = []  # read in this iteration

    @classmethod
    def from_pretrained(
        cls,
        model: str = checkpoint.BUILT_IN_MODEL,
        *,
        draft: DraftOptions | str = Auto.algorithm,
        dtype: str = "auto",
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
            draft: how to draft: options such as `Eagle3(path, steps=5, topk=8, nodes=32)`, or the name of an algorithm
                in `DRAFTERS` for its defaults. AUTO: the draft head that ships for the model, else n-grams.
            dtype: auto (float32 on a CPU, the checkpoint's on a GPU), float32, bfloat16 or float16.
            tokenizer_path: a folder with another tokenizer than the model's own.
            chat_template: a file with another Jinja template than the tokenizer's own.
            sampling_defaults: model: what generation_config.json says of sampling becomes `engine.sampling_defaults`,
                the values of what a request does not give; openai: it is left unread.
            backend: a `tree_attention` implementation; None or auto = what suits the device.
            compilation_cache: keep compiled programs on disk.

        Raises:
            CheckpointError: the model cannot be found or read.
            ValueError: a value is out of range, or a draft head is missing.
            TypeError: an argument is of the wrong type.
        """
        check_config(config)
        if compilation_cache:
            use_compilation_cache()
        loaded = load(
            model,
            draft=draft,
            dtype=dtype,
            revision=revision,
            tokenizer_path=tokenizer_path,
            chat_template=chat_template,
            sampling_defaults=sampling_defaults,
            backend=backend,
            progress=progress,
        )
        return cls(**loaded._asdict(), config=config)

    @property
    def state(self) -> DecodeState:
        """What lives on the device; donated to each step, which gives the next."""
        return self.device.state

    def _new_state(self) -> DecodeState:
        rows = self.config.max_running_requests
        return init_state(self.params, self.target, self.drafter, rows=rows, pool=self.pool)

    def _start_over(self) -> None:
        """All that runs waits again, and goes on later with the same text: what has not been read is drawn again."""
        self._in_flight.clear()
        self.scheduler.retract_all()
        if self.device.poisoned:
            self.device.renew()

    def wait_until_allocated(self) -> None:
        """Blocks until the KV pool and the rows of the state are in memory; raises what made the allocation fail."""
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
        with self.lock:
            if sequence.id in self._by_id:
                raise ValueError(f"a request with id {sequence.id!r} is running")
            sequence.salt = self._salts(sequence.params.cache_salt)
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
        with self.lock:
            sequence = self._by_id.get(id)
            return sequence is not None and self.end(sequence, message)

    def end(self, sequence: Sequence, message: str | None = None) -> bool:
        """As `abort`, for this very sequence: another with the same id goes on. False: it has ended, or never ran."""
        with self.lock:
            if self._by_id.get(sequence.id) is not sequence:
                return False
            sequence.abort(message)
            self._finish(sequence)
            return True

    def reset(self, message: str) -> list[Sequence]:
        """After a step that failed: ends all requests, with `message` as the reason, and starts from an empty state.

        Raises:
            Exception: no state could be allocated. The requests have ended all the same; the next step tries again.
        """
        with self.lock:
            ended = list(self._by_id.values())
            for sequence in ended:
                sequence.abort(message)
                self._finish(sequence)
            self._in_flight.clear()
            self._unreported.clear()
            self.device.renew()
            self._at_odds = False
            return ended

    def find(self, id: str) -> Sequence | None:
        """The request with this id, while it waits or runs."""
        return self._by_id.get(id)

    # The loop

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished or bool(self._in_flight)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around whatever changes the device's state and what is in flight.

        What does not get to its end leaves the two at odds, and the next call starts over. A program that runs out of
        memory is given up, with all larger ones.
        """
        with self.lock:
            if self._at_odds or self.device.lost:
                self._start_over()
            self._at_odds = True
            try:
                yield
            except OutOfMemory as error:
                self.executables.fail_from(error.key, error.error)
                self._start_over()
            self._at_odds = False

    def step(self) -> list[Sequence]:
        """One iteration. Returns the sequences that have new tokens or have finished.

        A batch that runs out of memory is not tried again: its requests go on in smaller ones.
        """
        with self.lock:
            with self._guarded():
                launched = self._launch_prefill() + self._launch_decode()
                while len(self._in_flight) > (launched if self.config.overlap else 0):
                    self._unreported.extend(self._collect())
            news = {sequence.id: sequence for sequence in self._unreported}
            self._unreported.clear()
            return list(news.values())

    def _launch_prefill(self) -> int:
        for sequence in self.scheduler.admit():
            slot = np.int32(cast(int, sequence.slot))
            self.device.update(self.executables.admit, slot, admission_row(sequence, self.vocab_size))
        sequence = next(iter(self.scheduler.prefilling()), None)
        if sequence is None:
            return 0
        left, pages = len(sequence.context) - sequence.prefilled, len(sequence.pages)
        tables, chunks = self.buckets.tables_for(pages), self.buckets.chunks_for(left)
        key, program = self.executables.first_usable(Key("prefill", c, t) for t in tables for c in chunks)
        inputs = prefill_input(sequence, key.width, key.table, self.pool.pages)
        self._in_flight.append(_InFlight(key, self.device.run(key, program, inputs), [sequence]))
        length = int(inputs.length[0])
        self.counters.prefilled_sequences += sequence.prefilled == 0
        self.counters.prefilled_tokens += length
        sequence.prefilled += length
        if sequence.prefilled == len(sequence.context):
            # The device knows the first token; the host may learn it later.
            sequence.status = Status.RUNNING
            sequence.committed = sequence.prefilled
        return 1

    def _launch_decode(self) -> int:
        """Decodes one step for each running request: in one batch, or in several where a large one is not to be had."""
        left, launched = self._reserved(), 0
        while left:
            table = self.buckets.table(max(len(sequence.pages) for sequence in left))
            key, program = self.executables.first_usable(self.executables.step_keys(len(left), table))
            part, left = left[: key.width], left[key.width :]
            inputs = step_input(part, key.width, key.table, self.config.max_running_requests, self.pool.pages)
            self._in_flight.append(_InFlight(key, self.device.run(key, program, inputs), part))
            self.counters.steps += 1
            launched += 1
        return launched

    def _reserved(self) -> list[Sequence]:
        """The running requests, with pages for all that they may commit; retracts some where pages run out."""
        while True:
            running = self.scheduler.running()
            if not running or self.scheduler.reserve(running):
                return running
            # Retract only what has been read: its output must be complete, and reading may free pages.
            if self._in_flight:
                while self._in_flight:
                    self._unreported.extend(self._collect())
                continue
            self.scheduler.retract_youngest()

    def _collect(self) -> list[Sequence]:
        """Reads the oldest step in flight: its one copy to the host, or two where log-probabilities are wanted."""
        flight = self._in_flight.popleft()
        wanted = any(sequence.wants_logprobs for sequence in flight.sequences)
        try:
            read = read_output(flight.output, self._top if wanted else None)
        except jax.errors.JaxRuntimeError as error:
            raise classified(error, flight.key) from error
        news = []
        for i, sequence in enumerate(flight.sequences):
            emitted = int(read.emitted[i])
            if sequence.status is Status.FINISHED or (emitted == 0 and read.finish[i] != NOT_FINITE):
                continue
            kept = take(sequence, read, flight.output, i)
            self.counters.generated += kept
            if flight.key.kind == "step" and emitted:
                sequence.verify_steps += 1
                sequence.histogram[kept - 1] += 1
                sequence.committed += emitted
                self.counters.verifications += 1
                self.counters.drafted_steps += sequence.params.speculate and may_draft(
                    self.drafter, self.buckets, flight.key.width
                )
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

    def warm_up(self, keys: Iterable[Key] | None = None, *, progress: bool = True, strict: bool = True) -> None:
        """Compiles executables ahead of their first use: all, or those given. See `Executables.warm_up`."""
        chosen = self.executables.all_keys() if keys is None else keys
        self.executables.warm_up(chosen, progress=progress, strict=strict)

    def warm_up_in_background(self, *, progress: bool = True) -> threading.Thread:
        """Compiles what is left while requests run; until it is there they share smaller batches."""
        return self.executables.warm_up_in_background(self.executables.all_keys(), progress=progress)

    def single_request_keys(self) -> list[Key]:
        """Executables that one request at a time needs."""
        return self.executables.single_request_keys()

    def first_keys(self, sequences: Iterable[Sequence]) -> list[Key]:
        """Executables that these sequences will need, if they are all that runs."""
        return self.executables.first_keys(sequences, self.pool.page_size, self.config.max_running_requests)

    def flush_cache(self) -> bool:
        """Forgets what requests have left behind (the drafter's memory). False, and nothing done, while one runs."""
        with self.lock:
            if self.scheduler.unfinished:
                return False
            with self._guarded():
                while self._in_flight:  # steps dispatched ahead for requests that have ended
                    self._collect()
            rows = self.config.max_running_requests
            self.device.update(lambda state: state._replace(draft=self.drafter.init(self.params, rows, self.pool)))
            return True

    def check_integrity(self) -> None:
        """Counts every page and slot.

        Raises:
            AssertionError: one is lost, held twice, or held by nobody.
        """
        with self.lock:
            self.scheduler.check_integrity()
            assert set(self._by_id.values()) == {*self.scheduler.waiting, *self.scheduler.active}

    # Generation

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | Mapping[str, Any] | List[SamplingParams | Mapping[str, Any] | None] | None = None,
        *,
        stream: bool = False,
    ) -> Any:
        """Completes prompts.

        Args:
            prompts: a string, a list of token ids or a list of messages; or a list of any of these.
            sampling: one for all, or one for each. Of fields by name, and of None, the others are the model's
                (`sampling_defaults`), else those of `SamplingParams`, which as an object is taken as it is.
            stream: yield `StreamChunk`s as tokens come, instead of returning when all are done. The requests start
                with the first chunk that is asked for.

        Returns:
            A `Completion` for one prompt, a list of them in order for a list, or an iterator of `StreamChunk`.

        Raises:
            ValueError: a prompt or a parameter is wrong; nothing has been started then.
        """
        single, pairs = with_sampling(prompts, sampling, self.sampling_defaults)
        sequences = [self.intake.sequence(prompt, params) for prompt, params in pairs]
        if stream:
            return stream_chunks(self, sequences)
        done = complete(self, sequences)
        return done[0] if single else done
