"""From a model's name and an algorithm's to all that an engine is made of. Refuses early what cannot work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from specjax_kernels import cpu_kernels, implementation_named
from specjax_kernels.cpu import callable_here

from specjax import checkpoint
from specjax.checkpoint import ShippedHead
from specjax.checkpoint.mappings import EMBED_TENSOR
from specjax.checkpoint.weights import read_headers
from specjax.config import ModelConfig
from specjax.drafters import (
    AUTO,
    Algorithm,
    Drafter,
    Params,
    algorithm_named,
    check_automatic,
    check_flags,
    flag_named,
    is_automatic,
    make_drafter,
)
from specjax.models import make_target
from specjax.models.eagle_head import with_token_map
from specjax.models.protocol import Target

logger = logging.getLogger(__name__)

AUTO_ATTENTION = "auto"
"""The attention implementation that suits the device."""

FROM_MODEL, FROM_PROTOCOL = SAMPLING_DEFAULTS = ("model", "openai")
"""Where the values of `SamplingParams` come from that a request does not give."""

HEAD_FLAGS = ("draft_model_path", "draft_model_revision", "token_map")
"""Flags of an algorithm with a draft head that say what is loaded; the others say how it drafts."""

TEXT_FLAGS = (*HEAD_FLAGS, "match_type")
"""Flags whose values are text."""

TREE = ("num_steps", "eagle_topk", "num_draft_tokens")
"""The flags that a head's tree is made of."""


class Loaded(NamedTuple):
    target: Target
    params: Params
    tokenizer: Any
    drafter: Drafter
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]  # of `SamplingParams`, where a request does not say


def load(
    model: str,
    *,
    dtype: str,
    algorithm: str,
    algorithm_flags: Mapping[str, Any] | None,
    revision: str | None,
    tokenizer_path: str | None,
    chat_template: str | None,
    backend: str | None,
    progress: bool,
    sampling_defaults: str = FROM_MODEL,
) -> Loaded:
    """The target, its tokenizer and the drafter, with the parameters of both models. See `Engine.from_pretrained`.

    Raises:
        CheckpointError: a model cannot be found or read, or the draft head does not fit the target. ValueError: a flag
            is wrong.
    """
    if sampling_defaults not in SAMPLING_DEFAULTS:
        known = ", ".join(SAMPLING_DEFAULTS)
        raise ValueError(f"--sampling-defaults {sampling_defaults!r:.60} is not one of: {known}")
    asked = _asked(algorithm, algorithm_flags or {}, model)
    backend = attention_implementation(backend)
    files = checkpoint.resolve(model, revision=revision, progress=progress)
    config = checkpoint.model_config(files.config, dtype=dtype)
    # Before the weights, which may take minutes.
    checkpoint.stop_token_ids(files, vocab_size=config.vocab_size)
    sampled = checkpoint.sampling_defaults(files) if sampling_defaults == FROM_MODEL else {}
    name, found, flags, from_files, tree, shipped = _chosen(asked, files, config)
    if config.dtype == "float32":
        # The default on recent GPUs is TF32; float32 is promised.
        jax.config.update("jax_default_matmul_precision", "highest")
    _prepare_kernels(config.dtype)
    target = make_target(config, backend=backend)
    with ThreadPoolExecutor(1) as beside:  # importing what reads tokenizers takes as long as the weights
        reading = beside.submit(
            partial(checkpoint.load_tokenizer, files, folder=tokenizer_path, chat_template=chat_template)
        )
        head, draft, ids = None, None, None
        if found.head:  # before the target, which may take minutes
            head, draft = checkpoint.load_head(
                from_files["draft_model_path"],
                config,
                kind=found.head,
                revision=from_files.get("draft_model_revision"),
                progress=progress,
                target_embedding=lambda: read_headers(files.weights)[EMBED_TENSOR].read(),
            )
            ids = _token_map(from_files.get("token_map"), name, found, config.vocab_size, reading)
        weights = checkpoint.load_params(files, config, progress=progress)
        tokenizer = reading.result()
    if head is not None and draft is not None and ids is not None:
        head, draft = with_token_map(head, draft, target, weights, ids)
    drafter = make_drafter(name, flags, target=target, head=head, backend=backend, automatic=tree)
    if shipped is not None:
        drafter = drafter._replace(note=f"{drafter.note}; the head {shipped.name}, which comes with specjax")
    eos = checkpoint.stop_token_ids(files, tokenizer, config.vocab_size)
    return Loaded(target, Params(weights, draft), tokenizer, drafter, eos, sampled)


def check_algorithm_flags(flags: object) -> None:
    """Refuses what is no mapping from names to values, and text where an algorithm wants a number.

    Raises:
        TypeError: see above; names the argument of `Engine.from_pretrained`.
    """
    if flags is None:
        return
    if not isinstance(flags, Mapping):
        raise TypeError(f"algorithm_flags must be a dict such as {{'num_draft_tokens': 8}}, got {flags!r:.80}")
    for name, value in flags.items():
        if isinstance(value, str) and name not in TEXT_FLAGS:
            raise TypeError(f"algorithm_flags[{name!r}] must be a number, got {value!r:.60}")


