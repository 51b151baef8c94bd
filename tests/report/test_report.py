"""Tests of the page of `longtail report`: values, missing files, untrusted names, and browsers."""

import base64
import hashlib
import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from html import unescape
from urllib.parse import unquote

import numpy as np
import pytest

import longtail
from longtail import recipes, run_folder
from longtail.cli import main
from longtail.metrics import paired_difference
from longtail.reporting import method_detail, run_artifacts, sections, summary
from longtail.reporting.class_accuracy import NO_COUNTS
from longtail.reporting.dataset_results import group_by_dataset
from longtail.reporting.page import report
from longtail.reporting.result_rows import make_rows
from longtail.reporting.significance import DIFFERENT_LENGTH, explain_labels, rank_methods, rank_rows
from longtail.reporting.table import to_markdown
from tests.raises import fails, raises
from tests.report import browser
from tests.report.made import PER_CLASS, Page, make_run

COUNTS = [300, 120, 60, 25, 12, 4]
SHARES = {"ce": [1, 1, 0.9, 0.8, 0.3, 0.1], "paco": [0.9, 0.9, 0.9, 0.9, 0.8, 0.8]}
HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "漢字 \u202e é 😀",
    "x" * 3000,
    "{{a}}&amp;",
    "\udcff\x00",
]


@pytest.fixture
def folder(tmp_path):
    """Two methods with three seeds each."""
    for method, shares in SHARES.items():
        for seed in range(3):
            make_run(tmp_path / f"runs/{method}/seed{seed}", recipes.digits_lt(method), seed, COUNTS, right=shares)
    return tmp_path / "runs"


