"""Tests of suspected label errors and near-duplicates: values computed by hand, a slow reference, and damaged files."""

import csv
import tracemalloc

import numpy as np
import pytest

from longtail import suspects
from longtail.suspects import (
    ImageFeatures,
    confidence_thresholds,
    confident_classes,
    confident_suggestions,
    find_duplicates,
    find_label_errors,
    find_suspects,
    neighbors_agree,
    read_splits,
    write_suspects,
)


def at_angles(*degrees: float) -> np.ndarray:
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], 1).astype(np.float32)


def test_confident_classes():
    """The mean probability is 0.6 for class 0 and 0.51 for class 1."""
    p_NC = np.array([[0.9, 0.1], [0.8, 0.2], [0.62, 0.38], [0.3, 0.7], [0.1, 0.9], [0.55, 0.45]])
    y_N = np.array([0, 0, 1, 1, 0, 1])
    threshold_C = confidence_thresholds(p_NC[np.arange(6), y_N], y_N, 2)
    assert threshold_C == pytest.approx([0.6, 0.51])
    assert confident_classes(p_NC, threshold_C).tolist() == [0, 0, 0, 1, 1, -1]


def test_class_without_images_is_never_suggested():
    p_NC = np.array([[0.1, 0.1, 0.8], [0.5, 0.5, 0.0]])
    assert 2 not in confident_classes(p_NC, confidence_thresholds(np.array([0.1, 0.5]), np.array([0, 1]), 3))


def test_confident_suggestions():
    """The mean probability is 0.55 for class 0 and 0.6 for class 1; 1 - 0.5 is below the first."""
    y_N, suggested_N, p_N = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([0.9, 0.2, 0.5, 0.7])
    assert confident_suggestions(suggested_N, p_N, y_N).tolist() == [-1, 1, -1, -1]


def test_neighbors_agree():
    x_NF = at_angles(0, 5, 10, 80, 85, 90, 84, 2, 45)
    y_N = np.array([0, 0, 0, 1, 1, 1, 0, 0, 2])  # the seventh is among the other class, the last is alone in its class
    assert neighbors_agree(x_NF, y_N, np.array([6, 7, 8]), np.array([1, 1, 1])).tolist() == [True, False, False]


def test_label_errors_are_sorted_by_probability():
    x_NF = at_angles(0, 5, 10, 80, 85, 90, 84, 88)
    y_N, suggested_N = np.array([0, 0, 0, 1, 1, 1, 0, 0]), np.array([0, 1, 0, 1, 1, 1, 1, 1])
    p_N = np.array([0.9, 0.01, 0.9, 0.9, 0.9, 0.9, 0.3, 0.1])
    images = ImageFeatures("test", x_NF, y_N, np.array([""] * 8), np.arange(8), suggested_N, p_N)
    assert find_label_errors(images).tolist() == [7, 6]


def test_duplicates_match_a_slow_reference(monkeypatch):
    monkeypatch.setattr(suspects, "ROWS_AT_ONCE", 7)
    x_NF = np.random.default_rng(0).normal(size=(60, 16))
    x_NF[40] = 3 * x_NF[3]
    x_NF[50] = x_NF[20] + 0.05 * x_NF[21]
    x_NF[55] = x_NF[40]
    x_NF[30] = 0
    unit_NF = x_NF / np.maximum(np.linalg.norm(x_NF, axis=1, keepdims=True), 1e-9)
    wanted = [(40, 3), (50, 20), (55, 3)]
    found = find_duplicates(x_NF)
    assert sorted((i, j) for i, j, _ in found) in (wanted, [*wanted[:2], (55, 40)])
    for i, j, similarity in found:
        assert similarity == pytest.approx(unit_NF[i] @ unit_NF[j], abs=1e-5)
    assert find_duplicates(np.zeros((5, 3))) == [] == find_duplicates(np.zeros((0, 3)))


def test_threshold_depends_on_typical_neighbors():
    """Networks that were trained to the end have nearly equal features within a class."""
    assert suspects.duplicate_threshold(np.array([0.7, 0.8, 0.6])) == pytest.approx(0.925, abs=1e-5)
    assert suspects.duplicate_threshold(np.array([0.1, 0.2, 0.3])) == pytest.approx(0.9, abs=1e-5)
    assert suspects.duplicate_threshold(np.array([0.996, 0.996])) == pytest.approx(0.999, abs=1e-5)


# Files


