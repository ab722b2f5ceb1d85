"""A draft head in training (EAGLE-3, EAGLE-1/2, MTP or a block head): configuration, first weights, loss and export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from specjax.checkpoint.block_head import MARKOV_HEADS, default_block_features
from specjax.config import BlockConfig, HeadConfig, ModelConfig
from specjax.drafters import Drafter, TreeShape, block_drafter, eagle_drafter
from specjax.models import make_target
from specjax.models.draft_head import init_head_params, output_columns
from specjax.models.head_spec import ALGORITHMS, NORMS
from specjax.models.target import Target
from specjax.train.data import Rows
from specjax.train.export import check_first_layer
from specjax.train.losses import BLOCKS, BlockObjective, Loss, Objective, Teach, Teacher, head_loss, with_dtype
from specjax.train.options import ALL_TOKENS, BlockSettings, DraftSettings, LossSettings, TrainOptions, aux_layers_of
from specjax.train.vocab import token_map

FROZEN = ("ids",)  # leaves of a head that are not trained
CONV_TAPS, CONV_GROUP = 2, 16  # of a new DFLASH2 head: slots that a convolution mixes, channels with equal kernels
NORM_SCALE = 0.3
"""Factor on the target's final norm in a new EAGLE-3 or block head, so that an untrained layer gives flat
distributions. On SmolLM2 the first loss of EAGLE-3 is near a uniform distribution's, and 60,000 tokens reach the loss
of 100,000 tokens with 1."""


@dataclass(frozen=True)
class TargetSource:
    """The target of a head, without its weights."""

    files: ModelFiles
    tokenizer: Any
    config: ModelConfig  # in the serving dtype
    eos_ids: tuple[int, ...]


class HeadDraft:
    """A head in training. It is created before data and weights are read, so that wrong settings fail early.

    Trained weights are a dict of float32 leaves, of block heads with a dict for each layer.

    Raises ValueError or CheckpointError if a setting is wrong, or does not apply to this kind of head.
    """

    def __init__(self, options: TrainOptions, source: TargetSource) -> None:
        self._options, self._source, settings, name = options, source, options.draft, options.draft.draft
        self._init_params: dict[str, Any] | None = None
        self._scale: Array | None = None
        block = BLOCKS.get(name)
        self._objective = objective(name, options.loss) if block is None else block_objective(options)
        if block is None and options.block != BlockSettings():
            raise ValueError(f"the settings of [block] are for --draft {', '.join(BLOCKS)}, not {name}")
        readers = [spec.algorithm for spec in ALGORITHMS.values() if spec.reads_layers]
        if name not in readers and (norms := [norm for norm in NORMS if getattr(settings, norm)]):
            raise ValueError(f"--{norms[0].replace('_', '-')} is for --draft {', '.join(readers)}, not {name}")
        if settings.init_from is not None:
            table = None if block is None else options.block
            self.config, self._init_params = from_head(settings, source.config, table)
        elif block is None:
            self.config = head_config(settings, source.config, source.eos_ids)
        else:
            self.config = block_head_config(options, source)
        if isinstance(self.config, BlockConfig):
            most, steps = self.config.drafts_of(self.config.block), options.measure.measure_steps
            if steps > most:
                problem = f"is more than the {most} tokens that a block drafts; give {most}"
                raise ValueError(f"--measure-steps {steps} {problem}")

    def first_weights(
        self, target_params: Weights, rows: Rows, first_batch: Callable[[], tuple[Teacher, Rows]]
    ) -> tuple[Weights, Weights]:
        """Trained and frozen leaves before the first step, float32.

        The most frequent tokens of `rows` are the draft vocabulary of a new head. Features that are outputs of layers
        are divided by their scale in the target's outputs for the first batch, unless a norm before `fc` follows: the
        export could not fold the scale into `fc`.
        """
        params, target, config = self._init_params, self._source.config, self.config
        if params is None:
            ids = draft_ids(rows, config.vocab_size, target.vocab_size, self._source.eos_ids) if config.mapped else None
            params = new_params(config, make_target(target), target_params, ids, seed=self._options.run.train_seed)
        weights, frozen = split_params(params)
        normed = not config.aux_layers or config.norm_before_fc or config.fc_norm  # before fc
        if not normed:
            teacher, batch = first_batch()
            self._scale = jnp.asarray(feature_scale(np.asarray(teacher.features), batch.segments))
            if self._init_params is not None:
                weights = {**weights, "fc": weights["fc"] / self._scale[:, None]}
            elif isinstance(config, BlockConfig):
                # The context is the last feature, as the target's layer that was copied reads it.
                last = 1 / self._scale[-config.hidden_size :]
                fc = jnp.zeros_like(weights["fc"]).at[-len(last) :].set(jnp.diag(last / last.mean()))
                weights = {**weights, "fc": fc, "feature_norm": jnp.copy(weights["layers_0"]["attention_norm"])}
        return weights, frozen

    def loss(self, target: Target, frozen: Weights, *, teach: Teach | None = None, rounds: int | None = None) -> Loss:
        """The loss in the training dtype, after `first_weights`. `rounds`: for measuring, without noise."""
        config, objective = replace(self.config, dtype=self._options.run.compute_dtype), self._objective
        if rounds is not None and isinstance(objective, Objective):
            objective = objective._replace(weights=(1.0,) * rounds, noise=0.0)
        return head_loss(config, target, objective, frozen=frozen, scale=self._scale, teach=teach)

    def exported(self, weights: Weights, frozen: Weights) -> dict[str, Any]:
        """The head's parameters, with the features' scale in `fc`."""
        scaled = {} if self._scale is None else {"fc": weights["fc"] * self._scale[:, None]}
        return {**weights, **scaled, **frozen}

    def drafter(self, target: Target, shape: TreeShape) -> Drafter:
        config = replace(self.config, dtype=target.config.dtype)
        if isinstance(config, BlockConfig):
            return block_drafter(target, config, shape, block=config.block)
        return eagle_drafter(target, config, shape)

    @property
    def description(self) -> str:
        """Size and layout, for the model card."""
        config, aux = self.config, self.config.aux_layers
        layers = f", reading the outputs of layers {', '.join(map(str, aux))}" if aux else ""
        layers += "".join(f", {norm}" for norm in NORMS if getattr(config, norm))
        return (
            f"Decoder layers: {config.layers}, of width {config.hidden_size}; a vocabulary of {config.vocab_size} "
            f"tokens{layers}.\nTrained by `specjax train`, in a layout that other engines read (`train/export.py`)."
        )


def block_objective(options: TrainOptions) -> BlockObjective:
    """The training loss of a block head. Raises ValueError for a setting that does not apply to it."""
    name, chosen = options.draft.draft, BLOCKS[options.draft.draft]
    if options.loss != LossSettings():
        raise ValueError(f"--loss and --rounds are for --draft {', '.join(ALGORITHMS)}; {name} has its own loss")
    if options.block.walk_rank is not None and chosen.walk == "none":
        raise ValueError(f"--walk-rank is for --draft DSPARK and DFLASH2; {name} has no walk")
    return chosen._replace(anchors=options.block.anchors or max(options.data.row_length // 4, 1))


def objective(algorithm: str, settings: LossSettings) -> Objective:
    """The training loss; defaults are the values of the kind's authors."""
    default = Objective(**ALGORITHMS[algorithm].training)
    rounds, first = settings.rounds or len(default.weights), default.weights[0]
    weights = (*default.weights, *(first * 0.8**j for j in range(len(default.weights), rounds)))[:rounds]
    return default._replace(loss=settings.loss or default.loss, weights=weights)


