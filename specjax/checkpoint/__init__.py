"""Models on disk: a name to files, a config.json to a ``ModelConfig``, tensors to the parameter tree, a tokenizer;
and what drafts for them: EAGLE heads, those that ship among them, token maps, and vocabularies that are compared.

All functions raise ``CheckpointError`` for what is absent, damaged or not supported. Never imports torch or the engine;
jax, transformers, gguf and the hub's client are imported by the functions that need them.
"""

from specjax.checkpoint.draft_head import describe_head, load_head
from specjax.checkpoint.files import CheckpointError, CheckpointOptionError
from specjax.checkpoint.generation_config import sampling_defaults, stop_token_ids
from specjax.checkpoint.hf_config import effective_quantization, model_config
from specjax.checkpoint.hub import BUILT_IN_MODEL, resolve
from specjax.checkpoint.load import check_tokenizer_paths, load_params, load_tokenizer
from specjax.checkpoint.mtp import load_mtp, mtp_config, mtp_method
from specjax.checkpoint.quantised import bits_per_weight, matrices, save_dequantised
from specjax.checkpoint.shipped import ShippedHead, may_have_head, shipped_head
from specjax.checkpoint.token_map import read_token_map
from specjax.checkpoint.vocabulary import VocabularyMap, VocabularyMismatch, match_vocabularies
from specjax.checkpoint.weights import ModelFiles

__all__ = [
    "BUILT_IN_MODEL", "CheckpointError", "CheckpointOptionError", "ModelFiles", "ShippedHead",
    "VocabularyMap", "VocabularyMismatch", "bits_per_weight", "check_tokenizer_paths", "describe_head",
    "effective_quantization", "load_head", "load_mtp", "load_params", "load_tokenizer", "match_vocabularies",
    "matrices", "may_have_head", "model_config", "mtp_config", "mtp_method", "read_token_map", "resolve",
    "sampling_defaults", "save_dequantised", "shipped_head", "stop_token_ids",
]  # fmt: skip
