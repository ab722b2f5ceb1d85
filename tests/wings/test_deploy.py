"""The files in `deploy/`: names exist, and times fit together. `make deploy-check` runs linters."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from specjax import settings
from specjax.cli import flags
from specjax.cli.serve import make_app
from specjax.serve.runner import Runner
from specjax.serve.server import LAST_ANSWERS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def instructions(file: Path) -> list[tuple[str, str]]:
    """Names and arguments of a Dockerfile's instructions."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def deployment(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the pod's spec, the container) of the Deployment in a manifest."""
    manifests = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / file).read_text())
    (pod,) = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Deployment"]
    (container,) = pod["containers"]
    return pod, container


def after(arguments: list[str], flag: str) -> int:
    """The number after a flag."""
    return int(arguments[arguments.index(flag) + 1])


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
WORKER = deployment("worker.yaml")[1]
COMMANDS = {
    "image": json.loads([value for name, value in instructions(DEPLOY / "Dockerfile") if name == "CMD"][-1]),
    "compose": SERVICES["worker-1"]["command"],
    "kubernetes": WORKER["args"],
}


def parsed(command: list[str]) -> flags.Settings:
    """The settings by the server's parser, which exits on an unknown flag."""
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, flags.Settings())
    return settings.parse(parser, [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in command], flags.Settings())[1]


@pytest.mark.parametrize("place", COMMANDS)
def test_flags_of_the_server(place):
    server = parsed(COMMANDS[place]).server
    assert (server.host, server.port) == ("0.0.0.0", 30000)
    with pytest.raises(SystemExit):
        parsed([*COMMANDS[place], "--no-such-flag"])


# Images.


def test_files_of_the_images():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [value.split() for name, value in instructions(DEPLOY / "Dockerfile") if name == "COPY"]
    names = [name for words in sources if not words[0].startswith("--from") for name in words[:-1]]
    assert names and all((ROOT / name).exists() and f"!{name}" in ignored for name in names)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (DEPLOY / "Dockerfile").read_text(), flags=re.M))
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]
    documented = re.findall(r"^docker build .*--target (\S+)", (ROOT / "docs" / "serving.md").read_text(), flags=re.M)
    targets = {service["build"]["target"] for service in (*SERVICES.values(), *cuda.values())}
    assert documented and targets | {*documented} <= stages and set(cuda) < set(SERVICES)
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", (DEPLOY / "Dockerfile").read_text())
    defined = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(defined)


def test_wheel_of_the_copied_files(tmp_path):
    names = [name[1:] for name in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if name[0] == "!"]
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is absent from" not in done.stdout + done.stderr, "a package that pyproject.toml does not list"
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {"specjax/serve/__main__.py", "specjax/serve/playground.html", "specjax_kernels/attention.py"} <= files


# Compose and Kubernetes: names and times that two programs or manifests share. `make deploy-check` checks the syntax.


def test_compose():
    router, workers = SERVICES["router"], [name for name in SERVICES if name != "router"]
    port = parsed(COMMANDS["compose"]).server.port
    assert [word for word in router["command"] if word.startswith("http://")] == [
        f"http://{name}:{port}" for name in workers
    ]
    drain = after(router["command"], "--shutdown-grace-period-secs")
    # Compose stops the router first; it must run until the last answer has passed.
    assert int(router["stop_grace_period"].removesuffix("s")) > drain
    for name in workers:
        timeout = parsed(SERVICES[name]["command"]).server.shutdown_timeout
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > timeout + LAST_ANSWERS
        assert drain > timeout


def test_probes_of_a_worker():
    server = flags.ServerSettings()
    document = make_app(Runner(lambda: pytest.fail("not started"), server), server, model="m").openapi()
    paths = {path for path, operations in document["paths"].items() if "get" in operations}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert WORKER[probe]["httpGet"]["path"] in paths
        assert WORKER[probe]["httpGet"]["port"] == WORKER["ports"][0]["name"]
    assert WORKER["ports"][0]["containerPort"] == parsed(COMMANDS["kubernetes"]).server.port


def test_times_of_a_shutdown():
    pod = deployment("worker.yaml")[0]
    seconds = int(WORKER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain, readiness = parsed(COMMANDS["kubernetes"]).server.shutdown_timeout, WORKER["readinessProbe"]
    assert pod["terminationGracePeriodSeconds"] > seconds + drain + LAST_ANSWERS
    assert seconds >= readiness["periodSeconds"] * readiness["failureThreshold"]
    pod, router = deployment("router.yaml")
    grace = after(router["args"], "--shutdown-grace-period-secs")
    assert pod["terminationGracePeriodSeconds"] > int(router["lifecycle"]["preStop"]["exec"]["command"][1]) + grace
    assert grace > drain
