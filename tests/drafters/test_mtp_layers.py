"""MTP layers in the target's own shards: what each style computes, the trees of one and of several heads, how they are
chosen, and which checkpoints are refused. The oracle uses transformers' layers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from eagle_oracle import DraftTree, check_steps, grow_tree, log_softmax, start
from engine_helpers import VOCABULARY, tokenizer
from oracle import Sampling
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import save_model, save_mtp
from toy_models import Runner, Toy

from specjax.checkpoint import CheckpointError, load_mtp, load_params, model_config, mtp_config, resolve
from specjax.checkpoint.torch_files import write_torch_list
from specjax.config import ModelConfig, MtpConfig
from specjax.drafters import Auto, Eagle, Mtp, Ngram, options_of
from specjax.drafters.factories import make_speculation
from specjax.load import choose, load
from specjax.models import make_target
from specjax.step import StepConfig

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 256,
    "initializer_range": 0.3, "eos_token_id": 2, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6,
    "moe_intermediate_size": 12, "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mimo": ("MiMo", "mimo", {"rope_parameters": {"rope_type": "default", "rope_theta": 640000.0}}),
    "deepseek": ("DeepseekV3", "deepseek", DEEPSEEK),
    "qwen3": ("Qwen3", "qwen3_next", {}),
    "qwen3 moe": ("Qwen3Moe", "qwen3_next", EXPERTS),
}


class Saved(NamedTuple):
    folder: Any
    style: str
    kind: str  # transformers' class
    around: dict[str, np.ndarray]
    config: ModelConfig
    head: MtpConfig
    toy: Toy
    draft: Any  # the heads' parameters


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """(name of a model, heads) -> the model, saved and loaded."""
    root = tmp_path_factory.mktemp("mtp")

    @functools.cache
    def make(name: str, count: int = 1) -> Saved:
        architecture, style, changes = MODELS[name]
        folder = root / f"{name}-{count}".replace(" ", "-")
        around = save_mtp(folder, f"{architecture}ForCausalLM", style, count=count, **SIZES | changes)
        tokenizer().save_pretrained(folder)
        files = resolve(str(folder), progress=False)
        config = model_config(files.config, dtype="float32")
        head = mtp_config(files, config)
        assert head is not None and (head.style, head.count) == (style, count)
        params = load_params(files, config, progress=False)
        toy = Toy(make_target(config, backend="reference"), params, lambda tokens: np.zeros(0))
        draft = load_mtp(files, config, head, progress=False)
        kind = "Qwen2" if architecture == "MiMo" else architecture
        return Saved(folder, style, f"{kind}ForCausalLM", around, config, head, toy, draft)

    return make


class Oracle:
    """The heads, each over the whole text at once, without a cache."""

    def __init__(self, saved: Saved) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        kind = getattr(transformers, saved.kind)

        def read(folder):
            return kind.from_pretrained(folder, attn_implementation="eager").eval()

        self.saved, self.model = saved, read(saved.folder)
        self.heads = [read(saved.folder / f"head{i}") for i in range(saved.head.count)]
        for i, head in enumerate(self.heads):
            head.model.norm.weight.data = torch.tensor(saved.around[f"{i}.final"])
        self.embedding, self.output = (
            leaf.weight.detach().numpy() for leaf in (self.model.get_input_embeddings(), self.model.lm_head)
        )

    def features(self, tokens) -> np.ndarray:
        """[n, M], after the final norm."""
        return self._run(self.model, input_ids=[[int(token) for token in tokens]])

    def head(self, i: int, features: np.ndarray, tokens) -> np.ndarray:
        """[n, M]: slot t reads features[t] and tokens[t]."""

        def rms(x, name):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.saved.around[f"{i}.{name}"]

        embedded = self.embedding[list(tokens)].copy()
        if self.saved.style == "mimo":
            embedded[0] = 0
        pair = [rms(embedded, "embedding"), rms(features, "feature")]
        both = np.concatenate(pair[::-1] if self.saved.style == "mimo" else pair, axis=1)
        return self._run(self.heads[i], inputs_embeds=(both @ self.saved.around[f"{i}.fc"].T)[None])

    def logits(self, outs: np.ndarray) -> np.ndarray:
        return outs @ self.output.T

    def log_probs(self, text, path, count: int) -> np.ndarray:
        """Of what follows the path below the last token of the text, as the heads 0 .. count - 1 see it."""
        n, whole, last = len(text) - 1, [*text, *path], count - 1
        features = self.features(text[:-1])
        out = self.head(0, features, whole[1 : n + 1])
        for level in range(1, len(path) + 1):
            i = min(level, last)
            features = out if level <= last else np.concatenate([features, out[-1:]])
            out = self.head(i, features, whole[1 + i : 1 + i + len(features)])
        return log_softmax(self.logits(out[-1]))

    def _run(self, model, **inputs) -> np.ndarray:
        import torch

        with torch.inference_mode():
            tensors = {name: torch.tensor(value) for name, value in inputs.items()}
            return model.model(**tensors, use_cache=False).last_hidden_state[0].numpy()


# What the step feeds the heads.


def runner(model: Saved, shape: tuple[int, int, int]) -> Runner:
    drafter = make_speculation(
        Mtp(None, None, *shape, coupling="none"), target=model.toy.target, head=model.head, backend="reference"
    ).drafter
    assert (drafter.name, drafter.features) == ("MTP", "final")
    config = StepConfig(nodes=drafter.width, trace=True)
    return Runner(model.toy, drafter, rows=2, draft=model.draft, config=config, page_size=3)


def oracle_trees(model: Saved, shape: tuple[int, int, int]) -> Callable[[int, list[int]], DraftTree]:
    truth, run = Oracle(model), min(model.head.count, shape[0])
    return lambda row, text: grow_tree(functools.cache(lambda path: truth.log_probs(text, path, run)), text[-1], *shape)


@pytest.mark.parametrize(
    ("name", "count", "shape"),
    [
        pytest.param("deepseek", 1, (3, 1, 4), id="one head, chain, latents"),
        pytest.param("mimo", 3, (5, 2, 9), id="three heads, tree"),
        pytest.param("qwen3 moe", 4, (2, 3, 6), id="more heads than steps, experts"),
    ],
)
def test_trees_of_steps_equal_the_oracle(saved, name, count, shape):
    """Features, shifted tokens, slots and commits of each head. A text of one token has fewer slots than heads."""
    model = saved(name, count)
    run = runner(model, shape)
    compared, _ = check_steps(run, start(run), oracle_trees(model, shape))
    assert compared >= 6, "of 10"


def test_trees_after_a_reused_page(saved):
    """A request that starts with another's page continues the heads' outputs there."""
    model, shape, shared = saved("mimo", 3), (3, 2, 6), [4, 8, 15, 16, 23, 42]
    run = runner(model, shape)
    first, second = [*shared, 5, 9], [*shared, 5, 31, 7]  # the token after the pages is the same
    run.admit(0, first, Sampling(max_tokens=12))
    run.prefill([first], chunk=4)
    run.table[1, :2] = run.table[0, :2]
    run.admit(1, second, Sampling(max_tokens=12), prefix_length=len(shared))
    output = run.prefill([[], second[len(shared) :]], chunk=2)
    texts = {1: [*second, int(output.tokens[0, 0])]}
    assert check_steps(run, texts, oracle_trees(model, shape), steps=4)[0] >= 2, "of 4"


# The parameters on the device.


def test_layers_share_the_targets_matrices(saved):
    loaded = load(str(saved("deepseek").folder), draft="MTP", progress=False)
    assert loaded.speculation.note == "3 steps, top-k 1, 4 draft tokens (automatic)"
    assert loaded.speculation.source == "1 MTP layer of the model"
    assert loaded.params.draft.keys() == {"layers_0"}
    assert not {"embed", "head"} & loaded.params.draft["layers_0"].keys()
    assert "layers_2" not in loaded.params.target, "the target has two"
    large = [leaf.shape for leaf in jax.tree.leaves(loaded.params) if VOCABULARY in leaf.shape]
    assert len(large) == 2
    plain = load(str(saved("deepseek").folder), draft="NONE", progress=False)
    jax.tree.map(np.testing.assert_array_equal, plain.params.target, loaded.params.target)


def test_token_map(saved, tmp_path):
    """Its columns of the output matrix, and the target's ids."""
    write_torch_list(tmp_path / "map.pt", list(range(40, 10, -1)))
    loaded = load(str(saved("qwen3", 2).folder), draft=Mtp(token_map=str(tmp_path / "map.pt")), progress=False)
    draft, target = loaded.params.draft, loaded.params.target
    np.testing.assert_array_equal(draft["head"], target["head"][:, draft["ids"]])
    assert sorted(draft["ids"].tolist()) == list(range(11, 41))


