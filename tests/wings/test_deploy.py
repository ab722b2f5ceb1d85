"""`deploy/`: what the files name exists, and the times in them fit together. `make deploy-check` runs the linters."""

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
    """Of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def objects(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / file).read_text()))


def deployment(file: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(its spec, the pod's spec, the container) of the Deployment in a manifest."""
    (found,) = [each for each in objects(file) if each["kind"] == "Deployment"]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return found["spec"], found["spec"]["template"]["spec"], container


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
WORKER = deployment("worker.yaml")[2]
COMMANDS = {
    "image": json.loads([value for name, value in instructions(DEPLOY / "Dockerfile") if name == "CMD"][-1]),
    "compose": SERVICES["worker-1"]["command"],
    "kubernetes": WORKER["args"],
}


def parsed(command: list[str]) -> flags.Settings:
    """By the server's own parser, which exits on a flag that it does not have."""
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, flags.Settings())
    return settings.parse(parser, [re.sub(r"\$\{\w+:-(.*)\}", r"\1", each) for each in command], flags.Settings())[1]


@pytest.mark.parametrize("place", COMMANDS)
def test_flags_of_the_server(place):
    found = parsed(COMMANDS[place])
    assert (found.server.host, found.server.port) == ("0.0.0.0", 30000)


def test_a_flag_that_does_not_exist_is_found():
    with pytest.raises(SystemExit):
        parsed([*COMMANDS["kubernetes"], "--no-such-flag"])


# The images.


def test_what_the_images_copy_is_there_and_sent():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [value.split() for name, value in instructions(DEPLOY / "Dockerfile") if name == "COPY"]
    names = [each for words in sources if not words[0].startswith("--from") for each in words[:-1]]
    assert names
    for name in names:
        assert (ROOT / name).exists() and f"!{name}" in ignored
    stages = re.findall(r"^FROM \S+ AS (\S+)", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    assert {words[0].removeprefix("--from=") for words in sources if words[0].startswith("--from")} <= set(stages)
    targets = {service["build"]["target"] for service in SERVICES.values()}
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]
    assert targets | {service["build"]["target"] for service in cuda.values()} == {"cpu", "cuda", "router"} <= {*stages}
    assert set(cuda) < set(SERVICES)


def test_extras_of_the_images():
    extras = re.findall(r"'\.\[([\w,-]+)\]'", (DEPLOY / "Dockerfile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert len(extras) == 1 and {name for found in extras for name in found.split(",")} <= set(known)


def test_a_wheel_is_built_of_what_is_copied(tmp_path):
    names = [name[1:] for name in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if name[0] == "!"]
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is absent from" not in done.stdout + done.stderr, "a package that pyproject.toml does not list"
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    assert {"specjax/serve/__main__.py", "specjax/serve/playground.html", "specjax_kernels/attention.py"} <= set(held)


def test_the_router_is_the_one_that_is_tested():
    pins = [re.findall(r"sglang-router==(\S+)", (ROOT / name).read_text())
            for name in ("deploy/Dockerfile", "Makefile", "docs/serving.md")]  # fmt: skip
    assert all(pins) and len({pin for found in pins for pin in found}) == 1
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "kustomization.yaml").read_text())
    tags = {each["name"]: each["newTag"] for each in kustomization["images"]}
    assert {SERVICES["router"]["image"].partition(":")[2], tags["specjax-router"]} == {pins[0][0]}


# Compose.


def test_compose():
    router, workers = SERVICES["router"], [name for name in SERVICES if name != "router"]
    urls = [each for each in router["command"] if each.startswith("http://")]
    port = parsed(COMMANDS["compose"]).server.port
    assert urls == [f"http://{name}:{port}" for name in workers] and len(urls) == 2
    assert router["depends_on"] == {name: {"condition": "service_healthy"} for name in workers}
    assert router["ports"] == ["127.0.0.1:30000:30000"] and "ports" not in SERVICES["worker-1"]
    for name in workers:
        grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace > parsed(SERVICES[name]["command"]).server.shutdown_timeout + FORCED_GRACE
        assert {volume.partition(":")[0] for volume in SERVICES[name]["volumes"]} <= set(COMPOSE["volumes"])
    assert all(service["deploy"]["resources"]["limits"] for service in SERVICES.values())
    # Compose stops the router first: it must be there until the last answer has passed.
    drain = int(router["command"][router["command"].index("--shutdown-grace-period-secs") + 1])
    assert int(router["stop_grace_period"].removesuffix("s")) > drain
    assert drain > parsed(SERVICES["worker-1"]["command"]).server.shutdown_timeout


