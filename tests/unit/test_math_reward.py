"""The reward `math`: commas that it takes for thousands separators, and numbers with exponents."""

import random

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.data.prompts import reference_answer
from grpo_megatron.rewards import resolve_reward
from grpo_megatron.rewards.answers import answer_key, last_number, normalise_answer
from grpo_megatron.rewards.numerals import plain_numbers

BOXED = resolve_reward(RewardConfig(function="math", response_from=["boxed"]))
OWN_SEARCH = resolve_reward(RewardConfig(function="math"))


def score(response, answer, reward=BOXED):
    return reward(prompt="", response=f"So it is $\\boxed{{{response}}}$.", answer=answer, record={})


@pytest.mark.parametrize("reward", [BOXED, OWN_SEARCH])
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("(3,4)", "(3, 4)", 1.0),
        ("12", "(1,2)", 0.0),
        ("123", r"\{1,2,3\}", 0.0),
        ("(1,23)", "(12,3)", 0.0),
        ("10{,}000", "10000", 1.0),
        ("34", "(3,4)", 0.0),
        (r"\{1, 2, 3\}", r"\{1,2,3\}", 1.0),
        ("[0,100)", "[0, 100)", 1.0),
        ("[0100)", "[0,100)", 0.0),
        ("1,2", "x=1 or x=2", 1.0),
        ("12", "1,2", 0.0),
        ("1,234.5", "1234.5", 1.0),
        ("1,23", "123", 0.0),
        ("-1,234,567", "-1234567", 1.0),
        (r"10\,000", "10,000", 1.0),
        (r"1,\!234", "1234", 1.0),
        (r"\frac{1,000}{3}", r"\frac{1000}{3}", 1.0),
        (r"1,234\text{ dollars}", "1234", 1.0),
        ("x=1,234", "1234", 1.0),
        ("(1,234)", "(1, 234)", 1.0),
        ("(1,234)", "1234", 0.0),
        (r"\left(100,200\right)", "(100, 200)", 1.0),
        (r"\left( 100,200 \right)", "100200", 0.0),
        (r"\{100,200,300\}", r"\{100, 200, 300\}", 1.0),
        ("(1,234, 5)", "(1234, 5)", 1.0),
        (r"(1{,}234,5{,}678)", "(1234, 5678)", 1.0),
        ("(10,000)", "10000", 1.0),
        ("100,-200,300", r"\{100,-200,300\}", 1.0),
        ("1,234 and 5,678", r"\{1234, 5678\}", 1.0),
        ("\u22121,234", "-1234", 1.0),
    ],
)
def test_commas(reward, response, answer, expected):
    """`math` used to delete every comma, so that a point was a number, and equalled any other with the
    same digits.
    """
    assert score(response, answer, reward) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1,23",
        "1.234,56",
        "1.234,567",
        "0,234",
        "12,34,567",
        "1234,567",
        "1,2345",
        "1,234,5",
        "(3,4)",
        "2{,}5",
        r"(3,\,4)",
    ],
)
def test_other_commas_stay_as_they_are(text):
    """European decimals, lists and points used to lose their commas."""
    assert normalise_answer(text) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,234.", "1,234"),
        ("(1,234)", "234"),
        ("the roots are 1,2", "2"),
        ("1,2345", "2345"),
        ("costs (about 1,234 cents)", "1,234"),
        (r"it has 10{,}000", r"10{,}000"),
        (r"it has 10\,000.5 m", r"10\,000.5"),
        ("1,234, then 5,678", "5,678"),
        ("1,000,000 in all", "1,000,000"),
        ("a) 12,345", "12,345"),
    ],
)
def test_the_last_number_has_only_its_own_commas(text, number):
    """The last number of `1,2345` was 5, and that of `10{,}000` was 000."""
    assert last_number(text) == number


def test_votes_differ_where_commas_do():
    """maj@n used to count (1,23), (12,3) and 123 as one answer, and `(3,4)` and `(3, 4)` as two."""
    assert (
        len(set(map(answer_key, ["(1,23)", "(12,3)", "123", "1,23", "(1,234)", "1,234", "2 3", "23"]))) == 8
    )
    assert len(set(map(answer_key, ["(3,4)", "(3, 4)", r"(3,\,4)", r" ( 3,4 ) ", "$(3,4)$."]))) == 1
    assert len(set(map(answer_key, ["1,234", "1234", "1{,}234", r"1\,234", r"\$1,234", "1.234e3"]))) == 1