# Choice.


def test_choice_of_mtp_layers(saved, tmp_path, caplog):
    files, config = resolve(str(saved("mimo", 3).folder)), saved("mimo", 3).config
    caplog.set_level(logging.INFO)
    assert choose(Auto(steps=2), files, config)[0] == Mtp(steps=2)
    assert choose(Mtp(), files, config).mtp == saved("mimo", 3).head
    assert not caplog.records
    chosen = choose(Eagle(topk=3, token_map=5), files, config)
    assert chosen.options == Mtp(topk=3, token_map=5) and chosen.mtp is not None
    assert [record.getMessage() for record in caplog.records] == [
        "EAGLE without a head: the model's MTP layers draft (MTP)"
    ]
    assert choose(Eagle(path="h"), files, config) == (Eagle(path="h"), None, None, None, None)
    before = [choose(Auto(**given), files, config, "cpu").ngrams for given in ({}, {"capacity": 2048}, {"steps": 2})]
    expected = [Ngram(min_match=4), Ngram(min_match=4, capacity=2048), None]
    assert before == expected, "n-grams draft before MTP layers, too"
    with pytest.raises(ValueError, match=r"^Eagle3\.path is missing: EAGLE3 needs a draft head$"):
        choose(options_of("EAGLE3"), files, config)
    save_model(tmp_path, "Qwen3ForCausalLM", **SIZES)
    files = resolve(str(tmp_path))
    assert choose(Auto(), files, model_config(files.config)).options.algorithm == "NGRAM"
    with pytest.raises(ValueError, match=r"^Mtp\.path is missing: MTP needs MTP layers in the model, or a draft head$"):
        load(str(tmp_path), draft="NEXTN", progress=False)