# Kubernetes.


@pytest.mark.parametrize("folder", ["base", "cuda"])
def test_files_that_kustomize_reads(folder):
    place = DEPLOY / "kubernetes" / folder
    found = yaml.safe_load((place / "kustomization.yaml").read_text())
    named = [*found["resources"], *(patch["path"] for patch in found.get("patches", ()))]
    assert all((place / name).exists() for name in named)
    assert {path.name for path in place.glob("*.yaml")} - {"kustomization.yaml"} == {n for n in named if "/" not in n}


def test_probes_of_a_worker():
    server = flags.ServerSettings()
    document = make_app(Runner(lambda: pytest.fail("not started"), server), server, model="m").openapi()
    paths = {path for path, operations in document["paths"].items() if "get" in operations}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert WORKER[probe]["httpGet"]["path"] in paths
        assert WORKER[probe]["httpGet"]["port"] == WORKER["ports"][0]["name"]
        assert WORKER[probe]["timeoutSeconds"] < 60 and WORKER[probe]["periodSeconds"] > 0
    assert WORKER["ports"][0]["containerPort"] == parsed(COMMANDS["kubernetes"]).server.port


def test_times_of_a_worker_that_ends():
    _, pod, _ = deployment("worker.yaml")
    name, seconds = WORKER["lifecycle"]["preStop"]["exec"]["command"]
    drain = parsed(COMMANDS["kubernetes"]).server.shutdown_timeout
    assert name == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain + FORCED_GRACE
    readiness = WORKER["readinessProbe"]
    assert int(seconds) >= readiness["periodSeconds"] * readiness["failureThreshold"]
    _, pod, router = deployment("router.yaml")
    grace = int(router["args"][router["args"].index("--shutdown-grace-period-secs") + 1])
    assert pod["terminationGracePeriodSeconds"] > int(router["lifecycle"]["preStop"]["exec"]["command"][1]) + grace
    assert grace > drain


def test_the_router_finds_the_workers():
    spec, _, container = deployment("worker.yaml")
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    _, pod, router = deployment("router.yaml")
    args = dict(zip(router["args"][:-1], router["args"][1:], strict=True))
    assert args["--selector"] == f"{LABEL}={labels[LABEL]}"
    assert int(args["--service-discovery-port"]) == container["ports"][0]["containerPort"]
    (budget,) = [each["spec"] for each in objects("worker.yaml") if each["kind"] == "PodDisruptionBudget"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert 0 < budget["minAvailable"] < spec["replicas"]
    (role,) = [each for each in objects("router.yaml") if each["kind"] == "Role"]
    assert {"get", "list", "watch"} <= set(role["rules"][0]["verbs"]) and role["rules"][0]["resources"] == ["pods"]
    (binding,) = [each for each in objects("router.yaml") if each["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == pod["serviceAccountName"]
    (service,) = [each["spec"] for each in objects("router.yaml") if each["kind"] == "Service"]
    router_labels = deployment("router.yaml")[0]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= router_labels.items()
    assert service["ports"][0]["targetPort"] == router["ports"][0]["name"]


@pytest.mark.parametrize("file", ["worker.yaml", "router.yaml"])
def test_limits(file):
    _, pod, container = deployment(file)
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert {"cpu", "memory"} <= set(container["resources"]["limits"]) & set(container["resources"]["requests"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_gpu_for_each_worker():
    patch = yaml.safe_load((DEPLOY / "kubernetes" / "cuda" / "gpu.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == WORKER["name"] and container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert patch["metadata"]["name"] == objects("worker.yaml")[0]["metadata"]["name"]
    volumes = {volume["name"] for volume in deployment("worker.yaml")[1]["volumes"]}
    assert {volume["name"] for volume in patch["spec"]["template"]["spec"]["volumes"]} <= volumes


def test_commands_of_the_page_name_files_that_exist():
    text = (ROOT / "docs" / "serving.md").read_text()
    named = set(re.findall(r"\bdeploy/[\w./-]*\w", text))
    assert {"deploy/Dockerfile", "deploy/compose.yaml", "deploy/kubernetes/base"} <= named
    assert all((ROOT / name).exists() for name in named)
    for line in re.findall(r"^docker build .*$", text, flags=re.M):
        words = shlex.split(line)
        assert f"AS {words[words.index('--target') + 1]}\n" in (DEPLOY / "Dockerfile").read_text()
