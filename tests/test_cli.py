"""The shell's doors: what they print, and one line for bad input."""

import subprocess
import sys

import pytest

from specdec_lib.decode import Round
from specdec_lib.report.plots import fates
from specdec_lib.report.trace import Piece, Renderer, to_plain


def specdec(*arguments, **options):
    command = [sys.executable, "-c", "from specdec_lib.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_try_marks_the_draft_and_prints_both_timings(packaged_folder, tiny_folder):
    out = specdec(
        "try", "abc abc abc abc", "--target", str(tiny_folder("llama")), "--draft", "lookup", "--max-new-tokens", "30"
    )
    assert out.returncode == 0, out.stderr
    assert "\x1b" not in out.stdout  # piped: no colour codes
    for word in ("block efficiency", "acceptance rate", "one by one", "times as fast"):
        assert word in out.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("try", ""), "empty prompt"),
        (("try", "hi", "--gamma", "0"), "gamma must be a whole number >= 1"),
        (("try", "hi", "--temperature", "-1"), "temperature must be a number >= 0"),
        (("try", "hi", "--target", "no/such/folder"), "there is no model folder"),
        (("reproduce", "--profile", "huge"), "huge"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message):
    out = specdec(*arguments)
    assert out.returncode == 2
    assert message in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1


def test_import_is_light():
    heavy = ["torch", "transformers", "matplotlib", "pandas", "scipy", "papermill", "datasets", "typer", "rich"]
    code = f"import sys, specdec_lib; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


class Bytes:
    """A tokenizer of single bytes, to split characters."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_is_shown_whole():
    text = "aé€b"
    renderer = Renderer(Bytes())
    shown = ""
    for byte in text.encode():
        done = Round(0, [], 0, [byte], [], [], 0, 0.0, 0.0, 0.0)
        shown += "".join(piece.text for piece in renderer.pieces(done))
    assert shown == text


def test_pieces_and_fates_of_a_round():
    done = Round(0, [97, 98, 99], 1, [97, 120], [1.0] * 3, [1.0] * 3, 0, 0.0, 0.0, 0.0)
    pieces = Renderer(Bytes()).pieces(done)
    assert pieces == [Piece("accepted", "a"), Piece("rejected", "b"), Piece("correction", "x")]
    assert "".join(map(to_plain, pieces)) == "a{-b-}[x]"
    assert fates(done) == ["kept", "last", "rejected", "untested"]


def test_a_round_cut_by_the_end_of_text():
    done = Round(0, [97, 98, 99], 3, [97, 98], [1.0] * 3, [1.0] * 3, 0, 0.0, 0.0, 0.0)
    assert fates(done) == ["kept", "kept", "untested"]
    assert [p.kind for p in Renderer(Bytes()).pieces(done)] == ["accepted"]
