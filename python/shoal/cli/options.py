"""Commands, and their options, which follow from a configuration: names, types, defaults, bounds and help.

A command is a function of one configuration (`Command`). Each field is an option ``--its-name``, or an argument if its
setting says so; fields of a section are a group of options. A command of a whole run also reads a file: what is given
as an option comes before ``--set``, and that before the file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import msgspec

from shoal.base.settings import Config, Field, Setting, fields, read, read_file
from shoal.base.suggest import nearest
from shoal.cli.answers import Answer


class Output(Config, frozen=True, kw_only=True):
    """The options of every command that returns an answer."""

    json: Annotated[bool, "print one JSON object on standard output instead of text", Setting(in_file=False)] = False
    quiet: Annotated[bool, "print neither progress nor text", Setting(in_file=False)] = False


Imports = Annotated[
    tuple[str, ...],
    "package or module from which code that a click model names may be imported; repeatable",
    Setting(metavar="NAME", in_file=False),
]


class Command(msgspec.Struct, frozen=True):
    """A command: its words, a line about it, examples that work, its options, and what it does.

    ``model`` is the kind of model whose settings it takes, ``reads_file`` whether these may be in a file, and ``role``
    that of its log events.
    """

    name: str
    what: str
    examples: str
    options: type[Config]
    run: Callable[[Any], Answer]
    model: str = ""
    reads_file: bool = False
    role: str = ""


class Group(msgspec.Struct, frozen=True):
    """A command of which the next ones are kinds, such as ``train``."""

    name: str
    what: str
    examples: str
    title: str
    metavar: str


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion for a misspelled word."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown options with the help of the command that received them."""
        found, more = super().parse_known_args(args, namespace)
        unknown = [word for word in more if word.startswith("-")]
        if more:
            named = [name for action in self._actions for name in action.option_strings]
            meant = _meant(unknown[0].partition("=")[0], named) if unknown else ""
            self.error(f"unrecognized arguments: {' '.join(more)}{meant}")
        return found, more

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            message += _meant(wrong[1], [word.strip("' ") for word in wrong[2].split(",")])
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


def _meant(word: str, words: Sequence[str]) -> str:
    near = nearest(word, words)
    return "" if near is None else f": did you mean {near}?"


def make_parser(name: str, what: str, examples: str, among: Any = None) -> argparse.ArgumentParser:
    """Create the parser of a command; its help ends with examples that work."""
    described: dict[str, Any] = {
        "description": what,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
        "argument_default": argparse.SUPPRESS,
    }
    if among is None:
        return Parser(prog=name, **described)
    parser: argparse.ArgumentParser = among.add_parser(name.split()[-1], help=what, **described)
    return parser


def add_command(among: Any, command: Command) -> argparse.ArgumentParser:
    """Add a command with its options."""
    parser = make_parser(command.name, command.what, command.examples, among)
    if command.reads_file:
        parser.add_argument("--config", metavar="FILE", help="configuration in TOML; options override it")
        parser.add_argument(
            "--set",
            action="append",
            type=_assignment,
            metavar="KEY=VALUE",
            help="set a key of the configuration, such as model.dim=8; repeatable",
        )
        parser.add_argument(
            "--print-config", action="store_true", help="print the configuration of the run, as --config reads it"
        )
    add_options(parser, command.options, command.model)
    parser.set_defaults(command=command)
    return parser


def add_options(parser: argparse.ArgumentParser, kind: type[Config], model: str = "") -> None:
    """Add an option for each field of a configuration that applies to a kind of model; sections become groups."""
    for field in sorted(fields(kind), key=lambda field: field.name in _LAST):
        setting = field.setting
        if not setting.is_option or (setting.models and model not in setting.models):
            continue
        if field.section is None:
            _add(parser, field, field.name)
            continue
        group = parser.add_argument_group(field.name, setting.text)
        for one in fields(field.section):
            if one.setting.is_option and (not one.setting.models or model in one.setting.models):
                _add(group, one, f"{field.name}.{one.name}")


_LAST = ("threads", "log_format", "json", "quiet")  # in the help


