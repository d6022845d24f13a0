"""Finding answers in what models write: boxes, letters and last numbers in all their spellings."""

import pytest

from grpo_megatron.rewards.answers import boxed, find_letter, hashes, last_number
from grpo_megatron.rewards.numerals import plain_minus


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        ("\\boxed\n  {7}", "7"),
        (r"\framebox{7}", "7"),
        (r"\boxed 7$", "7"),
        (r"$\boxed7$ and so on", "7"),
        (r"\boxed{\left\{ 1,2 \right.}", r"\left\{ 1,2 \right."),
        (r"\boxed{\} 5}", r"\} 5"),
        (r"\boxed{\{x : x > 1\}}", r"\{x : x > 1\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{\boxed{\frac{1}{2}}}", r"\frac{1}{2}"),
        (r"first \boxed{3}, then \fbox{4}", "4"),
        (r"\boxed{3}. I put it in \boxed{}.", "3"),
        (r"\\boxed{7}", "7"),
        (r"a \\ \boxed{7}", "7"),
        (r"a \\\boxed{7}", "7"),
        (r"} } \boxed{7} {", "7"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{ \boxed{7}", "7"),
        (r"\boxed{3}, no, \boxed{4", None),
        (r"use \boxed for the answer", None),
        (r"\boxed{ }", None),
        (r"\boxedness{7}", None),
    ],
)
def test_boxes(text, contents):
    r"""`\fbox`, a space before the brace, and escaped braces used to be missed."""
    assert boxed(text) == contents


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{\textbf{B}}", "B"),
        (r"\boxed{\mathrm{B}}", "B"),
        (r"\boxed{\mathbf{(B)}}", "B"),
        (r"\boxed{\text{(B) } 12}", "B"),
        (r"\boxed{$B$}", "B"),
        (r"\boxed{\text{Option B}}", "B"),
        (r"\boxed{\textbf{Answer: } C}", "C"),
        (r"\fbox{D}", "D"),
        ("the answer is $B$.", "B"),
        (r"the answer is \textbf{B}", "B"),
        (r"the answer is \(\mathrm{B}\)", "B"),
        ("the answer is **B**", "B"),
        ("**Answer**: __C__", "C"),
        ("The final answer is:\n\n**(C)** 12", "C"),
        ("the answer is option B", "B"),
        ("The correct option is C.", "C"),
        ("the answer is <b>B</b>", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer> (B) Paris </answer> A guess", "B"),
        ("<answer>\nB</answer>", "B"),
        ("<answer>$\\mathbf{B}$</answer>", "B"),
        (r"<think>perhaps \boxed{A}</think><answer>B</answer>", "B"),
        (r"<answer>\boxed{C}</answer>", "C"),
        ("the answer I get is B", "B"),
        ("the answer I'd give is B", "B"),
        ("My answer: I think it is B", "B"),
        ("the answer to question 3 is B", "B"),
        ("the answer I get", None),
        ("the answer is I", "I"),
        ("\\textbf{B}", "B"),
        ("$\\text{C}$.", "C"),
        ("the answer is 2.5 or A", None),
        ("the answer is Bob", None),
    ],
)
def test_letters(text, letter):
    """Letters in fonts, dollar signs and tags used to be missed, and the pronoun I was taken for the
    choice I.
    """
    assert find_letter(text, "ABCDEFGHIJ") == letter


def test_numbers_as_letters():
    assert find_letter("the answer is 2.", "123") == "2"
    assert find_letter("the answer is 2.5", "123") is None
    assert find_letter("the answer is 2,500", "123") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is \u22125", "-5"),
        ("x = \u2212 5", "5"),
        ("it is \uff0d5.5", "-5.5"),
        ("it is \u20135", "-5"),
        ("it is (\u22125)", "-5"),
        ("it is \u2212$5", "-$5"),
        ("3-5", "5"),
        ("pages 3\u20135", "5"),
        ("3\u22125", "5"),
        ("x-5", "5"),
        ("(2)-5", "5"),
        ("$3-$5", "$5"),
        ("50%-5", "5"),
        ("10^{2}-5", "5"),
        ("= -5", "-5"),
        ("x=-.5", "-.5"),
        ("1.5e3", "1.5e3"),
        ("about 6.02E+23.", "6.02E+23"),
        ("it is -2e-07", "-2e-07"),
        ("5 eggs", "5"),
        ("5e", "5"),
    ],
)
def test_last_numbers(text, number):
    """`3-5` used to be -5 and `1.5e3` to be 3, and a minus sign that is not ASCII was lost."""
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "plain"),
    [("3\u22125", "3-5"), ("\u20135", "-5"), ("3\u20135", "3\u20135"), ("a \u2013 5", "a \u2013 5")],
)
def test_minus_signs(text, plain):
    assert plain_minus(text) == plain


@pytest.mark.parametrize(
    ("text", "answer"), [("#### 5\n####  \n", "5"), ("####\n5", None), ("####7", "7"), ("#### \t 7 ", "7")]
)
def test_hashes_without_an_answer_are_passed_over(text, answer):
    assert hashes(text) == answer
