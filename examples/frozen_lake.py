"""Text form of gymnasium's FrozenLake for a language model: the player's position and its neighbours."""

from typing import Any

# The moves in the order of gymnasium's actions: left, down, right, up.
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
EDGE = "#"


def field_at(rows: list[str], row: int, column: int) -> str:
    """Return the letter of a field: S start, F frozen, H hole, G goal, or # beyond the edge."""
    return rows[row][column] if 0 <= row < len(rows) and 0 <= column < len(rows[row]) else EDGE


def around(rows: list[str], row: int, column: int) -> str:
    """Return a text such as `10 L#DFRHUS`: row and column, then the field that each move leads to."""
    seen = (f"{move}{field_at(rows, row + down, column + right)}" for move, (down, right) in MOVES.items())
    return f"{row}{column} {''.join(seen)}"


def surroundings(task: Any, observation: Any) -> str:
    """Return the text that the model reads for an observation. Use it as rollout.gymnasium.text.

    task: the gymnasium environment, for its map.
    observation: index of the player's field, row by row.
    """
    rows = ["".join(field.decode() for field in row) for row in task.unwrapped.desc]
    return around(rows, *divmod(int(observation), len(rows[0])))
