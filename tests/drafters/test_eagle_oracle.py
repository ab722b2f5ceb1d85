"""EAGLE's oracle: against trees and heads by hand, and transformers' layer."""

import functools
import math

import eagle_oracle as eagle
import numpy as np
import pytest
from eagle_oracle import NO_PARENT, HeadSpec, draft_tree, grow_tree, head_forward


def logs(*probabilities):
    with np.errstate(divide="ignore"):
        return np.log(np.float32(probabilities))


def markov(*rows):
    """The next token depends on the last one alone: row t holds the probabilities after token t. The root is 0."""
    table = logs(*rows)
    return lambda path: table[path[-1] if path else 0]


def structure(tree):
    return tree.tokens[: tree.size], tree.parents[: tree.size]


# Trees by hand.


def test_tree_of_six():
    """Steps 2, top-k 2. After a: a .5, b .3. After b: d .7, then three of .1, of which a has the lowest id.

                    pool      0     1     2     3     4     5
         ┌ a .5 ─┬─ a .25           a     b     aa    ab    bd    ba
    a ───┤       └─ b .15          .5    .3    .25   .15   .21   .03   <- left out: five places
         └ b .3 ─┬─ d .21    node   1     2     3     4     5
                 └─ a .03
    """
    log_probs = markov([0.5, 0.3, 0.2, 0], [0.1, 0.1, 0.1, 0.7], [0.25] * 4, [0.6, 0.4, 0, 0])
    tree = grow_tree(log_probs, root=0, steps=2, topk=2, width=6)
    assert tree.tokens == [0, 0, 1, 0, 1, 3]
    assert tree.parents == [-1, 0, 0, 1, 1, 2]
    assert tree.depth == [0, 1, 1, 2, 2, 2]
    assert tree.valid == [True] * 6
    np.testing.assert_allclose(np.exp(tree.scores), [1, 0.5, 0.3, 0.25, 0.15, 0.21], rtol=1e-6)
    assert [(c.token, c.parent, c.depth) for c in tree.pool] == [
        (0, NO_PARENT, 1),
        (1, NO_PARENT, 1),
        (0, 0, 2),
        (1, 0, 2),
        (3, 1, 2),
        (0, 1, 2),
    ]
    assert tree.chosen == [0, 1, 2, 3, 4]
    # The nearest is b against c, .3 to .2; the last node against the one left out is .15 to .03.
    assert math.exp(tree.gap) == pytest.approx(0.3 / 0.2, rel=1e-5)
    assert tree.paths() == {(0,), (1,), (0, 0), (0, 1), (1, 3)}


def test_beam():
    """Steps 3, top-k 2. Level 2 is aa .45, ab .05, bb .3, ba .2: the beam is aa, bb and its children come in that
    order, though a alone (.5) beats both and is not expanded again."""
    rows = {(): [0.5, 0.5], (0,): [0.9, 0.1], (1,): [0.4, 0.6], (0, 0): [0.2, 0.8], (1, 1): [1, 0]}
    tree = grow_tree(lambda path: logs(*rows[path]), 0, 3, 2, 11)
    below = [(c.token, c.parent, round(math.exp(c.score), 3)) for c in tree.pool[6:]]
    assert below == [(1, 2, 0.36), (0, 2, 0.09), (0, 4, 0.3)]  # probability 0 is no candidate
    assert structure(tree) == ([0, 0, 1, 0, 1, 1, 0, 1, 0, 0], [-1, 0, 0, 1, 1, 2, 2, 3, 3, 5])
    assert tree.valid == [True] * 10 + [False]


def test_ties():
    even = markov(*[[0.25] * 4] * 4)
    assert structure(grow_tree(even, 0, 2, 2, 5)) == ([0, 0, 1, 0, 1], [-1, 0, 0, 1, 1])
    mapped = grow_tree(even, 2, 2, 2, 4, target_ids=[3, 1, 0, 2])
    assert structure(mapped) == ([2, 3, 1, 3], [-1, 0, 0, 1])
    assert mapped.gap == pytest.approx(math.log(4))  # between the levels; ties are none


