"""Help, one-line errors with exit code 2 that leave no files, and the commands end to end."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longtail import recipes
from longtail.cli import docs, main
from longtail.cli.console import print_messages
from longtail.cli.parse import check_model_name
from longtail.cli.train import default_out
from longtail.progress import log_info, log_warning
from tests.raises import fails

FAST = ["--train.epochs", "1", "--train.device", "cpu", "--log.progress", "none"]


def images(root: Path, split: str = "train", classes=("cat", "dog"), n: int = 6, side: int = 20) -> Path:
    rng = np.random.default_rng(len(split))
    for c in classes:
        folder = root / split / c
        folder.mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)).save(folder / f"{i}.jpg")
    return root


@pytest.mark.parametrize(
    ("args", "kind", "values"),
    [
        (["trian"], "unknown-name", ["'trian'", "'train'"]),
        (["train"], "invalid-value", ["longtail train"]),
        (["train", "cifar100-l"], "unknown-name", ["'cifar100-l'", "'cifar100-lt'"]),
        (["train", "digits-lt", "--method", "pacco"], "unknown-name", ["'pacco'", "'paco'"]),
        (["train", "digits-lt", "--setting", "papr"], "unknown-name", ["'papr'"]),
        (["train", "digits-lt", "--strategy", "4"], "invalid-value", ["--strategy", "4", "rand/sim"]),
        (["train", "digits-lt", "--warmup-epochs", "1"], "unknown-name", ["--warmup-epochs", "--optim.warmup_epochs?"]),
        (["train", "digits-lt", "--accumulate=7"], "unknown-name", ["--accumulate", "--train.accumulate?"]),
        (["train", "digits-lt", "--epoch", "1"], "unknown-name", ["--epoch", "--epochs?"]),
        (["train", "digits-lt", "--metod", "ce"], "unknown-name", ["--metod", "--method?"]),
        (["train", "digits-lt", "--epochs", "0"], "invalid-value", ["--train.epochs 0", "1"]),
        (["train", "digits-lt", "--lr", "1", "--optim.lr=2"], "conflict", ["--lr", "--optim.lr"]),
        (["train", "digits-lt", "--batch_size", "1", "--train.batch-size", "2"], "conflict", ["--train.batch_size"]),
        (["train", "no/such/folder"], "missing-file", ["no/such/folder"]),
        (["figure"], "invalid-value", ["longtail figure"]),
        (["train", "digits-lt", "--method.alhpa", "1"], "unknown-name", ["--method.alhpa", "--method.alpha?"]),
        (["train", "digits-lt", "--method.alpha", "x"], "invalid-value", ["--method.alpha", "'x'"]),
        (["train", "digits-lt", "--method.alpha", "2"], "invalid-value", ["--method.alpha 2.0", "0.01"]),
        (["train", "digits-lt", "--imbalance", "0.01"], "invalid-value", ["0.01", "100"]),
        (["train", "digits-lt", "--imbalance", "many"], "invalid-value", ["--imbalance", "'many'"]),
        (["train", "digits-lt", "--train.epochs", "0"], "invalid-value", ["--train.epochs 0", "1"]),
        (["train", "digits-lt", "--train.seeds", "1", "1"], "invalid-value", ["--train.seeds", "distinct"]),
        (["train", "digits-lt", "--model.name", "resnet8_cifr"], "unknown-name", ["'resnet8_cifr'", "'resnet8_cifar'"]),
        (["train", "digits-lt", "--data.val_fraction", "0.5"], "invalid-value", ["0.5", "0.2"]),
        (["train", "digits-lt", "--optim.lr", "-1"], "invalid-value", ["--optim.lr -1", "0"]),
        (["train", "digits-lt", "--optim.lr", "x"], "invalid-value", ["--optim.lr x"]),
        (["train", "digits-lt", "--train.epochs", "many"], "invalid-value", ["--train.epochs many"]),
        (["train", "digits-lt", "--method.rebalance", "False"], "unknown-name", ["False", "switch"]),
        (["train", "digits-lt", "--data.name", "x"], "invalid-value", ["'x'", "'digits'"]),
        (["train", "digits-lt", "--out"], "invalid-value", ["--out"]),
        (["table", "nowhere"], "missing-file", ["nowhere"]),
        (["table"], "invalid-value", ["longtail table"]),
        (["eval", "nowhere"], "missing-file", ["nowhere"]),
        (["recipes", "--all"], "unknown-name", ["--all"]),
        (["reproduce"], "invalid-value", ["cifar100-lt"]),
        (["reproduce", "cifar100-l"], "unknown-name", ["'cifar100-l'", "'cifar100-lt'"]),
        (["reproduce", "cifar100-lt", "--methods", "pacco"], "unknown-name", ["'pacco'", "'paco'"]),
        (["reproduce", "cifar100", "--methods", "balanced-softmax"], "unknown-name", ["paco-no-rebalance"]),
        (["reproduce", "cifar100-lt", "--methods"], "invalid-value", ["--methods", "paco"]),
        (["reproduce", "cifar100-lt", "--imbalance", "20"], "invalid-value", ["--imbalance 20", "100", "50", "10"]),
        (["reproduce", "cifar100-lt", "--imbalance"], "invalid-value", ["--imbalance", "100", "50", "10"]),
        (["reproduce", "cifar100-lt", "--seeds"], "invalid-value", ["--seeds"]),
        (["reproduce", "cifar100-lt", "--seeds", "1", "1"], "invalid-value", ["--seeds 1 1"]),
        (["reproduce", "cifar100-lt", "--epochs", "0"], "invalid-value", ["--epochs 0"]),
        (["reproduce", "cifar100-lt", "--minutes", "-1"], "invalid-value", ["--minutes -1", "0"]),
    ],
)
def test_bad_arguments_are_one_line(args, kind, values, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(capsys, args, kind, *values)
    assert not list(tmp_path.iterdir())


def test_the_values_of_unknown_options_are_not_listed(capsys):
    assert main(["train", "digits-lt", "--epoch", "31"]) == 2
    shown = capsys.readouterr().err
    assert "--epoch:" in shown and "31" not in shown


def test_bad_folders_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = lambda name: ["train", str(tmp_path / name), *FAST, "--out", "out"]  # noqa: E731
    (tmp_path / "empty").mkdir()
    fails(capsys, train("empty"), "missing-file", "empty")
    fails(capsys, train(images(tmp_path / "single", classes=["cat"]).name), "too-few-data", "single", "'cat'")
    (images(tmp_path / "broken") / "train" / "cat" / "0.jpg").write_bytes(b"\xff\xd8 no image")
    fails(capsys, train("broken"), "bad-image", "0.jpg")
    images(images(tmp_path / "strange"), "val", classes=["cat", "dgo"])
    fails(capsys, train("strange"), "bad-labels", "'dgo'", "'dog'")
    assert not (tmp_path / "out").exists()


def test_bad_archives_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["train", "cifar100-lt", "--data.root", str(tmp_path), "--data.no_download", *FAST, "--out", "out"]
    fails(capsys, train, "missing-file", "cifar-100-python", "--data.root")
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(pickle.dumps({"data": 1})[:5])
    fails(capsys, train, "damaged-file", "cifar-100-python")
    assert not (tmp_path / "out").exists()


def test_no_cuda_and_a_used_folder_are_one_line(capsys, tmp_path):
    train = ["train", "digits-lt", "--method", "ce", *FAST, "--out", str(tmp_path / "x")]
    assert main(train) == 0
    fails(capsys, train, "exists", "--out")
    fails(capsys, [*train, "--resume", "--optim.lr", "0.3"], "mismatch", "optim.lr", "0.1", "0.3")
    import torch

    if not torch.cuda.is_available():
        fails(capsys, [*train, "--train.device", "cuda", "--out", str(tmp_path / "y")], "conflict", "CUDA")
        assert not (tmp_path / "y").exists()


def test_an_output_folder_that_cannot_be_created_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails(capsys, ["train", "digits-lt", *FAST, "--out", str(tmp_path / "file" / "x")], "not-writable", "--out")


def test_train_eval_and_table(capsys, tmp_path):
    """Two methods with two seeds: the evaluation gives the stored results, and the table is printed and written."""
    for method in ("ce", "paco"):
        args = [
            "train",
            "digits-lt",
            "--method",
            method,
            *FAST,
            "--train.seeds",
            "0",
            "1",
            "--out",
            str(tmp_path / method),
        ]
        assert main(args) == 0
    shown = capsys.readouterr().out
    assert "PaCo" in shown and "Cross-entropy" in shown
    before = json.loads((tmp_path / "paco/seed0/metrics.json").read_text())
    assert main(["eval", str(tmp_path / "paco")]) == 0
    after = json.loads((tmp_path / "paco/seed0/metrics.json").read_text())
    assert {k: v for k, v in after.items() if k != "latency_b64"} == {
        k: v for k, v in before.items() if k != "latency_b64"
    }
    assert main(["table", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]] and {row["method"] for row in rows} == {
        "PaCo",
        "Cross-entropy",
    }
    values = [json.loads((tmp_path / f"paco/seed{s}/metrics.json").read_text())["top1"] for s in (0, 1)]
    paco = next(row for row in rows if row["method"] == "PaCo")["metrics"]["top1"]
    assert paco["values"] == values and paco["mean"] == pytest.approx(np.mean(values))
    assert paco["std"] == pytest.approx(np.std(values, ddof=1))
    (line,) = [line for line in (tmp_path / "table.md").read_text().splitlines() if "Cross-entropy" in line]
    assert "2" in [cell.strip() for cell in line.split("|")]


def test_a_folder_of_images_trains_with_a_class_of_one_image(capsys, tmp_path):
    """A class may have a single image, which is used for training; the class is reported."""
    root = images(tmp_path / "pets", split="", classes=["cat", "dog"], n=12)
    images(root, split="", classes=["axolotl"], n=1)
    flags = ["--model.name", "resnet8_cifar", "--data.image_size", "16", "--train.batch_size", "8"]
    args = ["train", str(root), *flags, *FAST[:-1], "plain", "--out", str(tmp_path / "out")]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "axolotl" in shown
    metrics = json.loads((tmp_path / "out/seed0/metrics.json").read_text())
    assert metrics["counts"][0] == 1 and metrics["per_class"][0] is None and metrics["class_names"][0] == "axolotl"


def test_flags_of_settings_are_applied_after_those_of_the_recipe(tmp_path, capsys):
    args = ["train", "digits-lt", "--method", "paco-no-rebalance", "--imbalance", "10", "--strategy", "1", *FAST]
    assert main([*args, "--method.tau", "0.3", "--out", str(tmp_path)]) == 0
    config = json.loads((tmp_path / "seed0/config.json").read_text())
    assert config["method"]["tau"] == 0.3 and not config["method"]["rebalance"] and config["data"]["imbalance"] == 10
    assert config["views"]["query"]["policy"] == config["views"]["key"]["policy"] == "sim"


def test_help_needs_no_torch():
    """Importing torch takes longer than everything else."""
    code = "import sys; from longtail.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for args in (["--help"], ["recipes"], ["--version"], ["docs", "data"], ["train", "digits-lt", "--help-all"]):
        shown = subprocess.run([sys.executable, "-c", code, *args], check=True, capture_output=True, text=True)
        assert shown.stdout


def test_runs_of_methods_that_share_a_class_do_not_share_a_folder(monkeypatch):
    config = recipes.digits_lt("ride-3")
    assert default_out("digits-lt", "ride-3", config, None) == Path("runs/digits-lt-ride-3-40")


def test_names_are_checked_before_torch_is_imported(tmp_path):
    """One process runs all commands, each of which must fail with one line that names the value and the closest match."""
    (tmp_path / "birds/eagle").mkdir(parents=True)
    (tmp_path / "runs/x/seed0").mkdir(parents=True)
    for name in ("birds.zip", "birds.tar.gz", "x.jpg", "x.parquet", "notes.pdf", "runs/x/seed0/config.json"):
        (tmp_path / name).touch()
    cases = {
        "train brids": ("unknown-name", "'brids'", "'birds/'"),
        "train birds/eagel": ("missing-file", "'birds/eagle/'"),
        "train birds.zip": ("missing-file", "birds.zip", "unpack"),
        "compare birds.tar.gz": ("missing-file", "birds.tar.gz", "unpack"),
        "data inspect x.jpg": ("missing-file", "x.jpg", "single image"),
        "train x.parquet": ("missing-file", "x.parquet", "folder"),
        "train notes.pdf": ("missing-file", "notes.pdf", ".csv"),
        "train runs/x": ("conflict", "longtail train --from runs/x"),
        "compare runs/x": ("conflict", "longtail train --from runs/x"),
        "data inspect runs/x": ("conflict", "longtail train --from runs/x"),
        "train cifar100-lf": ("unknown-name", "'cifar100-lt'"),
        "train digits-lt --method pacco": ("unknown-name", "'pacco'", "'paco'"),
        "train birds --method pacco": ("unknown-name", "'pacco'", "'paco'"),
        "train birds --model resnet8_cifra": ("unknown-name", "'resnet8_cifra'", "'resnet8_cifar'"),
        "compare birds --model efficientnet_b00.x": ("unknown-name", "'efficientnet_b0'"),
        "train birds --epoch 3": ("unknown-name", "--epochs?"),
        "train birds --optim.lrr 3": ("unknown-name", "--optim.lr?"),
        "train imagenet-lt --data.root brids": ("missing-file", "--data.root", "'birds/'"),
        "compare digits-lt --methods ce pacco": ("unknown-name", "'pacco'", "'paco'"),
        "compare birds --methods ce pacco": ("unknown-name", "'pacco'", "'paco'"),
        "reproduce cifar100-l": ("unknown-name", "'cifar100-lt'"),
        "reproduce cifar100-lt --methods pacco": ("unknown-name", "'pacco'", "'paco'"),
        "eval runs/y": ("missing-file", "runs/y"),
        "export rnus/x": ("missing-file", "'runs/x/'"),
        "predict rnus/x x.jpg": ("missing-file", "'runs/x/'"),
        "predict runs/x y.jpg": ("missing-file", "y.jpg", "'x.jpg'"),
        "distill rnus": ("missing-file", "'runs/'"),
        "distill runs/x --model resnet18": ("missing-file", "runs/x"),
        "report rnus": ("missing-file", "'runs/'"),
        "table rnus": ("missing-file", "'runs/'"),
        "figure latncy": ("unknown-name", "'latency'"),
        "theory --recipe brids": ("unknown-name", "'birds/'"),
        "recipes cifr10-lt": ("unknown-name", "'cifar10-lt'"),
        "docs stat": ("unknown-name", "'start'"),
    }
    code = """if True:
        import json, sys
        from longtail.cli import run
        from longtail.errors import UserError
        found = {}
        for args in sys.argv[1:]:
            try:
                run(args.split())
            except UserError as error:
                found[args] = error.kind, str(error), 'torch' in sys.modules
        print(json.dumps(found))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *cases], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    found = json.loads(done.stdout)
    for args, (kind, *values) in cases.items():
        assert found[args][0] == kind, (args, found[args])
        assert all(value in found[args][1] for value in values), (args, found[args])
        assert not found[args][2], f"{args} imports torch"


