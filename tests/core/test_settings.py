"""Flags and `--config` files of any dataclass: precedence, and errors. See test_flags.py for the flags of specjax."""

import argparse
import contextlib
import dataclasses
import io
import re
import string
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specjax import settings
from specjax.settings import setting

WRITES = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@dataclass(frozen=True)
class One:
    """Numbers and words: 100%."""

    word: str = setting("cat", "a word", names=("--term", "--old-word"))
    count: int = setting(3, "how many", minimum=1, maximum=9)
    share: float = setting(0.5, "above 0% of it", above=0, maximum=1)
    more: int | None = setting(None, "no default", minimum=0)
    secret: str | None = setting(None, "not shown", secret=True)


@dataclass(frozen=True)
class Two:
    """Switches."""

    fast: bool = setting(False, "off by default")
    safe_mode: bool = setting(True, "on by default")
    level: str = setting("LOW", "of two", choices=("LOW", "HIGH"), parse=str.upper)
    names: tuple[str, ...] = setting(("a", "b"), "several", choices=("a", "b", "c"))
    rest: tuple[str, ...] = setting((), "any")


@dataclass(frozen=True)
class Both:
    one: One = One()
    two: Two = Two()


@pytest.fixture
def toml(tmp_path):
    """toml(text) -> path of a file with it."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "my.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def parse(*argv, defaults=None, tables=None):
    parser = settings.Parser(prog="program")
    settings.add_flags(parser, defaults or Both(), tables)
    return settings.parse(parser, [str(each) for each in argv], defaults or Both())[1]


def refused(*argv, defaults=None, tables=None) -> str:
    """Returns the error line of a command that exits with status 2."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        parse(*argv, defaults=defaults, tables=tables)
    assert (end.value.code, out.getvalue()) == (2, "")
    (line,) = err.getvalue().splitlines()
    assert line.startswith("program: error: ")
    return line.removeprefix("program: error: ")


# Precedence.


def test_flag_over_file_over_default(toml):
    path = toml("count = 5\n[one]\nword = 'dog'\n")
    assert parse() == Both()
    assert parse("--config", path) == Both(one=One(word="dog", count=5))
    assert parse("--config", path, "--word", "cow", "--more", 0) == Both(one=One(word="cow", count=5, more=0))
    assert parse("--word", "cow", "--config", path).one.word == "cow", "in any order"
    assert "count must be an integer from 1 to 9, got 0" in refused("--config", toml("count = 0"), "--count", 1)


def test_defaults_of_a_command(toml):
    defaults = Both(one=One(count=7))
    assert parse(defaults=defaults) == defaults
    assert parse("--config", toml("count = 8"), defaults=defaults).one.count == 8
    assert parse("--count", 3, defaults=defaults).one.count == 3, "also the default of the class"


@pytest.mark.parametrize("key", ["term", "old-word", "old_word"])
def test_other_names(key, toml):
    assert parse("--config", toml(f"{key} = 'dog'")).one.word == "dog"
    assert parse("--config", toml(f"[one]\n{key} = 'dog'")).one.word == "dog"
    assert parse(f"--{key.replace('_', '-')}", "dog").one.word == "dog"


@pytest.mark.parametrize(
    "text", ["safe_mode = false", "two.safe_mode = false", "two = {safe-mode = false}", "\ufeffsafe-mode = false\r\n"]
)
def test_spellings_of_a_key(text, toml):
    assert parse("--config", toml(text)) == Both(two=Two(safe_mode=False))


def test_lists(toml):
    path = toml("names = ['c']\nrest = []\n")
    assert parse("--config", path).two == Two(names=("c",))
    assert parse("--config", path, "--names", "b", "a", "--rest", "x").two == Two(names=("b", "a"), rest=("x",))
    assert parse("--config", path, "--names").two.names == (), "a flag without values"


def test_converted_values(toml):
    assert parse("--level", "hIGh").two.level == "HIGH"
    assert parse("--config", toml("level = 'high'")).two.level == "HIGH"
    share = parse("--config", toml("share = 1")).one.share
    assert (share, type(share)) == (1.0, float)


VALUES = {
    "word": st.text(string.ascii_letters, min_size=1),
    "count": st.integers(1, 9),
    "share": st.floats(0.01, 1),
    "more": st.integers(0, 2**63 - 1),
    "fast": st.booleans(),
    "safe_mode": st.booleans(),
    "level": st.sampled_from(["LOW", "HIGH"]),
}


def as_toml(value) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def as_flag(name: str, value) -> list[str]:
    dashed = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{dashed}"] if isinstance(value, bool) else [f"--{dashed}={value}"]


