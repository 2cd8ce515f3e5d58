"""The rules that a machine can check: linters, types, layers of imports, words, sizes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashattn_jit import _C, forwards, late_binding

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashattn_jit"

LAYERS = (
    ("errors", "env", "_version", "_extension", "_C", "late_binding", "torch_modes"),
    ("variants.ir",),
    ("variants.params", "variants.builtins", "variants.counterparts"),
    ("variants.interval", "variants.capture"),
    ("variants.lower", "variants.trace"),
    ("variants.binding", "variants.value_checks"),
    ("variants",),  # variant, reference, compose
    ("variants.library", "formats", "stored_hooks"),
    ("codegen",),
    ("planner",),
    ("jit.cache",),
    ("jit.compilation",),
    ("jit",),  # module
    ("jit.emulator",),
    ("ops.arguments", "ops.device"),
    ("ops.keys",),
    ("ops.planning",),
    ("ops.launching",),
    ("ops.torch_ops",),
    ("ops",),  # the calls
    ("kv",),
    ("distributed",),
    ("deploy",),
    ("inspect",),
    ("integrations",),
    ("cli",),
    ("forwards", "__main__", "__init__"),
)
"""Parts of the package, lowest first: a part imports from its own layer and from lower ones. A
file belongs to the longest name that it begins with."""

MOST_FILES = 16
"""Files in a folder, ``__init__.py`` not counted."""

IMPORTED_FREELY = {"torch", "numpy", "flashattn_jit", "typing_extensions"}
IMPORTED_WHEN_NEEDED = {
    "jinja2": {"codegen/render.py"},
    "ninja": {"jit"},
    "platformdirs": {"env.py"},
    "transformers": {"integrations"},
    "tqdm": {"integrations"},  # a requirement of transformers
    "matplotlib": {"inspect"},
    "click": {"cli"},
    "rich": {"cli", "deploy/warm/progress.py"},
    "fsspec": {"jit"},
    "ray": {"deploy/warm/ray_executor.py"},
    "prometheus_client": {"kv/metrics.py"},
}
"""Libraries beyond torch and numpy, and the files or folders that may import them."""

SYNONYMS = re.compile(
    r"\b(seqlens?|seq_?len\w*|q_seqlen\w*|cu_seqlens\w*|n_?heads?|num_heads|num_kv_head|head_size"
    r"|head_num|sm_scale|softmax_scale|block_[mn]|group_num|qo_len|kv_length|q_length|pagesize"
    r"|n_splits|nsplits|num_split)\b",
    re.IGNORECASE,
)
"""Words for which the project has another: q_len, kv_len, num_q_heads, head_dim, tile_q, ..."""

FOREIGN_API = (
    "flashattn_jit/integrations", "flashattn_jit/ops/flex", "flashattn_jit/ops/sdpa",
    "flashattn_jit/variants/counterparts",
)  # fmt: skip
"""Where other libraries' argument names are spelled as they spell them."""

PRIVATE_PLACES = re.compile(r"(?<![\w.~])/(?:home|root|opt|work|Users)/|\bissues? #?\d|\bpull/\d")
"""Text that means something on one machine or in one tracker only."""


