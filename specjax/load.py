"""Loads everything that an engine needs: target, tokenizer, drafter and parameters.

`requested` and `choose` decide which algorithm drafts, `load` reads the files. Arguments are checked before the weights
are read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import numpy as np
from jax.sharding import Mesh
from specjax_kernels import implementation_named
from specjax_kernels.cpu import attention as cpu_attention
from specjax_kernels.cpu import object_code, repacking
from specjax_kernels.quantised import KINDS

from specjax import checkpoint
from specjax.checkpoint import CheckpointError, CheckpointOptionError, ModelFiles, ShippedHead
from specjax.checkpoint.files import default_cache_dir, prefixed
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.drafters.assistant import Assistant
from specjax.drafters.base import Drafter, Params, Speculation
from specjax.drafters.factories import Auto, DrafterFactory, load_drafter, make_speculation, options_of, with_kind
from specjax.drafters.hybrid import with_ngrams
from specjax.drafters.ngram import Ngram
from specjax.drafters.options import DraftOptions, ModelOptions, NoDraft, TreeShape
from specjax.drafters.standalone import StandaloneParams
from specjax.gpu import this_memory, warn_of_problem
from specjax.limits import ParameterError
from specjax.models import make_target, table
from specjax.models.declared import declared
from specjax.models.draft_head import with_token_map
from specjax.models.params import EMBED_TENSOR, Leaf, Scope, dimensions, leaves_of
from specjax.models.target import Target
from specjax.parallel.sharding import check_experts, fitted, group_count, held_bytes
from specjax.verify import Verifier

logger = logging.getLogger(__name__)

AUTO_ATTENTION = "auto"  # the attention implementation that suits the device
SamplingDefaults = Literal["model", "openai"]  # source of defaults for `SamplingParams`


class LoadedModel(NamedTuple):
    """Arguments of `Engine`, by their names.

    Attributes:
        target: functions and config of the target.
        params: parameters of the target and of the draft model.
        tokenizer: fast tokenizer of transformers.
        speculation: the drafter, the verifier and facts about them; its `params` are in `params.draft`.
        eos_ids: ids of tokens that end a text.
        sampling_defaults: defaults for fields of `SamplingParams`.
        draft_model: config of the draft head or MTP layers, or the draft model; None without one.
    """

    target: Target
    params: Params
    tokenizer: Any
    speculation: Speculation
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    draft_model: HeadConfig | MtpConfig | Target | None = None

    @property
    def drafter(self) -> Drafter:
        return self.speculation.drafter


def load(
    model: str,
    *,
    draft: DraftOptions | str = Auto.algorithm,
    drafter: Drafter | DrafterFactory | None = None,
    verify: Verifier | None = None,
    dtype: str = "auto",
    quantization: str = "auto",
    context_length: int | None = None,
    revision: str | None = None,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    sampling_defaults: str = "model",
    backend: str | None = None,
    mem_fraction: float = 1.0,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads the target, its tokenizer and the drafter, with the parameters of target and draft.

    Arguments and errors: see `Engine.from_pretrained` and `EngineConfig`. `mesh`: devices over which both models are
    split; None: JAX's default device.
    """
    if sampling_defaults not in (sources := get_args(SamplingDefaults)):
        raise ValueError(f"sampling_defaults={sampling_defaults!r:.60} is not one of: {', '.join(sources)}")
    options, drafter = requested(model, draft, drafter)
    warn_of_problem()
    backend = attention_implementation(backend)
    files = checkpoint.resolve(model, revision=revision, progress=progress)
    config = checkpoint.model_config(files.config, dtype=dtype, context_length=context_length)
    quantization = checkpoint.effective_quantization(files.name, files.config, config, quantization)
    checked = checkpoint.check_tensors(files, config)  # before anything has the config's sizes
    devices, groups = 1 if mesh is None else mesh.size, group_count(mesh)
    check_experts(config, groups)
    served = fitted(config, devices, groups=groups)
    _check_room(files, served, quantization, mem_fraction, devices, groups)
    checkpoint.check_tokenizer_paths(tokenizer_path, chat_template)
    checkpoint.stop_token_ids(files, vocab_size=config.vocab_size)
    sampled = checkpoint.sampling_defaults(files) if sampling_defaults == "model" else {}
    chosen = choose(options, files, config)
    if config.dtype == "float32":
        # Recent GPUs multiply in TF32 by default.
        jax.config.update("jax_default_matmul_precision", "highest")

    # The first compilation of the CPU kernels takes seconds; it runs while the weights are read.
    compiling = partial(cpu_attention.prepare, config.dtype)
    threading.Thread(target=compiling, name="specjax-kernels", daemon=True).start()
    target = make_target(served, backend=backend)
    with ThreadPoolExecutor(1) as background:  # importing transformers takes as long as reading the weights
        read = partial(checkpoint.load_tokenizer, files, folder=tokenizer_path, chat_template=chat_template)
        reading = background.submit(read)
        if chosen.options.kind is None:
            loaded = _load_model(chosen.options, config, reading, dtype, context_length, backend, progress, mesh)
        else:
            loaded = _load_head(chosen, files, config, reading, quantization, progress, mesh)
        weights = checkpoint.load_params(
            files, config, quantization=quantization, progress=progress, mesh=mesh, checked=checked
        )
        tokenizer = reading.result()
    # Compiled in the background for the next start.
    threading.Thread(target=repacking.prepare, name="specjax-repacking", daemon=True).start()
    if loaded.head is not None and loaded.ids is not None:
        head, draft_params = with_token_map(
            loaded.head, loaded.params, target, weights, loaded.ids, loaded.quantization
        )
        loaded = loaded._replace(head=head, params=draft_params)
    if drafter is None:
        shared: Any = {"model": loaded.model, "backend": backend, "quantization": loaded.quantization}
        speculation = chosen.speculation(target, loaded.head, **shared)._replace(params=loaded.params)
    else:
        loaded, speculation = _Draft(), make_speculation(drafter, target=target)
    if drafter is not None or verify is not None:
        # What the caller passes drafts in every step, unless `EngineConfig.adaptive` is True.
        speculation = speculation._replace(explicit_width=True, every_step=True, verify=verify or speculation.verify)
    eos = checkpoint.stop_token_ids(files, tokenizer, config.vocab_size)
    params, speculation = Params(weights, speculation.params), speculation._replace(params=None)
    draft_model = loaded.head or loaded.model
    return LoadedModel(target, params, tokenizer, speculation, eos, sampled, draft_model)


