"""The flags of `generate` and the server, with SGLang's names, and the keys of their TOML file.

A field's name gives the flag and the key; `configs/` holds complete files. A flag for a library option takes the
option's default, range and help. `named_as_flags` replaces the option's name by the flag's name in errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, get_args, get_type_hints

from specjax_kernels import IMPLEMENTATIONS

from specjax.acceptance import AcceptAbove
from specjax.checkpoint import BUILT_IN_MODEL
from specjax.checkpoint.hf_config import DTYPES, QUANTIZATIONS
from specjax.drafters import DRAFTERS, Auto
from specjax.drafters.options import algorithm, algorithms
from specjax.engine import EngineConfig
from specjax.limits import ANY, ParameterError, choices_of, setting_of
from specjax.load import AUTO_ATTENTION, SamplingDefaults
from specjax.serve.server_settings import ServerSettings
from specjax.settings import place_of, setting


def _option(owner: type, name: str, help: str = "", **more: Any) -> Any:
    """Declares a setting with the default, help, range and choices of a library option. `more`: fields of `Setting`."""
    option = setting_of(owner, name)
    declared = {"sets": name, "range": option.range, "choices": choices_of(get_type_hints(owner)[name])}
    return setting(getattr(owner, name), help or option.help, **{**declared, **more})


_engine = partial(_option, EngineConfig)


def _draft(name: str, help: str = "", **more: Any) -> Any:
    """Declares a drafter option. Its range depends on the algorithm, which checks it."""
    owners = {key: options for key, options in DRAFTERS.items() if name in options.names()}
    owner = next(iter(owners.values()))
    return _option(owner, name, help or f"{', '.join(owners)}: {setting_of(owner, name).help}", range=ANY, **more)


def _threshold(name: str) -> Any:
    more = "below 1 changes the text of requests that sample, and needs --allow-lossy-speculation"
    return _option(AcceptAbove, name, f"{setting_of(AcceptAbove, name).help}; {more}", sets="")


def _ignored(instead: str, default: Any = False, **more: Any) -> Any:
    """Declares a flag of SGLang that has no effect here."""
    return setting(default, f"accepted as a flag of SGLang's, without effect: {instead}", instead=instead, **more)


def _algorithm(name: str) -> str:
    """Returns an algorithm's name in capitals; ``module:function`` is unchanged."""
    canonical = name if ":" in name else algorithm(name)
    if canonical is None:
        raise ValueError(f"one of {algorithms()}")
    return canonical


@dataclass(frozen=True)
class ModelSettings:
    """The model to load."""

    model: str = setting(BUILT_IN_MODEL, "alias, folder, .gguf or hub id", names=("--model-path",), metavar="MODEL")
    revision: str | None = setting(None, "branch, tag or commit of a model on the hub")
    tokenizer_path: str | None = setting(None, "a folder with a tokenizer; default: the model's", metavar="FOLDER")
    chat_template: str | None = setting(None, "Jinja template of chats; default: the tokenizer's", metavar="FILE")
    dtype: str = setting("auto", "auto = float32 on a CPU, the checkpoint's on a GPU", choices=("auto", *DTYPES))
    quantization: str = setting(
        "auto",
        "how matrices are stored: auto = as in the checkpoint; none = dequantised; fp8, int8, int4 = quantise a float "
        "checkpoint, which changes the text",
        choices=QUANTIZATIONS,
    )


@dataclass(frozen=True)
class EngineSettings:
    """Batching, memory and execution of the engine."""

    max_running_requests: int | None = _engine("max_running_requests")
    cuda_graph_max_bs: int | None = _engine(
        "max_batch",
        "largest compiled batch; more requests are decoded in several batches; default and maximum: "
        "--max-running-requests",
        names=("--max-batch-bucket",),
    )
    max_total_tokens: int | None = _engine("max_total_tokens")
    context_length: int | None = _engine("context_length")
    page_size: int = _engine("page_size")
    chunked_prefill_size: int | None = _engine("chunked_prefill_size")
    max_prefill_tokens: int | None = _engine("max_prefill_tokens")
    schedule_policy: str = _engine("schedule_policy", parse=str.lower)
    disable_radix_cache: bool = setting(False, "no prefix cache: compute every prompt in full")
    state_snapshots: int | None = _engine("state_snapshots")
    mem_fraction_static: float = _engine("mem_fraction", names=("--mem-fraction",))
    base_gpu_id: int = setting(0, "index of the first GPU, among the GPUs that CUDA shows", minimum=0)
    tensor_parallel_size: int = _engine(
        "tensor_parallel",
        "devices over which weights and KV pool are split; GPUs from --base-gpu-id on",
        names=("--tp", "--tp-size"),
    )
    expert_parallel_size: int = _engine(
        "expert_parallel",
        "number of groups of the --tp devices over which the experts of a mixture are distributed; devices of a group "
        "split the width of its experts; --tp = each device has whole experts; 1 = all devices split all experts",
        names=("--ep", "--ep-size"),
    )
    attention_backend: str = setting(
        AUTO_ATTENTION,
        f"tree attention: {AUTO_ATTENTION} (on an NVIDIA GPU pallas, or triton if jax lacks it; else xla), "
        f"{', '.join(IMPLEMENTATIONS)}; a named implementation never falls back",
        choices=(AUTO_ATTENTION, *IMPLEMENTATIONS), metavar="NAME", sets="backend",
    )  # fmt: skip
    disable_overlap_schedule: bool = setting(False, "read the result of each step before the next step is dispatched")
    sampling_defaults: str = setting(
        "model",
        "defaults of sampling parameters: model = the temperature, top_p, top_k, min_p and "
        "repetition_penalty of the model's generation_config.json; openai = temperature 1, as in OpenAI's API",
        choices=get_args(SamplingDefaults), parse=str.lower,
    )  # fmt: skip
    random_seed: int | None = _engine("random_seed")
    enable_torch_compile: bool = _ignored("every step is compiled by XLA")
    torch_compile_max_bs: int | None = _ignored("steps of every batch size are compiled by XLA", None, minimum=1)
    trust_remote_code: bool = _ignored("no code of a checkpoint is ever run")


