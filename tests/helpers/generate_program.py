"""Run `specjax generate` on two CPU devices, for tests/wings/test_generate_replicas.py.

Runs in a separate process, because the number of devices must be set before JAX starts. Prints a line of JSON per case.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)

from engine_helpers import devices  # noqa: E402
from integrity import check_integrity  # noqa: E402

from specjax.cli import build, generate  # noqa: E402
from specjax.engine import Engine  # noqa: E402

ENGINES: list[Engine] = []
make_engines = build.make_engines


def remembered(*args, **config) -> list[Engine]:
    ENGINES[:] = make_engines(*args, **config)
    return list(ENGINES)


if __name__ == "__main__":
    build.make_engines = remembered
    for argv in map(json.loads, sys.argv[1:]):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = generate.main(argv)
        for engine in ENGINES:
            check_integrity(engine)
        result = {"status": status, "summary": json.loads(printed.getvalue())}
        result |= {"devices": [devices(engine) for engine in ENGINES]}
        print(json.dumps(result | {"generated": [engine.counters.generated for engine in ENGINES]}))
