"""`python -m specjax.models`: print the parameters of all families and draft heads, in the sizes of SmolLM2-135M."""

from typing import Any

from specjax.config import Experts, HeadConfig, Latent, ModelConfig, MtpConfig, RopeConfig
from specjax.models import ARCHITECTURES, describe
from specjax.models.head_spec import HEAD_SPECS, head_sizes, head_table
from specjax.models.mtp_spec import STYLES, mtp_sizes, mtp_table
from specjax.models.params import describe as describe_table

SIZES: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
    "norm_epsilon": 1e-5, "rope": RopeConfig(),
}  # fmt: skip

PARTS: dict[str, Any] = {
    "qwen3_moe": {"experts": Experts(4, 2, 512, tuple(range(30)))},
    "deepseek_v3": {
        "experts": Experts(4, 2, 512, tuple(range(3, 30)), scoring="sigmoid", shared_width=512),
        "latent": Latent(128, 192, 64, 32, 64),
    },
}


def main() -> None:
    for family in dict.fromkeys(ARCHITECTURES.values()):
        parts = PARTS.get(family, {})
        model = ModelConfig(
            family, vocab_size=49152, num_layers=30, max_positions=8192, tied_embeddings=False, **SIZES | parts
        )
        print(f"{family}\n\n{describe(model)}\n")
    for spec in HEAD_SPECS.values():
        layers = (1, 14, 26) if spec.reads_layers else ()
        width = SIZES["hidden_size"] * (len(layers) or 1)
        ends = {"own_head": True, "mapped": True, "vocab_size": 16384} if spec.own_ends else {"vocab_size": 49152}
        biases: dict[str, Any] = dict.fromkeys(spec.biases, True)
        head = HeadConfig(spec.kind, feature_size=width, aux_layers=layers, **SIZES, **ends, **biases)
        print(f"{spec.algorithm} head\n\n{describe_table(head_table(head), head_sizes(head, 49152))}\n")
    layer = ModelConfig("qwen3", vocab_size=49152, num_layers=1, max_positions=8192, tied_embeddings=False, **SIZES)
    for style in STYLES:
        mtp = MtpConfig(style, layer, target_layers=30, count=1, vocab_size=49152)
        print(f"MTP layer of Qwen3, style {style}\n\n{describe_table(mtp_table(mtp), mtp_sizes(mtp))}\n")


if __name__ == "__main__":
    main()
