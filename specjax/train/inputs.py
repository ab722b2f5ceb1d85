"""What a run starts from: files, data, the head and what it minimises; checked before the target's weights are read."""

from __future__ import annotations

import hashlib
import os
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32

from specjax import checkpoint
from specjax.config import HeadConfig, ModelConfig
from specjax.models import make_target
from specjax.models.draft_head import init_head_params, output_columns
from specjax.models.head_spec import ALGORITHMS, default_aux_layers
from specjax.models.target import Target
from specjax.train.corpus import report
from specjax.train.data import Example, Rows, load_examples, pack, split
from specjax.train.export import other_files
from specjax.train.options import ALL_TOKENS, REPORTING, DraftSettings, LossSettings, TrainOptions
from specjax.train.unroll import Objective
from specjax.train.vocab import token_map
from specjax.types import Weights

SOFTENED = 0.3
"""A layer that knows nothing yet must not be as sure of it as the target would be. On SmolLM2 a third of the target's
scale begins at a loss near that of a uniform guess, and learns in 60,000 tokens what takes 100,000 with all of it."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run, except the target's weights."""

    files: checkpoint.ModelFiles
    tokenizer: Any
    config: ModelConfig  # in the serving dtype
    rows: Rows
    held_back: list[Example]
    head: HeadConfig
    given: dict[str, Any] | None  # the weights of --init-from, float32
    ids: np.ndarray | None  # the draft's vocabulary, if it differs from the target's
    eos_ids: tuple[int, ...]
    facts: dict[str, Any]  # of the data, for the log and the card


