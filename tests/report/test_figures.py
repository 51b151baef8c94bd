"""Tests of the paper's figures: plotted values and error messages."""

import csv
import json
import shutil
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail import recipes, run_folder
from longtail.cli import main
from longtail.paper.figures import FIGURES, figure, read_points
from longtail.reporting import plots, run_artifacts, training_curves
from longtail.reporting.page import report
from longtail.reporting.result_rows import make_rows
from tests.raises import fails, raises
from tests.report.made import Page, make_run

ROOT = Path(__file__).parents[2]
COUNTS = [4, 300, 25, 120, 60, 12]  # not in the order of their size
RANKED = [1, 3, 4, 2, 5, 0]
EPOCHS = {"supcon": ["contrast", "contrast", "linear", "linear"], "paco": ["train"] * 4}


def norms(method: str, seed: int) -> np.ndarray:
    """Return gradient norms of four epochs; the first two epochs of SupCon have no classifier."""
    found = np.random.default_rng([seed, len(method)]).uniform(0.1, 1, (4, 6)).astype(np.float32)
    found[[stage == "contrast" for stage in EPOCHS[method]]] = np.nan
    return found


@pytest.fixture
def folder(tmp_path):
    """Two methods with three seeds each, with gradients."""
    for method, stages in EPOCHS.items():
        for seed in range(3):
            run = make_run(tmp_path / f"runs/{method}/seed{seed}", recipes.digits_lt(method), seed, COUNTS)
            np.savez(run / run_folder.GRADIENTS, norms=norms(method, seed), stages=np.array(stages))
    return tmp_path / "runs"


def pulls(folder):
    (found,) = training_curves.gradient_norms_by_dataset(make_rows(run_folder.read_finished(folder))).values()
    return {pull.label: pull for pull in found}


# Fig. 2


def test_gradient_curve_is_mean_of_last_stage(folder):
    found = pulls(folder)
    assert found.keys() == {"SupCon", "PaCo"}
    for method, label, epochs in (("supcon", "SupCon", slice(2, 4)), ("paco", "PaCo", slice(0, 4))):
        for seed in range(3):
            for place, c in enumerate(RANKED):
                wanted = np.mean([norms(method, seed)[e, c] for e in range(4)[epochs]], dtype=float)
                assert found[label].norms_SC[seed, place] == pytest.approx(wanted)


def test_seed_range_and_head_tail_ratio():
    pull = training_curves.ClassGradientNorms("x", np.array([[8.0, 2, 1], [4, 2, 2]]))
    assert pull.seed_range().tolist() == [[4, 2, 1], [6, 2, 1.5], [8, 2, 2]]
    assert (
        pull.head_tail_ratio == 4 and pull.label_with_ratio.startswith("x: ") and pull.label_with_ratio.endswith(" 4.0")
    )
    many = training_curves.ClassGradientNorms("x", np.array([[9.0, 3] + [1.0] * 16 + [0.5, 1.5]]))
    assert many.head_tail_ratio == 6  # the first two of twenty over the last two


@pytest.mark.filterwarnings("error::RuntimeWarning")  # such as a division by zero
def test_zero_gradients_have_no_ratio(folder, tmp_path):
    for file in folder.rglob(run_folder.GRADIENTS):
        np.savez(file, norms=np.zeros((4, 6)), stages=np.array(EPOCHS["paco"]))
    assert {pull.label_with_ratio for pull in pulls(folder).values()} == {"SupCon", "PaCo"}
    page = Page(report(folder, tmp_path / "page.html").read_text(encoding="utf-8"))
    legends = [words for words in page.text["li"] if words.strip().startswith(("SupCon", "PaCo"))]
    assert legends and all(words.strip() in ("SupCon", "PaCo") for words in legends)
    figure("gradient", folder, tmp_path / "g.svg")


