"""Inspection of a folder with all kinds of files: what is reported, what is read, and what stops training."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import longtail
from longtail.cli import main
from longtail.cli.data import list_problems, make_histogram
from longtail.config import DataConfig
from longtail.data import load
from longtail.data.inspection import inspect
from tests.data.files import bad_files, good_files
from tests.expected_text import check_text
from tests.raises import fails, raises


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    for split, n in {"train": 3, "val": 2}.items():
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(n):
                noise = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(noise).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def of(folder, **options) -> DataConfig:
    return DataConfig(name="folder", root=folder, image_size=20, **options)


def test_unusual_images_are_read_as_they_are_meant(folder):
    wanted = good_files(folder / "train/cat")
    found = inspect(of(folder))
    assert not found.unreadable and found.read == 21 and (found.exif_rotated, found.animated) == (2, 1)
    assert found.formats == {"PNG": 15, "JPEG": 2, "PPM": 2, "GIF": 1, "TIFF": 1} and found.modes["CMYK"] == 1
    assert found.width == (30, 30, 30) and found.height == (20, 20, 30)
    source = load(of(folder)).train
    corner = {i.split("/")[-1]: image[0, 0] for i, image in zip(source.ids, source.images, strict=True)}
    for name, pixel in wanted.items():
        assert np.abs(corner[name].astype(int) - pixel).max() <= 3, name


def test_bad_images_are_all_found_and_any_of_them_stops_a_training(folder):
    wanted = bad_files(folder / "train/cat")
    found = inspect(of(folder))
    reasons = {image.id.removeprefix("train/cat/"): image.why for image in found.unreadable}
    assert reasons.keys() == wanted.keys() and found.read == 10
    for name, words in wanted.items():
        assert reasons[name] and words in reasons[name], name
    for name in wanted:
        (folder / "train/cat" / name).rename(folder / name)
    for name in wanted:  # each of them alone
        (folder / name).rename(folder / "train/cat" / name)
        with raises("bad-image", f"cat/{name} ("):
            load(of(folder))
        assert [s.id for s in load(of(folder, on_error="skip")).skipped] == [f"train/cat/{name}"]
        (folder / "train/cat" / name).rename(folder / name)


def test_counts_need_no_image(folder):
    bad_files(folder / "train/cat")
    found = inspect(of(folder), quick=True)
    assert (found.counts, found.test_counts, found.imbalance) == ([12, 3], [2, 2], 4)
    assert found.shot_groups == {"many": 0, "medium": 0, "few": 2} and found.read == 0
    assert [image.id for image in found.unreadable] == ["train/cat/dead.png", "train/cat/empty.jpg"]  # known without it


def test_the_same_file_twice(folder):
    copies = {"train/cat/same.png": "train/cat/0.png", "train/dog/torn.png": "train/cat/1.png"}
    copies |= {"val/dog/leak.png": "train/dog/2.png", "val/cat/both.png": "train/dog/1.png"}
    for new, old in copies.items():
        (folder / new).write_bytes((folder / old).read_bytes())
    found = inspect(of(folder))
    assert found.duplicates == [["train/cat/0.png", "train/cat/same.png"]]
    assert found.in_several_classes == [
        ["train/cat/1.png", "train/dog/torn.png"],
        ["train/dog/1.png", "val/cat/both.png"],
    ]
    pairs = {"train/dog/1.png": "val/cat/both.png", "train/dog/2.png": "val/dog/leak.png"}
    assert found.leaked == [[f"train: {one}", f"test: {two}"] for one, two in pairs.items()]


def summary(capsys, folder) -> str:
    """Return the printed part about the images, without file sizes and bars; the settings that follow are left out."""
    found, *_ = capsys.readouterr().out.replace(folder.name, "images").split("\n\n")
    return "\n".join(line.rstrip(" █") for line in found.split("\n") if not line.startswith("width"))


def test_the_verb(folder, capsys):
    assert main(["data", "inspect", str(folder), "--quick"]) == 0
    check_text("test_inspection/quick", summary(capsys, folder))
    assert main(["data", "inspect", str(folder)]) == 0
    check_text("test_inspection/good", summary(capsys, folder))
    (folder / "train/cat/[bold]bad.png").write_bytes(b"")
    assert main(["data", "inspect", str(folder), "--json", str(folder / "found.json")]) == 1
    check_text("test_inspection/bad", summary(capsys, folder))
    (bad,) = json.loads((folder / "found.json").read_text())["unreadable"]
    assert bad["id"] == "train/cat/[bold]bad.png" and bad["why"]


@pytest.mark.parametrize("width", [80, 120])
def test_histogram_fits_into_the_terminal(width):
    names = [f"Species with a long scientific name {i}" for i in range(60)]
    screen = Console(width=width, file=io.StringIO())
    found = SimpleNamespace(class_names=names, counts=list(range(1060, 1000, -1)))
    screen.print(make_histogram(found, width))
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 20 and max(map(len, lines)) <= width
    assert all(10 <= line.count("█") <= 50 and not line.rstrip().endswith("…") for line in lines)


def test_ignored_files_are_reported(folder):
    (folder / "train/cat/x.xcf").write_bytes(b"x")
    (folder / "train/cat/notes").write_bytes(b"x")
    found = inspect(of(folder))
    assert len(found.notes) == 1
    check_text("test_inspection/other_files", found.notes[0])


def test_checksum_depends_on_skipped_images(folder):
    before = load(of(folder, on_error="skip"))
    file = folder / "train/cat/1.png"
    file.write_bytes(b"x" * file.stat().st_size)
    after = load(of(folder, on_error="skip"))
    assert len(after.skipped) == 1 and before.checksum != after.checksum


def test_a_split_that_cannot_be_read_at_all(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / f"train/{name}/{i}.png")
    (tmp_path / "val/cat").mkdir(parents=True)
    (tmp_path / "val/cat/0.png").write_bytes((tmp_path / "train/cat/0.png").read_bytes())
    held = load(of(tmp_path, val_fraction=0.2)).val.ids
    for i in held:
        (tmp_path / i).write_bytes(b"")
    with raises("bad-image", "validation"):
        load(of(tmp_path, val_fraction=0.2, on_error="skip"))
    (tmp_path / "val/cat/0.png").write_bytes(b"")
    with raises("bad-image", "evaluation"):
        load(of(tmp_path, on_error="skip"))


def test_unwritable_outputs_are_reported_before_anything_is_read(folder, capsys):
    for place in ("nowhere/x.json", "."):
        assert main(["data", "inspect", str(folder), "--json", place]) == 2
        out, err = capsys.readouterr()
        assert not out and f"--json {place}" in err and err.count("\n") == 1
    fails(capsys, ["data", "inspect", "x" * 300], "unknown-name", "x" * 300)
    fails(
        capsys,
        ["data", "inspect", str(folder), "--data.test_list", str(folder / "x.txt")],
        "missing-file",
        "--data.test_list",
    )


def test_the_verb_shard_and_mistakes(folder, capsys, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "shards"
    assert main(["data", "shard", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "10 images" in printed and str(out) in printed
    assert main(["data", "inspect", str(out), "--quick"]) == 0
    assert main(["data", "shard", str(folder)]) == 2 and "--out DIR" in capsys.readouterr().err
    fails(capsys, ["data", "look"], "unknown-name", "data inspect", "data shard")
    assert main(["data"]) == 0 and "data inspect" in capsys.readouterr().out


def test_names_of_skipped_images_are_not_interpreted_by_the_terminal(folder, capsys, tmp_path_factory):
    (folder / "train/cat/x\x1b[31m.png").write_bytes(b"not an image")
    out = tmp_path_factory.mktemp("out") / "shards"
    assert main(["data", "shard", str(folder), "--out", str(out), "--data.on_error", "skip"]) == 0
    error = capsys.readouterr().err
    assert "\x1b" not in error and "x\\x1b[31m.png" in error


def test_training_lists_skipped_images(folder, tmp_path_factory):
    bad_files(folder / "train/cat")
    out = tmp_path_factory.mktemp("out")
    flags = "--method ce --train.epochs 1 --train.batch_size 2 --data.image_size 8 --model.name resnet8_cifar"
    assert main(["train", str(folder), *flags.split(), "--out", str(out / "a"), "--train.device", "cpu"]) == 2
    more = ["--data.on_error", "skip", "--train.device", "cpu"]
    assert main(["train", str(folder), *flags.split(), "--out", str(out / "b"), *more]) == 0
    lines = [json.loads(line) for line in (out / "b/seed0/skipped.jsonl").read_text().splitlines()]
    assert len(lines) == 9 and [line["why"] for line in lines if line["id"] == "train/cat/empty.jpg"] != [""]
    environment = json.loads((out / "b/seed0/environment.json").read_text())
    assert environment["data"]["counts"] == [3, 3] and "9" in environment["data"]["notes"][-1].split()


def test_the_verbs_have_twins(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "shards"
    assert longtail.shard(of(folder), out).images == longtail.inspect(of(folder)).read == 10


def test_a_jpeg_that_has_lost_its_data_is_found(folder):
    """The file has its first half and its last two bytes. Decoders accept it, although the rest of the image is lost."""
    noise = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name in ("whole.jpg", "lost.jpg"):
        Image.fromarray(noise).save(folder / "train/cat" / name)
    whole = (folder / "train/cat/lost.jpg").read_bytes()
    (folder / "train/cat/lost.jpg").write_bytes(whole[: len(whole) // 2] + whole[-2:])
    Image.new("RGB", (9, 9), (200, 10, 10)).save(folder / "train/cat/red.png")
    found = inspect(of(folder))
    assert found.blank == ["train: train/cat/lost.jpg", "train: train/cat/red.png"] and not found.unreadable
    assert any(items == found.blank for _, items in list_problems(found))
