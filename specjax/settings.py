"""Frozen dataclasses filled from a command's flags and a TOML file. Knows neither models nor commands.

    @dataclass(frozen=True)
    class CacheSettings:
        '''What --help says above the flags.'''
        block_size: int = setting(16, "tokens in a block", minimum=1)   # --block-size; block-size in [cache]

    @dataclass(frozen=True)
    class Settings:
        cache: CacheSettings = CacheSettings()                          # a table of the file, a group of --help

    add_flags(parser, Settings())
    args, settings = parse(parser, argv, Settings())

A flag wins over the file, the file over the default. Commands that use different tables can share a file: each checks
all of it. The instance passed in holds the defaults, so a command can have defaults of its own.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from specjax.limits import ANY, Dataclass, Number, Range

KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple: "a list of strings",
}
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


class SettingsError(ValueError):
    """A value that cannot be used, or a file that cannot be read. Says where it was set and what would work."""


S = TypeVar("S", bound=Dataclass)


class Setting(NamedTuple):
    """What `setting` stores in a field's metadata."""

    help: str
    names: tuple[str, ...]
    choices: tuple[str, ...]
    parse: Callable[[Any], Any] | None
    metavar: str | None
    range: Range
    digits: bool
    sets: str


def setting(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    choices: Sequence[str] = (),
    parse: Callable[[Any], Any] | None = None,
    metavar: str | None = None,
    minimum: Number | None = None,
    above: Number | None = None,
    maximum: Number | None = None,
    range: Range = ANY,
    secret: bool = False,
    digits: bool = False,
    sets: str = "",
) -> Any:
    """A field of a frozen dataclass that is also a flag, named as the field is: `block_size` is `--block-size`.

    The annotation gives the type: int, float, str, bool or tuple[str, ...], or one of these or None. None means "not
    set" and can only be a default.

    Args:
        names: further flags for it (`--model-path`).
        choices: the only strings allowed.
        parse: brings a value into the form that is kept (`str.upper`), before it is compared with `choices`. May raise
            a ValueError that says what would work.
        minimum: smallest number; `above` excludes the bound itself. `range` gives all bounds at once.
        secret: omitted from the dataclass's repr, which may be logged.
        digits: for a string that may be a number: TOML may have it without quotes.
        sets: the option of the library that it sets, where that has another name.
    """
    limits = range if range != ANY else Range(minimum, maximum, above)
    noted = Setting(help, names, tuple(choices), parse, metavar, limits, digits, sets)
    return field(default=default, repr=not secret, metadata={"setting": noted})


def place_of(settings: Dataclass, name: str) -> str:
    """Where the value of a field was set, as an error names it: a flag, or a file and its key."""
    return vars(settings).get("_places", {}).get(name, f"--{_dashed(name)}")


class _Entry(NamedTuple):
    """A setting and where it lives."""

    table: str
    name: str  # of the field
    kind: type  # a key of KINDS
    setting: Setting

    @property
    def key(self) -> str:
        return _dashed(self.name)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _kind(annotation: Any) -> type:
    options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    kinds = [option for option in options if option is not type(None)]
    kinds = [tuple if kind == tuple[str, ...] else kind for kind in kinds]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise TypeError(f"a setting cannot be {annotation}; it can be int, float, str, bool, tuple[str, ...], or None")
    return kinds[0]


def _entries(defaults: Dataclass) -> dict[str, _Entry]:
    """All settings by each of their names, with dashes. An alias stands for the same entry."""
    found: dict[str, _Entry] = {}
    for table in fields(defaults):
        group = type(getattr(defaults, table.name))
        hints = get_type_hints(group)
        for each in fields(group):
            entry = _Entry(table.name, each.name, _kind(hints[each.name]), each.metadata["setting"])
            for name in (entry.key, *(flag.removeprefix("--") for flag in entry.setting.names)):
                if name in found:
                    raise TypeError(f"two settings are called {name}, in [{found[name].table}] and [{table.name}]")
                found[name] = entry
    return found


# Flags.


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults of flags that are no setting, except those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == [] or action.required:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Accepts only flags written in full, and suggests flags for unknown ones.

    argparse accepts any prefix of a flag, so that a typing error would work until another flag is added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(self, *args: Any, **options: Any) -> Any:
        found, unknown = self.parse_known_args(*args, **options)
        if unknown:
            known = [name.removeprefix("--") for action in self._actions for name in action.option_strings]
            flags = dict.fromkeys(text.partition("=")[0] for text in unknown if text.startswith("-"))
            meant = {flag: _meant(flag.strip("-"), known) for flag in flags}
            advice = "".join(f"; {flag}: did you mean --{name}?" for flag, name in meant.items() if name)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return found


