"""The flags of specjax: help, engine arguments, errors, the files in `configs/`, and the commands."""

import argparse
import itertools
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import specjax
from specjax import settings
from specjax.__main__ import COMMANDS
from specjax.__main__ import main as specjax_main
from specjax.acceptance import AcceptAbove, SyntheticAcceptance
from specjax.cli import build, flags, generate
from specjax.drafters import DRAFTERS, Auto, DraftOptions, Eagle, Mtp, Ngram, NoDraft, make_speculation
from specjax.drafters.factories import ALIASES
from specjax.engine import EngineConfig
from specjax.engine.memory import layout

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = CONFIGS / "smollm2-135m-instruct-eagle3.toml"
NGRAM = CONFIGS / "smollm2-135m-instruct-ngram.toml"
DEFAULTS = flags.Settings()
TABLES = ("model", "engine", "speculative", "server")


def ours(*argv, defaults=DEFAULTS) -> flags.Settings:
    parser = argparse.ArgumentParser(prog="program", formatter_class=settings.HelpFormatter)
    settings.add_flags(parser, defaults)
    return settings.parse(parser, [str(each) for each in argv], defaults)[1]


@pytest.fixture
def toml(tmp_path):
    """toml(text) -> path of a file with it."""

    def write(text: str) -> str:
        (tmp_path / "my.toml").write_text(text)
        return str(tmp_path / "my.toml")

    return write


# Help.


