"""The HTTP server: OpenAI's and SGLang's routes over an engine. In reading order:

app       the routes for generation, `Generation.respond`, and `Extension`s with further routes
fields    reading and checking request bodies; then `protocol`, `generate_request`, `messages`, `tools`, `structured`
task      the engine's work for a request, which a body describes; `tokenising` runs it in threads
runner    `Service` and `Runner`, the engine's thread; `delivery` carries its stream deltas to the event loop
answers   answers of OpenAI's routes; `generate_answer` of `/generate`
forms     the format of calls and reasoning; `calls` and `reply` parse them, `call_grammar` writes grammars
control   routes about the server; `metrics`, `report`, `profiling`
server    the process; `connection` and `middleware` limit requests, `server_settings` has the flags
dialects  two further interfaces, which `specjax.cli.serve` adds

Only this package, `specjax.fleet` and `specjax.cli.serve` import a web framework.
"""
