"""Models on disk to a ``ModelConfig``, the parameter tree and a tokenizer; and the draft heads that ship with specjax.

Read in this order: ``files`` (checked JSON, atomic writing), ``hub`` (a name to files), ``hf_config`` (config.json),
``weights`` (tensors in files), ``quantised`` (formats of quantised matrices), ``parameters`` (the parameter tree),
``gguf``; ``draft_head``, with ``torch_files``, ``token_map`` and ``shipped``; ``tokenizer`` and ``prompts``. Functions
raise ``CheckpointError`` for files that are absent, damaged or not supported. torch is never imported; jax,
transformers, gguf and the hub's client only where they are needed.
"""

from specjax.checkpoint.assistant import assistant_beside, is_assistant
from specjax.checkpoint.draft_head import describe_head, load_head, load_mtp, mtp_config, mtp_method
from specjax.checkpoint.files import CheckpointError, CheckpointOptionError
from specjax.checkpoint.hf_config import effective_quantization, model_config, sampling_defaults, stop_token_ids
from specjax.checkpoint.hub import BUILT_IN_MODEL, resolve
from specjax.checkpoint.parameters import check_tensors, load_params
from specjax.checkpoint.quantised import bits_per_weight, matrices, save_dequantised
from specjax.checkpoint.shipped import ShippedHead, may_have_head, shipped_head
from specjax.checkpoint.token_map import read_token_map
from specjax.checkpoint.tokenizer import check_tokenizer_paths, load_tokenizer, match_vocabularies
from specjax.checkpoint.weights import ModelFiles

__all__ = [
    "BUILT_IN_MODEL", "CheckpointError", "CheckpointOptionError", "ModelFiles", "ShippedHead", "assistant_beside",
    "bits_per_weight", "check_tensors", "check_tokenizer_paths", "describe_head", "effective_quantization",
    "is_assistant", "load_head", "load_mtp", "load_params", "load_tokenizer", "match_vocabularies", "matrices",
    "may_have_head", "model_config", "mtp_config", "mtp_method", "read_token_map", "resolve", "sampling_defaults",
    "save_dequantised", "shipped_head", "stop_token_ids",
]  # fmt: skip
