"""Imports go downward: between the packages, and between the layers of `datapipe`.

Those within functions and those for type checkers count, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW = {
    "formats": set(),
    "datapipe": {"formats"},
    "ckpt": {"formats"},
    "tools": {"formats", "datapipe", "ckpt"},
}
LAYERS = ["order", "sources", "batches", "prefetch", "top", "conformance"]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """The names of modules; of `from package import name` both are one, or may be."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(module: str) -> int:
    first = [*module.split("."), "top"][1]
    if first in LAYERS:
        return LAYERS.index(first)
    return -1 if needs_no_other(module) else LAYERS.index("top")


def needs_no_other(module: str) -> bool:
    """Whether it is below all layers: it imports nothing of `datapipe`, and is no package."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path.is_file() and not any(each.startswith("datapipe") for each in imported(path))


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or place.is_dir()


@pytest.mark.parametrize("package", BELOW)
def test_packages_import_those_below(package: str) -> None:
    for path in modules(package):
        found = {module.split(".")[0] for module in imported(path)} & BELOW.keys()
        assert found <= BELOW[package] | {package}, path


def test_the_layers_of_the_data_import_those_below() -> None:
    upward = set()
    for path in modules("datapipe"):
        name = name_of(path)
        for module in filter(is_module, imported(path)):
            is_ours = module.split(".")[0] == "datapipe"
            if is_ours and layer(module) > layer(name):
                upward.add((name, module))
    assert not upward
