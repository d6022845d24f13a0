"""Finding the program in a response."""

import pytest

from grpo_megatron.config.sandbox import CodePlace
from grpo_megatron.rewards.fences import find_program


@pytest.mark.parametrize(
    ("response", "place", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", CodePlace.last_block, "b\n"),
        ("```python\na\n```\n```\nb\n```", CodePlace.first_block, "a\n"),
        ("```python\na\n```\noutput:\n```text\nb\n```", CodePlace.last_block, "a\n"),
        ("1. so:\n   ```Python\n   if a:\n       b\n   ```\n", CodePlace.last_block, "if a:\n    b\n"),
        ("```python\ncut off", CodePlace.last_block, None),
        ("no code", CodePlace.last_block, None),
        ("a = 1", CodePlace.whole, "a = 1"),
        (" \n", CodePlace.whole, None),
    ],
)
def test_finding_programs(response, place, program):
    assert find_program(response, place) == program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)```", "print(1)"),
        ("```python\nprint(1)``` \nIt prints 1.", "print(1)"),
        ("```python\nprint(1)```</answer>", "print(1)"),
        ("<answer>```python\nprint(1)\n```</answer>", "print(1)\n"),
        ("<answer>\n```python\nprint(1)\n``` </answer> </s>", "print(1)\n"),
        ("Here it is: ```python\nprint(1)\n```", "print(1)\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')\n"),
        ("```{.python}\nprint(1)\n```", "print(1)\n"),
        ('```python title="a.py"\nprint(1)\n```', "print(1)\n"),
        ("```python3.11\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```, which prints:", "print(1)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```1```", "print(1)\n"),
        ("```bash\nls\n```\n```\nprint(1)\n```\n```text\n1\n```", "print(1)\n"),
        ("Run ```ls``` first.\n```python\nprint(1)\n```", "print(1)\n"),
        ("Write ``` around it.\n```python\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ('```python\ntext = "```"\nprint(text)\n```', 'text = "```"\nprint(text)\n'),
        ("```python\nprint(1)\n```\n```python\ncut off", "print(1)\n"),
        ("```python\n```", ""),
        ("```json\n{}\n```", None),
        ("```python\nprint(1)\n~~~", None),
        ("````python\nprint(1)\n```", None),
        ("``python\nprint(1)\n``", None),
    ],
)
def test_fences_as_models_write_them(response, program):
    """A fence behind the last line of code did not close the block, so that the program's output was run
    as code.
    """
    assert find_program(response, CodePlace.last_block) == program


def test_the_first_program():
    response = "```\n1 2\n```\n```python\na\n```\n```python\nb\n```"
    assert find_program(response, CodePlace.first_block) == "a\n"
    assert find_program(response, CodePlace.last_block) == "b\n"