def _prepare_kernels(dtype: str) -> None:
    """Has a CPU's kernels compiled, which takes seconds the first time, while the weights are read."""
    if dtype == "float32" and callable_here():
        threading.Thread(target=cpu_kernels.prepare, name="specjax-kernels", daemon=True).start()


class _Asked(NamedTuple):
    """What is known before the model is."""

    algorithm: str
    flags: dict[str, Any]  # how it drafts
    from_files: dict[str, Any]  # HEAD_FLAGS


class _Chosen(NamedTuple):
    """What it comes to."""

    name: str
    found: Algorithm
    flags: dict[str, Any]
    from_files: dict[str, Any]
    tree: tuple[int, int, int] | None  # where no number is given; None: the target's family decides
    shipped: ShippedHead | None  # the head that is loaded, if it is ours


def _asked(algorithm: str, given: Mapping[str, Any], model: str) -> _Asked:
    """Refuses whatever is wrong for every model, and a head that is missing, before anything is fetched.

    Raises:
        ValueError: no such algorithm; a flag that it does not have, or a value out of range; no draft head.
    """
    name, found = algorithm_named(algorithm)
    automatic = is_automatic(algorithm)
    names = ("token_map",) if automatic else HEAD_FLAGS if found.head else ()
    flags = {key: value for key, value in given.items() if key not in HEAD_FLAGS or value is not None}
    from_files = {key: flags.pop(key) for key in names if key in flags}
    if automatic:
        check_automatic(flags)
    else:
        check_flags(name, flags)
        if found.head and "draft_model_path" not in from_files and not checkpoint.may_have_head(model, found.head):
            raise ValueError(_no_head(name))
    return _Asked(algorithm, flags, from_files)


def _chosen(asked: _Asked, files: checkpoint.ModelFiles, config: ModelConfig) -> _Chosen:
    """The algorithm for this model. AUTO is the draft head that ships for it, else n-grams; an algorithm that needs a
    head and is given none drafts with the one that ships. A warning names the flags that AUTO's choice does not have.

    Raises:
        ValueError: a value is out of the range of what AUTO chose, or there is no draft head.
    """
    automatic, path = is_automatic(asked.algorithm), asked.from_files.get("draft_model_path")
    shipped = checkpoint.shipped_head(files, config) if path is None else None
    name, found = algorithm_named(asked.algorithm, shipped=None if shipped is None else shipped.kind)
    if shipped is None or shipped.kind != found.head:
        shipped = None
        if found.head and path is None:
            raise ValueError(_no_head(name))
    flags, from_files = dict(asked.flags), dict(asked.from_files)
    if automatic:
        idle = [key for key in flags if key not in found.flags]
        idle_files = [] if found.head else list(from_files)
        flags = {key: value for key, value in flags.items() if key in found.flags}
        from_files = {key: value for key, value in from_files.items() if key not in idle_files}
        if idle or idle_files:
            names = ", ".join(flag_named(key) for key in (*idle, *idle_files))
            logger.warning("no effect with --speculative-algorithm %s, which %s chose: %s", name, AUTO, names)
    if shipped is None:
        check_flags(name, flags)
        return _Chosen(name, found, flags, from_files, None, None)
    serving = shipped.serving("cpu" if jax.default_backend() == "cpu" else "gpu")
    numbers = [serving.pop(key, None) for key in TREE]
    if None in numbers and numbers != [None] * len(TREE):
        raise ValueError(f"{shipped.folder}/serving.toml has {numbers} for {', '.join(TREE)}; all three are needed")
    flags = serving | flags
    check_flags(name, flags)
    tree = None if None in numbers else (numbers[0], numbers[1], numbers[2])
    return _Chosen(name, found, flags, from_files | {"draft_model_path": str(shipped.folder)}, tree, shipped)


def _no_head(name: str) -> str:
    return f"--speculative-algorithm {name} needs a draft head: --speculative-draft-model-path"


def attention_implementation(name: str | None) -> str | None:
    """The name that the models are made with; None: each call takes what suits the device.

    Raises:
        ValueError: there is no such implementation, or it cannot run here.
    """
    if name is None or name == AUTO_ATTENTION:
        return None
    try:
        implementation_named(name)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"--attention-backend {name}: {error}") from None
    if name == "pallas" and jax.default_backend() == "cpu":
        logger.warning("--attention-backend pallas: interpreted on this CPU, which is for tests and very slow")
    return name


def _token_map(
    given: str | int | None, name: str, found: Algorithm, vocab_size: int, tokenizer: Future[Any]
) -> np.ndarray | None:
    """The ids that the draft may propose; None: all that its head has."""
    if given is None:
        return None
    if not found.takes_token_map:
        logger.warning("--speculative-token-map %s is ignored: %s heads have a vocabulary of their own", given, name)
        return None

    def tokens() -> list[str]:
        known = tokenizer.result().convert_ids_to_tokens(list(range(vocab_size)))
        return [token or "" for token in known]

    return checkpoint.read_token_map(str(given), vocab_size=vocab_size, tokens=tokens)
