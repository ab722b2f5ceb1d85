"""Servers of replicas over several CPU devices, for tests/wings/test_replicas_devices.py.

A separate process: the device count must be set before JAX starts. Prints one line of JSON a case.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import mesh_program  # asks for four devices
from engine_helpers import devices, tokenizer
from mesh_program import BIAS, CASES, PROMPTS
from server_helpers import Running, running

from specjax.cli import serve as command
from specjax.cli.flags import ServerSettings, Settings
from specjax.drafters import Params
from specjax.engine import Engine
from specjax.fleet.replicas import Replicas
from specjax.serve.runner import Service
from specjax.settings import Parser, add_flags, parse

FIELDS: list[dict[str, Any]] = [
    {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0, "logit_bias": BIAS},
    {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.8, "sampling_seed": 3, "top_p": 0.9},
    {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0, "frequency_penalty": 0.3},
    {"max_new_tokens": 12, "temperature": 0, "regex": "[a-c]{4}[0-9]+x"},
]
"""`mesh_program.SAMPLING`, as a client says it."""


def engine(case: str, replicas: int, split: int, rank: int, adaptive: bool) -> Engine:
    drafter, draft, description = CASES[case]()
    config = replace(mesh_program.settings(split), first_device=rank * split, adaptive=adaptive)
    params = Params(mesh_program.weights, draft)
    return Engine(mesh_program.target, params, tokenizer(), drafter, config=config, draft_model=description)


def in_memory(case: str, replicas: int, split: int, adaptive: bool = False) -> dict[str, Any]:
    def service(settings: ServerSettings) -> Service:
        return Replicas(lambda rank: engine(case, replicas, split, rank, adaptive), settings, replicas, warm_up=False)

    return serve(service)


def from_flags(*flags: str) -> dict[str, Any]:
    """The service that the command makes."""
    parser = Parser(prog="test")
    add_flags(parser, Settings())
    _, settings = parse(parser, list(flags), Settings())
    return serve(lambda _: command.make_service(settings, partial(command.load, settings)))


def serve(service: Any) -> dict[str, Any]:
    """The texts of all requests, twice, with several at a time; and where they ran."""
    with running(None, service=service) as server, ThreadPoolExecutor(4) as clients:
        texts = [list(clients.map(lambda pair: text(server, *pair), zip(PROMPTS, FIELDS, strict=True))) for _ in "12"]
        server.wait_idle()  # every page is back
        with server.client() as client:
            info, loads = client.get("/server_info").json(), client.get("/v1/loads").json()
        engines = [rank.engine for rank in server.runner.ranks]
        return {
            "texts": texts,
            "algorithm": engines[0].drafter.name,
            "generated": [one.counters.generated for one in engines],
            "cached": sum(one.counters.cached_tokens for one in engines),
            "accepted": sum(one.counters.accepted for one in engines),
            "chooses": [one.policy is not None for one in engines],
            "devices": [devices(one) for one in engines],
            "sizes": [info["dp_size"], info["tp_size"], len(info["internal_states"]), loads["dp_rank_count"]],
            "ep_size": info["ep_size"],
        }


def text(server: Running, prompt: list[int], fields: dict[str, Any]) -> list[int]:
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


if __name__ == "__main__":
    for argument in map(json.loads, sys.argv[1:]):  # of `in_memory`, or flags
        try:
            found = from_flags(*argument) if argument[0].startswith("--") else in_memory(*argument)
        except Exception as error:
            found = {"error": str(error)}
        print(json.dumps(found), flush=True)
