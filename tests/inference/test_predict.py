"""`longtail predict` and `longtail.predict`: selected files, outputs, hostile names, and unreadable images."""

import csv
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import longtail
from longtail.cli import main
from longtail.cli.predict import make_prediction_table
from longtail.inference.model import UNCALIBRATED, ClassProbability
from longtail.inference.predict import FilePrediction, find_images, predict_files
from longtail.text import escape_nonprintable
from tests.data.guard import run_guarded
from tests.inference.made import finished_run, folder_config, photographs
from tests.raises import raises

HOSTILE = ("=1+1", 'a,"b"', "Ähre \N{RIGHT-TO-LEFT OVERRIDE}x", "[red]dog")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """Return a run on classes with hostile names, and its images."""
    place = tmp_path_factory.mktemp("made")
    root = photographs(place / "data", HOSTILE)
    return finished_run(place / "run/seed0", folder_config(root)), root


def test_the_test_images_are_predicted_as_they_were_measured(made, tmp_path, monkeypatch):
    """Images are read by threads and processed in order, in batches smaller than the test set."""
    monkeypatch.setattr("longtail.inference.model.MAX_BATCH", 3)
    folder, root = made
    stored = np.load(folder / "predictions.npz", allow_pickle=False)
    files = [root / name for name in stored["ids"]]
    rows = longtail.predict(folder, files, top=4)
    assert [row.path for row in rows] == [str(file) for file in files] and len(rows) > 3
    p = np.exp(stored["logits"]) / np.exp(stored["logits"]).sum(1, keepdims=True)
    for row, wanted in zip(rows, p, strict=True):
        assert [guess.label for guess in row.guesses] == np.argsort(-wanted).tolist()
        np.testing.assert_allclose([guess.probability for guess in row.guesses], np.sort(wanted)[::-1], rtol=1e-3)
        assert [guess.name for guess in row.guesses] == [sorted(HOSTILE)[guess.label] for guess in row.guesses]


