"""Modules import only from tiers above their own, and what needs no torch does not load it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "plait"
RECIPES = ROOT / "recipes"

TIERS: tuple[tuple[str, ...], ...] = (
    ("files", "terminal"),
    ("records",),
    ("fields",),
    ("flags", "rope"),
    ("config",),
    ("config_json", "syntax"),
    ("layout",),
    ("spec",),
    ("cost",),
    ("presets",),
    ("extend",),
    ("kernels",),
    ("positions",),
    ("data",),
    ("mixers",),
    ("model",),
    ("cross_entropy",),
    ("scoring",),
    ("windows",),
    ("hf", "train", "evals", "probes"),
    ("convert", "bench"),
    ("runs",),
    ("scaling",),
    ("report",),
    ("describe",),
    ("cli",),
    ("__main__",),
)
"""top to bottom; the names of one tuple are siblings, which do not import each other"""

NO_TORCH = (
    "files",
    "flags",
    "terminal",
    "records",
    "config",
    "config_json",
    "layout",
    "spec",
    "cost",
    "presets",
    "extend",
    "scaling",
    "report",
    "describe",
    "cli",
)


def violations(source: Path, tiers: tuple[tuple[str, ...], ...] = TIERS) -> list[str]:
    """Imports in a package `plait` at `source` that point sideways or down, one line each."""
    rank = {name: i for i, tier in enumerate(tiers) for name in tier}
    found = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if parts == ("__init__",):
            continue  # the lazy public names
        unit, where = parts[0], path.relative_to(source)
        if unit not in rank:
            found.append(f"{where}: {unit} has no tier")
            continue
        for line, module in _imports(path, parts):
            name = module.split(".")[1] if "." in module else ""
            if module.split(".")[0] == "recipes":
                found.append(f"{where}:{line}: imports a recipe")
            elif module.split(".")[0] != "plait" or name in (unit, "__version__"):
                continue
            elif name not in rank:
                found.append(f"{where}:{line}: imports {module}, not a module with a tier; name its home")
            elif rank[name] >= rank[unit]:
                found.append(f"{where}:{line}: {unit} imports {name}, which is not above it")
    return found


def _imports(path: Path, parts: tuple[str, ...]) -> list[tuple[int, str]]:
    """(line, absolute module) of every import of a file, also inside functions and through import_module."""
    package = ("plait", *parts)[: len(parts)]  # of a module its package, of a package (__init__) itself
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "plait" else [module]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [(node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return found


def test_modules_import_only_from_above():
    assert violations(SOURCE) == []


def test_recipes_are_imported_by_nothing_and_not_by_each_other():
    stems = {path.stem for path in RECIPES.glob("*.py")}
    for path in [*SOURCE.rglob("*.py"), *RECIPES.rglob("*.py")]:
        imported = {module.split(".")[0] for _, module in _imports(path, (path.stem,))}
        assert not imported & {"recipes", *stems} - {"plait"}, path


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.py", "from plait.layout import x", "config imports layout, which is not above it"),
        ("config.py", "import plait.layout as l", "config imports layout, which is not above it"),
        ("config.py", "from plait import layout", "config imports layout, which is not above it"),
        ("config.py", "from . import layout", "config imports layout, which is not above it"),
        ("config.py", "from .layout import x", "config imports layout, which is not above it"),
        ("mixers/gdn.py", "from ..model.lm import LM", "mixers imports model, which is not above it"),
        ("mixers/__init__.py", "from plait.model.lm import LM", "mixers imports model, which is not above it"),
        ("config.py", "def f():\n    from plait.cli import main", "config imports cli, which is not above it"),
        ("config.py", "import importlib\nimportlib.import_module('plait.cli')", "config imports cli"),
        ("train/loop.py", "from plait.probes import capture", "train imports probes, which is not above it"),
        ("bench/run.py", "import plait.convert.plan", "bench imports convert, which is not above it"),
        ("train/loop.py", "from plait import LM", "imports plait.LM, not a module with a tier"),
        ("train/loop.py", "import recipes.demo", "imports a recipe"),
        ("helpers.py", "", "helpers has no tier"),
    ],
)
def test_the_check_finds_each_kind_of_violation(tmp_path, file, text, message):
    (found,) = violations(tree(tmp_path, {file: text}))
    assert message in found


def test_the_check_allows_what_is_legal(tmp_path):
    files = {
        "__init__.py": "from plait.cli import main",
        "layout.py": "from plait.config import x\nimport plait.files\nfrom .config import y\nimport torch",
        "model/lm.py": "from plait.model.cache import c\nfrom .block import b\nfrom plait.mixers import build",
        "bench/run.py": "from plait.train import a\nfrom plait.probes.points import b\nfrom plait.evals import c",
        "cli.py": "from plait import __version__, cost, report",
        "__main__.py": "from plait.cli import main",
    }
    assert violations(tree(tmp_path, files)) == []


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def exists(name: str) -> bool:
    return (SOURCE / f"{name}.py").exists() or (SOURCE / name / "__init__.py").exists()


def test_modules_marked_so_load_no_torch():
    names = [name for name in NO_TORCH if exists(name)]
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(f"plait.{{name}}")
    assert "torch" not in sys.modules, name
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not exists("cli"), reason="no command line yet")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["describe", "--help"],
        ["describe", "gdn full", "--d-model", "64", "--num-layers", "2", "--num-heads", "2"],
    ],
    ids=" ".join,
)
def test_commands_that_compute_nothing_load_no_torch(arguments):
    code = f"""
import sys
from plait.cli import main
sys.argv = ["plait", *{arguments}]
try:
    status = main()
except SystemExit as stop:
    status = stop.code
assert not status, status
assert "torch" not in sys.modules
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_importing_the_package_loads_nothing_of_it():
    done = python("import sys, plait; print([m for m in sys.modules if m.startswith('plait.') or m == 'torch'])")
    assert done.stdout.strip() == "[]", done.stderr


def test_public_names_have_homes():
    assert set(plait.__all__) == {*plait._HOMES, *plait._MODULES}
    assert set(plait.__all__) <= set(dir(plait))
    for name in plait._MODULES:
        assert getattr(plait, name).__name__ == f"plait.{name}"
    for name, home in plait._HOMES.items():
        if exists(home.removeprefix("plait.").replace(".", "/")):
            assert getattr(plait, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Sepc'"):
        plait.Sepc
