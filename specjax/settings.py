"""Frozen dataclasses filled from a command's flags and a TOML file. Independent of models and commands.

    @dataclass(frozen=True)
    class CacheSettings:
        '''The text above the flags in --help.'''
        block_size: int = setting(16, "tokens in a block", minimum=1)   # --block-size; block-size in [cache]

    @dataclass(frozen=True)
    class Settings:
        cache: CacheSettings = CacheSettings()                          # a table of the file, a group of --help

    add_flags(parser, Settings())
    args, settings = parse(parser, argv, Settings())

A flag overrides the file, the file overrides the default. Commands that use different tables can share a file: each
checks all of it. The instance passed in holds the defaults, so a command can have its own defaults.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_type_hints

from specjax.limits import KINDS, Setting, check_value, shown
from specjax.limits import setting as setting

METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


class SettingsError(ValueError):
    """A wrong value or an unreadable file. Messages say where the value was set and which values are allowed."""


S = TypeVar("S")


def place_of(settings: Any, name: str) -> str:
    """Returns the flag, or the file and key, that set a field; for defaults the field's flag."""
    return vars(settings).get("_places", {}).get(name, f"--{dashed(name)}")


def overrides(settings: Any, flag: str, key: str) -> bool:
    """Returns True if field `flag` was set on the command line and field `key` in the file."""
    places = vars(settings).get("_places", {})
    return places.get(flag) == f"--{dashed(flag)}" and place_of(settings, key) != f"--{dashed(key)}"


