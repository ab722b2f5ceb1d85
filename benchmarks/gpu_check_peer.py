"""Part `peer` of `gpu_check.py`: the same model's plain decoding by transformers and torch, if they are there.

Random weights of the same shape (their values do not change the time), bfloat16, batch 1: `generate` with its usual
cache, and with a static one, for which transformers compiles the model. A token's time is the difference of two lengths
of output, so that neither the prompt nor the first call's work is in it. Whatever fails is a line, never an error.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gpu_check_report import Report, say
from gpu_check_steps import model_of
from llama_shapes import kv_bytes, least_bytes


def peer(report: Report) -> None:
    """Decoding by transformers."""
    # transformers looks for a package `kernels`; benchmarks/kernels.py is none.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    try:
        import torch
        import transformers

        device = "cpu" if report.plan.tiny else "cuda"
        if device == "cuda" and not torch.cuda.is_available():
            report.note("transformers: torch sees no GPU, skipped")
            return
        say(f"torch {torch.__version__}, transformers {transformers.__version__}")
        model = _model(report, device)
        for context in report.plan.contexts:
            for cache in ("dynamic", "static"):
                name = f"transformers, {cache} cache, context {context}"
                if report.in_time(name, needs=0 if report.plan.tiny else 60):
                    try:
                        _time(report, model, context, cache, device)
                    except Exception as error:  # a compiler may be missing, memory too small, a version too old
                        report.note(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    except Exception as error:
        report.note(f"transformers: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _model(report: Report, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model_of(report.plan)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_epsilon,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # or it would be made in float32 first
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


def _time(report: Report, model: Any, context: int, cache: str, device: str) -> None:
    import torch

    plan = report.plan
    short, long, runs = (1, 3, 1) if plan.tiny else (16, 80, 3)
    prompt = torch.randint(0, model.config.vocab_size, (1, context), device=device)
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    if plan.tiny:
        options["disable_compile"] = True

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
                min_new_tokens=count, max_new_tokens=count, **options,
            )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()
        assert out.shape[1] == context + count, f"{out.shape[1] - context} tokens instead of {count}"
        return time.perf_counter() - start

    for count in (short, long):  # what is compiled, is compiled here
        seconds(count)
    samples = []
    for _ in range(runs):
        brief = seconds(short)
        samples.append((seconds(long) - brief) / (long - short))
    median = statistics.median(samples)
    shape = model_of(plan)
    least = least_bytes(shape)["target_bytes"] + context * kv_bytes(shape)
    say(f"transformers, {cache:7} cache, batch 1, context {context:6}: {1e3 * median:8.3f} ms a token, "
        f"{1 / median:7.1f} tokens/s, reading {least / median / 1e9:.0f} GB/s")  # fmt: skip
    report.add(
        "peer", cache=cache, batch=1, context=context, milliseconds=round(1e3 * median, 4),
        tokens_per_second=round(1 / median, 1), samples_ms=[round(1e3 * x, 4) for x in samples],
    )  # fmt: skip