def _meant(flag: str, known: Sequence[str]) -> str | None:
    """The flag that another may be short for or mean; None: none is near."""
    longer = [name for name in known if name.startswith(flag) and flag]
    return longer[0] if len(longer) == 1 else next(iter(_similar(flag, known)), None)


def add_flags(parser: argparse.ArgumentParser, defaults: Dataclass, tables: Sequence[str] | None = None) -> None:
    """Adds `--config` and the flags of the tables that this command uses, by default all.

    A flag that is not given leaves nothing in the namespace, so that `read` can tell; its help shows the default.
    """
    every = [table.name for table in fields(defaults)]
    used = every if tables is None else tables
    listed = ", ".join(f"[{name}]" for name in every)
    about = f"Keys are named as the flags are, and stand at the top or in their table: {listed}."
    if unused := [name for name in every if name not in used]:
        about += f" {', '.join(f'[{name}]' for name in unused)} is checked, and has no effect here."
    parser.add_argument_group("configuration file", about).add_argument(
        "--config", metavar="FILE", help="TOML; flags win"
    )
    entries = dict.fromkeys(_entries(defaults).values())
    for table in used:
        values = getattr(defaults, table)
        group = parser.add_argument_group(table, (type(values).__doc__ or "").strip())
        for entry in entries:
            if entry.table == table:
                _add_flag(group, entry, getattr(values, entry.name))


def _add_flag(group: argparse._ArgumentGroup, entry: _Entry, default: Any) -> None:
    note = entry.setting
    text = note.help
    if default is not None and default is not False and default not in ("", ()):
        text += f" (default: {', '.join(default) if isinstance(default, tuple) else default})"
    options: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if entry.kind is bool:
        options["action"] = argparse.BooleanOptionalAction  # so that a flag can also undo the file's `true`
    else:
        choices = f"{{{','.join(note.choices)}}}" if note.choices else None
        options["metavar"] = note.metavar or choices or METAVARS[entry.kind]
    if entry.kind is tuple:
        options["nargs"] = "*"
    group.add_argument(f"--{entry.key}", *note.names, **options)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, defaults: S) -> tuple[argparse.Namespace, S]:
    """The command line: the namespace, for flags that are no setting, and the settings. An error ends the command."""
    args = parser.parse_args(argv)
    try:
        return args, read(args, defaults)
    except SettingsError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def read(args: argparse.Namespace, defaults: S) -> S:
    """The settings of a command line that `add_flags`' parser has parsed.

    Raises:
        SettingsError: a value is wrong, in a flag or in the file.
    """
    entries = _entries(defaults)
    path = getattr(args, "config", None)
    found = {} if path is None else _read_file(path, entries, [table.name for table in fields(defaults)])
    for entry in entries.values():
        if entry.name in vars(args):
            flag = f"--{entry.key}"
            found[entry.name] = (flag, _checked(entry, flag, _from_text(entry, flag, getattr(args, entry.name))))
    groups = {}
    for table in fields(defaults):
        group = getattr(defaults, table.name)
        groups[table.name] = replace(group, **{f.name: found[f.name][1] for f in fields(group) if f.name in found})
    settings = replace(defaults, **groups)
    vars(settings)["_places"] = {name: place for name, (place, _) in found.items()}  # no field: the values are equal
    return settings


# Values. `where` is how an error names what it is about: a flag, or a file and a key.


def _from_text(entry: _Entry, where: str, given: Any) -> Any:
    """What argparse left: text, a bool, or a list of texts."""
    if entry.kind in (int, float):
        try:
            return entry.kind(given)
        except ValueError:
            raise SettingsError(f"{where} must be {KINDS[entry.kind]}, got {_shown(given)}") from None
    return tuple(given) if entry.kind is tuple else given


def _from_toml(entry: _Entry, where: str, value: Any) -> Any:
    """Strict: `true` is no integer, `"5"` is none either, and 5.0 neither. 5 is a float."""
    if entry.kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if entry.setting.digits and type(value) is int:
        return str(value)
    if entry.kind is tuple and type(value) is list and all(type(item) is str for item in value):
        return tuple(value)
    if type(value) is entry.kind:
        return value
    number = type(value) in (int, float) and not entry.setting.digits
    quotes = f'; write "{value}"' if entry.kind is str and number else ""
    raise SettingsError(f"{where} must be {KINDS[entry.kind]}, got {_shown(value)}{quotes}")


