"""Arrows between the files point one way, nothing happens at import, train.py stays short."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

FOLDERS = ("data", "nanorove", "scripts")
FILES = sorted([*REPO.glob("*.py"), *(p for f in FOLDERS for p in (REPO / f).glob("*.py"))])
OURS = {"model", "train", "tests", "experiments", *FOLDERS}

# who may import what of ours; a name covers its submodules
ALLOWED = {
    "model": [],
    "nanorove": ["model", "nanorove"],
    "data": ["data", "nanorove.errors", "nanorove.files"],
    "scripts": ["model", "nanorove", "data", "scripts"],
    "train": ["model", "nanorove", "data"],
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions; `from a import b` is a.b if that
    is a module of ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return found


def of_ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in OURS}


def test_the_files_are_found():
    assert {"model", "train", "data.loader", "nanorove.config", "scripts.sample"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_arrows(name):
    allowed = ALLOWED[name.split(".")[0]]
    for imported in of_ours(MODULES[name]):
        assert any(imported == a or imported.startswith(f"{a}.") for a in allowed), (
            f"{name} imports {imported}"
        )
        assert imported in MODULES


def test_no_cycles():
    graph = {name: of_ours(path) - {name} for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("name", [n for n in MODULES if "." in n or n in ("model", "train")])
def test_no_file_hides_a_module(name):
    """`python data/inspect.py` would put data/ first, and with it break the library's inspect."""
    folder, stem = MODULES[name].parent, MODULES[name].stem
    assert stem not in sys.stdlib_module_names
    imported = {i.split(".")[0] for path in FILES for i in imports(path)}
    assert stem not in (imported - OURS if folder == REPO else imported)


# watches a process from the inside: https://peps.python.org/pep-0578/
PROGRAM = """
import importlib, sys
events = []
def watch(event, args):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
        events.append((event, str(args)))
sys.addaudithook(watch)
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not events, (name, events)
import multiprocessing
assert not multiprocessing.active_children()
"""


def folders() -> set[Path]:
    """Of the repository, but for caches."""
    found = {p for f in (".", *FOLDERS, "configs") for p in (REPO / f).iterdir() if p.is_dir()}
    return {p for p in found if not p.name.startswith((".", "__"))}


def test_importing_does_nothing(tmp_path):
    """No file, no network, no argument parsing, no output: spawned workers import everything
    again (build-nanogpt#4)."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    before = folders()
    env = os.environ | {
        "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore",
        "HOME": str(home), "MPLCONFIGDIR": str(home),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES], cwd=work, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert list(work.iterdir()) == []
    assert folders() <= before


@pytest.mark.parametrize(("name", "most"), [("train", 330), ("model", 450)])
def test_the_files_to_read_stay_short(name, most):
    assert len(MODULES[name].read_text().splitlines()) <= most
