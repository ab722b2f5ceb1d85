"""`benchmarks/gpu_check.py`, which is for machines with a GPU: every part of it, in a tiny form, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import jax
import pytest
from specjax_kernels import tree_attention
from specjax_kernels.specs import tagged
from train_helpers import with_kernels

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
PARTS = ("kernels", "lossless", "attention", "steps-1", "steps-8", "steps-64", "peer", "memory")
ABSENT = ("fastapi", "uvicorn", "pydantic", "openai", "gguf", "tokenizers", "beartype")
"""Packages that a lent machine with a GPU does not have."""

TINY_SPECS = [spec.name for spec in tagged("test")[::16]]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # Its own folders only, as on a machine where nothing is installed. Compiling little is what makes it quick.
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "JAX_PLATFORMS": "cpu"}
    variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | variables | environment
    )


ALL = pytest.param(PARTS, id="all", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def tiny(request, tmp_path_factory) -> tuple[str, dict]:
    """What a tiny run of some parts has printed, and its document."""
    folder = tmp_path_factory.mktemp("gpu_check")
    models = str(with_kernels(folder / "models"))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = run(
        str(SCRIPT), "--tiny", "--implementation", "xla", "--minutes", "30", "--layers", "1",
        "--save", str(folder / "saved"), "--part", *request.param, SPECJAX_CACHE=models, **cache,
    )  # fmt: skip
    print(done.stdout)
    print(done.stderr[-4000:])
    assert done.returncode == 0, "something was wrong"
    document = json.loads(done.stdout.splitlines()[-1])
    saved = {file.stem for file in (folder / "saved").glob("*.json")}
    assert saved == {*request.param, "machine"}
    return done.stdout, document


@pytest.mark.process
@pytest.mark.parametrize("tiny", [ALL, pytest.param(("attention",), id="one")], indirect=True)
def test_every_part_runs_to_its_end(tiny, request):
    text, document = tiny
    assert document["right"] is True and document["complete"] is True
    assert tuple(document["parts"]) == request.node.callspec.params["tiny"]
    for name, report in document["parts"].items():
        assert report["done"], name
        assert report["wrong"] == report["failed"] == report["unchecked"] == [], name
        # torch and transformers are not in every environment; everything else is.
        assert report["rows"] or name == "peer", name
    assert "FAILED" not in text and "WRONG" not in text and "NOT CHECKED" not in text


@pytest.mark.parametrize("tiny", [ALL], indirect=True)
def test_what_a_tiny_run_finds(tiny):
    parts = tiny[1]["parts"]
    errors = parts["kernels"]["rows"]
    assert {row["dtype"] for row in errors} == {"float32", "bfloat16", "float16"}
    assert {row["implementation"] for row in errors} == {"xla"}
    assert all(row["right"] and row["relative"] < 1e-2 for row in errors)
    texts = [row for row in parts["lossless"]["rows"] if row["dtype"] == "float32"]
    assert {row["algorithm"] for row in texts} == {"NONE", "NGRAM", "EAGLE3 tree"}
    assert all(row["equal"] + len(row["partings"]) == row["prompts"] for row in texts)
    assert max(row["accept_length"] for row in texts) > 1, "something is accepted, so there is something to compare"
    assert any("SmolLM2: not there" in line for line in parts["lossless"]["skipped"])
    for name, batch in (("steps-1", 1), ("steps-8", 2), ("steps-64", 2)):
        steps = [row for row in parts[name]["rows"] if row["kind"] == "step"]
        assert [row["tree"] for row in steps] == [None, [2, 2, 5]]
        assert all(row["batch"] == batch and row["milliseconds"] > 0 for row in steps)
        assert steps[0]["ratio_to_plain"] == 1
    assert {row["kind"] for row in parts["attention"]["rows"]} == {"ceiling", "attention"}
    copies = [row for row in parts["memory"]["rows"] if row["kind"] == "step memory"]
    assert all(row["alias_bytes"] >= row["state_bytes"] > 0 for row in copies)


def test_without_a_gpu_it_says_what_it_needs():
    done = run(str(SCRIPT), "--part", "kernels")
    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr and "--tiny" in done.stderr
    assert "kernels" not in done.stdout


def test_checks_that_there_was_no_time_for_are_named_and_nothing_is_right():
    done = run(str(SCRIPT), "--tiny", "--part", "kernels", "lossless", "--implementation", "xla", "--minutes", "0")
    print(done.stdout)
    assert done.returncode == 1, done.stderr[-4000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["right"] is False and document["complete"] is False
    parts = document["parts"]
    assert all(report["done"] and report["rows"] == report["wrong"] == [] for report in parts.values())
    cases = [f"{spec} {dtype} xla" for spec in TINY_SPECS for dtype in ("bfloat16", "float32", "float16")]
    assert parts["kernels"]["unchecked"] == cases
    assert parts["lossless"]["unchecked"] == [f"random 4/2x16 {dtype} xla" for dtype in ("float32", "bfloat16")]
    assert f"NOT CHECKED, for lack of time: kernels: {', '.join(cases)}\n" in done.stdout


@pytest.mark.process
def test_it_needs_no_web_framework_no_gguf_and_no_tokenizers():
    """Nor does the engine."""
    modules = ["specjax.engine", "specjax.checkpoint"]
    modules += [
        "gpu_check",
        "gpu_check_kernels",
        "gpu_check_lossless",
        "gpu_check_steps",
        "gpu_check_peer",
        "gpu_check_first",
    ]
    code = f"""
