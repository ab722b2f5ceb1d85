"""What a user can set: the flags of `generate` and the server, named as SGLang's users know them, and their TOML file.

The names of the fields are those of the flags, the help texts those of --help. `configs/` holds a whole file.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

from specjax_kernels import IMPLEMENTATIONS

from specjax.checkpoint import BUILT_IN_MODEL
from specjax.drafters import (
    AUTO,
    DRAFTERS,
    NgramConfig,
    algorithm_named,
    automatic_choices,
    check_automatic,
    check_flags,
    is_automatic,
)
from specjax.engine import EngineConfig
from specjax.engine.loading import AUTO_ATTENTION, FROM_MODEL, HEAD_FLAGS, SAMPLING_DEFAULTS
from specjax.settings import setting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSettings:
    """What is loaded."""

    model: str = setting(
        BUILT_IN_MODEL, "alias, local folder, .gguf file or hub id", names=("--model-path",), metavar="MODEL"
    )
    revision: str | None = setting(None, "of a model on the hub")
    tokenizer_path: str | None = setting(None, "a folder with a tokenizer; default: the model's", metavar="FOLDER")
    chat_template: str | None = setting(
        None, "a file with a Jinja template of chat messages; default: the tokenizer's", metavar="FILE"
    )
    dtype: str = setting(
        "auto",
        "auto = float32 on a CPU, the checkpoint's on a GPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )


@dataclass(frozen=True)
class EngineSettings:
    """How many requests run at once, and in how much memory."""

    max_running_requests: int | None = setting(
        EngineConfig.max_running_requests, "requests that share a batch", minimum=1
    )
    max_total_tokens: int | None = setting(None, "tokens in the KV pool; default: fits the device", minimum=1)
    context_length: int | None = setting(
        None, "tokens of prompt and output; at most, and by default, the model's", minimum=1
    )
    page_size: int = setting(EngineConfig.page_size, "tokens in a page of the KV pool", minimum=1)
    chunked_prefill_size: int | None = setting(
        None, "prompt tokens a forward; default and most: 512 on a CPU, 2048 on a GPU", minimum=1
    )
    mem_fraction_static: float = setting(
        EngineConfig.mem_fraction,
        "share of a GPU's memory for weights and KV pool",
        names=("--mem-fraction",),
        above=0,
        maximum=1,
    )
    attention_backend: str = setting(
        AUTO_ATTENTION,
        f"tree attention: {AUTO_ATTENTION} (pallas on an NVIDIA GPU, else xla), {', '.join(IMPLEMENTATIONS)}; "
        "one asked for by name never falls back",
        choices=(AUTO_ATTENTION, *IMPLEMENTATIONS),
        metavar="NAME",
    )
    plain_content: bool = setting(
        False,
        "users' text makes no special tokens, the chat template's own markup does; a prompt that is a text is users' "
        "as a whole, and special tokens in it can be given as ids",
    )
    disable_overlap_schedule: bool = setting(False, "read each step before the next is dispatched")
    sampling_defaults: str = setting(
        FROM_MODEL,
        "how to draw where a request does not say: model = the temperature, top_p, top_k, min_p and repetition_penalty "
        "of the model's generation_config.json; openai = leave these unread, as the protocol has it: temperature 1",
        choices=SAMPLING_DEFAULTS,
        parse=str.lower,
    )
    random_seed: int | None = setting(
        None, "seed from which requests without a seed of their own draw theirs; default: another in each run"
    )


@dataclass(frozen=True)
class SpeculativeSettings:
    """Changes the speed, never the text."""

    speculative_algorithm: str = setting(
        AUTO, f"{AUTO} (the draft head that comes with specjax for the model, else NGRAM), {', '.join(DRAFTERS)}",
        choices=(AUTO, *DRAFTERS), parse=str.upper, metavar="NAME",
    )  # fmt: skip
    speculative_draft_model_path: str | None = setting(
        None,
        "EAGLE, EAGLE3: the draft head, a local folder or hub id; default: the one that comes with specjax for the "
        "model, if there is one",
        names=("--speculative-draft-model",),
        metavar="MODEL",
    )
    speculative_draft_model_revision: str | None = setting(None, "of a draft head on the hub")
    speculative_num_steps: int | None = setting(
        None,
        "EAGLE, EAGLE3: levels of the draft tree, each a forward of the head; default of this, the top-k and the draft "
        "tokens where none is given: what was measured to suit a head that comes with specjax, else 5, 4, 8 for Llama, "
        "3, 1, 4 for others",
    )
    speculative_eagle_topk: int | None = setting(
        None, "EAGLE, EAGLE3: nodes of a level that are expanded, and children of each; default, if others are given: 1"
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "nodes of a draft tree, the root included; default: for EAGLE steps + 1, with a top-k the smaller of "
        "1 + steps * top-k and 64; for NGRAM 12; on a CPU 8 where the match is strong, else 1; where neither this nor "
        "the steps nor the top-k is given, batches so large that drafting would slow them do not draft",
    )
    speculative_draft_p_min: float | None = setting(
        None,
        "EAGLE, EAGLE3, MTP: a draft is proposed only if the product of the head's probabilities along its path is at "
        "least this; from 0 (all are) to below 1; default: what was measured to suit a head that comes with specjax, "
        "else 0",
    )
    speculative_token_map: str | None = setting(
        None,
        "EAGLE: the tokens that the draft may propose (FR-Spec): a .pt, .safetensors, .npy or .json file, repo/file on "
        "the hub, or a number: that many of the map shipped for the default model",
        metavar="MAP",
        digits=True,
    )
    speculative_ngram_min_match_window_size: int = setting(
        NgramConfig.min_match_window_size, "shortest run of tokens that counts as a match"
    )
    speculative_ngram_max_match_window_size: int = setting(
        NgramConfig.max_match_window_size, "longest run of tokens that is looked up"
    )
    speculative_ngram_min_bfs_breadth: int = setting(NgramConfig.min_bfs_breadth, "fewest children of a node")
    speculative_ngram_max_bfs_breadth: int = setting(
        NgramConfig.max_bfs_breadth, "most children of a node; fewer where the match is longer or the node deeper"
    )
    speculative_ngram_branch_length: int = setting(NgramConfig.branch_length, "longest continuation")
    speculative_ngram_capacity: int = setting(NgramConfig.capacity, "tokens remembered, over all requests")
    speculative_ngram_weak_draft_tokens: int | None = setting(
        None, "nodes of a tree while the longest match is weak, 1 = no drafts; default: as above"
    )
    speculative_ngram_strong_match_size: int = setting(
        NgramConfig.strong_match_size, "tokens from which on a match is strong"
    )
    speculative_ngram_isolate: bool = setting(
        False,
        "NGRAM: no request drafts from what another has said, so that nobody's timing tells of others' texts; requests "
        "with the same cache_salt still share",
    )
    speculative_ngram_match_type: str = setting(
        NgramConfig.match_type,
        "which continuations come first: the most recent, or those that most matches agree on",
        choices=("BFS", "PROB"),
        parse=str.upper,
    )


@dataclass(frozen=True)
class ServerSettings:
    """Who may ask, and how much."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 = all", metavar="HOST")
    port: int = setting(30000, "0 = any free one", minimum=0, maximum=65535)
    served_model_name: str | None = setting(None, "what clients call the model; default: the value of --model")
    api_key: str | None = setting(
        None, "what clients must send as a bearer token; in a file other users of the machine do not see it",
        metavar="KEY", secret=True,
    )  # fmt: skip
    log_level: str = setting(
        "info", "least severe lines that are logged", choices=("debug", "info", "warning", "error"), parse=str.lower
    )
    max_queued_requests: int = setting(512, "requests that may wait; further ones get a 503", minimum=1)
    stream_interval: int = setting(1, "tokens between two events of a stream", minimum=1)
    decode_log_interval: int = setting(40, "steps between two log lines about decoding", minimum=1)
    shutdown_timeout: float = setting(
        30.0, "seconds that running requests may go on after SIGTERM or Ctrl-C", minimum=0
    )
    watchdog_timeout: float = setting(
        300.0,
        "seconds; if a step of the engine takes longer, compiling aside, it is stuck: all requests end with a 503 and "
        "the process with status 1, so that a supervisor starts it again",
        above=0,
    )
    receive_timeout: float = setting(
        60.0,
        "seconds that a client may pause while it sends a request, and in which the headers must be complete; ten "
        "times as long for the whole request; one that takes longer gets a 408",
        above=0,
    )
    max_connections: int = setting(
        1000, "connections at once; a request on a further one gets a 503, except for /health", minimum=1
    )
    strict_fields: bool = setting(
        False, "refuse requests with fields that the server does not know; else they are ignored, and named in the "
        "answer's header X-Specjax-Ignored-Fields",
    )  # fmt: skip
    incremental_streaming_output: bool = setting(
        False, "streams of /generate: each event holds only the new text and tokens, not all so far",
        names=("--stream-output",),
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The tables of a file. The server uses all; `generate` all but the last."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    speculative: SpeculativeSettings = SpeculativeSettings()
    server: ServerSettings = ServerSettings()


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """`Engine.from_pretrained`'s keyword arguments, the model included.

    Raises:
        ValueError: a value is out of range; names the flag.
    """
    model, engine = settings.model, settings.engine
    algorithm, drafting = _algorithm_flags(settings.speculative)
    return {
        "model": model.model,
        "revision": model.revision,
        "tokenizer_path": model.tokenizer_path,
        "chat_template": model.chat_template,
        "sampling_defaults": engine.sampling_defaults,
        "dtype": model.dtype,
        "algorithm": algorithm,
        "algorithm_flags": drafting,
        "backend": engine.attention_backend,
        "config": EngineConfig(
            max_running_requests=engine.max_running_requests or EngineConfig.max_running_requests,
            page_size=engine.page_size,
            max_total_tokens=engine.max_total_tokens,
            context_length=engine.context_length,
            chunked_prefill_size=engine.chunked_prefill_size,
            mem_fraction=engine.mem_fraction_static,
            plain_content=engine.plain_content,
            overlap=not engine.disable_overlap_schedule,
            isolate_ngrams=settings.speculative.speculative_ngram_isolate,
            random_seed=engine.random_seed,
        ),
    }


def _algorithm_flags(settings: SpeculativeSettings) -> tuple[str, dict[str, Any]]:
    """The algorithm and those of the flags that are its own, checked. Says which others were given for nothing.

    What AUTO means is known when the model is. Until then its flags are all that were given for what it may mean: only
    those, because a default of one algorithm says nothing to another.

    Raises:
        ValueError: a value is out of range, or a draft head is named for an algorithm that has none.
    """
    automatic = is_automatic(settings.speculative_algorithm)
    name, found = algorithm_named(settings.speculative_algorithm)
    own = frozenset[str]().union(*(each.flags for each in automatic_choices().values())) if automatic else found.flags
    of_files = {"token_map"} if automatic else {*HEAD_FLAGS} if found.head else set()
    name = AUTO if automatic else name
    taken, idle = {}, []
    for field in fields(settings):
        value = getattr(settings, field.name)
        short = field.name.removeprefix("speculative_").removeprefix("ngram_")
        if short in ("algorithm", "isolate") or value is None or (automatic and value == field.default):
            continue
        if short in own or short in of_files:
            taken[short] = value
        elif short == "draft_model_path":
            heads = " or ".join(key for key, other in DRAFTERS.items() if other.head)
            raise ValueError(
                f"--speculative-draft-model-path {value} is no use to {name}: --speculative-algorithm {heads}"
            )
        elif value != field.default:
            idle.append(f"--{field.name.replace('_', '-')}")
    if idle:
        logger.warning("no effect with --speculative-algorithm %s: %s", name, ", ".join(idle))
    drafting = {key: value for key, value in taken.items() if key in own}
    if automatic:
        check_automatic(drafting)
    else:
        check_flags(name, drafting)
    return settings.speculative_algorithm, taken
