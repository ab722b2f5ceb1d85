"""Routes beside generation, over HTTP: tokens of texts, metrics, state, health by a token, and aborted requests."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_helpers import make_engine, shared_engine, tokenizer, toy
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import SECONDS as LIMIT
from server_helpers import Running, braked, running, slow_down, wait_until

from specjax.cli.flags import ServerSettings
from specjax.serve.metrics import SECONDS, Latencies
from specjax.thresholds import AcceptAbove


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM"), ServerSettings()) as found:
        yield found


def metrics(server: Running) -> dict[str, float]:
    """Samples by name; all have the model's name as their label."""
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "toy"
            if "le" not in sample.labels:
                found[sample.name] = sample.value
    return found


# Tokens


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokens_of_texts(server, path):
    expected = [tokenizer()(text)["input_ids"] for text in ("hello there", "", "ö12")]
    one = server.post(path, {"prompt": "hello there", "model": "toy"}).json()
    assert one == {"tokens": expected[0], "count": len(expected[0]), "max_model_len": 128}
    many = server.post(path, {"prompt": ["hello there", "", "ö12"]}).json()
    assert many["tokens"] == expected and many["count"] == [len(ids) for ids in expected]
    bare = server.post(path, {"prompt": "hello", "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer()("hello", add_special_tokens=False)["input_ids"]


def test_tokens_of_a_chat_are_those_that_are_generated_from(server):
    messages = [{"role": "user", "content": "hello"}]
    found = server.post("/tokenize", {"messages": messages}).json()
    assert found["tokens"] == server.engine.encode(messages)
    assert found["count"] == server.chat("hello", max_tokens=1).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_texts_of_tokens(server, path):
    ids = tokenizer()("hello there")["input_ids"]
    assert server.post(path, {"tokens": ids}).json()["text"] == "hello there"
    assert server.post(path, {"tokens": [ids, ids[:1], []]}).json()["text"] == [
        "hello there", tokenizer().decode(ids[:1]), ""
    ]  # fmt: skip
    assert server.post(path, {"tokens": []}).json()["text"] == ""
    special = {"tokens": [1, *ids, 2]}
    assert server.post(path, special).json()["text"] == "hello there"
    assert server.post(path, special | {"skip_special_tokens": False}).json()["text"].startswith("<|im_start|>hello")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": 5}, "rid"),
    ],
)
def test_what_is_refused(server, path, body, param):
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_another_model_is_not_here(server):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert server.post(path, body | {"model": "other"}).status_code == 404


# Health and state


def test_health_by_a_token(server):
    before = server.engine.counters.generated
    with server.client() as client:
        assert client.get("/health_generate").json() == {"status": "ok"}
    server.wait_idle()
    assert server.engine.counters.generated == before + 1


def test_health_of_a_busy_server_is_that_it_gets_on(server):
    """A request of its own would wait behind all others."""
    with ThreadPoolExecutor(1) as clients, server.client() as client:
        long = clients.submit(server.complete, "hello", max_tokens=60, ignore_eos=True)
        wait_until(lambda: server.runner.unfinished == 1)
        assert client.get("/health_generate").json() == {"status": "ok"}
        usage = long.result(LIMIT).json()["usage"]
    server.wait_idle()
    assert usage["completion_tokens"] == 60


def test_health_by_a_token_that_does_not_come(server, monkeypatch):
    monkeypatch.setattr("specjax.serve.control.HEALTH_SECONDS", 0.3)
    stop = threading.Event()
    server.runner.call(lambda engine: stop.wait(LIMIT))
    try:
        with server.client() as client:
            answer = client.get("/health_generate")
        assert answer.status_code == 503 and "0.3 s" in answer.json()["error"]["message"]
    finally:
        stop.set()
    server.wait_idle()


def test_the_state_in_sglangs_names(server):
    server.chat("hello hello hello hello", max_tokens=20, temperature=0)
    server.wait_idle()
    with server.client() as client:
        found = client.get("/get_server_info").json()
        assert found == client.get("/server_info").json()
    (state,) = found["internal_states"]
    counters = server.engine.counters
    assert state["avg_spec_accept_length"] == round(counters.verified / counters.verifications, 4) >= 1
    assert state["pages"]["free"] + state["pages"]["cached"] == state["pages"]["total"] == server.engine.pool.pages
    assert (state["num_running_reqs"], state["num_queue_reqs"]) == (0, 0)
    assert found["engine"]["page_size"] == 4 and found["max_total_num_tokens"] == 1024
    assert "api_key" not in json.dumps(found)
    assert found["speculative_lossy"] is None
    assert (found["speculative_num_steps"], found["speculative_eagle_topk"]) == (server.engine.drafter.depth, 1)
    assert found["disable_radix_cache"] is False


