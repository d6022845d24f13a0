"""Rules that a linter does not check: sizes, docstrings, fields, help of options, paths of one machine."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("grpo_megatron", "examples", "tools", "slurm", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_FIELDS_IN_ONE_PARAGRAPH = 4
MOST_PUBLIC_METHODS = 15
# A docstring that begins with one of these is no sentence: it has no subject yet, or no verb.
NO_FIRST_WORDS = """
    about above after against as at because before behind below beside besides between beyond by
    during for from how if in into like of on out over per since such than that those through to
    towards under until up what when where whether which while who whom whose why with within
    without
"""
# Somebody's folder; a test may invent a folder of its own, such as one of data.
WORKPLACE = re.compile(r"(?<![\w.}])/(?:home|root|Users|work|workspace|mnt|scratch)/\w")


def first_word(docstring: str) -> str:
    return docstring.split()[0].strip(".,:;`").lower() if docstring.split() else ""


def docstrings_without_a_subject(tree: ast.Module) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"the docstring of {getattr(node, 'name', 'the module')} begins with {word!r}"
        for node in ast.walk(tree)
        if isinstance(node, documented)
        and (word := first_word(ast.get_docstring(node) or "")) in NO_FIRST_WORDS.split()
    ]


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass or a NamedTuple."""
    decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(
        ast.unparse(name).split(".")[-1] in ("dataclass", "NamedTuple") for name in decorators + node.bases
    )


def describes_itself(field: ast.AnnAssign) -> bool:
    """Return whether a field is of the configuration, where option() and section() take its description."""
    return isinstance(field.value, ast.Call) and ast.unparse(field.value.func) in ("option", "section")


def undocumented_fields(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not is_record(node):
            continue
        fields = [
            item for item in node.body if isinstance(item, ast.AnnAssign) and not describes_itself(item)
        ]
        if len(fields) > MOST_FIELDS_IN_ONE_PARAGRAPH:
            following = dict(zip(node.body, node.body[1:], strict=False))
            for field in fields:
                below = following.get(field)
                if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                    found.append(f"{node.name}.{ast.unparse(field.target)} has no description below it")
    return found


def public_methods(node: ast.ClassDef) -> list[str]:
    """Return the methods that users of a class can call. Properties are attributes."""
    return [
        item.name
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        and not item.name.startswith("_")
        and not any("property" in ast.unparse(decorator) for decorator in item.decorator_list)
    ]


def large_classes(tree: ast.Module) -> list[str]:
    counts = {n.name: len(public_methods(n)) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    return [
        f"{name} of {count} public methods" for name, count in counts.items() if count > MOST_PUBLIC_METHODS
    ]


def public_classes(tree: ast.Module) -> list[str]:
    return [
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return {name: paths} of public classes that several files define. sources: {path: source}."""
    found = defaultdict(list)
    for path, source in sources.items():
        for name in public_classes(ast.parse(source)):
            found[name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def options_without_help(tree: ast.Module) -> list[str]:
    """Return the calls of argparse's add_argument that do not say what the option is for."""
    return [
        f"{ast.unparse(node.args[0])} has no help"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and not any(keyword.arg == "help" for keyword in node.keywords)
    ]


def complaints(source: str) -> list[str]:
    lines = source.splitlines()
    found = [f"{len(lines)} lines"] if len(lines) > MOST_LINES_OF_A_FILE else []
    tree = ast.parse(source)
    found += docstrings_without_a_subject(tree) + undocumented_fields(tree) + large_classes(tree)
    found += options_without_help(tree)
    for node in ast.walk(tree):
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


def test_rays_internals_are_used_in_one_file():
    package = [path for path in SOURCES if ROOT / "grpo_megatron" in path.parents]
    users = {path.name for path in package if "ray._private" in path.read_text(encoding="utf-8")}
    assert users == {"ray_patches.py"}


def test_no_two_public_classes_of_the_package_share_a_name():
    package = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in SOURCES
        if path.is_relative_to(ROOT / "grpo_megatron")
    }
    found = shared_names(package)
    assert found == {}


def test_each_rule_is_noticed():
    body = "    pass\n" * 60
    assert complaints("x = 1\n" * 401) == ["401 lines"]
    assert complaints(f"async def long():\n{body}") == ["long of 61 lines"]
    assert complaints(f"path = '{'/'.join(['', 'home', 'me'])}'\n") == ["line 1: a path of one machine"]
    fields = "\n".join(f"    {name}: int" for name in "abcde")
    assert (
        complaints(f"@dataclass(frozen=True)\nclass Row:\n{fields}\n")[0]
        == "Row.a has no description below it"
    )
    assert len(complaints(f"class Row(NamedTuple):\n{fields}\n    '''The last one.'''\n")) == 4
    assert complaints("@dataclass\nclass Row:\n    a: int\n    b: int\n") == []
    methods = "".join(f"    def {name}(self): ...\n" for name in "abcdefghijklmno")
    assert (
        complaints(f"class Large:\n{methods}    @property\n    def q(self): ...\n    def _r(self): ...\n")
        == []
    )
    assert complaints(f"class Large:\n{methods}    def p(self): ...\n") == ["Large of 16 public methods"]
    assert complaints("p.add_argument('--a', type=int)\np.add_argument('b', help='B')\n") == [
        "'--a' has no help"
    ]
    assert complaints('"""Whose end comes first."""\n') == ["the docstring of the module begins with 'whose'"]
    assert complaints('def f():\n    """Of those, the last."""\n') == ["the docstring of f begins with 'of'"]
    same = {"a.py": "class Part:\n    pass\n", "b.py": "class Part:\n    pass\n\n\nclass _Own:\n    pass\n"}
    assert shared_names(same) == {"Part": ["a.py", "b.py"]}
