"""The house: rooms import only from rooms above them, and no function or module outgrows its reader."""

import ast
from pathlib import Path

import pytest

from specdec_lib.paths import ROOT

LIBRARY = ROOT / "specdec_lib"
# ground floor first; a room imports only from rooms above it, also inside functions
ORDER = [
    "errors", "validate", "paths", "files", "environment", "provenance", "interrupt", "console", "workers",
    "distributions", "processing", "sampling", "detokenize", "prompts",
    "verify", "exact", "models", "generation_settings", "drafters", "decode", "load",
    "acceptance", "theory", "engines", "audit", "bench", "report", "distill", "studies", "cli",
]  # fmt: skip
DECODE_PATH = [
    "distributions.py",
    "processing.py",
    "sampling.py",
    "detokenize.py",
    "verify",
    "models",
    "drafters",
    "decode",
]
DOORS = {
    "claim",
    "generate",
    "generate_plain",
    "distill",
    "bench",
    "audit",
}  # documented signatures: Python's and the shell's


def modules():
    return sorted(LIBRARY.rglob("*.py"))


def typing_only(tree):
    """Nodes that only a type checker reads."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found |= {id(inner) for inner in ast.walk(node)}
    return found


def arrows(source, module):
    """The rooms that a module imports from, function-local imports included.

    >>> arrows("from ..errors import x", ("models", "fast"))
    ['errors']
    """
    tree = ast.parse(source)
    skipped = typing_only(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in skipped:
            package = list(module[: len(module) - node.level])
            target = [*package, *(node.module or "").split(".")] if node.module else package
            found += [target[0]] if target else [alias.name for alias in node.names]
    return found


def wrong_arrows(source, module):
    """Arrows to a room that is not above."""
    here = module[0]
    return [room for room in arrows(source, module) if room != here and ORDER.index(room) > ORDER.index(here)]


def parts(path):
    return path.relative_to(LIBRARY).with_suffix("").parts


def test_rooms_import_only_from_rooms_above():
    wrong = {}
    for path in modules():
        module = parts(path)
        if module[0] == "__init__":
            continue
        assert module[0] in ORDER, f"the room {module[0]} has no place in the order"
        if found := wrong_arrows(path.read_text(), module):
            wrong["/".join(module)] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    ["from ..report import x", "def f():\n    from ..report.claims import x", "from .. import bench"],
)
def test_an_arrow_downwards_is_seen(source):
    assert wrong_arrows(source, ("models", "fast"))
    assert not wrong_arrows("from ..errors import x\nfrom .session import y", ("models", "fast"))
    assert not wrong_arrows("if TYPE_CHECKING:\n    from ..report import x", ("models", "fast"))


def functions():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def test_no_function_but_the_doors_takes_more_than_eleven_arguments():
    """`self` counts."""
    many = {
        f"{path.name}:{node.name}": len(node.args.args) + len(node.args.kwonlyargs)
        for path, node in functions()
        if len(node.args.args) + len(node.args.kwonlyargs) > 11 and node.name not in DOORS
    }
    assert many == {}


def decode_path():
    for name in DECODE_PATH:
        place = LIBRARY / name
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def test_the_decode_path_asks_foreign_objects_only_what_they_have():
    """`getattr` and `hasattr` are for transformers' configs and tokenizers; our own classes have base classes."""
    lines = probes = 0
    for path in decode_path():
        text = path.read_text()
        lines += sum(bool(line.strip()) for line in text.splitlines())
        probes += sum(
            isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
            for node in ast.walk(ast.parse(text))
        )
    assert probes / lines * 1000 < 10, f"{probes} probes in {lines} lines"


def test_no_module_computes_where_the_data_is():
    for path in modules():
        if path.name != "paths.py":
            assert "parents[" not in path.read_text(), path


def test_paths_lead_to_what_is_there():
    from specdec_lib import paths

    for folder in (paths.DRAFTS, paths.PAPER, paths.PROMPTS, paths.TINY_T5):
        assert folder.is_dir()
    assert Path(__file__).is_relative_to(paths.ROOT)
    assert {folder.name for folder in paths.data_folders()} >= {"drafts", "paper", "prompts", "t5"}


def test_no_function_is_longer_than_a_screen():
    """60 lines, without its signature and its docstring."""
    long = {}
    for path, node in functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if body and (lines := node.end_lineno - body[0].lineno + 1) > 60:
            long[f"{path.name}:{node.name}"] = lines
    assert long == {}
