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
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from functools import partial
from time import sleep
from types import MappingProxyType
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh

from specjax import checkpoint, devices
from specjax.cache import PoolShape
from specjax.checkpoint.prompts import Prompt, Prompts
from specjax.compiling import use_compilation_cache
from specjax.config import HeadConfig, MtpConfig
from specjax.costs import estimated_ratio
from specjax.drafters import Auto, Drafter, DrafterFactory, DraftOptions, Params
from specjax.drafters.check import check_drafter, is_own
from specjax.engine.arrays import Resident, admission
from specjax.engine.batch import Batch, dispatch
from specjax.engine.collect import collect_all_but
from specjax.engine.config import EngineConfig, Layout, check_config, context_length
from specjax.engine.device import Device, Group, Leader, OutOfMemory
from specjax.engine.draft_policy import GUESSES, DraftPolicy
from specjax.engine.generation import FairLock, StreamChunk, complete
from specjax.engine.generation import stream as stream_chunks
from specjax.engine.intake import Intake, Salts, Sampling, with_sampling
from specjax.engine.keys import Key
from specjax.engine.memory import keep_freed_memory, pool_tokens, room_beside
from specjax.engine.output import Completion
from specjax.engine.placing import check_models, place_params
from specjax.engine.programs import Programs
from specjax.engine.runtime import Runtime
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.schedule import next_prefill, next_steps
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence
from specjax.load import load
from specjax.models.target import Target
from specjax.parallel.sharding import described, empty_state, make_mesh, on_first, several
from specjax.state import DecodeState, init_state
from specjax.verify import Verifier, verify_tree

DEFAULT_CONFIG = EngineConfig()
IDLE_SECONDS = 0.002  # that a step waits in which nothing can run


