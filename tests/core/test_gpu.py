"""Preparation of NVIDIA GPUs before JAX starts and the check after it, with a script as `nvidia-smi`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from engine_helpers import make_engine, toy
from tiny_checkpoints import save_llama

from specjax import gpu, make_speculation, make_steps
from specjax.cli import build, flags
from specjax.gpu import (
    GB,
    NVIDIA_OPTIONS,
    SCHEDULING,
    SHARE_VARIABLES,
    Card,
    GpuError,
    Memory,
    cards,
    claim,
    compiler_options,
    problem,
    share_of,
    this_memory,
)
from specjax.load import load
from specjax.settings import Parser, add_flags, parse


def queried(
    name: str, driver: str = "580.95.05", capability: str = "9.0", memory: Any = 16384, free: Any = 16000,
    uuid: str = "GPU-a",
) -> str:  # fmt: skip
    """The fields of a GPU as `nvidia-smi` answers a query for them, after its number."""
    return f"{uuid}, {name}, {driver}, {capability}, {memory}, {free}"


H200 = queried("NVIDIA H200", memory=143771, free=143000, uuid="GPU-aaaa")
T4 = queried("Tesla T4", "570.86.10", "7.5", 15360, 15000, "GPU-bbbb")
CARD = Card(0, "GPU-aaaa", "NVIDIA H200", "580.95.05", "9.0", 143771 << 20, 143000 << 20)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Environment and JAX settings of a user who has set nothing."""
    for name in (*SHARE_VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = jax.config.values["jax_cuda_visible_devices"], jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "")
    yield
    for name, value in zip(("jax_cuda_visible_devices", "jax_platforms"), before, strict=True):
        jax.config.update(name, value)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(*lines of nvidia-smi, plugin=JAX's plugin, listed=lines of nvidia-smi -L): simulates a machine."""

    def build(
        *lines: str, plugin: str | None = "jax_cuda12_plugin", status: int = 0, listed: str = "", split: str = "[N/A]"
    ) -> None:
        script = tmp_path / "nvidia-smi"
        text = "\n".join(f"{index}, {line}, {split}" for index, line in enumerate(lines))
        listing = f"if [ $1 = -L ]; then cat <<'END'\n{listed}\nEND\nexit; fi"
        script.write_text(f"#!/bin/sh\n{listing}\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        find = importlib.util.find_spec

        def find_plugin(name: str, *rest: Any) -> Any:
            return (SimpleNamespace() if name == plugin else None) if name in gpu.MIN_VERSIONS else find(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", find_plugin)

    return build


def visible() -> str:
    return str(jax.config.values["jax_cuda_visible_devices"])


def test_claim_without_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert claim(0.85) is None and visible() == "all"
    assert not any(name in os.environ for name in SHARE_VARIABLES)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, ["NVIDIA H200", "Tesla T4"]),
        ("1,0", ["Tesla T4", "NVIDIA H200"]),
        ("GPU-bb", ["Tesla T4"]),
        ("0,7,1", ["NVIDIA H200"]),  # CUDA stops at the first unknown device
        ("", []),
    ],
)
def test_visible_cards(machine, monkeypatch, shown, expected):
    machine(H200, T4)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [card.name for card in cards()] == expected
    if shown is None:
        assert cards()[0] == CARD


def test_unreadable_nvidia_smi_output(machine, caplog):
    machine("GPU-cccc, NVIDIA Odd, 580.95.05", H200)
    with caplog.at_level(logging.WARNING):
        assert [card.name for card in cards()] == ["NVIDIA H200"]
    assert "NVIDIA Odd" in caplog.text
    machine("Failed to initialize NVML: Driver/library version mismatch", status=18)
    with caplog.at_level(logging.WARNING):
        assert cards() == []
    assert "nvidia-smi failed" in caplog.text and "version mismatch" in caplog.text