def test_plotted_lines_match_norms(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    figure("gradient", folder, tmp_path / "g.svg")
    (axis,) = drawn[0].axes
    found = pulls(folder)
    assert axis.get_yscale() == "log" and len(axis.lines) == len(axis.collections) == 2
    for line, band, pull in zip(axis.lines, axis.collections, found.values(), strict=True):
        assert line.get_label() == pull.label_with_ratio
        np.testing.assert_allclose(line.get_xydata(), np.c_[np.arange(1, 7), pull.norms_SC.mean(0)])
        edge = band.get_paths()[0].vertices[:, 1]
        assert edge.min() == pytest.approx(pull.norms_SC.min()) and edge.max() == pytest.approx(pull.norms_SC.max())


def test_runs_without_gradients_are_named(folder, tmp_path, capsys):
    bare = make_run(tmp_path / "bare/seed0", recipes.digits_lt("ce"), 0, COUNTS)
    draw = ["figure", "gradient", str(folder), str(bare), "-o", str(tmp_path / "g.svg")]
    fails(capsys, draw, "missing-file", bare, "--log.gradients")
    assert not (tmp_path / "g.svg").exists()
    shutil.copytree(bare, folder / "ce/seed0")  # among others it is left out
    assert pulls(folder).keys() == {"SupCon", "PaCo"}


@pytest.mark.parametrize("spoilt", ["torn", "other classes", "nothing learned", "no key"])
def test_invalid_gradients_are_ignored(spoilt, folder):
    file = folder / "paco/seed1" / run_folder.GRADIENTS
    if spoilt == "torn":
        file.write_bytes(file.read_bytes()[:50])
    elif spoilt == "no key":
        np.savez(file, norms=np.ones((4, 6)))
    else:
        stored = np.ones((4, 7)) if spoilt == "other classes" else np.full((4, 6), np.nan)
        np.savez(file, norms=stored, stages=np.array(EPOCHS["paco"]))
    assert pulls(folder)["PaCo"].norms_SC.shape == (2, 6)
    if spoilt != "other classes":
        assert run_artifacts.read_gradient_norms(run_folder.read(file.parent)) is None


def test_page_shows_gradients_if_present(folder, tmp_path):
    page = Page(report(folder, tmp_path / "page.html").read_text(encoding="utf-8"))
    found = pulls(folder)
    assert found["PaCo"].label_with_ratio in page.words()
    (link,) = [a for a in page.of("a") if a.get("download") == "gradients.csv"]
    head, first, *rest = csv.reader(unquote(link["href"]).split("utf-8,")[1].splitlines())
    assert head[0] == "rank" and {*head[1:]} == {"SupCon", "PaCo"} and len(rest) == 5
    for label, value in zip(head[1:], first[1:], strict=True):
        assert float(value) == pytest.approx(found[label].norms_SC.mean(0)[0])
    for file in folder.rglob(run_folder.GRADIENTS):
        file.unlink()
    page = Page(report(folder, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert not [a for a in page.of("a") if a.get("download") == "gradients.csv"]


def test_page_with_a_zero_gradient_class(folder, tmp_path):
    file = folder / "paco/seed0" / run_folder.GRADIENTS
    np.savez(file, norms=np.where(np.arange(6) == 2, 0, norms("paco", 0)), stages=np.array(EPOCHS["paco"]))
    assert "NaN" not in report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    figure("gradient", folder, tmp_path / "g.png")


# Fig. 1


def test_latency_comes_from_runs_or_from_results(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "accuracy_by_latency", lambda panels, path: drawn.append(panels))
    figure("latency", [folder], tmp_path / "l.svg")
    ((dots,),) = [panels.values() for panels in drawn]
    assert {dot.label: list(dot.values["latency_b64"]) for dot in dots} == {
        k: [3.0, 4.0, 5.0] for k in ("SupCon", "PaCo")
    }
    stored = json.loads((ROOT / "results/latency.json").read_text())
    (dots,) = read_points(ROOT / "results/latency.json").values()
    wanted = {row["label"]: row["metrics"]["latency_b64"]["values"] for row in stored["rows"]}
    assert {dot.label: dot.values["latency_b64"] for dot in dots} == wanted and len(wanted) == 7


def test_latency_reports_unreadable_input(folder, tmp_path):
    out = tmp_path / "l.svg"
    (tmp_path / "a.json").write_text("[1, 2]")
    (tmp_path / "b.json").write_text('{"table": {"methods": {}}, "runs": []}')
    for name in ("a.json", "b.json"):
        with raises("damaged-file", tmp_path / name):
            figure("latency", tmp_path / name, out)
    with raises("conflict", folder):
        figure("latency", [folder, tmp_path / "a.json"], out)
    for file in folder.rglob(run_folder.METRICS):
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "latency_b64"}))
    with raises("missing-file", "latency_b64", "longtail eval"):
        figure("latency", folder, out)
    assert not out.exists()


# Fig. 4 and Fig. 3


def test_extra_loss_marks_minimum(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("longtail.reporting.plots.save_figure", lambda figure, path: drawn.append(figure))
    figure("extra", out=tmp_path / "e.svg")
    (axis,) = drawn[0].axes
    curve, dot = axis.lines
    x, y = curve.get_data()
    assert dot.get_xdata()[0] == pytest.approx(1 / 1.41) and dot.get_ydata()[0] <= y.min() + 1e-9
    assert x[y.argmin()] == pytest.approx(0.71, abs=0.01) and axis.texts[0].get_text().endswith(" 0.71")


def test_framework_figure_is_that_of_the_docs(tmp_path):
    out = longtail.figure("framework", out=tmp_path / "f.svg")
    assert out.read_bytes() == (ROOT / "src/longtail/reporting/framework.svg").read_bytes()
    words = " ".join("".join(e.itertext()) for e in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text"))
    assert all(word in words for word in ("query network", "key network", "centers", "queue", "PaCo loss"))
    with raises("invalid-value", "f.png", ".svg"):
        figure("framework", out=tmp_path / "f.png")


# All


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")  # such as a missing glyph; not a deprecation
def test_every_figure_is_written_in_every_format(name, kind, folder, tmp_path, capsys):
    if name == "framework" and kind != "svg":
        pytest.skip("drawn by hand, as SVG")
    sources, out = [str(folder)] * FIGURES[name][1], tmp_path / f"f.{kind}"
    assert main(["figure", name, *sources, "-o", str(out)]) == 0 and str(out) in capsys.readouterr().out
    once = out.read_bytes()
    if kind == "png":
        with Image.open(out) as image:
            assert image.size[0] > 600
    else:
        assert once.startswith(b"%PDF") if kind == "pdf" else ElementTree.fromstring(once).tag.endswith("svg")
    figure(name, sources, out)
    assert out.read_bytes() == once  # the same runs give the same file
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith("f.")] == [out.name]


@pytest.mark.parametrize(
    ("args", "kind", "values"),
    [
        (["gradint"], "unknown-name", ["'gradint'", "'gradient'"]),
        (["gradient"], "invalid-value", ["figure gradient"]),
        (["gradient", "nowhere"], "missing-file", ["nowhere"]),
        (["extra", "nowhere"], "conflict", ["nowhere"]),
        (["extra", "-o", "x.jpg"], "invalid-value", ["x.jpg", ".svg", ".png", ".pdf"]),
        (["extra", "-o", "no/x.svg"], "missing-file", ["no/x.svg"]),
        (["latency", "nothing.json"], "missing-file", ["nothing.json"]),
    ],
)
def test_errors_are_one_line(args, kind, values, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(capsys, ["figure", *args], kind, *values)
    assert not list(tmp_path.iterdir())