def _checked(entry: _Entry, where: str, given: Any) -> Any:
    note = entry.setting
    value: Any = given
    if note.parse is not None:
        try:
            value = note.parse(given)
        except ValueError as error:
            raise SettingsError(f"{where} {error}, got {_shown(given)}") from None
    items = value if entry.kind is tuple else (value,)
    if note.choices and not all(item in note.choices for item in items):
        raise SettingsError(f"{where} must be one of {', '.join(note.choices)}, got {_shown(given)}")
    if "" in items:
        raise SettingsError(f"{where} must not be empty")
    if entry.kind is float and not math.isfinite(value):
        raise SettingsError(f"{where} must be a finite number, got {_shown(given)}")
    if entry.kind is int and not -(2**63) <= value < 2**63:
        raise SettingsError(f"{where} must be an integer of 64 bits, got {_shown(given)}")
    if entry.kind in (int, float) and not note.range.holds(value):
        raise SettingsError(f"{where} must be {note.range.words}, got {_shown(given)}")
    return value


def _shown(value: Any) -> str:
    """Short, on one line, and as TOML has it where that differs."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, tuple):
        value = list(value)
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a huge number"


# The file.


def _read_file(path: str, entries: Mapping[str, _Entry], tables: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Field to the place that sets it and the value."""
    file = f"--config {path}"
    found: dict[str, tuple[str, Any]] = {}
    for table, key, value in _items(_document(path), file, entries, tables):
        place = f"[{table}] {_named(key)}" if table else _named(key)
        entry = entries.get(_dashed(key))
        if entry is None:
            raise SettingsError(f"{file}: unknown key {place}; {_advice(table, key, entries)}")
        if table not in (None, entry.table):
            raise SettingsError(f"{file}: {place} belongs in [{entry.table}]")
        where = f"{file}: {place}"
        if entry.name in found:
            raise SettingsError(f"{found[entry.name][0]} and {place} are the same setting, --{entry.key}")
        found[entry.name] = (where, _checked(entry, where, _from_toml(entry, where, value)))
    return found


def _document(path: str) -> dict[str, Any]:
    file = f"--config {path}"
    try:
        return tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{file} is not UTF-8: byte {error.object[error.start]:#04x} in line {line}") from None
    except (ValueError, RecursionError) as error:  # also what int() refuses, and brackets in thousands
        raise SettingsError(f"{file} is not TOML: {error}") from None


def _items(
    document: Mapping[str, Any], file: str, entries: Mapping[str, _Entry], tables: Sequence[str]
) -> list[tuple[str | None, str, Any]]:
    """(table, key, value) of all keys; None: at the top. `model` is a table or a key, as its value says."""
    found: list[tuple[str | None, str, Any]] = []
    for key, value in document.items():
        if isinstance(value, dict) and key in tables:
            found += [(key, inner, each) for inner, each in value.items()]
        elif isinstance(value, dict) and _dashed(key) not in entries:
            meant = "".join(f"; did you mean [{name}]?" for name in _similar(key, tables))
            there = ", ".join(f"[{name}]" for name in tables)
            raise SettingsError(f"{file}: unknown table [{_named(key)}]{meant or f'; there are {there}'}")
        elif key in tables and _dashed(key) not in entries:
            raise SettingsError(f"{file}: {key} must be a table, [{key}], got {_shown(value)}")
        else:
            found.append((None, key, value))
    return found


def _advice(table: str | None, key: str, entries: Mapping[str, _Entry]) -> str:
    for name in _similar(key, entries):
        home = entries[name].table
        return f"did you mean {name}?" if table in (None, home) else f"did you mean {name}, in [{home}]?"
    if table is None:
        return "keys are named as the flags in --help are"
    return f"[{table}] has {', '.join(name for name, entry in entries.items() if entry.table == table)}"


def _similar(key: str, names: Iterable[str]) -> list[str]:
    """The closest name, or none that is close."""
    return difflib.get_close_matches(_dashed(key).strip("-").lower(), names, n=1)


def _named(key: str) -> str:
    """As it stands in the file: bare where TOML allows that."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _shown(key)
