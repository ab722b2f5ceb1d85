"""The frozen target's outputs for packed rows: the head's inputs and its teacher, computed in each step or once.

On a CPU the target's forward costs more than the head's update, so `FeatureStore` writes its outputs to disk. Later
runs reuse them; the folder's name is a hash of their inputs. A row's values always come from the forward over its
batch of the first epoch, so a resumed run without the folder continues bit for bit.

`specjax train features` writes hidden states of texts for other trainers, in the files of vLLM's speculators:

    data.jsonl                         an example a line: input_ids, loss_mask, seq_len
    hidden_states/hs_N.safetensors     of line N, from 0: hidden_states [n, layers + 1, M], token_ids int64 [n]

The layers are --aux-layers, then the last one before the final norm. A stopped run is resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from specjax import checkpoint, settings
from specjax.cache import Weights
from specjax.checkpoint.files import replacing, write_text
from specjax.cli import run_command
from specjax.cli.flags import ModelSettings
from specjax.config import ModelConfig
from specjax.limits import setting_of
from specjax.load import use_compilation_cache
from specjax.models import make_target
from specjax.models.target import Target, hidden_states, no_past
from specjax.progress import progress_bar
from specjax.settings import setting
from specjax.train import differences
from specjax.train.data import Rows, batch_rows, load_data
from specjax.train.losses import Teach, Teacher, packed_attention, packed_mask
from specjax.train.options import DataSettings, aux_layers_of

CHUNK = 512  # tokens whose logits are in memory together


def training_target(config: ModelConfig, dtype: str) -> Target:
    """The target for packed rows, without pages, computing in `dtype`."""
    return make_target(replace(config, dtype=dtype), backend=packed_attention)


def teach(target: Target, features: tuple[int, ...] | str) -> Teach:

    def run(params: Weights, batch: Rows) -> Teacher:
        past = no_past(target, len(batch.tokens))
        embedded, mask = target.embed(params, batch.tokens), packed_mask(batch.segments)
        output = target.forward(params, embedded, batch.positions, mask, *past, features=features)
        assert output.features is not None
        # In chunks, since the logits of all tokens may take gigabytes.
        flat = output.hidden.reshape(-1, output.hidden.shape[-1])
        chunks = jnp.pad(flat, ((0, -len(flat) % CHUNK), (0, 0))).reshape(-1, CHUNK, flat.shape[1])
        top = jax.lax.map(lambda part: jnp.argmax(target.unembed(params, part), axis=-1).astype(jnp.int32), chunks)
        top = top.reshape(-1)[: len(flat)].reshape(batch.tokens.shape)
        return Teacher(output.features, output.hidden, top)

    return run


class FeatureStore:
    """Features of rows by index, in files of a folder below `folder`; None: computed in each call.

    Args:
        teach: rows -> numpy `Teacher` in `dtype`.
        widths: F and M.
        batch, seed: arguments of `batch_rows`.
        identity: describes all other inputs of the values, except the rows.

    Raises ValueError if the folder cannot be written, or the disk has too little space.
    """

    def __init__(
        self, teach: Callable[[Rows], Teacher], rows: Rows, *, folder: Path | None, widths: tuple[int, int],
        dtype: str, batch: int, seed: int, identity: str,
    ) -> None:  # fmt: skip
        count, self._stored = len(rows.tokens), None
        self._teach, self._rows, self._batch, self._seed = teach, rows, batch, seed
        if folder is None:
            return
        token = np.dtype([("features", dtype, widths[0]), ("hidden", dtype, widths[1]), ("top", np.int32)])
        digest = hashlib.sha256(json.dumps(("rows.bin", identity, dtype, batch, seed)).encode())
        digest.update(rows.tokens.tobytes() + rows.segments.tobytes())
        self._stored, self._done = _open(folder / digest.hexdigest()[:16], token, rows.tokens.shape)
        self._group = np.zeros(count, np.int64)  # each row's batch in the first epoch
        for number in reversed(range(-(-count // batch))):
            self._group[batch_rows(number, count, batch, seed)] = number

    def get(self, numbers: np.ndarray) -> Teacher:
        """The features of these rows, in this order."""
        if self._stored is None:
            return self._teach(self._rows.at(numbers))
        for number in np.unique(self._group[numbers[self._done[numbers] == 0]]):
            members = batch_rows(int(number), len(self._group), self._batch, self._seed)
            teacher = self._teach(self._rows.at(members))
            new = self._group[members] == number
            for name in Teacher._fields:
                self._stored[name][members[new]] = getattr(teacher, name)[new]
            self._stored.flush()  # before the rows are marked as done
            self._done[members[new]] = 1
        return Teacher._make(self._stored[name][numbers] for name in Teacher._fields)


def _open(folder: Path, token: np.dtype, shape: tuple[int, int]) -> tuple[np.memmap, np.memmap]:
    """Rows in a mapped file, and flags of the rows that are computed."""
    file, mark, size = folder / "rows.bin", folder / "done.bin", prod(shape) * token.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            # Reserve the space now: writing to a mapped file on a full disk kills the process.
            os.posix_fallocate(stream.fileno(), 0, size)
        done = np.memmap(mark, np.uint8, "r+" if mark.exists() else "w+", shape=shape[:1])
        return np.memmap(file, token, "r+", shape=shape), done
    except OSError as error:
        raise ValueError(
            f"--features disk cannot use {folder}, which needs {size / 1e9:.1f} GB: {error.strerror or error}; give "
            "another --feature-folder, less data, or --features none"
        ) from None


# Hidden states for other trainers


@dataclass(frozen=True)
class FeatureSettings:
    """Hidden states of texts."""

    data: tuple[str, ...] = setting((), setting_of(DataSettings, "data").help, metavar="FILE")
    text_data: tuple[str, ...] = setting((), setting_of(DataSettings, "text_data").help, metavar="FILE")
    max_length: int = setting(2048, "longer examples are cut", minimum=2)
    aux_layers: tuple[str, ...] = setting(
        (), "target layers, from 0, before the last one; default: 1, L // 2 - 1 and L - 4", metavar="LAYER"
    )
    output: str = setting("runs/features", "folder of the files", metavar="FOLDER")
    store_dtype: str = setting("bfloat16", "dtype of the files", choices=("bfloat16", "float16", "float32"))


@dataclass(frozen=True)
class FeatureOptions:
    """The tables of a file."""

    model: ModelSettings = ModelSettings()  # noqa: RUF009 - frozen
    features: FeatureSettings = FeatureSettings()


def write_features(options: FeatureOptions) -> dict[str, Any]:
    """Writes the files of `FeatureOptions`; returns the command's summary. Raises ValueError or OSError for a wrong
    input, or for a folder with files of other settings."""
    chosen, model = options.features, options.model
    use_compilation_cache()
    files = checkpoint.resolve(model.model, revision=model.revision, progress=True)
    config = checkpoint.model_config(files.config, dtype=model.dtype)
    layers = (*aux_layers_of(chosen.aux_layers, config.num_layers), config.num_layers - 1)
    tokenizer = checkpoint.load_tokenizer(files, folder=model.tokenizer_path, chat_template=model.chat_template)
    sets = load_data(chosen, tokenizer, config, max_length=chosen.max_length)
    examples = [example for loaded in sets for example in loaded.examples]
    digest = hashlib.sha256(b"".join(part.tobytes() for example in examples for part in map(np.asarray, example)))
    current = {key: value for table in asdict(options).values() for key, value in table.items() if key != "output"}
    current = json.loads(json.dumps(current | {"content of the data": digest.hexdigest()[:16]}))
    folder = Path(chosen.output)
    meta = folder / "features.json"
    if meta.exists() and (changed := differences(json.loads(meta.read_text()), current)):
        raise ValueError(f"--output {folder} has files of other settings: {changed}. Give another --output")
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    write_text(meta, json.dumps(current, indent=1) + "\n")
    rows = [
        {"input_ids": one.tokens.tolist(), "loss_mask": one.loss.astype(int).tolist(), "seq_len": len(one.tokens)}
        for one in examples
    ]
    write_text(folder / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    target = make_target(config)
    params = checkpoint.load_params(files, config, quantization=model.quantization, progress=True)
    run = jax.jit(partial(hidden_states, target, features=layers))
    resumed = 0
    with progress_bar("Texts", len(examples), "text") as bar:
        for number, example in enumerate(examples):
            bar.update()
            file = folder / "hidden_states" / f"hs_{number}.safetensors"
            if file.exists():
                resumed += 1
                continue
            tokens = np.asarray(example.tokens, np.int32)
            padded = np.zeros((1, min(1 << (len(tokens) - 1).bit_length(), config.max_positions)), np.int32)
            padded[0, : len(tokens)] = tokens
            states = np.asarray(run(params, jnp.asarray(padded))[0].astype(chosen.store_dtype))[: len(tokens)]
            states = states.reshape(len(tokens), len(layers), -1)
            with replacing(file) as draft:
                save_file({"hidden_states": states, "token_ids": tokens.astype(np.int64)}, draft)
    tokens = sum(len(example.tokens) for example in examples)
    return {"output": str(folder), "texts": len(examples), "tokens": tokens, "resumed_after": resumed,
            "layers": [*layers]}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = settings.Parser(
        prog="specjax train features", description="Write the target's hidden states of texts as safetensors.",
        epilog=(__doc__ or "").split("\n\n", 2)[2], formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    settings.add_flags(parser, FeatureOptions())
    _, options = settings.parse(parser, argv, FeatureOptions())
    work, after = partial(write_features, options), "the same command continues here"
    return run_command("specjax train features", work, interrupted=after)
