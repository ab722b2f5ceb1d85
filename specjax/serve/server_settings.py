"""Settings of the server, which are flags of `specjax serve`. `specjax.cli.flags` adds the model and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.engine.chat.message_format import AUTO, GPT_OSS, NONE, PARSERS
from specjax.settings import setting

THINKERS = ("qwen3", "qwen3-thinking", "deepseek-r1", "deepseek-v3", "mimo", "gemma4", GPT_OSS)
"""SGLang's names of parsers for models that think between `<think>` and `</think>`, for Gemma 4 and for gpt-oss."""


@dataclass(frozen=True)
class ServerSettings:
    """Address, access, limits and interfaces of the server, and the processes and replicas behind it."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 = all", metavar="HOST")
    port: int = setting(30000, "0 = any free one", minimum=0, maximum=65535)
    served_model_name: str | None = setting(None, "name of the model for clients; default: the value of --model")
    api_key: tuple[str, ...] = setting(
        (), "bearer tokens; a client needs one of them; set them in a file to hide them from other users",
        metavar="KEY", secret=True, alone=True,
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), "origins of web pages that may call this server (CORS), such as https://my.site; * = all; default: none",
        metavar="ORIGIN", alone=True,
    )  # fmt: skip
    ssl_certfile: str | None = setting(None, "certificate chain in PEM, for https", metavar="FILE")
    ssl_keyfile: str | None = setting(
        None, "its private key; default: in the same file as the certificate", metavar="FILE"
    )
    log_level: str = setting(
        "info", "minimum severity of log lines", choices=("debug", "info", "warning", "error"), parse=str.lower
    )
    max_queued_requests: int = setting(512, "maximum number of waiting requests; further requests get a 503", minimum=1)
    stream_interval: int = setting(1, "tokens between two events of a stream", minimum=1)
    decode_log_interval: int = setting(40, "steps between two log lines about decoding", minimum=1)
    shutdown_timeout: float = setting(30.0, "seconds for running requests after SIGTERM, SIGHUP or Ctrl-C", minimum=0)
    watchdog_timeout: float = setting(
        300.0,
        "time limit of a step in seconds, without compilation; then all requests end (503), and the process (status 1)",
        above=0,
    )
    tool_call_parser: str = setting(
        AUTO,
        "format of the model's function calls: auto = from the chat template; none = functions are refused",
        choices=(AUTO, NONE, *PARSERS), parse=str.lower, metavar="NAME",
    )  # fmt: skip
    reasoning_parser: str = setting(
        AUTO,
        "models that reason between <think> and </think>, which becomes reasoning_content: auto = if the chat template "
        "or the vocabulary has these; none = it stays in the content; all other names = always (gpt-oss: in channels)",
        choices=(AUTO, NONE, *THINKERS), parse=str.lower, metavar="NAME",
    )  # fmt: skip
    sanitize_control_tokens: bool = setting(
        False, "names of control tokens, such as <|im_end|>, in the messages of a chat are text; default of requests"
    )
    incremental_streaming_output: bool = setting(
        False, "streams of /generate: an event holds only the new text and tokens", names=("--stream-output",)
    )
    profiler_port: int | None = setting(
        None, "where jax.profiler serves traces to XProf; default: nowhere; see docs/serving.md",
        minimum=1, maximum=65535, metavar="PORT",
    )  # fmt: skip
    data_parallel_size: int = setting(
        1,
        "replicas of the engine in this server, each on --tp devices of its own; requests are spread over them, and "
        "limits of requests and pool tokens apply to each",
        minimum=1, names=("--dp", "--dp-size"),
    )  # fmt: skip
    dist_init_addr: str | None = setting(
        None,
        "where --node-rank 0 listens for the others, on this port and the next; see docs/serving.md",
        metavar="HOST:PORT",
    )
    nnodes: int = setting(
        1, "processes, usually one per host, over which the model is split; --tp counts the devices of all", minimum=1
    )
    node_rank: int = setting(0, "rank of this process; rank 0 leads, and it alone serves requests", minimum=0)