class Engine:
    """Continuous batching over one target and one drafter. Several threads may use it: their requests share batches.

    Attributes:
        verify: decides which drafts are accepted.
        run: scheduler, programs, device and what else the parts of the engine share.
        group: of the processes that share the model; None: this one alone has it.
        lock: held by whatever changes requests or the device's state.
    """

    def __init__(
        self,
        target: Target,
        params: Params,
        tokenizer: Any,
        drafter: Drafter,
        *,
        verify: Verifier = verify_tree,
        config: EngineConfig = DEFAULT_CONFIG,
        eos_ids: tuple[int, ...] = (),
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        draft_model: HeadConfig | MtpConfig | Target | None = None,
        group: Group | None = None,
    ) -> None:
        check_config(config)
        if not is_own(drafter):
            check_drafter(drafter, target, params)
        self.lock = FairLock()
        self.group = group
        self.mesh = _mesh(config, group)
        if self.mesh is not None:
            check_models(target, draft_model, self.mesh.size, config.expert_parallel)
            params = place_params(self.mesh, params, target, draft_model)
        self.target, self._params, self.tokenizer, self.drafter = target, params, tokenizer, drafter
        self.verify = verify
        self.config, self.eos_ids, self.sampling_defaults = config, eos_ids, sampling_defaults
        self.vocab_size = target.config.vocab_size
        self.context_length = context_length(target, config)
        self.platform = jax.default_backend()
        if self.platform == "cpu":
            keep_freed_memory()
        rows, size = config.max_running_requests, config.page_size
        tokens = pool_tokens(target, config, self.context_length, self.platform, drafter, params, self.mesh)
        if group is not None:
            tokens = group.agree_on_pool(target, drafter, params, config, self.context_length, tokens)
        sizes = config, self.context_length, tokens, self.platform, drafter
        self.pool, self.buckets = Layout.of(*sizes, ragged=target.ragged)
        if not is_own(drafter):
            for batch in self.buckets.batches:
                check_drafter(drafter, target, params, batch=batch)
        lookahead = (2 if config.overlap else 1) * (drafter.depth + 1)
        self.scheduler = Scheduler(
            rows=rows, pages=self.pool.pages, page_size=size, lookahead=lookahead,
            reuse=config.prefix_cache, policy=config.schedule_policy, retract_every=config.retract_every,
        )  # fmt: skip
        new_pages = -(-lookahead // size)  # most pages that a row may get between two steps
        shapes = jax.eval_shape(lambda: self._made_state(rows, self.pool))
        if self.mesh is not None:  # which axes are split depends on neither rows nor pages
            shapes = described(shapes, empty_state(self.mesh, lambda: self._made_state(1, PoolShape(1, size))))
        variants = {"verify": verify, "trace": config.trace, "time_phases": config.time_phases}
        variants |= {"room": room_beside(shapes, self.mesh), "mesh": self.mesh}
        self.programs = Programs(target, drafter, self.buckets, params, shapes, new_pages=new_pages, **variants)
        leader = cast(Leader, group) if group is not None and group.leads else None
        if leader is not None:
            self.programs.announce = lambda key: leader.send("compile", key=key)
        self.device = Device(params, self._new_state, self.programs.launch_lock, leader)
        self._inconsistent = False  # `_guarded` was left by an exception
        self._by_id: dict[str, Sequence] = {}
        self.intake = Intake(
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            pool_tokens=self.pool.pages * size,
            eos_ids=eos_ids,
            depth=drafter.depth,
            salts=Salts(isolate=config.isolate_ngrams),
            late=not config.trace,  # a delta goes with the tree of its step
            plain_content=config.plain_content,
            seeds=random.SystemRandom() if config.random_seed is None else random.Random(config.random_seed),
        )
        self.policy: DraftPolicy | None = None
        if config.chooses(drafter):
            self.policy = DraftPolicy(self._estimated_ratio, GUESSES[drafter.runs_model])
        self._draft_model = draft_model
        self.run = Runtime(
            self.scheduler, self.programs, self.device, self.buckets, drafter, self.policy,
            rows=rows, pages=self.pool.pages, new_pages=new_pages, vocab_size=self.vocab_size, finish=self._finish,
        )  # fmt: skip
        self.counters = self.run.counters

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
        group: Group | None = None,
        progress: bool = True,
    ) -> Engine:
        """Loads a model (alias, .gguf, folder or hub id) and makes an engine for it.

        Args:
            draft: how to draft: options such as `Eagle3(path, steps=5, topk=8, nodes=32)`, or the name of an algorithm
                in `DRAFTERS` for its defaults, or module:function for a function as `drafter` takes it. AUTO: the draft
                head that ships for the model, else the model's MTP layers, else n-grams.
            dtype: auto (float32 on a CPU, the checkpoint's on a GPU), float32, bfloat16 or float16.
            quantization: auto: matrices that the checkpoint holds in few bits stay so; none: they are dequantised; fp8,
                int8 or int4: the matrices of a float checkpoint are quantised. Activations never are.
            drafter: in place of `draft`, a ready `Drafter` or a function of the `Target` that returns one; it may
                return a `Speculation`, which adds parameters and a verifier.
            verify: decides which drafts are accepted; None: the drafter's, which by default is `verify_tree`. Another
                one may change the text.
            tokenizer_path: a folder with another tokenizer than the model's own.
            chat_template: a file with another Jinja template than the tokenizer's own.
            sampling_defaults: model: what generation_config.json says of sampling becomes `engine.sampling_defaults`,
                the values of what a request does not give; openai: it is left unread.
            backend: a `tree_attention` implementation; None or auto = what suits the device.
            compilation_cache: keep compiled programs on disk.
            group: of the processes whose devices share the model, which has joined; see `specjax.fleet.following`.
            progress: show bars on stderr while weights are loaded and while requests wait for the compiler; if stderr
                is not a terminal, one line for each.

        Raises:
            CheckpointError: the model cannot be found or read.
            ValueError: a value is out of range, or a draft head is missing.
            TypeError: an argument is of the wrong type.
        """
        check_config(config)
        if compilation_cache:
            use_compilation_cache()
        mesh = _mesh(config, group)
        if group is not None:
            group.agree_on_files(checkpoint.resolve(model, revision=revision, progress=progress))
        with on_first(mesh):
            loaded = load(
                model, draft=draft, dtype=dtype, quantization=quantization, drafter=drafter, verify=verify,
                context_length=config.context_length,
                revision=revision, tokenizer_path=tokenizer_path, chat_template=chat_template,
                sampling_defaults=sampling_defaults, backend=backend, mem_fraction=config.mem_fraction,
                mesh=several(mesh), progress=progress,
            )  # fmt: skip
        engine = cls(**loaded._asdict(), config=config, group=group)
        engine.programs.progress = progress
        return engine

    @property
    def params(self) -> Params:
        """Of the target and of the drafter. Others of the same shapes may be set while no request runs; what was kept
        of earlier texts, made by the old ones, is forgotten. Raises RuntimeError while a request runs."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        with self.lock:
            if self.scheduler.unfinished:
                raise RuntimeError("the parameters of an engine cannot be replaced while a request runs")
            if self.group is not None:
                raise RuntimeError("the parameters of an engine cannot be replaced where several processes share it")
            if self.mesh is not None:
                params = place_params(self.mesh, params, self.target, self._draft_model)
            self.device.replace_params(params)
            self._params = params
            self.flush_cache()

    @property
    def state(self) -> DecodeState:
        """Donated to each step, which returns the next."""
        return self.device.state.decode

    def _new_state(self) -> Resident:
        make = partial(self._made_state, self.config.max_running_requests, self.pool)
        return make() if self.mesh is None else empty_state(self.mesh, make)

    def _made_state(self, rows: int, pool: PoolShape) -> Resident:
        state = init_state(self.params, self.target, self.drafter, rows=rows, pool=pool)
        return Resident(state, jnp.full((rows, self.buckets.tables[-1]), pool.pages, jnp.int32))

    def _start_over(self) -> None:
        """Sends all running requests back to the queue. They go on later with the same text: tokens that have not been
        read are drawn again."""
        self.run.flights.clear()
        self.scheduler.start_over()
        if self.device.poisoned:
            self.device.renew()

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
            if sequence.id in self._by_id:
                raise ValueError(f"a request with id {sequence.id!r} is running")
            self.scheduler.add(sequence)
            self._by_id[sequence.id] = sequence
        return sequence

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; see `specjax.checkpoint.prompts.encode`."""
        return self.intake.encode(prompt)

    def abort(self, id: str, message: str | None = None) -> bool:
        """Ends a request now and frees its pages at once. Returns whether it was running or waiting. `message`: of
        its finish reason, where the fault is ours."""
        with self.lock:
            return (sequence := self.find(id)) is not None and self.end(sequence, message)

    def end(self, sequence: Sequence, message: str | None = None) -> bool:
        """`abort` for this very sequence: another one with the same id goes on."""
        with self.lock:
            if self.find(sequence.id) is not sequence:
                return False
            sequence.abort(message)
            self._finish(sequence)
            return True

    def reset(self, message: str) -> list[Sequence]:
        """After a step that failed: ends all requests, with `message` as the reason, and starts from an empty state.
        Raises what made its allocation fail. The requests have ended all the same, and the next step tries again."""
        with self.lock:
            ended = list(self._by_id.values())
            for sequence in ended:
                self.end(sequence, message)
            self.run.flights.clear()
            self.run.changed.clear()
            self.scheduler.start_over()
            self.device.renew()
            self._inconsistent = False
            return ended

    def retract_all(self) -> None:
        """Sends all running requests back to the queue, and frees all pages, those of the prefix cache too. They go on
        with the same text."""
        with self._guarded():
            collect_all_but(self.run, 0)
            self.scheduler.start_over()

    def find(self, id: str) -> Sequence | None:
        """The request with this id, while it waits or runs."""
        return self._by_id.get(id)

    # The loop

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished or bool(self.run.flights)

    @property
    def unreported(self) -> bool:
        """Whether sequences have ended that no `step` has returned: `retract_all` reads the steps in flight."""
        return bool(self.run.changed)

    def step(self) -> list[Sequence]:
        """One iteration: schedule, dispatch, collect. Returns the sequences that have new tokens or have finished.

        A batch that runs out of memory is not tried again: its requests go on in smaller ones. Where nothing can run
        before another thread has compiled a program or computed a mask, it waits for `IDLE_SECONDS`.
        """
        run = self.run
        with self.lock, TraceAnnotation("step"):
            with self._guarded():
                self._admit()
                dispatched = 0
                for batch in self._schedule():
                    dispatch(run, batch)
                    dispatched += 1
                if not dispatched and not run.flights and not run.changed:
                    sleep(IDLE_SECONDS)
                collect_all_but(run, dispatched if self.config.overlap else 0)
            changed = list(run.changed)
            run.changed.clear()
            return changed

    def _schedule(self) -> Iterator[Batch]:
        """The batches of one iteration. Each is to be dispatched before the next is asked for."""
        if (prefill := next_prefill(self.run)) is not None:
            yield prefill
        yield from next_steps(self.run)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around all that changes the device's state and what is in flight. An exception leaves the two inconsistent,
        and the next call starts over. A program that runs out of memory is given up, with all larger ones."""
        with self.lock:
            if self._inconsistent or self.device.lost:
                self._start_over()
            self._inconsistent = True
            try:
                yield
            except OutOfMemory as error:
                self.programs.fail(error.key, error.error)
                self._start_over()
            self._inconsistent = False

    def _admit(self) -> None:
        """Puts sequences for which there is room into rows of the state."""
        for sequence in self.scheduler.admit():
            if self.policy is not None and self.drafter.costly_observe and not sequence.output.tokens:
                batch = self.buckets.batch(min(len(self.scheduler.active), self.buckets.batches[-1]))
                sequence.drafts = self.policy.admit(batch, sequence)
            resumed = bool(sequence.output.tokens)
            admit, packed = self.programs.admit(resumed=resumed), admission(sequence, self.vocab_size)
            self.device.update(admit, packed, kind="admit", resumed=resumed)
            self.counters.prefilled_sequences += 1
            self.counters.cached_tokens += sequence.active_slot.prefilled

    def _estimated_ratio(self, batch: int) -> float:
        """See `estimated_ratio`."""
        drafter = self.drafter.within(self.buckets.tree_widths(batch)[-1])
        device = None if self.platform == "cpu" else devices.named(self.device_name)
        return estimated_ratio(batch, self.target, drafter, self.params, device)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._by_id.pop(sequence.id, None)

    # Housekeeping

    @property
    def device_name(self) -> str:
        return jax.devices()[0].device_kind

    def warm_up(self, keys: Iterable[Key] | None = None, *, progress: bool = True, strict: bool = True) -> None:
        """Compiles programs before their first use: all, or those given. See `Programs.warm_up`."""
        if keys is None:
            keys = self.buckets.all_keys()
            self.programs.admit(resumed=True)
        self.programs.warm_up(keys, progress=progress, strict=strict)

    def warm_up_in_background(self, *, progress: bool = True) -> threading.Thread:
        """Compiles the other programs while requests run, which share smaller batches meanwhile."""
        return self.programs.compile_later(self.buckets.all_keys(), progress=progress)

    def single_request_keys(self) -> list[Key]:
        """Programs that one request at a time needs."""
        return self.buckets.single_request_keys()

    def first_keys(self, sequences: Iterable[Sequence]) -> list[Key]:
        """Programs that these sequences will need, if they are all that runs."""
        return self.buckets.first_keys(sequences, self.pool.page_size)

    def flush_cache(self) -> bool:
        """Clears the prefix cache and the drafter's memory of finished requests. While a request runs it does nothing
        and returns False."""
        with self.lock:
            if self.scheduler.unfinished:
                return False
            with self._guarded():
                collect_all_but(self.run, 0)  # steps dispatched ahead for requests that have ended
            self.scheduler.prefix.clear()
            self.device.update(self.without_drafts, kind="flush")
            return True

    def without_drafts(self, state: Resident) -> Resident:
        """A state whose drafter remembers nothing."""
        make = partial(self.drafter.init, self.params, self.config.max_running_requests, self.pool)
        draft = make() if self.mesh is None else empty_state(self.mesh, make)
        return state._replace(decode=state.decode._replace(draft=draft))

    def check_integrity(self) -> None:
        """Counts every page and slot. Raises AssertionError if one is lost, held twice, or held by nobody."""
        with self.lock:
            self.scheduler.check_integrity()
            assert set(self._by_id.values()) == {*self.scheduler.waiting, *self.scheduler.active}

    # Generation

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | List[Sampling | None] | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling: Sampling | List[Sampling | None] | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Prompts,
        sampling: Sampling | List[Sampling | None] | None = None,
        *,
        stream: Literal[True],
    ) -> Iterator[StreamChunk]: ...
    def generate(
        self, prompts: Any, sampling: Sampling | List[Sampling | None] | None = None, *, stream: bool = False
    ) -> Completion | list[Completion] | Iterator[StreamChunk]:
        """Completes prompts.

        Args:
            prompts: a string, a list of token ids or a list of messages; or a list of any of these.
            sampling: one for all prompts, or one for each. Fields that are not given by name take the model's defaults
                (`sampling_defaults`), then those of `SamplingParams`; a `SamplingParams` is taken as it is.
            stream: yield `StreamChunk`s as tokens come. The requests start when the first chunk is taken.

        Returns:
            A `Completion` for one prompt, a list of them in order for a list, or an iterator of `StreamChunk`.

        Raises:
            ValueError: a prompt or a parameter is wrong; nothing has been started.
        """
        single, pairs = with_sampling(prompts, sampling, self.sampling_defaults)
        sequences = [self.intake.sequence(prompt, params) for prompt, params in pairs]
        if stream:
            return stream_chunks(self, sequences)
        done = complete(self, sequences)
        return done[0] if single else done


def _mesh(config: EngineConfig, group: Group | None) -> Mesh | None:
    hosts = group is not None
    return make_mesh(config.tensor_parallel, config.first_device, groups=config.expert_parallel, hosts=hosts)
