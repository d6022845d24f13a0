"""The built-in rewards for choices, form, length, comparison within the group, and a server."""

import math
import time

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.rewards import resolve_rewards


def value(function, response, answer="", tokens=None, components=None, **args):
    reward = resolve_rewards(
        RewardConfig(terms={"right": {"function": "exact_match"}, "own": {"function": function, **args}})
    )[1]
    optional = {"tokens": tokens, "components": components}
    given = {name: optional[name] for name in reward.wants - {"args"}}
    return reward.function(prompt="", response=response, answer=answer, record={}, **given)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("so it is\n(C).", "C"),
        ("A is wrong, so the answer is (B)", "B"),
        ("Answer: **D**", "D"),
        ("The answer is A. No, the answer is B.", "B"),
        (r"the answer is A, \boxed{C}", "C"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{12}", None),
        ("I like A and B", None),
        ("the answer is Apple", None),
        ("", None),
    ],
)
def test_choice(response, letter):
    assert [value("choice", response, answer) for answer in "ABCD"] == [
        float(answer == letter) for answer in "ABCD"
    ]


def test_choice_of_places_and_letters():
    assert value("choice", r"answer is A \boxed{B}", "A", response_from=["boxed"]) == 0.0
    assert value("choice", r"answer is A \boxed{\text{(B) } 12}", "B", response_from=["boxed"]) == 1.0
    assert value("choice", "answer is 2", ["1", "2"], letters="123") == 1.0
    with pytest.raises(ValueError, match="contains none of the letters"):
        value("choice", "A", "Paris")


@pytest.mark.parametrize(
    ("reference", "letter"),
    [
        ("A) yes", "A"),
        ("(B) 12", "B"),
        ("C. Paris", "C"),
        ("Answer: D, because it is", "D"),
        ("A triangle has three sides, so the answer is C.", "C"),
    ],
)
def test_a_reference_may_have_the_text_of_the_choice(reference, letter):
    """`A) yes` was refused as a reference, although the same text in a response was found."""
    assert [value("choice", f"the answer is {own}", reference) for own in "ABCD"] == [
        float(own == letter) for own in "ABCD"
    ]


@pytest.mark.parametrize("other", ["math", "choice"])
def test_another_term_does_not_change_what_exact_match_compares(other):
    """The answer 1,234 became 1234 if `math` was another term, and was then compared with 1,234."""
    places = {"answer_from": ["hashes"], "response_from": ["hashes"]}
    config = RewardConfig(terms={"same": {"function": "exact_match"}, "other": {"function": other}}, **places)
    exact_match = resolve_rewards(config)[0].function
    for text in ("so #### 1,234", "#### A) yes"):
        assert exact_match(prompt="", response=text, answer=text, record={}) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [("12\n", 1.0), ("1\n2", 1.0), ("12 x", 0.0), ("", 0.0)],
)
def test_regex(response, expected):
    assert value("regex", response, pattern=r"\d.?\d") == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think>a</think><answer>c</answer>", 1.0),
        ("<think>a</think> so <answer>c</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>c</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("a</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>c", 0.0),
    ],
)
def test_format(response, expected):
    assert value("format", response) == expected


def test_format_of_a_long_response_takes_no_time():
    """The response has text between its tags.

    This used to take quadratic time, half a minute here, beyond reward.timeout.
    """
    start = time.monotonic()
    assert value("format", f"<think>{'a b ' * 20000}</think> so <answer>1</answer>") == 0.0
    assert time.monotonic() - start < 15


def test_format_with_other_tags():
    assert value("format", "a</think><answer>c</answer>", opened=True) == 1.0
    assert value("format", "<a>1</a>", tags=["a"]) == 1.0


@pytest.mark.parametrize(
    ("tokens", "both", "one"), [(100, 1, 1), (50, 0.5, 1), (0, 0, 1), (150, 0.5, 0.5), (250, 0, 0)]
)
def test_linear_length(tokens, both, one):
    assert value("linear_length", "", tokens=tokens, target=100, width=100) == both
    assert value("linear_length", "", tokens=tokens, target=100, width=100, shorter_is_free=True) == one


@pytest.mark.parametrize("tokens", [0, 1, 250, 500, 999])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_cosine_length(tokens, right):
    """arXiv:2502.03373 section 3.2."""
    at_zero, at_end = (2.0, 1.0) if right else (-10.0, 0.0)
    expected = at_end + 0.5 * (at_zero - at_end) * (1 + math.cos(tokens * math.pi / 1000))
    args = {"right_short": 2, "right_long": 1, "wrong_short": -10, "wrong_long": 0, "exceeded": -10}
    args |= {"right": "right", "longest": 1000, "components": {"right": right}}
    assert value("cosine_length", "", tokens=tokens, **args) == pytest.approx(expected)
    assert value("cosine_length", "", tokens=1000, **args) == -10


def group(function, tokens, rights, **args):
    components = [{"right": right} for right in rights]
    reward = resolve_rewards(
        RewardConfig(terms={"right": {"function": "exact_match"}, "own": {"function": function, **args}})
    )[1]
    return reward.function(
        prompt="", responses=[""] * len(tokens), answer="", record={}, tokens=tokens, components=components
    )


def test_group_length():
    """arXiv:2501.12599 section 2.3.3."""
    assert group("group_length", [10, 30, 20, 50], [1, 1, 0, 0], right="right") == [0.5, 0.0, 0.0, -0.5]
    assert group("group_length", [10, 10], [1, 0], right="right") == [0.0, 0.0]


def test_rank():
    assert group("rank", [30, 10, 20], [1, 0, 1]) == [0.0, 1.0, 0.5]
    assert group("rank", [10, 10, 20], [1, 0, 1], largest_first=True) == [0.25, 0.25, 1.0]
    assert group("rank", [30, 10, 20, 5], [1, 0, 1, 1], among="right") == [0.0, 0.0, 0.5, 1.0]
    assert group("rank", [30, 10], [1, 0], among="right") == [1.0, 0.0]
    assert group("rank", [30, 10], [0, 0], among="right") == [0.0, 0.0]
    assert group("rank", [30, 10, 5], [0, 2, 2], by="right", largest_first=True) == [0.0, 0.75, 0.75]
