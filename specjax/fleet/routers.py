"""The load of a server in the form that routers read: SGLang's `/v1/loads`, and `/get_load`, its older form."""

from __future__ import annotations

import datetime
from typing import Any

from fastapi import FastAPI

from specjax.serve.app import Extension, Generation
from specjax.serve.metrics import read
from specjax.serve.openai_answers import FINGERPRINT
from specjax.serve.runner import Runner


def load_of(runner: Runner, rank: int) -> dict[str, Any]:
    """The entry of one replica in `loads`. Names and meanings are SGLang's. `num_total_tokens` includes the contexts of
    waiting requests. `grammar` is 0 because a grammar is compiled before its request is queued."""
    engine = runner.engine
    values = {metric.name: metric.value for metric in read([runner])}
    waiting, capacity = list(engine.scheduler.waiting), engine.config.max_running_requests
    return {
        "dp_rank": rank,
        "num_running_reqs": values["num_running_reqs"],
        "num_waiting_reqs": len(waiting),
        "num_used_tokens": values["num_used_tokens"],
        "num_total_tokens": values["num_used_tokens"] + sum(len(sequence.context) for sequence in waiting),
        "max_total_num_tokens": values["max_total_num_tokens"],
        "token_usage": values["token_usage"],
        "gen_throughput": values["gen_throughput"],
        "cache_hit_rate": values["cache_hit_rate"],
        "utilization": values["num_running_reqs"] / capacity,
        "max_running_requests": capacity,
        "speculative": {"accept_length": values["spec_accept_length"], "accept_rate": values["spec_accept_rate"]},
        "queues": {
            "waiting": len(waiting),
            "grammar": 0,
            "paused": values["num_running_reqs"] if runner.paused else 0,
            "retracted": sum(sequence.output.cached is not None for sequence in waiting),
        },
    }


def add_routes(app: FastAPI, generation: Generation) -> None:
    def rank_loads() -> list[dict[str, Any]]:
        return [load_of(replica, rank) for rank, replica in enumerate(generation.runner.ranks)]

    @app.get("/v1/loads", tags=["SGLang"])
    async def get_loads() -> dict[str, Any]:
        ranks = rank_loads()

        def total(name: str) -> Any:
            return sum(load[name] for load in ranks)

        running, waiting = total("num_running_reqs"), total("num_waiting_reqs")
        return {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": FINGERPRINT,
            "dp_rank_count": len(ranks),
            "loads": ranks,
            "aggregate": {
                "total_running_reqs": running,
                "total_waiting_reqs": waiting,
                "total_reqs": running + waiting,
                "avg_token_usage": total("token_usage") / len(ranks),
                "avg_throughput": total("gen_throughput") / len(ranks),
                "avg_utilization": total("utilization") / len(ranks),
            },
        }

    @app.get("/get_load", tags=["SGLang"])
    async def get_load() -> list[dict[str, int]]:
        # sglang-router reads it for its policy power_of_two.
        return [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_total_tokens"],
            }
            for load in rank_loads()
        ]


EXTENSIONS = (Extension(add_routes),)