def command_line(settings: Any, **changed: Any) -> list[str]:
    """Returns the flags that set these settings' fields beside their file. `changed`: other values of fields; None:
    without the flag."""
    places = vars(settings).get("_places", {})
    own = {
        name: getattr(settings, table.name)
        for table in fields(settings)
        for name in vars(getattr(settings, table.name))
    }
    values = {name: getattr(own[name], name) for name, place in places.items() if place == f"--{dashed(name)}"}
    texts = list[str]()
    for name, value in (values | changed).items():
        flag = f"--{dashed(name)}"
        if isinstance(value, bool):
            texts.append(flag if value else f"--no-{dashed(name)}")
        elif isinstance(value, tuple):
            texts += [flag, *value]
        elif value is not None:
            texts += [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
    return texts


def dashed(name: str) -> str:
    return name.replace("_", "-")


class _Entry(NamedTuple):
    table: str
    name: str  # of the field
    kind: type  # a key of KINDS
    setting: Setting


def _kind(annotation: Any) -> type:
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = [tuple if kind == tuple[str, ...] else kind for kind in options if kind is not NoneType]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise TypeError(f"a setting cannot be {annotation}; it can be int, float, str, bool, tuple[str, ...], or None")
    return kinds[0]


def _entries(defaults: Any) -> dict[str, _Entry]:
    """Maps each name of each setting, aliases included, to its entry. Names have dashes."""
    entries: dict[str, _Entry] = {}
    for table in fields(defaults):
        group = type(getattr(defaults, table.name))
        hints = get_type_hints(group)
        for field in fields(group):
            entry = _Entry(table.name, field.name, _kind(hints[field.name]), field.metadata["setting"])
            for name in (dashed(field.name), *(flag.removeprefix("--") for flag in entry.setting.names)):
                if name in entries:
                    raise TypeError(f"two settings are called {name}, in [{entries[name].table}] and [{table.name}]")
                entries[name] = entry
    return entries


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults other than None, False and [] of flags that are not settings."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.required or action.default is False or action.default in (None, [])
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Accepts only flags written in full. Errors are one sentence on stderr, with the nearest flag to an unknown flag.

    argparse accepts any prefix of a flag, so a typing error would work until another flag is added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options}, allow_abbrev=False)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # of overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        argv = sys.argv[1:] if args is None else list(args)
        # Checked before argparse, which would report a mistyped required flag as missing.
        accepted = self._option_string_actions
        flags = [text.partition("=")[0] for text in takewhile("--".__ne__, argv) if _is_flag(text)]
        if unknown := [flag for flag in dict.fromkeys(flags) if flag not in accepted]:
            names = [name.removeprefix("--") for name in accepted]
            advice = {flag: (near := nearest(flag, names)) and f"did you mean --{near}?" for flag in unknown}
            self.error(" ".join(f"unrecognized argument {f}; {advice[f] or 'see --help.'}" for f in unknown))
        return super().parse_args(argv, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _is_flag(text: str) -> bool:
    """True if argparse reads the text as a flag, never as a value."""
    return text.startswith("-") and text != "-" and " " not in text and re.match(r"-\.?\d", text) is None


def add_flags(parser: argparse.ArgumentParser, defaults: Any, tables: Sequence[str] | None = None) -> None:
    """Adds `--config` and the flags of the tables that this command uses, by default all."""
    every = [table.name for table in fields(defaults)]
    about = f"Keys are named as the flags are, and stand at the top or in their table: {_listed(every)}."
    if unused := [name for name in every if tables is not None and name not in tables]:
        about += f" {_listed(unused)}: checked, without effect here."
    parser.add_argument_group("configuration file", about).add_argument(
        "--config", metavar="FILE", help="TOML; flags win"
    )
    groups = {
        name: parser.add_argument_group(name, (type(getattr(defaults, name)).__doc__ or "").strip())
        for name in every
        if name not in unused
    }
    for entry in dict.fromkeys(_entries(defaults).values()):
        if entry.table in groups:
            _add_flag(groups[entry.table], entry, getattr(getattr(defaults, entry.table), entry.name))


def _add_flag(group: argparse._ArgumentGroup, entry: _Entry, default: Any) -> None:
    note, kind = entry.setting, entry.kind
    text, limits = note.help.replace("`", "").replace("%", "%%"), note.range.words.removeprefix("of ")
    if default not in (None, "", ()) and default is not False:
        limits += "; " * bool(limits)
        limits += f"default: {', '.join(default) if isinstance(default, tuple) else default}"
    text += f" ({limits})" if limits else ""
    options: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction  # so that a flag can also undo the file's `true`
    else:
        choices = f"{{{','.join(note.choices)}}}" if note.choices else None
        options["metavar"] = note.metavar or choices or METAVARS[kind]
    if kind in (int, float):
        options["type"] = partial(_number, kind)
    if kind is tuple:
        options["nargs"] = "*"
    group.add_argument(f"--{dashed(entry.name)}", *note.names, **options)


def _number(kind: type, text: str) -> Any:
    """Parses a number; returns other text unchanged, so that `read` raises an error with the allowed range."""
    try:
        return kind(text)
    except ValueError:
        return text


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, defaults: S) -> tuple[argparse.Namespace, S]:
    """Returns the namespace, for flags that are not settings, and the settings. Exits on an error."""
    args = parser.parse_args(argv)
    try:
        return args, read(args, defaults)
    except SettingsError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def read(args: argparse.Namespace, defaults: Any) -> Any:
    """Reads settings from a parsed command line and its file. Raises SettingsError for a wrong value."""
    entries = _entries(defaults)
    path = getattr(args, "config", None)
    values = {} if path is None else _placed(_document(path, f"--config {path}"), f"--config {path}", defaults)
    for entry in entries.values():
        if entry.name in vars(args):
            flag = f"--{dashed(entry.name)}"
            values[entry.name] = (flag, _checked(entry, flag, getattr(args, entry.name)))
    return _filled(defaults, values)


def from_mapping(values: Mapping[str, Any], defaults: S, where: str) -> S:
    """Reads settings from a mapping like a parsed file, which errors call `where`."""
    return _filled(defaults, _placed(values, where, defaults))


def _filled(defaults: Any, values: Mapping[str, tuple[str, Any]]) -> Any:
    """Replaces defaults by the values that `_placed` returns."""
    groups = {}
    for table in [table.name for table in fields(defaults)]:
        group = getattr(defaults, table)
        groups[table] = replace(group, **{f.name: values[f.name][1] for f in fields(group) if f.name in values})
    settings = replace(defaults, **groups)
    # Not a field: settings with equal values are equal.
    vars(settings)["_places"] = {name: place for name, (place, _) in values.items()}
    return settings


