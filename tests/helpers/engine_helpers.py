"""A tokenizer, and engines over table models: small enough to run thousands of requests, exact enough to compare."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

import jax
import numpy as np
import oracle
from integrity import check_integrity
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from toy_models import Toy, table_model
from transformers import PreTrainedTokenizerFast

from specjax.drafters import Drafter, DraftOptions, Ngram, NoDraft, Speculation, make_speculation
from specjax.drafters.base import Params
from specjax.engine import Completion, Engine, EngineConfig, SamplingParams
from specjax.engine.draft_policy import Choice
from specjax.engine.plan import Key
from specjax.engine.sequence import Sequence, SequenceOutput, Status, completion
from specjax.engine.text import TextStream
from specjax.verify import Verifier, verify_tree

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""Spelling of the 256 bytes."""
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("1", "2"), ("Ġ", "t"), ("Ġt", "he"))
END = 2  # <|im_end|>
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NGRAM = Ngram(nodes=4, max_match=4, capacity=4096)
"""Small."""

DRAFTS = {"NONE": NoDraft(), "NGRAM": NGRAM}

NEAR = 1e-3
"""A draw whose gap is below this may go either way (docs/design.md, Floating point)."""


def byte_level_bpe(
    special: List[str] = SPECIAL,
    *,
    words: List[str] = (),
    added: List[str] = (),
    merges: List[tuple[str, str]] = MERGES,
    use_regex: bool = True,
) -> Tokenizer:
    """A new byte-level BPE: special tokens, the 256 bytes, six merges. `words`: replaces these tokens; `added`: tokens
    that are not special."""
    words = words or [*special, *LETTERS, *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    return core


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """`byte_level_bpe` for transformers, with a chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), eos_token=SPECIAL[2], bos_token=SPECIAL[0], chat_template=TEMPLATE
    )


def spelled(words: List[str], special=SPECIAL) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these tokens."""
    core = byte_level_bpe(special, words=words, merges=())
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1])


VOCABULARY = len(SPECIAL) + 256 + len(MERGES)


def byte_ids(data: bytes) -> list[int]:
    """One token a byte, whatever merges there are."""
    to_letter = _byte_letters()
    ids = tokenizer().convert_tokens_to_ids([to_letter[b] for b in data])
    assert isinstance(ids, list)
    return ids


@functools.cache
def _byte_letters() -> dict[int, str]:
    """GPT-2's table: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def decode(ids: List[int], *, skip: bool = True) -> str:
    text = tokenizer().decode(ids, skip_special_tokens=skip)
    assert isinstance(text, str)
    return text


@functools.cache
def toy(seed: int = 0, rows: int = 61, end: float = 0.0) -> Toy:
    """A table model over the tokenizer's vocabulary that mostly writes letters. `end`: what the end token gains."""
    table = np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY))
    table[:, byte_ids(b"abcdefghijklmnopqrstuvwxyz ,.")] += 6
    table[:, : len(SPECIAL)] -= 8
    table[:, END] += end
    return table_model(table.astype(np.float32))


def make_engine(
    model: Toy,
    drafter: Drafter | Speculation | DraftOptions | str = "NONE",
    *,
    eos=(),
    warm=True,
    tokens: PreTrainedTokenizerFast | None = None,
    draft: Any = None,
    verify: Verifier = verify_tree,
    retract_every: int | None = None,
    **config: Any,
) -> Engine:
    """Four rows, small pages, several chunks a prompt. `tokens`: the tokenizer; `draft`: the drafter's parameters;
    `config`: the engine's."""
    settings = {"max_running_requests": 4, "page_size": 4, "max_total_tokens": 1024, "context_length": 128}
    settings |= {"chunked_prefill_size": 8, "adaptive": False} | config
    params, options = Params(model.params, draft), EngineConfig(**settings)
    engine = Engine(
        model.target, params, tokens or tokenizer(), make_speculation(drafter), verify=verify, config=options,
        eos_ids=tuple(eos),
    )  # fmt: skip
    if retract_every is not None:
        _retract(engine, retract_every)
    if warm:  # the largest batch serves smaller ones too: one step to compile instead of several
        engine.warm_up([engine.buckets.ready_keys()[0], largest_step(engine)], progress=False)
    return engine


def largest_step(engine: Engine) -> Key:
    """The step that runs any requests."""
    return engine.buckets.step(engine.buckets.batches[-1])._replace(table=engine.buckets.tables[-1])


def force_drafts(engine: Engine, drafts: Callable[[], bool]) -> list[int]:
    """Lets `drafts` decide which steps draft. Returns a list that grows by the nodes of each choice."""
    chosen = list[int]()

    def choose(batch: int, compiled: Any, requests: int, own: Any) -> Choice:
        chosen.append(engine.buckets.usual(batch) if drafts() else 1)
        return Choice(chosen[-1])

    assert engine.policy is not None
    engine.policy.choose = choose
    return chosen


def text_parity(engine: Engine) -> bool:
    """A choice that depends only on the texts."""
    return sum(sum(sequence.output.tokens[-2:]) for sequence in engine.scheduler.running()) % 2 == 0


def _retract(engine: Engine, every: int) -> None:
    """Retracts the youngest request after each `every`-th step, as if pages had run out."""
    reserve, last = engine.scheduler.reserve, 0

    def reserve_or_retract(sequences: Any) -> bool:
        nonlocal last
        steps = engine.counters.steps
        if len(engine.scheduler.active) < 2 or steps <= last or steps % every:
            return reserve(sequences)
        last = last if engine.flights else steps  # steps in flight are read before the retraction
        return False

    engine.scheduler.reserve = reserve_or_retract


