"""A distillation small enough for a test, and a board that keeps what it is told."""

from specdec_lib.distill.recipe import Job

ROWS, LENGTH = 16, 96


class Quiet:
    """A board that keeps what it is told."""

    def __init__(self):
        from specdec_lib.distill.progress import Board

        self.board, self.lines = Board(), []

    def say(self, line):
        self.lines.append(line)

    def step(self, name):
        return self.board.step(name)


def a_job(folder, target, prompts, /, **changes):
    """Three shards to train on and one to measure on, all in `folder`."""
    usual = {
        "out": folder / "draft", "target": str(target), "work": folder / "work", "prompts": prompts,
        "tokens": 3 * ROWS * LENGTH, "layers": 1, "width": 16, "heads": 2, "shortlist": 24, "passes": 4, "batch": 8,
        "rate": 0.1, "max_new_tokens": 12, "rows": ROWS, "length": LENGTH, "device": "cpu", "dtype": "float32",
        "every": 1e9,
    }  # fmt: skip
    return Job(**usual | changes)
