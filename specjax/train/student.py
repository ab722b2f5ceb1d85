"""Training of STANDALONE drafts: some of the target's layers with a trained output, or all of them trained (a student).

    --trainable output   the layers are the target's own, and only the final norm and an output layer of the draft's own
                         learn: self-speculation by early exit (Draft & Verify, arXiv 2309.08168; LayerSkip, 2404.16710)
    --trainable all      a small model of the target's architecture, begun with its layers and distilled

Either way the draft reads tokens alone and learns the target's distribution of the next one, on the target's hidden
states that heads learn from. What is exported is an ordinary checkpoint. With `--draft-vocab-size` its embedding and
output layer have fewer rows and its tokenizer fewer tokens (`pruning`); it then drafts over the intersection of the
vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from specjax import checkpoint
from specjax.checkpoint import CheckpointError, VocabularyMap
from specjax.checkpoint.tokenizer import NO_ID
from specjax.config import ModelConfig
from specjax.drafters import Drafter, StandaloneParams, TreeShape
from specjax.drafters.standalone import standalone_drafter
from specjax.models import make_target, table
from specjax.models.decoder import head_columns
from specjax.models.params import dimensions, placements, tensors_of
from specjax.models.target import Target, no_past
from specjax.train.data import Rows
from specjax.train.draft import DraftSource, objective
from specjax.train.export import MODEL_FILES, rounded, write_draft
from specjax.train.features import training_target
from specjax.train.head import SOFTENED, coverage
from specjax.train.options import TrainOptions
from specjax.train.pruning import pruned_tokenizer
from specjax.train.unroll import Loss, Sums, Teacher, answers, compare, feature_regression, packed_mask
from specjax.types import Weights

OUTPUT = ("final_norm", "head")  # what --trainable output trains
SPACED = "spaced:4"  # layers of a new draft where nothing is said


class StudentDraft:
    """A model of few layers as it is trained; see `specjax.train.draft.Draft`."""

    files = MODEL_FILES
    features = "final"

    def __init__(self, options: TrainOptions, source: DraftSource) -> None:
        refuse_head_settings(options)
        wanted, target = options.draft, source.config
        self._options, self._source, self._objective = options, source, objective(wanted.draft, options.loss)
        self._output_only = wanted.trainable == "output"
        self._tokenizer, self._vocabulary = source.tokenizer, VocabularyMap(None, None, target.vocab_size)
        self._given: Weights | None = None
        self.feature_size, self.layers = target.hidden_size, ()
        if wanted.init_from is not None:
            self.config, self._given = self._read(wanted.init_from)
        else:
            self.layers = kept_layers(wanted.keep_layers or (SPACED,), target.num_layers)
            size = wanted.draft_vocab_size
            if size > target.vocab_size:
                raise ValueError(f"--draft-vocab-size {size} is more than the target's {target.vocab_size}")
            tied = target.tied_embeddings and not self._output_only
            self.config = replace(
                with_layers(target, self.layers), vocab_size=size or target.vocab_size, tied_embeddings=tied
            )
        self.table = table(self.config)
        self._described = self._description(options.export.export_dtype)
        self._untrained: Weights = {}

    def _read(self, name: str) -> tuple[ModelConfig, Weights]:
        """The model of --init-from, float32, and its tokenizer."""
        wanted, source = self._options.draft, self._source
        if self._output_only:
            raise ValueError("--trainable output begins with the target's own layers; leave out --init-from")
        for flag, given in (("--keep-layers", wanted.keep_layers), ("--draft-vocab-size", wanted.draft_vocab_size)):
            if given:
                raise ValueError(f"{flag} is that of --init-from {name}; leave it out")
        files = checkpoint.resolve(name, progress=True)
        config = checkpoint.model_config(files.config, dtype=source.config.dtype)
        self._tokenizer = checkpoint.load_tokenizer(files)
        self._vocabulary = match(source.tokenizer, self._tokenizer, source.config, config)
        params = checkpoint.load_params(files, replace(config, dtype="float32"), quantization="none", progress=True)
        return config, flat(params)

    def choose_vocabulary(self, rows: Rows) -> dict[str, Any]:
        source, size = self._source, self.config.vocab_size
        if self._given is None and size < source.config.vocab_size:
            counts = np.bincount(rows.tokens[rows.segments > 0], minlength=source.config.vocab_size)
            counts += np.bincount(rows.tokens[rows.loss], minlength=source.config.vocab_size)
            self._tokenizer = pruned_tokenizer(source.tokenizer, counts, size)
            self._vocabulary = match(source.tokenizer, self._tokenizer, source.config, self.config)
            self._described = self._description(self._options.export.export_dtype)
        facts = {"layers": list(map(str, self.layers)) or self.config.num_layers, "trainable": self._what_learns}
        if (ids := self._vocabulary.ids) is not None:
            facts["draft_vocabulary_coverage"] = round(coverage(rows, ids), 4)
        return facts

    @property
    def _what_learns(self) -> str:
        return "final norm and output layer" if self._output_only else "all"

    def first_params(self, target_params: Weights) -> Weights:
        if self._given is not None:
            return self._given
        ids = self._vocabulary.ids
        found = {f"layers_{i}": target_params[f"layers_{layer}"] for i, layer in enumerate(self.layers)}
        target = make_target(self._source.config)
        found["final_norm"] = (target.norm_offset + target_params["final_norm"]) * SOFTENED - target.norm_offset
        found["embed"] = target_params["embed"] if ids is None else target_params["embed"][ids]
        if not self.config.tied_embeddings:
            own = target_params.get("head", target_params["embed"].T)
            found["head"] = own if ids is None else head_columns(own, jnp.asarray(ids))
        return flat(found)

    def split(self, params: Weights, first: Callable[[], tuple[Teacher, Rows]]) -> tuple[Weights, Weights]:
        del first
        trained = {name for name in params if name in OUTPUT or not self._output_only}
        self._untrained = {name: leaf for name, leaf in params.items() if name not in trained}
        return {name: jnp.array(params[name], jnp.float32, copy=True) for name in sorted(trained)}, {}

    def loss(self, target: Target) -> Loss:
        student, given = training_target(self.config, self._options.run.compute_dtype), self._objective
        ids, reads = (None if each is None else jnp.asarray(each) for each in self._vocabulary[:2])
        layers, output_only = self.layers, self._output_only

        def loss(params: Weights, target_params: Weights, batch: Rows, teacher: Teacher, key: Array) -> Any:
            del key
            weights = unflatten_dict(dict(params), sep="/")
            if output_only:  # the rest is the target's
                embed = target_params["embed"]
                weights["embed"] = embed if ids is None else embed[ids]
                weights |= {f"layers_{i}": target_params[f"layers_{layer}"] for i, layer in enumerate(layers)}
            past = no_past(student, len(batch.tokens))
            embedded = student.embed(weights, batch.tokens if reads is None else reads[batch.tokens])
            output = student.forward(weights, embedded, batch.positions, packed_mask(batch.segments), *past)
            found = student.unembed(weights, output.hidden)
            wanted = answers(target, target_params, batch, teacher, ids, given.temperature)
            compared = compare(found, wanted, batch, given.loss, 1)
            losses = compared.losses
            if given.regression:
                losses = losses + given.regression * feature_regression(output.hidden, teacher.hidden)
            total = jnp.sum(compared.counts * losses)
            sums = total, compared.matched, compared.counts.sum(), compared.slots
            return given.weights[0] * total, Sums(*(part[None] for part in sums))

        return loss

    def exported(self, weights: Weights, frozen: Weights) -> Weights:
        del frozen
        return {**self._untrained, **weights}

    def served(self, params: Weights, *dtypes: str) -> StandaloneParams:
        for dtype in dtypes:
            params = {name: leaf.astype(dtype) for name, leaf in params.items()}
        ids, reads = (None if each is None else jnp.asarray(each) for each in self._vocabulary[:2])
        return StandaloneParams(unflatten_dict(dict(params), sep="/"), ids, reads)

    def drafter(self, target: Target, shape: TreeShape) -> Drafter:
        return standalone_drafter(target, make_target(replace(self.config, dtype=target.config.dtype)), shape)

    @property
    def title(self) -> str:
        return "STANDALONE draft model"

    @property
    def description(self) -> str:
        c, vocabulary = self.config, self._vocabulary.ids is not None
        option = ", over the intersection of the vocabularies" if vocabulary else ""
        return (
            f"{c.num_layers} decoder layers of width {c.hidden_size}, a vocabulary of {c.vocab_size} tokens.\nTrained "
            f"with specjax (`specjax train`); for STANDALONE{option}."
        )

    def _description(self, dtype: str) -> dict[str, Any]:
        """config.json. Raises ValueError: the target's cannot say what the draft is."""
        config, known = self.config, self._source.files.config
        described = {key: value for key, value in known.items() if key not in ("quantization_config", "dtype")}
        described |= {
            "num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size, "torch_dtype": dtype,
            "tie_word_embeddings": config.tied_embeddings,
        }  # fmt: skip
        if isinstance(types := known.get("layer_types"), list) and self.layers:
            described["layer_types"] = [types[layer] for layer in self.layers]
        described |= {
            key: getattr(self._tokenizer, key)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if key in known
        }
        if (found := checkpoint.model_config(described, dtype=config.dtype)) != config:
            raise ValueError(
                f"--draft STANDALONE: a config.json of this target cannot describe the layers {self.layers} alone, it "
                f"would mean {found}; keep the first ones (--keep-layers first:{config.num_layers})"
            )
        return described

    def export(self, folder: Path, params: Weights, card: str) -> Path:
        export, host = self._options.export, {name: np.asarray(leaf) for name, leaf in params.items()}
        leaves = rounded(host, export.export_dtype)
        tensors = tensors_of(placements(self.table, dimensions(self.config)), lambda path: leaves["/".join(path)])
        return write_draft(
            folder, self._described, tensors, card=card, target_name=self._options.model.model, kind="standalone",
            license=export.license, allowed=MODEL_FILES, more=self._tokenizer.save_pretrained,
        )  # fmt: skip


