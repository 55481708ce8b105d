"""The embedded corpus: documentation and sources that every installation has. Works offline.

Documents, one per topic or module: the help topics of Python, the sources of its standard library
(without tests), the docstrings of its modules written in C, and the docstrings of numpy, sympy,
networkx and torch. About 29 MB, enough to see a small model learn and nothing more: most of it is
Python source, and it differs between versions, so compare runs on one machine's folder only.

    python -m data.stdlib
    python -m data.stdlib --tokenizer gpt2 --out data/stdlib_gpt2 --val-tokens 500000
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import platform
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

from data.prepare import PrepareOptions, Source, prepare
from nanorove.errors import run_cli

PACKAGES = ("numpy", "sympy", "networkx", "torch")  # torch brings the other three
TEST_DIRS = {"test", "tests", "idle_test"}
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
# Importing readline may print an escape sequence and touches the terminal.
NOT_IMPORTED = {"readline"}
UNIT_DOCUMENTS = 32


@dataclass(frozen=True, kw_only=True)
class Options(PrepareOptions):
    out: Path = Path("data/stdlib_bytes")
    tokenizer: Literal["gpt2", "bytes"] = "bytes"
    shard_tokens: int = 10_000_000
    val_tokens: int = 1_500_000


class Document(NamedTuple):
    """A document still to be read: `kind` says how, `name` is the same on every machine."""

    kind: Literal["topic", "source", "builtin", "docstrings"]
    name: str
    path: str = ""


def source() -> Source:
    """The corpus of this interpreter and of those of PACKAGES that are installed."""
    packages = {name: find_package(name) for name in PACKAGES}
    for name in [name for name, folder in packages.items() if folder is None]:
        print(f"{name} is not installed: its docstrings are left out", file=sys.stderr)
        del packages[name]
    documents = topics() + stdlib_sources() + builtin_modules()
    for name, folder in packages.items():
        documents += package_modules(name, folder)
    # An order that only the names decide, so that the validation prefix is a fair sample.
    documents.sort(key=lambda d: hashlib.sha256(f"{d.kind}/{d.name}".encode()).digest())
    units = [documents[i : i + UNIT_DOCUMENTS] for i in range(0, len(documents), UNIT_DOCUMENTS)]
    return Source(
        name="stdlib",
        description={
            "kind": "embedded corpus: depends on what is installed",
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "packages": {name: importlib.metadata.version(name) for name in packages},
            "documents": len(documents),
        },
        units=lambda files, i: units,
        read=read,
        deduplicate=True,
    )


def read(documents: list[Document]) -> Iterator[str]:
    """The texts of `documents`; a file that is not UTF-8 and a module that cannot be imported or
    has no docstring give none."""
    for document in documents:
        if document.kind == "topic":
            yield importlib.import_module("pydoc_data.topics").topics[document.name]
        elif document.kind == "builtin":
            text = live_docstrings(document.name)
            if text:
                yield text
        else:
            try:
                text = Path(document.path).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            if document.kind == "docstrings":
                text = source_docstrings(document.name, text)
            if text:
                yield text


def topics() -> list[Document]:
    """What help() knows beyond modules: operators, statements, the data model."""
    if importlib.util.find_spec("pydoc_data") is None:
        print("pydoc_data is not installed: the help topics are left out", file=sys.stderr)
        return []
    return [Document("topic", name) for name in importlib.import_module("pydoc_data.topics").topics]


def stdlib_sources() -> list[Document]:
    """The .py files of the standard library, tests left out (they are not on every system)."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        Document("source", path.as_posix(), str(root / path))
        for path in python_files(root)
        if path.as_posix() != "pydoc_data/topics.py"  # those are documents of their own
    ]


def builtin_modules() -> list[Document]:
    """The modules of the standard library that are not Python: their docstrings need an import."""
    loaders = (importlib.machinery.BuiltinImporter, importlib.machinery.ExtensionFileLoader)
    found = []
    for name in sorted(sys.stdlib_module_names - NOT_IMPORTED):
        spec = importlib.util.find_spec(name)
        if spec and (spec.loader in loaders or isinstance(spec.loader, loaders)):
            found.append(Document("builtin", name))
    return found


def package_modules(name: str, folder: Path) -> list[Document]:
    """The modules of an installed package, found as files: nothing of it is imported."""
    return [
        Document("docstrings", f"{name}/{path.as_posix()}", str(folder / path))
        for path in python_files(folder)
    ]


def find_package(name: str) -> Path | None:
    """The folder of an installed package; None if there is none. Does not import it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def python_files(root: Path) -> list[Path]:
    """The .py files below `root`, relative to it, without tests and installed packages."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [path for path in files if not (TEST_DIRS | NOT_STDLIB) & set(path.parts[:-1])]


def source_docstrings(name: str, text: str) -> str:
    """The docstrings of a module's source under the qualified names they belong to."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in other people's sources
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # for another version of Python, or a template
            return ""
    return "\n\n\n".join(node_docstrings(module, tree))


def node_docstrings(
    name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[str]:
    """`name(arguments)` and the docstring of `node`, then of the classes and functions in it."""
    docstring = ast.get_docstring(node)
    if docstring and docstring.strip():
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield f"{name}{f'({ast.unparse(node.args)})' if function else ''}\n\n{docstring}"
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from node_docstrings(f"{name}.{child.name}", child)


def live_docstrings(name: str) -> str:
    """The docstrings of a C module of the standard library: of itself, its functions, classes and
    their members. Empty if it cannot be imported here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules say so
        try:
            module = importlib.import_module(name)
        except ImportError:
            return ""
    return "\n\n\n".join(object_docstrings(name, module))


def object_docstrings(name: str, thing: object) -> Iterator[str]:
    """As node_docstrings, for a live object. Reads vars() only, so no descriptor is called."""
    docstring = thing.__doc__
    if isinstance(docstring, str) and docstring.strip():
        arguments = getattr(thing, "__text_signature__", None) or ""
        arguments = re.sub(r"\$module(, /)?(, )?", "", arguments).replace("$", "")
        yield f"{name}{arguments}\n\n{inspect.cleandoc(docstring)}"
    if isinstance(thing, type | types.ModuleType):
        members = (
            types.BuiltinFunctionType,
            types.MethodDescriptorType,
            types.ClassMethodDescriptorType,
            types.GetSetDescriptorType,
        )
        for key, value in sorted(vars(thing).items()):
            if key.startswith("__"):
                continue  # boilerplate: "Create and return a new object."
            own_class = isinstance(value, type) and (  # _collections.deque says "collections"
                value.__module__.lstrip("_") == thing.__name__.lstrip("_")
            )
            if isinstance(value, members) or own_class:
                yield from object_docstrings(f"{name}.{key}", value)


def main() -> None:
    """Entry point of `python -m data.stdlib`."""
    options = tyro.cli(Options, prog="python -m data.stdlib", description=__doc__)
    prepare(source(), options)


if __name__ == "__main__":
    run_cli(main)