def _checked(entry: _Entry, where: str, raw: Any) -> Any:
    """Converts and checks a value; `where`: the flag, or the file and the key. Integers are floats, nothing else."""
    note, kind = entry.setting, entry.kind
    value: Any = raw
    if note.digits and type(raw) is int:
        value = str(raw)
    elif note.digits and type(raw) is list and all(type(item) in (int, float, str) for item in raw):
        value = tuple(map(str, raw))
    elif type(raw) is list and all(type(item) is str for item in raw):
        value = tuple(raw)
    elif note.alone and type(raw) is str:
        value = (raw,)
    try:
        if note.parse is not None and type(value) is kind:
            value = note.parse(value)
        check_value(value, kind, note)
        if "" in (value if kind is tuple else (value,)):
            raise ValueError("a text that is not empty")
    except (TypeError, ValueError) as error:
        quotes = f'; write "{shown(raw)}"' if kind is str and type(raw) in (int, float) else ""
        raise SettingsError(f"{where} must be {error}, got {shown(raw)}{quotes}") from None
    return float(value) if kind is float else value


def _placed(document: Mapping[str, Any], file: str, defaults: Any) -> dict[str, tuple[str, Any]]:
    """Maps each field to its place and its value. `file`: the document's name in errors."""
    entries, tables = _entries(defaults), [table.name for table in fields(defaults)]
    values: dict[str, tuple[str, Any]] = {}
    for table, key, value in _items(document, file, entries, tables):
        place = f"[{table}] {_escaped(key)}" if table else _escaped(key)
        entry = entries.get(dashed(key))
        if entry is None:
            raise SettingsError(f"{file}: unknown key {place}; {_advice(table, key, entries)}")
        if table not in (None, entry.table):
            raise SettingsError(f"{file}: {place} belongs in [{entry.table}]")
        if entry.name in values:
            raise SettingsError(f"{values[entry.name][0]} and {place} are the same setting, --{dashed(entry.name)}")
        values[entry.name] = (f"{file}: {place}", _checked(entry, f"{file}: {place}", value))
    return values


def _document(path: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{file} is not UTF-8: byte {error.object[error.start]:#04x} in line {line}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise SettingsError(f"{file} is not TOML: {error}") from None


def _items(
    document: Mapping[str, Any], file: str, entries: Mapping[str, _Entry], tables: Sequence[str]
) -> Iterable[tuple[str | None, str, Any]]:
    """Yields (table, key, value); table None: top level. `model` may be a table or a key."""
    for key, value in document.items():
        if isinstance(value, dict) and key in tables:
            yield from ((key, name, item) for name, item in value.items())
        elif dashed(key) in entries or not (isinstance(value, dict) or key in tables):
            yield None, key, value
        elif key in tables:
            raise SettingsError(f"{file}: {key} must be a table, [{key}], got {shown(value)}")
        else:
            near = nearest(key, tables)
            meant = _listed([near] if near else tables)
            raise SettingsError(f"{file}: unknown table [{_escaped(key)}]; did you mean {meant}?")


def _advice(table: str | None, key: str, entries: Mapping[str, _Entry]) -> str:
    if name := nearest(key, entries):
        home = entries[name].table
        return f"did you mean {name}?" if table in (None, home) else f"did you mean {name}, in [{home}]?"
    if table is None:
        return "keys are named as the flags in --help are"
    return f"[{table}] has {', '.join(name for name, entry in entries.items() if entry.table == table)}"


def nearest(key: str, names: Iterable[str]) -> str:
    """Returns the only name that starts with the key, else the closest name; "" if none is close."""
    key, names = dashed(key).strip("-").lower(), list(names)
    longer = [name for name in names if key and name.startswith(key)]
    return next(iter(longer if len(longer) == 1 else difflib.get_close_matches(key, names, n=1)), "")


def _listed(tables: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in tables)


def _escaped(key: str) -> str:
    return repr(key)[1:-1]  # on one line