def test_loads_while_requests_run_and_wait(monkeypatch):
    """One request runs and one waits; both forms say so, and `/metrics` says the same. Then nothing is held."""
    engine = make_engine(toy(), "NONE", max_running_requests=1)
    slow_down(engine, monkeypatch, 0.05)
    with running(engine) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(server.complete, "hello" * n, max_tokens=100, ignore_eos=True) for n in (1, 2)]
        wait_until(lambda: engine.scheduler.active and engine.scheduler.waiting)
        found, (old,), shown = client.get("/v1/loads").json(), client.get("/get_load").json(), metrics(server)
        monkeypatch.undo()
        for job in jobs:
            assert job.result().status_code == 200
        server.wait_idle()
        (idle,) = client.get("/v1/loads").json()["loads"]
    (load,) = found["loads"]
    assert found["dp_rank_count"] == 1
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["queues"]["waiting"]) == (1, 1, 1)
    assert load["utilization"] == 1.0 and load["max_running_requests"] == 1
    waiting = len(engine.encode("hello")), len(engine.encode("hello" * 2))
    assert load["num_total_tokens"] - load["num_used_tokens"] in waiting
    assert load["num_used_tokens"] > 0 and load["max_total_num_tokens"] == shown["sglang:max_total_num_tokens"]
    assert shown["sglang:num_running_reqs"] == shown["sglang:num_queue_reqs"] == 1 and shown["sglang:token_usage"] > 0
    assert (found["aggregate"]["total_running_reqs"], found["aggregate"]["total_reqs"]) == (1, 2)
    assert (old["dp_rank"], old["num_reqs"], old["num_waiting_reqs"]) == (0, 2, 1) and old["num_tokens"] > 0
    assert idle["num_running_reqs"] == idle["num_waiting_reqs"] == idle["num_used_tokens"] == idle["token_usage"] == 0


def test_what_a_router_reads_of_a_server(server):
    with server.client() as client:
        info, model = client.get("/server_info").json(), client.get("/model_info").json()
        text = client.get("/metrics").text
    assert (info["served_model_name"], info["dp_size"], info["tp_size"]) == ("toy", 1, 1) and info["version"]
    assert info["ep_size"] == 1
    assert model["served_model_name"] == "toy" and isinstance(model["tokenizer_path"], str) and model["is_generation"]
    pages, size = server.engine.pool.pages, server.engine.pool.page_size
    assert f'sglang:cache_config_info{{model_name="toy",num_pages="{pages}",page_size="{size}"}} 1.0' in text
    assert f'vllm:cache_config_info{{block_size="{size}",model_name="toy",num_gpu_blocks="{pages}"}} 1.0' in text
    adapters = 'max_lora="0",model_name="toy",running_lora_adapters="",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{adapters}}} " in text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="toy"}} 0.0' in text


def test_lossy_thresholds_are_in_the_info():
    engine = make_engine(toy(), "NONE", verify=AcceptAbove(0.5))
    with running(engine) as server, server.client() as client:
        for path in ("/get_server_info", "/get_model_info"):
            found = client.get(path).json()["speculative_lossy"]
            assert found == {"accept_threshold_single": 0.5, "accept_threshold_acc": 1.0}


# Metrics


def test_metrics_count_what_happened(server):
    server.wait_idle()
    server.post("/flush_cache", {})
    before, counters = metrics(server), server.engine.counters
    prompt = "hello " * 6
    for _ in range(2):
        server.complete(prompt, max_tokens=9, temperature=0)
    server.wait_idle()
    after = metrics(server)
    length = len(server.engine.encode(prompt))

    def grown(name: str) -> float:
        return after[name] - before[name]

    for prefix in ("specjax:", "sglang:", "vllm:"):
        assert grown(f"{prefix}prompt_tokens_total") == 2 * length
        assert grown(f"{prefix}generation_tokens_total") == 18
        assert grown(f"{prefix}time_to_first_token_seconds_count") == 2
        assert grown(f"{prefix}e2e_request_latency_seconds_count") == 2
        # Tokens that come together with the first have no time of their own.
        assert 8 <= grown(f"{prefix}inter_token_latency_seconds_count") <= 16
        assert 0 < grown(f"{prefix}time_to_first_token_seconds_sum") < grown(f"{prefix}e2e_request_latency_seconds_sum")
    hits = (length - 1) // 4 * 4
    assert grown("sglang:cached_tokens_total") == grown("vllm:prefix_cache_hits_total") == hits
    assert grown("vllm:prefix_cache_queries_total") == 2 * length
    assert grown("sglang:num_requests_total") == 2 and grown("sglang:num_aborted_requests_total") == 0
    assert after["sglang:spec_accept_length"] == pytest.approx(counters.verified / counters.verifications)
    drafted, accepted = grown("vllm:spec_decode_num_drafts_total"), grown("vllm:spec_decode_num_accepted_tokens_total")
    assert drafted > 0 and grown("vllm:spec_decode_num_draft_tokens_total") == drafted * (
        server.engine.drafter.width - 1
    )
    depths = range(server.engine.drafter.depth)
    each = [counters.accepted_at[depth] if depth < len(counters.accepted_at) else 0 for depth in depths]
    assert sum(each) == counters.accepted >= accepted and each == sorted(each, reverse=True)
    assert after["sglang:num_running_reqs"] == after["vllm:num_requests_running"] == 0
    assert after["sglang:token_usage"] == after["vllm:kv_cache_usage_perc"] == 0
    assert after["specjax:max_total_num_tokens"] == 1024


