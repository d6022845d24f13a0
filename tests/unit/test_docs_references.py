"""Links, paths and configuration keys in README.md and docs/ exist."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from grpo_megatron.config.load import known_keys
from grpo_megatron.importers import SYSTEMS
from tests.documents import PAGES, ROOT, anchors, links, parts, spans

SECTIONS = "|".join(key for key in known_keys() if "." not in key)
# Of a file that a section shares its name with, such as train.jsonl, the ending would pass for a key.
KEY = re.compile(rf"(?:{SECTIONS})(?:\.(?!(?:jsonl?|yaml|py|log|md)\b)[a-z]\w*)+(?:\.\*)?")
# Where paths begin: in the project's folder, and for sources in the package, as pages shorten them.
PACKAGE = ROOT / "grpo_megatron"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def broken_links(page: Path) -> list[str]:
    found = []
    for line, target in links(page):
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(f"line {line}: {target}")
    return found


def test_the_index_lists_every_page_and_each_links_back():
    index = ROOT / "docs/index.md"
    pages = [page for page in PAGES if page.parent == index.parent and page != index]
    listed = [target for _, target in links(index) if "/" not in target]
    missing = {page.name for page in pages} - set(listed)
    assert not missing, f"docs/index.md does not list {sorted(missing)}"
    without = [
        page.name
        for page in pages
        if page.read_text(encoding="utf-8").splitlines()[1:4] != ["", "[All pages](index.md)", ""]
    ]
    assert not without, f"below their titles, these pages lack [All pages](index.md): {without}"
    assert "docs/index.md" in [target for _, target in links(ROOT / "README.md")]


@each_page
def test_paths_exist(page):
    assert missing_paths(page) == []


def missing_paths(page: Path) -> list[str]:
    """Return the project's paths in code spans that do not exist.

    They are in one of its folders, or sources by their name alone. A path may have stars, NAME and ::test.
    """
    found = []
    for part in parts(page.read_text(encoding="utf-8")):
        for span in spans(part):
            file, _, test = re.sub(r"\bNAME\b", "*", span).partition("::")
            if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", file) and not exists(file, test):
                found.append(f"line {part.line}: {span}")
    return found


def exists(file: str, test: str) -> bool:
    """Return True if the path exists or is not a path of the project."""
    first, _, rest = file.partition("/")
    if not rest:
        # Examples have sources of the reader's own.
        return not file.endswith(".py") or file.startswith("my_") or file in sources()
    # Scalars are named like paths: those of the package count where they end like one.
    of_package = (PACKAGE / first).is_dir() and file.endswith((".py", ".yaml", "/"))
    if not (of_package or (ROOT / first).is_dir()) or first == "runs":  # which users have, and no clone
        return True
    paths = [path for folder in (ROOT, PACKAGE) for path in folder.glob(file.rstrip("/"))]
    return any(
        not test or re.search(rf"^def {re.escape(test)}\(", path.read_text(encoding="utf-8"), re.M)
        for path in paths
    )


@cache
def sources() -> set[str]:
    folders = (PACKAGE, *(ROOT / name for name in ("tests", "examples", "tools", "slurm", "benchmarks")))
    return {path.name for folder in folders for path in folder.rglob("*.py")} | {"setup.py"}


@each_page
def test_keys_are_those_of_the_configuration(page):
    assert unknown_keys(page) == []


def unknown_keys(page: Path) -> list[str]:
    """Return unknown keys in code spans and blocks: `section.key`, `section.key=value`, `section.*`, and
    in YAML.
    """
    name = page.stem.removeprefix("coming-from-")
    theirs = SYSTEMS[name].entry_for if name in SYSTEMS else lambda key: None
    found = []
    for part in parts(page.read_text(encoding="utf-8")):
        if part.language == "yaml":
            keys = nested(yaml.safe_load("\n".join(part.lines)))
        else:
            written = (
                spans(part) if part.language is None else [] if part.language == "python" else part.lines
            )
            words = [re.split(r"[=:,]", word.strip("[]"))[0] for text in written for word in text.split()]
            keys = [word.removesuffix(".*") for word in words if KEY.fullmatch(word)]
        found += [
            f"line {part.line}: {key}" for key in keys if key not in known_keys() and theirs(key) is None
        ]
    return found


def nested(values: dict, within: str = "") -> list[str]:
    """Return the keys of a configuration in YAML, down to the known keys that have values of their own."""
    found = []
    for key, value in values.items():
        name = f"{within}{key}"
        deeper = isinstance(value, dict) and any(known.startswith(f"{name}.") for known in known_keys())
        found += nested(value, f"{name}.") if deeper else [name]
    return found


PLANTED = """# A page

See [one](README.md), [two](nowhere.md), [three](#a-page), [four](#another-page).

`grpo_megatron/cli.py` `grpo_megatron/cly.py` `megatron/layers/build.py` `megatron/modell.py` \
`layout.py` `lay_out.py` `configs/*node.yaml`
`tests/unit/test_docs.py::test_every_row_is_of_a_command` `tests/unit/test_docs.py::test_nothing` \
`rollout/tokens` `reward/mean`

`rollout.n` `rollout.m` `train.jsonl` `megatron.lora.*` `megatron.laura.*`

```
grpo-megatron train --config FILE rollout.temperature=1 rollout.temprature=1
```

```yaml
rollout:
  n: 8
  engine:
    num_engine: 2
```
"""


def test_each_fault_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PLANTED)
    (tmp_path / "README.md").touch()
    assert broken_links(page) == ["line 3: nowhere.md", "line 3: #another-page"]
    wrong = (
        "grpo_megatron/cly.py",
        "megatron/modell.py",
        "lay_out.py",
        "tests/unit/test_docs.py::test_nothing",
    )
    assert missing_paths(page) == [f"line 5: {path}" for path in wrong]
    assert unknown_keys(page) == [
        "line 8: rollout.m",
        "line 8: megatron.laura",
        "line 11: rollout.temprature",
        "line 15: rollout.engine.num_engine",
    ]
