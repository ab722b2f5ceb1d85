"""Training of draft heads (EAGLE-3, EAGLE-1/2, MTP): their description, first weights, features and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from specjax import checkpoint
from specjax.config import HeadConfig, ModelConfig
from specjax.drafters import Drafter, TreeShape, eagle_drafter
from specjax.models import make_target
from specjax.models.draft_head import draft_head, init_head_params, output_columns
from specjax.models.head_spec import ALGORITHMS, default_aux_layers, head_table
from specjax.models.target import Target
from specjax.train.data import Rows
from specjax.train.draft import DraftSource, objective
from specjax.train.export import HEAD_FILES, export_head
from specjax.train.options import ALL_TOKENS, DraftSettings, TrainOptions
from specjax.train.unroll import Loss, Teacher, packed_attention, unroll
from specjax.train.vocab import token_map
from specjax.types import Weights

FROZEN = ("ids",)  # leaves of a head that are not trained
SOFTENED = 0.3
"""A layer that knows nothing yet must not be as sure of it as the target would be. On SmolLM2 a third of the target's
scale begins at a loss near that of a uniform guess, and learns in 60,000 tokens what takes 100,000 with all of it."""


class HeadDraft:
    """A head as it is trained; see `specjax.train.draft.Draft`."""

    files = HEAD_FILES

    def __init__(self, options: TrainOptions, source: DraftSource) -> None:
        wanted, target = options.draft, source.config
        if wanted.keep_layers or wanted.trainable != "all":
            name = "--keep-layers" if wanted.keep_layers else f"--trainable {wanted.trainable}"
            raise ValueError(f"{name} is for --draft STANDALONE; a head of {wanted.draft} is one new layer")
        self._objective = objective(wanted.draft, options.loss)
        if wanted.init_from is None:
            self.config, self._given = head_config(wanted, target, source.eos_ids), None
        else:
            self.config, self._given = from_head(wanted, target)
        self._options, self._source = options, source
        self._training = replace(self.config, dtype=options.run.compute_dtype)
        self._ids: np.ndarray | None = None
        self._scale: Array | None = None
        self.table = head_table(self.config)
        self.features, self.feature_size = self.config.features, self.config.feature_size

    def choose_vocabulary(self, rows: Rows) -> dict[str, Any]:
        if not self.config.mapped:
            return {}
        given, source, size = self._given, self._source, self.config.vocab_size
        if given is None:
            self._ids = draft_ids(rows, size, source.config.vocab_size, source.eos_ids)
        else:
            self._ids = np.asarray(given["ids"])
        return {"draft_vocabulary_coverage": round(coverage(rows, self._ids), 4)}

    def first_params(self, target_params: Weights) -> Weights:
        if self._given is not None:
            return self._given
        target, init = make_target(self._source.config), self._options.draft.init
        seed = self._options.run.train_seed
        return new_params(self.config, target, target_params, self._ids, init=init, seed=seed)

    def split(self, params: Weights, first: Callable[[], tuple[Teacher, Rows]]) -> tuple[Weights, Weights]:
        weights, frozen = split_params(params)
        if self.config.aux_layers:  # heads of other kinds read normalised features
            teacher, rows = first()
            self._scale = jnp.asarray(feature_scale(np.asarray(teacher.features), rows.segments))
            if self._given is not None:
                weights = {**weights, "fc": weights["fc"] / self._scale[:, None]}
        return weights, frozen

    def loss(self, target: Target) -> Loss:
        head = draft_head(self._training, target, backend=packed_attention)
        return head_loss(head, target, self._objective, self._scale)

    def exported(self, weights: Weights, frozen: Weights) -> dict[str, Any]:
        leaves = dict(weights)
        if self._scale is not None:
            leaves["fc"] = leaves["fc"] * self._scale[:, None]
        return leaves | dict(frozen)

    def served(self, params: Mapping[str, Any], *dtypes: str) -> dict[str, Any]:
        def cast(name: str, leaf: Array) -> Array:
            for dtype in () if name in FROZEN else dtypes:
                leaf = leaf.astype(dtype)
            return leaf

        return {name: cast(name, leaf) for name, leaf in params.items()}

    def drafter(self, target: Target, shape: TreeShape) -> Drafter:
        return eagle_drafter(target, replace(self.config, dtype=target.config.dtype), shape)

    @property
    def title(self) -> str:
        return f"{self._options.draft.draft} draft head"

    @property
    def description(self) -> str:
        aux = self.config.aux_layers
        layers = f", reading the outputs of layers {', '.join(map(str, aux))}" if aux else ""
        return (
            f"One decoder layer of width {self.config.hidden_size}, a vocabulary of {self.config.vocab_size} "
            f"tokens{layers}.\nTrained with specjax (`specjax train`); in the layout that specjax, SGLang "
            "and vLLM read."
        )

    def export(self, folder: Path, params: Weights, card: str) -> Path:
        options, export = self._options, self._options.export
        return export_head(
            folder, self.config, params, self._source.config, target_name=options.model.model, card=card,
            dtype=export.export_dtype, license=export.license,
        )  # fmt: skip


def head_loss(head: Any, target: Target, objective: Any, scale: Float32[Array, "F"] | None = None) -> Loss:
    """The loss of a head, made with `packed_attention`. `scale`: of each feature, applied before the head reads it."""
    dtype = jnp.dtype(head.config.dtype)

    def loss(params: Weights, target_params: Weights, batch: Rows, teacher: Teacher, key: Array) -> Any:
        if scale is not None:
            teacher = teacher._replace(features=teacher.features * scale.astype(dtype)[None, None])
        return unroll(head, target, params, target_params, batch, teacher, objective, key)

    return loss


def split_params(params: Weights) -> tuple[Weights, Weights]:
    """The weights, as float32 copies that may be donated, and the frozen leaves."""
    weights = {name: jnp.array(leaf, jnp.float32, copy=True) for name, leaf in params.items() if name not in FROZEN}
    return weights, {name: params[name] for name in FROZEN if name in params}


def head_config(settings: DraftSettings, target: ModelConfig, ends: Sequence[int] = ()) -> HeadConfig:
    """A new head, as wide as its target; its vocabulary must have room for `ends`. ValueError: names the wrong flag."""
    spec, wanted, there = ALGORITHMS[settings.draft], settings.draft_vocab_size, target.vocab_size
    if not spec.own_ends and (wanted != ALL_TOKENS or settings.aux_layers):
        name = "--aux-layers" if settings.aux_layers else "--draft-vocab-size"
        own = ", ".join(other.algorithm for other in ALGORITHMS.values() if other.own_ends)
        raise ValueError(
            f"{name} is for --draft {own}; a head of {settings.draft} reads and gives what its target does"
        )
    if wanted > there:
        raise ValueError(f"--draft-vocab-size {wanted} is more than the target's {there}")
    if 0 < wanted < len(set(ends)):
        raise ValueError(f"--draft-vocab-size {wanted} has no room for the model's {len(set(ends))} end tokens")
    aux_layers = _aux_layers(settings.aux_layers, target.num_layers) if spec.reads_layers else ()
    size = wanted or there
    same = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "norm_epsilon", "rope")
    fields: dict[str, Any] = {name: getattr(target, name) for name in same} | dict.fromkeys(spec.biases, True)
    if target.latent is not None:  # whose query heads, all on one key, would be a head larger than a layer
        head_dim = target.latent.value_dim
        heads = max(target.hidden_size // head_dim, 1)
        fields |= {"num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    return HeadConfig(
        spec.kind,
        feature_size=target.hidden_size * (len(aux_layers) or 1),
        intermediate_size=settings.draft_intermediate_size or target.intermediate_size,
        vocab_size=size,
        aux_layers=aux_layers,
        own_head=spec.own_ends,
        mapped=size < there,
        **fields,
    )


def from_head(settings: DraftSettings, target: ModelConfig) -> tuple[HeadConfig, dict[str, Any]]:
    """The head of --init-from, float32. Raises CheckpointError, or ValueError if a setting says otherwise than it."""
    assert settings.init_from is not None
    head, params = checkpoint.load_head(
        settings.init_from, replace(target, dtype="float32"), kind=ALGORITHMS[settings.draft].kind
    )
    for flag, given, there in (
        ("--draft-vocab-size", settings.draft_vocab_size, head.vocab_size),
        ("--draft-intermediate-size", settings.draft_intermediate_size or 0, head.intermediate_size),
        ("--aux-layers", " ".join(settings.aux_layers), " ".join(map(str, head.aux_layers))),
    ):
        if given and given != there:
            raise ValueError(f"{flag} {given} is not that of --init-from {settings.init_from}, {there}; leave it out")
    return head, dict(params)


def _aux_layers(given: Sequence[str], layers: int) -> tuple[int, ...]:
    """The layers whose outputs an EAGLE-3 head reads. By default EAGLE-3's or, if the target has fewer than 7 layers,
    the first, the middle and the last."""
    if given:
        if not all(text.isdecimal() and int(text) < layers for text in given) or len(set(given)) < len(given):
            raise ValueError(f"--aux-layers must be different layers from 0 to {layers - 1}, got {' '.join(given)}")
        return tuple(map(int, given))
    if layers < 3:
        raise ValueError(f"the target has {layers} layers, and --aux-layers are three by default; give --aux-layers")
    return default_aux_layers(layers) if layers >= 7 else (0, (layers - 1) // 2, layers - 1)


def draft_ids(rows: Rows, size: int, vocabulary: int, ends: Sequence[int]) -> Int32[np.ndarray, "W"]:
    """The `size` most frequent tokens under the loss mask, ascending; the end tokens are always among them."""
    counts = np.bincount(rows.tokens[rows.loss], minlength=vocabulary)
    return np.sort(token_map(counts.astype(np.int64), size, sorted(ends))).astype(np.int32)


def coverage(rows: Rows, ids: Int32[np.ndarray, "W"]) -> float:
    """The share of tokens under the loss mask that are among the ids."""
    tokens = rows.tokens[rows.loss]
    return float(np.isin(tokens, ids).mean()) if tokens.size else 0.0


def new_params(
    config: HeadConfig, target: Target, target_params: Weights, ids: np.ndarray | None, *, init: str, seed: int
) -> Weights:
    """First weights, float32. `fc` is for features of unit size, see `feature_scale`.

    With the init `target`, an EAGLE-3 head's final norm and language model head are the target's, the norm `SOFTENED`.
    """
    params: dict[str, Any] = dict(init_head_params(config, target, jax.random.key(seed)))
    width = params["fc"].shape[0]
    params["fc"] = params["fc"] * (0.02**-1 * width**-0.5)  # from a deviation of 0.02 to one that keeps the size
    if ids is not None:
        params["ids"] = jnp.asarray(ids)
    if init == "target" and config.own_head:
        params["head"] = output_columns(target, target_params, params.get("ids"))
        params["final_norm"] = (target.norm_offset + target_params["final_norm"].astype(jnp.float32)) * SOFTENED
    return {name: leaf if name == "ids" else leaf.astype(jnp.float32) for name, leaf in params.items()}


def feature_scale(features: Float[np.ndarray, "B N F"], segments: Int32[np.ndarray, "B N"]) -> Float32[np.ndarray, "F"]:
    """What brings each of the target's features to about unit size: 1 over its typical magnitude.

    Residual streams hold a few enormous channels and tokens, and grow with depth. An optimiser step moves all of fc's
    weights by about as much, so unscaled it would mostly change what the head reads of those channels. An exported head
    has the scale in its fc.
    """
    shown = np.abs(features[segments > 0].astype(np.float32))
    # Few tokens are enormous: the median ignores them. Of a normal distribution this is the deviation.
    typical = np.median(shown, axis=0) * 1.4826
    floor = max(float(np.median(typical)) * 1e-3, 1e-6)
    return (1 / np.maximum(typical, floor)).astype(np.float32)
