"""From a model's name and an algorithm's to all that an engine is made of. Refuses early what cannot work."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from specjax_kernels import implementation_named

from specjax import checkpoint
from specjax.checkpoint.mappings import EMBED_TENSOR
from specjax.checkpoint.readers import read_headers
from specjax.drafters import Algorithm, Drafter, Params, algorithm_named, check_flags, make_drafter
from specjax.models import make_target
from specjax.models.eagle_head import with_token_map
from specjax.models.protocol import Target

logger = logging.getLogger(__name__)

AUTO_ATTENTION = "auto"
"""The attention implementation that suits the device."""

HEAD_FLAGS = ("draft_model_path", "draft_model_revision", "token_map")
"""Flags of an algorithm with a draft head that say what is loaded; the others say how it drafts."""


class Loaded(NamedTuple):
    target: Target
    params: Params
    tokenizer: Any
    drafter: Drafter
    eos_ids: tuple[int, ...]


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
) -> Loaded:
    """The target, its tokenizer and the drafter, with the parameters of both models. See `Engine.from_pretrained`.

    Raises:
        CheckpointError: a model cannot be found or read, or the draft head does not fit the target. ValueError: a flag
            is wrong.
    """
    name, found = algorithm_named(algorithm)
    flags = dict(algorithm_flags or {})
    from_files = {key: flags.pop(key) for key in HEAD_FLAGS if flags.get(key) is not None and found.head}
    check_flags(name, flags)
    if found.head and "draft_model_path" not in from_files:
        raise ValueError(f"--speculative-algorithm {name} needs a draft head: --speculative-draft-model-path")

    backend = attention_implementation(backend)
    files = checkpoint.resolve(model, revision=revision, progress=progress)
    config = checkpoint.model_config(files.config, dtype=dtype)
    if config.dtype == "float32":
        # The default on recent GPUs is TF32; float32 is promised.
        jax.config.update("jax_default_matmul_precision", "highest")
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
    drafter = make_drafter(name, flags, target=target, head=head, backend=backend)
    eos = checkpoint.stop_token_ids(files)
    if not eos and isinstance(tokenizer.eos_token_id, int):
        eos = (tokenizer.eos_token_id,)
    return Loaded(target, Params(weights, draft), tokenizer, drafter, eos)


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