def read_data(options: TrainOptions, tokenizer: Any, target: ModelConfig) -> tuple[Rows, list[Example], dict[str, Any]]:
    """Packed rows, held-back examples, and counts. Raises ValueError or OSError: there is nothing to learn from."""
    given, seed = options.data, options.data.data_seed
    paths = given.data + given.text_data
    if not paths:
        raise ValueError("nothing to learn from: give --data or --text-data")
    for flag, files in {"--data": given.data, "--text-data": given.text_data}.items():
        if len(set(files)) < len(files):
            raise ValueError(f"{flag} names a file twice: {' '.join(files)}")
    load = partial(
        load_examples, tokenizer=tokenizer, vocabulary=target.vocab_size, progress=True,
        max_length=min(given.row_length, target.max_positions),
    )  # fmt: skip
    answers, texts = load(given.data, loss_on=given.loss_on), load(given.text_data, loss_on="all")
    report([*answers.skipped, *texts.skipped])
    there, held, drawn = len(answers.examples), given.held_back, texts.examples
    if held and held >= there and there + len(drawn):
        raise ValueError(f"--held-back {held} must be less than the {there} usable examples of --data")
    held = min(64, there // 2) if held is None else min(held, there)
    kept, held_back = split(answers.examples, held, seed)
    if given.text_skip:
        if given.text_skip >= len(drawn):
            raise ValueError(f"--text-skip {given.text_skip} leaves none of the {len(drawn)} examples of --text-data")
        drawn, _ = split(drawn, given.text_skip, seed)
    if 0 < given.text_examples < len(drawn):
        _, drawn = split(drawn, given.text_examples, seed)
    examples = [*kept, *drawn]
    if not examples:
        raise ValueError(f"--data and --text-data hold no example to learn from: {', '.join(paths):.300}")
    rows = pack(examples, given.row_length, seed)
    facts = {
        "files": [Path(path).name for path in paths],
        "examples": len(examples),
        "texts": len(drawn),
        "held_back": len(held_back),
        "bad_lines": len(answers.skipped) + len(texts.skipped),
        "truncated": answers.truncated + texts.truncated,
        "rows": len(rows.tokens),
        "tokens": int((rows.segments > 0).sum()),
        "loss_tokens": int(rows.loss.sum()),
    }
    return rows, held_back, facts


def prepare(options: TrainOptions) -> Inputs:
    """Read everything but the target's weights. Raises CheckpointError, ValueError, OSError: an input is wrong."""
    model, wanted, batch = options.model, options.draft, options.run.batch_size
    if model.quantization not in ("auto", "none"):
        advice = "a head learns from a checkpoint's own weights; leave the flag out"
        raise ValueError(f"--quantization {model.quantization} is no use here: {advice}")
    devices = jax.local_device_count()
    if batch % devices:
        raise ValueError(f"--batch-size {batch} cannot be spread over {devices} devices; give a multiple")
    if (place := options.export.export) is not None:
        folder = Path(place).absolute()
        parent = next(each for each in (folder, *folder.parents) if each.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(f"--export {place} cannot be written: {parent} is no folder that may be written to")
        if others := other_files(folder):
            raise ValueError(f"--export {place} holds other things than a head: {', '.join(others)[:80]}; give another")
    objective(wanted.draft, options.loss)
    files = checkpoint.resolve(model.model, revision=model.revision, progress=True)
    config = checkpoint.model_config(files.config, dtype=model.dtype)
    tokenizer = checkpoint.load_tokenizer(files, folder=model.tokenizer_path, chat_template=model.chat_template)
    eos = checkpoint.stop_token_ids(files, tokenizer, config.vocab_size)
    if wanted.init_from is None:
        head, params = head_config(wanted, config, eos), None
    else:
        head, params = from_head(wanted, config)
    rows, held_back, facts = read_data(options, tokenizer, config)
    ids = None
    if head.mapped:
        ids = draft_ids(rows, head.vocab_size, config.vocab_size, eos) if params is None else np.asarray(params["ids"])
        facts["draft_vocabulary_coverage"] = round(coverage(rows, ids), 4)
    return Inputs(files, tokenizer, config, rows, held_back, head, params, ids, eos, facts)


def load(options: TrainOptions, inputs: Inputs) -> tuple[Weights, Weights]:
    """The target's parameters in its serving dtype, and the head's first parameters and ids, float32."""
    target_params = checkpoint.load_params(inputs.files, inputs.config, quantization="none", progress=True)
    if inputs.given is not None:
        return target_params, inputs.given
    target, init, seed = make_target(inputs.config), options.draft.init, options.run.train_seed
    return target_params, new_params(inputs.head, target, target_params, inputs.ids, init=init, seed=seed)


def identity(options: TrainOptions, inputs: Inputs) -> dict[str, Any]:
    """The settings that a resumed run must share with the run before."""
    given = ChainMap(*asdict(options).values())
    found = {name.replace("_", "-"): value for name, value in given.items() if name not in REPORTING}
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in inputs.rows)).hexdigest()
    return found | {
        "held-back": len(inputs.held_back),
        "content of the data": digest[:16],
        "devices": jax.local_device_count(),
    }


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


def objective(algorithm: str, settings: LossSettings) -> Objective:
    """What is minimised; settings that are not given are as the kind's authors train it. ValueError: wrong weights."""
    default = Objective(**ALGORITHMS[algorithm].training)
    first, given = default.weights[0], " ".join(settings.round_weights)
    try:
        weights = tuple(map(float, settings.round_weights))
    except ValueError:
        raise ValueError(f"--round-weights must be numbers, got {given}") from None
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"--round-weights must be at least 0, got {given}")
    if weights and not any(weights):
        raise ValueError("--round-weights must not all be 0: nothing would be learnt")
    rounds = settings.rounds or len(weights or default.weights)
    if not weights:
        usual = default.weights[:rounds] if len(default.weights) > 1 else ()
        weights = (*usual, *(first * 0.8**j for j in range(len(usual), rounds)))
    if len(weights) != rounds:
        raise ValueError(f"--round-weights gives {len(weights)} weights for {rounds} --rounds; give one each")
    scale = 1.0 if settings.loss_weight is None else settings.loss_weight / first
    changes = {"loss": settings.loss, "regression": settings.regression_weight, "noise": settings.feature_noise}
    return default._replace(
        weights=tuple(weight * scale for weight in weights),
        temperature=settings.teacher_temperature,
        **{name: value for name, value in changes.items() if value is not None},
    )
