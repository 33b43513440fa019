"""One notebook through papermill, and one page of HTML: the only file that runs the notebook tools."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mistune
import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter

from ..files import write_text
from ..paths import ROOT
from .folder import VARIABLE

LOG = "kernel.log"

logging.getLogger("papermill").addHandler(logging.NullHandler())  # errors are reported here, once

# nbconvert's own page loads three scripts from the network before it shows a word.  This one shows the text at
# once; the equations are typeset when MathJax can be loaded and read as LaTeX when it cannot.
TEMPLATE = r"""{% extends 'index.html.j2' %}
{% block html_head_js_requirejs %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_js_mathjax %}
<script>MathJax = {tex: {inlineMath: [['$', '$'], ['\\(', '\\)']], processEscapes: true, tags: 'ams'}};</script>
<script defer src="https://cdn.jsdelivr.net/npm/mathjax@3.2.2/es5/tex-svg.js"></script>
{% endblock %}
{% block data_png scoped %}<div class="jp-RenderedImage jp-OutputArea-output">
<img src="data:image/png;base64,{{ output.data['image/png'] | escape_html }}"
 alt="{{ cell.metadata.get('mystnb', {}).get('image', {}).get('alt', 'figure') | escape_html }}"></div>{% endblock %}
"""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: 85%; }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: left; }}
</style></head><body>
{body}
</body></html>
"""


class ThisPython(AsyncKernelManager):
    """Starts kernels with the interpreter that is running, whatever `python3` means in the user's Jupyter folders."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())

    async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
        # What a kernel says outside the notebook would tear the progress bar; of a crash it is all there is.
        with open(Path(os.environ[VARIABLE]) / LOG, "wb") as log:
            await super().start_kernel(**options, stdout=log, stderr=log)


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for the kernels that are started inside; None takes one away."""
    before = {name: os.environ.get(name) for name in values}

    def put(wanted: Mapping[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def execute(source: Path, stage: Path, parameters: dict[str, Any], on_cell: Callable[[int], None]) -> list[str]:
    """Run the notebook `source` into the folder `stage`: executed notebook, HTML, and what the notebook saves there.

    Args:
        source: the notebook; its folder is the working directory.
        stage: an empty folder; it becomes `$SPECDEC_RESULTS` of the kernel.
        parameters: for papermill.
        on_cell: called with the number of each cell as it starts.

    Returns:
        Nothing when the notebook ran through, else two lines: the cell, and its error.
    """
    last = ""

    def cell_starts(cell: Any, cell_index: int) -> None:
        nonlocal last
        last = f"cell {cell_index + 1}: {first_line(cell.source)}"
        on_cell(cell_index)

    kernel_variables = {
        VARIABLE: str(stage),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    executed = stage / source.name
    error: list[str] = []
    try:
        with variables(kernel_variables):
            papermill.execute_notebook(
                literal(source),
                literal(executed),
                parameters=parameters,
                kernel_name="python3",
                language="python",
                cwd=source.parent,
                progress_bar=False,
                extra_arguments=["--IPKernelApp.log_level=40"],
                kernel_manager_class=ThisPython,
                on_cell_start=cell_starts,
            )
    except papermill.PapermillExecutionError as failure:
        error = [f"In [{failure.exec_count}]: {first_line(failure.source)}", f"{failure.ename}: {failure.evalue}"]
    except DeadKernelError:
        said = (stage / LOG).read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
        error = [last, f"the kernel died: {said or 'killed, perhaps for want of memory'}"]
    except KeyboardInterrupt:
        logging.getLogger("asyncio").addFilter(silent_about_interrupts)
        raise
    except Exception as failure:  # whatever it is: what there is, is kept
        error = [last, f"{type(failure).__name__}: {failure}"]
    if executed.exists():
        try:
            finish(executed)
        except Exception as failure:  # of one notebook, whatever it is
            error = error or [
                "the executed notebook could not be made into a page",
                f"{type(failure).__name__}: {failure}",
            ]
    return [first_line(line) for line in error]


def finish(executed: Path) -> None:
    """Take this machine's paths out of an executed notebook, and write its page beside it."""
    notebook = nbformat.read(executed, as_version=4)
    for machine_bound in ("input_path", "output_path", "environment_variables"):
        notebook.metadata.get("papermill", {}).pop(machine_bound, None)
    nbformat.write(notebook, executed)
    write_text(executed.with_suffix(".html"), html(notebook, executed.stem))


def silent_about_interrupts(record: logging.LogRecord) -> bool:
    """Drop what asyncio says of the tasks that an interrupt has ended: who interrupted knows."""
    ended = record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)
    return not ended and not record.getMessage().startswith("Task was destroyed but it is pending")


def literal(path: Path) -> str:
    """papermill reads braces in a path as fields to fill in."""
    return str(path).replace("{", "{{").replace("}", "}}")


def first_line(text: str) -> str:
    return text.strip().split("\n")[0].strip()


def html(notebook: Any, title: str) -> str:
    """The executed notebook as one page, figures inside, each with the alternative text of its cell."""
    body, _ = HTMLExporter(raw_template=TEMPLATE).from_notebook_node(notebook, {"metadata": {"name": title}})
    return body


def page(markdown: str, title: str) -> str:
    """A small page of markdown text with tables; HTML inside the text is shown, not obeyed."""
    return PAGE.format(title=title, body=mistune.create_markdown(plugins=["table"])(markdown))
