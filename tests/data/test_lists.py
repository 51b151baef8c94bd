"""Lists of real files: the published layouts, CSV, iNaturalist's JSON, and errors in each."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longtail import recipes
from longtail.config import DataConfig
from longtail.data import lists, load
from longtail.data.folder import lazy_image_files
from longtail.data.lazy_images import split_by_file
from longtail.data.lists import READERS, read_list
from longtail.data.long_tail import validation_split
from longtail.errors import Kind, UserError
from tests.expected_text import check_text
from tests.odd.harness import within
from tests.raises import raises

FILES = {"train/cat": 6, "train/dog": 3, "val/cat": 2, "val/dog": 1}


@pytest.fixture
def images(tmp_path):
    """Write images; each has a different gray level."""
    for number, (folder, n) in enumerate(FILES.items()):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(n):
            gray = np.full((6, 6, 3), 40 * number + 5 * i + 1, np.uint8)
            Image.fromarray(gray).save(tmp_path / folder / f"{i}.png")
    return tmp_path


def lines(split: str, **labels) -> list[tuple[str, str]]:
    """Return (path, label) of all images of a split, in another order than that of the folder."""
    labels = labels or {"cat": 0, "dog": 1}
    found = [(f"{split}/{c}/{i}.png", str(labels[c])) for c in ("dog", "cat") for i in range(FILES[f"{split}/{c}"])]
    return found[::-1]


def write_text(path, rows):
    path.write_text("".join(f"{file} {label}\n" for file, label in rows))
    return path


def write_csv(path, rows, heading=("path", "label"), mark=","):
    path.write_text("\n".join([mark.join(heading), *(mark.join(row) for row in rows)]))
    return path


def write_json(path, split, ids=(11, 7)):
    """Write a JSON list with unordered categories, whose ids are not indices."""
    rows, number = lines(split, cat=ids[0], dog=ids[1]), {"cat": ids[0], "dog": ids[1]}
    tree = {
        "images": [{"id": 100 + i, "file_name": file} for i, (file, _) in enumerate(rows)],
        "annotations": [{"image_id": 100 + i, "category_id": int(label)} for i, (_, label) in enumerate(rows)],
        "categories": [{"id": n, "name": c, "supercategory": "animal"} for c, n in number.items()],
    }
    path.write_text(json.dumps(tree))
    return path


def config(train, test=None, **options) -> DataConfig:
    return DataConfig(name="list", train_list=train, test_list=test, image_size=6, **options)


def refuses(kind: Kind, *values: str, lists, **options) -> None:
    """Check that loading these lists ends in an error of this kind, whose only line contains the values."""
    with raises(kind, *values) as caught:
        load(config(*lists, **options))
    assert "\n" not in str(caught.value)


def by_id(source) -> dict[str, tuple[str, int]]:
    """Return (class name, gray level) by id."""
    names = [source.class_names[label] for label in source.labels]
    return {
        str(i): (name, int(gray)) for i, name, gray in zip(source.ids, names, source.images[:, 3, 3, 0], strict=True)
    }


def test_all_kinds_of_lists_are_the_folder(images):
    folder = load(DataConfig(name="folder", root=images, image_size=6))
    named = {"cat": "cat", "dog": "dog"}
    lists = [
        [write_text(images / f"{s}.txt", lines(s)) for s in ("train", "val")],
        [write_csv(images / f"{s}.csv", lines(s)) for s in ("train", "val")],
        [write_csv(images / f"{s}.tsv", lines(s, **named), mark="\t") for s in ("train", "val")],
        [write_json(images / f"{s}.json", s) for s in ("train", "val")],
    ]
    for pair in lists:
        data = load(config(*pair))
        assert by_id(data.train) == by_id(folder.train) and by_id(data.test) == by_id(folder.test), pair
        assert sorted(data.train.counts) == [3, 6] and data.name == "train" and not data.notes
    data = load(config(*lists[3]))
    assert data.train.class_names == ("dog", "cat")  # by id: 7, 11


def test_lists_and_images_may_lie_apart(images, tmp_path_factory):
    apart = tmp_path_factory.mktemp("lists")
    train, val = (write_text(apart / f"{s}.txt", lines(s)) for s in ("train", "val"))
    refuses("missing-file", "9 of", "9 files", "--data.root", lists=(train, val))
    assert load(config(train, val, root=images)).train.counts.tolist() == [6, 3]
    absolute = write_text(apart / "absolute.txt", [(str(images / file), label) for file, label in lines("train")])
    assert load(config(absolute, val, root=images)).train.ids.tolist()[0] == "train/cat/5.png"
    alone = write_text(apart / "alone.txt", [(str(images / file), label) for file, label in lines("train")])
    assert len(load(config(alone)).test.labels) == 1  # a fifth of six


def test_columns_of_another_name_paths_with_spaces_and_a_byte_order_mark(images):
    (images / "train/cat/0.png").rename(images / "train/cat/a b.png")
    rows = [(file.replace("cat/0", "cat/a b"), label) for file, label in lines("train")]
    csv = write_csv(images / "x.csv", rows, ("file", "species"))
    csv.write_text(csv.read_text(), encoding="utf-8-sig")
    refuses("bad-list", "'path'", "file, species", "--data.columns", lists=[csv])
    assert load(config(csv, columns=("file", "species"))).train.counts.sum() == 8
    text = write_text(images / "x.txt", rows)
    assert load(config(text, write_text(images / "v.txt", lines("val")))).train.counts.tolist() == [6, 3]


def test_names_come_from_folders_if_each_class_has_one(images):
    val = write_text(images / "val.txt", lines("val"))
    assert load(config(write_text(images / "a.txt", lines("train")), val)).train.class_names == ("cat", "dog")
    mixed = [*lines("train")[:-1], (lines("train")[-1][0], "0")]  # a dog among the cats
    assert load(config(write_text(images / "b.txt", mixed), val)).train.class_names == ("0", "1")


@pytest.mark.parametrize(
    ("row", "kind", "values"),
    [
        ("train/cat/0.png", "bad-list", ["line 2", "'train/cat/0.png'"]),
        ("train/cat/0.png cat", "bad-list", ["line 2", "'train/cat/0.png cat'"]),
        ("train/cat/0.png -1", "bad-list", ["line 2", "'train/cat/0.png -1'"]),
        ("../x.png 0", "bad-list", ["line 2", "../x.png", "--data.root"]),
        ("train/../../x.png 0", "bad-list", ["line 2", "train/../../x.png", "--data.root"]),
        ("/etc/x.png 0", "bad-list", ["line 2", "/etc/x.png", "--data.root"]),
        ("train/cat/9.png 0", "missing-file", ["1 of", "2 files", "train/cat/9.png", "--data.root"]),
        ("train/cat/0.png 2", "too-few-data", ["3 classes", "(1)"]),
        ("train/cat/0.png 1000000000", "bad-labels", ["bad.txt", "1000000000"]),
    ],
)
def test_invalid_lines(images, row, kind, values):
    path = images / "bad.txt"
    path.write_text(f"train/cat/1.png 0\n{row}\n")
    refuses(kind, *values, lists=[path], root=images)


def test_other_errors_of_lists(images):
    train, val = (write_text(images / f"{s}.txt", lines(s)) for s in ("train", "val"))
    refuses("invalid-value", "--data.train_list", lists=[None])
    refuses("missing-file", str(images / "none.txt"), lists=[images / "none.txt"])
    refuses("unsupported", *READERS, "train/cat/0.png", lists=[images / "train/cat/0.png"])
    (images / "empty.txt").write_text("\n\n")
    refuses("bad-list", "empty.txt", lists=[images / "empty.txt"])
    refuses("missing-file", f"--data.root {images / 'nowhere'}", lists=[train], root=images / "nowhere")
    wrong = write_text(images / "wrong.txt", lines("val", cat=0, dog=2))
    refuses("bad-labels", "line 3", "label '2'", "2 classes", lists=(train, wrong))
    cows = write_csv(images / "a.csv", lines("train", cat="cat", dog="cow"))
    dogs = write_csv(images / "b.csv", lines("val", cat="cat", dog="dog"))
    refuses("bad-labels", "b.csv", "label 'dog'", lists=(cows, dogs))
    csv = write_csv(images / "c.csv", [("train/cat/0.png", "")])
    refuses("bad-list", "line 2", "label", lists=[csv])
    for text in ("{", "[]", '{"images": 1}', '{"images": [], "annotations": [{"image_id": 3}], "categories": []}'):
        (images / "d.json").write_text(text)
        refuses("bad-list", "d.json", "iNaturalist", lists=[images / "d.json"])
    other = write_json(images / "e.json", "val", ids=(5, 6))
    both = write_json(images / "f.json", "train")
    refuses("bad-labels", "e.json", "category 5", "'cat'", "f.json", lists=(both, other))
    refuses("conflict", "f.json", "val.txt", lists=(both, val))
    assert load(config(train, val)).train.counts.tolist() == [6, 3]


def test_files_named_twice_and_in_both_lists_are_warned_of(images):
    rows = lines("train")
    train = write_text(images / "train.txt", [*rows, rows[0], (rows[1][0], "1")])
    test = write_text(images / "test.txt", [*lines("val"), rows[2]])
    notes = load(config(train, test)).notes
    check_text("test_lists/duplicates", "\n".join(notes))
    assert rows[1][0] in notes[0] and rows[2][0] in notes[1]
    assert load(config(train)).notes[0] == notes[0]  # also if a part of it is used for evaluation


def test_a_file_is_one_however_a_list_spells_it(images):
    rows = lines("train")
    twice = write_text(images / "twice.txt", [*rows, *((str(images / file), label) for file, label in rows)])
    data = load(DataConfig(name="list", train_list=twice, image_size=6))
    assert data.notes[0].startswith("warning") and "9 duplicate" in data.notes[0]
    found = [{os.path.abspath(images / i) for i in part.ids} for part in (data.train, data.test)]
    assert not found[0] & found[1] and len(data.train.ids) + len(data.test.ids) == len(rows)  # none on both sides
    (images / "elsewhere").mkdir()
    test = write_text(images / "elsewhere/test.txt", [(str(images / rows[0][0]), rows[0][1])])
    notes = load(DataConfig(name="list", train_list=twice, test_list=test, image_size=6)).notes
    assert any(note.startswith("warning") and rows[0][0] in note for note in notes[1:])


def many_lines(images, n=20) -> list[tuple[str, str]]:
    """Write files of two classes, and return their lines."""
    for c in "01":
        (images / c).mkdir()
        for i in range(n):
            Image.new("RGB", (6, 6), (i, 9, 9)).save(images / c / f"{i}.png")
    return [(f"{c}/{i}.png", c) for i in range(n) for c in "01"]


def parts_of(data) -> list[set[str]]:
    return [set(part.ids.tolist()) for part in (data.train, data.val, data.test) if part]


def test_a_file_named_twice_is_on_one_side_of_the_validation_split(images):
    rows = many_lines(images)
    once, twice = (write_text(images / f"{i}.txt", rows * i) for i in (1, 2))
    test = write_text(images / "test.txt", [("train/cat/0.png", "0"), ("train/dog/0.png", "1")])
    train, val, _ = parts_of(load(config(twice, test, val_fraction=0.2)))
    assert not train & val and len(train) == 32 and len(val) == 8
    data = load(config(twice, test, val_fraction=0.2))
    assert len(data.train.ids) == 64 and len(data.val.ids) == 16  # each line still counts
    assert parts_of(load(config(once, test, val_fraction=0.2)))[1] == val


def test_a_file_of_two_classes_is_only_trained_on(images):
    rows = many_lines(images)
    torn = [(file, "1" if label == "0" else "0") for file, label in rows[:20]]
    train = write_text(images / "torn.txt", [*rows, *torn])
    test = write_text(images / "test.txt", [("train/cat/0.png", "0"), ("train/dog/0.png", "1")])
    for data in (load(config(train, val_fraction=0.2)), load(config(train, test, val_fraction=0.2))):
        trained, *held = parts_of(data)
        assert {file for file, _ in torn} <= trained and all(held)
        assert sum(map(len, (trained, *held))) == len(trained.union(*held))  # none on two sides
    refuses("too-few-data", "all", lists=[write_text(images / "all.txt", [*torn, *rows[:20]])])


def test_split_by_file_equals_the_split_by_label_without_duplicates():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), (100, 40, 9, 5, 2)))
    ids = [f"{i}.png" for i in range(len(labels))]
    pool = lazy_image_files(Path("none"), ids, labels, tuple("abcde"), 6, False)
    for fraction in (0, 0.1, 0.2):
        for found, wanted in zip(split_by_file(pool, fraction), validation_split(labels, fraction), strict=True):
            assert np.array_equal(found, wanted) and found.dtype == wanted.dtype


def test_labels_mean_the_same_in_both_lists(images):
    """Numbers as text have another order (10 before 2), so a list of names must never be read as one of numbers."""
    for c in range(12):
        (images / f"c{c}").mkdir()
        for i in range(3):
            Image.new("RGB", (6, 6), (20 * c + i + 1,) * 3).save(images / f"c{c}/{i}.png")
    numbers = [(f"c{c}/{i}.png", str(c)) for c in range(12) for i in (0, 1)]
    test = [(f"c{c}/2.png", str(c)) for c in range(12)]
    one = write_csv(images / "numbers.csv", numbers)
    odd = write_csv(images / "odd.csv", [*numbers, ("train/cat/0.png", "unknown")])
    for train in (one, odd):
        data = load(config(train, write_csv(images / "test.csv", test)))
        assert [data.test.class_names[label] for label in data.test.labels] in (
            [f"c{c}" for c in range(12)],
            [str(c) for c in range(12)],
        )
        assert data.test.images[:, 0, 0, 0].tolist() == [20 * c + 3 for c in range(12)]
    floats = write_csv(images / "floats.csv", [(file, f"{label}.0") for file, label in numbers])
    refuses("bad-labels", "line 2", "label 0.0", lists=(floats, write_text(images / "test.txt", test)))
    less = write_csv(images / "less.csv", [*numbers, ("train/cat/0.png", "-1")])
    refuses("bad-labels", "less.csv", "label -1", lists=[less])
    (warning, *_) = load(config(odd, write_csv(images / "test.csv", test))).notes
    assert warning.startswith("warning") and "odd.csv" in warning and "unknown" in warning
    padded = write_csv(images / "padded.csv", [(file, label.zfill(2)) for file, label in numbers])
    assert load(config(padded, write_csv(images / "test.csv", test))).test.labels.tolist() == list(range(12))


def test_swapped_lists_are_other_data(images):
    rows = lines("train") + lines("val")
    one, two = (write_text(images / f"{i}.txt", rows[i::2]) for i in (0, 1))
    assert load(config(one, two)).checksum != load(config(two, one)).checksum


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ('path,label\ntrain/cat/0.png,"0\ntrain/cat/1.png,0\n', "bad-list", "quotes"),
        ("path,label\ntrain/cat/0.png,Canis lupus, sub\n", "bad-list", "line 2"),
        ("path,label\ntrain/cat/0.png,  \n", "bad-list", "line 2"),
        ("path;label\ntrain/cat/0.png;0\n", "bad-list", "commas"),
        ("path,label\n" + "x" * 200_000 + ",0\n", "bad-list", "131072"),
        ("p\0th,label\n", "bad-list", "UTF-8"),
        ("path,label\ntrain/cat/0.png," + "9" * 5000 + "\ntrain/cat/1.png,1\n", "bad-labels", "9" * 20),
    ],
)
def test_damaged_csv(images, text, kind, value):
    (images / "x.csv").write_text(text)
    refuses(kind, "x.csv", value, lists=[images / "x.csv"])


def test_csv_of_all_habits(images):
    """The file has spaces after commas, quotes, and a line break inside a field."""
    text = 'note, path, label\n"a, b","train/cat/0.png", "big\ncat"\n'
    text += ",train/cat/1.png,big cat\n" + "".join(f",train/cat/{i}.png,dog\n" for i in (2, 3, 4, 5))
    text += "".join(f",train/dog/{i}.png,dog\n" for i in (0, 1, 2))
    (images / "x.csv").write_text(text)
    data = load(config(images / "x.csv"))
    assert data.train.class_names == ("big\ncat", "big cat", "dog")


def test_lines_may_be_separated_by_tabs_and_names_too_long_are_missing(images):
    (images / "x.txt").write_text("".join(f"{file}\t{label}\r\n" for file, label in lines("train")))
    val = write_text(images / "val.txt", lines("val"))
    assert load(config(images / "x.txt", val)).train.counts.tolist() == [6, 3]
    long = write_text(images / "long.txt", [*lines("train"), ("x" * 300 + ".png", "0")])
    refuses("missing-file", "1 of", "10 files", lists=(long, val))
    assert len(load(config(long, val, on_error="skip")).skipped) == 1


def test_json_that_does_not_fit_together(images):
    good = json.loads(write_json(images / "a.json", "train").read_text())
    val = write_json(images / "val.json", "val")

    def changed(**parts):
        (images / "b.json").write_text(json.dumps(good | parts))
        return images / "b.json"

    refuses("bad-list", "annotation 0", "id 100", lists=(changed(images=good["images"][1:]), val))
    refuses("bad-list", "b.json", lists=(changed(images=good["images"] + good["images"][:1]), val))
    data = load(config(changed(annotations=good["annotations"][1:]), val))
    (note,) = data.notes
    assert note.startswith("warning:") and "1" in note.split() and "b.json" in note
    nameless = [{"id": 11, "name": None}, {"id": 7}]
    assert load(config(changed(categories=nameless))).train.class_names == ("7", "11")
    part = json.loads(val.read_text())
    part |= {
        "categories": part["categories"][:1],
        "annotations": [a for a in part["annotations"] if a["category_id"] == 11],
    }
    val.write_text(json.dumps(part))
    assert load(config(images / "a.json", val)).test.counts.tolist() == [0, 2]  # fewer categories, the same ids
    (images / "deep.json").write_text("[" * 100_000)
    refuses("bad-list", "deep.json", "iNaturalist", lists=[images / "deep.json"])


def test_bad_images_stop_or_are_skipped(images):
    train, val = (write_text(images / f"{s}.txt", lines(s)) for s in ("train", "val"))
    (images / "train/cat/1.png").write_bytes(b"")
    (images / "train/dog/0.png").write_bytes(b"no image")
    os.remove(images / "val/cat/0.png")
    refuses("missing-file", "1 of", "3 files", "val/cat/0.png", lists=(train, val))
    data = load(config(train, val, on_error="skip"))
    assert data.train.counts.tolist() == data.counts.tolist() == [5, 2] and data.test.counts.tolist() == [1, 1]
    assert dict(data.skipped).keys() == {"train/cat/1.png", "train/dog/0.png", "val/cat/0.png"}
    check_text("test_lists/skipped", "\n".join([*map(str, sorted(dict(data.skipped).items())), data.notes[-1]]))
    assert not (data.train.images == 0).all((1, 2, 3)).any()  # never a silent blank
    for i in (1, 2):
        (images / f"train/dog/{i}.png").write_bytes(b"no image")
    refuses("bad-image", "class 'dog'", lists=(train, val), on_error="skip")


def test_a_path_says_what_kind_of_source_it_is(images):
    train = write_text(images / "train.txt", lines("train"))
    assert recipes.make(train).data.train_list == train and recipes.make(train).data.name == "list"
    assert recipes.make(images).data.name == "folder"
    (images / "stray.parquet").write_bytes(b"")
    assert recipes.make(images).data.name == "folder"  # it has class folders
    (images / "shards").mkdir()
    (images / "shards/._x.PARQUET").write_bytes(b"")
    assert recipes.make(images / "shards").data.name == "folder"
    (images / "shards/train-0.PARQUET").write_bytes(b"")
    assert recipes.make(images / "shards").data.name == "shards"
    assert set(recipes.LIST_SUFFIXES) == set(READERS)
    with raises("missing-file", "train/cat/0.png"):
        recipes.make(images / "train/cat/0.png")


# Untrusted lists


def test_a_csv_of_very_many_columns_and_rows(tmp_path):
    """The time is proportional to the size of the file, and not to columns times rows."""
    names = ",".join(f"column {i}" for i in range(40_000))
    (tmp_path / "a.csv").write_text(f"path,label,{names}\n" + "a.png,0\n" * 40_000)
    with within(10):
        assert len(read_list(tmp_path / "a.csv").entries) == 40_000


def test_columns_of_a_csv_in_any_order_and_rows_that_are_short(tmp_path):
    (tmp_path / "a.csv").write_text("label,more,path\n\n1,,a.png\n2,x, b.png \n")
    assert [entry[1:] for entry in read_list(tmp_path / "a.csv").entries] == [("a.png", "1"), ("b.png", "2")]
    for row in ("3", "3,x", "3,x,,y", ",,a.png"):
        (tmp_path / "a.csv").write_text(f"label,more,path\n{row}\n")
        with pytest.raises(UserError):
            read_list(tmp_path / "a.csv")


def test_lists_of_too_many_lines_or_values_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lists, "MAX_LINES", 10)
    monkeypatch.setattr(lists, "MAX_JSON_VALUES", 10)
    for name, text in {
        "a.txt": "a 0\n" * 11,
        "b.txt": "a 0\x85" * 11,
        "a.csv": "path,label\n" + "a,0\r" * 11,
        "a.json": json.dumps({"images": [[]] * 11}),
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError):
            read_list(tmp_path / name)