@WRITES
@given(
    file=st.fixed_dictionaries({}, optional=VALUES),
    given_flags=st.fixed_dictionaries({}, optional=VALUES),
    in_tables=st.booleans(),
)
def test_any_mixture_of_file_and_flags(file, given_flags, in_tables, toml):
    table = {field.name: name for name, group in (("one", One), ("two", Two)) for field in fields(group)}
    prefix = {name: f"{table[name]}." if in_tables else "" for name in file}
    path = toml("".join(f"{prefix[name]}{name} = {as_toml(value)}\n" for name, value in file.items()))
    actual = parse("--config", path, *(part for name, value in given_flags.items() for part in as_flag(name, value)))
    merged = file | given_flags
    groups = {
        name: replace(group, **{key: value for key, value in merged.items() if table[key] == name})
        for name, group in (("one", One()), ("two", Two()))
    }
    assert actual == Both(**groups)


# Errors.

FILE_ERRORS = {
    "unknown key": ("wrod = 'x'", "unknown key wrod; did you mean word?"),
    "unknown key, alias": ("old_wrod = 'x'", "unknown key old_wrod; did you mean old-word?"),
    "unknown key like nothing": ("zzz = 1", "unknown key zzz; keys are named as the flags in --help are"),
    "unknown key like another table's": (
        "[one]\nsafemode = true", "unknown key [one] safemode; did you mean safe-mode, in [two]?"),
    "unknown key in a table, like nothing": (
        "[one]\nzzz = 1", "unknown key [one] zzz; [one] has word, term, old-word, count, share, more, secret"),
    "no bare key": ('"a\\nb" = 1', "unknown key a\\nb; keys are"),
    "unknown table": ("[too]\nfast = true", "unknown table [too]; did you mean [two]?"),
    "wrong table, alias": ("[two]\nold-word = 'x'", "[two] old-word belongs in [one]"),
    "no table": ("one = 5", "one must be a table, [one], got 5"),
    "twice, dash and underscore": (
        "safe-mode = true\nsafe_mode = true", "safe-mode and safe_mode are the same setting, --safe-mode"),
    "twice, alias in a table": (
        "term = 'x'\n[one]\nold-word = 'x'", "term and [one] old-word are the same setting, --word"),
    "bool for int": ("count = true", "count must be an integer from 1 to 9, got True"),
    "string for float": ("share = '0.5'", "share must be a number above 0 and at most 1, got '0.5'"),
    "int for string": ("word = 5", 'word must be a string, got 5; write "5"'),
    "string for bool": ("fast = 'true'", "fast must be true or false, got 'true'"),
    "string for list": ("rest = 'x'", "rest must be a list of strings, got 'x'"),
    "list of numbers": ("rest = ['x', 1]", "rest must be a list of strings, got ['x', 1]"),
    "empty": ("word = ''", "word must be a text that is not empty, got ''"),
    "beyond": ("[one]\ncount = 10", "[one] count must be an integer from 1 to 9, got 10"),
    "at least": ("more = -1", "more must be an integer of at least 0, got -1"),
    "not above": ("share = 0", "share must be a number above 0 and at most 1, got 0"),
    "nan": ("share = nan", "share must be a number above 0 and at most 1, got nan"),
    "huge integer": (f"more = 0x1{'0' * 5000}", "more must be an integer of 64 bits, got a huge number"),
    "no choice": ("level = 'mid'", "level must be one of LOW, HIGH, got 'mid'"),
    "an item is no choice": ("names = ['a', 'd']", "names must be one of a, b, c, got ['a', 'd']"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS.values(), ids=FILE_ERRORS)
def test_wrong_file(text, message, toml):
    path = toml(text)
    line = refused("--config", path, "--word", "a flag does not help")
    assert line.startswith(f"--config {path}: {message}"), line
    assert message.endswith(("keys are", "got [{")) or line.endswith(message), line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count = 1\ncount = 2\n", "is not TOML: Cannot overwrite a value (at line 2, column 10)"),
        (b"# 1\nword = '\xff'", "is not UTF-8: byte 0xff in line 2"),
        (f"more = 1{'0' * 5000}", "is not TOML: "),
        (f"rest = {'[' * 5000}", "is not TOML: "),
        (None, "cannot be read: No such file or directory"),
    ],
    ids=["repeated key", "not UTF-8", "too many digits", "too deep", "no file"],
)
def test_unreadable_file(text, message, toml, tmp_path):
    path = tmp_path / "no.toml" if text is None else toml(text)
    assert refused("--config", path).startswith(f"--config {path} {message}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--count 1.0", "--count must be an integer from 1 to 9, got '1.0'"),
        ("--count 10", "--count must be an integer from 1 to 9, got 10"),
        ("--term=", "--word must be a text that is not empty, got ''"),
        ("--share 1e999", "--share must be a number above 0 and at most 1, got inf"),
        (f"--more {2**63}", f"--more must be an integer of 64 bits, got {2**63}"),
        ("--names a d", "--names must be one of a, b, c, got ['a', 'd']"),
        ("--fast=true", "argument --fast/--no-fast: ignored explicit argument 'true'"),
        ("--colour red", "unrecognized argument --colour; see --help."),
        ("--coun 3", "unrecognized argument --coun; did you mean --count?"),
        ("-count 3", "unrecognized argument -count; did you mean --count?"),
        ("--no-safemode", "unrecognized argument --no-safemode; did you mean --no-safe-mode?"),
        (
            "--wrod a --Fast b --wrod c",
            "unrecognized argument --wrod; did you mean --word? unrecognized argument --Fast; did you mean --fast?",
        ),
        ("--count 3 cat", "unrecognized arguments: cat"),
        ("-- --coun", "unrecognized arguments: -- --coun"),
        ("--count", "argument --count: expected one argument"),
    ],
)
def test_wrong_flag(argv, message):
    assert refused(*argv.split()) == message