def write_files(folder, **changes):
    """Write features of six training images, of which the last has a wrong label, and of two test images."""
    labels = np.array([0, 0, 0, 1, 1, 1, 0])
    training = {"features": at_angles(0, 5, 10, 80, 85, 90, 84).astype(np.float16), "labels": labels}
    training |= {"ids": np.array([f"a/{i}.jpg" for i in range(7)]), "suggested": np.array([0, 0, 0, 1, 1, 1, 1])}
    training |= {"probabilities_label": np.array([0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.02], np.float16)}
    np.savez(folder / "training_features.npz", **training | changes)
    test = {"features": at_angles(85, 30).astype(np.float16), "labels": np.array([1, 0])}
    np.savez(folder / "features.npz", **test)
    logits = np.array([[0.0, 9.0], [9.0, 0.0]])
    np.savez(folder / "predictions.npz", logits=logits, labels=test["labels"])


def test_suspects_of_a_run(tmp_path):
    write_files(tmp_path)
    splits = read_splits(tmp_path, 2)
    assert [images.split for images in splits] == ["training", "test"]
    found = find_suspects(splits)
    (label,) = found.labels
    assert (label.id, label.label, label.suggested) == ("a/6.jpg", 0, 1) and label.score == pytest.approx(
        0.98, abs=1e-3
    )
    leaked = {(d.id, d.original.id) for d in found.duplicates if d.split == "test"}
    assert leaked == {("0", "a/4.jpg")}
    write_suspects(tmp_path / "suspects.csv", found, ["=cat", "dog\n"])
    with open(tmp_path / "suspects.csv", newline="") as file:
        first, *others = csv.DictReader(file)
    assert (first["problem"], first["file"], first["label"]) == ("label", "a/6.jpg", "'=cat")
    assert first["suggested_label"] == "dog\\n" and {row["problem"] for row in others} == {"duplicate"}


@pytest.mark.parametrize(
    "changes",
    [
        {"features": np.zeros((3, 2), np.float16)},
        {"features": np.full((7, 2), np.nan, np.float16)},
        {"features": np.zeros((7, 2), np.int64)},
        {"labels": np.full(7, 2)},
        {"labels": np.full(7, -1)},
        {"labels": np.full(7, 1e300)},
        {"suggested": np.full(7, 9)},
        {"probabilities_label": np.full(7, np.nan, np.float16)},
        {"probabilities_label": np.full(7, 3, np.float16)},
        {"probabilities_label": np.zeros(6, np.float16)},
        {"ids": np.zeros(7)},
        {"ids": np.arange(6)},
    ],
)
@pytest.mark.filterwarnings("error")
def test_damaged_file_is_absent(changes, tmp_path):
    write_files(tmp_path, **changes)
    assert [images.split for images in read_splits(tmp_path, 2)] == ["test"]


def test_missing_files(tmp_path):
    assert read_splits(tmp_path, 2) == [] and find_suspects([]) == suspects.NO_SUSPECTS


def test_very_many_images_are_thinned_out(tmp_path, monkeypatch):
    monkeypatch.setattr(suspects, "MAX_COMPARED", 4)
    write_files(tmp_path)
    assert sum(len(images.labels_N) for images in read_splits(tmp_path, 2)) <= 4


def test_probabilities_of_test_images_are_computed_in_blocks(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    logits_NC, y_N = rng.normal(size=(50, 4)).astype(np.float16), rng.integers(0, 4, 50)
    np.savez(tmp_path / "features.npz", features=rng.normal(size=(50, 3)).astype(np.float16), labels=y_N)
    np.savez(tmp_path / "predictions.npz", logits=logits_NC, labels=y_N)
    (whole,) = read_splits(tmp_path, 4)
    monkeypatch.setattr(suspects, "ROWS_AT_ONCE", 7)
    (found,) = read_splits(tmp_path, 4)
    exp_NC = np.exp(logits_NC.astype(np.float64))
    assert found.probability_N == pytest.approx((exp_NC / exp_NC.sum(1, keepdims=True))[np.arange(50), y_N])
    assert found.suggested_N.tolist() == whole.suggested_N.tolist() and len(set(found.suggested_N)) > 1


@pytest.mark.parametrize("classes", [2**9, 2**15])
def test_many_classes_take_little_memory(tmp_path, classes):
    """Logits of 32 MiB, which a file of 33 KB can contain, take less than three times as much."""
    y_N = np.zeros(2**24 // classes, np.int8)
    np.savez_compressed(tmp_path / "predictions.npz", logits=np.zeros((len(y_N), classes), np.float16), labels=y_N)
    np.savez(tmp_path / "features.npz", features=np.ones((2, 2), np.float16), labels=y_N[:2])
    tracemalloc.start()
    try:
        assert len(read_splits(tmp_path, classes)) == 1
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**25
    finally:
        tracemalloc.stop()