def test_latencies_are_those_of_the_library():
    """Its histogram takes them one at a time."""
    ours, library = Latencies(), Histogram("specjax:x", "About.", ["model_name"], buckets=SECONDS, registry=None)
    for i in range(200):
        seconds, times = [0.0, 0.001, 0.0011, 7.5, 240.0, 1e4, 0.02 * i][i % 7], i % 5
        ours.observe(seconds, times)
        for _ in range(times):
            library.labels("m").observe(seconds)
    (expected,) = library.collect()
    found = {(each.name, each.labels.get("le")): each.value for each in ours.family("specjax:x", "About.", "m").samples}
    wanted = {(each.name, each.labels.get("le")): each.value for each in expected.samples}
    assert found == pytest.approx({key: value for key, value in wanted.items() if not key[0].endswith("_created")})


def test_metrics_while_a_request_runs(server):
    server.wait_idle()
    before, body = metrics(server), {"prompt": "hello", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with braked(server.engine, after=4) as brake:
        with server.client() as client, client.stream("POST", "/v1/completions", json=body):
            brake.wait()
            found = metrics(server)
        server.wait_for_command()
    server.wait_idle()
    after = metrics(server)
    assert found["sglang:num_running_reqs"] == 1
    assert found["sglang:num_used_tokens"] > 0 and found["sglang:num_used_tokens"] % 4 == 0
    assert 0 < found["sglang:token_usage"] < 1
    assert after["sglang:num_aborted_requests_total"] == before["sglang:num_aborted_requests_total"] + 1
    assert after["sglang:num_running_reqs"] == after["sglang:num_used_tokens"] == 0


# Aborted requests


@pytest.mark.parametrize("by", ["rid", "all"])
def test_an_aborted_request_is_told(server, by):
    server.wait_idle()
    stop = threading.Event()
    answers = {}

    def send(name: str, **more: object) -> None:
        params = {"max_new_tokens": 100, "ignore_eos": True, "n": 2}
        answers[name] = server.post("/generate", {"text": "hello", "sampling_params": params, "rid": name, **more})

    server.runner.call(lambda engine: stop.wait(LIMIT))  # nothing runs before it is aborted
    threads = [threading.Thread(target=send, args=(name,)) for name in ("mine", "other")]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: server.runner.unfinished == 4)
        body = {"rid": "mine"} if by == "rid" else {"abort_all": True}
        answer = server.post("/abort_request", body).json()
        assert answer["message"] == ("2 aborted." if by == "rid" else "4 aborted.")
    finally:
        stop.set()
    for thread in threads:
        thread.join(LIMIT)
    # As SGLang answers: with what there is.
    ends = {name: answer.json()[0]["meta_info"]["finish_reason"]["type"] for name, answer in answers.items()}
    assert ends == {"mine": "abort", "other": "length" if by == "rid" else "abort"}
    assert all(answer.status_code == 200 for answer in answers.values())
    server.wait_idle()
    assert server.post("/abort_request", {"rid": "nobody"}).json()["message"] == "0 aborted."


def test_a_stream_that_is_aborted_says_so(server):
    with server.client() as client:
        body = {"text": "hello", "rid": "s", "stream": True, "sampling_params": {"max_new_tokens": 110}}
        events = []
        with client.stream("POST", "/generate", json=body | {"cache_salt": "x"}) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
                    if len(events) == 1:
                        server.post("/abort_request", {"rid": "s"})
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    server.wait_idle()


def test_an_aborted_completion_is_an_error(server):
    server.wait_idle()
    stop, answers = threading.Event(), []
    server.runner.call(lambda engine: stop.wait(LIMIT))
    thread = threading.Thread(target=lambda: answers.append(server.complete("hello", max_tokens=100)))
    thread.start()
    try:
        wait_until(lambda: server.runner.unfinished == 1)
        server.post("/abort_request", {"abort_all": True})
    finally:
        stop.set()
    thread.join(LIMIT)
    assert answers[0].status_code == 400 and answers[0].json()["error"]["code"] == "aborted"
    server.wait_idle()