A100 = queried("NVIDIA A100-SXM4-40GB", "570.86.10", "8.0", 40960, 40000, "GPU-dddd")
PARTS = """GPU 0: Tesla T4 (UUID: GPU-bbbb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-dddd)
  MIG 1c.3g.20gb  Device  0: (UUID: MIG-1111-aa)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-GPU-2222/7/0)"""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, [("Tesla T4", 16), ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", 20)]),
        ("1", [("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", 20)]),
        ("MIG-GPU-2222/7/0", [("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", 5)]),
        ("MIG-11", [("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", 20)]),
        ("MIG-3333", []),
    ],
)
@pytest.mark.parametrize("split", ["Enabled", "[N/A]"])
def test_parts_of_a_gpu(machine, monkeypatch, shown, expected, split):
    """MIG: nvidia-smi's query lists the whole GPU. A container may hide the mode."""
    if split == "[N/A]" and not (shown or "").startswith("MIG"):
        pytest.skip("nothing tells that the GPU is split")
    machine(T4, A100, listed=PARTS, split=split)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [(card.name, round(card.memory / GB)) for card in cards()] == expected
    if len(expected) == 1:
        card = claim(0.85)
        assert card is not None and str(card).endswith(f"compute capability 8.0, {expected[0][1]}.0 GB)")
        share = min(0.95, 1 - 0.75 / expected[0][1])
        assert float(os.environ[SHARE_VARIABLES[0]]) == pytest.approx(share, abs=1e-3)


def test_unknown_memory(machine, caplog):
    machine(queried("NVIDIA H20", memory=100000, free="[N/A]"))
    assert cards()[0].free == cards()[0].memory == 100000 << 20
    machine(queried("NVIDIA GB10", "580.95.05", "12.1", "[N/A]", "[N/A]"), plugin="jax_cuda13_plugin")
    with caplog.at_level(logging.WARNING):
        card = claim(0.85)
    assert card is not None and card.memory == 0 and os.environ[SHARE_VARIABLES[0]] == "0.7500"
    assert "NVIDIA GB10 (driver 580.95.05, compute capability 12.1, unknown memory): JAX takes 75%" in caplog.text


def test_claim_one_gpu(machine):
    machine(T4, H200)
    card = claim(0.85, gpu=1)
    assert card is not None and card.name == "NVIDIA H200" and visible() == "1"
    assert float(os.environ[SHARE_VARIABLES[0]]) == pytest.approx(0.95)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_settings_of_the_user_win(machine, monkeypatch):
    machine(H200, T4)
    monkeypatch.setenv(SHARE_VARIABLES[1], "0.4")
    jax.config.update("jax_cuda_visible_devices", "0,1")
    assert claim(0.85) is not None
    assert SHARE_VARIABLES[0] not in os.environ and visible() == "0,1"
    jax.config.update("jax_platforms", "cpu")
    assert claim(0.85) is None


def test_memory_of_other_programs(machine, caplog):
    machine(queried("NVIDIA H200", memory=100000, free=40000))
    with caplog.at_level(logging.WARNING):
        assert claim(0.85) is not None
    assert float(os.environ[SHARE_VARIABLES[0]]) == pytest.approx(0.40 - 0.03, abs=1e-3)
    assert "Other programs have 62.9 of the GPU's 104.9 GB" in caplog.text


NEW, OLD = SHARE_VARIABLES