def test_published_results_are_listed(capsys):
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(figure in shown for figure in ("52.0", "56.0", "64.2", "50.8", "79.1")) and "digits-lt" in shown


def test_the_module_runs_as_a_script():
    result = subprocess.run(
        [sys.executable, "-m", "longtail", "nonsense"], capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_an_error_names_the_page_that_helps(capsys, tmp_path):
    for args, page in {
        "train nowhere": "data",
        "train cifar100-lt --optim.lr -1": "commands",
        f"report {tmp_path}": "start",
        "theory --counts 3 0": "theory",
        "reproduce nothing": "reproduce",
        f"predict {tmp_path} nothing": "use",
    }.items():
        assert main(args.split()) == 2
        assert capsys.readouterr().err.endswith(f" {page})\n"), args
        assert docs.find_pages()[page].exists()


def test_pages_of_errors_and_their_modules_exist():
    assert set(filter(None, docs.PAGES_BY_MODULE.values())) <= docs.find_pages().keys()
    assert [name for name in docs.PAGES_BY_MODULE if importlib.util.find_spec(name) is None] == []


def test_messages_of_the_library_are_logged_and_the_command_line_prints_them(capsys, caplog):
    with print_messages():
        log_info("a message")
        log_warning("a warning")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a message\n", "a warning\n") and not caplog.messages
    with caplog.at_level("INFO", logger="longtail"):
        log_info("100 % of a message")
        log_warning("a warning")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "") and caplog.messages == ["100 % of a message", "a warning"]


