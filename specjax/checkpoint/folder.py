"""A model in the Hugging Face layout: its folder is checked before anything large is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.checkpoint.errors import CheckpointError, listed
from specjax.checkpoint.weights import INDEX_NAME, SINGLE_NAME, read_headers, same_content
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR

# Only draft heads are read from these.
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_SINGLE_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk."""

    name: str  # as the user gave it
    folder: Path  # config.json, tokenizer files and weights
    config: Mapping[str, Any] = field(compare=False)  # config.json, with `tie_word_embeddings` as `read_folder` has it
    weights: tuple[Path, ...]  # the safetensors shards


def read_folder(name: str, folder: Path) -> ModelFiles:
    """The model in ``folder``: config.json and safetensors, single or sharded.

    ``tie_word_embeddings`` is settled here. An absent key and no ``lm_head.weight`` mean tied: with transformers'
    default, false, the model would have no output matrix. Tied, but with an ``lm_head.weight`` that differs from the
    embedding, means untied, as in transformers.
    """
    config = dict(read_json(folder / "config.json", name))
    weights = find_weights(name, folder)
    tensors = read_headers(weights)
    head, embed = tensors.get(HEAD_TENSOR), tensors.get(EMBED_TENSOR)
    if head is None and embed is not None:
        if (tied := config.get("tie_word_embeddings")) is not None and tied is not True:
            raise CheckpointError(
                f"{folder / 'config.json'}: tie_word_embeddings is {tied!r:.80}, and there is no {HEAD_TENSOR}; write "
                "true if the output matrix is the embedding, or copy the weights again: a shard may be missing"
            )
        config["tie_word_embeddings"] = True
    elif head is not None and embed is not None and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = same_content(head.read(), embed.read())
    return ModelFiles(name, folder, config, weights)


def read_json(file: Path, name: str) -> Mapping[str, Any]:
    """A JSON object from ``file``, of the model ``name``."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} (given as {name!r}) has no {file.name}; a folder of a model or a draft head needs it, as "
            "transformers' save_pretrained writes it"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a JSON object; copy or download it again")
    return value


def find_weights(name: str, folder: Path, *, torch_too: bool = False) -> tuple[Path, ...]:
    """The files that hold the weights in ``folder``: safetensors if there are any, else torch's if ``torch_too``."""
    layouts = [(SINGLE_NAME, INDEX_NAME), (TORCH_SINGLE_NAME, TORCH_INDEX_NAME)][: 1 + torch_too]
    for single, index in layouts:
        if (folder / index).is_file():
            return _shards(folder / index, name)
        if (folder / single).is_file():
            return (folder / single,)
    present = {file.name for file in folder.iterdir() if file.is_file()}
    suffixes = {Path(file).suffix for file in present}
    wanted = ", ".join(file for layout in layouts for file in layout)
    hint = ""
    if ".gguf" in suffixes:
        hint = ". Give the path of the .gguf file itself"
    elif suffixes & {".bin", ".pt", ".pth"} and not torch_too:
        hint = (
            ". Convert once, where torch is installed: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder), and the same for AutoTokenizer"
        )
    raise CheckpointError(
        f"{folder} (given as {name!r}) has none of: {wanted}; it has {listed(present) or 'no files'}{hint}"
    )


def _shards(index: Path, name: str) -> tuple[Path, ...]:
    folder = index.parent
    weight_map = read_json(index, name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is {weight_map!r:.80}; an object of file names is needed")
    shards = set(weight_map.values())
    outside = {shard for shard in shards if Path(shard).name != shard}
    if outside or not shards:
        names = listed(outside) or "none"
        raise CheckpointError(f"{index}: weight_map must name files of its own folder, got: {names}")
    if missing := {shard for shard in shards if not (folder / shard).is_file()}:
        raise CheckpointError(f"{folder} lacks shards that {index.name} lists: {listed(missing)}; copy them there")
    return tuple(folder / shard for shard in sorted(shards))
