"""Which implementation runs: branches by platform, and attention implementations inside the engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import check_idle, check_plain, make_engine, toy
from specjax_kernels import pallas_triton, platforms
from specjax_kernels.platforms import by_platform, of_default_device
from toy_models import Toy, tiny_llama

from specjax import make_target
from specjax.config import HeadConfig
from specjax.drafters import TreeShape, eagle_drafter
from specjax.engine import SamplingParams
from specjax.load import attention_implementation
from specjax.models.draft_head import init_head_params


def branching(traced: list[str]):
    """x + 1 on a CPU, x * 3 elsewhere. Appends to `traced` the name of each branch that is traced."""

    def branch(name: str, function):
        def run(x):
            traced.append(name)
            return function(x)

        return run

    branches = {"cpu": branch("cpu", lambda x: x + 1), "default": branch("default", lambda x: x * 3)}
    return lambda x: by_platform(x, **branches)


def test_all_branches_are_traced() -> None:
    traced: list[str] = []
    function = jax.jit(branching(traced)).trace(jnp.ones(4))
    texts = [function.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")]
    assert sorted(traced) == ["cpu", "default"]
    assert ["multiply" in text for text in texts] == [False, True]


def test_one_branch_is_traced_for_the_default_device() -> None:
    traced: list[str] = []
    with of_default_device():
        assert jax.jit(branching(traced))(jnp.ones(())) == 2
    assert traced == ["cpu"]
    jax.jit(branching(traced)).trace(jnp.ones(()))  # the context has ended
    assert sorted(traced) == ["cpu", "cpu", "default"]


def test_an_engine_traces_the_branch_of_its_platform(monkeypatch) -> None:
    compile_, seen = jax.stages.Lowered.compile, []

    def recording(lowered, *arguments, **options):
        seen.append(platforms._only.get())
        return compile_(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", recording)
    engine = make_engine(toy(), "NONE", warm=False)
    engine.programs.get(engine.buckets.all_keys()[0])
    assert seen == [jax.default_backend()]


REQUESTS = [
    ([1, 2, 3], {}),
    ([7] * 11, {"temperature": 1.0, "seed": 3}),
    ([40 % 31, 5], {"repetition_penalty": 1.4}),
]


@pytest.mark.slow  # interpreted
def test_an_engine_with_the_pallas_kernel(monkeypatch):
    """Prefill in chunks, trees, a draft's beam; three requests in four rows, so one row is inactive."""
    shapes, launched = [], pallas_triton._launched

    def counted(call, shape, *, packed):
        shapes.append(shape)
        return launched(call, shape, packed=packed)

    monkeypatch.setattr(pallas_triton, "_launched", counted)
    small = tiny_llama(vocab_size=270, max_positions=128)
    model = Toy(make_target(small.target.config, backend="pallas"), small.params, small.logits)
    c = small.target.config
    head = HeadConfig("eagle3", c.hidden_size, 2 * c.hidden_size, 24, 4, 2, 8, 1e-5, c.rope, 20, aux_layers=(0, 1),
                      own_head=True, mapped=True)  # fmt: skip
    draft = init_head_params(head, model.target, jax.random.key(1))
    engine = make_engine(model, eagle_drafter(model.target, head, TreeShape(3, 2, 6), backend="pallas"), draft=draft)
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True, **more) for _, more in REQUESTS]
    completions = engine.generate([prompt for prompt, _ in REQUESTS], params)
    assert any(shape.causal for shape in shapes), "prefills"
    assert any(not shape.causal for shape in shapes), "steps"
    assert any(shape.C > shape.N for shape in shapes), "the beam"
    for (prompt, _), sampling, completion in zip(REQUESTS, params, completions, strict=True):
        check_plain(model, prompt, sampling, completion)
    check_idle(engine)


def test_attention_backend_names(caplog):
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