def option(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _add(parser: Any, field: Field, dest: str) -> None:
    setting = field.setting
    name = option(field.name)
    how: dict[str, Any] = {"help": _help(field)}
    if bool in field.kinds and len(field.kinds) == 1:
        if field.default is None:
            how["action"] = argparse.BooleanOptionalAction
        elif field.default:
            name, how["help"] = f"--no-{name[2:]}", setting.negated
            how["action"] = "store_false"
        else:
            how["action"] = "store_true"
        parser.add_argument(name, dest=dest, **how)
        return
    how["metavar"] = None if field.choices else setting.metavar or field.name.upper()
    if field.choices:
        how["choices"] = field.choices
    else:
        how["type"] = _parser_of(field)
    if setting.const is not None:
        how |= {"nargs": "?", "const": setting.const}
    elif tuple in field.kinds and setting.metavar == "...":
        how["nargs"] = argparse.REMAINDER
    elif setting.several:
        how["nargs"] = "+"
    elif dict in field.kinds or (tuple in field.kinds and not setting.metavar.endswith(",...")):
        how["action"] = "append"
    if setting.positional:
        if not field.is_required and "nargs" not in how:
            how |= {"nargs": "?", "default": None}
        parser.add_argument(dest, **how)
    else:
        parser.add_argument(name, dest=dest, required=field.is_required, **how)


def _help(field: Field) -> str:
    setting, default = field.setting, field.default
    usual = setting.default
    is_none = default == "" or (type(default) is int and default < (setting.ge or 0))  # it stands for another
    if not usual and type(default) in (int, float, str) and not is_none:
        usual = f"{default:g}" if type(default) is float else str(default)
    if setting.variable.startswith("SHOAL_"):
        usual = f"{setting.variable}, or {usual}" if usual else setting.variable
    text = setting.text.partition(" (default: ")[0]
    return f"{text}{f' (default: {usual})' if usual else ''}".replace("%", "%%")


def _parser_of(field: Field) -> Callable[[str], Any]:
    """Return the function that reads the text of an option."""

    def parse(text: str) -> Any:
        if dict in field.kinds:
            return _pair(text)
        if tuple in field.kinds and field.setting.metavar.endswith(",..."):
            words = text.split(",")
            return tuple(words) if field.item is str else tuple(map(_whole, words))
        number = _number(text) if int in field.kinds or float in field.kinds else None
        if type(number) is int and int in field.kinds:
            return number
        if number is not None and float in field.kinds:
            return float(number)
        if str in field.kinds or tuple in field.kinds:
            return text
        what = "number" if float in field.kinds else "whole number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}: pass {field.setting.bounds() or f'a {what}'}")

    return parse


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> int | float | None:
    """Read a number; a whole one may be written as 5e6."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if "." not in text and "e" in text.lower() and number.is_integer() else number


def _pair(text: str) -> tuple[str, Any]:
    """Read endpoint_url=http://minio:9000 or client_kwargs={"region_name": "eu"}."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value  # text need not be quoted as JSON


def _assignment(text: str) -> tuple[str, Any]:
    """Read model.dim=8: a value as in TOML, where a word needs no quotation marks."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a key with a value: write it as model.dim=8")
    import tomllib

    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def options_of(command: Command, arguments: Mapping[str, Any]) -> Config:
    """Make the configuration of a command of its parsed arguments and its file.

    Raises
    ------
    ValueError
        A value is out of its bounds, or a key of the file is unknown.
    """
    given: dict[str, Any] = {}
    if command.reads_file and "config" in arguments:
        given = read_file(arguments["config"])
    for path, value in arguments.get("set", ()) if command.reads_file else ():
        _put(given, path.split("."), value, path)
    known = {field.name: field for field in fields(command.options)}
    for field in known.values():
        if field.section is None:
            _take(field, field.name, arguments, given)
        else:
            section = given.get(field.name, {})
            for one in fields(field.section):
                _take(one, f"{field.name}.{one.name}", arguments, section)
            if section:
                given[field.name] = section
    return read(command.options, given)


def _put(given: dict[str, Any], names: Sequence[str], value: Any, path: str) -> None:
    for name in names[:-1]:
        given = given.setdefault(name, {})
        if not isinstance(given, dict):
            raise ValueError(f"--set {path}: {name} has no keys of its own")
    given[names[-1]] = value


def _take(field: Field, dest: str, arguments: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Take what the command line has for a field."""
    value = arguments.get(dest)
    if value is not None:
        given[field.name] = field.checked(dict(value) if dict in field.kinds else value)


def option_names(command: Command) -> set[str]:
    """Return the names of the fields that are options, with those of sections."""
    return {
        name
        for field in fields(command.options)
        for name in ([field.name] if field.section is None else [one.name for one in fields(field.section)])
    }
