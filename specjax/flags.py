"""Command-line flags that `generate` and the server share: named as SGLang's users know them."""

from __future__ import annotations

import argparse
from typing import Any

from specjax.checkpoint import BUILT_IN_MODEL
from specjax.drafters import AUTO, DRAFTERS
from specjax.engine import EngineConfig

NGRAM_FLAGS: dict[str, tuple[int, str]] = {
    "min_match_window_size": (1, "shortest run of tokens that counts as a match"),
    "max_match_window_size": (12, "longest run of tokens that is looked up"),
    "min_bfs_breadth": (1, "fewest children of a node"),
    "max_bfs_breadth": (10, "most children of a node; fewer where the match is longer or the node deeper"),
    "branch_length": (18, "longest continuation"),
    "capacity": (1_000_000, "tokens remembered, over all requests"),
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == [] or action.required:
            return action.help
        return super()._get_help_string(action)


def algorithm_name(text: str) -> str:
    """Any case.

    Raises:
        ArgumentTypeError: no such algorithm; lists all.
    """
    if text.upper() not in (AUTO, *DRAFTERS):
        raise argparse.ArgumentTypeError(f"no algorithm {text!r}; there are: {', '.join((AUTO, *DRAFTERS))}")
    return text.upper()


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", "--model-path", default=BUILT_IN_MODEL, help="alias, local folder, .gguf file or hub id"
    )
    group.add_argument("--revision", help="of a model on the hub")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto = float32 on a CPU, the checkpoint's on a GPU",
    )


def add_engine_flags(parser: argparse.ArgumentParser, *, max_running_requests: int) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-running-requests", type=int, default=max_running_requests, help="requests that share a batch"
    )
    group.add_argument("--max-total-tokens", type=int, help="tokens in the KV pool; default: fits the device")
    group.add_argument("--context-length", type=int, help="at most, and by default, the model's")
    group.add_argument("--page-size", type=int, default=16, help="tokens in a page of the KV pool")
    group.add_argument(
        "--chunked-prefill-size",
        type=int,
        help="prompt tokens a forward; default and most: 512 on a CPU, 2048 on a GPU",
    )
    group.add_argument(
        "--mem-fraction-static", "--mem-fraction", type=float, default=0.85,
        help="share of a GPU's memory for weights and KV pool",
    )  # fmt: skip
    group.add_argument(
        "--attention-backend", choices=("xla", "reference"), help="tree attention; default: the device's best"
    )
    group.add_argument(
        "--disable-overlap-schedule", action="store_true", help="read each step before the next is dispatched"
    )


def add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation", "changes the speed, never the text")
    group.add_argument(
        "--speculative-algorithm", type=algorithm_name, default=AUTO, help=f"{AUTO}, {', '.join(DRAFTERS)}"
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        help="nodes of a draft tree, the root included; default: 12; on a CPU 8 where the match is strong, else 4",
    )
    for name, (default, text) in NGRAM_FLAGS.items():
        group.add_argument(f"--speculative-ngram-{name.replace('_', '-')}", type=int, default=default, help=text)
    group.add_argument(
        "--speculative-ngram-weak-draft-tokens", type=int,
        help="nodes of a tree while the longest match is weak; default: as many as for a strong one, but see above",
    )  # fmt: skip
    group.add_argument(
        "--speculative-ngram-strong-match-size", type=int, help="tokens from which on a match is strong; default: 3"
    )
    group.add_argument(
        "--speculative-ngram-match-type", type=str.upper, default="BFS", choices=("BFS", "PROB"),
        help="which continuations come first: the most recent, or those that most matches agree on",
    )  # fmt: skip


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """`Engine.from_pretrained`'s keyword arguments.

    Raises:
        ValueError: a value is out of range; names the flag.
    """
    names = [*NGRAM_FLAGS, "match_type", "weak_draft_tokens", "strong_match_size"]
    flags = {name: getattr(args, f"speculative_ngram_{name}") for name in names}
    flags["num_draft_tokens"] = args.speculative_num_draft_tokens
    flags = {name: value for name, value in flags.items() if value is not None}
    return {
        "dtype": args.dtype,
        "algorithm": args.speculative_algorithm,
        "algorithm_flags": flags,
        "revision": args.revision,
        "backend": args.attention_backend,
        "config": EngineConfig(
            max_running_requests=args.max_running_requests,
            page_size=args.page_size,
            max_total_tokens=args.max_total_tokens,
            context_length=args.context_length,
            chunked_prefill_size=args.chunked_prefill_size,
            mem_fraction=args.mem_fraction_static,
            overlap=not args.disable_overlap_schedule,
        ),
    }
