"""Check that folders and modules depend downward only, and that restricted functions are used in one place.

Also that modules do not import each other in a circle, and that source files are not too long.

    python tools/check_layers.py [ROOT]

One table for C++ includes (folders of ``csrc``) and Python imports (modules of ``python/shoal``): each name lists what
it may use in addition to itself. A name that is not in the table is an error too: new rooms are added explicitly.
Prints one line per violation, ``file:line: what``, and ends with code 1 if there is any.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

CSRC = {
    "base": "",
    "kernel": "base",
    "optim": "base",
    "batch": "base",
    "table": "base",
    "names": "base table",
    "text": "base",
    "policy": "base table",
    "shard": "base optim batch table policy",
    "cache": "base optim shard",
    "tier": "base optim batch table policy shard",
    "export": "base optim",
    "wire": "base optim",
    "transport": "base wire",
    "replica": "base optim batch policy shard tier wire transport",
    "endpoint": "base optim batch policy shard tier wire transport replica",
    "client": "base cache wire transport",
    "http": "base",
    "predict": "base optim kernel text export",
    "c_api": "base export text predict",
    "serve": "base text predict http",
    "bind": "base cache kernel optim batch table names policy shard tier export wire transport replica endpoint client "
    "http predict serve",
}

PYTHON = {
    "_core": "",
    "_reader": "",
    "errors": "_core",
    "config": "base",
    "consistency": "base",
    "schedules": "_core base",
    "optim": "_core errors schedules base",
    "user_optimizer": "_core errors optim base",
    "user_functions": "_core errors",
    "lifecycle": "_core base",
    "base": "",
    "table": "_core errors optim user_optimizer user_functions lifecycle base table.spec table.arrays",
    "table.spec": "_core optim user_optimizer lifecycle base",
    "table.arrays": "_core",
    "storage": "_core errors base",
    "checkpoint": "_core errors optim base table storage",
    "export": "_core errors optim base table storage",
    "store": "_core errors consistency optim lifecycle base table storage checkpoint export",
    "sketches": "_core base table store",
    "data": "_core _reader errors base storage table.arrays",
    "metrics": "_core errors base",
    "models": "_core config errors consistency optim lifecycle base table storage checkpoint store data metrics",
    "torch": "_core config errors consistency schedules optim lifecycle base table storage checkpoint store data "
    "metrics models",
    "serve": "_core config errors consistency optim base table storage checkpoint export store data models torch",
    "sklearn": "_core errors optim store data metrics models",
    "cluster.protocol": "_core errors consistency base table.spec",
    "cluster.worker": "_core config errors consistency optim user_functions base table storage checkpoint store "
    "cluster.protocol",
    "cluster.server": "_core config errors user_optimizer user_functions base table storage checkpoint store "
    "cluster.protocol",
    "cluster.scheduler": "errors config base table.spec cluster.protocol",
    "cluster.launch": "errors config consistency base table storage store cluster.protocol cluster.worker "
    "cluster.server cluster.scheduler",
    "cluster": "",
    "ray": "_core config errors consistency base table storage checkpoint export store data models torch serve "
    "cluster.protocol cluster.worker cluster.server cluster.scheduler cluster.launch",
    "tools.permutation": "base data metrics models torch",
    "tools": "base tools.convert tools.permutation tools.jobs tools.reports tools.sizing",
    "tools.reports": "errors optim base storage checkpoint store data metrics models torch",
    "tracking": "errors base storage store metrics models tools.reports tools.load",
    "tools.sizing": "_core errors optim base table store",
    "tools.jobs": "consistency optim base table store data models cluster.worker cluster.launch tools.planted",
    "tools.doctor": "_core base optim tools.sizing",
    "tools.convert": "_core errors base table storage store data",
    "tools.planted": "_core metrics",
    "tools.load": "errors storage checkpoint export store models torch",
    "lineage": "_core errors consistency user_functions base table storage checkpoint store data metrics models torch "
    "cluster.protocol cluster.worker cluster.launch tools.load",
    "cli": "_core config errors consistency optim lifecycle base table storage checkpoint export store data metrics "
    "models torch serve cluster cluster.protocol cluster.worker cluster.server cluster.scheduler cluster.launch "
    "ray lineage tools.permutation tools.jobs tools.reports tools.sizing tools.doctor tools.convert tracking",
    "__main__": "cli",
    "__init__": "errors consistency schedules optim user_optimizer user_functions lifecycle base table checkpoint "
    "export lineage store data metrics models sketches torch serve sklearn cluster.worker cluster.launch ray tools "
    "tools.load tracking",
}

# A room that may use another one may use these modules of it, which rooms further down use too.
for _uses in PYTHON:
    if "table" in PYTHON[_uses].split():
        PYTHON[_uses] += " table.spec table.arrays"

# The folders that _reader.pyx, and C++ headers next to it, may use.
READER_HEADERS = "text"

# Heavy or optional: imported inside the function that needs them, never by `import shoal`.
LAZY = {
    "backports",
    "confluent_kafka",
    "fsspec",
    "google",
    "grpc",
    "matplotlib",
    "mlflow",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "opentelemetry",
    "prometheus_client",
    "pyarrow",
    "ray",
    "scipy",
    "sklearn",
    "starlette",
    "tensorboard",
    "torch",
    "torchrec",
    "tqdm",
    "zmq",
}

# Modules for an optional library, which they import at their top; no other module may import them.
FOR_ITS_OWN = {
    "sklearn": {"scipy", "sklearn"},
    "cluster.protocol": {"prometheus_client", "zmq"},
    "cluster.worker": {"zmq"},
    "cluster.server": {"zmq"},
    "cluster.scheduler": {"zmq"},
    "cluster.launch": {"zmq"},
    "ray": {"pyarrow", "ray", "starlette", "zmq"},
    "torch": {"torch"},
    "serve": {"google", "grpc", "prometheus_client"},
}

# C++ patterns that only one place may contain.
ONLY_IN = [
    (re.compile(r"\bmmap\s*\("), "mmap", {"base/memory.cc"}),
    (re.compile(r"\bstd::j?thread\b(?!::)|\bstd::async\b|\bpthread_create\b"), "a thread start", {"base/threads.cc"}),
    (re.compile(r"\bgetenv\b"), "reading the environment", set()),
]

# Greatest length of a source file, unless its top has a line "Over 600 lines: " with the reason.
MOST_LINES = 600

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]')
CYTHON_EXTERN = re.compile(r'^\s*cdef\s+extern\s+from\s+"([^"]+)"')
# Strings are matched first, so that a // inside one is not a comment.
COMMENT_OR_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text: str) -> str:
    """Replace C++ comments by as many line ends as they hold."""
    return COMMENT_OR_STRING.sub(lambda m: m[0] if m[0].startswith('"') else "\n" * m[0].count("\n"), text)


def may_use(table: dict[str, str], user: str, used: str) -> bool:
    """Return whether ``user`` may depend on ``used``; both are names of the table."""
    return user == used or used in table[user].split()


def check_csrc(root: Path) -> Iterator[str]:
    """Yield the violations in ``csrc`` and in the C++ headers of the reader."""
    csrc = root / "csrc"
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cc"}):
        name = path.relative_to(csrc).as_posix()
        folder = name.split("/")[0]
        where = path.relative_to(root).as_posix()
        if folder not in CSRC or name.count("/") != 1:
            yield f"{where}:1: csrc/{Path(name).parent.as_posix()} is not in the table of tools/check_layers.py"
            continue
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1):
            for pattern, what, places in ONLY_IN:
                if pattern.search(line) and name not in places:
                    yield f"{where}:{number}: {what} belongs in {' or '.join(sorted(places)) or 'no file of csrc'}"
            found = INCLUDE.match(line)
            if not found:
                continue
            quoted, header = found[1] == '"', found[2]
            if folder != "bind" and re.match(r"pybind11/|Python\.h$|numpy/", header):
                yield f"{where}:{number}: {header} is for bind only"
            elif quoted and header.split("/")[0] not in CSRC:
                yield f'{where}:{number}: "{header}": write "folder/file.h", from csrc on'
            elif quoted and not may_use(CSRC, folder, header.split("/")[0]):
                yield f"{where}:{number}: {folder} may not include {header} (only: {CSRC[folder] or 'itself'})"

    package = root / "python" / "shoal"
    for path in sorted(p for p in package.rglob("*") if p.suffix in {".h", ".pyx", ".pxd"}):
        where = path.relative_to(root).as_posix()
        text = path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            found = CYTHON_EXTERN.match(line) if path.suffix != ".h" else INCLUDE.match(line)
            header = found[found.lastindex or 0] if found else ""
            folder = header.split("/")[0]
            if folder in CSRC and folder not in READER_HEADERS.split():
                yield f"{where}:{number}: the reader may not include {header} (only: {READER_HEADERS})"
            elif re.match(r"pybind11/", header):
                yield f"{where}:{number}: {header} is for csrc/bind only"


def room_of(module: list[str]) -> str:
    """Return the room of a module: the longest beginning of its name that is in the table; an empty string: none."""
    names = (".".join(module[:length]) for length in range(len(module), 0, -1))
    return next((name for name in names if name in PYTHON), "")


@functools.cache
def imports_of(text: str, where: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return the imports of a file, and whether each runs when the module is imported.

    Those in functions and under ``if TYPE_CHECKING`` do not. Statements alone are looked at: no expression imports.
    """
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []

    def collect(block: Iterable[ast.AST], runs: bool) -> None:
        for node in block:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.append((node, runs))
            inner = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                is_typing = name == "body" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
                collect(getattr(node, name, ()), inner and not is_typing)

    collect([ast.parse(text, where)], True)
    return found


