"""Facts in docs/tour.md: the files and names in its section "Where to add", and the order of the packages."""

import ast
import configparser
import re
from functools import cache

import pytest

from tests.documents import ROOT, blocks
from tests.unit.test_docs_references import PACKAGE

PAGE = ROOT / "docs/tour.md"
WALKS = (
    "Add an advantage estimator",
    "Add a weight-sync transport",
    "Add a model family",
    "Add a configuration key",
)
MOST_FILES = 3
# Code spans of these forms are files of the project, and names that Python code defines or uses.
FILE = re.compile(r"[\w-]+(/[\w-]+)*\.py")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def rows(page: str, walk: str) -> list[list[str]]:
    """Return the code spans of each row of a walk's table, file by file."""
    _, _, rest = page.partition(f"\n### {walk}\n")
    lines = re.split(r"(?m)^#", rest)[0].splitlines()
    return [re.findall(r"`([^`]+)`", line) for line in lines if line.startswith("| `")]


def faults(row: list[str]) -> list[str]:
    """Return what is wrong with a row: files that do not exist, and names that none of its files has.

    A file called NAME.py is one to be written, in a folder that must exist.
    """
    files = [span for span in row if FILE.fullmatch(span)]
    there = {file: path_of(file) for file in files if not file.endswith("/NAME.py")}
    missing = [file for file, path in there.items() if not path.is_file()]
    missing += [file for file in files if file not in there and not path_of(file).parent.is_dir()]
    known = set().union(*(names_in(file) for file in there if file not in missing))
    wanted = [span for span in row if NAME.fullmatch(span) and not FILE.fullmatch(span)]
    return missing + [name for name in wanted if name.rpartition(".")[2] not in known]


def path_of(file: str):
    return PACKAGE / file if (PACKAGE / file.partition("/")[0]).exists() else ROOT / file


@cache
def names_in(file: str) -> frozenset[str]:
    """Return every name that a source defines, imports, or uses."""
    found = set()
    for node in ast.walk(ast.parse(path_of(file).read_text(encoding="utf-8"))):
        values = [getattr(node, field, None) for field in ("name", "id", "attr", "arg")]
        found.update(value for value in values if isinstance(value, str))
    return frozenset(found)


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_files_and_what_they_have(walk):
    found = rows(PAGE.read_text(encoding="utf-8"), walk)
    assert 1 <= len(found) <= MOST_FILES
    assert all(FILE.fullmatch(row[0]) for row in found)
    assert [fault for row in found for fault in faults(row)] == []


PLANTED = """
### Add a thing

| file | what to do |
|---|---|
| `algorithm/advantages.py` | Like `rloo` and `inputs.trajectories`, not `raloo`; `rollout.n=1`; `make test` |
| `algorithm/advantage.py` | |
| `weights/sync/transports/NAME.py` | Like `ParcelSender` in `weights/sync/transports/base.py` |
| `weights/sync/transport/NAME.py` | |

### Another

| `nowhere.py` | |
"""


def test_each_fault_in_a_walk_is_noticed():
    found = [faults(row) for row in rows(PLANTED, "Add a thing")]
    assert found == [["raloo"], ["algorithm/advantage.py"], [], ["weights/sync/transport/NAME.py"]]


def test_the_packages_are_in_the_order_that_is_checked():
    contract = configparser.ConfigParser(inline_comment_prefixes=(";",))
    contract.read(ROOT / ".importlinter")
    layers = contract["importlinter:contract:one-direction"]["layers"].strip().splitlines()
    (shown,) = [block for block in blocks(PAGE) if block.startswith("cli\n")]
    assert [re.findall(r"\w+", layer) for layer in layers] == [
        re.findall(r"\w+", line) for line in shown.splitlines()
    ]
