"""tools/mutants.py: its changes to a file before mutmut makes faults in it, and its choice of tests."""

from pathlib import Path

import pytest

from tools import mutants

SOURCE = """
from contextlib import contextmanager
from functools import cache, cached_property

def doubled(times):
    def decorate(function):
        return lambda *arguments: times * function(*arguments)
    return decorate

@cache
@doubled(
    2
)
def one(number):
    return number + 1

class Thing:
    @property
    def size(self):
        return 3

    @size.setter
    def size(self, value):
        raise ValueError(value)

    @cached_property
    def twice(self):
        return 2 * self.size

    @staticmethod
    def still(): return 7

@contextmanager
def opened():
    yield 5
"""


def values_of(source: str) -> list:
    names = {}
    exec(source, names)
    thing = names["Thing"]()
    with pytest.raises(ValueError, match="9"):
        thing.size = 9
    with names["opened"]() as opened:
        return [
            names["one"](1),
            names["one"].cache_info().misses,
            thing.size,
            thing.twice,
            thing.still(),
            opened,
        ]


def test_functions_that_are_decorated_later_do_the_same():
    """mutmut changes no decorated function, so that no estimator and no surrogate had faults."""
    late = mutants.with_late_decorators(SOURCE)
    assert values_of(late) == values_of(SOURCE) == [4, 1, 3, 6, 7, 5]
    kept = [line.strip() for line in late.splitlines() if line.strip().startswith("@")]
    assert kept == ["@size.setter", "@staticmethod"]


def test_decorated_functions_of_the_package_compile():
    for path in Path("grpo_megatron/algorithm").glob("*.py"):
        late = mutants.with_late_decorators(path.read_text(encoding="utf-8"))
        compile(late, str(path), "exec")
        assert "@advantage_estimator" not in late.replace('`@advantage_estimator("name")`', "")


def test_the_tests_of_a_file_are_those_that_import_its_package():
    names = [test.name for test in mutants.tests_of([Path("grpo_megatron/weights/sync/delta.py")])]
    assert "test_delta.py" in names
    assert "test_filters.py" not in names
    assert mutants.function_of("a.b.xǁEncoderǁ_changes__mutmut_12") == "a.b.Encoder._changes"
    assert mutants.function_of("a.b.x__pack__mutmut_4") == "a.b._pack"