# Trees at random.


# The head by hand. M = 2, one head of two, so that every tensor is written out.

ONE, ZERO = np.eye(2, dtype=np.float32), np.zeros((2, 2), np.float32)


def small_head(kind, **changes):
    """All silent: attention and the MLP give 0. Norms weigh 1."""
    layer = HeadSpec(kind, 1, 2).layer
    names = [f"{layer}.self_attn.{x}_proj" for x in "qkvo"] + [f"{layer}.mlp.{x}_proj" for x in ("gate", "up", "down")]
    tensors = {f"{name}.weight": ZERO for name in names}
    if kind == "eagle3":
        tensors |= {f"{layer}.self_attn.{x}_proj.weight": np.concatenate([ZERO, ZERO], 1) for x in "qkv"}
        tensors |= {f"{layer}.{x}.weight": np.ones(2, np.float32) for x in ("input_layernorm", "hidden_norm")}
        tensors["norm.weight"] = np.ones(2, np.float32)
    tensors[f"{layer}.post_attention_layernorm.weight"] = np.ones(2, np.float32)
    return tensors | {
        name.replace("layer.", f"{layer}."): np.asarray(value, np.float32) for name, value in changes.items()
    }


# The head against transformers.


def random_head(rng, spec, *, hidden=12, inner=20, kv_heads=2, aux_layers=3, vocab=9, bias=False, feature_norms=()):
    """A head of random weights; for eagle3 with a draft vocabulary of every other token."""
    wide = 2 * hidden if spec.kind == "eagle3" else hidden
    query, kv, layer = spec.num_heads * spec.head_dim, kv_heads * spec.head_dim, spec.layer
    shapes = {"q": (query, wide), "k": (kv, wide), "v": (kv, wide), "o": (hidden, query)}
    shapes = {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, inner)}
    shapes["fc.weight"] = (hidden, aux_layers * hidden if spec.kind == "eagle3" else 2 * hidden)
    if bias:
        shapes |= {
            f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (query, kv, kv), strict=True)
        }
        shapes["fc.bias"] = (hidden,)
    tensors = {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"{layer}.post_attention_layernorm"]
    if spec.kind == "eagle3":
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
        ids = np.arange(0, vocab, 2)
        tensors["lm_head.weight"] = rng.normal(0, 1, (len(ids), hidden)).astype(np.float32)
        tensors["d2t"] = ids - np.arange(len(ids))
    sizes = dict.fromkeys(norms, hidden)
    if "fc_norm" in feature_norms:
        sizes |= {f"fc_norm.{i}": hidden for i in range(aux_layers)}
    if "input_norm" in feature_norms:
        sizes["input_norm"] = aux_layers * hidden
    return tensors | {f"{name}.weight": (1 + 0.2 * rng.normal(size=n)).astype(np.float32) for name, n in sizes.items()}