def read(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def dataset_of(folder):
    (dataset,) = group_by_dataset(make_rows(run_folder.read_finished(folder)))
    return dataset


def results(page: Page):
    """Return the values of the results table by method and heading."""
    (found,) = [t for t in page.tables if t[0][-1][0] == "seeds"]
    head = [text for text, _ in found[0]]
    return {
        line[0][0].strip(): dict(zip(head[1:], (value for _, value in line[1:]), strict=True)) for line in found[1:]
    }


def stored(folder, method, metric):
    return [json.loads((folder / f"{method}/seed{s}/metrics.json").read_text())[metric] for s in range(3)]


# Numbers


def test_values_match_metrics_json(folder, tmp_path):
    page = read(report(folder, tmp_path / "page.html"))
    names = {"all": "top1", "many": "many", "medium": "medium", "few": "few", "ECE": "ece", "F1": "macro_f1"}
    for method, label in (("ce", "Cross-entropy"), ("paco", "PaCo")):
        found = results(page)[label]
        for heading, metric in names.items():
            assert float(found[heading]) == pytest.approx(np.mean(stored(folder, method, metric)), abs=1e-9)
        per_class = np.mean(stored(folder, method, "per_class"), axis=0)
        (every,) = [t for t in page.tables if t[0][-1][0] == "group"]
        column = [text for text, _ in every[0]].index(label)
        assert [float(line[column][1]) for line in every[1:]] == pytest.approx(per_class.round(2).tolist())


def test_summary_has_difference_and_interval(folder):
    dataset = dataset_of(folder)
    rare, _, overall, _ = (said(element) for element in summary.summarize(dataset))
    ours, theirs = stored(folder, "paco", "few"), stored(folder, "ce", "few")
    mean, half = paired_difference(ours, theirs)
    assert mean > half  # made so
    best, ((other, verdict),) = rank_methods(dataset.comparable, "few")
    assert (best.label, other.label, verdict.outcome) == ("PaCo", "Cross-entropy", "ahead")
    for value in (
        str(dataset.support),
        f"{np.mean(ours):.1f} %",
        f"{mean:.1f} ± {half:.1f} points",
        "PaCo",
        other.label,
    ):
        assert value in rare
    assert f"{np.mean(stored(folder, 'paco', 'top1')):.1f} %" in overall


def test_cost_is_the_mean(folder, tmp_path):
    """The latencies 3, 4 and 11 ms have different mean and median."""
    path = folder / "paco/seed2" / run_folder.METRICS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latency_b64": 11.0}))
    page = read(report(folder, tmp_path / "page.html"))
    (costs,) = [t for t in page.tables if t[0][1][0].startswith("milliseconds")]
    assert {line[0][0]: float(line[1][1]) for line in costs[1:]} == {"PaCo": 6.0, "Cross-entropy": 4.0}
    (link,) = [a for a in page.of("a") if a.get("download") == "accuracy_against_latency_b64.csv"]
    lines = [line.split(",")[:2] for line in unquote(link["href"]).splitlines()[1:]]
    assert {label: float(x) for label, x in lines} == {"PaCo": 6.0, "Cross-entropy": 4.0}
    assert any(title.startswith("PaCo: ") and title.endswith(" 6.0") for title in page.text["title"])


def test_ties(folder):
    for seed in range(3):
        make_run(folder / f"bs/seed{seed}", recipes.digits_lt("balanced-softmax"), seed, COUNTS, right=SHARES["paco"])
    dataset = dataset_of(folder)
    (rare, *_) = summary.summarize(dataset)
    mean, half = paired_difference(*(stored(folder, method, "few") for method in ("paco", "bs")))
    found = rank_methods(dataset.comparable, "few")
    outcomes = {row.label: verdict.outcome for row, verdict in found.others}
    assert abs(mean) <= half and outcomes["Cross-entropy"] == "ahead"
    assert {found.best.label, *outcomes} == {"PaCo", "Balanced Softmax", "Cross-entropy"}
    assert [*outcomes.values()].count("tied") == 1 and all(label in said(rare) for label in outcomes)


def test_two_seeds_get_no_verdict(folder, tmp_path):
    for method in SHARES:
        (folder / method / "seed2" / run_folder.METRICS).unlink()
    text = report(folder, tmp_path / "page.html").read_text()
    dataset = dataset_of(folder)
    (rare, *_) = summary.summarize(dataset)
    lead = np.mean([stored_one(folder, "paco", s) - stored_one(folder, "ce", s) for s in range(2)])
    (outcome,) = (verdict.outcome for _, verdict in rank_methods(dataset.comparable, "few").others)
    assert outcome is None and f"by {lead:.1f}" in str(rare) and "±" not in said(rare)
    (seeds,) = (ground for ground in summary.caveats(dataset) if ground.kind == "seeds")
    assert not seeds.is_good and "2 seeds" in seeds.text and said(seeds.text) in said(text) and ">best<" not in text


def stored_one(folder, method, seed):
    return json.loads((folder / f"{method}/seed{seed}/metrics.json").read_text())["few"]


def test_cross_validation_replaces_validation_images_for_a_single_method(folder):
    def validation_caveat(path):
        return next(caveat for caveat in summary.caveats(dataset_of(path)) if caveat.kind == "validation")

    assert not validation_caveat(folder / "ce").is_good
    for run in folder.glob("*/seed*"):
        (run / run_folder.CROSS_VALIDATION).write_text("{}")
    assert validation_caveat(folder / "ce").is_good
    assert not validation_caveat(folder).is_good  # which method is best is decided on the test images


def test_caveats(folder, tmp_path):
    dataset = dataset_of(folder)
    found = {ground.kind: ground for ground in summary.caveats(dataset)}
    assert {kind: ground.is_good for kind, ground in found.items()} == {
        "seeds": True,
        "training": True,
        "validation": False,
        "test-images": False,
    }
    assert "3 seeds" in found["seeds"].text
    p = np.mean(stored(folder, "paco", "per_class"), axis=0)[4:] / 100
    p = (PER_CLASS * p + 1) / (PER_CLASS + 2)
    half = 196 * np.sqrt((p * (1 - p) / PER_CLASS).sum()) / 2
    assert f"{2 * PER_CLASS} test" in found["test-images"].text and f"{half:.1f} points" in found["test-images"].text
    page = read(report(folder, tmp_path / "page.html"))
    assert {*page.kinds()} == found.keys()
    path = folder / "ce/seed0" / run_folder.ENVIRONMENT
    tree = json.loads(path.read_text())
    tree["data"]["notes"], tree["commit"] = ["7 images <lost>"], "def-dirty"
    path.write_text(json.dumps(tree))
    (folder / "ce/seed0" / run_folder.SKIPPED).write_text("{}\n{}\n")
    after = {ground.kind: ground for ground in summary.caveats(dataset_of(folder))}
    added = {"data-notes": "<lost>", "skipped-images": "2 images", "mixed-runs": "abc, def-dirty", "uncommitted": ""}
    assert after.keys() == found.keys() | added.keys()
    for kind, value in added.items():
        assert not after[kind].is_good and value in after[kind].text, kind
    assert "commit" in after["mixed-runs"].text


def test_different_settings_are_a_caution(folder):
    config = recipes.digits_lt("focal")
    faster = replace(config, optim=replace(config.optim, lr=0.7))
    longer = replace(config, train=replace(config.train, epochs=99))
    make_run(folder / "lr/seed0", faster, 0, COUNTS)
    make_run(folder / "longer/seed0", longer, 0, COUNTS)
    found = {ground.kind: ground for ground in summary.caveats(dataset_of(folder)) if not ground.is_good}
    assert "optim.lr" in found["training"].text and "epochs=99" in found["left-out"].text


def test_only_comparable_methods_are_ranked(folder, tmp_path):
    """Methods with shorter training are not compared, although they are equally many and have higher accuracy."""
    for method in ("focal", "balanced-softmax"):
        config = recipes.digits_lt(method)
        shorter = replace(config, train=replace(config.train, epochs=9))
        for seed in range(3):
            make_run(folder / f"{method}/seed{seed}", shorter, seed, COUNTS, right=1.0)
    page = read(report(folder, tmp_path / "page.html"))
    marks = page.text["span"]
    assert marks.count("best") == 2 and marks.count(DIFFERENT_LENGTH) == 4  # over all, and on rare classes
    assert explain_labels({DIFFERENT_LENGTH}) in page.words()
    (dataset,) = group_by_dataset(rows := make_rows(run_folder.read_finished(folder)))
    assert {row.label for row in dataset.comparable} == {"PaCo", "Cross-entropy"}
    words_of = dict(zip([row.label for row in rows], rank_rows(rows), strict=True))
    assert words_of["Focal"] == words_of["Balanced Softmax"] == DIFFERENT_LENGTH
    assert [*words_of.values()].count("best") == 1 and explain_labels({DIFFERENT_LENGTH}) in to_markdown(rows)


def test_second_stages_are_reported(folder):
    """A second stage is reported, also if it is very short."""
    found = grounds_with(folder, "supcon", 20)
    assert found["training"].is_good and "40 epochs" in found["training"].text
    assert all(label in found["training"].text for label in ("SupCon", "PaCo"))  # two views of each image
    assert not found["second-stage"].is_good and "SupCon 20" in found["second-stage"].text
    assert "short-stage" not in found
    found = grounds_with(folder, "crt", 2)
    assert not found["short-stage"].is_good and "cRT" in found["short-stage"].text


def grounds_with(folder, method, epochs):
    config = recipes.digits_lt(method)
    config = replace(config, method=replace(config.method, linear_epochs=epochs))
    for seed in range(3):
        make_run(folder / f"{method}/seed{seed}", config, seed, COUNTS, right=0.99)
    return {ground.kind: ground for ground in summary.caveats(dataset_of(folder))}


def said(element) -> str:
    return unescape(re.sub("<[^>]*>", "", str(element))).replace("\xa0", " ")


def test_settings_match_stored_config(folder, tmp_path):
    config = recipes.digits_lt("paco")
    config = replace(config, method=replace(config.method, alpha="auto"))
    path = make_run(folder / "auto/seed0", config, 0, COUNTS) / run_folder.ENVIRONMENT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chosen": {"alpha": 0.0345}}))
    page = read(report(folder, tmp_path / "page.html"))
    (found,) = [t for t in page.tables if t[0][1][0] == "method settings"]
    own = {line[0][0]: line[1][0] for line in found[1:]}
    assert any("(0.0345)" in text for text in own.values())
    assert any("alpha 0.05" in text and "queue 256" in text for text in own.values())


def test_reference_without_cross_entropy_is_best_method(folder, tmp_path):
    for seed in range(3):
        make_run(folder / f"focal/seed{seed}", recipes.digits_lt("focal"), seed, COUNTS, right=0.2)
    for sources, measure in (([folder / "paco", folder / "focal"], "PaCo"), (folder, "Cross-entropy")):
        page = read(report(sources, tmp_path / "page.html"))
        titles = [title for title in page.text["title"] if " minus " in title]
        assert titles and {title.split(" minus ")[1] for title in titles} == {measure}


def test_each_dataset_has_a_section(folder, tmp_path):
    make_run(folder / "other/seed0", recipes.cifar100_lt("paco", 100), 0, [200, 30, 5])
    page = read(report(folder, tmp_path / "page.html"))
    assert page.text["h2"] == ["Summary"]
    assert {row.data for row in make_rows(run_folder.read_finished(folder))} < {*page.text["bdi"]}


def test_optimal_P_sup_matches_random_batches(folder):
    """The optimum agrees with the mean of 1/(1 + alpha·positives) over random batches and queues."""
    config = recipes.digits_lt("paco")
    run = run_folder.read(folder / "paco/seed0")
    rng, counts, B, K = np.random.default_rng(0), np.array(COUNTS), config.train.batch_size, config.method.queue
    shares = []
    for _ in range(400):
        y_B, y_K = (rng.choice(len(counts), n, p=counts / counts.sum()) for n in (B, K))
        for i, y in enumerate(y_B):
            others = np.delete(y_B, i)
            positives = 1 + 2 * (others == y).sum() + (y_K == y).sum()
            shares.append(1 / (1 + config.method.alpha * positives))
    assert method_detail.optimal_P_sup(run) == pytest.approx(np.mean(shares), rel=0.02)
    assert method_detail.optimal_P_sup(run_folder.read(folder / "ce/seed0")) is None
    auto = replace(run.config, method=replace(run.config.method, alpha="auto"))
    chosen = replace(run, config=auto, environment=run.environment | {"chosen": {"alpha": config.method.alpha}})
    assert method_detail.optimal_P_sup(chosen) == method_detail.optimal_P_sup(run)


def test_calibration_pools_seeds(folder):
    records = [run_folder.read(folder / f"ce/seed{s}") for s in range(3)]
    bins = method_detail.pool_bins(records)
    assert sum(b.images for b in bins) == 3 * len(COUNTS) * PER_CLASS
    right = sum(b.images * b.accuracy for b in bins) / sum(b.images for b in bins)
    assert right == pytest.approx(np.mean([r.metrics["top1"] for r in records]))


# What cannot break it


def test_malicious_names_are_escaped(tmp_path):
    for method in ("ce", "paco"):
        make_run(tmp_path / f"<b>{method}'\"&/seed0", recipes.digits_lt(method), 0, COUNTS, HOSTILE)
    page = read(report(tmp_path, tmp_path / "page.html"))
    assert len(page.of("script")) == 1 and page.of("b") == [] and "alert" not in page.text["script"][0]
    assert not [k for _, attributes in page.elements for k in attributes if k.startswith("on") or k == "style"]
    assert all(a["src"].startswith("data:image/") for a in page.of("img"))
    assert HOSTILE[0] in page.words() and HOSTILE[1] in page.words() and HOSTILE[3][:79] + "…" in page.words()
    assert HOSTILE[3] in {a.get("title") for a in page.of("bdi")}
    assert "<b>ce'\"&" in page.words()
    assert any(HOSTILE[0] in a["alt"] and a["alt"].endswith(HOSTILE[1]) for a in page.of("img"))


@pytest.mark.parametrize("one", [True, False])
def test_page_is_self_contained(folder, tmp_path, one):
    path = report(folder / "paco" if one else folder, tmp_path / "page.html")
    page, text = read(path), path.read_text()
    assert text.splitlines()[0] == "<!doctype html>" and text.splitlines()[1].startswith("<html lang=")
    links = [a[k] for _, a in page.elements for k in ("src", "href", "action", "data") if k in a]
    assert links and all(link.startswith("data:") for link in links)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp", "".join(page.text["style"] + page.text["script"]))
    (policy,) = [a["content"] for a in page.of("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.text[tag][0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    plots = [a for a in page.of("svg") if a["class"].split()[0] in ("plot", "matrix")]
    assert len(page.of("figure")) == len(plots) == sum(a.get("download") is not None for a in page.of("a")) - 1
    assert all(a["role"] == "img" for a in plots) and all(a["alt"] for a in page.of("img"))
    assert all(a.get("scope") for a in page.of("th")) and len(page.of("caption")) == len(page.tables)


def test_missing_files_are_reported(folder, tmp_path):
    for path in (folder / "paco").rglob("*"):
        if path.name in ("features.npz", "log.jsonl", "index.json"):
            path.unlink()
    metrics = folder / "paco/seed0/metrics.json"
    tree = json.loads(metrics.read_text())
    for key in ("calibration", "confusion", "class_names", "knn_top1", "latency_b64", "peak_memory"):
        del tree[key]
    metrics.write_text(json.dumps(tree))
    missing = read(report(folder / "paco/seed0", tmp_path / "page.html")).missing()
    for what in ("feature map", "training curves", "calibration diagram", "confusions", "rare classes"):
        assert sum(what in sentence.split(":")[0] for sentence in missing) == 1, what
    report(folder, tmp_path / "all.html")  # one without, others with


def test_confusions_without_images_come_from_metrics_json(folder):
    run = run_folder.read(folder / "ce/seed0")
    (run.folder / "examples/index.json").unlink()
    note, table = method_detail.confusion_section(run)
    assert "confusions" in said(note) and 'class="missing"' in str(note)
    times = np.array(run.metrics["confusion"])
    np.fill_diagonal(times, 0)
    first = Page(str(table)).tables[0][1]
    assert float(first[2][1]) == pytest.approx(100 * times.max() / PER_CLASS)


def test_class_is_listed_once(folder):
    """Runs of older versions list such classes twice."""
    tables = Page("".join(map(str, method_detail.rare_class_section(run_folder.read(folder / "ce/seed0"))))).tables
    assert len(tables) == 1


def test_first_seed_with_features_is_mapped(folder):
    (folder / "ce/seed0/features.npz").unlink()
    (row,) = make_rows(run_folder.read_finished(folder / "ce"))
    assert Page("".join(map(str, method_detail.detail_sections(row)))).missing() == []
    (folder / "ce/seed1/log.jsonl").unlink()
    (missing,) = Page(str(method_detail.training_section(row))).missing()
    assert "seed 1" in missing


@pytest.mark.parametrize("file", [run_folder.METRICS, run_folder.CONFIG, run_folder.ENVIRONMENT])
def test_unreadable_run_is_left_out_and_named(folder, tmp_path, caplog, file):
    whole = (folder / "ce/seed1" / file).read_text()
    (folder / "ce/seed1" / file).write_text(whole[: len(whole) // 2])
    page = read(report(folder, tmp_path / "page.html"))
    assert results(page)["Cross-entropy"]["seeds"] == "2" and results(page)["PaCo"]["seeds"] == "3"
    where = str(folder / "ce/seed1")
    assert any(where in sentence for sentence in page.missing()) and where in caplog.text
    with raises("damaged-file", where):
        report(folder / "ce/seed1", tmp_path / "alone.html")


@pytest.mark.parametrize("file", [run_folder.CONFIG, run_folder.ENVIRONMENT])
def test_finished_run_with_missing_file_is_reported(folder, tmp_path, caplog, file):
    (folder / "ce/seed1" / run_folder.MODEL).touch()
    (folder / "ce/seed1" / file).unlink()
    assert any(file in sentence for sentence in read(report(folder, tmp_path / "page.html")).missing())
    assert file in caplog.text
    with raises("missing-file", file):
        longtail.table(folder)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"null"])
def test_damaged_files_are_ignored(folder, content):
    run = run_folder.read(folder / "ce/seed0")
    for name in ("features.npz", "log.jsonl", "examples/index.json", "examples/0.png"):
        (run.folder / name).write_bytes(content)
    assert (
        run_artifacts.read_features(run, 10) is None
        and run_artifacts.read_log(run) == []
        and run_artifacts.read_examples(run) == {}
    )


@pytest.mark.parametrize("shape", [(40, 8), (40, 1), (3, 8), (0, 8)])
def test_features_without_map(folder, shape):
    y_N = np.zeros(shape[0], dtype=int)
    np.savez(folder / "ce/seed0/features.npz", features=np.full(shape, 7, np.float16), labels=y_N)
    assert len(Page(str(method_detail.feature_map(run_folder.read(folder / "ce/seed0")))).missing()) == 1


def test_features_beyond_float16_are_left_out(folder):
    x_NF = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float16)
    x_NF[:5, 0] = np.inf
    np.savez(folder / "ce/seed0/features.npz", features=x_NF, labels=np.arange(40) % 6)
    run = run_folder.read(folder / "ce/seed0")
    assert len(run_artifacts.read_features(run, 1000)[1]) == 35 and len(run_artifacts.read_features(run, 7)[1]) == 7
    assert "35 test" in str(method_detail.feature_map(run))


def test_run_without_counts_has_results(folder, tmp_path):
    for path, keys in ((run_folder.METRICS, ("counts", "class_names")), (run_folder.ENVIRONMENT, ())):
        tree = json.loads((folder / "ce/seed0" / path).read_text())
        for key in keys:
            del tree[key]
        tree.get("data", {}).pop("counts", None)
        (folder / "ce/seed0" / path).write_text(json.dumps(tree))
    page = read(report(folder / "ce/seed0", tmp_path / "page.html"))
    assert any(NO_COUNTS in sentence for sentence in page.missing()) and "Cross-entropy" in results(page)


def test_classes_without_test_or_training_images(tmp_path):
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, [50, 10, 0])
    make_run(tmp_path / "b/seed0", recipes.digits_lt("paco"), 0, [50, 10, 0])
    for name in "ab":
        path = tmp_path / name / "seed0" / run_folder.METRICS
        tree = json.loads(path.read_text())
        tree["per_class"][1] = None
        path.write_text(json.dumps(tree))
    page = read(report(tmp_path, tmp_path / "page.html"))
    assert "nan" not in " ".join(a.get("d") or "" for a in page.of("path"))


# Size, and how it is called


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """20 runs with 1,000 classes."""
    folder, counts = (
        tmp_path_factory.mktemp("large"),
        (1280 * 256 ** -np.linspace(0, 1, 1000)).round().astype(int).tolist(),
    )
    names = [f"a class with quite a long name, number {i}" for i in range(1000)]
    for method in list(recipes.METHODS)[:20]:
        make_run(folder / f"{method}/seed0", recipes.digits_lt(method), 0, counts, names)
    return folder


def test_page_size_with_many_classes_and_runs(large, tmp_path):
    start = time.process_time()  # wall time depends on other work of the machine
    path = report(large, tmp_path / "page.html")
    assert time.process_time() - start < 30 and path.stat().st_size < 10e6
    assert len(read(path).tables) > 5


def test_number_of_classes_shown_is_limited(tmp_path):
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, list(range(1500, 0, -1)))
    said = read(report(tmp_path, tmp_path / "page.html"))
    assert "1,000 of" in said.words() and "1,500 classes" in said.words()
    (every,) = [t for t in said.tables if t[0][-1][0] == "group"]
    assert len(every) == 1001 and every[1][1][0] == "1,500" and every[-1][1][0] == "1"