@pytest.mark.parametrize(
    ("lines", "given", "message"),
    [
        ([], {"gpu": 1}, "GPU 1 was asked for; CUDA shows none"),
        ([T4, H200], {"gpu": 2}, "GPU 2 was asked for; CUDA shows Tesla T4, NVIDIA H200"),
        (
            [H200], {NEW: "0.9", OLD: "0.5"},
            f"{NEW}=0.9 and {OLD}=0.5 are both set, and JAX takes one: unset {OLD}",
        ),
        ([H200], {OLD: "90%"}, f"{OLD}=90% must be the share"),
        ([H200], {OLD: "0"}, f"{OLD}=0 must be the share"),
        ([queried("H200", memory=100000, free=100)], {}, r"has 0\.1 GB that no other program has taken"),
        (
            [queried("V100", "470.10", "7.0")], {},
            r"driver 470.*CUDA 12 needs a driver from 525\.60\.13 on.*JAX_PLATFORMS=cpu",
        ),
        (
            [queried("H200", "570.86")], {"cuda": "13"},
            r"CUDA 13 needs a driver from 580\.65\.06 on \(or pip install -e '\.\[cuda12\]'",
        ),
        ([queried("V100", "580.95", "7.0")], {"cuda": "13"}, r"needs a compute capability from 7\.5 on"),
        ([queried("K80", "580.95", "3.7")], {}, r"compute capability 3\.7, 17\.2 GB\).*from 5\.2 on"),
        ([], {"cuda": "", "platforms": "cuda"}, r"JAX_PLATFORMS=cuda asks for CUDA, and JAX has no CUDA: .*cuda12"),
        ([H200], {"cuda": "", "platforms": "cuda"}, r"JAX_PLATFORMS=cuda asks for CUDA, and JAX has no CUDA: .*cuda12"),
    ],
)  # fmt: skip
def test_refused_claims(machine, monkeypatch, lines, given, message):
    cuda = given.get("cuda", "12")
    machine(*lines, plugin=f"jax_cuda{cuda}_plugin" if cuda else None)
    for name in SHARE_VARIABLES:
        if name in given:
            monkeypatch.setenv(name, given[name])
    jax.config.update("jax_platforms", given.get("platforms", ""))
    with pytest.raises(GpuError, match=message):
        claim(0.85, gpu=given.get("gpu", 0))


@pytest.mark.parametrize(
    ("line", "plugin", "message"),
    [
        (T4, "jax_cuda12_plugin", "XLA's are used, and float16 for models in bfloat16"),
        (queried("NVIDIA A100", "545.23", "8.0"), "jax_cuda12_plugin", "drivers from 570 on"),
    ],
)
def test_warnings(machine, caplog, line, plugin, message):
    machine(line, plugin=plugin)
    with caplog.at_level(logging.WARNING):
        assert claim(0.85) is not None
    assert message in caplog.text


@pytest.mark.parametrize("line", [None, H200])
def test_cpu_beside_cuda_that_jax_lacks(machine, line):
    machine(*([] if line is None else [line]), plugin=None)
    jax.config.update("jax_platforms", "cuda,cpu")
    assert claim(0.85) is None


# The start of JAX.

JAXLIB = importlib.metadata.version("jaxlib")
INSTALL = f"pip install 'jax\\[cuda12\\]=={jax.__version__}'"