HEADS = {
    "eagle": (HeadSpec("eagle", 4, 6, 1e-5, 500.0), {"kv_heads": 4}),
    "eagle, grouped, biases": (HeadSpec("eagle", 4, 6, 1e-5, 500.0), {"bias": True}),
    "eagle3": (HeadSpec("eagle3", 4, 6, 1e-5, 500.0), {}),
    "eagle3, normed residual": (HeadSpec("eagle3", 2, 4, 1e-5, 500.0, True), {"kv_heads": 1}),
    "eagle3.1": (HeadSpec("eagle3", 4, 6, 1e-5, 500.0, False, True), {"feature_norms": ("fc_norm",)}),
    "eagle3.1, all norms": (
        HeadSpec("eagle3", 4, 6, 1e-5, 500.0, True, True),
        {"feature_norms": ("input_norm", "fc_norm")},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_layer_equals_transformers(name):
    """With the first norm and the residual around attention by hand, because they differ."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.set_num_threads(1)
    (spec, options), hidden, n = HEADS[name], 12, 6
    rng = np.random.default_rng(3)
    tensors = random_head(rng, spec, hidden=hidden, **options)
    at = f"{spec.layer}.self_attn"
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=20,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=tensors[f"{at}.k_proj.weight"].shape[0] // spec.head_dim,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0).eval()
    for x in "qkv":
        wide_out, wide_in = tensors[f"{at}.{x}_proj.weight"].shape
        projection = torch.nn.Linear(wide_in, wide_out, bias=f"{at}.{x}_proj.bias" in tensors)
        setattr(layer.self_attn, f"{x}_proj", projection)
    stored = {key.removeprefix(f"{spec.layer}."): value for key, value in tensors.items() if key.startswith(spec.layer)}
    norms = {
        x: torch.tensor(stored.pop(f"{x}.weight", np.ones(hidden, np.float32)))
        for x in ("input_layernorm", "hidden_norm")
    }
    layer.load_state_dict(
        {key: torch.tensor(value) for key, value in stored.items()} | {"input_layernorm.weight": torch.ones(hidden)}
    )

    embeddings = rng.normal(size=(n, hidden)).astype(np.float32)
    features = rng.normal(size=(n, hidden if spec.kind == "eagle" else 3 * hidden)).astype(np.float32)
    positions = [0, 1, 2, 3, 3, 4]
    visible = np.tri(n, dtype=bool)
    visible[4, 3] = visible[5, 3] = False  # items 3 and 4 are siblings

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps) * weight

    with torch.inference_mode():
        e, f = torch.tensor(embeddings), torch.tensor(features)
        fc = functools.partial(torch.nn.functional.linear, weight=torch.tensor(tensors["fc.weight"]))
        if spec.kind == "eagle":
            x = residual = fc(torch.cat([e, f], -1)) + torch.tensor(tensors.get("fc.bias", np.float32(0)))
        else:
            if "input_norm.weight" in tensors:
                f = norm(f, torch.tensor(tensors["input_norm.weight"]))
            if "fc_norm.0.weight" in tensors:
                each = torch.stack([torch.tensor(tensors[f"fc_norm.{i}.weight"]) for i in range(3)])
                f = norm(f.unflatten(-1, (3, hidden)), each).flatten(-2)
            g = fc(f)
            normed = norm(g, norms["hidden_norm"])
            x = torch.cat([norm(e, norms["input_layernorm"]), normed], -1)
            residual = normed if spec.norm_before_residual else g
        rope = LlamaRotaryEmbedding(config)(x[None], torch.tensor([positions]))
        mask = torch.where(torch.tensor(visible), 0.0, -torch.inf)[None, None]
        a = residual + layer.self_attn(x[None], position_embeddings=rope, attention_mask=mask)[0][0]
        expected = a + layer.mlp(layer.post_attention_layernorm(a))
        if spec.norm_output:
            expected = norm(expected, torch.tensor(tensors["norm.weight"]))
    for dtype in (np.float32, np.float64):
        outs = head_forward(tensors, spec, embeddings, features, positions, visible, [False] * n, dtype)
        assert outs.dtype == dtype
        np.testing.assert_allclose(outs, expected.numpy(), rtol=1e-5, atol=1e-5)


# Head and tree together.


def test_head_that_doubles_its_feature():
    """x = 2 f: the root's children follow 2 f_{n-1}, theirs 4 f_{n-1}, ...: a node's feature is its parent's output."""
    tensors = small_head("eagle", **{"fc.weight": np.concatenate([ZERO, 2 * ONE], 1)})
    head, features = np.float32([[0.4, 0], [0, 0.1], [0.1, 0.1]]), np.float32([[-9, 9], [1, 2]])
    settings = {"steps": 3, "topk": 2, "width": 7}
    tree = draft_tree(
        tensors,
        HeadSpec("eagle", 1, 2),
        [0, 1],
        2,
        features,
        embedding=np.ones((3, 2), np.float32),
        head=head,
        **settings,
    )
    expected = grow_tree(lambda path: eagle.log_softmax(head @ features[1] * 2 ** (len(path) + 1)), 2, **settings)
    assert structure(tree) == structure(expected)
    np.testing.assert_allclose(tree.scores, expected.scores, atol=1e-6)
