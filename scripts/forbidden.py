"""Fails on code that may not be in src: loaders that run what they read, long or nameless modules.

python scripts/forbidden.py FOLDER...
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSAFE_MODULES = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
)
UNSAFE_CALLS = frozenset(
    {"eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "torch.serialization.load"}
)
NAMELESS = frozenset({"utils.py", "common.py", "helpers.py"})
MAX_LINES = 500

Finding = tuple[int, str]


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of a chain of attributes on a name; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> full name, for every import of the module, so that an alias hides nothing."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def unsafe_imports(node: ast.AST) -> Iterator[str]:
    """The unsafe modules that one node imports, by statement or by a constant name."""
    wanted: list[str] = []
    if isinstance(node, ast.Import):
        wanted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        wanted = [node.module or ""]
    elif isinstance(node, ast.Call) and (dotted(node.func) or "").endswith(
        ("__import__", "import_module")
    ):
        wanted = [
            a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
    yield from (name for name in wanted if name.partition(".")[0] in UNSAFE_MODULES)


def unsafe_uses(tree: ast.AST) -> Iterator[Finding]:
    """Each import of an unsafe module and each mention of an unsafe function, with its line.

    A mention is enough: `loader = torch.load` is a call somewhere else.
    """
    names = imported_names(tree)
    for node in ast.walk(tree):
        for module in unsafe_imports(node):
            yield node.lineno, f"imports {module}, which runs what it reads"  # pyright: ignore
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        head, dot, rest = (dotted(node) or "").partition(".")
        full = names.get(head, head) + dot + rest
        if full in UNSAFE_CALLS:
            yield node.lineno, f"uses {full}, which runs what it reads"


def findings(path: Path) -> Iterator[Finding]:
    """Everything wrong with one file, as (line, what)."""
    text = path.read_text(encoding="utf-8")
    if path.name in NAMELESS:
        yield 1, f"is called {path.name}: name the module after the thing it holds"
    if (lines := text.count("\n")) > MAX_LINES:
        yield MAX_LINES, f"has {lines} lines, at most {MAX_LINES} are read with ease: split it"
    yield from unsafe_uses(ast.parse(text, filename=str(path)))


def main(folders: list[str]) -> int:
    """Prints each finding as path:line; the exit code says whether there were any."""
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    if not files:
        print(f"error: no Python file under {folders}", file=sys.stderr)
        return 2
    bad = [f"{file}:{line}: {what}" for file in files for line, what in findings(file)]
    print("\n".join(bad) if bad else f"forbidden: nothing in {len(files)} files")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
