"""The flags of `generate` and the server, with SGLang's names, and the keys of their TOML file.

A field's name gives the flag and the key; `configs/` holds complete files. A flag for a library option takes the
option's default, range and help; the flags of drafters follow from their options. `named_as_flags` replaces the
option's name by the flag's name in errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specjax_kernels import IMPLEMENTATIONS

from specjax.acceptance import AcceptAbove
from specjax.checkpoint import BUILT_IN_MODEL
from specjax.checkpoint.hf_config import DTYPES, QUANTIZATIONS
from specjax.drafters import DRAFTERS, Auto, DraftOptions
from specjax.drafters.factories import algorithm, algorithms
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
        "defaults of sampling parameters: model = those of the model's generation_config.json; openai = temperature 1, "
        "as in OpenAI's API",
        choices=get_args(SamplingDefaults), parse=str.lower,
    )  # fmt: skip
    random_seed: int | None = _engine("random_seed")
    enable_torch_compile: bool = _ignored("every step is compiled by XLA")
    torch_compile_max_bs: int | None = _ignored("steps of every batch size are compiled by XLA", None, minimum=1)
    trust_remote_code: bool = _ignored("no code of a checkpoint is ever run")


@dataclass(frozen=True)
class _Speculation:
    """Speculation never changes the text, unless --allow-lossy-speculation comes with a threshold below 1."""

    speculative_algorithm: str = setting(
        Auto.algorithm,
        f"{Auto.algorithm} (the draft head that comes with specjax for the model, else its MTP layers, else NGRAM), "
        f"{', '.join(DRAFTERS)} (NEXTN = MTP; DSPARK = DFLASH; P-EAGLE = EAGLE3; PARD = STANDALONE; EAGLE without a "
        "head = MTP if the model has MTP layers; MTP with an assistant = ASSISTANT), or module:function for a "
        "user-defined drafter",
        parse=_algorithm, metavar="NAME", sets="draft",
    )  # fmt: skip
    speculative_ngram_isolate: bool = _engine(
        "isolate_ngrams",
        "NGRAM: draft from texts of other requests only if they have the same cache_salt; else timing may reveal texts",
    )
    speculative_adaptive: bool | None = setting(
        None,
        "draft only if measurements show a gain, with the fastest tree; off = draft in every step, except in very "
        "large batches; default: on, unless the tree of a head or model is set, which then drafts in every step",
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


FURTHER_NAMES = {"speculative_draft_model_path": ("--speculative-draft-model",)}
"""Aliases of the flags of drafters' options."""


def with_draft_options(table: Mapping[str, type[DraftOptions]]) -> type[_Speculation]:
    """Settings of speculation, with the options of every algorithm of a table.

    `Setting.flag` names an option's setting; without it the name is speculative_<algorithm>_<option>. Options of the
    same name are one setting, with the default of the first algorithm. Each algorithm checks its own ranges.
    """
    members: list[tuple[str, Any, Any]] = []
    ordered = sorted(table.values(), key=lambda options: options.needs is None)  # heads and models first
    for option in dict.fromkeys(name for options in ordered for name in options.names()):
        owners = {name: options for name, options in table.items() if option in options.names()}
        (first, owner), helps = next(iter(owners.items())), dict[str, list[str]]()
        for name, options in owners.items():
            helps.setdefault(setting_of(options, option).help, []).append(name)
        declared, hint = setting_of(owner, option), get_type_hints(owner)[option]
        about = "; ".join(f"{', '.join(names)}: {help}" for help, names in helps.items())
        name = declared.flag or f"speculative_{first.lower()}_{option}"
        more = {"names": FURTHER_NAMES.get(name, ()), "choices": choices_of(hint), "sets": option}
        declared = replace(declared, help=about, range=ANY, **more)
        members.append((name, _read_as(hint), field(default=getattr(owner, option), metadata={"setting": declared})))
    namespace = {"__doc__": _Speculation.__doc__, "__module__": __name__}
    return make_dataclass("SpeculativeSettings", members, bases=(_Speculation,), namespace=namespace, frozen=True)


def _read_as(hint: Any) -> Any:
    """Type of the setting for an option: texts for a list or for a value that may be a text, else the option's own."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    origins = {get_origin(kind) or kind for kind in kinds} - {NoneType}
    kind = tuple[str, ...] if tuple in origins else str if origins & {str, Literal} else origins.pop()
    return kind | None if NoneType in kinds else kind


SpeculativeSettings = with_draft_options(DRAFTERS)


@dataclass(frozen=True)
class Settings:
    """The tables of a file. The server uses all; `generate` all but the last."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    speculative: _Speculation = SpeculativeSettings()  # noqa: RUF009 - frozen
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