def test_errors_of_parse(toml):
    def odd(number: int) -> int:
        if number % 2 == 0:
            raise ValueError("odd")
        return number

    group = dataclasses.make_dataclass("Odd", [("number", int, setting(1, "odd", parse=odd))], frozen=True)
    defaults = dataclasses.make_dataclass("All", [("odd", group, group())], frozen=True)()
    assert parse("--number", 3, defaults=defaults).odd.number == 3
    assert refused("--number", 4, defaults=defaults) == "--number must be odd, got 4"
    assert refused("--config", toml("number = 4"), defaults=defaults).endswith(": number must be odd, got 4")


# Several commands, one file.


def test_tables_of_other_commands(toml):
    path = toml("[one]\ncount = 5\n[two]\nfast = true\n")
    actual = parse("--config", path, tables=["one"])
    assert actual.one == One(count=5)
    assert actual.two == Two(fast=True)
    assert "--fast" in refused("--fast", tables=["one"])
    assert "[two] fast must be true or false" in refused("--config", toml("[two]\nfast = 1"), tables=["one"])


# The dataclasses.


def test_duplicate_names_and_secrets():
    assert "hunter2" not in repr(Both(one=One(secret="hunter2")))
    other = dataclasses.make_dataclass("Other", [("term", str, setting("x", "same as --term"))], frozen=True)
    defaults = dataclasses.make_dataclass("All", [("one", One, One()), ("other", other, other())], frozen=True)()
    with pytest.raises(TypeError, match=r"two settings are called term, in \[one\] and \[other\]"):
        settings.add_flags(argparse.ArgumentParser(), defaults)


@pytest.mark.parametrize("annotation", [int | str, tuple[int, ...]])
def test_unsupported_types(annotation):
    group = dataclasses.make_dataclass("Group", [("x", annotation, setting(None, "x"))], frozen=True)
    defaults = dataclasses.make_dataclass("All", [("group", group, group())], frozen=True)()
    with pytest.raises(TypeError, match="a setting cannot be"):
        settings.add_flags(argparse.ArgumentParser(), defaults)


# Help.


def test_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def groups(defaults: Both, tables: list[str] | None) -> dict[str, str]:
        """Title -> text."""
        parser = argparse.ArgumentParser(prog="program", formatter_class=settings.HelpFormatter)
        settings.add_flags(parser, defaults, tables)
        parts = re.split(r"^(\S[^\n]*):$", parser.format_help(), flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    shown = groups(Both(one=One(count=4)), ["one"])
    assert "  --config FILE" in shown["configuration file"] and "two" not in shown
    assert "[two]: checked, without effect here" in shown["configuration file"]
    assert "Numbers and words: 100%." in shown["one"]
    assert re.search(r"--word( TEXT)?, --term( TEXT)?, --old-word TEXT", shown["one"]), "Python 3.13 repeats no TEXT"
    assert "how many (from 1 to 9; default: 4)" in shown["one"], "the default of the command"
    assert "above 0% of it (above 0 and at most 1; default: 0.5)" in shown["one"]
    assert re.search(r"--more N +no default \(at least 0\)\n", shown["one"])
    shown = groups(Both(), None)
    assert "no effect" not in shown["configuration file"]
    assert re.search(r"--fast, --no-fast +off by default\n", shown["two"])
    assert re.search(r"--safe-mode, --no-safe-mode\s+on by default \(default: True\)\n", shown["two"])
    assert "--level {LOW,HIGH}" in shown["two"] and "(default: a, b)" in shown["two"]