def head_config(settings: DraftSettings, target: ModelConfig, ends: Sequence[int] = ()) -> HeadConfig:
    """The configuration of a new head, as wide as its target; `ends` are the target's end tokens.

    Raises ValueError, naming the flag, if a setting does not fit.
    """
    spec, requested = ALGORITHMS[settings.draft], settings.draft_vocab_size
    if not spec.own_ends and (requested != ALL_TOKENS or settings.aux_layers):
        name = "--aux-layers" if settings.aux_layers else "--draft-vocab-size"
        kinds = ", ".join((*(other.algorithm for other in ALGORITHMS.values() if other.own_ends), *BLOCKS))
        raise ValueError(
            f"{name} is for --draft {kinds}; a head of {settings.draft} uses the target's features and output layer"
        )
    size = _vocabulary(requested, target, ends)
    aux_layers = aux_layers_of(settings.aux_layers, target.num_layers) if spec.reads_layers else ()
    check_first_layer(aux_layers, target.family)
    fields: dict[str, Any] = _layer_fields(target) | dict.fromkeys(spec.biases, True)
    return HeadConfig(
        spec.kind, feature_size=target.hidden_size * (len(aux_layers) or 1), vocab_size=size, aux_layers=aux_layers,
        own_head=spec.own_ends, mapped=size < target.vocab_size,
        **{norm: bool(getattr(settings, norm)) for norm in NORMS}, **fields,
    )  # fmt: skip