def sources(*folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return [
        p
        for p in found
        if p.is_file() and p.suffix in suffixes and not {"__pycache__", "_data"} & set(p.parts)
    ]


PYTHON = sources("flashattn_jit", suffixes=(".py",))
CODE = sources("flashattn_jit", "csrc", "templates", suffixes=(".py", ".pyi", ".h", ".cpp", ".j2"))
WRITTEN = sources(
    *("flashattn_jit", "csrc", "templates", "tests", "benchmarks", "examples", "docs"),
    suffixes=(".py", ".pyi", ".h", ".c", ".cpp", ".cu", ".j2", ".md"),
)
NATIVE = sources("csrc", "benchmarks", "tests", suffixes=(".h", ".cpp", ".cu"))
TEXT = [
    *CODE,
    *sources("tests", "examples", "benchmarks", "docs", ".ci", suffixes=(".py", ".md", ".cpp", "")),
    *ROOT.glob("*.md"),
    ROOT / "pyproject.toml",
    ROOT / "setup.py",
]


def absolute(node: ast.ImportFrom, path: Path) -> list[str]:
    """What `from ... import` names in the file `path`, as ``package.module.name``."""
    package = path.relative_to(ROOT).parts[:-1]
    base = package[: len(package) - node.level + 1] if node.level else ()
    return [".".join((*base, *filter(None, [node.module]), a.name)) for a in node.names]


def run(*command: str) -> None:
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff (extra: test)")
@pytest.mark.parametrize("command", [("check",), ("format", "--check", "--diff")])
def test_ruff_is_content(command: tuple[str, ...]) -> None:
    run("-m", "ruff", *command, "--quiet", ".")


@pytest.mark.skipif(
    importlib.util.find_spec("clang_format") is None, reason="needs clang-format (extra: test)"
)
def test_clang_format_is_content() -> None:
    """Where it fails: ``pre-commit run clang-format --all-files``."""
    program = "import clang_format; clang_format.clang_format()"
    run("-c", program, "--dry-run", "-Werror", *(str(p.relative_to(ROOT)) for p in NATIVE))


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_one_version_of_a_formatter(tool: str) -> None:
    """Two versions would rewrite each other's files."""
    pins = {
        file: set(re.findall(rf"\b{tool}([<>=~!]=?[\w.]+)", (ROOT / file).read_text()))
        for file in (".pre-commit-config.yaml", "pyproject.toml", "constraints.txt")
    }
    (version,) = set.union(*pins.values())
    assert version.startswith("==") and all(pins.values()), pins


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy (extra: test)")
def test_mypy_strict_is_content() -> None:
    run("-m", "mypy")


def test_the_stub_names_the_extensions_arguments() -> None:
    """In their order, as pybind11 has them in the first line of a docstring."""
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    owners: list[tuple[object, list[ast.stmt]]] = [(_C, stub.body)]
    owners += [(getattr(_C, n.name), n.body) for n in stub.body if isinstance(n, ast.ClassDef)]
    wrong = []
    for owner, body in owners:
        for node in body:
            found = getattr(owner, node.name) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or isinstance(found, property):
                continue
            said = re.findall(r"[(,] ?(\w+): ", str(found.__doc__).partition(") ->")[0])
            given = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            if [n for n in said if n != "self"] != [n for n in given if n != "self"]:
                wrong.append(f"line {node.lineno}: {node.name}({', '.join(said)})")
    assert not wrong, "\n".join(wrong)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(absolute module name, line, whether inside a function) of everything that a file imports."""
    tree = ast.parse(path.read_text())
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from flashattn_jit import _C` imports a submodule; other names are of the module.
            names = [module_of(name) for name in absolute(node, path)]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) in inner


def layer(module: str) -> int:
    """The layer of a module of the package: that of the longest name in LAYERS that it has."""
    name = module.removeprefix("flashattn_jit").removeprefix(".") or "__init__"
    words = name.split(".")
    for length in range(len(words), 0, -1):
        for i, parts in enumerate(LAYERS):
            if ".".join(words[:length]) in parts:
                return i
    pytest.fail(f"flashattn_jit.{name} has no layer; give it one in LAYERS")


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    """Also those inside of functions."""
    own = module_name(path)
    for module, line, _ in imports(path):
        if module.split(".")[0] != "flashattn_jit":
            continue
        imported = module_of(module)
        assert layer(imported) <= layer(own), f"{path}:{line}: {own} may not import {imported}"


def test_nothing_private_is_imported_across_packages() -> None:
    """A name or a file with an underscore belongs to its folder and to the folders in that."""
    wrong = []
    for path in PYTHON:
        found = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom))
        for node, name in ((n, name) for n in found for name in absolute(n, path)):
            words = name.split(".")
            private = [i for i, word in enumerate(words) if word.startswith("_")]
            if words[0] != "flashattn_jit" or not private:
                continue
            owner = ROOT.joinpath(*words[: private[0]])
            if not owner.is_dir():  # a module, so the name is private to its folder
                owner = owner.parent
            if owner not in path.parents:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def class_names(tree: ast.AST) -> Iterator[str]:
    """The attributes that a file's classes define: in their bodies, and by ``self.x = ...``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args.posonlyargs + node.args.args
            own = arguments[0].arg if arguments else ""
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == own
                ):
                    yield inner.attr
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                yield part.name
            for target in getattr(part, "targets", [getattr(part, "target", None)]):
                if isinstance(target, ast.Name):
                    yield target.id