def use_compilation_cache() -> None:
    """Stores compiled programs in `default_cache_dir` for later starts, unless JAX's own setting names a folder."""
    folder = default_cache_dir()
    object_code.keep_in(folder / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _check_room(
    files: ModelFiles, config: ModelConfig, quantization: str, mem_fraction: float, devices: int = 1, groups: int = 1
) -> None:  # fmt: skip
    """Raises ValueError if the target's weights alone exceed the memory of each GPU."""
    if (memory := this_memory()) is None:
        return
    leaves, sizes = [*leaves_of(table(config))], dimensions(config)

    def needed(quantization: str) -> int:
        bits = checkpoint.bits_per_weight(files.config, quantization)
        return held_bytes(leaves, sizes, config.dtype, devices, bits, groups)

    room, weights = memory.budget(mem_fraction) - memory.used, needed(quantization)
    if weights > room:
        smaller = [name for name in ("int8", "int4") if quantization == "auto" and needed(name) <= room]
        advice = "".join(f"quantization {name} takes {needed(name) / 1e9:.2f} GB; " for name in smaller)
        raise ValueError(
            f"{files.name} has {weights / 1e9:.2f} GB of weights in {config.dtype}, and there are {room / 1e9:.2f} GB: "
            f"mem_fraction {mem_fraction:g} of the device's {memory.total / 1e9:.2f} GB; JAX may use "
            f"{memory.limit / 1e9:.2f} GB, and {memory.used / 1e9:.2f} GB are in use; {advice}a dry run of "
            "`specjax serve` says what else fits"
        )


def requested(
    model: str,
    draft: DraftOptions | str,
    drafter: Drafter | DrafterFactory | None = None,
) -> tuple[DraftOptions, Drafter | DrafterFactory | None]:
    """Resolves `draft` to options and a drafter; raises ValueError or TypeError for errors that need no model files."""
    if drafter is not None and not callable(getattr(drafter, "propose", drafter)):
        raise TypeError(f"drafter must be a Drafter or a function of the Target that makes one, got {drafter!r:.60}")
    if drafter is not None and draft != Auto.algorithm:
        raise ValueError(f"give drafter or draft, not both; draft={draft!r:.60}")
    if drafter is None and isinstance(draft, str) and ":" in draft:
        drafter = load_drafter(draft)
    options = options_of(draft) if drafter is None else NoDraft()
    shipped = options.kind is not None and checkpoint.may_have_head(model, options.kind)
    inside = options.reads_mtp_layers and model != checkpoint.BUILT_IN_MODEL  # may hold MTP layers
    if options.needs and not _path(options) and not shipped and not inside:
        raise _no_path(options)
    return options, drafter


def declared_models(target: Target, draft: HeadConfig | MtpConfig | Target | None) -> Params:
    """Returns the declarations of the parameters of a target and of `LoadedModel.draft_model`."""
    vocab_size = target.config.vocab_size
    models = Params(declared(target.config, vocab_size))
    if draft is None:
        return models
    if isinstance(draft, Target):
        return models._replace(draft=StandaloneParams(cast(Any, declared(draft.config, vocab_size))))
    head = declared(draft, vocab_size)
    if isinstance(draft, MtpConfig) and draft.mapped:
        head = head._replace(table=(*head.table, MAPPED))
    return models._replace(draft=head)


MAPPED = Scope((Leaf("head", "M -> W"),))
"""Leaves that a token map adds to MTP layers beside `ids`."""


class Chosen(NamedTuple):
    options: DraftOptions
    tree: TreeShape | None = None  # measured shape for options without one; None: `ModelOptions.automatic`
    head: ShippedHead | None = None  # shipped head at `options.path`
    mtp: MtpConfig | None = None  # the target's MTP layers, if they draft
    ngrams: Ngram | None = None  # draft before it

    def speculation(
        self, target: Target, head: HeadConfig | MtpConfig | None, *, model: Target | None = None,
        backend: str | None = None, platform: str | None = None, quantization: str = "none",
    ) -> Speculation:  # fmt: skip
        """Makes the drafter for a loaded `head` or `model`. `quantization` of its weights appears in the log."""
        shared: Any = {"backend": backend, "automatic": self.tree, "platform": platform}
        speculation = make_speculation(self.options, target=target, head=head, model=model, **shared)
        if self.ngrams is not None:
            speculation = with_ngrams(speculation, make_speculation(self.ngrams, platform=platform))
        source = _path(self.options) or ""
        if self.head is not None:
            source = f"{self.head.name}, which comes with specjax"
        if self.mtp is not None:
            source = f"{self.mtp.count} MTP layer{'s' if self.mtp.count > 1 else ''} of the model"
        if quantization in KINDS:
            source = f"{source}, weights in {quantization}"
        return speculation._replace(source=source)


def choose(options: DraftOptions, files: ModelFiles, config: ModelConfig, platform: str | None = None) -> Chosen:
    """Chooses the algorithm for a model.

    AUTO uses the draft head that ships for the model, else the model's MTP layers or the assistant beside it, else
    n-grams; on a CPU, n-grams before any of them, unless options give the tree. An algorithm without the head that it
    needs uses the shipped one; MTP and EAGLE also use MTP layers and assistants, from their path, too. A warning names
    options without effect. `platform`: "cpu" or "gpu"; None: the platform of this process.
    """
    platform = platform or jax.default_backend()
    shipped = inside = assistant = None
    if (path := _path(options)) is None:
        shipped = checkpoint.shipped_head(files, config, options.kind)
        if options.reads_mtp_layers and shipped is None:
            inside = checkpoint.mtp_config(files, config)
            assistant = None if inside else checkpoint.assistant_beside(files)
    elif options.reads_mtp_layers:
        assistant = path if checkpoint.is_assistant(path, cast(ModelOptions, options).revision) else None
    head, requested_algorithm = shipped or inside, options.algorithm
    ngrams = options.ngrams() if isinstance(options, Auto) and platform == "cpu" else None
    options, unused = options.choose(Assistant.kind if assistant else head.kind if head else None)
    if unused := [name for name in unused if ngrams is None or name not in Ngram.names()]:
        names = ", ".join(unused)
        logger.warning("no effect with %s, which %s chose: %s", options.algorithm, requested_algorithm, names)
    if assistant is not None:
        logger.info("%s: an assistant drafts (%s)", requested_algorithm, assistant)
        options = with_kind(options, str(Assistant.kind))
        return Chosen(replace(cast(ModelOptions, options), path=assistant), ngrams=ngrams)
    if options.needs is None or _path(options):
        return Chosen(options)
    if inside is not None:
        if options.kind != inside.kind:
            logger.info("%s without a head: the model's MTP layers draft (MTP)", options.algorithm)
            options = with_kind(options, inside.kind)
        return Chosen(options, mtp=inside, ngrams=ngrams)
    if shipped is None or options.kind != shipped.kind:
        raise _no_path(options)
    options = replace(cast(ModelOptions, options), path=str(shipped.folder))
    tree = TreeShape(**shipped.serving("cpu" if platform == "cpu" else "gpu"))
    return Chosen(options, tree, shipped, ngrams=ngrams)


def _path(options: DraftOptions) -> str | None:
    return getattr(options, "path", None)


def _no_path(options: DraftOptions) -> ValueError:
    return ParameterError("path", f"is missing: {options.algorithm} needs {options.needs}", type(options).__name__)


def head_quantization(
    chosen: Chosen, files: ModelFiles, config: ModelConfig, quantization: str, platform: str | None = None
) -> str:
    """Returns the quantization of a draft head or MTP layers, given the target's; see `ModelOptions.weights`."""
    options, platform = cast(ModelOptions, chosen.options), platform or jax.default_backend()
    if chosen.mtp is not None:
        stored = checkpoint.mtp_method(files, config)
        return options.weights(files.name, config.dtype, platform, otherwise=quantization, stored=stored)
    # Quantising a draft changes no text, so a quantised target gets a quantised draft.
    default = "int8" if quantization == "auto" and files.config.get("quantization_config") else "none"
    return options.weights(str(options.path), config.dtype, platform, otherwise=default)


def model_quantization(
    options: DraftOptions, files: ModelFiles, config: ModelConfig, platform: str | None = None
) -> str:
    method = (files.config.get("quantization_config") or {}).get("quant_method")
    return cast(ModelOptions, options).weights(
        files.name, config.dtype, platform or jax.default_backend(), otherwise="auto", stored=method
    )


class _Draft(NamedTuple):
    """A loaded draft head or draft model; empty for algorithms without one."""

    params: Any = None  # `Params.draft`
    quantization: str = "none"
    head: HeadConfig | MtpConfig | None = None
    ids: np.ndarray | None = None  # [W], target ids of the head's tokens under a token map
    model: Target | None = None


def _load_head(
    chosen: Chosen, files: ModelFiles, config: ModelConfig, tokenizer: Future[Any], quantization: str, progress: bool,
    mesh: Mesh | None,
) -> _Draft:  # fmt: skip
    options, head, ids = cast(ModelOptions, chosen.options), chosen.mtp, None
    quantization = head_quantization(chosen, files, config, quantization)

    def tokens() -> list[str]:
        names = tokenizer.result().convert_ids_to_tokens(list(range(config.vocab_size)))
        return [token or "" for token in names]

    if head is None:
        assert options.path is not None and options.kind is not None, "see `choose`"
        with naming(options, "path"):
            head, params = checkpoint.load_head(
                options.path,
                config,
                kind=options.kind,
                revision=options.revision,
                progress=progress,
                quantization=quantization,
                mesh=mesh,
                target_embedding=lambda: checkpoint.matrices(files)[EMBED_TENSOR].read(),
                **{name: getattr(options, name) for name in options.head_options},
            )
    else:
        params = checkpoint.load_mtp(files, config, head, quantization=quantization, progress=progress, mesh=mesh)
    if (token_map := getattr(options, "token_map", None)) is not None:
        with naming(options, "token_map"):
            ids = checkpoint.read_token_map(str(token_map), vocab_size=config.vocab_size, tokens=tokens)
    if mesh is not None:
        head = fitted(head, mesh.size, "the draft", group_count(mesh))
    return _Draft(params, quantization, head, ids)


@contextmanager
def naming(options: DraftOptions, option: str) -> Iterator[None]:
    """Within the context, checkpoint errors name the option that holds the path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointOptionError(option, str(error), type(options).__name__) from error


def _load_model(
    options: DraftOptions, config: ModelConfig, tokenizer: Future[Any], dtype: str, context_length: int | None,
    backend: str | None, progress: bool, mesh: Mesh | None,
) -> _Draft:  # fmt: skip
    """Loads the draft model, if the options name one. Vocabularies are compared before its weights are read."""
    if (path := _path(options)) is None:
        return _Draft()
    with naming(options, "path"), prefixed(path):
        files = checkpoint.resolve(path, revision=cast(ModelOptions, options).revision, progress=progress)
        draft = checkpoint.model_config(files.config, dtype=dtype, context_length=context_length)
        tokenizers = tokenizer.result(), checkpoint.load_tokenizer(files)
        ids = checkpoint.match_vocabularies(*tokenizers, config.vocab_size, draft.vocab_size)
        quantization = model_quantization(options, files, draft)
        params = checkpoint.load_params(files, draft, quantization=quantization, progress=progress, mesh=mesh)
    if mesh is not None:
        draft = fitted(draft, mesh.size, "the draft", group_count(mesh))
    ids = None if ids is None else jax.device_put(ids)
    return _Draft(StandaloneParams(params, ids), quantization, model=make_target(draft, backend=backend))


def attention_implementation(name: str | None) -> str | None:
    """Checks the name of an attention implementation; None: chosen by device. Raises ValueError if it cannot run."""
    if name is None or name == AUTO_ATTENTION:
        return None
    try:
        implementation_named(name)
    except (ValueError, NotImplementedError) as error:
        raise ParameterError("backend", f"{name}: {error}") from None
    if name == "pallas" and jax.default_backend() == "cpu":
        logger.warning("attention backend pallas: interpreted on this CPU, which is very slow and meant for tests")
    return name
