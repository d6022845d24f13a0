"""The markers slow_when and slow_but of tests/conftest.py."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CASES = """
    import pytest

    @pytest.mark.slow_when(lambda layout, tied: tied and layout == {layout!r})
    @pytest.mark.parametrize("layout", ["tp2", "pp2"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_of_two_factors(layout, tied):
        pass
"""


@pytest.fixture
def collect(pytester):
    """A function collect(layout, *arguments) that returns pytest's output on collecting CASES."""

    def collect(layout: str, *arguments: str) -> pytest.RunResult:
        pytester.makeconftest(Path(__file__).parents[1].joinpath("conftest.py").read_text())
        pytester.makepyfile(CASES.format(layout=layout))
        return pytester.runpytest("--collect-only", "-q", *arguments)

    return collect


def test_cases_are_slow_where_the_predicate_holds(collect):
    output = collect("pp2", "-m", "slow").outlines
    assert [line.partition("::")[2] for line in output if "::" in line] == ["test_of_two_factors[True-pp2]"]


def test_a_predicate_that_never_holds_is_an_error(collect):
    result = collect("cp2")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines("*test_of_two_factors: its slow_when makes no case slow*")


def test_one_case_by_its_id_is_no_error(collect):
    result = collect("pp2", "test_one_case_by_its_id_is_no_error.py::test_of_two_factors[False-tp2]")
    assert result.ret == pytest.ExitCode.OK


def test_the_quick_cases_are_spread_evenly(pytester):
    pytester.makeconftest(Path(__file__).parents[1].joinpath("conftest.py").read_text())
    cases = '@pytest.mark.slow_but(2)\n@pytest.mark.parametrize("case", range(10))\ndef test_ten(case): pass'
    pytester.makepyfile(f"import pytest\n{cases}")
    quick = pytester.runpytest("--collect-only", "-q", "-m", "not slow").outlines
    assert [line.partition("::")[2] for line in quick if "::" in line] == ["test_ten[2]", "test_ten[7]"]
