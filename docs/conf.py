"""The documentation site: `make docs` builds it from the Markdown pages and the docstrings, with warnings as errors.

The source directory is the repository's root, so that links between pages resolve as they do on GitHub.
docs/decisions/0021-documentation-site.md says why these tools.
"""

import functools
import importlib.util
import pkgutil
import posixpath
import re
import types
from pathlib import Path

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError

import shoal

API = sorted((Path(__file__).parent / "api").glob("*.rst"))

project = "shoal"
author = "The shoal authors"
project_copyright = "The shoal authors"
version = release = shoal.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "licenses/README.md",
    "bench/*.md",
    "csrc/README.md",
    "examples/bars/README.md",
    "tests/fuzz/README.md",
    "tests/support/sim/README.md",
    "docs/**.md",
    "docs/api/*.rst",
]
exclude_patterns = [".*", "build", "python"]
suppress_warnings = []
HAS_TORCH = importlib.util.find_spec("torch") is not None
if not HAS_TORCH:  # as on machines without a CPU build of it: the site then lacks that page
    exclude_patterns.append("docs/api/torch.rst")
    suppress_warnings.append("toc.excluded")

html_theme = "furo"
html_title = f"shoal {release}"
html_copy_source = False
html_additional_pages = {"index": "redirect.html"}  # docs/index.html is the first page
templates_path = ["templates"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

nitpicky = True
# `name` in a docstring is a link if it is a public name, and code otherwise; :class:`name` has to be public.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", ".*"), ("py:class", r"(collections|concurrent|ray|torch|numpy|sklearn)\..*")]

myst_heading_anchors = 4  # as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have types with shapes and units
autodoc_default_options = {"members": True}
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# Modules whose public names docs/api describes; a name that two of them export is described at the first.
MODULES = (
    "shoal",
    "shoal.checkpoint",
    "shoal.data",
    "shoal.errors",
    "shoal.export",
    "shoal.metrics",
    "shoal.models",
    "shoal.schedules",
    "shoal.serve",
    "shoal.sketches",
    "shoal.sklearn",
    "shoal.tools",
    "shoal.torch",
    "shoal.torch.models",
    "shoal.tracking",
)


def public_names() -> dict[int, str]:
    """Return the name under which each public object is described, by the object's id."""
    names: dict[int, str] = {}
    for module in MODULES:
        if "torch" not in module or HAS_TORCH:
            owner = functools.reduce(getattr, module.split(".")[1:], shoal)
            own = [name for name, value in vars(owner).items() if getattr(value, "__module__", "") == owner.__name__]
            for name in getattr(owner, "__all__", [name for name in own if not name.startswith("_")]):
                if not isinstance(value := getattr(owner, name), types.ModuleType):
                    names.setdefault(id(value), f"{module}.{name}")
    return names


PUBLIC = public_names()
described = set(re.findall(r"^\.\. auto\w+:: (\S+)", "\n".join(page.read_text() for page in API), re.MULTILINE))
if missing := sorted(set(PUBLIC.values()) - described):
    raise ConfigError(f"docs/api does not describe {', '.join(missing)}")

# Pages whose tables of links are the site's navigation.
NAVIGATION = ("docs/index", "docs/decisions/README", "bench/README")


def show_titles(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links whose text is the name of a page show that page's title, or the heading that they lead to."""
    source[0] = re.sub(r"\[[\w/.-]+\.md\](?=\([^)]+\.md[)#])", "[]", source[0])


def add_toctrees(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append a hidden toctree of each section's links to the pages that have the navigation."""
    if docname not in NAVIGATION:
        return
    parts = []
    for section in re.split(r"^(?=## )", source[0], flags=re.MULTILINE):
        heading = section.partition("\n")[0].removeprefix("## ") if section.startswith("## ") else ""
        links = [
            posixpath.normpath(f"{posixpath.dirname(docname)}/{path}")
            for path in re.findall(r"\]\(([^)#]+)\)", section)
        ]
        pages = [f"/{path.rpartition('.')[0]}" for path in links if path.rpartition(".")[0] in app.env.found_docs]
        parts.append(section)
        if pages:
            parts.append(
                "\n```{toctree}\n:hidden:\n"
                + (f":caption: {heading}\n" if heading else "")
                + "\n".join(["", *pages])
                + "\n```\n\n"
            )
    source[0] = "".join(parts)


def resolve_by_public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element) -> Element | None:
    """Resolve a reference to where an object is defined, by the name under which it is described."""
    parts = node.get("reftarget", "").split(".")
    for length in range(len(parts), 0, -1) if parts[0] == "shoal" else ():
        try:
            value = pkgutil.resolve_name(".".join(parts[:length]))
        except (AttributeError, ImportError):
            continue
        if id(value) in PUBLIC:
            target = ".".join([PUBLIC[id(value)], *parts[length:]])
            domain = env.get_domain("py")
            return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, text)
    return None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", show_titles)
    app.connect("source-read", add_toctrees)
    app.connect("missing-reference", resolve_by_public_name)