def block_head_config(options: TrainOptions, source: TargetSource) -> BlockConfig:
    """The configuration of a new block head; see `head_config`."""
    block, target, layers = options.block, source.config, options.block.draft_layers or 5
    mask = max(source.tokenizer.get_vocab().values()) + 1 if block.mask_token is None else block.mask_token
    if mask >= target.vocab_size:
        raise ValueError(
            f"--mask-token {mask} is not one of the model's {target.vocab_size} ids; give a token that texts lack"
        )
    size = _vocabulary(options.draft.draft_vocab_size, target, source.eos_ids)
    default = default_block_features(target.num_layers, layers)
    # The output of the last layer is not read, since other engines return it normalised.
    aux_layers = aux_layers_of(options.draft.aux_layers, target.num_layers - 1, default)
    own = size < target.vocab_size
    return BlockConfig(
        feature_size=target.hidden_size * len(aux_layers), vocab_size=size, aux_layers=aux_layers, own_head=own,
        mapped=own, layers=layers, block=block.block_size or 16, mask_token=mask, from_anchor=False,
        windows=(None,) * layers, causal=(False,) * layers, **_layer_fields(target),
        **_walk_fields(options.draft.draft, block, target.hidden_size),
    )  # fmt: skip


def _walk_fields(algorithm: str, block: BlockSettings, width: int) -> dict[str, Any]:
    walk = BLOCKS[algorithm].walk
    fields = {"walk": walk, "rank": 0 if walk == "none" else block.walk_rank or 256}
    if walk != "selector":
        return fields
    if width % CONV_GROUP:
        raise ValueError(f"--draft {algorithm} needs a head whose width is a multiple of {CONV_GROUP}, not {width}")
    return fields | {"conv_taps": CONV_TAPS, "conv_groups": width // CONV_GROUP}


def _vocabulary(requested: int, target: ModelConfig, ends: Sequence[int]) -> int:
    """The size of the draft vocabulary."""
    if requested > target.vocab_size:
        raise ValueError(f"--draft-vocab-size {requested} is more than the target's {target.vocab_size}")
    if 0 < requested < len(set(ends)):
        raise ValueError(f"--draft-vocab-size {requested} has no room for the model's {len(set(ends))} end tokens")
    return requested or target.vocab_size


def _layer_fields(target: ModelConfig) -> dict[str, Any]:
    """Sizes of a layer, as in the target."""
    shared = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "norm_epsilon", "rope")
    fields: dict[str, Any] = {name: getattr(target, name) for name in shared}
    if target.latent is not None:  # its query heads share a key; as many ordinary heads would be larger than a layer
        head_dim = target.latent.value_dim
        heads = max(target.hidden_size // head_dim, 1)
        fields |= {"num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    return fields


def from_head(
    settings: DraftSettings, target: ModelConfig, block: BlockSettings | None = None
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The head of --init-from, float32. A DFLASH head gets the further parts of a DSPARK or DFLASH2 head.

    Raises CheckpointError, or ValueError if a setting contradicts the head.
    """
    assert settings.init_from is not None
    kind = ALGORITHMS[settings.draft].kind if block is None else BlockConfig.kind
    target = replace(target, dtype="float32")
    head, loaded = checkpoint.load_head(settings.init_from, target, kind=kind, norm_output=settings.norm_output)
    assert isinstance(head, HeadConfig)
    if head.gemma_layers or (head.mask_token is not None and not isinstance(head, BlockConfig)):
        kind = "Gemma 4's layers" if head.gemma_layers else "masks (P-EAGLE)"
        raise ValueError(f"--init-from {settings.init_from} is a head with {kind}, which specjax does not train")
    params: dict[str, Any] = dict(loaded)
    stated: list[tuple[str, Any, Any]] = [
        ("--draft-vocab-size", settings.draft_vocab_size or None, head.vocab_size),
        ("--aux-layers", " ".join(settings.aux_layers) or None, " ".join(map(str, head.aux_layers))),
        ("--norm-before-fc", settings.norm_before_fc or None, head.norm_before_fc),
        ("--fc-norm", settings.fc_norm or None, head.fc_norm),
    ]
    if isinstance(head, BlockConfig) and block is not None:
        wanted = _walk_fields(settings.draft, block, head.hidden_size)
        if head.walk == "none" and wanted["walk"] != "none":
            head = replace(head, **wanted)
            for name, leaf in init_head_params(head, make_target(target), jax.random.key(0)).items():
                params[name] = {**leaf, **params[name]} if name.startswith("layers_") else params.get(name, leaf)
        elif head.walk != wanted["walk"] and not {head.walk, wanted["walk"]} <= {*MARKOV_HEADS}:
            raise ValueError(f"--init-from {settings.init_from} has the walk {head.walk}, not one of {settings.draft}")
        stated += [
            ("--block-size", block.block_size, head.block), ("--draft-layers", block.draft_layers, head.layers),
            ("--mask-token", block.mask_token, head.mask_token), ("--walk-rank", block.walk_rank, head.rank),
        ]  # fmt: skip
    for flag, value, actual in stated:
        if value is not None and value != actual:
            raise ValueError(f"{flag} {value} differs from --init-from {settings.init_from}, {actual}; leave it out")
    return head, params


def draft_ids(rows: Rows, size: int, vocabulary: int, ends: Sequence[int]) -> Int32[np.ndarray, "W"]:
    """The `size` most frequent tokens with a loss, ascending, always with the end tokens."""
    counts = np.bincount(rows.tokens[rows.loss], minlength=vocabulary)
    return np.sort(token_map(counts.astype(np.int64), size, sorted(ends))).astype(np.int32)


def new_params(
    config: HeadConfig, target: Target, target_params: Weights, ids: np.ndarray | None, *, seed: int
) -> Weights:
    """First weights, float32, for features of unit size (`feature_scale`).

    An EAGLE-3 or block head starts from the target's output layer, and from its final norm times `NORM_SCALE`. A block
    head's layers start from the target's last ones, where shapes are equal.
    """
    params: dict[str, Any] = dict(init_head_params(config, target, jax.random.key(seed)))
    width = params["fc"].shape[0]
    params["fc"] = params["fc"] * (0.02**-1 * width**-0.5)  # deviation 0.02 -> preserve the scale
    if ids is not None:
        params["ids"] = jnp.asarray(ids)
    if config.own_head:
        params["head"] = output_columns(target, target_params, params.get("ids"))
    if config.aux_layers:
        params["final_norm"] = (target.norm_offset + target_params["final_norm"].astype(jnp.float32)) * NORM_SCALE
    for i in range(config.layers if isinstance(config, BlockConfig) else 0):
        copied = target_params[f"layers_{target.config.num_layers - config.layers + i}"]
        for name, leaf in params[f"layers_{i}"].items():
            if name in copied and getattr(copied[name], "shape", None) == leaf.shape:
                offset = target.norm_offset if name.endswith("_norm") else 0.0
                params[f"layers_{i}"][name] = copied[name].astype(jnp.float32) + offset
    return with_dtype(params, "float32")


def split_params(params: Weights) -> tuple[Weights, Weights]:
    """Trained weights, as float32 copies that may be donated, and frozen leaves."""
    trained = {name: leaf for name, leaf in params.items() if name not in FROZEN}
    weights = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), trained)
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
