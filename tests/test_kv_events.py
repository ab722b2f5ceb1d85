"""Events of the prefix cache: their format by its publishers' own definitions, and whether they tell what is cached."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

import pytest
from engine_helpers import make_engine, shared_engine, toy

from specjax.cli import build, flags
from specjax.engine import Engine, SamplingParams
from specjax.engine.pages import Node, PageAllocator, PrefixCache
from specjax.serve import command
from specjax.serve.kv_events import KvEventsConfig, Publisher, block_hash

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

SECONDS = 60


# The format. As `vllm/distributed/kv_events.py` and `sglang/srt/disaggregation/kv_events.py` define it.


def structs(*, stored: tuple[Any, ...], removed: tuple[Any, ...]) -> Any:
    """A decoder of batches. `stored`, `removed`: the fields after those that all versions have."""
    form = {"array_like": True, "omit_defaults": True, "gc": False}
    base = msgspec.defstruct("KVCacheEvent", [], tag=True, **form)
    more = {"bases": (base,), "tag": True, **form}
    block_stored = msgspec.defstruct(
        "BlockStored",
        [("block_hashes", list[int]), ("parent_block_hash", int | None), ("token_ids", list[int]), ("block_size", int),
         ("lora_id", int | None), *stored],
        **more,
    )  # fmt: skip
    block_removed = msgspec.defstruct("BlockRemoved", [("block_hashes", list[int]), *removed], **more)
    all_cleared = msgspec.defstruct("AllBlocksCleared", [], **more)
    events = list[block_stored | block_removed | all_cleared]
    batch = msgspec.defstruct(
        "KVEventBatch", [("ts", float), ("events", events), ("data_parallel_rank", int | None, None)], **form
    )
    return msgspec.msgpack.Decoder(batch)


MEDIUM = ("medium", str | None)
KEYS = ("extra_keys", list[tuple[Any, ...] | None] | None, None)
DECODERS = {
    "sglang": structs(stored=(), removed=()),
    "vllm-0.11": structs(stored=(MEDIUM,), removed=(MEDIUM,)),
    "vllm-0.14": structs(stored=(MEDIUM, ("lora_name", str | None), KEYS), removed=(MEDIUM,)),
}
NEWEST = DECODERS["vllm-0.14"]


class Reader:
    """What a router knows of a cache, by the rules of llm-d's index: hashes that were stored and not removed."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # by hash: (parent, tokens of the page)

    def read(self, batch: Any) -> None:
        for event in batch.events:
            kind = type(event).__name__
            if kind == "BlockStored":
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert parent is None or parent in self.tokens, "after a page that is not known"
                for at, own in enumerate(event.block_hashes):
                    assert own not in self.tokens, "stored twice"
                    self.tokens[own] = (parent, tuple(event.token_ids[at * size : (at + 1) * size]))
                    parent = own
            elif kind == "BlockRemoved":
                for own in event.block_hashes:
                    del self.tokens[own]
            else:
                self.tokens.clear()


def cached(cache: PrefixCache) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The same, read of the cache itself."""
    found: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def walk(node: Node, parent: int | None, salt: str | None) -> None:
        for child in node.children.values():
            assert isinstance(child.text, tuple)
            own = block_hash(parent, child.text, salt)
            found[own] = (parent, child.text)
            walk(child, own, salt)

    for root in cache._roots.values():
        assert isinstance(root.text, tuple)
        walk(root, None, root.text[0])
    return found


@pytest.fixture
def endpoints(tmp_path):
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


def publisher_at(endpoints: dict[str, str], **more: Any) -> Publisher:
    return Publisher(KvEventsConfig(publisher="zmq", **endpoints, **more))


def replay(endpoints: dict[str, str], first: int = 0) -> list[tuple[int, bytes]]:
    """As vLLM's example subscriber asks for it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoints["replay_endpoint"])
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert socket.poll(SECONDS * 1000), "no answer"
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


def settled(publisher: Publisher, endpoints: dict[str, str]) -> list[tuple[int, bytes]]:
    """All batches, once everything that was queued has been published."""
    deadline = time.monotonic() + SECONDS
    while publisher._queue:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    publisher.cleared()  # the last batch shows that those before it are complete
    while True:
        found = replay(endpoints)
        if found and type(NEWEST.decode(found[-1][1]).events[-1]).__name__ == "AllBlocksCleared":
            return found
        assert time.monotonic() < deadline