def test_help_of_every_setting():
    def help_groups(parser: argparse.ArgumentParser) -> dict[str, str]:
        """Title -> text."""
        parts = re.split(r"^(\S[^\n]*):$", parser.format_help(), flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    parser = argparse.ArgumentParser(formatter_class=settings.HelpFormatter)
    settings.add_flags(parser, DEFAULTS)
    server, generates = help_groups(parser), help_groups(generate.build_parser())
    assert set(TABLES) == {field.name for field in fields(DEFAULTS)}
    for groups, tables in ((server, TABLES), (generates, TABLES[:3])):
        for table in tables:
            for field in fields(getattr(DEFAULTS, table)):
                assert re.search(rf"^  --{field.name.replace('_', '-')}[ ,]", groups[table], re.MULTILINE), field.name
                assert field.metadata["setting"].help
    assert "server" not in generates and "--port" not in generate.build_parser().format_help()
    assert "most requests that run at once (R) (at least 1; default: 8)" in re.sub(r"\s+", " ", generates["engine"])
    options = {name for each in DRAFTERS.values() for name in each.names()}
    set_by_flags = {field.metadata["setting"].sets for field in fields(flags.SpeculativeSettings)}
    assert options | {"draft", "isolate_ngrams", "adaptive", ""} == set_by_flags


# Values.


def test_defaults():
    assert "hunter2" not in repr(flags.Settings(server=flags.ServerSettings(api_key=("hunter2",))))
    assert build.engine_arguments(DEFAULTS)["config"] == EngineConfig()
    assert replace(generate.DEFAULTS, engine=flags.EngineSettings()) == DEFAULTS
    assert generate.DEFAULTS.engine == flags.EngineSettings(max_running_requests=8)


@pytest.mark.parametrize(
    ("argv", "adaptive"),
    [
        ((), True),
        (("--speculative-num-draft-tokens", 8), True),
        (("--speculative-num-draft-tokens", 8, "--no-speculative-adaptive"), False),
        (("--no-speculative-adaptive",), False),
    ],
)
def test_adaptive_default(argv, adaptive):
    """Of n-grams, which often match nothing: also with an explicit width, unless the flag disables it."""
    arguments = build.engine_arguments(ours("--speculative-algorithm", "NGRAM", *argv))

    def chooses(config: EngineConfig) -> bool:
        return layout(config, 64, 64, "cpu", make_speculation(arguments["draft"]))[1].chooses

    assert chooses(arguments["config"]) is adaptive
    assert not chooses(replace(arguments["config"], trace=True)), "traced steps draft"


def test_engine_arguments():
    """All settings except the server's reach `Engine.from_pretrained`."""
    arguments = build.engine_arguments(ours(
        "--model-path", "m", "--revision", "r", "--tokenizer-path", "t", "--chat-template", "c", "--dtype", "bfloat16",
        "--sampling-defaults", "OpenAI",
        "--max-running-requests", 2, "--cuda-graph-max-bs", 1, "--max-total-tokens", 64,
        "--context-length", 32, "--page-size", 4,
        "--chunked-prefill-size", 8, "--max-prefill-tokens", 16, "--schedule-policy", "LPM", "--disable-radix-cache",
        "--mem-fraction", 0.5, "--attention-backend", "xla", "--disable-overlap-schedule",
        "--no-speculative-adaptive",
        "--random-seed", -5, "--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", 6,
        "--speculative-ngram-match-type", "prob",
    ))  # fmt: skip
    config = EngineConfig(
        max_running_requests=2, max_batch=1, page_size=4, max_total_tokens=64, context_length=32,
        chunked_prefill_size=8, max_prefill_tokens=16, schedule_policy="lpm", prefix_cache=False,
        mem_fraction=0.5, overlap=False, random_seed=-5, adaptive=False,
    )  # fmt: skip
    assert arguments == {
        "model": "m", "revision": "r", "tokenizer_path": "t", "chat_template": "c", "dtype": "bfloat16",
        "quantization": "auto", "draft": Ngram(nodes=6, match_type="PROB"), "backend": "xla",
        "config": config, "sampling_defaults": "openai", "verify": None,
    }  # fmt: skip
    assert build.engine_arguments(ours("--tp", 4, "--ep", 2))["config"].expert_parallel == 2
    with pytest.raises(ValueError, match=r"^--expert-parallel-size 3 must divide tensor_parallel 4, "):
        build.engine_arguments(ours("--tp-size", 4, "--ep-size", 3))


def test_sglang_flags_without_effect(toml, caplog):
    file = toml("[engine]\ntrust-remote-code = true\n")
    given = ("--enable-torch-compile", "--torch-compile-max-bs", 8, "--speculative-attention-mode", "decode")
    assert build.engine_arguments(ours(*given, "--config", file)) == build.engine_arguments(ours())
    assert [record.getMessage() for record in caplog.records] == [
        "--enable-torch-compile has no effect: every step is compiled by XLA",
        "--torch-compile-max-bs has no effect: steps of every batch size are compiled by XLA",
        f"--config {file}: [engine] trust-remote-code has no effect: no code of a checkpoint is ever run",
        "--speculative-attention-mode has no effect: verification and drafting use the attention of "
        "--attention-backend",
    ]
    assert ours("--max-batch-bucket", 8).engine == flags.EngineSettings(cuda_graph_max_bs=8)


def drafting(*argv) -> DraftOptions:
    return build.engine_arguments(ours(*argv))["draft"]


def test_flags_of_an_algorithm(caplog):
    head = ("--speculative-algorithm", "eagle", "--speculative-draft-model", "h")
    assert drafting(*head) == Eagle("h")
    assert drafting(
        *head, "--speculative-num-steps", 3, "--speculative-eagle-topk", 2, "--speculative-num-draft-tokens", 6,
        "--speculative-token-map", "8192", "--speculative-draft-model-revision", "r",
    ) == Eagle("h", "r", 3, 2, 6, "8192")  # fmt: skip
    assert not caplog.records
    argv = ("--speculative-algorithm", "none", "--speculative-num-steps", 3, "--speculative-ngram-capacity", 9)
    assert drafting(*argv) == NoDraft()
    (record,) = caplog.records
    assert record.getMessage() == (
        "no effect with --speculative-algorithm NONE: --speculative-num-steps, --speculative-ngram-capacity"
    )


def test_flags_of_auto(caplog):
    """AUTO receives flags of any algorithm, without defaults. Values that no algorithm accepts are refused."""
    assert drafting() == Auto()
    wide = ("--speculative-eagle-topk", 8, "--speculative-num-draft-tokens", 100)  # n-grams have at most 64 nodes
    assert drafting(*wide) == Auto(topk=8, nodes=100)
    given = ("--speculative-num-steps", 3, "--speculative-ngram-capacity", 4096, "--speculative-token-map", "64")
    assert drafting(*given, "--speculative-ngram-min-bfs-breadth", 1) == Auto(steps=3, capacity=4096, token_map="64")
    assert not caplog.records
    assert drafting("--speculative-draft-model-revision", "r") == Auto()
    (record,) = caplog.records
    assert record.getMessage() == "no effect with --speculative-algorithm AUTO: --speculative-draft-model-revision"
    message = "^--speculative-ngram-capacity must be an integer from 1024 to 16777216, got 3"
    with pytest.raises(ValueError, match=message):
        drafting("--speculative-ngram-capacity", 3)


def test_algorithms_and_their_options_in_files(toml, caplog):
    file = toml("[speculative]\nspeculative-draft-context-length = 35\n")
    assert drafting("--config", file) == Auto(positions=35)
    assert drafting("--config", file, "--speculative-draft-context-length", 7) == Auto(positions=7)
    head = ("--speculative-algorithm", "mtp", "--speculative-draft-model", "h")
    assert drafting("--config", file, *head) == Mtp("h", positions=35)
    nextn = toml("[speculative]\nspeculative-algorithm = 'NextN'\n")
    assert drafting("--config", nextn) == drafting("--speculative-algorithm", "nextn") == Mtp()
    for number in ("8192", '"8192"'):
        chosen = ours("--config", toml(f"[speculative]\nspeculative-token-map = {number}\n"))
        assert chosen.speculative.speculative_token_map == "8192"
    assert drafting(*head) == Mtp("h")
    assert not caplog.records


def test_errors_name_the_place_of_a_value(toml):
    head = "speculative-algorithm = 'eagle3'\nspeculative-draft-model-path = 'h'\n"
    file = toml(f"{head}[speculative]\nspeculative-num-steps = 65\n")
    message = rf"^--config {file}: \[speculative\] speculative-num-steps must be an integer"
    with pytest.raises(ValueError, match=message):
        drafting("--config", file)
    with pytest.raises(ValueError, match=r"^--speculative-num-steps must be an integer"):
        drafting("--config", file, "--speculative-num-steps", 0)
    file = toml(f"{head}speculative-num-draft-tokens = 30\n")
    message = r"^--config .*: speculative-num-draft-tokens is 30, but 2 steps .* larger top-k$"
    with pytest.raises(ValueError, match=message):
        drafting("--config", file, "--speculative-num-steps", 2, "--speculative-eagle-topk", 2)


@pytest.mark.parametrize(
    ("argv", "verify"),
    [(("--allow-lossy-speculation",), None),
     (("--allow-lossy-speculation", "--speculative-accept-threshold-single", 0.5), AcceptAbove(0.5)),
     (("--allow-lossy-speculation", "--speculative-accept-threshold-acc", 0.9), AcceptAbove(1.0, 0.9))],
)  # fmt: skip
def test_lossy_thresholds(argv, verify, caplog):
    assert build.engine_arguments(ours(*argv))["verify"] == verify
    lines = [record.getMessage() for record in caplog.records if "LOSSY" in record.getMessage()]
    assert len(lines) == (verify is not None)
    assert all(f"{argv[1]} {argv[2]}" in line and "not the model's own" in line for line in lines)


def test_lossy_thresholds_need_a_flag(toml):
    file = toml("[speculative]\nspeculative-accept-threshold-single = 0.5\n")
    settings = ours("--config", file, "--speculative-accept-threshold-acc", 0.25)
    named = r"\[speculative\] speculative-accept-threshold-single 0.5 and --speculative-accept-threshold-acc 0.25 would"
    with pytest.raises(ValueError, match=f"{named} change .* --allow-lossy-speculation"):
        build.engine_arguments(settings)


def test_synthetic_acceptance(caplog):
    flag = "--speculative-synthetic-acceptance"
    assert build.engine_arguments(ours(flag, 0.8, 0.7))["verify"] == SyntheticAcceptance((0.8, 0.7))
    assert any("not the model's" in record.getMessage() for record in caplog.records)
    for wrong, message in (
        ((0.5, 0.6), f"{flag} must be numbers from 1 to 0, none larger"),
        (("a",), "must be numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            build.engine_arguments(ours(flag, *wrong))
    both = (flag, 0.5, "--allow-lossy-speculation", "--speculative-accept-threshold-single", 0.5)
    with pytest.raises(ValueError, match=f"{flag} replaces verification"):
        build.engine_arguments(ours(*both))


def test_only_command_line_modules_name_flags():
    package = Path(settings.__file__).parent
    files = [*package.rglob("*.py"), *(package.parent / "kernels").rglob("*.py")]
    names = {field.name for field in fields(EngineConfig)} - {"max_total_tokens"}
    engine = "|".join(sorted(names))
    named = re.compile(rf"--(speculative-|({engine.replace('_', '-')}))")
    assert named.search("--speculative-num-steps") and named.search("--page-size")
    named_elsewhere = {
        file.relative_to(package.parent).as_posix(): match[0]
        for file in files
        if not {"cli", "serve", "train", "hardware"} & {*file.parts}
        if (match := named.search(file.read_text(encoding="utf-8")))
    }
    assert named_elsewhere == {}
    others = {path for path in package.rglob("*.py") if "--speculative-" in path.read_text(encoding="utf-8")}
    assert {path.relative_to(package).parts[0] for path in others} == {"cli"}


def test_algorithm_flag_overrides_the_file(toml, caplog):
    caplog.set_level("INFO")
    draft = "speculative-draft-model-path = 'h'\nspeculative-num-steps = 3\n"
    file = toml(f"speculative-algorithm = 'EAGLE3'\n{draft}speculative-ngram-capacity = 4096\n")
    names = ["speculative-draft-model-path", "speculative-num-steps"]
    for name, wanted, overridden in (
        ("NONE", NoDraft(), [*names, "speculative-ngram-capacity"]),
        ("NGRAM", Ngram(capacity=4096), names),
    ):
        assert drafting("--config", file, "--speculative-algorithm", name) == wanted
        (record,) = caplog.records
        assert (record.levelname, record.getMessage()) == (
            "INFO", f"--speculative-algorithm {name} overrides the file's {', '.join(overridden)}"
        )  # fmt: skip
        caplog.clear()
    place = "^--speculative-draft-model-path h is no use to NONE"
    with pytest.raises(ValueError, match=place):  # both on the command line
        drafting("--config", file, "--speculative-algorithm", "none", "--speculative-draft-model-path", "h")
    file = toml(f"speculative-algorithm = 'NONE'\n{draft}")
    with pytest.raises(ValueError, match=r"^--config .*: speculative-draft-model-path h is no use to NONE"):
        drafting("--config", file)  # both in the file
    with pytest.raises(ValueError, match=place):
        drafting("--config", file, "--speculative-draft-model-path", "h")


def test_model_as_key_and_table(toml):
    assert ours("--config", toml("model = 'm'")).model.model == "m"
    assert ours("--config", toml("[model]\nmodel = 'm'")).model.model == "m"
    assert ours("--config", toml("model-path = 'm'\n[model]\ndtype = 'float16'")).model == flags.ModelSettings(
        model="m", dtype="float16"
    )


def test_generate_with_a_file_of_the_server(toml, tmp_path, monkeypatch):
    (tmp_path / "in").write_text("")
    seen = {}
    monkeypatch.setattr(generate.Engine, "from_pretrained", lambda **arguments: seen.update(arguments) or 1 / 0)
    file = toml("page-size = 4\n[model]\nmodel = 'm'\n[server]\nport = 80\n")
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--config", file]
    with pytest.raises(ZeroDivisionError):
        generate.main([*files, "--model", "n"])
    assert (seen["model"], seen["config"].page_size, seen["config"].max_running_requests) == ("n", 4, 8)


# Shipped files.


@pytest.mark.parametrize("defaults", [DEFAULTS, generate.DEFAULTS], ids=["server", "generate"])
def test_shipped_files(defaults):
    assert ours("--config", SHIPPED, defaults=defaults) == defaults
    changed = replace(defaults, speculative=replace(defaults.speculative, speculative_algorithm="NGRAM"))
    assert ours("--config", NGRAM, defaults=defaults) == changed


@pytest.mark.parametrize("file", [SHIPPED, NGRAM], ids=["eagle3", "ngram"])
def test_keys_of_shipped_files(file, toml):
    text = file.read_text(encoding="utf-8")
    held, table = set(), ""
    for title, hidden, key in re.findall(r"^\[(\w+)\]$|^(#?)([a-z-]+) = .+$", text, flags=re.M):
        table = title or table
        if key:
            held.add((table, key.replace("-", "_")))
            default = getattr(getattr(DEFAULTS, table), key.replace("-", "_"))
            assert bool(hidden) is (default is None or key == "max-running-requests"), key
    assert held == {(table, field.name) for table in TABLES for field in fields(getattr(DEFAULTS, table))}
    everything = ours("--config", toml(re.sub("^#(?! )", "", text, flags=re.M)))
    unset = [name for table in TABLES for name, value in vars(getattr(everything, table)).items() if value is None]
    assert not unset


# Commands, which exit while they parse flags.

STEP = "unrecognized argument --speculative-num-step; did you mean --speculative-num-steps?"


@pytest.fixture
def command(capsys, monkeypatch):
    """command(line) -> (status, stdout, stderr) of `specjax line`."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)

    def call(line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            sys.exit(specjax_main(line.split()))
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return call


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "serve --speculative-algorithm eagle9",
            f"--speculative-algorithm must be one of {', '.join(('AUTO', *DRAFTERS, *ALIASES))}, got 'eagle9'",
        ),
        ("serve --dtype float64", "--dtype must be one of auto, float32, bfloat16, float16, got 'float64'"),
        ("serve --page-size 0", "--page-size must be an integer of at least 1, got 0"),
        ("serve --mem-fraction 0", "--mem-fraction-static must be a number above 0 and at most 1, got 0.0"),
        ("serve --port x", "--port must be an integer from 0 to 65535, got 'x'"),
        ("serve --port 65536", "--port must be an integer from 0 to 65535, got 65536"),
        ("serve --shutdown-timeout -1", "--shutdown-timeout must be a number of at least 0, got -1.0"),
        ("serve --watchdog-timeout 0", "--watchdog-timeout must be a number above 0, got 0.0"),
        ("serve --log-level loud", "--log-level must be one of debug, info, warning, error, got 'loud'"),
        ("serve --page-size", "argument --page-size: expected one argument"),
        ("serve --mode x", "unrecognized argument --mode; did you mean --model?"),
        ("serve -model x", "unrecognized argument -model; did you mean --model?"),
        ("serve --zzzzzz x", "unrecognized argument --zzzzzz; see --help."),
        ("bench --mode x", "unrecognized argument --mode; did you mean --model?"),
        ("bench tune-tree --speculative-num-step 3", STEP),
        ("train --mode x", "unrecognized argument --mode; did you mean --model?"),
        ("train features --mode x", "unrecognized argument --mode; did you mean --model?"),
        # Before required flags that are missing.
        ("generate --speculative-num-step 3", STEP),
        ("train generate --inputx x", "unrecognized argument --inputx; did you mean --input?"),
        ("train vocab --mod x", "unrecognized argument --mod; did you mean --model?"),
        ("viz --promptx x", "unrecognized argument --promptx; did you mean --prompt?"),
        ("generate --output out", "the following arguments are required: --input"),
        ("bench --repeats 0", "--repeats must be an integer of at least 1, got 0"),
        ("bench tune-tree --best many", "--best must be an integer of at least 1, got 'many'"),
        ("train --learning-rate fast", "--learning-rate must be a number above 0, got 'fast'"),
        ("train vocab --input in --output out --size x", "argument --size: invalid int value: 'x'"),
        ("viz --prompt x --output y --tree 1 2", "argument --tree: expected 3 arguments"),
        ("viz --prompt x --output y --model /no/such/folder", "the model '/no/such/folder' looks like a path"),
    ],
)  # fmt: skip
def test_wrong_values(line, message, command):
    status, out, err = command(line)
    name = " ".join(itertools.takewhile(lambda word: word[0] != "-", line.split()))
    assert (status, out) == (2, "")
    assert re.match(rf"specjax {name}: (error: )?{re.escape(message)}[^\n]*\n\Z", err), err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nport = 'x'", "[server] port must be an integer from 0 to 65535, got 'x'"),
        ("[server]\nprot = 1", "unknown key [server] prot; did you mean port?"),
        ("temperature = 1.0", "unknown key temperature; keys are named as the flags in --help are"),
        ("[[model]]", "model must be a string, got [{}]"),
    ],
)
@pytest.mark.parametrize("line", ["serve", "generate --input in --output out"])
def test_wrong_files(line, text, message, toml, command):
    path = toml(text)
    expected = 2, "", f"specjax {line.split()[0]}: error: --config {path}: {message}\n"
    assert command(f"{line} --config {path}") == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name, command):
    _, out, _ = command("--help")
    assert [line[2:18].strip() for line in out.partition("commands:\n")[2].splitlines()] == [*COMMANDS]
    status, out, err = command(f"{name} --help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: specjax {name} [-h]")
    assert re.search(r"^ +--model[ ,]", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "status", "printed"),
    [
        ("--version", 0, f"specjax {specjax.__version__}\n"),
        ("", 2, f"specjax: error: a command is missing: {', '.join(COMMANDS)}\n"),
        ("--verison", 2, "specjax: error: unrecognized argument --verison; did you mean --version?\n"),
        ("srve --port 1", 2, "specjax: error: unknown command 'srve'; did you mean 'serve'?\n"),
        ("train genrate", 2, "specjax: error: unknown command 'train genrate'; did you mean 'train generate'?\n"),
        ("serve a/b", 2, "specjax: error: unknown command 'serve a/b'; did you mean 'serve --model a/b'?\n"),
        ("zzzzzz", 2, "specjax: error: unknown command 'zzzzzz'; see --help.\n"),
    ],
)
def test_command_without_a_subcommand(line, status, printed, command):
    actual, out, err = command(line)
    assert (actual, out + err) == (status, printed)


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_fast_version_and_help(flag):
    program = (
        "import sys, specjax.__main__ as command\n"
        "try: command.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'jax', 'numpy', 'transformers', 'specjax_kernels'})"
    )
    shown = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=True).stdout
    assert "specjax" in shown and shown.splitlines()[-1] == ""
    sources = {file: file.read_text(encoding="utf-8") for file in Path(settings.__file__).parent.rglob("*.py")}
    argparse_only = [file.name for file, text in sources.items() if "argparse.ArgumentParser(" in text]
    assert argparse_only == [], "`settings.Parser` accepts only whole flags"
