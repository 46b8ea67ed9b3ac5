"""The shape of the package, read from its source: which modules are pure, and which may import which.

Nothing is imported to find this out, so a module that is broken or needs torch is judged like any other.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ckpt_async"
HERE = "tests/test_architecture.py"

# Top to bottom. A module imports from its own layer and from those below it, never from above: lazily and for
# types too. A name stands for the module and, if it is a package, for all that is in it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("integrations",),
    ("__main__", "cli", "demo", "torch"),
    ("__init__",),  # the public names, `ckpt_async` itself
    ("uploader", "sweeper", "restore", "preemption", "doctor"),
    ("at_exit",),
    ("runners",),
    ("drain", "status", "verify"),
    ("engine", "generation", "metrics", "protocol"),
    ("holdings",),
    ("ahead", "transfer", "requests", "conditional", "kept"),
    ("stores", "journals", "journal", "shared_journal", "journal_rows", "database", "files", "shard_writer"),
    ("filesystems", "host_mark"),
    ("checksums", "concurrency", "diagnosis", "pickled", "plan"),
    ("store", "observe", "politeness", "threads"),
    ("decide", "failures"),
    (
        "arguments",
        "launch",
        "retention",
        "records",
        "keys",
        "naming",
        "settings",
        "model",
        "units",
        "troubles",
    ),
    ("errors",),
)
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

PURE = {
    "errors",
    "settings",
    "model",
    "keys",
    "launch",
    "naming",
    "records",
    "retention",
    "decide",
    "plan",
    "concurrency",
    "diagnosis",
    "pickled",
    "failures",
    "arguments",
    "units",
    "troubles",
}
IMPURE_IMPORTS = {
    *("asyncio", "multiprocessing", "os", "random", "secrets", "shutil", "socket", "sqlite3", "subprocess"),
    *("tempfile", "threading", "time"),
    *("aiobotocore", "aiofiles", "aiohttp", "awscrt", "botocore", "prometheus_client", "tenacity", "torch"),
}
MAY_IMPORT_TORCH = {"torch", "integrations", "demo"}
# What users of the package import, and nothing else: an adapter is what a user could have written.
PUBLIC = {"__init__", "errors", "restore", "torch"}


@dataclass(frozen=True)
class Import:
    """One imported name, as `module` and, for `from module import name`, `name`."""

    module: str
    name: str
    line: int
    runs_at_import: bool  # neither inside a function nor under TYPE_CHECKING

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


def _module_name(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def _entry(module: str) -> str:
    """The name under which LAYERS lists a module of the package: ckpt_async.stores.s3 -> stores."""
    return module.split(".")[1] if "." in module else "__init__"


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(path: str, node: ast.AST, runs_at_import: bool = True) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno, runs_at_import)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                package = PurePosixPath(path).parts[: -child.level]
                base = ".".join([*package, *([base] if base else [])])
            for alias in child.names:
                yield Import(base, alias.name, child.lineno, runs_at_import)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(path, child, runs_at_import=False)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports(path, ast.Module(child.body, []), runs_at_import=False)
            yield from _imports(path, ast.Module(child.orelse, []), runs_at_import)
        else:
            yield from _imports(path, child, runs_at_import)


def _impurities(path: str, tree: ast.Module, imports: list[Import]) -> Iterator[str]:
    for found in imports:
        if found.root in IMPURE_IMPORTS:
            yield f"{path}:{found.line}: pure, so it must not import {found.root}"
        if found.root == "pathlib" and not found.name.startswith("Pure"):
            yield f"{path}:{found.line}: pure, so from pathlib it may import PurePosixPath only"
    for node in ast.walk(tree):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called in ("open", "__import__"):
            yield f"{path}:{node.lineno}: pure, so it must not call {called}()"


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every breach of the architecture in {path below the root: source}, one line each."""
    modules = {_module_name(path) for path in sources}
    graph: dict[str, set[str]] = {}
    problems: list[str] = []
    for path, source in sorted(sources.items()):
        module = _module_name(path)
        entry = _entry(module)
        if entry not in DEPTH:
            problems.append(f"{path}: {entry!r} is in no layer: add it to LAYERS in {HERE}")
            continue
        tree = ast.parse(source, path)
        imports = list(_imports(path, tree))
        if entry in PURE:
            problems += _impurities(path, tree, imports)
        for found in imports:
            if found.root == "torch" and entry not in MAY_IMPORT_TORCH:
                allowed = ", ".join(sorted(MAY_IMPORT_TORCH))
                problems.append(f"{path}:{found.line}: only {allowed} may import torch, even lazily")
            if found.root != PACKAGE:
                continue
            target = found.dotted if found.dotted in modules else found.module
            above = _entry(target)
            if DEPTH.get(above, len(LAYERS)) < DEPTH[entry]:
                problems.append(f"{path}:{found.line}: {entry} must not import {above}, which is above it")
            if entry == "integrations" and above not in PUBLIC | {entry}:
                problems.append(
                    f"{path}:{found.line}: integrations may import the public API only, not {above}"
                )
            needs_torch = {"torch", "integrations"}
            if above in needs_torch and found.runs_at_import and entry not in needs_torch | {"demo"}:
                problems.append(f"{path}:{found.line}: {entry} may import {target} inside a function only")
            if found.runs_at_import and target != module:
                graph.setdefault(module, set()).add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        problems.append(f"import cycle: {' -> '.join(reversed(error.args[1]))}")
    return problems


