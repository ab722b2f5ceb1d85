"""The flags of `generate` and the server, named as SGLang's users know them, and the keys of their TOML file.

Fields are named as the flags are, help texts are those of --help; `configs/` holds a whole file. The library's options
have Python's names: `engine_arguments` makes them from flags, and `named_as_flags` gives errors the flags' names back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from specjax_kernels import IMPLEMENTATIONS

from specjax.checkpoint import BUILT_IN_MODEL
from specjax.drafters import DRAFTERS, Auto, DraftOptions, Ngram, NoDraft
from specjax.engine import Engine, EngineConfig
from specjax.limits import range_of
from specjax.load import AUTO_ATTENTION, SamplingDefaults
from specjax.settings import place_of, setting

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


def _of_engine(name: str, help: str, **more: Any) -> Any:
    """A setting with the default and the range of a field of `EngineConfig`."""
    return setting(getattr(EngineConfig, name), help, range=range_of(EngineConfig, name), sets=name, **more)


def _of_head(name: str, help: str, **more: Any) -> Any:
    """A setting of an option of the algorithms with a draft head. Its range is checked if such an algorithm runs."""
    return setting(None, help, sets=name, **more)


def _of_ngram(name: str, help: str, **more: Any) -> Any:
    return setting(getattr(Ngram, name), help, sets=name, **more)


@dataclass(frozen=True)
class EngineSettings:
    """How many requests run at once, and in how much memory."""

    max_running_requests: int | None = _of_engine("max_running_requests", "requests that share a batch")
    max_total_tokens: int | None = _of_engine("max_total_tokens", "tokens in the KV pool; default: fits the device")
    context_length: int | None = _of_engine(
        "context_length", "tokens of prompt and output; at most, and by default, the model's"
    )
    page_size: int = _of_engine("page_size", "tokens in a page of the KV pool")
    chunked_prefill_size: int | None = _of_engine(
        "chunked_prefill_size", "prompt tokens a forward; default and most: 512 on a CPU, 2048 on a GPU"
    )
    mem_fraction_static: float = _of_engine(
        "mem_fraction", "share of a GPU's memory for weights and KV pool", names=("--mem-fraction",)
    )
    attention_backend: str = setting(
        AUTO_ATTENTION,
        f"tree attention: {AUTO_ATTENTION} (pallas on an NVIDIA GPU, else xla), {', '.join(IMPLEMENTATIONS)}; a named "
        "implementation never falls back",
        choices=(AUTO_ATTENTION, *IMPLEMENTATIONS),
        metavar="NAME",
        sets="backend",
    )
    plain_content: bool = _of_engine(
        "plain_content",
        "users' text makes no special tokens, the chat template's own markup does; a prompt that is a text is users' "
        "as a whole, and special tokens in it can be given as ids",
    )
    disable_overlap_schedule: bool = setting(False, "read each step before the next is dispatched")
    sampling_defaults: str = setting(
        "model",
        "how to draw where a request does not say: model = the temperature, top_p, top_k, min_p and repetition_penalty "
        "of the model's generation_config.json; openai = leave these unread, as the protocol has it: temperature 1",
        choices=get_args(SamplingDefaults),
        parse=str.lower,
    )
    random_seed: int | None = _of_engine(
        "random_seed", "seed from which requests without a seed of their own draw theirs; default: another in each run"
    )


def _algorithm(name: str) -> str:
    """An algorithm's name in capitals, or ``module:function`` as it is."""
    names = (Auto.algorithm, *DRAFTERS)
    if ":" not in name and name.upper() not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return name if ":" in name else name.upper()