def test_images_are_described(folder):
    dataset = dataset_of(folder)
    numbers = [int(n) for n in re.findall(r"\d+", sections.describe_images(dataset))]
    assert numbers == [sum(COUNTS), len(COUNTS), max(COUNTS), min(COUNTS), len(COUNTS) * PER_CLASS]
    for seed in range(3):  # older runs do not store the counts
        for name in (run_folder.METRICS, run_folder.ENVIRONMENT):
            path = folder / "ce" / f"seed{seed}" / name
            stored = json.loads(path.read_text())
            stored.pop("counts", None)
            stored.get("data", {}).pop("counts", None)
            path.write_text(json.dumps(stored))
    assert sections.describe_images(dataset_of(folder / "ce")) is None


def test_report_command(folder, tmp_path, capsys):
    assert main(["report", str(folder / "ce"), str(folder / "paco"), "-o", str(tmp_path / "new/page.html")]) == 0
    assert capsys.readouterr().out == f"written to {tmp_path / 'new/page.html'}\n"
    assert results(read(tmp_path / "new/page.html")).keys() == {"Cross-entropy", "PaCo"}
    fails(capsys, ["report"], "invalid-value", "longtail report")
    fails(capsys, ["report", str(tmp_path / "nowhere")], "missing-file", tmp_path / "nowhere")
    fails(capsys, ["report", str(folder), "-o", str(tmp_path)], "exists", tmp_path / "report.html")
    fails(capsys, ["report", str(folder), "-o", str(tmp_path / "page.pdf")], "invalid-value", tmp_path / "page.html")
    assert not (tmp_path / "page.pdf").exists()