def hold(engine: Engine, monkeypatch: Any, held: Callable[[Key], bool]) -> tuple[threading.Event, threading.Event]:
    """Blocks the compilation of these keys. Returns an event that is set while one waits, and one that releases it."""
    waiting, release, compile_ = threading.Event(), threading.Event(), engine.programs._compile

    def compiled(key: Key) -> Any:
        if held(key):
            waiting.set()
            assert release.wait(240.0)
        return compile_(key)

    monkeypatch.setattr(engine.programs, "_compile", compiled)
    return waiting, release


def warm_grammars(engine: Engine) -> Engine:
    """Compiles the largest batch's steps, with and without grammars; it serves smaller batches, too."""
    buckets = engine.buckets
    batch, table = buckets.batches[-1], buckets.tables[-1]
    keys = [Key(kind, batch, table, nodes=n) for kind in ("step", "constrained") for n in buckets.sizes(batch)]
    engine.warm_up({half: None for key in keys for half in key.halves}, progress=False)
    return engine


@functools.cache
def shared_engine(algorithm: str, **config: Any) -> Engine:
    """An engine that several tests use: each leaves it idle."""
    return make_engine(toy(), DRAFTS[algorithm], **config)


def wanted(params: SamplingParams, eos: tuple[int, ...] = ()) -> oracle.Sampling:
    """The same request for the oracle."""
    assert params.max_new_tokens is not None
    return oracle.Sampling(
        seed=params.seed or 0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias={int(token): value for token, value in params.logit_bias.items()},
        min_tokens=params.min_new_tokens,
        stop_ids=(*params.stop_token_ids, *(() if params.ignore_eos else eos)),
        max_tokens=params.max_new_tokens,
    )


def check_plain(model: Toy, prompt: List[int], params: SamplingParams, done: Completion, eos=()) -> None:
    """The output is that of plain decoding by the oracle, up to its first near-tie."""
    expected = oracle.generate_plain(model.logits, prompt, wanted(params, eos))
    close = [i for i, gap in enumerate(expected.gaps) if gap < NEAR]
    if close:
        assert done.output_ids[: close[0]] == expected.tokens[: close[0]], expected.gaps
        return
    assert done.output_ids == expected.tokens
    stopped = expected.finish == oracle.STOP
    assert done.finish_reason["type"] == ("stop" if stopped else "length")
    assert done.text == decode(expected.tokens[:-1] if stopped else expected.tokens)


def check_counts(done: Completion) -> None:
    """The histogram of accepted drafts agrees with the numbers of steps and tokens."""
    bins = done.spec_accept_histogram
    assert sum(bins) == done.spec_verify_ct
    assert sum(n * (drafts + 1) for drafts, n in enumerate(bins)) == done.completion_tokens - 1
    if done.spec_verify_ct:
        assert math.isclose(done.spec_accept_length, (done.completion_tokens - 1) / done.spec_verify_ct)


def devices(engine: Engine) -> list[int]:
    """Ids of the devices with arrays of the engine."""
    leaves = jax.tree.leaves((engine.params, engine.device.state))
    return sorted({device.id for leaf in leaves for device in leaf.devices()})


def check_idle(engine: Engine) -> None:
    """Nothing runs, and every page and slot is back."""
    check_integrity(engine)
    assert not engine.scheduler.unfinished
    assert len(engine.scheduler.free_pages) + engine.scheduler.prefix.evictable == engine.pool.pages


def check_texts(engine: Engine, model: Toy, prompts: Any, params: Any) -> list[Completion]:
    """Generate; all texts equal plain decoding, and the engine is idle."""
    completions = engine.generate(prompts, params)
    for prompt, sampling, done in zip(prompts, params, completions, strict=True):
        check_plain(model, prompt, sampling, done)
    check_idle(engine)
    return completions


def drain(engine: Engine) -> dict[str, Completion]:
    """Steps until all is done, checking after each; what finished by itself, by id."""
    done: dict[str, Completion] = {}
    for _ in range(5000):
        if not engine.unfinished:
            return done
        for sequence in engine.step():
            if sequence.status is Status.FINISHED:
                assert sequence.id not in done, "reported twice"
                done[sequence.id] = completion(sequence)
        check_integrity(engine)
    raise AssertionError(f"does not end: {engine.scheduler.waiting} {engine.scheduler.active}")


def outcome(done: Completion) -> tuple[str, list[int], dict[str, Any]]:
    """What speculation must not change."""
    return done.text, done.output_ids, done.finish_reason


GREEDY = SamplingParams()


def idle_sequence(params: SamplingParams = GREEDY, **changes: Any) -> Sequence:
    """A sequence outside any engine. `changes`: its fields; `stream`, `tokens` of its output."""
    stream = TextStream(
        tokenizer(),
        tuple(params.stop),
        skip_special_tokens=params.skip_special_tokens,
        keep_stop=params.no_stop_trim,
    )
    fields: dict[str, Any] = {
        "id": "one", "prompt": [5, 6], "params": params, "limit": 8, "seed": 0, "device_stops": (END,),
        "host_stops": frozenset(), "arrival": 0,
    }  # fmt: skip
    output = SequenceOutput(changes.pop("stream", stream), [0] * 6, tokens=changes.pop("tokens", []))
    return Sequence(**(fields | changes), output=output)
