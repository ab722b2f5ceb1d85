"""The files in `deploy/`: names exist, and times fit together. `make deploy-check` runs linters."""

from __future__ import annotations

import argparse
import json
import re
import shlex
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
from specjax.serve.server import FORCED_GRACE

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LABEL = "app.kubernetes.io/name"


def instructions(file: Path) -> list[tuple[str, str]]:
    """Names and arguments of a Dockerfile's instructions."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def objects(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / file).read_text()))


def deployment(file: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(spec, the pod's spec, the container) of the Deployment in a manifest."""
    spec = spec_of(file, "Deployment")
    (container,) = spec["template"]["spec"]["containers"]
    return spec, spec["template"]["spec"], container


def spec_of(file: str, kind: str) -> dict[str, Any]:
    """The spec of the only object of a kind in a manifest; the object itself if it has none."""
    (manifest,) = [manifest for manifest in objects(file) if manifest["kind"] == kind]
    return manifest.get("spec", manifest)


def after(arguments: list[str], flag: str) -> int:
    """The number after a flag."""
    return int(arguments[arguments.index(flag) + 1])


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
WORKER = deployment("worker.yaml")[2]
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
    assert names
    for name in names:
        assert (ROOT / name).exists() and f"!{name}" in ignored
    stages = re.findall(r"^FROM \S+ AS (\S+)", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    assert {words[0].removeprefix("--from=") for words in sources if words[0].startswith("--from")} <= set(stages)
    targets = {service["build"]["target"] for service in SERVICES.values()}
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]
    assert targets | {service["build"]["target"] for service in cuda.values()} == {"cpu", "cuda", "router"} <= {*stages}
    assert set(cuda) < set(SERVICES)
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


def test_version_of_the_router():
    pins = [re.findall(r"sglang-router==(\S+)", (ROOT / name).read_text())
            for name in ("deploy/Dockerfile", "Makefile", "docs/serving.md")]  # fmt: skip
    assert all(pins) and len({pin for versions in pins for pin in versions}) == 1
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "kustomization.yaml").read_text())
    tags = {image["name"]: image["newTag"] for image in kustomization["images"]}
    assert {SERVICES["router"]["image"].partition(":")[2], tags["specjax-router"]} == {pins[0][0]}


# Compose.


def test_compose():
    router, workers = SERVICES["router"], [name for name in SERVICES if name != "router"]
    urls = [word for word in router["command"] if word.startswith("http://")]
    port = parsed(COMMANDS["compose"]).server.port
    assert urls == [f"http://{name}:{port}" for name in workers] and len(urls) == 2
    assert router["depends_on"] == {name: {"condition": "service_healthy"} for name in workers}
    assert router["ports"] == ["127.0.0.1:30000:30000"] and "ports" not in SERVICES["worker-1"]
    for name in workers:
        grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace > parsed(SERVICES[name]["command"]).server.shutdown_timeout + FORCED_GRACE
        assert {volume.partition(":")[0] for volume in SERVICES[name]["volumes"]} <= set(COMPOSE["volumes"])
    assert all(service["deploy"]["resources"]["limits"] for service in SERVICES.values())
    # Compose stops the router first; it must run until the last answer has passed.
    drain = after(router["command"], "--shutdown-grace-period-secs")
    assert int(router["stop_grace_period"].removesuffix("s")) > drain
    assert drain > parsed(SERVICES["worker-1"]["command"]).server.shutdown_timeout


# Kubernetes.


def test_probes_of_a_worker():
    server = flags.ServerSettings()
    document = make_app(Runner(lambda: pytest.fail("not started"), server), server, model="m").openapi()
    paths = {path for path, operations in document["paths"].items() if "get" in operations}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert WORKER[probe]["httpGet"]["path"] in paths
        assert WORKER[probe]["httpGet"]["port"] == WORKER["ports"][0]["name"]
        assert WORKER[probe]["timeoutSeconds"] < 60 and WORKER[probe]["periodSeconds"] > 0
    assert WORKER["ports"][0]["containerPort"] == parsed(COMMANDS["kubernetes"]).server.port


def test_times_of_a_shutdown():
    _, pod, _ = deployment("worker.yaml")
    name, seconds = WORKER["lifecycle"]["preStop"]["exec"]["command"]
    drain = parsed(COMMANDS["kubernetes"]).server.shutdown_timeout
    assert name == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain + FORCED_GRACE
    readiness = WORKER["readinessProbe"]
    assert int(seconds) >= readiness["periodSeconds"] * readiness["failureThreshold"]
    _, pod, router = deployment("router.yaml")
    grace = after(router["args"], "--shutdown-grace-period-secs")
    assert pod["terminationGracePeriodSeconds"] > int(router["lifecycle"]["preStop"]["exec"]["command"][1]) + grace
    assert grace > drain


def test_labels_and_rights_of_the_router():
    spec, _, container = deployment("worker.yaml")
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    router_spec, pod, router = deployment("router.yaml")
    assert router["args"][router["args"].index("--selector") + 1] == f"{LABEL}={labels[LABEL]}"
    assert after(router["args"], "--service-discovery-port") == container["ports"][0]["containerPort"]
    budget = spec_of("worker.yaml", "PodDisruptionBudget")
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert 0 < budget["minAvailable"] < spec["replicas"]
    role, binding = spec_of("router.yaml", "Role"), spec_of("router.yaml", "RoleBinding")
    assert {"get", "list", "watch"} <= set(role["rules"][0]["verbs"]) and role["rules"][0]["resources"] == ["pods"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == pod["serviceAccountName"]
    service = spec_of("router.yaml", "Service")
    assert service["selector"].items() <= router_spec["template"]["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == router["ports"][0]["name"]


def test_commands_in_the_documentation():
    text = (ROOT / "docs" / "serving.md").read_text()
    names = set(re.findall(r"\bdeploy/[\w./-]*\w", text))
    assert {"deploy/Dockerfile", "deploy/compose.yaml", "deploy/kubernetes/base"} <= names
    assert all((ROOT / name).exists() for name in names)
    for line in re.findall(r"^docker build .*$", text, flags=re.M):
        words = shlex.split(line)
        assert f"AS {words[words.index('--target') + 1]}\n" in (DEPLOY / "Dockerfile").read_text()