def test_report_function_imports_neither_torch_nor_matplotlib(folder, tmp_path):
    assert longtail.report([folder], out=tmp_path / "page.html") == tmp_path / "page.html"
    assert "report" in dir(longtail)
    code = (
        "import sys, longtail\n"
        f"longtail.report({str(folder)!r}, {str(tmp_path / 'page.html')!r})\n"
        "from longtail.reporting.table import table\n"
        "assert callable(longtail.report) and longtail.table is table\n"
        "assert not {'torch', 'matplotlib', 'tyro'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_finished_run_is_a_user_error(tmp_path):
    with raises("missing-file", tmp_path):
        report(tmp_path, tmp_path / "page.html")


# In a browser


@pytest.mark.long
@browser.needed
def test_browser_shows_page_without_errors(folder, tmp_path):
    path = report(folder, tmp_path / "page.html")
    with browser.Browser() as chromium:
        for width, dark in ((320, False), (390, False), (390, True), (1280, False), (1280, True)):
            chromium.screen(width, dark)
            chromium.open(path)
            assert chromium.complaints() == []
            assert {url.split(":")[0] for url in chromium.requests()} == {"file", "data"}
            assert chromium.evaluate(browser.FITS), width
            assert chromium.evaluate(browser.IMAGES_ARE_SHOWN)
        ground = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
        assert chromium.evaluate(ground) == [21, 23, 28]
        chromium.screen(1280)
        assert chromium.evaluate(ground) == [255, 255, 255]
        # A sticky heading would be missing on the second page of a table.
        position = "[...document.querySelectorAll('thead th')].map(e => getComputedStyle(e).position)"
        assert set(chromium.evaluate(position)) == {"sticky"}
        chromium.screen(1280, media="print")
        assert set(chromium.evaluate(position)) == {"static"}


@pytest.mark.long
@browser.needed
def test_layout_on_phone(folder, tmp_path):
    """The `few` column is visible without scrolling, and axis labels do not overlap long ticks such as 0.0015."""
    log, sizes = (
        folder / "ce/seed0" / run_folder.LOG,
        "e => { const r = e.getBoundingClientRect(); return [r.left, r.right] }",
    )
    log.write_text(json.dumps({"stage": "train", "epoch": 0, "epochs": 5, "loss": 1.0, "lr": 0.0016}) + "\n")
    (folder / "ce/seed0" / run_folder.METRICS).unlink()
    path = report(folder, tmp_path / "page.html")
    table = "[...document.querySelectorAll('table')].find(t => t.innerText.includes('k-NN'))"
    texts = "[...document.querySelectorAll('.plot')].find(p => p.innerHTML.includes('learning rate')).querySelectorAll('text')"
    with browser.Browser() as chromium:
        chromium.screen(390)
        chromium.open(path)
        edges = chromium.evaluate(f"[...{table}.tBodies[0].rows].map(r => ({sizes})(r.cells[2]))")
        assert edges and all(0 < left < right < 390 for left, right in edges)
        assert chromium.evaluate(f"{table}.parentNode.scrollWidth > {table}.parentNode.clientWidth")
        chromium.evaluate(f"{table}.parentNode.scrollLeft = 200")
        assert chromium.evaluate(f"({sizes})({table}.tBodies[0].rows[0].cells[0])")[0] > 0  # the method stays
        found = {
            text: edges
            for text, *edges in chromium.evaluate(f"[...{texts}].map(e => [e.textContent, ...({sizes})(e)])")
        }
        assert found["learning rate"][1] < found["0.0015"][0]


@pytest.mark.long
@browser.needed
def test_tables_sort_in_browser(folder, tmp_path):
    path = report(folder, tmp_path / "page.html")
    cells = "r => [r.cells[0].innerText.trim(), r.cells[2].innerText]"
    column = f"[...document.querySelector('table').tBodies[0].rows].map({cells})"
    click = "document.querySelectorAll('thead')[0].rows[0].cells[2].querySelector('button').click()"
    with browser.Browser() as chromium:
        chromium.open(path)
        means = {label: np.mean(stored(folder, m, "few")) for m, label in (("ce", "Cross-entropy"), ("paco", "PaCo"))}
        for order in (sorted(means, key=means.get, reverse=True), sorted(means, key=means.get)):
            chromium.evaluate(click)
            shown = chromium.evaluate(column)
            assert [label for label, _ in shown] == order
            assert all(figure.startswith(f"{means[label]:.1f} ± ") for label, figure in shown)
        assert chromium.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
        assert chromium.complaints() == []


@pytest.mark.long
@browser.needed
def test_malicious_names_in_browser(tmp_path):
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, COUNTS, HOSTILE)
    path = report(tmp_path, tmp_path / "page.html")
    with browser.Browser() as chromium:
        chromium.screen(390)
        chromium.open(path)
        assert chromium.complaints() == [] and chromium.evaluate("document.scripts.length") == 1
        assert not [m for m in chromium.said if m.get("method") == "Page.javascriptDialogOpening"]
        assert chromium.evaluate(browser.FITS)


