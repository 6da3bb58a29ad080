"""Writes whole values on a board as fast as it can, until it is killed. Argument: descriptor of the board."""

from __future__ import annotations

import sys

from ridethrough.snapshot.board import Board


def value(number: int) -> dict[str, object]:
    """A value whose every field follows from its number, and whose length changes."""
    return {"number": number, "text": str(number) * (1 + number % 40), "twice": 2 * number}


def main() -> None:
    board = Board(int(sys.argv[1]))
    number = int(board.read().get("number", 0))
    number += 1
    board.write(value(number))
    print("ready", flush=True)
    while True:
        number += 1
        board.write(value(number))


if __name__ == "__main__":
    main()
