"""Every block of the README and of docs/ runs, in its page's order, in a fresh folder that has what its reader has.

`documents.py` runs a page and describes the marks; here is the data that pages name, and what a page may not do.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import check_layers
import documents
import shoal
from cluster_fakes import HeldPort
from documents import PAGES, ROOT, blocks, commands
from paths import SUPPORT
from shoal import cli
from shoal.tools.planted import PlantedModel, write_log
from tiers import long_but

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
RUNNABLE = [
    name for name in NAMES if any(b.kind in documents.RUN and "not run" not in b.marks for b in blocks(ROOT / name))
]

# Pages whose blocks train models for long.
TRAINING = {"docs/ctr.md", "docs/tracking.md", "docs/training.md"}

# Pages that show everything a reader needs, from the installation of extras on.
SELF_CONTAINED = {"README.md", "docs/quick-start.md"}

# What the modules of each extra are. An environment that `make demo` has made has those of plot alone.
EXTRAS = {
    "arrow": ["pyarrow"],
    "fsspec": ["fsspec", "s3fs"],
    "grpc": ["grpc"],
    "kafka": ["confluent_kafka"],
    "mlflow": ["mlflow"],
    "onnx": ["onnx", "onnxruntime", "onnxscript"],
    "otel": ["opentelemetry"],
    "ray": ["ray"],
    "ray-serve": ["ray", "grpc_reflection", "starlette", "uvicorn", "pyarrow"],
    "serve": ["pyarrow"],
    "sklearn": ["sklearn", "scipy"],
    "tensorboard": ["tensorboard"],
    "torch": ["torch"],
    "zstd": ["backports.zstd"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the files that pages name, small."""
    folder = tmp_path_factory.mktemp("data")
    planted = PlantedModel(seed=1)
    write_log(folder / "day_0.tsv", planted, 3000, 0)
    write_log(folder / "day_1.tsv", planted, 1500, 1 << 40)
    (folder / "logs").mkdir()
    for i in range(4):
        write_log(folder / "logs" / f"day_{i}.tsv", planted, 1000, i << 20)
    rng = np.random.default_rng(7)
    n = 400
    for name in ("ads", "clicks_0", "clicks_1", "clicks_2", "day_2"):
        sites, users, ads, prices = *rng.integers(0, 12, (3, n)), rng.random(n)
        clicks = rng.random(n) < 1 / (1 + np.exp(-2 * np.sin(sites * users)))
        seen = ["|".join(map(str, rng.integers(0, 12, k))) for k in rng.integers(0, 5, n)]
        rows = zip(clicks.astype(int), users, ads, sites, prices, seen, strict=True)
        header = "click,user,ad,site,price,seen"
        lines = [f"{y},u{u},{a},site-{s}.com,{p:.3f},{h}" for y, u, a, s, p, h in rows]
        (folder / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "ads.tsv").write_text((folder / "ads.csv").read_text().replace(",", "\t"))
    subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--output", folder / "build/demo", "--examples", "6000"],
        capture_output=True,
        check=True,
        timeout=120,
    )
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of the programs that pages call, and what pip does to what can be imported."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "sitecustomize.py").write_text(documents.BLOCKER)
    pip = f"""\
        #!{sys.executable}
        import os, sys
        extras, file = {EXTRAS!r}, os.environ["SHOAL_DOCUMENTS_BLOCKED"]
        assert sys.argv[1] == "install" and len(sys.argv) == 3, sys.argv
        wanted = sys.argv[2].partition("[")[2].rstrip("]").split(",")
        here = {{name for extra in wanted if extra for name in extras[extra]}}
        missing = [name for name in open(file).read().split() if name not in here]
        open(file, "w").write(" ".join(missing))
        """
    for name, text in {
        "shoal": f'#!/bin/sh\nexec "{sys.executable}" -W error -m shoal "$@"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "pip": "\n".join(line.strip() for line in pip.splitlines()) + "\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(set(RUNNABLE) - TRAINING, RUNNABLE))
def test_every_block_of_a_page_runs_in_its_order(name, data, programs, tmp_path):
    page = ROOT / name
    if "torch" in page.read_text().lower():
        pytest.importorskip("torch", reason="torch is an extra")
    if "\ncurl " in page.read_text() and shutil.which("curl") is None:
        pytest.skip("the page calls curl, which this machine does not have")
    folder = tmp_path / "page"
    shutil.copytree(data, folder)
    (tmp_path / "blocked").write_text(
        " ".join(sorted({module for modules in EXTRAS.values() for module in modules})) * (name in SELF_CONTAINED)
    )
    held = HeldPort()
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SHOAL_DOCUMENTS_BLOCKED": str(tmp_path / "blocked"),
        "SHOAL_DOCUMENTS_PORT": str(held.port),
        "OMP_NUM_THREADS": "1",
    }
    if name in SELF_CONTAINED:
        # Of its sitecustomize; started, not forked.
        env["PYTHONPATH"] = os.pathsep.join([str(programs), *filter(None, [os.environ.get("PYTHONPATH")])])
    with held:
        done = subprocess.run(
            [sys.executable, "-W", "error", SUPPORT / "documents.py", page],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr}"