def file_names(tree: ast.Module) -> Iterator[str]:
    """The functions, classes and variables that a file defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id


def attribute_reads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every ``x.name`` and ``getattr(x, "name")`` of something other than self, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            owner, name = node.args[0], str(node.args[1].value)
        else:
            continue
        if ast.unparse(owner) not in ("self", "cls", "super()"):
            yield name, node.lineno


def is_private(name: str) -> bool:
    """Whether it begins with one underscore, and is no method or field of named tuples."""
    of_named_tuples = ("_replace", "_asdict", "_fields", "_make")
    return name.startswith("_") and not name.startswith("__") and name not in of_named_tuples


def test_nothing_private_is_read_across_packages() -> None:
    """An attribute with an underscore belongs to the folder of the class or file that defines it.

    A name that no file of the package defines is another library's.
    """
    trees = {path: ast.parse(path.read_text()) for path in PYTHON}
    of_classes: dict[str, set[Path]] = {}
    of_files: dict[str, set[Path]] = {}
    for path, tree in trees.items():
        for found, names in ((of_classes, class_names(tree)), (of_files, file_names(tree))):
            for name in filter(is_private, names):
                found.setdefault(name, set()).add(path.parent)
    wrong = []
    for path, tree in trees.items():
        for name, line in attribute_reads(tree):
            folders = of_classes.get(name) or of_files.get(name, {path.parent})
            if is_private(name) and path.parent not in folders:
                where = ", ".join(sorted(str(f.relative_to(PACKAGE)) for f in folders))
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} is private to {where}")
    assert not wrong, "\n".join(wrong)


def test_folders_hold_what_one_can_look_through() -> None:
    files = Counter(path.parent for path in WRITTEN if path.name != "__init__.py")
    assert {ROOT / "csrc" / "scheduler", ROOT / "tests", ROOT / "templates" / "cuda"} <= set(files)
    full = {str(f.relative_to(ROOT)): count for f, count in files.items() if count > MOST_FILES}
    assert not full, f"folders with more than {MOST_FILES} files: {full}"


def test_what_methods_forward_to_is_provided() -> None:
    """The names that code asks `late_binding.upper` for are those that forwards.py provides.

    `upper` finds them at run time, so that neither mypy nor the tests of layers see a wrong one.
    """
    asked = set()
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                function = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if function == "upper" and node.args:  # str.upper takes no arguments
                    name = node.args[0]
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert isinstance(name, ast.Constant), f"{where}: the name must be a literal"
                    asked.add(name.value)
    assert asked == set(late_binding._FUNCTIONS)
    for name, module in forwards.FORWARDED.items():
        assert callable(getattr(importlib.import_module(f"flashattn_jit.{module}"), name))


def module_of(name: str) -> str:
    """The module that an import of ``a.b`` reads: ``a.b``, or ``a`` where b is a name in it."""
    path = ROOT.joinpath(*name.split("."))
    is_module = path.is_dir() or list(path.parent.glob(f"{path.name}.*"))
    return name if is_module else name.rpartition(".")[0]


def module_name(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_files_import_each_other_in_no_circle() -> None:
    """Imports inside of functions count, those for type checkers alone do not."""
    modules = {module_name(path): path for path in PYTHON}
    del modules["flashattn_jit"]  # which has the extension, and imports what is asked of it
    imported = {
        name: {
            found
            for module, _, _ in imports(path)
            if (found := module if module in modules else module.rpartition(".")[0]) in modules
        }
        - {name}
        for name, path in modules.items()
    }
    reached = {name: set(others) for name, others in imported.items()}
    for middle in modules:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    assert not [name for name in modules if name in reached[name]]


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_are_imported_where_they_may_be(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    for module, line, _ in imports(path):
        library = module.split(".")[0]
        if library in sys.stdlib_module_names or library in IMPORTED_FREELY:
            continue
        places = IMPORTED_WHEN_NEEDED.get(library, set())
        allowed = {str(relative), relative.parts[0]} & places
        assert allowed, f"{relative}:{line}: may not import {library}"


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_word_for_one_thing(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(FOREIGN_API):
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = SYNONYMS.search(line)
        assert not found, f"{path.relative_to(ROOT)}:{number}: {found.group()!r} has another name"


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_hold_one_concept(path: Path) -> None:
    limit = 250 if path.suffix == ".j2" else 600
    assert len(path.read_text().splitlines()) <= limit


def test_the_emulator_can_be_read() -> None:
    """It decides what kernels may do: it must stay small enough to be checked by reading."""
    files = filter(Path.is_file, (ROOT / "csrc/emulator").rglob("*"))
    assert 0 < sum(len(path.read_text().splitlines()) for path in files) <= 6800


def test_nothing_prints_but_the_command_line() -> None:
    for path in PYTHON:
        if path.name == "__main__.py" or path.parent.name == "cli":
            continue
        calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        printed = [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert not printed, f"{path.relative_to(ROOT)} prints at lines {printed}"


READS_SOURCE = {"cli", "integrations"}
"""Parts that read what others wrote: a variant as a command's argument, models of transformers."""


