"""Rules that a linter does not check: sizes of files and functions, and paths that exist on one machine
only.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("grpo_megatron", "tools", "slurm", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
# Somebody's folder; a test may invent a folder of its own, such as one of data.
WORKPLACE = re.compile(r"(?<![\w.}])/(?:home|root|Users|work|workspace|mnt|scratch)/\w")


def complaints(source: str) -> list[str]:
    lines = source.splitlines()
    found = [f"{len(lines)} lines"] if len(lines) > MOST_LINES_OF_A_FILE else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            found += [f"{node.name} of {length} lines"] if length > MOST_LINES_OF_A_FUNCTION else []
    return found + [
        f"line {i}: a path of one machine" for i, line in enumerate(lines, 1) if WORKPLACE.search(line)
    ]


def test_sources_keep_the_house_rules():
    found = {str(path.relative_to(ROOT)): complaints(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(found) > 100
    assert {path: why for path, why in found.items() if why} == {}


def test_each_rule_is_noticed():
    body = "    pass\n" * 60
    assert complaints("x = 1\n" * 401) == ["401 lines"]
    assert complaints(f"async def long():\n{body}") == ["long of 61 lines"]
    assert complaints(f"path = '{'/'.join(['', 'home', 'me'])}'\n") == ["line 1: a path of one machine"]
