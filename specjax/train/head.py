"""A draft head (EAGLE-3, EAGLE-1/2 or MTP) in training: its configuration, first weights, loss and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from specjax import checkpoint
from specjax.cache import Weights
from specjax.checkpoint import ModelFiles
from specjax.config import HeadConfig, ModelConfig
from specjax.drafters import Drafter, TreeShape, eagle_drafter
from specjax.models import make_target
from specjax.models.draft_head import draft_head, init_head_params, output_columns
from specjax.models.head_spec import ALGORITHMS
from specjax.models.target import Target
from specjax.train.data import Rows
from specjax.train.options import ALL_TOKENS, DraftSettings, LossSettings, TrainOptions, aux_layers_of
from specjax.train.unroll import Loss, Objective, Teacher, packed_attention, unroll
from specjax.train.vocab import token_map

FROZEN = ("ids",)  # leaves of a head that are not trained
NORM_SCALE = 0.3
"""Factor on the target's final norm in a new EAGLE-3 head, so that an untrained layer gives flat distributions. On
SmolLM2 the first loss is near a uniform distribution's, and 60,000 tokens reach the loss of 100,000 tokens with 1."""


@dataclass(frozen=True)
class TargetSource:
    """The target of a head, without its weights."""

    files: ModelFiles
    tokenizer: Any
    config: ModelConfig  # in the serving dtype
    eos_ids: tuple[int, ...]


class HeadDraft:
    """A head in training. It is created before data and weights are read, so that wrong settings fail early.

    Trained weights are a flat dict of float32 leaves.

    Raises ValueError or CheckpointError if a setting is wrong, or does not apply to this kind of head.
    """

    def __init__(self, options: TrainOptions, source: TargetSource) -> None:
        settings, target = options.draft, source.config
        self._objective = objective(settings.draft, options.loss)
        if settings.init_from is None:
            self.config, self._init_params = head_config(settings, target, source.eos_ids), None
        else:
            self.config, self._init_params = from_head(settings, target)
        self._options, self._source = options, source
        self._ids: np.ndarray | None = None
        self._scale: Array | None = None

    def choose_vocabulary(self, rows: Rows) -> None:
        """Choose the draft vocabulary of a new head by token counts."""
        if self.config.mapped and self._init_params is None:
            source = self._source
            self._ids = draft_ids(rows, self.config.vocab_size, source.config.vocab_size, source.eos_ids)

    def first_weights(
        self, target_params: Weights, first_batch: Callable[[], tuple[Teacher, Rows]]
    ) -> tuple[Weights, Weights]:
        """Trained and frozen leaves before the first step, float32.

        An EAGLE-3 head's features are divided by their scale in the target's outputs for the first batch.
        """
        params = self._init_params
        if params is None:
            target, seed = make_target(self._source.config), self._options.run.train_seed
            params = new_params(self.config, target, target_params, self._ids, seed=seed)
        weights, frozen = split_params(params)
        if self.config.aux_layers:  # other kinds read normalised features
            teacher, rows = first_batch()
            self._scale = jnp.asarray(feature_scale(np.asarray(teacher.features), rows.segments))
            if self._init_params is not None:
                weights = {**weights, "fc": weights["fc"] / self._scale[:, None]}
        return weights, frozen

    def loss(self, target: Target) -> Loss:
        """The loss in the training dtype, after `first_weights`."""
        config = replace(self.config, dtype=self._options.run.compute_dtype)
        return head_loss(draft_head(config, target, backend=packed_attention), target, self._objective, self._scale)

    def exported(self, weights: Weights, frozen: Weights) -> dict[str, Any]:
        """The head's parameters, with the features' scale in `fc`."""
        leaves = dict(weights)
        if self._scale is not None:
            leaves["fc"] = leaves["fc"] * self._scale[:, None]
        return leaves | dict(frozen)

    def served(self, params: Mapping[str, Any], *dtypes: str) -> dict[str, Any]:
        """`Params.draft`: exported parameters, converted to these dtypes in turn."""
        for dtype in dtypes:
            params = {name: leaf if name in FROZEN else leaf.astype(dtype) for name, leaf in params.items()}
        return dict(params)

    def drafter(self, target: Target, shape: TreeShape) -> Drafter:
        return eagle_drafter(target, replace(self.config, dtype=target.config.dtype), shape)

    @property
    def description(self) -> str:
        """Size and layout, for the model card."""
        aux = self.config.aux_layers
        layers = f", reading the outputs of layers {', '.join(map(str, aux))}" if aux else ""
        return (
            f"One decoder layer of width {self.config.hidden_size}, a vocabulary of {self.config.vocab_size} "
            f"tokens{layers}.\nTrained by `specjax train`, in the layout that specjax, SGLang and vLLM read."
        )


def objective(algorithm: str, settings: LossSettings) -> Objective:
    """The training loss; defaults are the values of the kind's authors."""
    default = Objective(**ALGORITHMS[algorithm].training)
    rounds, first = settings.rounds or len(default.weights), default.weights[0]
    weights = (*default.weights, *(first * 0.8**j for j in range(len(default.weights), rounds)))[:rounds]
    return default._replace(loss=settings.loss or default.loss, weights=weights)


