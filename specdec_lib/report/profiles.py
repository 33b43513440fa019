"""Which notebooks run with which parameters; everything that can be wrong is found before anything runs.

A profile is a name under `sizes` in the YAML files beside the notebooks (`chapters.py`): `smoke`, `cpu`, `full`, `gpu`,
or one of your own.  It runs the notebooks that have it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ForwardRef

import nbformat
import papermill
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ..errors import SpecdecError
from .chapters import read_chapter
from .runner import literal


@dataclass(frozen=True)
class Parameter:
    """One line of a `parameters` cell: `name: annotation = default  # comment`.

    Attributes:
        annotation: a type, made of Python's own: `int`, `str`, `list[int]`, `dict[str, float]`.
    """

    name: str
    annotation: str
    default: Any
    comment: str


@dataclass(frozen=True)
class Profile:
    """The notebooks of a profile in their order, each with its parameters."""

    name: str
    notebooks: dict[str, dict[str, Any]]


def read_notebook(path: Path) -> Any:
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise SpecdecError(
            f"{path.name} is not a notebook that can be read ({type(error).__name__}): restore it"
        ) from None


def parameters_of(path: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, as papermill reads them from the cell tagged `parameters`; empty without one.

    Raises:
        SpecdecError: the cell holds anything but lines of the form `name: type = literal  # meaning`.  papermill skips
            a line that it cannot read: one without `=`, with a second `=` in its value or comment, or with `|` in its
            type.
    """
    cells = [cell for cell in read_notebook(path).cells if "parameters" in cell.metadata.get("tags", [])]
    read = papermill.inspect_notebook(literal(path))
    found: dict[str, Parameter] = {}

    def refused(node: ast.stmt) -> SpecdecError:
        return SpecdecError(
            f"{path.stem}: line {node.lineno} of the parameters cell must read `name: type = literal  # meaning`, "
            "with one `=` and a type such as int, str or list[int]"
        )

    lines = ast.parse(cells[0].source).body if cells else []
    for node in lines:  # all of them first: papermill joins a line without `=` to the one before
        if not (isinstance(node, ast.AnnAssign) and node.value):
            raise refused(node)
    for node in lines:
        try:
            each = read[ast.unparse(node.target)]  # type: ignore[attr-defined]
            name, kind, default = each["name"], each["inferred_type_name"], ast.literal_eval(each["default"])
            accepts(kind, default)
        except (KeyError, ValueError, SyntaxError, NameError):
            raise refused(node) from None
        found[name] = Parameter(name, kind, default, each["help"])
    return found


def accepts(annotation: str, value: Any) -> bool:
    """Whether a value from YAML can stand for a parameter of this type.  Raises `NameError` for what is no type.

    >>> accepts("float", 3), accepts("int", True), accepts("float", "1e-4"), accepts("list[int]", [1, 2])
    (True, False, False, True)
    """
    adapter: TypeAdapter[Any] = TypeAdapter(ForwardRef(annotation))  # type: ignore[arg-type]
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    except PydanticUserError:
        raise NameError(f"{annotation} is no type") from None
    return True


def check_value(where: str, parameter: Parameter, value: Any) -> None:
    if accepts(parameter.annotation, value):
        return
    hint = f"use a value like {parameter.default!r}"
    if isinstance(value, str):
        try:
            hint = f"write {float(value)!r} without quotes" if "e" not in value.lower() else "write 1e-4 as 1.0e-4"
            hint += " (YAML reads this one as text)"
        except ValueError:
            pass
    raise SpecdecError(f"{where}: {parameter.name} must be {parameter.annotation}, got {value!r}: {hint}")


def load_profile(name: str, folder: Path) -> Profile:
    """Read what each notebook of `folder` says of the profile, and check it against the notebook.

    Raises:
        SpecdecError: unknown profile, a file without its notebook, an unknown parameter, a value of the wrong type.
    """
    chapters = {path.stem: read_chapter(path) for path in sorted(folder.glob("*.yaml"))}
    known = list(dict.fromkeys(profile for chapter in chapters.values() for profile in chapter["sizes"]))
    if name not in known:
        there = f"use one of {', '.join(known)}" if known else "run from a checkout, which has notebooks/*.yaml"
        raise SpecdecError(f"unknown profile {name!r}: {there}")
    notebooks = {}
    for stem, chapter in chapters.items():
        if name not in chapter["sizes"]:
            continue
        check_stem(stem, sorted(path.stem for path in folder.glob("*.ipynb")), f"{stem}.yaml")
        given, parameters = chapter["sizes"][name], parameters_of(folder / f"{stem}.ipynb")
        for key, value in given.items():
            if key not in parameters:
                there = ", ".join(parameters) or "none"
                raise SpecdecError(f"{stem}.yaml, profile {name}: {stem} has no parameter {key!r}: it has {there}")
            check_value(f"{stem}.yaml, profile {name}", parameters[key], value)
        notebooks[stem] = given
    return Profile(name, notebooks)


def check_stem(stem: object, known: Sequence[str], where: str) -> None:
    if stem not in known:
        raise SpecdecError(f"{where}: unknown notebook {stem!r}: there are {', '.join(known) or 'none'}")


def select(profile: Profile, notebooks: Sequence[str] | None) -> list[str]:
    """The stems to run, in the profile's order; names may be given as stems, file names or paths.

    Raises:
        SpecdecError: the profile does not list a notebook that is asked for.
    """
    if not notebooks:
        return list(profile.notebooks)
    asked = [Path(name).name.removesuffix(".ipynb") for name in notebooks]
    for stem in asked:
        check_stem(stem, list(profile.notebooks), f"profile {profile.name}")
    return [stem for stem in profile.notebooks if stem in asked]