@pytest.mark.long
@browser.needed
def test_security_policy_blocks_injected_script(folder, tmp_path):
    """The security policy blocks an injected script and logs it to the console."""
    path = report(folder / "ce", tmp_path / "page.html")
    path.write_text(path.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>"))
    with browser.Browser() as chromium:
        chromium.open(path)
        assert chromium.evaluate("document.title").startswith("longtail") and chromium.complaints()


@pytest.mark.long
@browser.needed
def test_accessible_names(folder, tmp_path):
    (folder / "ce/seed2" / run_folder.METRICS).unlink()
    log = folder / "ce/seed2" / run_folder.LOG
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))  # so that one run is under way
    with browser.Browser() as chromium:
        chromium.open(report(folder, tmp_path / "page.html"))
        chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        found = chromium.spoken()
    named = {"table", "region", "button", "link", "image", "progressbar", "heading", "columnheader", "rowheader"}
    assert named | {"main", "caption", "cell"} <= {role for role, _, _ in found}, {role for role, _, _ in found}
    assert [(role, name) for role, name, _ in found if role in named and not name.strip()] == []
    levels = [level for role, _, level in found if role == "heading"]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels


@pytest.mark.long
@browser.needed
def test_large_page_opens_in_two_seconds(large, tmp_path):
    path = report(large, tmp_path / "page.html")
    with browser.Browser() as chromium:
        assert min(chromium.open(path) for _ in range(2)) < 2 and chromium.complaints() == []
