"""The NCCL check goes alone to interpreters that are not ours."""

import ast
import sys
from importlib import resources

SOURCE = resources.files("agent.selftest").joinpath("nccl_check.py").read_text(encoding="utf-8")
OLDEST = (3, 9)


def test_it_can_be_read_by_the_oldest_python_that_it_promises() -> None:
    ast.parse(SOURCE, feature_version=OLDEST)


def test_it_imports_the_standard_library_and_torch_and_nothing_else() -> None:
    tree = ast.walk(ast.parse(SOURCE))
    names = {a.name for node in tree if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module or "" for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names}
    assert roots - sys.stdlib_module_names == {"torch"}
