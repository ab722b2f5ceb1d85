"""Models on disk: a name to files, a config.json to a ``ModelConfig``, tensors to the parameter tree, a tokenizer.

Never imports torch or the engine. jax, transformers, gguf and the hub's client are imported by the functions that
need them, so importing this package is cheap.
"""

from specjax.checkpoint.builtin import BUILT_IN_MODEL
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import ModelFiles, stop_token_ids
from specjax.checkpoint.hf_config import model_config
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.load import load_params, load_tokenizer

__all__ = [
    "BUILT_IN_MODEL",
    "CheckpointError",
    "ModelFiles",
    "load_params",
    "load_tokenizer",
    "model_config",
    "resolve",
    "stop_token_ids",
]
