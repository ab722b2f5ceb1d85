"""Run `specjax.generate` on two CPU devices, for tests/wings/test_generate_replicas.py.

A separate process: the device count must be set before JAX starts. Prints one line of JSON a case.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)

from specjax.cli import build, generate  # noqa: E402
from specjax.engine import Engine  # noqa: E402

ENGINES: list[Engine] = []
make_engines = build.make_engines


def remembered(*args, **config) -> list[Engine]:
    ENGINES[:] = make_engines(*args, **config)
    return list(ENGINES)


def devices(engine: Engine) -> list[int]:
    """All on which arrays of the engine lie."""
    leaves = jax.tree.leaves((engine.params, engine.device.state))
    return sorted({device.id for leaf in leaves for device in leaf.devices()})


if __name__ == "__main__":
    build.make_engines = remembered
    for argv in map(json.loads, sys.argv[1:]):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = generate.main(argv)
        for each in ENGINES:
            each.check_integrity()
        found = {"status": status, "summary": json.loads(printed.getvalue())}
        found |= {"devices": [devices(each) for each in ENGINES]}
        print(json.dumps(found | {"generated": [each.counters.generated for each in ENGINES]}))
