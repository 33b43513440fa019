"""Which notebooks run with which parameters; everything that can be wrong is found before anything runs.

A profile, `notebooks/profiles/<name>.yaml`, maps each notebook's stem to the parameters that differ from the
defaults in its `parameters` cell.  The key `_timeout`, if there, is the limit of one cell in seconds.
"""

from __future__ import annotations

import ast
import io
import tokenize
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from ..errors import SpecdecError


@dataclass(frozen=True)
class Parameter:
    """One line of a `parameters` cell: `name: annotation = default  # comment`."""

    name: str
    annotation: str
    default: Any
    comment: str


@dataclass(frozen=True)
class Profile:
    """The checked content of a profile file, in its order."""

    name: str
    notebooks: dict[str, dict[str, Any]]
    timeout: float | None


def read_notebook(path: Path) -> Any:
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise SpecdecError(
            f"{path.name} is not a notebook that can be read ({type(error).__name__}): restore it"
        ) from None


def parameters_of(path: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, from the cell tagged `parameters`; empty when there is none.

    Raises:
        SpecdecError: the cell holds anything but lines of the form `name: type = literal`.
    """
    cells = [cell for cell in read_notebook(path).cells if "parameters" in cell.metadata.get("tags", [])]
    return {p.name: p for cell in cells for p in parse_parameters(cell.source, path.stem)}


def parse_parameters(source: str, where: str) -> list[Parameter]:
    """
    >>> parse_parameters("n_samples: int = 20_000  # draws per test", "a notebook")
    [Parameter(name='n_samples', annotation='int', default=20000, comment='draws per test')]
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    found = []
    for node in ast.parse(source).body:
        try:
            assert isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
            default = ast.literal_eval(node.value)
        except (AssertionError, ValueError):
            raise SpecdecError(
                f"{where}: line {node.lineno} of the parameters cell must read `name: type = literal  # meaning`"
            ) from None
        comment = comments.get(node.end_lineno or node.lineno, "")
        found.append(Parameter(node.target.id, ast.unparse(node.annotation), default, comment))
    return found


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value from YAML can stand for a parameter of this type.  YAML has lists where Python has tuples.

    >>> fits(3, float), fits(True, int), fits("1e-4", float), fits([1, 2], list[int]), fits(None, int | None)
    (True, False, False, True, True)
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in arguments)
    if origin is typing.Literal:
        return value in arguments
    if annotation is None or annotation is types.NoneType:
        return value is None
    if (origin or annotation) in (list, tuple):
        item = arguments[0] if arguments else Any
        return isinstance(value, list) and all(fits(x, item) for x in value)
    if isinstance(value, bool):
        return annotation is bool
    return isinstance(value, int | float if annotation is float else origin or annotation)


def check_value(where: str, parameter: Parameter, value: Any) -> None:
    names = {"Any": Any, "Literal": typing.Literal, "Optional": typing.Optional, "Union": typing.Union}
    annotation = eval(parameter.annotation, names)  # the notebook's own text, which the run executes anyway
    if fits(value, annotation):
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
    """Read `folder/profiles/<name>.yaml` and check it against the notebooks in `folder`.

    Raises:
        SpecdecError: unknown profile, notebook, parameter or setting, or a value of the wrong type.
    """
    known = sorted(path.stem for path in folder.glob("profiles/*.yaml"))
    if name not in known:
        there = f"use one of {', '.join(known)}" if known else "run from a checkout, which has notebooks/profiles/"
        raise SpecdecError(f"unknown profile {name!r}: {there}")
    where = f"profile {name}"
    try:
        content = yaml.safe_load((folder / "profiles" / f"{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SpecdecError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SpecdecError(f"{where}: must map notebooks to their parameters, as in `00_quickstart: {{}}`")
    timeout = content.pop("_timeout", None)
    if timeout is not None and not (fits(timeout, float) and timeout > 0):
        raise SpecdecError(f"{where}: _timeout must be a positive number of seconds, got {timeout!r}")
    notebooks = {stem: {} if given is None else given for stem, given in content.items()}
    for stem, given in notebooks.items():
        check_stem(stem, sorted(path.stem for path in folder.glob("*.ipynb")), where)
        if not isinstance(given, dict):
            raise SpecdecError(f"{where}: {stem} must map parameters to values, got {given!r}")
        parameters = parameters_of(folder / f"{stem}.ipynb")
        for key, value in given.items():
            if key not in parameters:
                there = ", ".join(parameters) or "none"
                raise SpecdecError(f"{where}: {stem} has no parameter {key!r}: it has {there}")
            check_value(f"{where}, {stem}", parameters[key], value)
    return Profile(name, notebooks, timeout)


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