def test_hash_of_a_page():
    first = hashlib.sha256(b"\x01\0\0\0\x02\0\0\0").digest()[:8]
    parent = int.from_bytes(first, "big") // 2
    assert block_hash(None, (1, 2), None) == parent
    second = hashlib.sha256(parent.to_bytes(8, "big") + b"\x03\0\0\0\xff\xff\xff\x7f").digest()[:8]
    assert block_hash(parent, (3, 2**31 - 1), "salt") == int.from_bytes(second, "big") // 2
    assert len({block_hash(None, (1, 2), salt) for salt in (None, "", "a", "b", "\ud800")}) == 5


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_knows_what_is_cached(seed, endpoints):
    """Random texts come, are evicted and cleared; after each batch of changes the reader's pages are the cache's."""
    draw = random.Random(seed)
    allocator = PageAllocator(40)
    cache = PrefixCache(allocator, 2)
    cache.observer = publisher = publisher_at(endpoints)
    publisher.begin(2)
    expected = []
    try:
        for _ in range(60):
            salt = draw.choice([(None, 0), (None, 0), ("mine", 7)])
            node = None
            for _ in range(draw.randrange(1, 6)):
                text = (draw.randrange(3), draw.randrange(2))
                if (pages := allocator.allocate(1)) is None:
                    cache.evict(4)
                    break
                node, taken = cache.insert(salt, node, text, pages[0])
                if not taken:
                    allocator.release(pages)
            cache.unlock(node)
            if draw.random() < 0.05:
                cache.clear()
            expected.append(cached(cache))
        kept = settled(publisher, endpoints)
    finally:
        publisher.close()
    assert [number for number, _ in kept] == list(range(len(kept)))
    reader, seen = Reader(), []
    for _, payload in kept[:-1]:
        reader.read(NEWEST.decode(payload))
        seen.append(dict(reader.tokens))
    last = NEWEST.decode(kept[-1][1])
    last.events.pop()  # of `settled`
    reader.read(last)
    assert reader.tokens == expected[-1] and len(expected[-1]) > 5


def test_events_of_an_engine(endpoints):
    """Live, with requests that evict one another's pages: the messages of the socket, read by each version's rules."""
    engine = make_engine(toy(), "NGRAM", max_total_tokens=160)
    engine.scheduler.prefix.observer = publisher = publisher_at(endpoints, topic="kv@pod@toy")
    publisher.begin(engine.pool.page_size)
    got: list[tuple[int, bytes]] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.connect(endpoints["endpoint"])
        socket.subscribe(b"kv@")
        deadline = time.monotonic() + SECONDS
        while not socket.poll(20):  # until the subscription has arrived
            assert engine.flush_cache() and time.monotonic() < deadline
        for at in range(10):
            engine.generate(f"{at} " + "hello " * 5, SamplingParams(max_new_tokens=12, ignore_eos=True))
        expected = cached(engine.scheduler.prefix)
        kept = settled(publisher, endpoints)
        while not got or got[-1][0] < kept[-1][0]:
            assert socket.poll(SECONDS * 1000)
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv@pod@toy" and len(number) == 8
            got.append((int.from_bytes(number, "big"), payload))
    publisher.close()
    assert not publisher.is_alive()
    engine.check_integrity()
    assert got == kept[got[0][0] :]
    for decoder in DECODERS.values():
        batches = [decoder.decode(payload) for _, payload in got]
        batches[-1].events.pop()  # of `settled`
        reader = Reader()
        for batch in batches:
            assert abs(batch.ts - time.time()) < 600 and batch.data_parallel_rank == 0
            reader.read(batch)
        kinds = {type(event).__name__ for batch in batches for event in batch.events}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert reader.tokens == expected and expected


def test_salted_and_isolated_texts(endpoints):
    engine = make_engine(toy(), "NGRAM", isolate_ngrams=True)
    engine.scheduler.prefix.observer = publisher = publisher_at(endpoints)
    publisher.begin(engine.pool.page_size)
    engine.generate("hello hello hello hello", SamplingParams(max_new_tokens=12))
    engine.generate("hello hello hello hello", SamplingParams(max_new_tokens=12, cache_salt="mine"))
    batches = [NEWEST.decode(payload) for _, payload in settled(publisher, endpoints)]
    publisher.close()
    stored = [event for batch in batches for event in batch.events if type(event).__name__ == "BlockStored"]
    assert stored[0].extra_keys[0] == ("mine",) and not any(stored[0].extra_keys[1:])
    assert len(stored[0].extra_keys) == len(stored[0].block_hashes)
    assert all(event.parent_block_hash is not None and event.extra_keys is None for event in stored[1:])
    assert stored[0].block_hashes[0] == block_hash(None, tuple(stored[0].token_ids[:4]), "mine")


def test_dropped_events_claim_nothing(endpoints):
    """The thread has not begun, and the queue is short: what was dropped, and what came after it, is not claimed."""
    publisher = publisher_at(endpoints, max_queue_size=5)
    nodes, parent = [], None
    for at in range(8):
        node = Node(parent, (at,), at)
        publisher.stored(node, parent, (at,), (None, 0))
        nodes.append(node)
        parent = node
    assert len(publisher._queue) <= 5
    publisher.removed(nodes[1])
    fresh = Node(None, (9,), 9)
    publisher.stored(fresh, None, (9,), (None, 0))
    publisher.begin(1)
    (batch,) = [NEWEST.decode(payload) for _, payload in settled(publisher, endpoints)][:1]
    publisher.close()
    assert type(batch.events[0]).__name__ == "AllBlocksCleared"
    known = [own for event in batch.events[1:] for own in getattr(event, "block_hashes", ())]
    assert known == [block_hash(None, (9,), None)]