@dataclass(frozen=True)
class SpeculativeSettings:
    """Changes the speed, never the text."""

    speculative_algorithm: str = setting(
        Auto.algorithm,
        f"{Auto.algorithm} (the draft head that comes with specjax for the model, else NGRAM), {', '.join(DRAFTERS)},"
        " or module:function for a drafter of your own",
        parse=_algorithm, metavar="NAME", sets="draft",
    )  # fmt: skip
    speculative_draft_model_path: str | None = _of_head(
        "path",
        "EAGLE, EAGLE3, MTP: the draft head, a local folder or hub id; default: the one that comes with specjax for "
        "the model, if there is one",
        names=("--speculative-draft-model",),
        metavar="MODEL",
    )
    speculative_draft_model_revision: str | None = _of_head("revision", "of a draft head on the hub")
    speculative_num_steps: int | None = _of_head(
        "steps",
        "EAGLE, EAGLE3, MTP: levels of the draft tree, each a forward of the head; default of this, the top-k and the "
        "draft tokens where none is given: what was measured to suit a head that comes with specjax, else 5, 4, 8 for "
        "Llama, 3, 1, 4 for others",
    )
    speculative_eagle_topk: int | None = _of_head(
        "topk",
        "EAGLE, EAGLE3, MTP: nodes of a level that are expanded, and children of each; default, if others are given: 1",
    )
    speculative_num_draft_tokens: int | None = _of_head(
        "nodes",
        "nodes of a draft tree, the root included; default: for EAGLE steps + 1, with a top-k the smaller of "
        "1 + steps * top-k and 64; for NGRAM 12; on a CPU 8 where the match is strong, else 1; where neither this nor "
        "the steps nor the top-k is given, batches so large that drafting would slow them do not draft",
    )
    speculative_draft_p_min: float | None = _of_head(
        "min_probability",
        "EAGLE, EAGLE3, MTP: a draft is proposed only if the product of the head's probabilities along its path is at "
        "least this; from 0 (all are) to below 1; default: what was measured to suit a head that comes with specjax, "
        "else 0",
    )
    speculative_token_map: str | None = _of_head(
        "token_map",
        "EAGLE, MTP: the tokens that the draft may propose (FR-Spec): a .pt, .safetensors, .npy or .json file, "
        "repo/file on the hub, or a number: that many of the map shipped for the default model",
        metavar="MAP",
        digits=True,
    )
    speculative_ngram_min_match_window_size: int = _of_ngram(
        "min_match", "shortest run of tokens that counts as a match"
    )
    speculative_ngram_max_match_window_size: int = _of_ngram("max_match", "longest run of tokens that is looked up")
    speculative_ngram_min_bfs_breadth: int = _of_ngram("min_breadth", "fewest children of a node")
    speculative_ngram_max_bfs_breadth: int = _of_ngram(
        "max_breadth", "most children of a node; fewer where the match is longer or the node deeper"
    )
    speculative_ngram_branch_length: int = _of_ngram("branch_length", "longest continuation")
    speculative_ngram_capacity: int = _of_ngram("capacity", "tokens remembered, over all requests")
    speculative_ngram_weak_draft_tokens: int | None = _of_ngram(
        "weak_nodes", "nodes of a tree while the longest match is weak, 1 = no drafts; default: as above"
    )
    speculative_ngram_strong_match_size: int = _of_ngram("strong_match", "tokens from which on a match is strong")
    speculative_ngram_isolate: bool = _of_engine(
        "isolate_ngrams",
        "NGRAM: no request drafts from what another has said, so that nobody's timing tells of others' texts; requests "
        "with the same cache_salt still share",
    )
    speculative_ngram_match_type: str = _of_ngram(
        "match_type",
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


_OPTIONS = {
    each.metadata["setting"].sets or each.name: each.name
    for group in (EngineSettings, SpeculativeSettings)
    for each in fields(group)
}
"""The library's option to the setting that sets it."""

_OWNERS = "|".join(
    ["EngineConfig", "TreeShape", "Auto", "draft", *(each.options.__name__ for each in DRAFTERS.values())]
)
_NAMED = re.compile(rf"\b(?:(?:{_OWNERS})\.(?P<option>\w+)|(?P<keyword>draft|backend)='(?P<value>[^']+)')")


def in_flags(text: str, chosen: Settings = Settings()) -> str:
    """A message of the library with the flags' names: `Eagle.steps must be ...`, `backend='xla': ...`.

    At its beginning stands where `chosen` was given the value, which may be a file and its key.
    """

    def named(match: re.Match[str]) -> str:
        field = _OPTIONS.get(match["option"] or match["keyword"])
        if field is None:
            return match[0]
        group = chosen.engine if hasattr(chosen.engine, field) else chosen.speculative
        place = place_of(chosen if match.start() == 0 else group, field)
        return place if match["keyword"] is None else f"{place} {match['value']}"

    return _NAMED.sub(named, text)


@contextmanager
def named_as_flags(chosen: Settings) -> Iterator[None]:
    """Within the context, errors and warnings about the library's options name flags."""

    def rename(record: logging.LogRecord) -> bool:
        record.msg, record.args = in_flags(record.getMessage(), chosen), None
        return True

    loggers = [logging.getLogger(name) for name in ("specjax.load", "specjax.drafters.factories")]
    for each in loggers:
        each.addFilter(rename)
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        error.args = tuple(in_flags(arg, chosen) if isinstance(arg, str) else arg for arg in error.args)
        raise
    finally:
        for each in loggers:
            each.removeFilter(rename)


def make_engine(chosen: Settings, *, progress: bool = True, **config: bool) -> Engine:
    """The engine that the settings describe. `config`: further fields of its `EngineConfig`.

    Raises:
        ValueError: as `Engine.from_pretrained`, but the message names flags.
    """
    with named_as_flags(chosen):
        arguments = engine_arguments(chosen)
        arguments["config"] = replace(arguments["config"], **config)
        return Engine.from_pretrained(**arguments, progress=progress)


def engine_arguments(chosen: Settings) -> dict[str, Any]:
    """`Engine.from_pretrained`'s keyword arguments, the model included.

    Raises:
        ValueError: a value is out of range; names the flag.
    """
    model, engine = chosen.model, chosen.engine
    with named_as_flags(chosen):
        return {
            "model": model.model,
            "revision": model.revision,
            "tokenizer_path": model.tokenizer_path,
            "chat_template": model.chat_template,
            "dtype": model.dtype,
            "sampling_defaults": engine.sampling_defaults,
            "draft": draft_options(chosen.speculative),
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
                isolate_ngrams=chosen.speculative.speculative_ngram_isolate,
                random_seed=engine.random_seed,
            ),
        }


def draft_options(speculative: SpeculativeSettings) -> DraftOptions | str:
    """The options of the algorithm, made of the flags that are its own, or ``module:function``. A warning names other
    flags that were given.

    Raises:
        ValueError: a value is out of range, or a draft head is given to an algorithm that has none.
    """
    name = speculative.speculative_algorithm
    plugin = ":" in name
    options = NoDraft if plugin else Auto if name == Auto.algorithm else DRAFTERS[name].options
    given, unused = {}, []
    for each in fields(speculative):
        value, option = getattr(speculative, each.name), each.metadata["setting"].sets
        if value == each.default or option in ("draft", "isolate_ngrams"):
            continue
        if option in options.names():
            given[option] = value
        elif option == "path":
            heads = " or ".join(key for key, other in DRAFTERS.items() if other.options.kind)
            raise ValueError(f"draft.path {value} is no use to {name}: --speculative-algorithm {heads}")
        else:
            unused.append(f"--{each.name.replace('_', '-')}")
    if unused:
        logger.warning("no effect with --speculative-algorithm %s: %s", name, ", ".join(unused))
    return name if plugin else options(**given)