def refuse_head_settings(options: TrainOptions) -> None:
    """Raises ValueError: a setting that only heads have."""
    draft, loss = options.draft, options.loss
    heads = {
        "--aux-layers": draft.aux_layers, "--draft-intermediate-size": draft.draft_intermediate_size,
        "--init random": draft.init == "random", "--rounds": (loss.rounds or 1) > 1,
        "--round-weights": len(loss.round_weights) > 1, "--feature-noise": loss.feature_noise,
    }  # fmt: skip
    if wrong := [flag for flag, given in heads.items() if given]:
        raise ValueError(f"{', '.join(wrong)}: not for --draft STANDALONE, which reads tokens alone, in one round")


def kept_layers(given: Sequence[str], layers: int) -> tuple[int, ...]:
    """Indices of the target's layers: first:K, spaced:K (the first and the last among them), or a list.

    30 layers, spaced:4: 0 10 19 29.
    """
    problem = (
        f"--keep-layers must be first:K, spaced:K (K from 1 to {layers}) or ascending layers from 0 to {layers - 1}, "
        f"got {' '.join(given)}"
    )
    how, colon, text = given[0].partition(":")
    if colon:
        if len(given) > 1 or how not in ("first", "spaced") or not text.isdecimal() or not 1 <= int(text) <= layers:
            raise ValueError(problem)
        count = int(text)
        last = count - 1 if how == "first" else layers - 1
        return tuple(round(i * last / max(count - 1, 1)) for i in range(count))
    if not all(text.isdecimal() and int(text) < layers for text in given):
        raise ValueError(problem)
    found = tuple(map(int, given))
    if list(found) != sorted({*found}):
        raise ValueError(problem)
    return found


def with_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The config of a model that has these layers of another."""
    windows = tuple(config.window(layer) for layer in layers)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=tuple(i for i, layer in enumerate(layers) if layer in experts.layers))
    return replace(config, num_layers=len(layers), windows=windows if any(windows) else (), experts=experts)


def match(ours: Any, theirs: Any, target: ModelConfig, draft: ModelConfig) -> VocabularyMap:
    """How the draft's tokens belong to the target's, as when it drafts."""
    sizes = target.vocab_size, draft.vocab_size
    found = checkpoint.match_vocabularies(ours, theirs, *sizes, intersection=target.vocab_size != draft.vocab_size)
    if found.ids is not None and (found.ids == NO_ID).any():
        if found.reads is not None:
            raise CheckpointError("the draft has tokens that the target lacks; it cannot be trained for it")
        return found._replace(ids=None)  # rows of padding, which the target has, too
    return found


def flat(params: Any) -> Weights:
    """A parameter tree as a flat dict, float32."""
    return {name: jax.numpy.asarray(leaf, jnp.float32) for name, leaf in flatten_dict(dict(params), sep="/").items()}
