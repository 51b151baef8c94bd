"""Loading of real files: pickles and archives in the official layout of CIFAR, and images written by PIL."""

import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image

from longtail.config import DataConfig
from longtail.data import lazy_images as pool_module
from longtail.data import load
from longtail.errors import Kind
from tests.expected_text import check_text
from tests.raises import raises


def refuses(kind: Kind, *values: object, **options) -> None:
    """Check that loading these data ends in an error of this kind, whose only line contains the values."""
    with raises(kind, *values) as caught:
        load(DataConfig(**options))
    assert "\n" not in str(caught.value)


# CIFAR


def cifar_entry(classes, per_class, key, seed=0):
    """Return the content of a CIFAR pickle with random images."""
    generator = np.random.RandomState(seed)
    labels = generator.permutation(np.repeat(np.arange(classes), per_class)).tolist()
    return {"data": generator.randint(1, 256, (len(labels), 3072), np.uint8), key: labels}


def cifar100_entries():
    return {
        "train": cifar_entry(100, 6, "fine_labels"),
        "test": cifar_entry(100, 1, "fine_labels", seed=1),
        "meta": {"fine_label_names": [f"name{c}" for c in range(100)]},
    }


def cifar10_entries():
    batches = {f"data_batch_{b}": cifar_entry(10, 4, "labels", seed=b) for b in range(1, 6)}
    test = {"test_batch": cifar_entry(10, 2, "labels", seed=9)}
    return {**batches, **test, "batches.meta": {"label_names": list("abcdefghij")}}


def write(root, folder, entries):
    for name, entry in entries.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_bytes(pickle.dumps(entry, protocol=2))
    return root


def write_tar(root, folder, entries, archive):
    with tarfile.open(root / archive, "w:gz") as tar:
        for name, entry in entries.items():
            content = pickle.dumps(entry, protocol=2)
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return root


@pytest.fixture
def cifar100(tmp_path):
    return write(tmp_path, "cifar-100-python", cifar100_entries())


def test_cifar100_unpacked(cifar100):
    data = load(DataConfig(root=cifar100))
    entry = cifar100_entries()["train"]
    assert data.train.images.shape == (600, 32, 32, 3) and data.train.images.dtype == np.uint8
    assert data.train.labels.tolist() == entry["fine_labels"] and data.train.labels.dtype == np.int64
    assert data.train.images[7, 3, 5].tolist() == entry["data"][7].reshape(3, 32, 32)[:, 3, 5].tolist()
    assert data.train.ids.tolist() == list(range(600))
    assert data.test.class_names[42] == "name42"
    assert data.train.counts.tolist() == [6] * 100
    assert len(data.test.labels) == 100 and data.val is None


def test_cifar10_from_the_archive_is_that_of_the_folder(tmp_path):
    (tmp_path / "packed").mkdir()
    packed = write_tar(tmp_path / "packed", "cifar-10-batches-py", cifar10_entries(), "cifar-10-python.tar.gz")
    plain = write(tmp_path / "plain", "cifar-10-batches-py", cifar10_entries())
    a, b = (load(DataConfig(name="cifar10", root=root, imbalance=4)) for root in (packed, plain))
    assert np.array_equal(a.train.images, b.train.images) and a.checksum == b.checksum
    assert a.train.counts.tolist() == [20, 17, 14, 12, 10, 9, 7, 6, 5, 5]
    assert os.listdir(packed) == ["cifar-10-python.tar.gz"]  # nothing was unpacked


def test_the_folder_itself_may_be_named(cifar100):
    assert len(load(DataConfig(root=cifar100 / "cifar-100-python")).train.labels) == 600


def test_root_comes_from_the_environment(cifar100, monkeypatch):
    monkeypatch.setenv("LONGTAIL_DATA", str(cifar100))
    assert len(load(DataConfig()).train.labels) == 600