def test_a_replay_of_what_is_kept(endpoints):
    publisher = publisher_at(endpoints, buffer_steps=3)
    publisher.begin(1)
    for count in range(1, 8):
        publisher.cleared()
        while publisher._sequence < count:  # one batch each
            time.sleep(0.001)
    assert [number for number, _ in replay(endpoints)] == [4, 5, 6]
    assert [number for number, _ in replay(endpoints, 5)] == [5, 6]
    assert replay(endpoints, 7) == []
    publisher.close()


# The flag.


def zmq_at(endpoint: str, **more: str) -> str:
    return msgspec.json.encode({"publisher": "zmq", "endpoint": endpoint, **more}).decode()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("zmq", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"port": 1}', "has no port; there are buffer_steps, endpoint"),
        ('{"publisher": "zmq", "buffer_steps": 0}', "buffer_steps must be an integer of at least 1, got 0"),
        ('{"enable_kv_cache_events": "yes"}', "must be true or false"),
        (zmq_at("nowhere"), "endpoint must be tcp://HOST:PORT, ipc://PATH or inproc://NAME, got 'nowhere'"),
        (zmq_at("ipc://"), "endpoint must be tcp://HOST:PORT, ipc://PATH or inproc://NAME, got 'ipc://'"),
        (zmq_at("tcp://*"), "endpoint must be tcp://HOST:PORT, with a port from 0 to 65535, got 'tcp://*'"),
        (zmq_at("tcp://:5557"), "got 'tcp://:5557'"),
        (zmq_at("tcp://router:*"), "got 'tcp://router:*_dp1', the address of replica 1"),
        (zmq_at("tcp://*:65535"), "got 'tcp://*:65536', the address of replica 1 of tcp://*:65535"),
        (zmq_at("tcp://*:5557", replay_endpoint="*:5558"), "replay_endpoint must be tcp://HOST:PORT"),
        (zmq_at("tcp://203.0.113.1:5557", replay_endpoint="tcp://203.0.113.1:5558"), "cannot listen on tcp"),
    ],
)
def test_what_is_refused(given, message):
    server = flags.ServerSettings(kv_events_config=given, data_parallel_size=2)
    with pytest.raises(ValueError, match="--kv-events-config: ") as error:
        command.make_publishers(flags.Settings(server=server))
    assert message in str(error.value)


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("given", "message"),
    [("on", "must be a JSON object, got 'on'"), (zmq_at("nowhere"), "endpoint must be tcp://HOST:PORT")],
)
def test_the_command_says_what_is_refused(capsys, dry_run, given, message):
    assert command.main(["--port", "0", "--kv-events-config", given, *dry_run]) == 2
    assert f"specjax serve: --kv-events-config: {message}" in capsys.readouterr().err


def test_a_check_opens_no_socket(monkeypatch, endpoints):
    """A dry run beside a server with the same flags: its sockets stay its own."""
    publisher = publisher_at(endpoints)
    publisher.begin(1)
    monkeypatch.setattr(command, "Publisher", lambda *_: pytest.fail("a socket"))
    given = msgspec.json.encode({"publisher": "zmq", **endpoints}).decode()
    settings = flags.Settings(server=flags.ServerSettings(kv_events_config=given))
    assert command.events_config(settings) == KvEventsConfig("zmq", **endpoints)
    assert len(settled(publisher, endpoints)) == 1
    publisher.close()


def test_when_events_are_published(tmp_path):
    found = KvEventsConfig.from_json
    assert found("{}").publisher == "null"
    assert found('{"enable_kv_cache_events": true}').publisher == "zmq"
    assert found('{"enable_kv_cache_events": false, "publisher": "zmq"}').publisher == "null"
    given = '{"publisher": "zmq", "endpoint": "tcp://*:5999", "topic": "t", "replay_endpoint": "tcp://*:6000"}'
    assert found(given) == KvEventsConfig("zmq", "tcp://*:5999", "tcp://*:6000", topic="t")
    server = flags.ServerSettings(kv_events_config=f'{{"publisher": "zmq", "endpoint": "ipc://{tmp_path}/a"}}')
    off = flags.Settings(engine=flags.EngineSettings(disable_radix_cache=True), server=server)
    with pytest.raises(ValueError, match="no prefix cache"):
        command.make_publishers(off)
    assert command.make_publishers(flags.Settings()) == []


def test_the_server_publishes(tmp_path, monkeypatch, endpoints):
    engine: Engine = shared_engine("NONE")
    monkeypatch.setattr(build, "claim_gpu", lambda chosen: None)
    monkeypatch.setattr(build, "make_engine", lambda *args, **kwargs: engine)
    given = msgspec.json.encode({"publisher": "zmq", **endpoints}).decode()
    settings = flags.Settings(server=flags.ServerSettings(kv_events_config=given))
    (publisher,) = command.make_publishers(settings)
    assert publisher is not None and engine.flush_cache()
    assert command.load(settings, publisher) is engine
    try:
        engine.generate("hello hello hello", SamplingParams(max_new_tokens=8))
        (first, *_) = settled(publisher, endpoints)
        assert NEWEST.decode(first[1]).events[0].block_size == engine.pool.page_size
    finally:
        engine.scheduler.prefix.observer = None
        publisher.close()