def shoal_imports(path: Path, package: Path, nodes: Iterable[ast.Import | ast.ImportFrom]) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for each module of shoal that a file imports; ``__init__`` stands for the package itself."""
    here = ["shoal", *path.relative_to(package).with_suffix("").parts]
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            base = here[: len(here) - node.level] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            # `from shoal import table` names a module, or something that the package exports.
            names = [[*base, alias.name] for alias in node.names]
        for name in names:
            if name[0] == "shoal":
                yield node.lineno, room_of(name[1:]) or "__init__"


def check_python(root: Path) -> Iterator[str]:
    """Yield the violations in ``python/shoal``."""
    package = root / "python" / "shoal"
    for path in sorted(p for p in package.rglob("*") if p.suffix in {".py", ".pyi"}):
        where = path.relative_to(root).as_posix()
        parts = list(path.relative_to(package).with_suffix("").parts)
        module = room_of(parts)
        if not module:
            yield f"{where}:1: shoal.{parts[0]} is not in the table of tools/check_layers.py"
            continue
        imports = imports_of(path.read_text(), where)
        for line, used in shoal_imports(path, package, (node for node, _ in imports)):
            if not may_use(PYTHON, module, used):
                yield f"{where}:{line}: {module} may not import {used} (only: {PYTHON[module] or 'nothing of shoal'})"
        for node, runs in imports:
            if not runs:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [] if node.level else [node.module or ""]
            for name in names:
                if name.split(".")[0] in LAZY - FOR_ITS_OWN.get(module, set()):
                    yield f"{where}:{node.lineno}: import {name} inside the function that needs it"


def module_imports(root: Path) -> dict[str, set[str]]:
    """Return the modules of shoal that each module imports: anywhere in it, including for type checkers."""
    files, package = {}, root / "python" / "shoal"
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports = {}
    for name, path in files.items():
        # __init__ of a package is a module within it, as far as relative imports are concerned.
        here = ["shoal", *path.relative_to(package).with_suffix("").parts]
        found = set()
        for node, _ in imports_of(path.read_text(), path.relative_to(root).as_posix()):
            if isinstance(node, ast.Import):
                found |= {alias.name.removeprefix("shoal.") for alias in node.names if alias.name.startswith("shoal.")}
            else:
                base = here[: len(here) - node.level] if node.level else []
                base += (node.module or "").split(".") if node.module else []
                if base[:1] == ["shoal"]:
                    for alias in node.names:
                        inner = ".".join([*base[1:], alias.name])
                        found.add(inner if inner in files else ".".join(base[1:]))
        imports[name] = {other for other in found if other in files and other not in ("", name)}
    return imports


def check_circles(root: Path) -> Iterator[str]:
    """Yield the modules of shoal that import each other, directly or through others."""
    imports = module_imports(root)
    reached: dict[str, set[str]] = {name: set() for name in imports}
    for name in imports:
        front = [name]
        while front:
            for other in imports[front.pop()] - reached[name]:
                reached[name].add(other)
                front.append(other)
    seen: set[str] = set()
    for name in sorted(imports):
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and name not in seen:
            seen |= circle
            yield f"python/shoal:1: a circle of imports: {', '.join(sorted(circle))}"


def check_lengths(root: Path) -> Iterator[str]:
    """Yield the source files that are too long without a reason."""
    for path in sorted(path for top in ("csrc", "python") for path in (root / top).rglob("*")):
        if path.suffix in {".h", ".cc", ".py", ".pyx", ".pxi"}:
            lines = path.read_text().splitlines()
            if len(lines) > MOST_LINES and not any("Over 600 lines: " in line for line in lines[:60]):
                where = path.relative_to(root).as_posix()
                yield f'{where}:1: {len(lines)} lines: split it, or give the reason at its top, "Over 600 lines: ..."'


def check(root: Path) -> list[str]:
    """Return all violations in the tree at ``root``."""
    return [*check_csrc(root), *check_python(root), *check_circles(root), *check_lengths(root)]


def main() -> int:
    """Run from the command line."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