def test_one_module_writes_source() -> None:
    """`capture/extract.py`. Elsewhere nothing runs text, and nothing parses what was generated."""
    for path in PYTHON:
        relative = path.relative_to(PACKAGE)
        if relative.as_posix() == "variants/capture/extract.py":
            continue
        calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        names = [(n.func.id, n.lineno) for n in calls if isinstance(n.func, ast.Name)]
        run = [line for name, line in names if name in ("eval", "exec", "compile")]
        assert not run, f"{relative} runs source at lines {run}"
        parsed = [line for module, line, _ in imports(path) if module == "ast"]
        assert not parsed or relative.parts[0] in READS_SOURCE, f"{relative} parses: {parsed}"


def test_public_names_have_docstrings() -> None:
    for path in PYTHON:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name}"


def test_text_means_the_same_on_every_machine() -> None:
    for path in TEXT:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = PRIVATE_PLACES.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number}: {found.group()!r}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(path: Path) -> None:
    """The numbered ones, which users copy; what they import may be twice as long."""
    assert len(path.read_text().splitlines()) < (81 if path.name[0].isdigit() else 160)


FACTORIES = frozenset(
    "tensor empty zeros ones full arange linspace logspace eye empty_strided scalar_tensor rand "
    "randn randint randperm tril_indices triu_indices as_tensor asarray Generator".split()
)
"""Functions of torch that make a tensor on the default device, which is the user's to choose."""


def makes_tensor(node: ast.AST, names: frozenset[str] = FACTORIES) -> bool:
    """Whether it is a call ``torch.<name>(...)``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in names
    )


def test_every_tensor_is_made_on_a_named_device() -> None:
    """Under another default device it would be elsewhere, or have no values at all."""
    wrong = []
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if makes_tensor(node):
                assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                named = "device" in [k.arg for k in node.keywords] or (
                    node.func.attr == "Generator" and node.args
                )
                if not named:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"no device= in {', '.join(wrong)}"


def test_tensors_that_are_kept_are_made_outside_of_modes() -> None:
    """Made at import or remembered by a cache, they would stay what a mode made of them."""
    wrong = []
    for path in PYTHON:
        tree = ast.parse(path.read_text())
        if not any(makes_tensor(node, FACTORIES | {"from_numpy"}) for node in ast.walk(tree)):
            continue
        outside = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and "outside_modes" in ast.dump(node)
            for inner in ast.walk(node)
        }
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
        in_functions = {id(inner) for f in functions for inner in ast.walk(f)}
        kept = {
            id(inner)
            for f in functions
            if isinstance(f, ast.FunctionDef)
            and any("cache" in ast.unparse(d).split("(")[0] for d in f.decorator_list)
            for inner in ast.walk(f)
            if not any(inner in ast.walk(g) for g in functions if g is not f and g in ast.walk(f))
        }
        for node in ast.walk(tree):
            lasting = id(node) in kept or id(node) not in in_functions
            if (
                lasting
                and id(node) not in outside
                and makes_tensor(node, FACTORIES | {"from_numpy"})
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong, f"kept, but not made in outside_modes(): {', '.join(wrong)}"
