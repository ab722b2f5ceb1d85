"""The HTTP server: OpenAI's and SGLang's routes over an engine. In reading order:

app              routes for generation, `Generation.respond`, and `Extension`s with further routes
fields           reads and checks request bodies; then `openai_requests` and `tools`; `errors` has the error answers
tokenising       the sequences of a request, made in threads
runner           `Service` and `Runner`, the engine's thread; `delivery` carries its stream deltas to the event loop
openai_answers   answers of OpenAI's routes; `sglang_generate` has the body and the answer of `/generate`
control          other routes; `metrics` is their source
server           the process and its connections; `middleware` limits requests, `server_settings` has the flags
dialects         two further interfaces, which `specjax.cli.serve` adds

Only this package, `specjax.fleet` and `specjax.cli.serve` import a web framework.
"""
