"""Test distillation as a user sees it: the command, the function, run folders, resume, and refused teachers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import longtail
from longtail import run_folder
from longtail.cli import main
from longtail.cli.distill import resolve_distillation
from longtail.config import BalancedSoftmaxSettings, Config, DistillationSettings, from_dict, to_dict
from longtail.distillation import make_base, read_teachers
from longtail.engine.environment import write_start_files
from longtail.engine.evaluate import evaluate
from longtail.engine.features import hash_weights
from longtail.engine.head_runs import HeadTrainer
from longtail.engine.teachers import load_teachers, stored_teacher_logits
from longtail.engine.train import train
from longtail.losses.distillation import log_mean_softmax
from longtail.methods.distillation import Distillation
from longtail.reporting.result_rows import make_rows
from longtail.reporting.summary import budget_caveat
from longtail.views import Views
from tests.conftest import tiny
from tests.engine.test_host import check_steps
from tests.engine.test_together import make as make_trainers
from tests.engine.test_together import train_together
from tests.engine.test_train import CPU, load_once, log_of, run_until, state_of
from tests.raises import fails, raises

FROZEN = {"model": {"trainable": "head"}, "data": {"cached_views": 2}}
QUICK = {"epochs": 1, "log.progress": "none", "device": "cpu", "batch_size": 32}


def train_teacher(folder: Path, method: str = "balanced-softmax", seeds=(0,), **changes) -> Path:
    config = tiny(method, epochs=2, batch_size=32, seeds=seeds)
    config = replace(config, **{name: replace(getattr(config, name), **values) for name, values in changes.items()})
    train(config, folder, data=load_once(config.data))
    return folder


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> Path:
    """Two seeds of a run."""
    return train_teacher(tmp_path_factory.mktemp("teachers") / "wide", seeds=(0, 1))


def student_config(*paths: Path, **changes) -> Config:
    """Return the configuration of a student; `method` and other sections are changed by dicts of settings."""
    config = make_base(read_teachers(paths))
    config = replace(config, train=replace(config.train, epochs=3, seeds=(0,)))
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in changes.items()})


# A distillation


@pytest.fixture(scope="module")
def distilled(teachers, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("distilled")
    options = f"--model resnet8_cifar --seeds 0 1 --epochs 2 --ema 0.9 --device cpu --log.progress none --out {out}"
    assert main(["distill", str(teachers), *options.split()]) == 0
    return out


def test_the_folder_has_students_and_the_same_networks_alone(distilled, teachers):
    for name, method in (("student", DistillationSettings), ("alone", BalancedSoftmaxSettings)):
        runs = run_folder.read_finished(distilled / name)
        assert [run.seed for run in runs] == [0, 1]
        assert all(isinstance(run.config.method, method) for run in runs)
    student, alone = (run_folder.load_config(distilled / name / "seed0") for name in ("student", "alone"))
    assert replace(student, method=alone.method) == alone
    assert student.method.teachers == (teachers / "seed0", teachers / "seed1") and student.train.ema == 0.9
    stored = json.loads((distilled / "student/seed0/config.json").read_text())
    assert stored["method"]["teachers"] == [str(teachers / "seed0"), str(teachers / "seed1")]
    assert from_dict(Config, stored) == student and to_dict(student) == stored


def test_report_and_table_have_teachers_students_and_students_alone(distilled):
    rows = json.loads((distilled / "table.json").read_text())
    rows = rows if isinstance(rows, list) else rows["rows"]
    roles = sorted(row["method"].split(":")[0] for row in rows)
    assert roles == ["Student", "Student alone", "Teacher"] and all("resnet8_cifar" in row["method"] for row in rows)
    student, alone = (make_rows(run_folder.read_finished(distilled / name)) for name in ("student", "alone"))
    label = student[0].label
    assert (
        label in budget_caveat([*student, *alone]).text and label not in budget_caveat(alone).text
    )  # the teachers' cost
    page = (distilled / "report.html").read_text()
    assert all(row["method"].split(",")[0] in page for row in rows)


def test_the_folder_can_be_reported(distilled, teachers, tmp_path, simple_maps):
    assert main(["report", str(distilled), str(teachers), "-o", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").stat().st_size > 10_000


def test_a_student_is_used_without_its_teachers(teachers, tmp_path):
    own = tmp_path / "teachers"
    shutil.copytree(teachers / "seed0", own / "seed0")
    (folder,) = longtail.distill(own, None, tmp_path / "out", alone=False, seeds=0, **QUICK)
    shutil.rmtree(own)
    metrics = run_folder.read(folder).metrics
    assert evaluate(folder, device="cpu")[folder]["top1"] == metrics["top1"]
    model, stored = longtail.load(folder), np.load(folder / "predictions.npz")
    images = load_once(tiny().data).test.images[:20]
    np.testing.assert_allclose([p.logits for p in model(images)], stored["logits"][:20], rtol=1e-4, atol=1e-4)
    assert model.implied_prior == pytest.approx([0.1] * 10, rel=1e-4)
    assert main(["export", str(folder), "--to", "safetensors", "-o", str(tmp_path / "x.safetensors")]) == 0
    names = load_file(folder / run_folder.MODEL).keys()
    assert names == load_file(teachers / "seed0" / run_folder.MODEL).keys()  # the same network, and nothing else
    assert main(["table", str(folder)]) == 0


def test_command_and_function_do_the_same(teachers, tmp_path):
    options = {"target": "standardized", "temperature": 2.0, "weight": 0.9, "views": 2, "mixture": "cutmix", "ema": 0.5}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    settings = (
        f"--epochs 1 --batch-size 32 --seeds 3 --log.progress none --device cpu --out {tmp_path / 'a'} --no-alone"
    )
    assert main(["distill", str(teachers), *words, *settings.split()]) == 0
    values = QUICK | options | {"seeds": (3,)}
    (folder,) = longtail.distill([teachers], None, tmp_path / "b", alone=False, **values)
    one, other = (load_file(f / run_folder.MODEL) for f in (tmp_path / "a/student/seed3", folder))
    assert folder == tmp_path / "b/student/seed3" and all(torch.equal(v, other[k]) for k, v in one.items())
    assert run_folder.load_config(tmp_path / "a/student/seed3") == run_folder.load_config(folder)
    assert not (tmp_path / "a/alone").exists()


def test_settings_are_those_of_the_first_teacher(teachers, tmp_path):
    other = train_teacher(tmp_path / "other", "ce", optim={"lr": 0.02})
    _, config, runs, out = resolve_distillation(
        [str(other), str(teachers), "--model.name", "resnet14", "--optim.lr", "0.3"]
    )
    assert [run.folder for run in runs] == [other / "seed0", teachers / "seed0", teachers / "seed1"]
    assert (config.optim.lr, config.model.name) == (0.3, "resnet14")
    first = run_folder.load_config(other / "seed0")
    assert (config.data, config.views, config.train) == (first.data, first.views, first.train)
    assert out == Path("runs/distill-other-resnet14")


def test_a_student_learns(teachers, tmp_path):
    """A teacher of seven epochs, and a student that never sees a label."""
    config = tiny("balanced-softmax", epochs=7, batch_size=16)
    train(config, tmp_path / "teacher", data=load_once(config.data))
    (folder,) = longtail.distill(
        tmp_path / "teacher",
        None,
        tmp_path / "out",
        alone=False,
        weight=1.0,
        seeds=1,
        views=2,
        **{"log.progress": "none"},
    )
    reached, taught = (run_folder.read(f).metrics["top1"] for f in (folder, tmp_path / "teacher/seed0"))
    assert taught > 60 and reached > taught - 10
    predicted, known = (
        np.load(f / "predictions.npz")["logits"].argmax(1) for f in (folder, tmp_path / "teacher/seed0")
    )
    assert (predicted == known).mean() > 0.75


# Resume


@pytest.mark.parametrize(
    "settings",
    [
        {"target": "kd", "mixture": "both", "views": 2, "weight": 0.5},
        {"target": "standardized", "mixture": "cutmix", "weight": 1.0, "temperature": 2.0},
        {"target": "dkd", "views": 2},
        {"contrast": 0.5, "contrast_queue": 50, "views": 2},
    ],
    ids=["kd", "standardized", "dkd", "contrast"],
)
def test_resume_is_exact(settings, teachers, tmp_path):
    config = student_config(teachers, method=settings, train={"ema": 0.9})
    whole = run_until(config, tmp_path / "whole")
    for stop in (4, whole.steps_per_epoch + 3):
        run_until(config, tmp_path / "parts", stop)
    parts = run_until(config, tmp_path / "parts")
    one, two = state_of(whole), state_of(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert all(torch.equal(v, parts.average.averages[k]) for k, v in whole.average.averages.items())
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    assert {"distillation", "softmax", "accuracy"} <= log_of(tmp_path / "whole")[0].keys()
    assert ("contrast" in log_of(tmp_path / "whole")[0]) == ("contrast" in settings)


@pytest.mark.parametrize("settings", [{}, {"target": "standardized"}, {"target": "dkd"}, {"contrast": 0.5}])
def test_a_step_does_not_wait_for_the_host(settings, teachers, tmp_path):
    """Otherwise it could not be captured on a GPU."""
    mixture = "none" if settings == {"target": "dkd"} or "contrast" in settings else "both"
    settings = {"views": 2, "mixture": mixture} | settings
    check_steps(student_config(teachers, method=settings, views={"normalize": "clip"}), tmp_path)


def test_students_with_a_contrast_share_their_teachers_and_their_views(teachers, tmp_path):
    """Each has a projection and a queue of its own; together they are the runs alone."""
    settings = {"contrast": 0.5, "contrast_queue": 50}
    config = student_config(teachers, method=settings, train={"view_seed": 3, "epochs": 2})
    together = make_trainers(config, tmp_path / "together", (0, 1))
    train_together(together)
    contrasts = [run.method.contrast for run in together]
    assert torch.equal(contrasts[0].queue.keys_KD, contrasts[1].queue.keys_KD)  # of the same views
    assert not torch.equal(contrasts[0].P[0].weight, contrasts[1].P[0].weight)
    for seed, run in enumerate(together):
        (alone,) = make_trainers(config, tmp_path / f"alone{seed}", (seed,))
        train_together([alone])
        assert all(torch.equal(state_of(run)[k], state_of(alone)[k]) for k in state_of(run))


def test_a_student_with_a_contrast_is_stored_without_it(teachers, tmp_path):
    """The run folder has an ordinary network, which can be loaded and can teach."""
    out = tmp_path / "out"
    (folder,) = longtail.distill(teachers, None, out, alone=False, **QUICK, seeds=0, **{"method.contrast": 0.5})
    names = load_file(folder / run_folder.MODEL).keys()
    assert names == load_file(teachers / "seed0" / run_folder.MODEL).keys()
    assert longtail.load(folder).method.contrast is None
    (second,) = longtail.distill(folder, None, tmp_path / "next", alone=False, **QUICK, seeds=0)
    assert (second / run_folder.METRICS).exists()


def test_a_finished_distillation_is_resumed_and_others_are_refused(distilled, teachers, capsys):
    options = ["--model", "resnet8_cifar", "--seeds", "0", "1", "--device", "cpu", "--out", str(distilled)]
    before = (distilled / "student/seed0" / run_folder.MODEL).stat().st_mtime_ns
    assert main(["distill", str(teachers), "--resume", *options]) == 0
    assert (distilled / "student/seed0" / run_folder.MODEL).stat().st_mtime_ns == before
    fails(capsys, ["distill", str(teachers), *options], "exists")
    fails(capsys, ["distill", str(teachers), "--resume", *options, "--temperature", "3"], "mismatch")
    fails(capsys, ["distill", str(teachers / "seed0"), "--resume", *options], "mismatch")


@pytest.mark.parametrize("out", [".", "seed0", "seed0/out"])
def test_students_are_not_written_into_the_folder_of_a_teacher(out, teachers, capsys):
    """Otherwise they would be teachers of the next distillation."""
    before = sorted(teachers.parent.rglob("*"))
    fails(
        capsys,
        ["distill", str(teachers), *"--epochs", "1", "--device", "cpu", "--out", str(teachers / out)],
        "conflict",
    )
    assert sorted(teachers.parent.rglob("*")) == before


def test_a_teacher_cannot_be_named_twice(teachers):
    with raises("invalid-value", teachers):
        DistillationSettings(teachers=(teachers, teachers))


def test_a_changed_teacher_is_refused_on_resume(teachers, tmp_path):
    own = tmp_path / "teacher"
    shutil.copytree(teachers / "seed0", own)
    config = student_config(own)
    write_start_files(run_until(config, tmp_path / "out/seed0", 4))
    path = own / run_folder.MODEL
    weights = path.read_bytes()
    path.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with raises("mismatch", own):
        train(config, tmp_path / "out", resume=True, data=load_once(config.data))
    with raises("mismatch"):  # the command takes the checksums anew
        train(student_config(own), tmp_path / "out", resume=True, data=load_once(config.data))
    path.write_bytes(weights)
    assert run_until(config, tmp_path / "out/seed0").is_stage_done()


def test_teachers_may_be_moved(teachers, tmp_path):
    shutil.copytree(teachers, tmp_path / "teachers")
    one, other = student_config(teachers), student_config(tmp_path / "teachers")
    assert one != other and one.identity() == other.identity()


@pytest.mark.parametrize("mixture", ["none", "both"])
def test_students_in_parallel_share_their_teachers_and_are_the_runs_alone(mixture, teachers, tmp_path):
    config = student_config(teachers, method={"mixture": mixture, "views": 2}, train={"ema": 0.9})
    made = make_trainers(config, tmp_path / "together", (0, 1))
    assert made[0].method.teachers is made[1].method.teachers and len(made[0].method.teachers) == 2
    train_together(made)
    alone = run_until(config, tmp_path / "alone")
    one, two = state_of(made[0]), state_of(alone)
    assert all(torch.equal(one[k], two[k]) for k in one) and log_of(made[0].folder) == log_of(tmp_path / "alone")
    assert all(torch.equal(v, alone.average.averages[k]) for k, v in made[0].average.averages.items())
    assert not torch.equal(state_of(made[1])["net.head.weight"], one["net.head.weight"])


def test_students_with_the_same_views_share_the_outputs_of_their_teachers(teachers, tmp_path, monkeypatch):
    """Each is the run that it would be alone."""
    method = {"mixture": "both", "views": 2}
    config = student_config(teachers, method=method, train={"view_seed": 5, "accumulate": 2, "epochs": 2})
    passes, teach = [], Distillation.teach
    monkeypatch.setattr(Distillation, "teach", lambda self, x: passes.append(len(x)) or teach(self, x))
    made = make_trainers(config, tmp_path / "together", (0, 1))
    train_together(made)
    assert len(passes) == 2 * made[0].total_steps()
    for seed, run in enumerate(made):
        (alone,) = make_trainers(config, tmp_path / f"alone{seed}", (seed,))
        train_together([alone])
        one, two = state_of(run), state_of(alone)
        assert all(torch.equal(one[k], two[k]) for k in one) and log_of(run.folder) == log_of(alone.folder)
    one, two = (state_of(run) for run in made)
    assert not torch.equal(one["net.head.weight"], two["net.head.weight"])


def test_teachers_in_low_precision_have_converted_weights_and_the_same_logits(teachers):
    config = student_config(teachers / "seed0", train={"precision": "bf16"})
    data = load_once(config.data)
    (teacher,) = load_teachers(config, data, CPU)
    convolutions = [m for m in teacher.modules() if isinstance(m, torch.nn.Conv2d)]
    assert convolutions and all(m.weight.dtype == torch.bfloat16 for m in convolutions)
    norms = [m for m in teacher.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert all(m.weight.dtype == torch.float32 for m in (*norms, teacher.method.net.head))
    x = Views(config.views, 8).plain(torch.from_numpy(data.test.images[:50]).permute(0, 3, 1, 2))
    with torch.no_grad():
        found = teacher(x)
        teacher.method.net.trunk.body.float()  # which is converted in each call, to the same values
        assert torch.equal(found, teacher(x))


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_teachers_teach_what_eager_ones_do(teachers, tmp_path):
    rows = []
    for execution in ("eager", "compiled"):
        config = student_config(teachers, train={"execution": execution, "epochs": 2}, optim={"lr": 0.01})
        rows.append(log_of(run_until(config, tmp_path / execution).folder))
    for name in ("loss", "distillation"):
        one, two = ([row[name] for row in each] for each in rows)
        assert one == pytest.approx(two, rel=1e-3) and one != two


# Teachers that cannot teach


def check_refused(config: Config, folder: Path, *values: object) -> None:
    with raises("mismatch", *values):
        train(config, folder, data=load_once(config.data))


def test_other_images_are_refused(teachers, tmp_path):
    check_refused(student_config(teachers, data={"imbalance": 10.0}), tmp_path, teachers / "seed0")


def test_other_classes_are_refused(teachers, tmp_path):
    shutil.copytree(teachers / "seed0", tmp_path / "teacher")
    path = tmp_path / "teacher" / run_folder.METRICS
    metrics = json.loads(path.read_text())
    metrics["class_names"][:2] = metrics["class_names"][1::-1]  # another order
    path.write_text(json.dumps(metrics))
    check_refused(student_config(tmp_path / "teacher"), tmp_path / "out", tmp_path / "teacher")


def test_validation_images_that_the_teacher_has_seen_are_refused(teachers, tmp_path):
    check_refused(student_config(teachers, data={"val_fraction": 0.1}), tmp_path)


def test_a_teacher_may_have_smaller_images_but_not_larger_ones(teachers, tmp_path):
    large = train_teacher(tmp_path / "large", data={"image_size": 16})
    check_refused(student_config(large, data={"image_size": 8}), tmp_path / "small", 16)
    config = student_config(teachers, data={"image_size": 16}, train={"epochs": 1})
    assert run_until(config, tmp_path / "out").is_stage_done()


def test_another_normalization_is_converted(teachers, tmp_path):
    """The teacher sees a view as in its own run, although the student normalizes it differently."""
    config = student_config(teachers / "seed0", views={"normalize": "clip"})
    data = load_once(config.data)
    (teacher,) = load_teachers(config, data, CPU)
    x = torch.from_numpy(data.test.images).permute(0, 3, 1, 2)
    with torch.no_grad():
        a_MC = teacher(Views(config.views, 8).plain(x))
    wanted = np.load(teachers / "seed0/predictions.npz")["logits"] + np.log(data.train.counts / data.train.counts.sum())
    torch.testing.assert_close(a_MC.softmax(1), torch.from_numpy(wanted).softmax(1).float(), rtol=1e-3, atol=1e-5)


def test_loading_teachers_does_not_change_the_student(teachers, tmp_path):
    """A student without weight for its teachers is the network alone, bit for bit."""
    config = student_config(teachers, method={"weight": 0.0}, train={"epochs": 1})
    alone = replace(config, method=BalancedSoftmaxSettings())
    one, other = (run_until(c, tmp_path / n).method.net.state_dict() for c, n in ((config, "a"), (alone, "b")))
    assert all(torch.allclose(v, other[k], rtol=1e-5, atol=1e-6) for k, v in one.items())


# Teachers from other people


@pytest.fixture
def copied(teachers, tmp_path) -> Path:
    """A run folder that a test may change."""
    shutil.copytree(teachers / "seed0", tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_file_larger_than_the_network_is_not_hashed(copied, tmp_path, monkeypatch):
    config = student_config(copied)
    with open(copied / run_folder.MODEL, "r+b") as file:
        file.truncate(2**40)  # without content
    monkeypatch.setattr(run_folder, "hash_network", lambda run: pytest.fail("a terabyte would be hashed"))
    with raises("unsafe-file", copied):
        make_base(read_teachers([copied]))
    with raises("unsafe-file", copied):
        load_teachers(config, load_once(config.data), CPU)


def test_a_teacher_whose_logits_are_not_finite_is_refused(copied, tmp_path, capsys):
    weights = load_file(copied / run_folder.MODEL)
    weights["head.bias"][0] = float("nan")
    save_file(weights, copied / run_folder.MODEL)
    fails(capsys, ["distill", str(copied), "--out", str(tmp_path / "out")], "damaged-file", copied)
    assert not (tmp_path / "out").exists()


def test_nothing_is_downloaded_into_a_folder_that_a_teacher_names(copied, tmp_path):
    path = copied / run_folder.CONFIG
    tree = json.loads(path.read_text())
    for root, expected in ((str(tmp_path), False), (None, True)):
        tree["data"] |= {"name": "cifar10", "root": root, "download": True}
        path.write_text(json.dumps(tree))
        assert make_base(read_teachers([copied])).data.download is expected


def test_stored_logits_belong_to_the_settings_of_the_teacher(tmp_path):
    """The classifier of causal-norm has settings that are neither weights nor shown by its layers."""
    teacher, hashes = train_teacher(tmp_path / "teacher", "causal-norm"), set()
    path = teacher / "seed0" / run_folder.CONFIG
    tree = json.loads(path.read_text())
    for removal in (1.0, 1.5):
        tree["method"]["removal"] = removal
        path.write_text(json.dumps(tree))
        config = student_config(teacher)
        hashes |= {hash_weights(network) for network in load_teachers(config, load_once(config.data), CPU)}
    assert len(hashes) == 2


def test_names_of_teachers_are_not_interpreted_by_the_terminal(copied, tmp_path, capsys, monkeypatch):
    hostile = copied.rename(tmp_path / "x\x1b[31m\x07")
    monkeypatch.chdir(tmp_path)
    options = "--no-alone --epochs 1 --batch-size 32 --log.progress none --device cpu"
    assert main(["distill", str(hostile), *options.split()]) == 0
    shown = capsys.readouterr()
    assert not {"\x1b", "\x07"} & {*shown.out, *shown.err} and "\\x1b[31m" in shown.out
    assert list(tmp_path.glob("runs/*/report.html"))


def test_a_teacher_that_cannot_be_shown_does_not_cost_the_report(copied, tmp_path, capsys, monkeypatch):
    def fail_for_teachers(dataset):
        if any(run.folder == copied for row in dataset.rows for run in row.runs):
            raise ZeroDivisionError("of the teacher")
        return []

    monkeypatch.setattr("longtail.reporting.page.method_details", fail_for_teachers)
    options = f"--no-alone --epochs 1 --batch-size 32 --log.progress none --device cpu --out {tmp_path / 'out'}"
    assert main(["distill", str(copied), *options.split()]) == 0
    assert str(copied) in capsys.readouterr().err and (tmp_path / "out/report.html").exists()


def test_wrong_arguments(teachers, tmp_path, capsys):
    fails(capsys, ["distill"], "invalid-value")
    fails(capsys, ["distill", "--model", "resnet18"], "invalid-value")
    fails(capsys, ["distill", str(tmp_path / "nothing")], "missing-file", "nothing")
    (tmp_path / "empty").mkdir()
    fails(capsys, ["distill", str(tmp_path / "empty")], "missing-file")
    fails(capsys, ["distill", str(teachers), "--weight", "2"], "invalid-value", "weight")
    fails(capsys, ["distill", str(teachers), "--target", "dkd", "--mixture", "mixup"], "conflict")
    with raises("conflict"):
        longtail.distill(teachers, method="paco")
    with raises("unknown-name", "resnet99"):
        longtail.distill(teachers, "resnet99", tmp_path / "out", **QUICK)


# Folders, images in memory, and stored features


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Return a folder of images of three classes with different colors."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, sizes in (("train", (12, 6, 4)), ("test", (4, 4, 4))):
        for c, n in enumerate(sizes):
            (root / part / f"class{c}").mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 100, (20 + c, 24, 3)).astype(np.uint8)
                pixels[..., c] += 120
                Image.fromarray(pixels).save(root / part / f"class{c}" / f"{i}.png")
    return root


@pytest.mark.parametrize("load", ["resident", "stream"])
def test_folders(load, photos, tmp_path):
    settings = QUICK | {"model": "resnet8_cifar", "image_size": 16, "batch_size": 8, "data.load": load}
    longtail.train(photos, tmp_path / "teacher", method="paco", **settings)
    values = QUICK | {"batch_size": 8, "mixture": "both", "views": 2}
    (folder,) = longtail.distill(tmp_path / "teacher", "resnet20_cifar", tmp_path / "out", **values)
    config = run_folder.load_config(folder)
    assert (config.data.root, config.data.image_size, config.data.load) == (photos, 16, load)
    assert (tmp_path / "out/alone/seed0/metrics.json").exists() and (tmp_path / "out/report.html").exists()
    assert longtail.load(folder)(photos / "test/class0/0.png").name in ("class0", "class1", "class2")


def test_images_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (30, 16, 16, 3), dtype=np.uint8), np.repeat(["a", "b", "c"], [15, 10, 5])
    settings = QUICK | {"model": "resnet8_cifar", "image_size": 16, "batch_size": 8}
    longtail.train((images, labels), tmp_path / "teacher", method="ce", **settings)
    values = QUICK | {"batch_size": 8}
    (folder,) = longtail.distill(
        tmp_path / "teacher", "resnet20_cifar", tmp_path / "out", data=(images, labels), alone=False, **values
    )
    assert run_folder.read(folder).metrics["class_names"] == ["a", "b", "c"]


def test_a_head_on_stored_features_is_taught_by_stored_logits(teachers, tmp_path):
    """They are those of the teachers for the same views, which have their number as the index."""
    config = student_config(teachers, method={"views": 2}, **FROZEN)
    data = load_once(config.data)
    stored_VNC = stored_teacher_logits(config, data, CPU, 2)
    x = torch.from_numpy(data.train.images).permute(0, 3, 1, 2)
    with torch.no_grad():
        a_KNC = torch.stack([teacher(Views(config.views, 8).plain(x)) for teacher in load_teachers(config, data, CPU)])
    torch.testing.assert_close(stored_VNC[0], log_mean_softmax(a_KNC), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(stored_VNC[1], stored_VNC[0]) and not torch.allclose(stored_VNC[1], stored_VNC[2])
    (folder,) = train(config, tmp_path / "a", data=data)
    (again,) = train(config, tmp_path / "b", data=data)
    one, other = (load_file(f / run_folder.MODEL) for f in (folder, again))
    assert all(torch.equal(v, other[k]) for k, v in one.items())
    assert log_of(folder)[0]["distillation"] > log_of(folder)[-1]["distillation"]


def test_stored_logits_belong_to_stored_views(teachers, tmp_path, monkeypatch):
    """A teacher with the frozen backbone of the student sees the features of the student: its logits are linear in them."""
    teacher = train_teacher(tmp_path / "teacher", **FROZEN)
    config = student_config(teacher, **FROZEN)
    data = load_once(config.data)
    from longtail.engine.head_runs import Backbones

    heads = HeadTrainer(config, Backbones().find(config, data, CPU))
    head = longtail.load(teacher).method.net.head
    log_prior = torch.from_numpy(np.log(data.train.counts / data.train.counts.sum())).float()
    with torch.no_grad():
        wanted = (head(heads.features.train_VNF) + log_prior).log_softmax(2)
    torch.testing.assert_close(heads.teacher_VNC, wanted, rtol=1e-3, atol=1e-3)


def test_a_teacher_on_stored_features_teaches_a_whole_network(tmp_path):
    teacher = train_teacher(tmp_path / "teacher", **FROZEN)
    config = student_config(teacher, model={"trainable": "all"}, data={"cached_views": 0}, train={"epochs": 1})
    trainer = run_until(config, tmp_path / "out")
    assert trainer.is_stage_done() and log_of(tmp_path / "out")[0]["distillation"] > 0


def test_stored_features_have_no_mixtures_and_no_folds(teachers, tmp_path):
    conflicts = (
        {"method": {"mixture": "mixup"}},
        {"method": {"contrast": 0.5}},
        {"data": {"cached_views": 2, "folds": 3}},
    )
    for changes in conflicts:
        config = student_config(teachers, **FROZEN | changes)
        with raises("conflict"):
            train(config, tmp_path, data=load_once(config.data))


def test_a_student_is_trained_again_from_its_folder(teachers, tmp_path):
    """`longtail train --from` knows the teachers, and estimates the time with them."""
    (folder,) = longtail.distill(teachers, None, tmp_path / "out", alone=False, **QUICK, seeds=0)
    (again,) = longtail.train(from_run=folder, out=tmp_path / "again")
    one, other = (load_file(f / run_folder.MODEL) for f in (folder, again))
    assert all(torch.equal(v, other[k]) for k, v in one.items())
