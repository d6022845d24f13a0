"""The word problems of `make quickstart-real`: right answers, and held-out problems that training has not
seen.
"""

import json
import re

import pytest

from tests.tools import run_tool


def made(folder, *arguments) -> dict[str, list[dict[str, str]]]:
    run_tool("make_word_problems", folder, *arguments)
    return {
        side: [json.loads(line) for line in (folder / f"{side}.jsonl").read_text().splitlines()]
        for side in ("train", "eval")
    }


@pytest.fixture(scope="module", params=[0, 1, 7])
def problems(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("problems"), "--seed", request.param)


def numbers(record) -> tuple[int, int]:
    x, y = map(int, re.findall(r"\d+", record["prompt"]))
    return x, y


def operation(record) -> str:
    words = {"+": ("together", "there now"), "-": ("left",), "*": ("boxes", "in all")}
    (found,) = [sign for sign, of_kind in words.items() if any(word in record["prompt"] for word in of_kind)]
    return found


def test_every_answer_is_that_of_the_two_numbers(problems):
    for record in problems["train"] + problems["eval"]:
        x, y = numbers(record)
        expected = {"+": x + y, "-": x - y, "*": x * y}[operation(record)]
        assert record["answer"] == str(expected), record
        assert expected > 0


def test_all_problems_differ_and_the_kinds_are_equally_many(problems):
    assert len(problems["train"]) == 1000
    assert len(problems["eval"]) == 128
    for side in problems.values():
        assert len({record["prompt"] for record in side}) == len(side)
        counts = [sum(operation(record) == sign for record in side) for sign in "+-*"]
        assert max(counts) - min(counts) <= 1


def test_held_out_problems_have_people_objects_and_numbers_of_their_own(problems):
    def names(side):
        return {
            name for record in problems[side] for name in re.findall(r"\b[A-Z][a-z]+\b", record["prompt"])
        }

    def objects(side):
        return {re.search(r"How many (\w+)", record["prompt"])[1] for record in problems[side]}

    def pairs(side):
        return {(operation(record), frozenset(numbers(record))) for record in problems[side]}

    sentence_starts = {"There", "How"}
    assert names("train") & names("eval") <= sentence_starts
    assert len(names("eval")) > 5
    assert not objects("train") & objects("eval")
    assert not pairs("train") & pairs("eval")


def test_a_seed_makes_the_same_problems_again_and_another_seed_others(tmp_path):
    first, again, other = (made(tmp_path / str(i), "--seed", seed) for i, seed in enumerate((3, 3, 4)))
    assert first == again
    assert first["eval"] != other["eval"]


@pytest.mark.parametrize("arguments", [("--held-out", 0), ("--train", 2001), ("--train", "many")])
def test_a_number_of_problems_that_cannot_be_made_is_refused(tmp_path, arguments):
    _, err = run_tool("make_word_problems", tmp_path / "out", *arguments, status=2)
    assert arguments[0] in err
    assert not (tmp_path / "out").exists()


def test_the_largest_numbers_of_problems_can_be_made(tmp_path):
    problems = made(tmp_path, "--train", 2000, "--held-out", 2000)
    assert [len(side) for side in problems.values()] == [2000, 2000]