import sys
sys.modules |= dict.fromkeys({ABSENT!r})
sys.path.insert(0, {str(SCRIPT.parent)!r})
import importlib
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


# In this process.


@pytest.fixture
def check(monkeypatch):
    """The script's modules: `gpu_check`, and by name those of its parts."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check
    import gpu_check_kernels

    yield gpu_check, gpu_check_kernels
    for name in [name for name in sys.modules if name.startswith("gpu_check") or name in ("attention", "timing")]:
        del sys.modules[name]


def report_of(check, folder: Path, *arguments: str):
    from gpu_check_report import Report

    plan = check[0].plan_of(check[0].flags().parse_args(["--tiny", "--minutes", "30", *arguments]))
    return Report("kernels", plan, folder / "kernels.json")


def written(report) -> dict:
    return {"kernels": json.loads(report.file.read_text())}


def test_several_implementations(check, monkeypatch, tmp_path):
    """Pallas runs in its interpreter here, so it does not take part in `tiny`."""
    monkeypatch.setattr(check[1], "tagged", lambda tag: tagged(tag)[:1])
    report = report_of(check, tmp_path, "--implementation", "pallas", "xla")
    check[1].kernels(report)
    assert [row["implementation"] for row in report.rows] == ["pallas"] * 3 + ["xla"] * 3
    assert all(row["right"] for row in report.rows) and report.wrong == report.skipped == []


def test_what_each_implementation_does_is_told_apart(check, monkeypatch, tmp_path):
    """The first one is right; others are wrong, refuse, or fail while they are traced or while they are compiled."""
    gpu_check, module = check
    ours = NotImplementedError("implementation 'refuses' has no such thing")
    jaxs = NotImplementedError("Unimplemented primitive in Pallas")

    def pretend(*args, implementation, **options):
        out = tree_attention(*args, **options, implementation="reference")
        if implementation in ("refuses", "breaks"):
            raise ours if implementation == "refuses" or args[0].dtype == "float16" else jaxs
        if implementation == "does not compile":
            return jax.lax.platform_dependent(out, default=lambda x: jax.ffi.ffi_call("nonesuch", x)(x))
        return out + 0.1 if implementation == "wrong" else out

    monkeypatch.setattr(module, "tree_attention", pretend)
    monkeypatch.setattr(module, "tagged", lambda tag: tagged(tag)[:1])
    names = ["reference", "wrong", "refuses", "breaks", "does not compile"]
    report = report_of(check, tmp_path, "--implementation", *names)
    module.kernels(report)
    found = [(row["implementation"], row["dtype"], row["right"]) for row in report.rows]
    assert found == [(name, dtype, name == "reference") for name in names[:2] for dtype in module.DTYPES]
    spec = TINY_SPECS[0]
    wrong = [f"{spec} {dtype} wrong: not equal to the reference" for dtype in module.DTYPES]
    wrong += ["refuses took none of the specs"]
    wrong += [f"{spec} {dtype} breaks: NotImplementedError: Unimplemented" for dtype in ("bfloat16", "float32")]
    wrong += ["breaks took none of the specs"]
    wrong += [f"{spec} {dtype} does not compile: JaxRuntimeError: " for dtype in module.DTYPES]
    wrong += ["does not compile took none of the specs"]
    assert len(report.wrong) == len(wrong)
    assert all(line.startswith(begin) for line, begin in zip(report.wrong, wrong, strict=True)), report.wrong
    assert len(report.skipped) == 4 and all(str(ours) in line for line in report.skipped)
    report.finish()
    assert gpu_check.complete(written(report)) and not gpu_check.summarise(written(report))


@pytest.mark.parametrize("checks", [1, 4, 9, 13])
def test_time_that_runs_out_between_two_checks(check, monkeypatch, tmp_path, capsys, checks):
    """Of 9 by the first implementation and 9 by another: each is made or written down, none both. The other's do not
    count."""
    gpu_check, module = check
    report, made = report_of(check, tmp_path, "--implementation", "xla", "pallas"), []

    def judge(report, job, name: str) -> bool:
        made.append(f"{job.spec} {job.dtype} {name}")
        if len(made) == checks:
            report._start -= 60 * 31
        return True

    monkeypatch.setattr(module, "_check", judge)
    for name in ("_begin", "_expected"):  # no program is made
        monkeypatch.setattr(module, name, lambda *arguments: Future())
    module.kernels(report)
    report.finish()
    first, second = ([f"{spec} {dtype} {name}" for spec in TINY_SPECS for dtype in module.DTYPES]
                     for name in ("xla", "pallas"))  # fmt: skip
    assert made == (first + second)[:checks]
    assert sorted(report.unchecked) == sorted(first[checks:])
    assert sorted(line.partition(":")[0] for line in report.skipped) == sorted((first + second)[max(9, checks) :])
    assert report.wrong == []
    assert gpu_check.complete(written(report)) is gpu_check.summarise(written(report)) is (checks >= 9)
    assert ("NOT CHECKED, for lack of time" in capsys.readouterr().out) is (checks < 9)


def test_jobs_begin_ahead_in_order_and_no_further(check):
    begun: list[int] = []

    def jobs():
        for number in range(20):
            begun.append(number)
            yield number

    for turn, job in enumerate(check[1]._ahead(jobs(), 5)):
        assert job == turn
        assert begun == list(range(min(20, turn + 6)))


def test_only_checks_must_have_been_made(check):
    """Timings may be skipped and may fail, and the peer may end as it likes."""
    gpu_check, _ = check
    good = {"rows": [], "wrong": [], "failed": ["a time"], "unchecked": [], "skipped": ["another"], "done": True}
    assert gpu_check.summarise({"steps-1": good, "peer": good | {"done": False}})
    assert not gpu_check.summarise({"steps-1": good, "kernels": good | {"unchecked": ["a check"]}})
    assert not gpu_check.summarise({"steps-1": good, "kernels": good | {"wrong": ["a check"]}})
    assert not gpu_check.summarise({"steps-1": good | {"done": False}})


def test_an_unknown_implementation_is_wrong_and_not_passed_over(check, monkeypatch, tmp_path):
    report = report_of(check, tmp_path, "--implementation", "nonesuch")
    check[1].kernels(report)
    report.finish()
    assert len(report.wrong) == 10 and report.wrong[-1] == "nonesuch took none of the specs"
    assert not check[0].summarise(written(report))


def test_the_help_gives_the_defaults(check):
    parser = check[0].flags()
    told = " ".join(parser.format_help().split())
    for name in ("minutes", "seed", "export_megabytes", "page_size"):
        action = next(action for action in parser._actions if action.dest == name)
        assert f"(default: {parser.get_default(name)}" in " ".join(str(action.help % vars(action)).split())
    assert "(default: 6.5)" in told and "7.5" not in told


def test_a_part_that_crashes_is_wrong_except_the_peer(check, tmp_path):
    gpu_check, _ = check
    (tmp_path / "kernels.json").write_text('{"part": "kernels", "rows": [1], "wrong": [], "done": false}')
    found = gpu_check.collect(tmp_path, ["kernels", "memory", "peer"], {"kernels": -11, "memory": 124, "peer": 124})
    assert found["kernels"]["rows"] == [1], "what it had found is kept"
    assert found["kernels"]["wrong"] == ["kernels: the process ended with status -11"]
    assert found["memory"]["wrong"] == ["memory: the process took too long and was ended"]
    assert found["peer"]["wrong"] == [] and len(found["peer"]["skipped"]) == 1
    assert not gpu_check.complete({"kernels": found["kernels"]}) and gpu_check.complete({"peer": found["peer"]})