# Refused checkpoints.


def changed(model: Saved, folder, **changes: np.ndarray | None):
    """A copy of a checkpoint; `changes` by names with __ for a dot, None removes a tensor."""
    tensors = load_file(model.folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((model.folder / "config.json").read_text())
    tokenizer().save_pretrained(folder)
    return folder


ONE = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mimo", {"model__mtp_layers__0__input_proj__weight": None}, "missing tensors: model.mtp_layers.0.input_proj"),
        ("qwen3", {"mtp__layers__0__self_attn__q_norm__weight": None}, "missing tensors: mtp.layers.0.self_attn.q_n"),
        ("qwen3", {"mtp__fc__weight": None}, "missing tensors: mtp.fc.weight"),
        ("deepseek", {"model__layers__2__mlp__experts__3__up_proj__weight": None}, "layers.2.mlp.experts.3.up_proj"),
        ("deepseek", {"model__layers__2__eh_proj__bias": ONE}, "no place .*model.layers.2.eh_proj.bias"),
        ("deepseek", {"model__layers__2__embed_tokens__weight": np.zeros((VOCABULARY, 16), np.float32)},
         "model.layers.2.embed_tokens.weight in .* differs from model.embed_tokens.weight"),
    ],
)  # fmt: skip
def test_damaged_layers(saved, tmp_path, name, changes, said):
    folder = str(changed(saved(name), tmp_path / "m", **changes))
    with pytest.raises(CheckpointError, match=said):
        load(folder, draft="MTP", progress=False)
    assert load(folder, draft="NGRAM", progress=False).drafter.name == "NGRAM", "the target itself is whole"


def test_unknown_layers(saved, tmp_path):
    """A layer without a projection, and a head after a missing one."""
    for name, tensor in (("model.layers.3", "model__layers__3__input_layernorm__weight"), ("mtp_layers.2", None)):
        model = saved("mimo" if tensor is None else "deepseek")
        tensor = tensor or "model__mtp_layers__2__input_layernorm__weight"
        files = resolve(str(changed(model, tmp_path / name, **{tensor: ONE})))
        with pytest.raises(CheckpointError, match=f"no place in a .* model: .*{name}"):
            load_params(files, model.config, progress=False)
