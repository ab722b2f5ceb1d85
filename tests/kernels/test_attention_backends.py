"""The attention implementations inside the engine: the text is the oracle's with each, and a name is refused early."""

from __future__ import annotations

import jax
import pytest
from engine_helpers import check_idle, check_plain, make_engine
from specjax_kernels import IMPLEMENTATIONS, pallas_triton, tree_attention
from specjax_kernels.specs import named
from toy_models import Toy, tiny_llama

from specjax import make_target
from specjax.config import HeadConfig
from specjax.drafters import Ngram, TreeShape, eagle_drafter
from specjax.engine import SamplingParams
from specjax.load import attention_implementation
from specjax.models.draft_head import init_head_params

REQUESTS = [
    ([1, 2, 3], {}),
    ([7] * 11, {"temperature": 1.0, "seed": 3}),
    ([40 % 31, 5], {"repetition_penalty": 1.4}),
]


@pytest.fixture
def calls(monkeypatch):
    """How often the Pallas kernel was traced."""
    traced, real = [], pallas_triton._launched

    def counted(call, shape, *, packed):
        traced.append(shape)
        return real(call, shape, packed=packed)

    monkeypatch.setattr(pallas_triton, "_launched", counted)
    return traced


@pytest.mark.slow  # interpreted; the kernel alone is compared in tests/kernels/test_kernels.py
@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_the_pallas_kernel_writes_the_same_text(algorithm, calls):
    """Interpreted. Prefill in chunks, trees, a draft's beam; three requests in four rows, so one is inactive."""
    toy = tiny_llama(vocab_size=270, max_positions=128)
    model = Toy(make_target(toy.target.config, backend="pallas"), toy.params, toy.logits)
    drafter, draft = Ngram(nodes=4, max_match=4, capacity=4096), None
    if algorithm == "EAGLE3":
        c = toy.target.config
        head = HeadConfig("eagle3", c.hidden_size, 2 * c.hidden_size, 24, 4, 2, 8, 1e-5, c.rope, 20, aux_layers=(0, 1),
                          own_head=True, mapped=True)  # fmt: skip
        draft = init_head_params(head, model.target, jax.random.key(1))
        drafter = eagle_drafter(model.target, head, TreeShape(3, 2, 6), backend="pallas")
    engine = make_engine(model, drafter, draft=draft)
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True, **more) for _, more in REQUESTS]
    found = engine.generate([prompt for prompt, _ in REQUESTS], params)
    assert any(shape.causal for shape in calls), "prefills ran the kernel"
    assert any(not shape.causal for shape in calls), "so did steps"
    assert algorithm == "NGRAM" or any(shape.C > shape.N for shape in calls), "and a draft's beam"
    for (prompt, _), wanted, completion in zip(REQUESTS, params, found, strict=True):
        check_plain(model, prompt, wanted, completion)
    check_idle(engine)


def test_names_are_checked_before_anything_is_loaded(caplog):
    assert attention_implementation(None) is attention_implementation("auto") is None
    for name in ("reference", "xla"):
        assert attention_implementation(name) == name
    assert not caplog.records
    assert attention_implementation("pallas") == "pallas"
    assert "interpreted on this CPU" in caplog.text
    with pytest.raises(ValueError, match=r"^backend cuda: unknown .*reference, xla, pallas, triton"):
        attention_implementation("cuda")
    with pytest.raises(ValueError, match=r"^backend triton: implementation 'triton' of tree_attention"):
        attention_implementation("triton")  # another Python, no package, or no GPU


def test_on_another_accelerator_pallas_is_refused_and_auto_is_not(monkeypatch):
    args, options = named("decode").arguments()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: ["a TPU"])
    with pytest.raises(NotImplementedError, match=r"'pallas' .* default device is a TPU\."):
        tree_attention(*args, **options, implementation="pallas")
    assert tree_attention(*args, **options).shape == args[0].shape
    assert set(IMPLEMENTATIONS) == {"reference", "xla", "pallas", "triton"}