def test_docs_prints_pages(capsys):
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(docs.find_pages())
    assert main(["docs", "data"]) == 0
    assert capsys.readouterr().out == docs.find_pages()["data"].read_text()
    fails(capsys, ["docs", "dta"], "unknown-name", "'dta'", "'data'")


def test_docs_formats_pages_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(docs.sys.stdout, "isatty", lambda: True, raising=False)
    docs.print_page("figures")
    shown = capsys.readouterr().out
    assert "picture: " in shown and "![" not in shown and "```" not in shown


def test_a_run_that_cannot_be_written_to_is_not_evaluated(capsys, tmp_path, monkeypatch):
    assert main(["train", "digits-lt", "--method", "ce", *FAST, "--out", str(tmp_path)]) == 0
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    fails(capsys, ["eval", str(tmp_path)], "not-writable", str(tmp_path))


def test_out_of_memory_is_one_line(capsys, tmp_path, monkeypatch):
    def none(*_):
        raise MemoryError

    monkeypatch.setattr("longtail.engine.train.load", none)
    assert main(["train", "digits-lt", *FAST, "--out", str(tmp_path / "x")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--data.load stream" in error


@pytest.mark.parametrize("name", ["resnet50", "resnet50.a1_in1k", "resnet74_cifar", "hf-hub:owner/model", "custom"])
def test_models_are_found_without_torch(name):
    check_model_name(name)


def test_every_registered_model_is_found_without_torch():
    timm = pytest.importorskip("timm")
    from longtail.models import backbones  # noqa: F401  (registers networks with timm)

    for name in [*timm.list_models(include_tags=False)[::50], "resnet18_cifar"]:
        check_model_name(name)
