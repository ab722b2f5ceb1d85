"""What a run starts from: files, data and the draft; checked before the target's weights are read."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import ChainMap
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import checkpoint
from specjax.config import ModelConfig
from specjax.drafters import Standalone
from specjax.models.head_spec import ALGORITHMS
from specjax.train import corpus
from specjax.train.data import Example, Rows, load_examples, pack, split
from specjax.train.draft import Draft, DraftSource, objective
from specjax.train.export import other_files
from specjax.train.head import HeadDraft
from specjax.train.options import RESUMABLE, TrainOptions
from specjax.train.student import StudentDraft

logger = logging.getLogger(__name__)

MOST_HELD_BACK = 0.25  # share of --data above which a warning is logged

DRAFTS: dict[str, type[Draft]] = {**dict.fromkeys(ALGORITHMS, HeadDraft), Standalone.algorithm: StudentDraft}
"""By --draft."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run, except the target's weights."""

    source: DraftSource
    rows: Rows
    held_back: list[Example]
    draft: Draft
    facts: dict[str, Any]  # of the data, for the log and the card


def read_data(options: TrainOptions, tokenizer: Any, target: ModelConfig) -> tuple[Rows, list[Example], dict[str, Any]]:
    """Packed rows, held-back examples, and counts. Raises ValueError or OSError: there is nothing to learn from."""
    given, seed = options.data, options.data.data_seed
    paths = [*given.data, *given.text_data]
    if not paths:
        raise ValueError("nothing to learn from: give --data or --text-data")
    for flag, there in {"--data": given.data, "--text-data": given.text_data}.items():
        files = corpus.shards(there)
        if len(set(files)) < len(files):
            raise ValueError(f"{flag} names a file twice: {' '.join(there)}")
    load = partial(
        load_examples, tokenizer=tokenizer, vocabulary=target.vocab_size, progress=True,
        max_length=min(given.row_length, target.max_positions),
    )  # fmt: skip
    answers, texts = load(given.data, loss_on=given.loss_on), load(given.text_data, loss_on="all")
    for flag, found in {"--data": answers, "--text-data": texts}.items():
        if found.skipped and not found.examples:
            path, number, reason = found.skipped[0]
            raise ValueError(f"{flag}: none of the {found.lines} lines is usable; {path}, line {number}: {reason}")
    corpus.report([*answers.skipped, *texts.skipped])
    count, held, drawn = len(answers.examples), given.held_back, texts.examples
    if held and not given.data:
        raise ValueError(f"--held-back {held} needs --data: nothing of --text-data is held back; leave the flag out")
    if held and held >= count and count + len(drawn):
        raise ValueError(f"--held-back {held} must be less than the {count} usable examples of --data")
    if held is None:
        held = min(64, -(-count // 10)) if count > 1 else 0  # one is always left to learn from
    elif (held := min(held, count)) > MOST_HELD_BACK * count:
        logger.warning(
            "--held-back %d leaves only %d of the %d examples of --data to learn from; give at most %d",
            held, count - held, count, int(MOST_HELD_BACK * count),
        )  # fmt: skip
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
        "turns_without_loss": answers.turns_without_loss,
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
        if others := other_files(folder, DRAFTS[wanted.draft].files):
            raise ValueError(
                f"--export {place} holds other things than a draft: {', '.join(others)[:80]}; give another"
            )
    objective(wanted.draft, options.loss)
    files = checkpoint.resolve(model.model, revision=model.revision, progress=True)
    config = checkpoint.model_config(files.config, dtype=model.dtype)
    tokenizer = checkpoint.load_tokenizer(files, folder=model.tokenizer_path, chat_template=model.chat_template)
    eos = checkpoint.stop_token_ids(files, tokenizer, config.vocab_size)
    source = DraftSource(files, tokenizer, config, eos)
    draft = DRAFTS[wanted.draft](options, source)
    rows, held_back, facts = read_data(options, tokenizer, config)
    return Inputs(source, rows, held_back, draft, facts | draft.choose_vocabulary(rows))


def identity(options: TrainOptions, inputs: Inputs) -> dict[str, Any]:
    """The settings that a resumed run must share with the run before."""
    given = ChainMap(*asdict(options).values())
    found = {name.replace("_", "-"): value for name, value in given.items() if name not in RESUMABLE}
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in inputs.rows)).hexdigest()
    return found | {
        "held-back": len(inputs.held_back),
        "content of the data": digest[:16],
        "devices": jax.local_device_count(),
    }