@pytest.mark.parametrize("name", NAMES)
def test_no_block_of_a_page_is_left_out_without_a_reason(name):
    for block in blocks(ROOT / name):
        where = f"{name}, line {block.line}"
        assert not block.is_command or "not run" in block.marks, f"{where}: mark it, or fence it as one that runs"
        if "not run" in block.marks:
            assert len(block.marks["not run"]) > 10, f"{where}: the reason is missing"
        if name in SELF_CONTAINED:
            assert "before" not in block.marks, f"{where}: this page shows all that its blocks need"


def parses(words):
    try:
        cli.parser().parse_args(words)
    except SystemExit as end:
        return end.code == 0  # --help
    return True


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_run_is_at_least_python_and_commands_that_there_are(name):
    for block in blocks(ROOT / name):
        if block.kind == "python" and ">>>" not in block.text:
            compile(block.text, f"{name}, line {block.line}", "exec")
        if block.kind in ("sh", "console"):
            for words in commands(block):
                assert parses(words), f"{name}, line {block.line}: {words}"


def test_the_documented_requirements_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "install.md").read_text().partition("## Requirements")[2].partition("\n## ")[0]
    for requirement in project["dependencies"]:
        assert re.match(r"[\w-]+", requirement)[0] in text
    for extra in set(project["optional-dependencies"]) - {"test", "dev"}:
        assert f"`{extra}`" in text, extra
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"test", "dev", "plot"}


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PROSE = [
    *PAGES,
    *sorted((ROOT / "bench").glob("*.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md")),
]


def site_pages():
    """The pages that the documentation site has, as docs/conf.py lists them."""
    module = ast.parse((ROOT / "docs" / "conf.py").read_text())
    (patterns,) = (
        ast.literal_eval(one.value)
        for one in module.body
        if isinstance(one, ast.Assign) and one.targets[0].id == "include_patterns"
    )
    return {page for pattern in patterns for page in ROOT.glob(pattern.replace("**.md", "**/*.md"))}


ON_SITE = site_pages()


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_file(), f"{link}: it is a folder, which the site does not show: name a file in it"
        assert target.suffix != ".md" or target in ON_SITE, f"{link}: docs/conf.py does not include this page"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_page_is_linked_from_the_index():
    docs = ROOT / "docs"
    indexes = (docs / "index.md", docs / "decisions" / "README.md", ROOT / "bench" / "README.md")
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in indexes for link in LINK.findall(page.read_text())
    }
    missing = {*PROSE} - linked - {indexes[0]}
    assert not missing, sorted(str(page.relative_to(ROOT)) for page in missing)


def test_every_public_name_of_the_package_is_described():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    described = set(re.findall(r"^\.\. auto\w+:: shoal\.(\w+)$", pages, re.MULTILINE))
    missing = {
        name
        for name in shoal.__all__
        if not inspect.ismodule(getattr(shoal, name)) and not name.startswith("__") and name not in described
    }
    assert not missing


def test_every_room_of_the_source_has_a_line_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for heading, table in (("of the C++ engine", check_layers.CSRC), ("of the Python package", check_layers.PYTHON)):
        section = text.partition(f"## Rooms {heading}")[2].partition("\n## ")[0]
        first = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
        described = {name.strip("/").replace("/", ".") for cell in first for name in re.findall(r"`([\w/]+)`", cell)}
        assert {room for room in table if not room.startswith("tools.")} <= described | {"tools"}, heading


@pytest.mark.slow
def test_every_file_that_contributors_are_sent_to_is_there():
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add something")[2].partition("\n## ")[0]
    assert recipes
    text = (ROOT / "docs" / "where.md").read_text() + recipes
    named = re.findall(r"`([\w./]+(?:/|\.(?:py|pxi|h|cc|md)))`", text)
    assert len(named) > 50
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "python" / "shoal"))]
    assert not missing


@pytest.mark.slow
def test_every_module_of_the_documentation_is_reached_from_the_package():
    code = "import shoal, sys; heavy = [m for m in ('torch', 'sklearn', 'starlette', 'pyarrow') if m in sys.modules]; "
    code += "print(shoal.tools.convert.read_npz_rows, shoal.serve.ServedModel, shoal.sklearn.FTRLClassifier, heavy)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.endswith("[]\n")
