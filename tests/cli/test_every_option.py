"""Every option of every command takes what its help says that it takes."""

import argparse
from collections.abc import Iterator

import pytest

from shoal.cli import parser
from shoal.cli.options import options_of

# By the placeholder of the help, values that are all taken.
TAKEN = {
    "N": ["3"],
    "S": ["2", "2.5"],
    "SIZE": ["8GiB", "1073741824"],
    "DIR:SIZE": ["/tmp/x:4MiB"],
    "RATE": ["10Gbit", "1.5 Gbit/s", "100Mbit"],
    "[HOST:]PORT": ["9100", "0.0.0.0:9100"],
    "ADDRESS": ["tcp://127.0.0.1:5570"],
    "KEY=VALUE": ["train.seed=8"],
}
# One of these is taken by any other option.
ANY = ["3", "x", "a,b", "a=b", "ttl:5", "count:3", "ssp:2", "adagrad", "0.5", "100:2", "zeros"]


def commands(among: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in among._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, among
    for group in groups:
        for word, one in group.choices.items():
            yield from commands(one, f"{name} {word}".strip())


COMMANDS = dict(commands(parser(None)))


def why_refused(command: argparse.ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        arguments = vars(command.parse_args(words))
        options_of(arguments["command"], arguments)
    except ValueError as error:
        return str(error)
    except SystemExit:
        return capsys.readouterr().err
    return ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_is_explained(name):
    assert [action.dest for action in COMMANDS[name]._actions if not action.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_takes_what_its_help_says(name, capsys):
    command = COMMANDS[name]
    needed: list[str] = []
    for action in command._actions:
        value = str(next(iter(action.choices))) if action.choices else TAKEN.get(str(action.metavar), ["x"])[0]
        if not action.option_strings and action.nargs not in ("*", "?"):
            needed.append(value)
        elif action.option_strings and (action.required or action.dest in ("data.data", "output.output")):
            needed += [action.option_strings[-1], value]
    for action in command._actions:
        if not action.option_strings or action.dest in ("help", "version", "config"):  # a file that has to be there
            continue
        said = TAKEN.get(str(action.metavar))
        if action.choices:
            said = [str(choice) for choice in action.choices]
        words = [[]] if action.nargs == 0 else [[word] for word in said or ANY]
        refusals = [why_refused(command, [*needed, action.option_strings[-1], *one], capsys) for one in words]
        taken = refusals.count("")
        assert taken == len(words) if said else taken, (action.option_strings[-1], refusals)
