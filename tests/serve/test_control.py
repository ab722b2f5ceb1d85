"""Routes other than generation: tokens of texts, health, state, metrics, aborts, profiles."""

from __future__ import annotations

import importlib
import json
import math
import re
import socket
from collections import Counter
from pathlib import Path

import jax
import pytest
from body_helpers import COMPLETE, GENERATE, HELLO
from engine_helpers import NGRAM, force_drafts, make_engine, tokenizer, toy
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import SECONDS, Running, braked, check_error, in_background, running, slow_down, wait_until

from specjax.acceptance import AcceptAbove
from specjax.cli import serve as command
from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.engine.runtime import Counters
from specjax.serve.errors import ABORTED, PAUSED
from specjax.serve.metrics import SECONDS as BUCKETS
from specjax.serve.metrics import Latencies, Report

ROOT = Path(__file__).parents[2]


def metrics(server: Running) -> dict[str, float]:
    """Samples by name, without buckets of histograms. All must have the model's name as label."""
    answer = server.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert all(sample.labels["model_name"] == "toy" for sample in samples)
    return {sample.name: sample.value for sample in samples if "le" not in sample.labels}


# Tokens of texts.


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize(server, prefix):
    texts = ["hello there", "", "ö12"]
    ids = [tokenizer()(text)["input_ids"] for text in texts]
    single = server.post(f"{prefix}/tokenize", {"prompt": texts[0], "model": "toy"}).json()
    assert single == {"tokens": ids[0], "count": len(ids[0]), "max_model_len": 128}
    several = server.post(f"{prefix}/tokenize", {"prompt": texts}).json()
    assert several["tokens"] == ids and several["count"] == [*map(len, ids)]
    bare = server.post(f"{prefix}/tokenize", {"prompt": "hello", "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer()("hello", add_special_tokens=False)["input_ids"]

    first = ids[0]
    for body, text in (
        ({"tokens": first}, "hello there"),
        ({"tokens": [first, first[:1], []]}, ["hello there", tokenizer().decode(first[:1]), ""]),
        ({"tokens": []}, ""),
        ({"tokens": [1, *first, 2]}, "hello there"),
        ({"tokens": [1, *first, 2], "skip_special_tokens": False}, "<|im_start|>hello there<|im_end|>"),
    ):
        assert server.post(f"{prefix}/detokenize", body).json()["text"] == text


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/tokenize", [{}, {"prompt": 5}, {"prompt": ["a", 5]}, {"prompt": "a" * 100_000}], "prompt"),
        ("/tokenize", [{"prompt": "a", "messages": HELLO}], "messages"),
        ("/tokenize", [{"prompt": "a", "add_special_tokens": 1}], "add_special_tokens"),
        ("/detokenize", [{}, {"tokens": "abc"}, {"tokens": [1, [2]]}, {"tokens": [[1], 2]}, {"tokens": [10**6]},
                         {"tokens": [-1]}, {"tokens": [True]}], "tokens"),
        ("/abort_request", [{}, {"rid": 5}], "rid"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server, path, wrong, param):
    for body in wrong:
        check_error(server.post(path, body), 400, param)
    if path != "/abort_request":
        assert server.post(path, {"prompt": "a", "tokens": [5], "model": "other"}).status_code == 404


# Health and state.


def test_health_generates_a_token(server, monkeypatch):
    before = server.engine.counters.generated
    assert server.get("/health_generate").json() == {"status": "ok"}
    server.wait_idle()
    assert server.engine.counters.generated == before + 1
    monkeypatch.setattr("specjax.serve.control.HEALTH_SECONDS", 0.3)
    with server.blocked():
        check_error(server.get("/health_generate"), 503, text="0.3 s")
    server.wait_idle()


def test_health_of_a_busy_server_needs_no_token(server):
    long = in_background(server.complete, "hello", max_tokens=60, ignore_eos=True)
    wait_until(lambda: server.runner.unfinished == 1)
    assert server.get("/health_generate").json() == {"status": "ok"}
    assert long.result(SECONDS).json()["usage"]["completion_tokens"] == 60
    server.wait_idle()


def test_server_info_and_model_info(server):
    """The names that SGLang's users and routers read."""
    server.chat("hello hello hello hello", max_tokens=20, temperature=0)
    server.wait_idle()
    info, model = server.get("/server_info").json(), server.get("/model_info").json()
    assert info == server.get("/get_server_info").json() and model == server.get("/get_model_info").json()
    (state,) = info["internal_states"]
    counters, drafter, pool = server.engine.counters, server.engine.drafter, server.engine.pool
    assert state["avg_spec_accept_length"] == round(counters.verified / counters.verifications, 4) >= 1
    assert state["pages"]["free"] + state["pages"]["cached"] == state["pages"]["total"] == pool.pages
    assert (state["num_running_reqs"], state["num_queue_reqs"]) == (0, 0)
    assert info["engine"]["page_size"] == 4 and info["max_total_num_tokens"] == 1024
    assert "api_key" not in json.dumps(info) and info["version"]
    assert info["speculative_lossy"] is None and info["disable_radix_cache"] is False
    assert (info["speculative_num_steps"], info["speculative_eagle_topk"]) == (drafter.depth, None)
    assert (info["served_model_name"], info["dp_size"], info["tp_size"], info["ep_size"]) == ("toy", 1, 1, 1)
    assert model["served_model_name"] == "toy" and isinstance(model["tokenizer_path"], str) and model["is_generation"]
    assert model["context_length"] == 128 and model["speculative_algorithm"] == "NGRAM"
    assert model["verify_steps"] >= model["drafted_steps"] > 0


def test_server_info_names_lossy_thresholds():
    with running(make_engine(toy(), "NONE", verify=AcceptAbove(0.5))) as server:
        for path in ("/server_info", "/model_info"):
            expected = {"accept_threshold_single": 0.5, "accept_threshold_acc": 1.0}
            assert server.get(path).json()["speculative_lossy"] == expected


def test_flush_is_refused_while_a_request_runs(server):
    body = {"prompt": "hello", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with braked(server.engine, after=4) as brake, server.client() as client, client.stream("POST", COMPLETE, json=body):
        flush = in_background(server.post, "/flush_cache", {})
        server.wait_for_command()
        brake.release()
        check_error(flush.result(SECONDS), 400, text="cannot flush")
    server.wait_idle()


def test_counts_of_forced_tokens():
    """Tokens that a grammar forces say nothing about the drafter."""
    counters = Counters()
    for tokens, nodes, free in ((3, 4, False), (1, 2, True), (2, 3, True), (1, 1, True)):
        counters.count(tokens, verified=True, nodes=nodes, free=free)
        counters.nodes[nodes] += 1
    assert (counters.drafted_steps, counters.drafts, counters.accepted) == (3, 6, 3)
    assert (counters.own_drafts, counters.own_accepted) == (3, 1)
    both = Counters.sum([counters, counters])
    counters.nodes[9] += 1
    assert both.nodes == dict.fromkeys((1, 2, 3, 4), 2) and (both.steps, both.drafts) == (8, 12)
    assert both.accepted_at == {0: 4, 1: 2}


# Draft sizes.


def test_log_of_draft_sizes(caplog, monkeypatch):
    """Shares of steps, and why a size is in use when it has changed; in `/get_server_info`, too."""
    caplog.set_level("INFO", "specjax.serve")
    monkeypatch.setattr("specjax.serve.metrics.SIZES_SECONDS", math.inf)
    engine = make_engine(toy(), NGRAM, warm=False, adaptive=True, max_running_requests=1)
    engine.warm_up(progress=False)
    report, rare, before = Report(engine, interval=8), 1, 0
    force_drafts(engine, lambda: ((engine.counters.steps - before) % 4 == 0) == (rare > 1))

    def lines() -> list[str]:
        """Lines about steps of a request in which one step of four has `rare` nodes."""
        nonlocal before
        before = engine.counters.steps
        caplog.clear()
        engine.add("hello", SamplingParams(max_new_tokens=100, ignore_eos=True))
        while engine.unfinished:
            engine.step()
            report.after_step()
        return [record.getMessage() for record in caplog.records if "Prefill" not in record.getMessage()]

    most = engine.drafter.width
    decode, sizes, *more = lines()
    assert decode.endswith(f"#queue-req: 0, nodes: 1 25%, {most} 75%")
    row = r"(about )?[\d.]+ ms [\d.]+ tokens"
    assert re.fullmatch(rf"Draft sizes for 1 request: 1 node {row}, {most} nodes {row} \(in use\)", sizes)
    rare = most
    more += lines()
    assert more[-1].endswith(f"nodes: 1 75%, {most} 25%")
    assert not any(line.startswith("Draft sizes") for line in more), "too soon"
    monkeypatch.setattr("specjax.serve.metrics.SIZES_SECONDS", 0.0)
    (sizes,) = (line for line in lines() if line.startswith("Draft sizes"))
    assert re.fullmatch(rf"Draft sizes for 1 request: 1 node {row} \(in use\), {most} nodes {row}", sizes)

    with running(engine) as server:
        (state,) = server.get("/get_server_info").json()["internal_states"]
    names = {"batch", "nodes", "seconds", "measured", "tokens", "steps", "using"}
    table = state["speculative_sizes"]
    assert all(row.keys() == names for row in table)
    assert engine.counters.nodes == Counter({row["nodes"]: row["steps"] for row in table})


# Metrics.


def test_loads_while_requests_run_and_wait(monkeypatch):
    """With one row, one request runs and one waits."""
    engine = make_engine(toy(), "NONE", max_running_requests=1)
    slow_down(engine, monkeypatch, 0.05)
    with running(engine) as server:
        jobs = [in_background(server.complete, "hello" * n, max_tokens=100, ignore_eos=True) for n in (1, 2)]
        wait_until(lambda: engine.scheduler.active and engine.scheduler.waiting)
        loads, (old,), samples = server.get("/v1/loads").json(), server.get("/get_load").json(), metrics(server)
        monkeypatch.undo()
        assert [job.result(SECONDS).status_code for job in jobs] == [200, 200]
        server.wait_idle()
        (idle,) = server.get("/v1/loads").json()["loads"]
        after = metrics(server)
    (load,) = loads["loads"]
    assert loads["dp_rank_count"] == 1
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["queues"]["waiting"]) == (1, 1, 1)
    assert load["utilization"] == 1.0 and load["max_running_requests"] == 1
    waiting = len(engine.encode("hello")), len(engine.encode("hello" * 2))
    assert load["num_total_tokens"] - load["num_used_tokens"] in waiting
    assert load["num_used_tokens"] > 0 and load["max_total_num_tokens"] == samples["sglang:max_total_num_tokens"]
    assert samples["sglang:num_running_reqs"] == samples["sglang:num_queue_reqs"] == 1
    assert 0 < samples["sglang:token_usage"] < 1
    assert samples["sglang:num_used_tokens"] > 0 and samples["sglang:num_used_tokens"] % 4 == 0
    assert (loads["aggregate"]["total_running_reqs"], loads["aggregate"]["total_reqs"]) == (1, 2)
    assert (old["dp_rank"], old["num_reqs"], old["num_waiting_reqs"]) == (0, 2, 1) and old["num_tokens"] > 0
    assert idle["num_running_reqs"] == idle["num_waiting_reqs"] == idle["num_used_tokens"] == idle["token_usage"] == 0
    for name in ("sglang:num_running_reqs", "sglang:num_used_tokens", "sglang:token_usage", "sglang:num_queue_reqs"):
        assert after[name] == 0


def test_metrics_of_completed_requests(server):
    server.wait_idle()
    server.post("/flush_cache", {})
    before, counters = metrics(server), server.engine.counters
    prompt = "hello " * 6
    for _ in range(2):
        server.complete(prompt, max_tokens=9, temperature=0)
    server.wait_idle()
    after = metrics(server)
    length = len(server.engine.encode(prompt))

    def increase(name: str) -> float:
        return after[name] - before[name]

    for prefix in ("specjax:", "sglang:"):
        assert increase(f"{prefix}prompt_tokens_total") == 2 * length
        assert increase(f"{prefix}generation_tokens_total") == 18
        assert increase(f"{prefix}time_to_first_token_seconds_count") == 2
        assert increase(f"{prefix}e2e_request_latency_seconds_count") == 2
        # Tokens that come together with the first have no latency of their own.
        assert 8 <= increase(f"{prefix}inter_token_latency_seconds_count") <= 16
        seconds = [increase(f"{prefix}{name}_seconds_sum") for name in ("time_to_first_token", "e2e_request_latency")]
        assert 0 < seconds[0] < seconds[1]
    hits = (length - 1) // 4 * 4
    assert increase("sglang:cached_tokens_total") == hits
    assert increase("sglang:num_requests_total") == 2 and increase("sglang:num_aborted_requests_total") == 0
    assert after["sglang:spec_accept_length"] == pytest.approx(counters.verified / counters.verifications)
    drafts = after["vllm:spec_decode_num_draft_tokens_total"]
    assert drafts == counters.drafted_steps * (server.engine.drafter.width - 1)
    assert after["specjax:spec_accept_rate"] == pytest.approx(counters.own_accepted / counters.own_drafts)
    by_depth = [counters.accepted_at[depth] for depth in range(len(counters.accepted_at))]
    assert sum(by_depth) == counters.accepted and by_depth == sorted(by_depth, reverse=True)


def test_observe_equal():
    latencies, library = Latencies("x", "About."), Histogram("x", "About.", buckets=BUCKETS, registry=None)
    for i in range(200):
        seconds, times = [0.0, 0.001, 0.0011, 7.5, 240.0, 1e4, 0.02 * i][i % 7], i % 5
        latencies.observe_equal(seconds, times)
        for _ in range(times):
            library.observe(seconds)
    values, expected = (
        {(s.name, s.labels.get("le")): s.value for s in histogram.collect()[0].samples if s.name != "x_created"}
        for histogram in (latencies, library)
    )
    assert values == pytest.approx(expected)


# Aborts.


@pytest.mark.parametrize("by", ["rid", "all"])
def test_aborted_requests_are_answered(server, by):
    """`/generate` as by SGLang, with the tokens so far; completions with an error."""
    aborted, body = metrics(server)["sglang:num_aborted_requests_total"], {"text": "hello"}
    sampling = {"max_new_tokens": 100, "ignore_eos": True, "n": 2}
    with server.blocked():
        jobs = {
            name: in_background(server.post, GENERATE, body | {"sampling_params": sampling, "rid": name})
            for name in ("mine", "mined")  # no name is meant by its beginning
        }
        completion = in_background(server.complete, "hello", max_tokens=100) if by == "all" else None
        wait_until(lambda: server.runner.unfinished == (4 if completion is None else 5))
        answer = server.post("/abort_request", {"rid": "mine"} if by == "rid" else {"abort_all": True}).json()
        assert answer["message"] == ("2 aborted." if by == "rid" else "5 aborted.")
    answers = {name: job.result(SECONDS) for name, job in jobs.items()}
    assert all(answer.status_code == 200 for answer in answers.values())
    ends = {name: answer.json()[0]["meta_info"]["finish_reason"] for name, answer in answers.items()}
    assert ends["mine"] == {"type": "abort", "message": ABORTED, "code": "aborted"}
    assert ends["mined"]["type"] == ("length" if by == "rid" else "abort")
    if completion is not None:
        assert check_error(completion.result(SECONDS), 400)["code"] == "aborted"
    server.wait_idle()
    assert metrics(server)["sglang:num_aborted_requests_total"] > aborted
    assert server.post("/abort_request", {"rid": "nobody"}).json()["message"] == "0 aborted."


def test_aborted_stream_ends_with_its_reason(server):
    body = {"text": "hello", "rid": "s", "stream": True, "sampling_params": {"max_new_tokens": 110}}
    lines = []
    with (
        braked(server.engine, after=8) as brake,
        server.client() as client,
        client.stream("POST", GENERATE, json=body) as response,
    ):
        for line in filter(None, response.iter_lines()):
            lines.append(line.removeprefix("data: "))
            if len(lines) == 1:
                server.post("/abort_request", {"rid": "s"})
                brake.release()
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_idle()


# Commands from web pages.

COMMANDS = {
    "/pause_generation": {"mode": "in_place"}, "/flush_cache": {}, "/continue_generation": {},
    "/abort_request": {"abort_all": True},
}  # fmt: skip
SIMPLE = (
    "text/plain",
    "Text/Plain; charset=utf-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)


def state_of(server: Running) -> tuple[bool, int, int]:
    """What commands change: paused, unfinished requests, cached pages."""
    return server.runner.paused, server.runner.unfinished, server.engine.scheduler.prefix.evictable


@pytest.mark.parametrize("path", COMMANDS)
def test_web_pages_send_no_commands(server, path):
    """Neither with a foreign `Origin`, nor with what a page can send without a preflight request, nor by GET."""
    server.complete("hello " * 6, max_tokens=1)
    server.wait_idle()
    bodies = [b"", b"{}", json.dumps(COMMANDS[path]).encode()]
    with braked(server.engine, after=2) as brake, server.client() as client:
        running = in_background(server.complete, max_tokens=9, ignore_eos=True)
        brake.wait()
        before = state_of(server)
        assert before[1] and before[2]
        for origin in ("https://evil.example", "null", "file://", "", "http://127.0.0.1:1", "http://localhost"):
            for kind in ("application/json", "text/plain"):
                refused = client.post(path, content=bodies[-1], headers={"Origin": origin, "Content-Type": kind})
                check_error(refused, 403, text=f"{origin!r}")
            check_error(client.post(path, headers={"Origin": origin}), 403, text="--allowed-origins")
        rebound = {"Host": "evil.example:30000", "Origin": "http://evil.example:30000"}
        check_error(client.post(path, json=COMMANDS[path], headers=rebound), 403, text="evil.example:30000")
        for kind in SIMPLE:
            for body in bodies:
                check_error(client.post(path, content=body, headers={"Content-Type": kind}), 415, text="json")
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            refused = client.request(method, path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert state_of(server) == before and not running.done()
    assert running.result(SECONDS).json()["usage"]["completion_tokens"] == 9
    server.wait_idle()


def test_every_post_route_refuses_simple_requests(server):
    """Whatever a page can send without a preflight request."""
    with server.client() as client:
        document = client.get("/openapi.json").json()["paths"]
        paths = [path for path, methods in document.items() if "post" in methods]
        assert {*COMMANDS, COMPLETE, GENERATE} <= {*paths}
        for path in paths:
            for kind in SIMPLE:
                for body in (b"", b"{}"):
                    assert client.post(path, content=body, headers={"Content-Type": kind}).status_code == 415, path


def test_commands_of_programs_and_own_pages(server):
    """As SGLang's clients send them: without a body, with `{}`, or with aiohttp's type of an empty body."""
    site = "https://my.site"
    settings = ServerSettings(allowed_origins=(site,))
    with running(make_engine(toy(), "NONE"), settings) as open_to_site, server.client() as client:
        port = server.base.rpartition(":")[2]
        for headers in (
            {}, {"Origin": server.base}, {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"},
            {"Origin": "https://[::1]", "Host": "[::1]"},
        ):  # fmt: skip
            for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
                empty = headers | {"Content-Type": "application/octet-stream"}
                for options in ({"headers": headers}, {"json": {}, "headers": headers}, {"headers": empty}):
                    assert client.post(path, **options).json()["success"], (path, options)
            assert client.post("/abort_request", json={"abort_all": True}, headers=headers).json()["success"]
            assert client.post("/pause_generation", json={"mode": "retract"}, headers=headers).json()["success"]
            assert client.post("/continue_generation", json={}, headers=headers).json()["success"]
        with open_to_site.client(headers={"Origin": site}) as page:
            assert page.post("/flush_cache").json()["success"]
        with open_to_site.client(headers={"Origin": "https://other.site"}) as page:
            check_error(page.post("/flush_cache"), 403, text=f"now {site}")


def test_commands_say_what_happened(server, monkeypatch):
    slow_down(server.engine, monkeypatch, 0.02)
    sampling = {"max_new_tokens": 100, "ignore_eos": True, "n": 2}
    for mode, ends in (
        ("abort", "2 requests aborted"),
        ("in_place", "2 requests wait"),
        ("retract", "2 requests wait"),
    ):
        job = in_background(server.post, GENERATE, {"text": "hello", "sampling_params": sampling})
        wait_until(lambda: server.runner.unfinished == 2)
        completion = in_background(server.complete, max_tokens=100, ignore_eos=True) if mode == "abort" else None
        wait_until(lambda count=2 + (completion is not None): server.runner.unfinished == count)
        said = server.post("/pause_generation", {"mode": mode}).json()["message"]
        assert said == f"Generation paused; {ends if completion is None else '3 requests aborted'}."
        assert server.get("/health").json() == {"status": "paused"}
        if completion is not None:
            error = check_error(completion.result(SECONDS), 400, text="/pause_generation")
            assert error["code"] == "aborted" and "/abort_request" not in error["message"]
        assert server.post("/continue_generation", {}).json()["message"] == "Generation continues."
        assert server.post("/continue_generation", {}).json()["message"] == "Generation was not paused."
        assert server.get("/health").json() == {"status": "ok"}
        reasons = [choice["meta_info"]["finish_reason"] for choice in job.result(SECONDS).json()]
        aborted = {"type": "abort", "message": PAUSED, "code": "aborted"}
        assert reasons == [aborted if mode == "abort" else {"type": "length", "length": 100}] * 2
    server.wait_idle()


# Profiles.


def test_profiler_port(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("", 0)) as free:
        port, profiler_port = (sock.getsockname()[1] for sock in (taken, free))
        free.close()
        try:
            assert command.main(["--port", str(port), "--profiler-port", str(profiler_port)]) == 2
            assert f"--port {port}: " in capsys.readouterr().err, "the only flag that is refused"
            socket.create_connection(("127.0.0.1", profiler_port), timeout=SECONDS).close()
        finally:
            jax.profiler.stop_server()


def test_idle_time_of_traced_steps(server, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    idle = importlib.import_module("idle")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        server.complete(max_tokens=30, ignore_eos=True)
    trace = idle.Trace(tmp_path)
    summary, steps = idle.idle(trace), [event for event in trace.events if event["name"] == "step"]
    assert summary["steps"] + summary["left_out"] == len(steps) - 1 > 1, "the last step has no end"
    assert 0 <= summary["idle"] <= summary["step"] and summary["engine"] > 0 and 0 <= summary["idle_share"] <= 1