def head_loss(head: Any, target: Target, objective: Any, scale: Float32[Array, "F"] | None = None) -> Loss:
    """The loss of a head that uses `packed_attention`. The head reads features times `scale`."""
    dtype = jnp.dtype(head.config.dtype)

    def loss(params: Weights, target_params: Weights, batch: Rows, teacher: Teacher, key: Array) -> Any:
        if scale is not None:
            teacher = teacher._replace(features=teacher.features * scale.astype(dtype)[None, None])
        return unroll(head, target, params, target_params, batch, teacher, objective, key)

    return loss


def head_config(settings: DraftSettings, target: ModelConfig, ends: Sequence[int] = ()) -> HeadConfig:
    """The configuration of a new head, as wide as its target; `ends` are the target's end tokens.

    Raises ValueError, naming the flag, if a setting does not fit.
    """
    spec, requested, total = ALGORITHMS[settings.draft], settings.draft_vocab_size, target.vocab_size
    if not spec.own_ends and (requested != ALL_TOKENS or settings.aux_layers):
        name = "--aux-layers" if settings.aux_layers else "--draft-vocab-size"
        kinds = ", ".join(other.algorithm for other in ALGORITHMS.values() if other.own_ends)
        raise ValueError(
            f"{name} is for --draft {kinds}; a head of {settings.draft} uses the target's features and output layer"
        )
    if requested > total:
        raise ValueError(f"--draft-vocab-size {requested} is more than the target's {total}")
    if 0 < requested < len(set(ends)):
        raise ValueError(f"--draft-vocab-size {requested} has no room for the model's {len(set(ends))} end tokens")
    aux_layers = aux_layers_of(settings.aux_layers, target.num_layers) if spec.reads_layers else ()
    size = requested or total
    shared = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "norm_epsilon", "rope")
    fields: dict[str, Any] = {name: getattr(target, name) for name in shared} | dict.fromkeys(spec.biases, True)
    if target.latent is not None:  # its query heads share a key; as many ordinary heads would be larger than a layer
        head_dim = target.latent.value_dim
        heads = max(target.hidden_size // head_dim, 1)
        fields |= {"num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    return HeadConfig(
        spec.kind,
        feature_size=target.hidden_size * (len(aux_layers) or 1),
        vocab_size=size,
        aux_layers=aux_layers,
        own_head=spec.own_ends,
        mapped=size < total,
        **fields,
    )


def from_head(settings: DraftSettings, target: ModelConfig) -> tuple[HeadConfig, dict[str, Any]]:
    """The head of --init-from, float32. Raises CheckpointError, or ValueError if a setting contradicts the head."""
    assert settings.init_from is not None
    head, params = checkpoint.load_head(
        settings.init_from, replace(target, dtype="float32"), kind=ALGORITHMS[settings.draft].kind
    )
    for flag, value, actual in (
        ("--draft-vocab-size", settings.draft_vocab_size, head.vocab_size),
        ("--aux-layers", " ".join(settings.aux_layers), " ".join(map(str, head.aux_layers))),
    ):
        if value and value != actual:
            raise ValueError(f"{flag} {value} differs from --init-from {settings.init_from}, {actual}; leave it out")
    return head, dict(params)


def draft_ids(rows: Rows, size: int, vocabulary: int, ends: Sequence[int]) -> Int32[np.ndarray, "W"]:
    """The `size` most frequent tokens with a loss, ascending, always with the end tokens."""
    counts = np.bincount(rows.tokens[rows.loss], minlength=vocabulary)
    return np.sort(token_map(counts.astype(np.int64), size, sorted(ends))).astype(np.int32)


def new_params(
    config: HeadConfig, target: Target, target_params: Weights, ids: np.ndarray | None, *, seed: int
) -> Weights:
    """First weights, float32, for features of unit size (`feature_scale`).

    An EAGLE-3 head starts from the target's output layer, and from its final norm times `NORM_SCALE`.
    """
    params: dict[str, Any] = dict(init_head_params(config, target, jax.random.key(seed)))
    width = params["fc"].shape[0]
    params["fc"] = params["fc"] * (0.02**-1 * width**-0.5)  # deviation 0.02 -> preserve the scale
    if ids is not None:
        params["ids"] = jnp.asarray(ids)
    if config.own_head:
        params["head"] = output_columns(target, target_params, params.get("ids"))
        params["final_norm"] = (target.norm_offset + target_params["final_norm"].astype(jnp.float32)) * NORM_SCALE
    return {name: leaf if name in FROZEN else leaf.astype(jnp.float32) for name, leaf in params.items()}


def split_params(params: Weights) -> tuple[Weights, Weights]:
    """Trained weights, as float32 copies that may be donated, and frozen leaves."""
    weights = {name: jnp.array(leaf, jnp.float32, copy=True) for name, leaf in params.items() if name not in FROZEN}
    return weights, {name: params[name] for name in FROZEN if name in params}


def feature_scale(features: Float[np.ndarray, "B N F"], segments: Int32[np.ndarray, "B N"]) -> Float32[np.ndarray, "F"]:
    """Factors that bring the target's features to about unit size: 1 over their typical magnitude.

    Residual streams have a few very large channels and tokens, and grow with depth. An optimiser step changes all
    weights of `fc` by about the same amount, so without scaling those channels would dominate.
    """
    magnitudes = np.abs(features[segments > 0].astype(np.float32))
    # The median ignores very large tokens; for a normal distribution this is the standard deviation.
    typical = np.median(magnitudes, axis=0) * 1.4826
    floor = max(float(np.median(typical)) * 1e-3, 1e-6)
    return (1 / np.maximum(typical, floor)).astype(np.float32)
