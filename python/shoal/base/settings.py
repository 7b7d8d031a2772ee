"""Settings: what a field of a configuration says of itself, and what follows from it.

A configuration is a frozen struct. Each of its fields has a name, a type, a default, one sentence, and `Setting`s:
bounds, and how its value is written. Several settings of a field, such as those of the alias of its type, add up. From
these come the checks of constructors, files and JSON (here), the options of the command line (`shoal.cli.options`), and
the reference in the documentation (``tools/settings_page.py``).

    Count = Annotated[int, Setting(ge=1, metavar="N")]

    class ReaderConfig(Config, frozen=True, kw_only=True):
        batch_size: Annotated[Count, "examples per batch"] = 8192

The values are those of JSON and TOML: numbers, text, lists (as tuples) and mappings of them. A rule, a size or an
address is text, which stays as it was given; its function in ``check`` reads it.

Threads: configurations are immutable.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

from shoal.base.scalars import plain
from shoal.base.suggest import nearest

C = TypeVar("C", bound="Config")

_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list",
    dict: "a table",
}


class Setting(Struct, frozen=True):
    """What a field of a configuration says of itself.

    Attributes
    ----------
    text : str
        What it means, in a sentence without its full stop, with its default if that is not the field's.
    ge, gt, le, lt : float, optional
        Bounds of a number.
    metavar : str
        What stands for the value in a help. ``A,B,...``: a list is one word of the command line.
    check : str
        ``module:function`` that reads the value, and raises ValueError if it is wrong.
    variable : str
        The environment variable that has the value if it is not given.
    negated : str
        What the option ``--no-NAME`` of a truth value that is true by default means.
    const : object
        The value of the option without a word.
    models : tuple of str
        The kinds of models that it is for: lr, fm, ctr; empty: all.
    positional : bool
        Whether the command line has it as an argument, not as an option.
    several : bool
        Whether one option takes several words.
    in_file : bool
        Whether it may be in a file: an action of one run may not.
    is_option : bool
        Whether the command line has it.
    """

    text: str = ""
    ge: int | float | None = None
    gt: int | float | None = None
    le: int | float | None = None
    lt: int | float | None = None
    metavar: str = ""
    check: str = ""
    variable: str = ""
    negated: str = ""
    const: Any = None
    models: tuple[str, ...] = ()
    positional: bool = False
    several: bool = False
    in_file: bool = True
    is_option: bool = True

    def __add__(self, other: Setting) -> Setting:
        """Return both; what the other one says counts."""
        usual = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        said = {name: value for name in usual if (value := getattr(other, name)) != usual[name]}
        return msgspec.structs.replace(self, **said)

    @property
    def default(self) -> str:
        """The default that its sentence names, or ""."""
        return self.text.partition(" (default: ")[2].removesuffix(")")

    def bounds(self) -> str:
        """Return the numbers to pass, for messages; "" if all are right."""
        if self.gt is not None:
            most = "" if self.le is None else f", at most {self.le:g}"
            return f"a number above {self.gt:g}" + (most if self.lt is None else f" and below {self.lt:g}")
        if self.ge is not None:
            return f"{self.ge:g} or more" if self.le is None else f"{self.ge:g} to {self.le}"
        return "" if self.le is None else f"{self.le:g} or less"


class Field(Struct, frozen=True):
    """A field of a configuration: its name, its types without None, the words that it may be, and its setting."""

    name: str
    kinds: tuple[type, ...]
    item: type
    choices: tuple[str, ...]
    section: type[Config] | None
    default: Any
    setting: Setting

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is NODEFAULT

    def checked(self, value: Any) -> Any:
        """Return a value in the field's own type.

        Raises
        ------
        TypeError, ValueError
            It is of another type, or out of bounds: the message begins with the name, and has the value and the remedy.
        """
        if self.section is not None:
            return value
        value = plain(value)
        if self.choices and value not in self.choices:
            near = nearest(value, self.choices) if isinstance(value, str) else None
            hint = f"did you mean {near!r}? It" if near is not None else "it"
            raise ValueError(f"{self.name} is {value!r:.80}: {hint} is one of {', '.join(self.choices)}")
        if isinstance(value, str) and self.setting.several:
            value = (value,)  # one file needs no brackets
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        if type(value) is int and float in self.kinds and int not in self.kinds:
            value = float(value)
        if isinstance(value, tuple) and self.item is float:
            value = tuple(float(one) if type(one) is int else one for one in value)
        if isinstance(value, tuple) and not all(type(one) is self.item for one in value):
            raise TypeError(f"{self.name} is {value!r:.80}: pass a list of {self.item.__name__}")
        if type(value) not in self.kinds:
            if isinstance(value, Mapping) and dict in self.kinds:
                return dict(value)
            what = " or ".join(_KINDS[kind] for kind in self.kinds)
            bounds = f", {self.setting.bounds()}" if self.setting.bounds() else ""
            raise TypeError(f"{self.name} is {value!r:.80}: pass {what}{bounds}")
        setting = self.setting
        if type(value) in (int, float) and not (
            (setting.ge is None or value >= setting.ge)
            and (setting.gt is None or setting.gt < value < float("inf"))
            and (setting.le is None or value <= setting.le)
            and (setting.lt is None or value < setting.lt)
        ):
            raise ValueError(f"{self.name} is {value}: pass {setting.bounds()}")
        if setting.check and type(value) is not bool:
            read = _function(setting.check)
            try:
                for one in value if isinstance(value, tuple) else [value]:
                    read(one)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.name}: {error}") from None
        return value


@functools.cache
def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration, whose constructor checks it.

    Raises
    ------
    TypeError, ValueError
        A value is of another type, or out of its bounds: the message has the name, the value and what to pass.
    """

    def __post_init__(self) -> None:
        for field in fields(type(self)):
            value = getattr(self, field.name)
            if value is None or value is field.default:
                continue
            found = field.checked(value)
            if found is not value:
                msgspec.structs.force_setattr(self, field.name, found)