@dataclass(frozen=True)
class SpeculativeSettings:
    """Speculation never changes the text, unless --allow-lossy-speculation comes with a threshold below 1."""

    speculative_algorithm: str = setting(
        Auto.algorithm,
        f"{Auto.algorithm} (the draft head that comes with specjax for the model, else its MTP layers, else NGRAM), "
        f"{', '.join(DRAFTERS)} (NEXTN = MTP; DSPARK = DFLASH; EAGLE without a head = MTP if the model has MTP "
        "layers), or module:function for a user-defined drafter",
        parse=_algorithm, metavar="NAME", sets="draft",
    )  # fmt: skip
    speculative_draft_model_path: str | None = _draft("path", names=("--speculative-draft-model",), metavar="MODEL")
    speculative_draft_model_revision: str | None = _draft("revision")
    speculative_num_steps: int | None = _draft(
        "steps",
        "EAGLE, EAGLE3, MTP, STANDALONE: levels of the draft tree, each a forward of the draft; defaults of steps, "
        "top-k and draft tokens if none is set: measured values of a shipped head, else 5, 4, 8 for heads of Llama, "
        "3, 1, 4 for other heads, MTP and STANDALONE",
    )
    speculative_eagle_topk: int | None = _draft("topk")
    speculative_num_draft_tokens: int | None = _draft(
        "nodes",
        "nodes of a draft tree, including the root; default: for EAGLE steps + 1, with a top-k the smaller of "
        "1 + steps * top-k and 64; for NGRAM 12, on a CPU 8 after long matches, else fewer; if steps, top-k and this "
        "are unset, large batches have smaller trees on a GPU, or do not draft",
    )
    speculative_aux_layers: tuple[str, ...] | None = _draft("aux_layers", metavar="LAYER", digits=True)
    speculative_dflash_block_size: int | None = _draft("block")
    speculative_dflash_draft_window_size: int | None = _draft("window")
    speculative_sample_from_anchor: bool | None = _draft("sample_from_anchor")
    speculative_draft_context_length: int | None = _draft("positions")
    speculative_draft_quantization: str | None = _draft("quantization", parse=str.lower)
    speculative_coupling: str = _draft("coupling", parse=str.lower)
    speculative_token_map: str | None = _draft("token_map", metavar="MAP", digits=True)
    speculative_ngram_min_match_window_size: int = _draft("min_match")
    speculative_ngram_max_match_window_size: int = _draft("max_match")
    speculative_ngram_min_bfs_breadth: int = _draft("min_breadth")
    speculative_ngram_max_bfs_breadth: int = _draft("max_breadth")
    speculative_ngram_branch_length: int = _draft("branch_length")
    speculative_ngram_capacity: int = _draft("capacity")
    speculative_ngram_isolate: bool = _engine(
        "isolate_ngrams",
        "NGRAM: draft from texts of other requests only if they have the same cache_salt; else timing may reveal texts",
    )
    speculative_ngram_match_type: str = _draft("match_type", parse=str.upper)
    speculative_adaptive: bool | None = setting(
        None,
        "draft only if measurements show a gain, with the fastest tree; off = draft in every step, except in very "
        "large batches; default: on, unless steps, top-k or draft tokens are set, which draft in every step",
        sets="adaptive",
    )
    speculative_attention_mode: str = _ignored(
        "verification and drafting use the attention of --attention-backend", "prefill",
        choices=("prefill", "decode"), parse=str.lower,
    )  # fmt: skip
    speculative_accept_threshold_single: float = _threshold("single")
    speculative_accept_threshold_acc: float = _threshold("cumulative")
    allow_lossy_speculation: bool = setting(
        False, "allow thresholds below 1: the text of requests that sample is then not the model's own"
    )
    speculative_synthetic_acceptance: tuple[str, ...] = setting(
        (), "measure the speed that a draft would have: accept the first draft of each step with the first rate, the "
        "first two with the second rate, and so on, as vLLM's synthetic_acceptance_rates; such text is not the model's",
        metavar="RATE", digits=True, sets="",
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The tables of a file. The server uses all; `generate` all but the last."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    speculative: SpeculativeSettings = SpeculativeSettings()
    server: ServerSettings = field(default_factory=ServerSettings)


OPTIONS = {
    field.metadata["setting"].sets or field.name: field.name
    for group in (EngineSettings, SpeculativeSettings)
    for field in fields(group)
}
"""Maps an option of the library to the setting that sets it."""


def with_flag(error: ValueError, chosen: Any = Settings()) -> ValueError:
    """Renames the parameter of an error to the flag, or file and key, that set it. Other errors are unchanged."""
    if not isinstance(error, ParameterError):
        return error
    # `quantization` names an argument of `Engine.from_pretrained` and an option of drafters.
    keywords = OPTIONS | {"dtype": "dtype", "quantization": "quantization"}
    name = (OPTIONS if error.owner else keywords).get(error.name)
    return error if name is None else error.renamed({error.name: place_of(chosen, name)})


@contextmanager
def named_as_flags(chosen: Any) -> Iterator[None]:
    """Within the context, errors about an option of the library name the flag; see `with_flag`."""
    try:
        yield
    except ParameterError as error:
        raise with_flag(error, chosen) from error.__cause__