def sheet(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_which_images_are_meant(tmp_path, monkeypatch):
    root = photographs(tmp_path / "x", ("a", "b"), n=2)
    (root / "a/notes.txt").write_text("x")
    four = sorted(root.rglob("*.*g"))
    assert find_images([root]) == four and find_images([str(root / "*/*.jpg")]) == [
        f for f in four if f.suffix == ".jpg"
    ]
    assert find_images([four[2], root / "b"]) == [four[2], *four[2:]]
    assert find_images([str(root / "**/1.jpg")]) == [root / "a/1.jpg", root / "b/1.jpg"]
    odd = root / os.fsdecode(b"caf\xe9 [1].jpg")
    odd.write_bytes(four[0].read_bytes())
    assert find_images([str(odd)]) == [odd]  # a file is a file, also where its name looks like a pattern
    lines = b"\n".join([os.fsencode(four[0]), b"", os.fsencode(odd), os.fsencode(root / "b")]) + b"\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert find_images(["-"]) == [four[0], odd, *four[2:]]
    (tmp_path / "empty").mkdir()
    with raises("missing-file", "nowhere.jpg"):
        find_images(["nowhere.jpg"])
    with raises("missing-file", tmp_path / "empty"):
        find_images([str(tmp_path / "empty")])
    with raises("invalid-value"):
        find_images([])
    with raises("missing-file", root / "*.bmp"):
        find_images([str(root / "*.bmp")])


@pytest.mark.parametrize("depth", [1, 40])
def test_pattern_enters_each_folder_once(tmp_path, monkeypatch, depth):
    """Folders with two links each to the next folder, or to themselves, have an exponential number of paths."""
    for number in range(depth):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for name in "ab":
            (folder / name).symlink_to(f"../{(number + 1) % depth}")
    (folder / "x.jpg").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/x.jpg").touch()
    monkeypatch.chdir(tmp_path)
    for pattern in ("**/x.jpg", "**/*.jpg", f"{tmp_path}/**/x.jpg", f"{tmp_path}/**"):
        outcome = run_guarded(lambda pattern=pattern: find_images([pattern]), seconds=1)
        assert outcome.kind == "done", outcome
        (found,) = find_images([pattern])
        assert os.path.samefile(found, folder / "x.jpg")


def test_csv_and_json_say_the_same_and_names_are_text(made, tmp_path, monkeypatch, capsys):
    folder, root = made
    monkeypatch.chdir(tmp_path)
    Path("=cmd|'-C calc'!A0.png").write_bytes(next(root.rglob("*.png")).read_bytes())
    Path("new\nline\x1b[31m.png").write_bytes(next(root.rglob("*.png")).read_bytes())
    images = sorted(p for p in os.listdir() if p.endswith("png"))
    args = [str(folder), *images, str(root), "--csv", "out.csv", "--json", "out.json", "--top", "2"]
    assert main(["predict", *args]) == 0
    rows = sheet("out.csv")
    trees = [json.loads(line) for line in Path("out.json").read_text().splitlines()]
    assert len(rows) == len(trees) == 34 and list(rows[0]) == [
        *("path", "class_1", "probability_1", "class_2", "probability_2", "error"),
    ]
    assert [t["path"] for t in trees[:2]] == images
    assert {row["path"] for row in rows[:2]} == {"./=cmd|'-C calc'!A0.png", r"new\nline\x1b[31m.png"}
    for row, tree in zip(rows, trees, strict=True):
        said = tree["predictions"]
        assert [row["probability_1"], row["probability_2"]] == [f"{guess['probability']:.6g}" for guess in said]
        assert row["class_1"].lstrip("'") == escape_nonprintable(said[0]["class"])
        assert not any(cell.startswith(("=", "+", "@", "\t")) for cell in row.values())
    assert {guess["class"] for tree in trees for guess in tree["predictions"]} >= {HOSTILE[0], HOSTILE[1]}
    out = capsys.readouterr()
    assert UNCALIBRATED in out.err and "--prior" in out.err and "\x1b" not in out.out + out.err
    assert sorted(os.listdir()) == sorted([*images, "out.csv", "out.json"])


def test_the_table_and_json_on_standard_output(made, capsys):
    folder, root = made
    images = [str(f) for f in sorted((root / HOSTILE[3]).iterdir())]
    assert main(["predict", str(folder.parent), *images, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "[red]dog" in text and "%" in text and "\N{RIGHT-TO-LEFT OVERRIDE}" not in text
    assert main(["predict", str(folder), images[0], "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["path"] == images[0] and len(json.loads(line)["predictions"]) == 4
    assert main(["predict", str(folder), images[0], "--csv", "-"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("path,class_1")


def test_a_narrow_terminal_has_fewer_guesses_and_no_common_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guesses = tuple(ClassProbability(f"class {c}", 0.2, c) for c in range(5))
    paths = ["a/b/0.png", str(tmp_path / "a/c/1.png")]  # some of them absolute
    narrow, wide = (
        make_prediction_table([FilePrediction(path, guesses) for path in paths], width) for width in (80, 200)
    )
    assert len(narrow.columns) == 3 and narrow.caption and len(wide.columns) == 6 and not wide.caption
    assert [str(cell) for cell in wide.columns[0].cells] == ["b/0.png", "c/1.png"]


def test_bad_images_are_named_and_never_predicted(made, tmp_path, monkeypatch, capsys):
    folder, root = made
    monkeypatch.chdir(tmp_path)
    good = sorted(map(str, (root / "=1+1").iterdir()))
    Path("empty.png").touch()
    Path("broken.jpg").write_bytes(Path(good[1]).read_bytes()[:300])
    os.mkfifo("pipe.png")
    images = [good[0], "empty.png", "broken.jpg", "pipe.png", good[1]]
    assert main(["predict", str(folder), *images, "--csv", "out.csv"]) == 2
    error = capsys.readouterr().err
    assert "empty.png (" in error and "--on_error skip" in error and not Path("out.csv").exists()
    assert main(["predict", str(folder), *images, "--on-error", "skip", "--csv", "out.csv", "--json", "out.json"]) == 0
    error = capsys.readouterr().err
    assert all(words in error for words in ("3 of", "pipe.png (", "FIFO", "empty.png (", "broken.jpg ("))
    rows = sheet("out.csv")
    assert [bool(row["error"]) for row in rows] == [False, True, True, True, False] and rows[1]["class_1"] == ""
    trees = [json.loads(line) for line in Path("out.json").read_text().splitlines()]
    assert ["error" in tree for tree in trees] == ["predictions" not in tree for tree in trees]
    alone = [row.guesses[0].probability for row in longtail.predict(folder, [good[0], good[1]])]
    np.testing.assert_allclose([float(rows[i]["probability_1"]) for i in (0, 4)], alone, rtol=1e-3)
    assert main(["predict", str(folder), "empty.png", "--on-error", "skip"]) == 1
    capsys.readouterr()
    assert (
        main(["predict", str(folder), good[0], *["empty.png"] * 22, "--on-error", "skip", "--csv", "-", "--json", "x"])
        == 0
    )
    out = capsys.readouterr()
    assert "to x" in out.err and "2 more" in out.err and len(out.out.splitlines()) == 24


def test_no_incomplete_files_remain(made, tmp_path, monkeypatch):
    folder, root = made
    monkeypatch.chdir(tmp_path)
    Path("out.csv").write_text("old")

    def fails(*args):
        yield next(predict_files(*args))
        raise RuntimeError("halfway")

    monkeypatch.setattr("longtail.inference.predict.predict_files", fails)
    with pytest.raises(RuntimeError, match="halfway"):
        longtail.predict(folder, root, csv="out.csv", json="out.json")
    assert Path("out.csv").read_text() == "old" and os.listdir() == ["out.csv"]


def test_the_prior_moves_probabilities(made, tmp_path):
    folder, root = made
    image = next(root.rglob("*.png"))
    weights = dict.fromkeys(HOSTILE, 1.0) | {HOSTILE[2]: 1e6}
    (tmp_path / "p.json").write_text(json.dumps(weights))
    assert longtail.predict(folder, image, prior=tmp_path / "p.json")[0].guesses[0].name == HOSTILE[2]
    assert longtail.predict(longtail.load(folder), image, prior=weights)[0].guesses[0].name == HOSTILE[2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["predict"], ["run"]),
        (["predict", "RUN"], ["images"]),
        (["predict", "nowhere", "IMAGE"], ["nowhere"]),
        (["predict", "RUN", "IMAGE", "--top", "0"], ["--top 0"]),
        (["predict", "RUN", "IMAGE", "--prior", "unifrm"], ["unifrm", "'uniform'"]),
        (["predict", "RUN", "IMAGE", "--json", "a.jpg"], ["a.jpg"]),
        (["predict", "RUN", "IMAGE", "--csv", "no/where.csv"], ["--csv no/where.csv"]),
        (["predict", "RUN", "nothing\x1b[31m.jpg"], [r"nothing\x1b[31m.jpg"]),
    ],
)
def test_mistakes_are_one_line(made, args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, root = made
    names = {"RUN": str(folder), "IMAGE": str(next(root.rglob("*.png")))}
    assert main([names.get(a, a) for a in args]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("longtail: ")]
    assert len(error) == 1 and all(word in error[0] for word in words), error
    assert os.listdir() == []


# Averages


@pytest.fixture(scope="module")
def two_seeds(made, tmp_path_factory) -> tuple[Path, Path]:
    """Return the folder of two seeds, and their images."""
    place, root = tmp_path_factory.mktemp("seeds"), made[1]
    for seed in range(2):
        finished_run(place / f"seed{seed}", folder_config(root), seed)
    return place, root


def probabilities(rows) -> np.ndarray:
    return np.array([[guess.probability for guess in sorted(row.guesses, key=lambda g: g.label)] for row in rows])


def test_ensemble_is_the_mean_of_the_seeds(two_seeds):
    folder, root = two_seeds
    single = [probabilities(longtail.predict(folder / f"seed{seed}", root, top=4)) for seed in range(2)]
    assert np.abs(single[0] - single[1]).max() > 1e-3
    found = probabilities(longtail.predict(folder, root, top=4, ensemble=True))
    np.testing.assert_allclose(found, (single[0] + single[1]) / 2, atol=1e-9)
    np.testing.assert_allclose(probabilities(longtail.predict(folder, root, top=4)), single[0], atol=1e-9)


def test_flip_is_the_mean_with_the_mirror_image(made):
    folder, _ = made
    plain, flipped = longtail.load(folder), longtail.load(folder, tta="flip")
    image = np.random.default_rng(0).integers(0, 256, (24, 30, 3), np.uint8)
    wanted = [plain(view).probabilities for view in (image, image[:, ::-1])]
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-6
    np.testing.assert_allclose(flipped(image).probabilities, np.mean(wanted, 0), atol=1e-9)
    symmetric = np.concatenate([image, image[:, ::-1]], 1)
    found = flipped(symmetric)
    np.testing.assert_allclose(found.probabilities, plain(symmetric).probabilities, atol=1e-6)
    np.testing.assert_allclose(found.logits, plain(symmetric).logits, atol=1e-5)


def test_class_frequencies_apply_to_all_networks(two_seeds):
    folder, root = two_seeds
    single = [probabilities(longtail.predict(folder / f"seed{s}", root, top=4, prior="train")) for s in range(2)]
    found = longtail.predict(folder, root, top=4, prior="train", ensemble=True, tta="none")
    np.testing.assert_allclose(probabilities(found), np.mean(single, 0), atol=1e-9)


@pytest.mark.parametrize("images", [3, None, [3], np.zeros((8, 8, 3), np.uint8)])
def test_images_are_paths(made, images):
    with raises("invalid-value"):
        longtail.predict(made[0], images)


def test_averages_that_are_impossible(made, two_seeds, tmp_path):
    with raises("invalid-value", str(made[0])):
        longtail.predict(made[0], made[1], ensemble=True)
    with raises("unknown-name", "rotate"):
        longtail.load(made[0], tta="rotate")
    with raises("unsupported"):
        longtail.export(longtail.load(two_seeds[0], ensemble=True), "safetensors", tmp_path / "x.safetensors")


def test_averages_of_the_command(two_seeds, tmp_path):
    folder, root = two_seeds
    out = tmp_path / "out.csv"
    assert (
        main(["predict", str(folder), str(root), "--ensemble", "--tta", "flip", "--top", "1", "--csv", str(out)]) == 0
    )
    wanted = longtail.predict(folder, root, top=1, ensemble=True, tta="flip")
    assert [row["class_1"].lstrip("'") for row in sheet(out)] == [
        escape_nonprintable(row.guesses[0].name) for row in wanted
    ]