# -- agreement with math-verify

SEPARATORS = [",", "{,}", "\\,", ",\\!"]


def number(value, separator):
    return f"{value:,}".replace(",", separator)


def written(kind, items, separator, space):
    """Return an answer with thousands separators.

    separator: "" for none.
    """
    parts = [number(item, separator) for item in items]
    inside = f",{space}".join(parts)
    return {
        "number": parts[0],
        "decimal": f"{parts[0]}.25",
        "roots": ", ".join(f"x={part}" for part in parts),
        "or": " or ".join(parts),
        "list": inside,
        "point": f"({inside})",
        "interval": f"[{inside})",
        "set": f"\\{{{inside}\\}}",
        "sized": f"\\left({inside}\\right]",
        "fraction": f"\\frac{{{parts[0]}}}{{7}}",
    }[kind]


def pairs(count):
    """Yield pairs of answers, each in two spellings: as people write it, and without thousands separators."""
    draw = random.Random(5)
    kinds = ["number", "decimal", "roots", "or", "list", "point", "interval", "set", "sized", "fraction"]
    for index in range(count):
        kind = kinds[index % len(kinds)]
        items = sorted(draw.choice([1, -1]) * draw.randrange(10 ** draw.randint(1, 7)) for _ in range(2))
        others = draw.choice([items, items, [items[0], items[1] + 1], [int(f"{items[0]}{abs(items[1])}"), 5]])
        both = []
        for values in (items, others):
            # Without a space behind the commas of a list, a plain comma in its numbers would be one of them.
            space = draw.choice(["", " "])
            separator = draw.choice(SEPARATORS if space else SEPARATORS[1:])
            both.append((written(kind, values, separator, space), written(kind, values, "", space)))
        yield both


def test_agreement_with_math_verify_on_generated_pairs():
    """Judge 200 pairs of answers as math-verify does without thousands separators."""
    from math_verify import parse, verify

    verdicts = []
    for (gold, plain_gold), (response, plain_response) in pairs(200):
        parsed = [parse(f"${text}$", parsing_timeout=None) for text in (plain_gold, plain_response)]
        expected = float(verify(*parsed, timeout_seconds=None))
        assert score(response, gold) == expected, (gold, response)
        assert expected or answer_key(gold) != answer_key(response), (gold, response)
        verdicts.append(expected)
    assert 60 < sum(verdicts) < 140


# -- exponents


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-07, "0.0000001"),
        (1e22, "10000000000000000000000"),
        (-2.5e-05, "-0.000025"),
        (1.5e300, "15" + "0" * 299),
        (0.1, "0.1"),
        (3.0, "3"),
        (123456789012345680.0, "123456789012345680"),
        ([1e-05, 2], ["0.00001", "2"]),
    ],
)
def test_number_answers_are_written_in_digits(value, text):
    """An answer that a file gives as a number became `1e-07`, which math-verify reads as e - 7."""
    assert reference_answer(value, "record 0: answer") == text


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("1e-07", 1e-07, 1.0),
        ("10^{-7}", 1e-07, 1.0),
        ("e-7", 1e-07, 0.0),
        ("e-7", "1e-07", 0.0),
        ("0", 1e-07, 0.0),
        ("3e-7", 1e-07, 0.0),
        ("0.0000003", 1e-07, 0.0),
        (r"1.0001 \times 10^{-7}", 1e-07, 0.0),
        ("10^{22}", 1e22, 1.0),
        ("1e22", 1e22, 1.0),
        ("1.5e3", "1500", 1.0),
        ("1500", "1.5E+03", 1.0),
        (r"2.5 \times 10^{-5}", 2.5e-05, 1.0),
        ("2e-5", 2e-05, 1.0),
        ("2e-1", "2e - 1", 1.0),
        ("0.333333", r"\frac{1}{3}", 1.0),
        ("0.000025", 2.6e-05, 0.0),
    ],
)
def test_exponents(response, answer, expected):
    """`1.5e3` was read as 1.5 times e times 3, and small numbers were equal if their first six decimals
    were.
    """
    assert score(response, reference_answer(answer, "")) == expected


@pytest.mark.parametrize("text", ["1e4000", "0x1e5", "v1e5", "1e5.5", "e-7", "2e - 1", "1.2.3e4"])
def test_what_is_no_number_with_an_exponent(text):
    assert plain_numbers(text) == text
