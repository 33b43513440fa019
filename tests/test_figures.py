"""Figures and tables: files only under a runner, the same bytes twice, one look."""

import getpass
import json
import platform
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn

from specdec_lib.errors import SpecdecError
from specdec_lib.report import environment, save, save_light, save_table, use_style


@pytest.fixture(autouse=True)
def style_of_this_test_only(monkeypatch):
    monkeypatch.delenv("SPECDEC_RESULTS", raising=False)
    with plt.style.context("default"):
        yield
    plt.close("all")


def drawing():
    fig, ax = plt.subplots()
    for k in range(3):
        ax.plot([1, 2, 3], [k, k + 1, k], marker="o", label=str(k))
    ax.set_title("Three lines")
    ax.legend()
    return fig


def test_by_hand_the_figure_comes_back_closed_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fig = drawing()
    assert save(fig, "lines") is fig
    assert not plt.fignum_exists(fig.number)
    assert list(tmp_path.iterdir()) == []


def test_under_a_runner_png_and_svg_are_the_same_each_time(tmp_path, monkeypatch):
    use_style()
    written = []
    for run in ("first", "second"):
        monkeypatch.setenv("SPECDEC_RESULTS", str(tmp_path / run))
        save(drawing(), "lines")
        written.append([(tmp_path / run / "figures" / f"lines.{kind}").read_bytes() for kind in ("png", "svg")])
    assert written[0] == written[1]
    png, svg = written[0]
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg and b"dc:date" not in svg
    height, width = plt.imread(tmp_path / "first" / "figures" / "lines.png").shape[:2]
    assert (width, height) == tuple(np.round(np.array(plt.rcParams["figure.figsize"]) * plt.rcParams["savefig.dpi"]))


def test_the_style_is_readable_without_colour():
    use_style()
    colours = [colour.lower() for colour in plt.rcParams["axes.prop_cycle"].by_key()["color"]]
    assert colours == seaborn.color_palette("colorblind").as_hex()
    styles = [str(line.get_linestyle()) + str(line._dash_pattern) for line in drawing().axes[0].lines]
    assert len(set(styles)) == 3


def test_tables_keep_row_labels_and_drop_bare_counters(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_RESULTS", str(tmp_path))
    frame = pd.DataFrame({"gamma": [1, 2], "alpha": [0.5, 0.25]})
    assert save_table(frame, "plain") is frame
    save_table(frame.set_index("gamma"), "labelled")
    save_table(pd.DataFrame({"alpha": [0.5]}, index=["small"]), "unnamed")
    lines = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("tables/*.csv")}
    assert lines["plain"] == lines["labelled"] == ["gamma,alpha", "1,0.5", "2,0.25"]
    assert lines["unnamed"] == [",alpha", "small,0.5"]


@pytest.mark.parametrize("name", ["", "../out", "Upper", "a b", "a.png"])
def test_a_name_that_is_no_file_name_is_refused_also_by_hand(name):
    with pytest.raises(SpecdecError, match="cannot name a file"):
        save(drawing(), name)


def test_the_environment_names_the_machine_but_nobody():
    found = environment()
    assert found["cpu"]["usable_cores"] >= 1 and found["memory_gib"] > 0 and found["packages"]["torch"]
    assert found["python"] == platform.python_version()
    words = json.dumps(found)
    assert platform.node() not in words and str(Path.home()) not in words
    assert f'"{getpass.getuser()}"' not in words


def test_a_light_image_is_a_small_png_of_the_same_figure():
    import io

    import PIL.Image

    fig, axes = plt.subplots()
    axes.plot([0, 1], [0, 1])
    whole = io.BytesIO()
    fig.savefig(whole, format="png", dpi=100)
    shown = PIL.Image.open(io.BytesIO(save_light(fig, "line").data))
    assert shown.format == "PNG" and len(shown.getcolors()) <= 64
    assert shown.size == PIL.Image.open(whole).size
