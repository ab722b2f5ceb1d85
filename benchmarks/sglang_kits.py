"""Runs SGLang's own server tests, its "kits", against a running server.

    pip download sglang --no-deps --dest kits && unzip -q kits/sglang-*.whl 'sglang/test/*' -d kits
    specjax serve &
    python benchmarks/sglang_kits.py kits [--base http://127.0.0.1:30000] [--only PATTERN] [--all]

The kits are mixins of tests over HTTP. SGLang is not installed: imports from it are replaced by mocks, except the kits
and a few functions of its `test_utils` and fixtures, whose source is read.

Tests of other models or features and of servers with special flags (`OTHERS`) are left out, unless --all is given.
Tests that the text of the built-in model fails (`MODEL`) run and are reported separately. Fails if any other test does.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import random
import re
import sys
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import openai
import requests

OTHERS = {
    r"mmmu|vlm|dsa_metadata|unified_radix|pd_parity": "images, other models' caches, several servers",
    r"eval_accuracy|lm_eval|kl_divergence|SpecAccuracy|SpecPerf|fwd_occupancy|perf_bench|cache_hit": "data, timings",
    r"test_bs_1_speed|test_acc_length|SpecParity|test_eos_token": "SGLang's own client, starts or models",
    r"reasoning_kit": "a model that thinks",
    r"prefix_cache_branching": "the cache of hybrid models, which keeps no prefix at first",
    r"WaitingTimeout|RunningTimeout": "environment variables; not supported",
    r"streaming_session": "sessions, which the prefix cache makes unnecessary here",
    r"HiddenStates|SamplingMask": "hidden states and masks of sampling in answers, which are refused by name",
    r"test_tool_result_image": "SGLang's classes, without a server",
}
"""Pattern of tests -> their requirement."""

MODEL = {
    r"test_concurrent_requests": "eight capitals, of which the model knows fewer than seven",
    r"test_json_openai|test_json_generate|test_mix_json|SpecGrammar": "an integer or a string that it ends within 128 "
    "tokens; the grammar allows it to go on, and it does",
    r"test_count_tokens_with_system": "a chat template that writes no system prompt of its own",
    r"basic_decode_correctness": "arithmetic and facts",
    r"test_finish_stop_str": "a newline in the answer to a chat",
    r"test_constrained_decoding": "a string that it ends",
}
"""Pattern of tests -> what they require of the text."""

FIXTURE = "send_request", "send_requests_abort", "run_decode"


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the kits from `root` and mocks the rest of SGLang."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        file = self._root / f"{name.replace('.', '/')}.py"
        if name.startswith("sglang.test.kits.") and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__name__, module.__spec__ = [], spec.name, spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def taken(file: Path, *names: str) -> dict[str, Any]:
    """Functions and constants of a file that cannot be imported."""
    nodes: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in names)
    ]
    space: dict[str, Any] = {"requests": requests, "random": random, "time": time, "unittest": unittest}
    space |= {"Tuple": tuple, "List": list}
    exec(compile(ast.Module(nodes, []), str(file), "exec"), space)
    return {name: space[name] for name in names}


def suite(root: Path, base: str, model: str, wanted: str, everything: bool) -> unittest.TestSuite:
    sys.meta_path.insert(0, Mocks(root))
    tests = root / "sglang" / "test"
    utils = importlib.import_module("sglang.test.test_utils")
    for name, function in taken(tests / "test_utils.py", "run_logprob_check").items():
        setattr(utils, name, function)
    fixture = taken(tests / "server_fixtures" / "spec_eagle_fixture.py", "PROMPTS", *FIXTURE)

    class Process:
        """Tells the tests that the server runs."""

        def poll(self) -> int | None:
            return None if requests.get(f"{base}/health", timeout=10).ok else 1

    shared: dict[str, Any] = {
        "base_url": base, "model": model, "api_key": "none", "process": Process(), "topk": 1,
        "client": openai.Client(api_key="none", base_url=f"{base}/v1"),
        "abort_all_max_new_tokens": 4000, "pause_ignore_eos": True,
        "batch_accept_len_thres": 0.99, "accept_length_thres": 0.99, "acc_length_thres": 0.99, "bs_1_speed_thres": 0,
        **{name: fixture[name] for name in FIXTURE},
    }  # fmt: skip
    tests_of_kits = unittest.TestSuite()
    for file in sorted((tests / "kits").glob("*_kit*.py")):
        try:
            kit = importlib.import_module(f"sglang.test.kits.{file.stem}")
        except Exception as error:
            print(f"{file.stem} cannot be imported: {error!r:.80}")
            continue
        for name, mixin in vars(kit).items():
            if not isinstance(mixin, type) or mixin.__module__ != kit.__name__ or issubclass(mixin, unittest.TestCase):
                continue
            case = type(f"{file.stem}.{name}", (mixin, unittest.TestCase), dict(shared))
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
                assert isinstance(test, unittest.TestCase)
                if re.search(wanted, test.id()) and (everything or reason(test, OTHERS) is None):
                    tests_of_kits.addTest(test)
    return tests_of_kits


def reason(test: unittest.TestCase, table: dict[str, str]) -> str | None:
    return next((why for pattern, why in table.items() if re.search(pattern, test.id())), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kits", type=Path, help="the folder with sglang/test")
    parser.add_argument("--base", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="default", help="its name")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression of test names")
    parser.add_argument("--all", action="store_true", help="also run the tests of OTHERS")
    args = parser.parse_args()
    tests = suite(args.kits, args.base, args.model, args.only, args.all)
    result = unittest.TextTestRunner(verbosity=2, buffer=True).run(tests)
    failed = [test for test, _ in (*result.failures, *result.errors)]
    ours = [test for test in failed if reason(test, MODEL) is None]
    for test in failed:
        print(f"{test.id()}: {reason(test, MODEL) or 'the server'}")
    count = result.testsRun
    print(
        f"{count - len(failed)} of {count} pass, {len(failed) - len(ours)} fail by the model's text, {len(ours)} else"
    )
    return len(ours) > 0


if __name__ == "__main__":
    sys.exit(main())
