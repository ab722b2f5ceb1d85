"""A model as files that fit through a narrow door: float16 safetensors of at most so many bytes, and prompts as ids.

For `gpu_check.py --export-model`: a machine with a GPU may have no network, no gguf and no tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gpu_check_lossless import PROMPTS_FILE
from safetensors.numpy import save_file

from specjax import checkpoint
from specjax.checkpoint.weights import read_headers

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List the first ten prime numbers, one on each line.",
    "Explain to a child why the sky is blue, then explain it to a physicist.",
    "Repeat this line five times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, and a test for it.",
)


def export(model: str, folder: Path, megabytes: int) -> list[Path]:
    """Writes `model` to `folder`; the files written, each of at most `megabytes` * 10**6 bytes of tensors (or of one
    tensor that is larger)."""
    files = checkpoint.resolve(model)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, np.ndarray]] = [{}]
    room = most = megabytes * 10**6
    for name, entry in checkpoint.matrices(read_headers(files.weights), files.config).items():
        tensor = np.ascontiguousarray(entry.read(), dtype=np.float16)
        assert np.isfinite(tensor).all(), f"{name} does not fit into float16"
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = most
        parts[-1][name] = tensor
        room -= tensor.nbytes
    written, places = [], {}
    for number, part in enumerate(parts, 1):
        file = folder / f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, file, metadata={"format": "pt"})
        written.append(file)
        places |= dict.fromkeys(part, file.name)
    tokenizer = checkpoint.load_tokenizer(files)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    config = {key: value for key, value in files.config.items() if key != "quantization_config"}
    small = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": places},
        "config.json": {**config, "torch_dtype": "float16"},
        PROMPTS_FILE: prompts,
    }
    for name, content in small.items():
        (folder / name).write_text(json.dumps(content) + "\n")
        written.append(folder / name)
    return written