@pytest.fixture
def start(machine, monkeypatch):
    """start(device, ...): JAX has a plugin and starts on a device of that kind; None: its start fails. `files`: device
    files; `library`: the driver's loads; `packages`: versions, None for those that are missing."""
    version = importlib.metadata.version

    def begin(device: str | None, *lines: str, files=True, library=True, plugin="jax_cuda12_plugin", packages=()):
        machine(*lines, plugin=plugin)
        versions = {f"jax-cuda12-{part}": JAXLIB for part in ("plugin", "pjrt")} | {"nvidia-cudnn-cu12": "9"}
        versions |= dict(packages)

        def version_of(name: str) -> str:
            if (found := versions[name] if name in versions else version(name)) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        def devices() -> list[Any]:
            if device is None:
                raise RuntimeError("Unable to initialize backend 'cuda': no CUDA-capable device\nmore")
            kind = "cpu" if device == "cpu" else "gpu"
            return [SimpleNamespace(platform=kind, device_kind=device, memory_stats=lambda: None)]

        requires = [f"jax-cuda12-pjrt=={JAXLIB}", 'nvidia-cudnn-cu12<10.0,>=9.8; extra == "with-cuda"']
        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setattr(importlib.metadata, "requires", lambda _: requires)
        monkeypatch.setattr(jax, "local_devices", devices)
        monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: object() if library else os.open("/missing", os.O_RDONLY))
        here = gpu.DEVICE_FILES[1:2] if files else ()
        monkeypatch.setattr(gpu.os.path, "exists", lambda name: name in here or os.access(name, os.F_OK))

    return begin


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {"packages": {"jax-cuda12-plugin": "0.1"}}, f"^jax-cuda12-plugin 0.1 does not fit .*: {INSTALL}$"),
        ("NVIDIA H200", {"packages": {"jax-cuda12-pjrt": "0.1"}}, f"^jax-cuda12-pjrt 0.1 does not fit .*: {INSTALL}$"),
        ("cpu", {"files": False}, r"none of /dev/nvidia0, .*`docker run --gpus all`.*; JAX_PLATFORMS=cpu"),
        ("cpu", {"library": False}, r"libcuda\.so\.1 is missing: install NVIDIA's driver, or start the container"),
        ("cpu", {"packages": {"nvidia-cudnn-cu12": None}}, rf"Not installed: nvidia-cudnn-cu12\. {INSTALL}"),
        ("cpu", {}, rf"does not use NVIDIA H200 \(driver .*\(its messages say why\)\. {INSTALL}, and unset LD_LIBRARY"),
        (None, {}, r"H200 .*\(Unable to initialize backend 'cuda': no CUDA-capable device\)\."),
        ("Tesla T4", {}, r"^NVIDIA H200 .* was claimed, and JAX uses Tesla T4: set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    ],
)  # fmt: skip
def test_a_start_without_the_claimed_gpu(start, device, options, message):
    start(device, H200, T4, **options)
    card = claim(0.85)
    assert card is not None
    text = problem(card)
    assert text is not None
    with pytest.raises(GpuError, match=message):
        raise GpuError(text)


def test_a_start_as_expected(start, machine, monkeypatch):
    start("NVIDIA H200", H200, T4)
    assert problem(claim(0.85)) is None and problem() is None
    start("NVIDIA H200 NVL", H200)  # a name that nvidia-smi spells in another way
    assert problem(CARD) is None
    start("cpu", H200, files=False)
    jax.config.update("jax_platforms", "cpu")
    assert problem(CARD) is None
    jax.config.update("jax_platforms", "")
    machine(plugin=None)
    assert problem() is None


def test_a_gpu_without_cuda_in_jax(machine):
    machine(H200, plugin=None)
    assert claim(0.85) is None
    text = problem()
    assert text is not None and text.startswith("JAX runs on the CPU: this machine has an NVIDIA H200")
    assert "JAX has no CUDA: in specjax's folder, pip install -e '.[cuda12]'" in text


def test_commands_refuse_and_the_library_warns(start, machine, caplog):
    gpu.warn_of_problem.cache_clear()
    start("cpu", H200, files=False)
    with pytest.raises(GpuError, match=r"does not use NVIDIA H200 .*docker run --gpus all"):
        build.claim_gpu(flags.Settings())
    with caplog.at_level(logging.WARNING):
        make_steps(toy().target, make_speculation("NONE").drafter)
        make_engine(toy(), warm=False)
    assert caplog.text.count("docker run --gpus all") == 1
    caplog.clear()
    gpu.warn_of_problem.cache_clear()
    with caplog.at_level(logging.WARNING):
        make_engine(toy(), warm=False)
    assert caplog.text.count("docker run --gpus all") == 1
    machine(H200, plugin=None)
    build.claim_gpu(flags.Settings())  # the CPU is used, with a warning
    gpu.warn_of_problem.cache_clear()


@pytest.mark.parametrize("memory", [8 * GB, 141 * GB])
@pytest.mark.parametrize("fraction", [0.1, 0.85, 0.9])
def test_memory_fraction_of_the_device(memory, fraction):
    """The fraction counts from the device's memory, as in SGLang, and leaves room for temporaries."""
    limit = int(memory * share_of(fraction, memory))
    assert limit <= memory - 0.75 * GB
    budget = Memory(memory, limit, 0).budget(fraction)
    assert budget == pytest.approx(fraction * memory, rel=0.07 if memory < 10 * GB else 1e-6)
    assert budget <= 0.93 * limit


