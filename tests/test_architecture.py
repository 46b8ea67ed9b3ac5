"""The architecture of the package, read from its source: which modules are pure, and which may import which.

Nothing is imported for this, so a module that is broken or needs torch is judged like any other.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ckpt_async"
HERE = "tests/test_architecture.py"

# From top to bottom. A room is a folder of the package, or one of the modules beside the folders. A room
# imports only from the rooms below it, never from those above or beside it; this includes lazy imports and
# imports for types.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("integrations", "cli"),
    ("__init__",),  # the public names, `ckpt_async` itself
    ("watch", "saver"),
    ("torch",),
    ("doctor",),
    ("trainer", "restore"),
    ("sweep", "runners"),
    ("engine", "events", "page"),
    ("protocol", "monitor"),
    ("transfer",),
    ("stores", "local", "formats"),
    ("core",),
    ("private", "filesystems"),
    ("errors", "threads", "niceness", "serving"),
)
DEPTH = {name: depth for depth, rooms in enumerate(ROOMS) for name in rooms}

# Pure modules: values in, values out. A name stands for the module and, if it is a room, for all modules in
# it.
PURE = (
    *("errors", "core", "formats", "protocol.sweep_plan", "transfer.concurrency", "doctor.diagnosis"),
    *("saver.timestamp", "saver.schedule", "saver.auto", "saver.names"),
)
IMPURE_IMPORTS = {
    *("asyncio", "multiprocessing", "os", "random", "secrets", "shutil", "socket", "subprocess"),
    *("tempfile", "threading", "time"),
    *("aiobotocore", "aiofiles", "aiohttp", "awscrt", "botocore", "prometheus_client", "tenacity", "torch"),
}
# Above `transfer`, every request goes through the patient store. What makes single attempts may be imported
# there only by the doctor, which measures it.
ONE_ATTEMPT = tuple(
    f"ckpt_async.stores.{name}."
    for name in ("interface.Store", "open_store", "s3", "azure", "directory", "memory")
)
MAY_MAKE_ONE_ATTEMPT = {"stores", "transfer", "doctor"}
MAY_IMPORT_TORCH = {"torch", "saver", "integrations"}
# The modules that users of the package import. An adapter may import only these, because a user could have
# written it.
PUBLIC = {"__init__", "errors", "formats", "restore", "torch", "saver"}


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


def _room(module: str) -> str:
    """Return the name under which ROOMS lists a module of the package: ckpt_async.stores.s3.client -> stores."""
    return module.split(".")[1] if "." in module else "__init__"


def _is_pure(module: str) -> bool:
    within = module.removeprefix(f"{PACKAGE}.")
    return any(within == name or within.startswith(f"{name}.") for name in PURE)


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
    """Return every breach of the architecture in {path below the root: source}, one line each."""
    modules = {_module_name(path) for path in sources}
    graph: dict[str, set[str]] = {}
    problems: list[str] = []
    for path, source in sorted(sources.items()):
        module = _module_name(path)
        room = _room(module)
        if room not in DEPTH:
            problems.append(
                f"{path}: {room!r} is no room: put the module into one, or add it to ROOMS in {HERE}"
            )
            continue
        tree = ast.parse(source, path)
        imports = list(_imports(path, tree))
        if _is_pure(module):
            problems += _impurities(path, tree, imports)
        for found in imports:
            if found.root == "torch" and room not in MAY_IMPORT_TORCH:
                allowed = ", ".join(sorted(MAY_IMPORT_TORCH))
                problems.append(f"{path}:{found.line}: only {allowed} may import torch, even lazily")
            if found.root != PACKAGE:
                continue
            target = found.dotted if found.dotted in modules else found.module
            other = _room(target)
            if other != room and DEPTH.get(other, len(ROOMS)) <= DEPTH[room]:
                problems.append(f"{path}:{found.line}: {room} must not import {other}, which is not below it")
            if room not in MAY_MAKE_ONE_ATTEMPT and f"{found.dotted}.".startswith(ONE_ATTEMPT):
                problems.append(
                    f"{path}:{found.line}: {room} must not import {found.dotted}: it is not patient"
                )
            if room == "integrations" and other not in PUBLIC | {room}:
                problems.append(
                    f"{path}:{found.line}: integrations may import the public API only, not {other}"
                )
            if other in MAY_IMPORT_TORCH and found.runs_at_import and room not in MAY_IMPORT_TORCH:
                problems.append(f"{path}:{found.line}: {room} may import {target} inside a function only")
            if target != module:
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


# Lines of code. Docstrings do not count: a long docstring is no reason to split a public function.
MOST_LINES = {"file": 800, "class": 400, "function": 60}


def _code_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines without docstrings, neither its own nor nested ones."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = (
        each.body[0] for each in ast.walk(node) if isinstance(each, documented) and ast.get_docstring(each)
    )
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1 - sum((each.end_lineno or 0) - each.lineno + 1 for each in docs)


def oversized(sources: Mapping[str, str]) -> list[str]:
    found = []
    for path, source in sorted(sources.items()):
        if (lines := source.count("\n")) > MOST_LINES["file"]:
            found.append(f"{path} has {lines} lines")
        for node in ast.walk(ast.parse(source, path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                if (lines := _code_lines(node)) > MOST_LINES[kind]:
                    found.append(f"{path}:{node.lineno}: {kind} {node.name} has {lines} lines of code")
    return found


def test_nothing_is_too_large_to_be_read_at_once() -> None:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    found = oversized({path.relative_to(ROOT).as_posix(): path.read_text() for path in files})
    assert not found, "\n" + "\n".join(found)


def test_what_is_too_large_is_reported_and_docstrings_do_not_count() -> None:
    body = "\n".join(f"    a{n} = {n}" for n in range(60))
    doc = '    """' + "\n" * 100 + '    """\n'
    assert not oversized({"a.py": f"def f():\n{doc}{body[: body.index('    a59')]}"})
    assert oversized({"a.py": f"def f():\n{body}\n"}) == ["a.py:1: function f has 61 lines of code"]
    long = "\n".join(f"    def m{n}(self): ..." for n in range(400))
    assert oversized({"a.py": f"class C:\n{long}\n"}) == ["a.py:1: class C has 401 lines of code"]
    assert oversized({"a.py": "\n" * 801}) == ["a.py has 801 lines"]


def test_every_room_says_what_lives_there() -> None:
    for room in sorted(DEPTH):
        if (ROOT / PACKAGE / room).is_dir():
            doc = ast.get_docstring(ast.parse((ROOT / PACKAGE / room / "__init__.py").read_text()))
            assert doc, room


def test_importing_the_package_needs_nothing_heavy() -> None:
    heavy = ["torch", "aiobotocore", "prometheus_client", "aiohttp"]
    code = f"import sys, {PACKAGE}; print(*sorted(sys.modules.keys() & set({heavy})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_no_pattern_has_a_possessive_group() -> None:
    """CPython matches those wrongly before 3.11.5 (gh-106052): on Debian 12, no answer of S3 was understood."""
    calls = [
        each
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Call) and ast.unparse(each.func).startswith("re.")
    ]
    assert len(calls) > 20
    possessive = re.compile(r"\)(?:[*+?]|\{[0-9,]+\})\+|\(\?>")
    assert [text for each in calls if possessive.search(text := ast.unparse(each))] == []


def test_allowed_imports_are_not_reported() -> None:
    assert not violations(
        {
            "ckpt_async/__init__.py": "from .errors import Oops\nfrom ckpt_async.trainer.uploader import Uploader",
            "ckpt_async/errors.py": "",
            "ckpt_async/core/keys.py": "import re\nfrom pathlib import PurePosixPath\nfrom ..errors import Oops",
            "ckpt_async/core/model.py": "if TYPE_CHECKING:\n    from .keys import Key",
            "ckpt_async/core/decide.py": "from ckpt_async.core import keys, model",
            "ckpt_async/protocol/steps.py": "import os\nfrom ckpt_async.core import model",
            "ckpt_async/stores/__init__.py": "def s3():\n    from .s3.client import S3\n    return S3",
            "ckpt_async/stores/s3/client.py": "import aiobotocore, os\nfrom ...errors import X\nfrom . import signing",
            "ckpt_async/stores/s3/signing.py": "",
            "ckpt_async/trainer/uploader.py": "import time\nfrom ..core.decide import decide\nfrom ..runners import x",
            "ckpt_async/torch/saver.py": "import torch\nfrom ckpt_async.trainer.uploader import Uploader",
            "ckpt_async/integrations/lightning.py": "from .files import x\nfrom ckpt_async import restore, torch",
            "ckpt_async/integrations/files.py": "from ckpt_async.torch.saver import Saver",
            "ckpt_async/cli/main.py": "def load():\n    from ckpt_async.torch import saver",
        }
    )


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("core/decide.py", "import os", "decide.py:1: pure, so it must not import os"),
        ("core/decide.py", "x = 1\nimport os.path as p", "decide.py:2: pure, so it must not import os"),
        ("core/model.py", "from time import monotonic", "must not import time"),
        ("core/retention.py", "def f():\n    import random", "retention.py:2: pure"),
        ("core/keys.py", "from pathlib import PurePosixPath, Path", "may import PurePosixPath only"),
        ("core/keys.py", "import pathlib", "may import PurePosixPath only"),
        (
            "core/naming.py",
            "def f(p):\n    with open(p): ...",
            "naming.py:2: pure, so it must not call open()",
        ),
        ("core/settings.py", "t = __import__('time')", "must not call __import__()"),
        ("protocol/sweep_plan.py", "import os", "sweep_plan.py:1: pure, so it must not import os"),
        ("doctor/diagnosis.py", "import socket", "diagnosis.py:1: pure, so it must not import socket"),
        ("errors.py", "from .core.model import Shard", "errors must not import core, which is not below it"),
        ("core/keys.py", "import ckpt_async.engine.loop", "core must not import engine"),
        ("engine/loop.py", "from ckpt_async import Uploader", "engine must not import __init__"),
        ("stores/s3/client.py", "from ...transfer import Parts", "stores must not import transfer"),
        (
            "stores/directory.py",
            "from ..local import folder",
            "stores must not import local, which is not below it",
        ),
        (
            "stores/directory.py",
            "async def f():\n    from ..engine import x",
            "directory.py:2: stores must not import engine",
        ),
        (
            "stores/interface.py",
            "if TYPE_CHECKING:\n    from ..engine.loop import Engine",
            "stores must not import engine",
        ),
        ("sweep/sweeper.py", "def f():\n    import torch.distributed", "may import torch, even lazily"),
        ("__init__.py", "import torch", "may import torch, even lazily"),
        (
            "cli/pull.py",
            "from ..torch import saver",
            "cli may import ckpt_async.torch.saver inside a function only",
        ),
        (
            "torch/saver.py",
            "def f():\n    from ..integrations import x",
            "torch must not import integrations",
        ),
        ("integrations/x.py", "from ..engine import x", "the public API only, not engine"),
        ("trainer/uploader.py", "try: from ..torch import x\nfinally: ...", "trainer must not import torch"),
        (
            "sweep/sweeper.py",
            "from ..stores.interface import ObjectInfo, Store",
            "sweep must not import ckpt_async.stores.interface.Store: it is not patient",
        ),
        ("cli/pull.py", "def f():\n    from ckpt_async.stores import open_store", "it is not patient"),
        ("restore/session.py", "from ..stores.s3.client import S3Store", "it is not patient"),
        ("helpers.py", "", f"'helpers' is no room: put the module into one, or add it to ROOMS in {HERE}"),
        ("helpers/deep.py", "", "'helpers' is no room"),
    ],
)
def test_each_violation_is_found(path: str, source: str, complaint: str) -> None:
    names = (
        "__init__",
        "errors",
        "core/model",
        "local/folder",
        "engine/loop",
        "torch/__init__",
        "torch/saver",
        "integrations/__init__",
    )
    others = {f"ckpt_async/{name}.py": "" for name in names}
    assert complaint in "\n".join(violations(others | {f"ckpt_async/{path}": source}))


def test_an_import_cycle_is_found() -> None:
    cycle = {
        "ckpt_async/core/keys.py": "from .naming import a",
        "ckpt_async/core/naming.py": "from ckpt_async.core import records",
        "ckpt_async/core/records.py": "if 1:\n    import ckpt_async.core.keys",
    }
    (found,) = violations(cycle)
    assert found.startswith("import cycle: ")
    assert all(f"ckpt_async.core.{name}" in found for name in ("keys", "naming", "records"))
    lazily = cycle | {"ckpt_async/core/records.py": "def f():\n    import ckpt_async.core.keys"}
    for_types = cycle | {
        "ckpt_async/core/records.py": "if typing.TYPE_CHECKING:\n    import ckpt_async.core.keys"
    }
    assert violations(lazily)
    assert violations(for_types)


def test_every_room_is_on_one_floor() -> None:
    assert len(DEPTH) == sum(len(rooms) for rooms in ROOMS)


def test_tests_take_nothing_from_other_test_modules() -> None:
    """Shared code belongs in a helper module. There are two exceptions: the mutants run other modules' tests, and the
    drawing is compared with ROOMS.
    """
    takers = {"sweep/test_upkeep_mutants.py", "test_docs.py"}
    folder = ROOT / "tests"
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for each in _imports(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
        if each.root == "tests" and any(part.startswith("test_") for part in each.dotted.split("."))
    }
    assert found == takers
