"""The formats of function calls by SGLang's names."""

from __future__ import annotations

from specjax.serve.calls import CallParser, DeepSeek, DeepSeek31, Hermes, KimiK2, Llama3, Mistral
from specjax.serve.xml_calls import Glm, QwenCoder

PARSERS: dict[str, type[CallParser]] = {
    "qwen": Hermes,
    "qwen25": Hermes,
    "hermes": Hermes,
    "qwen3_coder": QwenCoder,
    "glm": Glm,
    "glm45": Glm,
    "kimi_k2": KimiK2,
    "llama3": Llama3,
    "mistral": Mistral,
    "deepseekv3": DeepSeek,
    "deepseekv31": DeepSeek31,
}
