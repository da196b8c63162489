"""Imports point one way, and what needs no torch does not load it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"schemas", "producers", "consumers", "trainer", "infra"}
MAY_IMPORT = {
    "schemas": {"schemas"},
    "producers": {"schemas", "producers"},
    "consumers": {"schemas", "consumers"},
    "trainer": {"schemas", "trainer"},
    "infra": PACKAGES,
}
HEAVY = ("torch", "vllm", "megatron", "transformers")
LIGHT = ("schemas.config_file", "schemas.control", "producers.dispatcher", "consumers.worker")


def _imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_arrows_point_one_way(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in _imported(path)
        if name in PACKAGES - MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("module", LIGHT)
def test_what_needs_no_torch_does_not_load_it(module):
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    assert loaded.stdout.decode().strip() == "[]"