@functools.cache
def fields(kind: type[Config]) -> tuple[Field, ...]:
    """Return the fields of a configuration, in their order."""
    return tuple(map(_field, msgspec.structs.fields(kind)))


def _field(info: msgspec.structs.FieldInfo) -> Field:
    default = info.default if info.default_factory is NODEFAULT else info.default_factory()
    setting = Setting()
    item: type = str
    section: type[Config] | None = None
    kinds: list[type] = []
    choices: list[str] = []
    for part in _parts(info.type):
        if isinstance(part, Setting):
            setting += part
        elif isinstance(part, str):
            setting += Setting(part)
        elif get_origin(part) is Literal:
            choices += get_args(part)
            kinds.append(str)
        elif get_origin(part) is tuple:
            item = get_origin(get_args(part)[0]) or get_args(part)[0]
            kinds.append(tuple)
        elif isinstance(part, type) and issubclass(part, Config):
            section = part
            setting += Setting(" ".join((part.__doc__ or "").partition("\n\n")[0].split()))
        elif part is not NoneType:
            kinds.append(get_origin(part) or part)
    if not setting.text:
        raise TypeError(f"field {info.name!r} has no sentence")
    return Field(info.name, tuple(kinds), item, tuple(choices), section, default, setting)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the types of a hint, and what is said of them."""
    if get_origin(hint) is Annotated:
        inner, *said = get_args(hint)
        yield from _parts(inner)
        yield from said
    elif get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from _parts(one)
    else:
        yield hint


def from_environment(config: C, environment: Mapping[str, str]) -> C:
    """Return a configuration with the values of environment variables where it has none.

    Raises
    ------
    ValueError
        A variable is out of bounds: the message has its name.
    """
    found: dict[str, Any] = {}
    for field in fields(type(config)):
        text = environment.get(field.setting.variable) if field.setting.variable else None
        if text and getattr(config, field.name) is None:
            try:
                found[field.name] = field.checked(int(text) if int in field.kinds and text.isdigit() else text)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{field.setting.variable} in the environment: {error}") from None
    return msgspec.structs.replace(config, **found) if found else config


# ---- reading and writing ---------------------------------------------------------------------------------------------


def read(kind: type[C], given: Mapping[str, Any], where: str = "") -> C:
    """Make a configuration of mappings, as TOML and JSON have them.

    Raises
    ------
    ValueError
        A key is unknown, or a value is wrong: the message has the section, and the nearest known key.
    """
    known = {field.name: field for field in fields(kind)}
    for name in given.keys() - known.keys():
        for field in known.values():
            if field.section is not None and name in [inner.name for inner in fields(field.section)]:
                raise ValueError(
                    f"{where or 'the configuration'} has no key {name!r}: did you mean {field.name}.{name}?"
                )
    check_names(given, known, where or "the configuration")
    values: dict[str, Any] = {}
    for name, value in given.items():
        section = known[name].section
        if section is None:
            values[name] = value
        elif not isinstance(value, Mapping):
            raise ValueError(f"[{name}] is {value!r:.80}: it must be a section")
        else:
            values[name] = read(section, value, f"[{name}]")
    missing = [name for name, field in known.items() if field.is_required and name not in values]
    if missing:
        raise ValueError(f"{where or 'the configuration'} has no {missing[0]}: {known[missing[0]].setting.text}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} {error}".lstrip()) from None


def check_names(
    given: Mapping[str, Any] | Sequence[str], known: Sequence[str] | Mapping[str, Any], where: str, what: str = "key"
) -> None:
    """Raise ValueError for an unknown name; the message has the nearest known one."""
    for name in given:
        if not isinstance(name, str) or name not in known:
            near = nearest(name, known) if isinstance(name, str) else None
            hint = "there are" if near is None else f"did you mean {near!r}? There are"
            raise ValueError(f"{where} has no {what} {name!r}: {hint} {', '.join(known)}")


def read_file(file: str) -> dict[str, Any]:
    """Read a TOML file; ValueError if it is none."""
    import tomllib  # takes 3 ms, and most runs have no file

    try:
        with open(file, "rb") as opened:
            return tomllib.loads(opened.read().decode("utf-8-sig"))  # editors of Windows begin with a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from None


def to_toml(config: Config) -> str:
    """Return a configuration as TOML, with its defaults, without what is not set and what may not be in a file."""
    lines = []
    sections = []
    for field in fields(type(config)):
        value = getattr(config, field.name)
        if field.section is not None and value is not None:
            sections.append(f"[{field.name}]\n{to_toml(value)}")
        elif field.setting.in_file and value is not None:
            lines.append(f"{field.name} = {_toml(value)}\n")
    return "\n".join(["".join(lines), *sections] if lines else sections)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else repr(value)