def test_the_package_keeps_its_shape() -> None:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert files
    found = violations({path.relative_to(ROOT).as_posix(): path.read_text() for path in files})
    assert not found, "\n" + "\n".join(found)


def test_importing_the_package_needs_nothing_heavy() -> None:
    heavy = ["torch", "aiobotocore", "prometheus_client", "aiohttp"]
    code = f"import sys, {PACKAGE}; print(*sorted(sys.modules.keys() & set({heavy})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_what_is_allowed_is_not_complained_about() -> None:
    assert not violations(
        {
            "ckpt_async/__init__.py": "from .errors import Oops\nfrom ckpt_async.uploader import Uploader",
            "ckpt_async/errors.py": "",
            "ckpt_async/keys.py": "import re\nfrom pathlib import PurePosixPath\nfrom .errors import Oops",
            "ckpt_async/model.py": "if TYPE_CHECKING:\n    from .keys import Key",
            "ckpt_async/decide.py": "from ckpt_async import keys, model",
            "ckpt_async/stores/__init__.py": "def s3():\n    from .s3 import S3\n    return S3",
            "ckpt_async/stores/s3.py": "import aiobotocore, os\nfrom ..errors import X\nfrom . import s3",
            "ckpt_async/uploader.py": "import time\nfrom .decide import decide\nfrom .stores.s3 import S3",
            "ckpt_async/torch/saver.py": "import torch\nfrom ckpt_async import Uploader",
            "ckpt_async/integrations/lightning.py": "from .files import x\nfrom ckpt_async import restore, torch",
            "ckpt_async/integrations/files.py": "from ckpt_async.torch.saver import Saver",
            "ckpt_async/cli.py": "def load():\n    from ckpt_async.torch import saver",
            "ckpt_async/demo/__main__.py": "import torch\nfrom ..torch.saver import Saver",
        }
    )


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("decide.py", "import os", "decide.py:1: pure, so it must not import os"),
        ("decide.py", "x = 1\nimport os.path as p", "decide.py:2: pure, so it must not import os"),
        ("model.py", "from time import monotonic", "must not import time"),
        ("retention.py", "def f():\n    import random", "retention.py:2: pure"),
        ("keys.py", "from pathlib import PurePosixPath, Path", "may import PurePosixPath only"),
        ("keys.py", "import pathlib", "may import PurePosixPath only"),
        ("naming.py", "def f(p):\n    with open(p): ...", "naming.py:2: pure, so it must not call open()"),
        ("settings.py", "t = __import__('time')", "must not call __import__()"),
        ("errors.py", "from .model import Shard", "errors must not import model, which is above it"),
        ("errors.py", "from ckpt_async import model", "errors must not import model"),
        ("store.py", "import ckpt_async.engine", "store must not import engine"),
        ("engine.py", "from ckpt_async import Uploader", "engine must not import __init__"),
        ("stores/s3.py", "from ..transfer import Parts", "stores must not import transfer"),
        (
            "stores/s3.py",
            "async def f():\n    from ..engine import x",
            "s3.py:2: stores must not import engine",
        ),
        ("store.py", "if TYPE_CHECKING:\n    from .engine import Engine", "store must not import engine"),
        ("sweeper.py", "def f():\n    import torch.distributed", "may import torch, even lazily"),
        ("__init__.py", "import torch", "may import torch, even lazily"),
        (
            "cli.py",
            "from .torch import saver",
            "cli may import ckpt_async.torch.saver inside a function only",
        ),
        (
            "torch/saver.py",
            "def f():\n    from ..integrations import x",
            "torch must not import integrations",
        ),
        ("integrations/x.py", "from ..engine import x", "the public API only, not engine"),
        ("uploader.py", "try: from .torch import x\nfinally: ...", "uploader must not import torch"),
        ("helpers.py", "", f"'helpers' is in no layer: add it to LAYERS in {HERE}"),
        ("helpers/deep.py", "", "'helpers' is in no layer"),
    ],
)
def test_a_violation_is_found(path: str, source: str, complaint: str) -> None:
    names = (
        "__init__",
        "errors",
        "model",
        "engine",
        "torch/__init__",
        "torch/saver",
        "integrations/__init__",
    )
    others = {f"ckpt_async/{name}.py": "" for name in names}
    assert complaint in "\n".join(violations(others | {f"ckpt_async/{path}": source}))


def test_an_import_cycle_is_found() -> None:
    cycle = {
        "ckpt_async/keys.py": "from .naming import a",
        "ckpt_async/naming.py": "from ckpt_async import records",
        "ckpt_async/records.py": "if 1:\n    import ckpt_async.keys",
    }
    (found,) = violations(cycle)
    assert found.startswith("import cycle: ")
    assert all(f"ckpt_async.{name}" in found for name in ("keys", "naming", "records"))
    lazily = cycle | {"ckpt_async/records.py": "def f():\n    import ckpt_async.keys"}
    for_types = cycle | {"ckpt_async/records.py": "if typing.TYPE_CHECKING:\n    import ckpt_async.keys"}
    assert not violations(lazily)
    assert not violations(for_types)


def test_every_module_is_in_one_layer() -> None:
    assert len(DEPTH) == sum(len(layer) for layer in LAYERS)
    assert DEPTH.keys() >= PURE
