"""What `specjax.load` would make of a model's name, without its weights: from configs and the headers of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np

from specjax import checkpoint
from specjax.checkpoint import CheckpointError
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.drafters import Auto, Drafter, DraftOptions, Params, StandaloneParams
from specjax.drafters.factories import make_speculation
from specjax.drafters.options import ModelOptions
from specjax.load import choose, head_quantization, model_quantization, requested
from specjax.models import family, make_target, table
from specjax.models.blocks import key_value_spec
from specjax.models.draft_head import with_vocabulary
from specjax.models.head_spec import head_reads, head_sizes, head_table
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import Bits, Leaf, Sizes, Table, dimensions, leaves_of, map_leaves
from specjax.models.target import Target


@dataclass(frozen=True, eq=False)
class Outline:
    target: Target
    params: Params  # `jax.ShapeDtypeStruct` leaves; the draft's may be arrays that a drafter of the user's made
    drafter: Drafter
    head: HeadConfig | MtpConfig | None  # of the draft head, if the drafter has one
    model: Target | None  # the draft model, if the drafter has one
    bits: Bits | None  # of the target's quantised weights
    draft_bits: Bits | None  # of the draft's
    headers: bool  # whether there were tensors' headers, or config.json alone

    @property
    def draft_pages(self) -> Any:
        """What the draft keeps of a token, a pytree of `PageSpec`s; None: nothing."""
        if self.model is not None:
            return self.model.pages
        if isinstance(self.head, MtpConfig):
            return (family(self.head.layer).layer.page_spec(self.head.layer),) * self.head.count
        return None if self.head is None else key_value_spec(self.head)


def outline(
    model: str,
    *,
    draft: DraftOptions | str = Auto.algorithm,
    dtype: str = "auto",
    quantization: str = "auto",
    revision: str | None = None,
    platform: str | None = None,
    progress: bool = True,
) -> Outline:
    """Describes the target and the drafter, for `platform` "cpu" or "gpu"; None: this process's. Other arguments and
    errors are those of `specjax.load.load`."""
    options, plugin = requested(model, draft, platform=platform)
    files = checkpoint.resolve(model, revision=revision, progress=progress, outline=True)
    config = checkpoint.model_config(files.config, dtype=dtype, platform=platform)
    quantization = checkpoint.effective_quantization(files.name, files.config, config, quantization)
    chosen = choose(options, files, config, platform)
    target = make_target(config)
    weights = _shapes(table(config), dimensions(config), config.dtype)
    bits = _bits(files.config, quantization, config, platform)
    if plugin is not None:
        made = make_speculation(plugin, target)
        return Outline(target, Params(weights, made.params), made.drafter, None, None, bits, None, bool(files.weights))
    head, kind, draft_bits = chosen.mtp or _head(chosen.options, target, progress), "none", None
    if head is not None:
        kind = head_quantization(chosen, files, config, quantization, platform)
        stored = {} if chosen.mtp is None else dict(files.config)
        if stored and checkpoint.mtp_method(files, config) is None:
            stored.pop("quantization_config", None)
        draft_bits = _bits(stored, kind, config, platform, own_embedding=chosen.mtp is None)
    drafts = _model(chosen.options, dtype, platform, progress)
    if drafts is not None:
        drafts, kind, draft_bits = drafts
    drafter = chosen.drafter(target, head, model=drafts, platform=platform, quantization=kind)
    params: Any = None if head is None else _shapes(*head_parameters(head, target), head.dtype)
    if drafts is not None:
        own = drafts.config
        params = StandaloneParams(_shapes(table(own), dimensions(own), own.dtype))
    return Outline(target, Params(weights, params), drafter, head, drafts, bits, draft_bits, bool(files.weights))


def _bits(
    hf_config: Mapping[str, Any], quantization: str, config: ModelConfig, platform: str | None,
    own_embedding: bool = False,
) -> Bits | None:  # fmt: skip
    """`bits_per_weight`; an embedding that is only looked up is never quantised at load."""
    on_cpu = (platform or jax.default_backend()) == "cpu"
    bits = checkpoint.bits_per_weight(hf_config, quantization, keeps_half=on_cpu and config.dtype == "float32")
    looked_up = quantization != "auto" and (own_embedding or not config.tied_embeddings)
    return bits and bits._replace(embed=not looked_up)


def _model(
    options: DraftOptions, dtype: str, platform: str | None, progress: bool
) -> tuple[Target, str, Bits | None] | None:
    """The model that drafts, how its weights are quantised, and their bits. The tokenizers are not compared."""
    if options.needs is None or options.kind is not None:
        return None
    options = cast(ModelOptions, options)
    path = cast(str, options.path)
    try:
        files = checkpoint.resolve(path, revision=options.revision, progress=progress, outline=True)
        config = checkpoint.model_config(files.config, dtype=dtype, platform=platform)
        kind = model_quantization(options, files, config, platform)
        return make_target(config), kind, _bits(files.config, kind, config, platform)
    except CheckpointError as error:
        raise CheckpointError(f"{type(options).__name__}.path {error}") from error


def head_parameters(head: HeadConfig | MtpConfig, target: Target) -> tuple[Table, Sizes]:
    if isinstance(head, MtpConfig):
        return mtp_table(head), mtp_sizes(head)
    return head_table(head), head_sizes(head, target.config.vocab_size)


def level_reads(head: HeadConfig | MtpConfig) -> tuple[list[Leaf], list[Leaf]]:
    """As `head_reads`; of several heads the first stands for all."""
    if not isinstance(head, MtpConfig):
        return head_reads(head)
    return list(leaves_of(mtp_table(replace(head, count=1)))), []


def _shapes(table: Table, sizes: Sizes, dtype: str) -> dict[str, Any]:
    return map_leaves(table, lambda leaf: jax.ShapeDtypeStruct(leaf.shape(sizes), np.dtype(leaf.dtype or dtype)))


def _head(options: DraftOptions, target: Target, progress: bool) -> HeadConfig | None:
    if options.kind is None:
        return None
    options = cast(ModelOptions, options)
    owner, config = type(options).__name__, target.config
    try:
        given = {"kind": cast(str, options.kind), "revision": options.revision, "progress": progress}
        head = checkpoint.describe_head(cast(str, options.path), config, **given)
    except CheckpointError as error:
        raise CheckpointError(f"{owner}.path {error}") from error
    if (token_map := getattr(options, "token_map", None)) is None:
        return head
    if re.fullmatch("[0-9]+", str(token_map)):  # that many of a map that comes with specjax, whatever they are
        return with_vocabulary(head, int(token_map))
    try:
        ids = checkpoint.read_token_map(str(token_map), vocab_size=config.vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{owner}.token_map {error}") from error
    return with_vocabulary(head, len(ids))
