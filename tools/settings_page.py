"""Write docs/settings.md, the reference of all settings, from shoal.config.

    python tools/settings_page.py [--check]

With --check it writes nothing, and ends with status 1 if the page is not current.
"""

import json
import sys
from pathlib import Path
from typing import Any

from shoal import config
from shoal.base.settings import Config, Field, fields

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """\
# Settings

<!-- Written by tools/settings_page.py from python/shoal/config.py: change the setting there. -->

A setting has one name in Python, in a file and, with dashes, on the command line: `batch_size` in a file is
`--batch-size` of `shoal train`, and `--no-warm-up` sets `warm_up = false`. Where both have it, the option counts.
`shoal train lr --print-config ...` prints the settings of a run, `--config FILE` reads them, and `--set KEY=VALUE` sets
one, also those without an option: `--set train.staleness=2`. The directory of a model keeps the settings of the run
that saved it, in `config.toml`.

A size is a number of bytes or text such as `"8GiB"`. A rule is text, the same as on the command line:
`expire = ["ttl:5000"]`, `consistency = "ssp:2"`.
"""

TRAIN = """\
## Files of `shoal train`

One file may describe models of all kinds: each command reads its own section, `[lr]`, `[fm]` or `[model]`, and those
that all share.
"""

PROCESSES = """\
## Processes of a cluster

`shoal scheduler` and `shoal server` take these as options, and a launcher passes them to a process as one JSON object.
"""


def table(kind: type[Config], *, files: bool) -> str:
    """Return the settings of a configuration as a table."""
    shown = [field for field in fields(kind) if field.section is None and (field.setting.in_file or not files)]
    lines = [f"| `{field.name}` | {_default(field)} | {_meaning(field)} |" for field in shown]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *lines, ""])


def _default(field: Field) -> str:
    default = field.default
    if field.setting.default:
        return field.setting.default.replace("|", r"\|")
    if field.is_required or default in (None, ()):
        return ""
    return f"`{_toml(default)}`".replace("|", r"\|")


def _toml(value: Any) -> str:
    return json.dumps(value)


def _meaning(field: Field) -> str:
    setting = field.setting
    parts = [setting.text.partition(" (default: ")[0]]
    if field.choices:
        parts.append(f"one of {', '.join(field.choices)}")
    elif setting.bounds() and "a number" not in setting.bounds():
        parts.append(setting.bounds())
    if setting.models:
        parts.append(f"only {', '.join(setting.models)}")
    if setting.variable:
        parts.append(f"environment: `{setting.variable}`")
    return "; ".join(parts).replace("|", r"\|")


def page() -> str:
    """Return the page."""
    parts = [HEAD, TRAIN]
    run = config.TrainConfig
    parts += ["At the top of the file:\n", table(run, files=True)]
    for field in fields(run):
        if field.section is not None:
            parts += [f"`[{field.name}]`\n", table(field.section, files=True)]
    parts += ["`[[features]]`, each [feature](ctr.md#features) of a click model\n", table(config.Feature, files=True)]
    parts += ["`[data] labels`, each of [several labels](ctr.md#several-labels)\n", table(config.Task, files=True)]
    parts.append(PROCESSES)
    for kind in (config.SchedulerConfig, config.ServerConfig):
        parts += [f"{(kind.__doc__ or '').strip()}\n", table(kind, files=False)]
    return "\n".join(parts)


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE} is not what tools/settings_page.py writes: run it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