def test_device_memory_from_jax_limit(monkeypatch):
    assert this_memory() is None, "a CPU"
    stats = {"bytes_limit": 75 * GB, "bytes_in_use": GB}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert this_memory() == Memory(100 * GB, 75 * GB, GB), "JAX reserves three quarters"
    monkeypatch.setenv(SHARE_VARIABLES[1], "0.5")
    assert gpu.given_share() == 0.5 and this_memory() == Memory(150 * GB, 75 * GB, GB)


def test_small_gpu_is_refused_before_loading(tmp_path, monkeypatch):
    save_llama(tmp_path)
    monkeypatch.setattr("specjax.checkpoint.load_params", lambda *_, **__: 1 / 0)
    for size, error, message in (
        (0.001, ZeroDivisionError, None),
        (0.00015, ValueError, r"has 0\.00 GB of weights in float32.*mem_fraction 0\.85.*; quantization int8 takes"),
        (0.00001, ValueError, r"in use; a dry run of `specjax serve`"),
    ):
        stats = {"bytes_limit": int(0.75 * size * GB), "bytes_in_use": 0}
        monkeypatch.setattr(jax, "local_devices", lambda stats=stats: [SimpleNamespace(memory_stats=lambda: stats)])
        with pytest.raises(error, match=message):
            load(str(tmp_path), draft="NONE", dtype="float32", mem_fraction=0.85, progress=False)


# The flags.


def test_claim_by_flags(start):
    start("NVIDIA H200", T4, H200)

    def chosen(*argv: str) -> flags.Settings:
        parser = Parser()
        add_flags(parser, flags.Settings())
        return parse(parser, list(argv), flags.Settings())[1]

    build.claim_gpu(chosen("--base-gpu-id", "1", "--mem-fraction-static", "0.5"))
    assert visible() == "1" and float(os.environ[SHARE_VARIABLES[0]]) == pytest.approx(0.6)
    with pytest.raises(GpuError, match=r"^--base-gpu-id: GPU 5 was asked for"):
        build.claim_gpu(chosen("--base-gpu-id", "5"))


# XLA's options.


@pytest.fixture
def on(monkeypatch):
    """Simulates a GPU. Programs are compiled for the CPU, where XLA accepts the same options."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    gpu.accepts.cache_clear()

    def become(version: str) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        client = SimpleNamespace(platform_version=f"PJRT C API\n{version}")
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=client)])

    yield become
    gpu.accepts.cache_clear()


def test_no_options_for_other_platforms(on):
    assert compiler_options() is None
    on("rocm 70100")
    assert compiler_options() is None


def test_options_of_nvidia_gpus_and_xla_flags(on, monkeypatch):
    on("cuda 12090")
    assert compiler_options() == dict(NVIDIA_OPTIONS)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_gpu_enable_command_buffer=FUSION")
    assert compiler_options() == {SCHEDULING: NVIDIA_OPTIONS[SCHEDULING]}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert compiler_options() == dict(NVIDIA_OPTIONS)


@pytest.mark.parametrize(
    "wrong", [{"xla_gpu_gone": "1"}, {SCHEDULING: "GONE"}, {"xla_gpu_enable_command_buffer": "FUSION,GONE"}]
)
def test_rejected_options_are_left_out_with_a_warning(on, monkeypatch, caplog, wrong):
    on("cuda 13000")
    monkeypatch.setattr(gpu, "NVIDIA_OPTIONS", wrong | {"xla_gpu_graph_min_graph_size": "5"})
    with caplog.at_level(logging.WARNING):
        assert compiler_options() == {"xla_gpu_graph_min_graph_size": "5"}
    assert next(iter(wrong)) in caplog.text
    caplog.clear()
    compiler_options()
    assert not caplog.text, "warned twice"
