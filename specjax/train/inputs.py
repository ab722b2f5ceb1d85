"""Inputs of a run (files, data, head configuration), all checked before the target's weights are read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import checkpoint
from specjax.checkpoint.weights import SINGLE_NAME
from specjax.config import HeadConfig, ModelConfig
from specjax.models import make_target
from specjax.train import draft
from specjax.train.corpus import report
from specjax.train.data import load_examples
from specjax.train.export import CARD_NAME, CONFIG_NAME
from specjax.train.options import REPORTING, TrainOptions
from specjax.train.packing import Example, Rows, pack, split
from specjax.types import Weights

HELD_BACK = 64
"""Default of --held-back; at most half of the examples."""


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
    """Packed rows, held-back examples, and counts.

    Raises:
        ValueError: nothing to learn from. OSError: a file cannot be read.
    """
    given = options.data
    if not given.data and not given.text_data:
        raise ValueError("nothing to learn from: give --data or --text-data")
    for flag, paths in {"--data": given.data, "--text-data": given.text_data}.items():
        if len(set(paths)) < len(paths):
            raise ValueError(f"{flag} names a file twice: {' '.join(paths)}")
    length = min(given.row_length, target.max_positions)
    load = partial(load_examples, tokenizer=tokenizer, vocabulary=target.vocab_size, max_length=length)
    answers = load(given.data, loss_on=given.loss_on, progress=True)
    texts = load(given.text_data, loss_on="all", progress=True)
    report([*answers.skipped, *texts.skipped])
    there, held = len(answers.examples), given.held_back
    if held and held >= there and there + len(texts.examples):
        raise ValueError(f"--held-back {held} must be less than the {there} usable examples of --data")
    held = min(HELD_BACK, there // 2) if held is None else min(held, there)
    kept, held_back = split(answers.examples, held, given.data_seed)
    drawn = texts.examples
    if given.text_skip:
        if given.text_skip >= len(drawn):
            raise ValueError(f"--text-skip {given.text_skip} leaves none of the {len(drawn)} examples of --text-data")
        drawn, _ = split(drawn, given.text_skip, given.data_seed)
    if given.text_examples and given.text_examples < len(drawn):
        _, drawn = split(drawn, given.text_examples, given.data_seed)
    examples = [*kept, *drawn]
    if not examples:
        files = ", ".join(given.data + given.text_data)
        raise ValueError(f"--data and --text-data hold no example to learn from: {files:.300}")
    rows = pack(examples, given.row_length, given.data_seed)
    facts = {
        "files": [Path(path).name for path in given.data + given.text_data],
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
    """Read everything but the target's weights.

    Raises:
        CheckpointError, ValueError, OSError: an input is wrong.
    """
    model, wanted = options.model, options.draft
    devices = jax.local_device_count()
    if options.run.batch_size % devices:
        raise ValueError(
            f"--batch-size {options.run.batch_size} cannot be spread over {devices} devices; give a multiple"
        )
    if options.export.export is not None:
        check_place(Path(options.export.export))
    draft.objective(wanted.draft, options.loss)
    files = checkpoint.resolve(model.model, revision=model.revision, progress=True)
    config = checkpoint.model_config(files.config, dtype=model.dtype)
    template = model.chat_template
    tokenizer = checkpoint.load_tokenizer(files, folder=model.tokenizer_path, chat_template=template)
    eos = checkpoint.stop_token_ids(files, tokenizer, config.vocab_size)
    params: dict[str, Any] | None = None
    if wanted.init_from is None:
        head = draft.head_config(wanted, config, eos)
    else:
        head, params = draft.from_head(wanted, config)
    rows, held_back, facts = read_data(options, tokenizer, config)
    ids = None
    if head.mapped:
        known = None if params is None else np.asarray(params["ids"])
        ids = draft.draft_ids(rows, head.vocab_size, config.vocab_size, eos) if known is None else known
        facts["draft_vocabulary_coverage"] = round(draft.coverage(rows, ids), 4)
    return Inputs(files, tokenizer, config, rows, held_back, head, params, ids, eos, facts)


def load(options: TrainOptions, inputs: Inputs) -> tuple[Weights, Weights]:
    """The target's parameters in its serving dtype, and the head's first parameters and ids, float32.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    target_params = checkpoint.load_params(inputs.files, inputs.config, progress=True)
    if inputs.given is not None:
        return target_params, inputs.given
    target, init, seed = make_target(inputs.config), options.draft.init, options.run.train_seed
    return target_params, draft.new_params(inputs.head, target, target_params, inputs.ids, init=init, seed=seed)


def identity(options: TrainOptions, inputs: Inputs) -> dict[str, Any]:
    """The settings that a resumed run must share with the run before."""
    found: dict[str, Any] = {}
    for table in fields(options):
        values = asdict(getattr(options, table.name))
        found |= {name.replace("_", "-"): value for name, value in values.items() if name not in REPORTING}
    found["held-back"] = len(inputs.held_back)
    digest = hashlib.sha256()
    for part in inputs.rows:
        digest.update(np.ascontiguousarray(part).tobytes())
    return found | {"content of the data": digest.hexdigest()[:16], "devices": jax.local_device_count()}


def check_place(folder: Path) -> None:
    """Raises ValueError: the export at the end of the run would be refused."""
    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(there - {CARD_NAME, CONFIG_NAME, SINGLE_NAME})
    parent = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if others:
        raise ValueError(f"--export {folder} holds other things than a head: {', '.join(others)[:80]}; give another")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--export {folder} cannot be written: {parent} is no folder that may be written to")