def test_cifar_draw_split_and_size(cifar100):
    data = load(DataConfig(root=cifar100, imbalance=3, val_fraction=0.2, image_size=40))
    assert data.val is not None and len(data.val.labels) == 17  # 6 / 3 ** (c / 99) is 5 or more, one image each
    assert set(data.val.ids).isdisjoint(data.train.ids)
    assert (
        data.checksum
        == load(DataConfig(root=cifar100, imbalance=3)).checksum
        != load(DataConfig(root=cifar100)).checksum
    )
    assert data.train.images.shape[1:] == (40, 40, 3)
    assert any(note.startswith("83 classes") for note in data.notes)


def test_md5_differs(cifar100, monkeypatch):
    from torchvision.datasets import CIFAR100  # type: ignore[import-untyped]

    data = load(DataConfig(root=cifar100))
    (warning,) = (note for note in data.notes if "cifar-100-python/train" in note)
    assert warning.startswith("warning") and "MD5" in warning and warning in data.describe()
    for attribute, name in (("train_list", "train"), ("test_list", "test")):
        md5 = hashlib.md5((cifar100 / "cifar-100-python" / name).read_bytes()).hexdigest()
        monkeypatch.setattr(CIFAR100, attribute, [[name, md5]])
    md5 = hashlib.md5((cifar100 / "cifar-100-python/meta").read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": md5})
    assert load(DataConfig(root=cifar100)).notes == ()


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_in_a_pickle_is_refused(cifar100, protocol):
    target = cifar100 / "ran"
    (cifar100 / "cifar-100-python/train").write_bytes(pickle.dumps({"data": Malicious(target)}, protocol))
    refuses("unsafe-file", "system", "cifar-100-python/train", root=cifar100)
    assert not target.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_arrays_of_python_3_are_admitted(cifar100, protocol):
    (cifar100 / "cifar-100-python/train").write_bytes(pickle.dumps(cifar100_entries()["train"], protocol))
    assert len(load(DataConfig(root=cifar100)).train.labels) == 600


def damaged(change):
    entry = cifar100_entries()["train"]
    change(entry)
    return pickle.dumps(entry, protocol=2)


@pytest.mark.parametrize(
    ("content", "kind", "values"),
    [
        (pickle.dumps(cifar100_entries()["train"], protocol=2)[:-1000], "damaged-file", []),
        (b"", "damaged-file", []),
        (b"<html>404</html>", "damaged-file", []),
        (pickle.dumps([1], protocol=2), "damaged-file", ["list"]),
        (pickle.dumps(cifar_entry(10, 2, "labels"), protocol=2), "damaged-file", ["'fine_labels'", "CIFAR-100"]),
        (damaged(lambda e: e.pop("data")), "damaged-file", ["'data'"]),
        (damaged(lambda e: e.update(data=e["data"][:, :-1])), "damaged-file", ["uint8 (600, 3071)", "uint8 (n, 3072)"]),
        (damaged(lambda e: e.update(data=e["data"].astype(np.float32))), "damaged-file", ["float32 (600, 3072)"]),
        (damaged(lambda e: e.update(data="x")), "damaged-file", ["'data'", " str "]),
        (damaged(lambda e: e["fine_labels"].pop()), "bad-labels", ["'fine_labels'"]),
        (damaged(lambda e: e["fine_labels"].__setitem__(0, "cat")), "bad-labels", ["'fine_labels'"]),
        (damaged(lambda e: e["fine_labels"].__setitem__(0, 100)), "bad-labels", ["0 to 100", "CIFAR-100", "0 to 99"]),
        (damaged(lambda e: e["fine_labels"].__setitem__(0, -1)), "bad-labels", ["-1 to 99"]),
        (damaged(lambda e: e.update(fine_labels=[3] * 600)), "too-few-data", ["'name0'"]),
    ],
)
def test_damaged_cifar(cifar100, content, kind, values):
    (cifar100 / "cifar-100-python/train").write_bytes(content)
    refuses(kind, *values, "cifar-100-python/train", root=cifar100)


@pytest.mark.parametrize("meta", [{}, {"fine_label_names": ["a"]}, {"fine_label_names": "apple"}])
def test_damaged_meta(cifar100, meta):
    write(cifar100, "cifar-100-python", {"meta": meta})
    refuses("damaged-file", "cifar-100-python/meta", root=cifar100)


def test_damaged_archives(tmp_path):
    root = write_tar(tmp_path, "cifar-100-python", cifar100_entries(), "cifar-100-python.tar.gz")
    archive = root / "cifar-100-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-5000])
    refuses("damaged-file", archive, root=root)
    archive.write_bytes(b"not an archive")
    refuses("damaged-file", archive, root=root)
    write_tar(tmp_path, "cifar-100-python", {"train": 1}, "cifar-100-python.tar.gz")
    refuses("damaged-file", archive, "cifar-100-python/test", root=root)


def test_zero_rows_are_refused_only_where_the_draw_picks_them(cifar100):
    entries = cifar100_entries()
    drawn = load(DataConfig(root=cifar100, imbalance=6)).train.ids
    blank = np.setdiff1d(np.arange(600), drawn)
    entries["train"]["data"][blank] = 0
    write(cifar100, "cifar-100-python", entries)
    assert load(DataConfig(root=cifar100, imbalance=6)).train.ids.tolist() == drawn.tolist()
    refuses("damaged-file", f"{len(blank)} of", f"row {blank[0]}", "cifar-100-python/train", root=cifar100)


def test_absent_cifar(tmp_path):
    refuses("missing-file", "cifar-100-python.tar.gz", "--data.root", root=tmp_path / "none", download=False)
    write(tmp_path, "cifar-100-python", {"meta": {}})
    refuses("missing-file", "cifar-100-python/train", root=tmp_path, download=False)


@pytest.mark.parametrize(
    "error", [URLError("no route"), RuntimeError("File not found\nor corrupted."), OSError("full")]
)
def test_failed_download_leaves_nothing(tmp_path, monkeypatch, error):
    def broken(url, folder, filename, md5):
        (Path(folder) / filename).write_bytes(b"half")
        raise error

    monkeypatch.setattr("torchvision.datasets.utils.download_url", broken)
    refuses("download-failed", "cifar-100-python.tar.gz", "--data.root", root=tmp_path / "fresh")
    refuses("download-failed", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_download(tmp_path, monkeypatch):
    def fetch(url, folder, filename, md5):
        assert url.startswith("https://") and len(md5) == 32
        write_tar(Path(folder), "cifar-100-python", cifar100_entries(), filename)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", fetch)
    assert len(load(DataConfig(root=tmp_path / "new")).train.labels) == 600
    assert os.listdir(tmp_path / "new") == ["cifar-100-python.tar.gz"]


@pytest.mark.skipif(
    not Path(os.environ.get("LONGTAIL_DATA", "data"), "cifar-100-python/train").is_file(),
    reason="needs the real CIFAR-100: set LONGTAIL_DATA to the folder that holds cifar-100-python",
)
@pytest.mark.parametrize(
    ("imbalance", "total", "checksum"),
    [(100, 10_847, "e0d58a4d2700c460"), (50, 12_608, "561fa940cc7d3551"), (10, 19_573, "b4fbf1bf0a7f3338")],
)
def test_real_cifar100(imbalance, total, checksum):
    data = load(DataConfig(imbalance=imbalance, download=False))
    assert len(data.train.labels) == total and data.checksum == checksum
    assert len(data.test.labels) == 10_000 and data.train.class_names[:2] == ("apple", "aquarium_fish")


# digits


def test_digits():
    data = load(DataConfig(name="digits", image_size=8))
    assert data.test.counts.tolist() == [40] * 10
    assert len(data.train.labels) == 1797 - 400 and set(data.train.ids).isdisjoint(data.test.ids)
    assert (data.train.images.min(), data.train.images.max()) == (0, 255)
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    raw = load_digits().images[data.train.ids[5]]
    assert data.train.images[5, :, :, 2].tolist() == np.rint(raw * 255 / 16).tolist()


def test_digits_long_tailed_and_larger():
    data = load(DataConfig(name="digits", imbalance=20, image_size=16, val_fraction=0.1))
    assert data.train.images.shape[1:] == data.test.images.shape[1:] == (16, 16, 3)
    assert data.val is not None
    drawn = data.train.counts + data.val.counts
    assert drawn[0] >= 130 and drawn[9] == drawn[0] // 20 and (np.diff(drawn) < 0).all()
    assert data.test.ids.tolist() == load(DataConfig(name="digits")).test.ids.tolist()


def test_description():
    lines = load(DataConfig(name="digits", imbalance=20, image_size=8)).describe()
    check_text("test_sources/digits", "\n".join(lines))


def test_description_of_many_classes(cifar100):
    assert load(DataConfig(root=cifar100, imbalance=6)).describe()[1].endswith(" ".join("65555…11111"))


# Image folders


def paint(path, color=(200, 30, 90), size=(12, 10), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


def fill(root, **counts):
    for name, count in counts.items():
        for i in range(count):
            paint(root / name / f"{i:03}.png", color=(i, i, i))
    return root


@pytest.fixture
def folder(tmp_path):
    fill(tmp_path / "train", cat=6, dog=2)
    fill(tmp_path / "val", cat=3, dog=1)
    return tmp_path


def test_folder_with_its_own_evaluation_set(folder):
    data = load(DataConfig(name="folder", root=folder, image_size=8))
    assert data.train.class_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 6 + [1] * 2 and data.test.counts.tolist() == [3, 1]
    assert data.train.ids[7] == "train/dog/001.png" and data.test.ids[0] == "val/cat/000.png"
    assert data.train.images[4].tolist() == np.full((8, 8, 3), 4).tolist()
    assert (data.name, data.val, data.notes) == (folder.name, None, ())
    (folder / "val").rename(folder / "test")
    assert load(DataConfig(name="folder", root=folder)).test.counts.tolist() == [3, 1]


def test_val_is_preferred_to_test(folder):
    (folder / "test/unlabeled").mkdir(parents=True)
    (note,) = load(DataConfig(name="folder", root=folder)).notes
    assert note.startswith("val/ ") and "test/" in note


def test_folder_checksum_is_of_paths_and_labels(folder):
    before = load(DataConfig(name="folder", root=folder)).checksum
    assert load(DataConfig(name="folder", root=folder, image_size=8)).checksum == before
    (folder / "train/cat/000.png").rename(folder / "train/cat/zzz.png")
    assert load(DataConfig(name="folder", root=folder)).checksum != before


def test_accepted_image_files(folder):
    for name in ("a.JPG", "b.jpeg", "c.BMP", "d.webp", "e.gif", "f.TIFF", "deep/er/g.tif"):
        paint(folder / "train/dog" / name)
    for name in (".hidden.png", "notes.txt", "._a.JPG", ".cache/x.png"):
        (folder / "train/dog" / name).parent.mkdir(exist_ok=True)
        (folder / "train/dog" / name).write_bytes(b"no image")
    (folder / "train/.ipynb_checkpoints").mkdir()
    data = load(DataConfig(name="folder", root=folder))
    assert data.train.counts.tolist() == [6, 9]
    assert np.abs(data.train.images[8:].astype(int) - [200, 30, 90]).max() < 12  # JPEG and WebP are lossy


def test_folder_that_splits_itself(tmp_path):
    fill(tmp_path, cat=20, dog=9, eel=1, fox=2)
    data = load(DataConfig(name="folder", root=tmp_path, image_size=8))
    assert data.train.counts.tolist() == [16, 8, 1, 2] and data.test.counts.tolist() == [4, 1, 0, 0]
    assert set(data.train.ids).isdisjoint(data.test.ids) and data.train.ids[0].startswith("cat/")
    for image, path in zip(data.test.images, data.test.ids, strict=True):  # images and names still belong together
        assert image[0, 0, 0] == int(Path(path).stem)
    assert len(data.notes) == 4 and [note.split()[1] for note in data.notes[2:]] == ["'eel'", "'fox'"]
    check_text("test_sources/own_split", "\n".join(data.notes))


def test_many_single_images_make_one_note(tmp_path):
    fill(tmp_path / "train", cat=20, **{f"rare{i}": 1 for i in range(6)})
    fill(tmp_path / "val", cat=1)
    data = load(DataConfig(name="folder", root=tmp_path, val_fraction=0.1))
    assert data.val is not None and data.val.counts.sum() == 2
    check_text("test_sources/many_single_images", "\n".join(data.notes))
    assert len(data.notes) == 2 and load(DataConfig(name="folder", root=tmp_path)).notes == data.notes[:1]


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, train=5, car=5)
    assert load(DataConfig(name="folder", root=tmp_path)).train.class_names == ("car", "train")


def test_folder_can_be_drawn_from(tmp_path):
    fill(tmp_path / "train", a=20, b=20, c=1)
    fill(tmp_path / "val", a=1)
    data = load(DataConfig(name="folder", root=tmp_path, imbalance=10))
    assert data.train.counts.tolist() == [20, 6, 1]
    check_text("test_sources/draw_from_folder", "\n".join(data.notes))
    assert len(data.notes) >= 3 and [note.split()[1] for note in data.notes[:2]] == ["'b'", "'c'"]


def test_decoding_is_upright_centered_and_antialiased(folder):
    wide = Image.fromarray(np.random.RandomState(0).randint(0, 256, (20, 60, 3), np.uint8))
    wide.save(folder / "train/dog/wide.png")
    flat = np.zeros((16, 16, 3), np.uint8)
    flat[:8] = 255
    turned = Image.fromarray(flat)
    exif = turned.getexif()
    exif[0x0112] = 3  # to be shown upside down
    turned.save(folder / "train/dog/turned.png", exif=exif)
    stripes = np.zeros((32, 32), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(folder / "train/dog/stripes.png")
    data = load(DataConfig(name="folder", root=folder, image_size=8))
    image = {Path(i).stem: x for i, x in zip(data.train.ids, data.train.images, strict=True)}
    reference = wide.resize((24, 8), Image.Resampling.BILINEAR).crop((8, 0, 16, 8))
    assert np.abs(image["wide"].astype(int) - np.asarray(reference)).max() <= 1
    assert (image["turned"][:3] == 0).all() and (image["turned"][5:] == 255).all()
    assert np.abs(image["stripes"].astype(int) - 127).max() < 20  # every second column would be 0 or 255


def test_modes_of_pixels(folder):
    shades = {"gray": "L", "palette": "P", "alpha": "RGBA", "bits": "1"}
    for name, mode in shades.items():
        Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(folder / f"train/dog/{name}.png")
    Image.new("CMYK", (9, 9)).save(folder / "train/dog/print.jpg")
    Image.fromarray(np.full((9, 9), 0x80FF, np.uint16)).save(folder / "train/dog/sixteen.png")
    data = load(DataConfig(name="folder", root=folder, image_size=8))
    image = {Path(i).stem: x for i, x in zip(data.train.ids, data.train.images, strict=True)}
    assert all((image[name] == 255).all() for name in (*shades, "print"))
    assert (image["sixteen"] == 0x80).all()


def test_large_jpegs_keep_their_look(folder):
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp[None, :, None], (640, 640, 3)).copy()).save(folder / "train/dog/ramp.jpg")
    data = load(DataConfig(name="folder", root=folder, image_size=16))
    assert np.abs(data.train.images[-1, :, :, 0] - ramp.reshape(16, 40).mean(1)).max() < 3


def test_link_loops_end(folder):
    (folder / "train/dog/self").symlink_to(folder / "train/dog", target_is_directory=True)
    (folder / "train/dog/up").symlink_to(folder, target_is_directory=True)
    assert load(DataConfig(name="folder", root=folder)).train.counts.tolist() == [6, 2]
    (folder / "train/loop").symlink_to(folder / "train", target_is_directory=True)
    refuses("too-few-data", "train/loop", name="folder", root=folder)


def test_folder_refusals(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    refuses("invalid-value", "--data.root", name="folder")
    refuses("missing-file", f"--data.root {other / 'nowhere'}", name="folder", root=other / "nowhere")
    refuses("missing-file", other, name="folder", root=other)
    fill(other, cat=3)
    refuses("too-few-data", other, "'cat'", name="folder", root=other)
    fill(other, dog=3)
    refuses("too-few-data", other.name, name="folder", root=other)
    (folder / "train/eel").mkdir()
    (folder / "train/emu").mkdir()
    refuses("too-few-data", "train/eel, ", "train/emu", name="folder", root=folder)  # all at once


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test", "testing"])
def test_an_evaluation_folder_may_be_called_so(tmp_path, name):
    fill(tmp_path / "train", cat=3, dog=3)
    fill(tmp_path / name, cat=2, dog=1)
    data = load(DataConfig(name="folder", root=tmp_path, image_size=8))
    assert data.test.counts.tolist() == [2, 1] and data.notes == ()


def test_the_folder_above_or_those_below_may_be_meant(tmp_path):
    fill(tmp_path / "a/train", cat=6, dog=6)
    fill(tmp_path / "a/val", cat=6, dog=6)
    for name, other in (("train", "val"), ("val", "train")):
        *_, note = load(DataConfig(name="folder", root=tmp_path / "a" / name, image_size=8)).notes
        assert f" {other}/" in note and str(tmp_path / "a") in note
    with raises("too-few-data", f"{tmp_path}/outer/photos"):
        fill(tmp_path / "outer/photos", cat=6, dog=6)
        load(DataConfig(name="folder", root=tmp_path / "outer", image_size=8))
    for year in ("2019", "2020"):
        fill(tmp_path / "years" / year, cat=6, dog=6)
    *_, note = load(DataConfig(name="folder", root=tmp_path / "years", image_size=8)).notes
    assert "(2019/cat, …)" in note
    fill(tmp_path / "mixed", cat=6, dog=6)
    fill(tmp_path / "mixed/cat", small=6)
    assert not any(
        "…)" in note for note in load(DataConfig(name="folder", root=tmp_path / "mixed", image_size=8)).notes
    )


def test_metadata_folders_of_macos_are_not_classes(tmp_path):
    fill(tmp_path, cat=6, dog=6)
    (tmp_path / "__MACOSX/cat").mkdir(parents=True)
    assert load(DataConfig(name="folder", root=tmp_path, image_size=8)).train.class_names == ("cat", "dog")


def test_evaluation_refusals(folder):
    (folder / "val/dogg").mkdir()
    refuses("bad-labels", "'dogg'", "'dog'", folder / "val", name="folder", root=folder)
    (folder / "val").rename(folder / "old")
    (folder / "val").mkdir()
    refuses("missing-file", folder / "val", name="folder", root=folder)


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\xff\xd8\xff\xe0 no more", b"text"])
def test_unreadable_image(folder, content):
    (folder / "train/dog/bad.jpg").write_bytes(content)
    refuses("bad-image", "train/dog/bad.jpg", name="folder", root=folder)


def test_truncated_dead_and_deep_images(folder):
    bad = folder / "train/dog/bad.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (64, 64, 3), np.uint8)).save(bad)
    bad.write_bytes(bad.read_bytes()[:3000])
    refuses("bad-image", "bad.png", name="folder", root=folder)
    bad.unlink()
    bad.symlink_to(folder / "gone.png")
    refuses("bad-image", "bad.png (", name="folder", root=folder)
    bad.unlink()
    Image.fromarray(np.ones((9, 9), np.float32)).save(folder / "train/dog/deep.tif")
    refuses("bad-image", "deep.tif", "mode F", name="folder", root=folder)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [100, 50])  # 120 pixels: PIL warns above its limit and raises above twice of it
def test_decompression_bombs(folder, monkeypatch, limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    refuses("bad-image", "train/cat/000.png", "bomb", name="folder", root=folder)


def test_memory_limit(folder, monkeypatch):
    monkeypatch.setattr(pool_module, "MEMORY_LIMIT", 12 * 8 * 8 * 3)
    assert len(load(DataConfig(name="folder", root=folder, image_size=8)).train.labels) == 8
    refuses("out-of-memory", "12 images", "9x9", name="folder", root=folder, image_size=9, load="resident")


def test_what_the_machine_has_not_is_refused_before_it_is_read(folder, monkeypatch):
    monkeypatch.setattr("longtail.data.sources.available_memory", lambda: 12 * 9 * 9 * 3 - 1)
    assert len(load(DataConfig(name="folder", root=folder, image_size=8)).train.labels) == 8
    refuses("out-of-memory", "12 images", "9x9", "--data.load stream", name="folder", root=folder, image_size=9)
