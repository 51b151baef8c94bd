"""Recipes of the large data sets: settings, published figures, errors, and training on a miniature of ImageNet-LT."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from longtail import methods, recipes
from longtail.cli import main
from longtail.config import Config, from_dict, to_dict
from longtail.data.inspection import inspect
from longtail.engine.optim import learning_rate
from longtail.methods import Batch, Mixed
from longtail.recipes.imagenet_scale import PublishedRow
from tests.raises import fails, raises

LARGE = {name: recipe for name, recipe in recipes.RECIPES.items() if recipe.rows}
ROWS = [(name, row) for name, recipe in LARGE.items() for row in recipe.rows]


def made(name: str, row: PublishedRow) -> Config:
    return recipes.make(name, **{choice: value or None for choice, value in row._asdict().items()})


# What is published


def test_all_four_are_there():
    assert list(LARGE) == ["imagenet-lt", "inat2018", "places-lt", "imagenet"]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_row_is_a_configuration(name, row):
    config, recipe = made(name, row), LARGE[name]
    assert row.network in recipe.networks and row.augment in ("", *recipe.augments)
    assert row.method in recipes.METHODS and row.setting in ("", *recipe.settings)
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config
    assert config.model.name.split(".")[0].replace("_32x4d", "") == row.network and config.data.image_size == 224


@pytest.mark.parametrize(
    ("name", "row", "figures"),
    [
        ("imagenet-lt", PublishedRow("paco", "resnet50", "rand", "released"), (57.0, 65.0, 55.7, 38.2)),
        ("imagenet-lt", PublishedRow("paco", "resnext50", "rand", "released"), (58.2, 67.5, 56.9, 36.7)),
        ("imagenet-lt", PublishedRow("paco", "resnext101", "stacked", "released"), (60.0, 68.2, 58.7, 41.0)),
        ("imagenet-lt", PublishedRow("paco-no-rebalance", "resnet50", "sim", "released"), (51.0, 69.6, 45.8, 16.0)),
        ("imagenet-lt", PublishedRow("ride-3", "resnext50", "rand", "equal"), (57.8, 71.8, 53.9, 32.0)),
        ("inat2018", PublishedRow("paco", "resnet152", "rand", "released"), (75.2, 75.0, 75.5, 74.7)),
        ("inat2018", PublishedRow("balanced-softmax", "resnet50", "plain", "equal"), (71.7, 72.5, 72.3, 71.4)),
        ("places-lt", PublishedRow("paco", "resnet152", "rand", "released"), (41.2, 36.1, 47.9, 35.3)),
        ("imagenet", PublishedRow("paco-no-rebalance", "resnet200", "stacked", "released"), (81.8, None, None, None)),
        ("imagenet", PublishedRow("ce-supcon", "resnet50", "rand", "equal"), (78.1, None, None, None)),
    ],
)
def test_figures_are_the_paper_s(name, row, figures):
    assert LARGE[name].rows[row] == figures


def test_an_all_classes_figure_lies_between_its_groups():
    for recipe in LARGE.values():
        for row, printed in recipe.rows.items():
            if printed.many is not None:
                groups = (printed.many, printed.medium, printed.few)
                assert min(groups) < printed.top1 < max(groups), row


# PaCo's settings


@pytest.mark.parametrize(
    ("config", "epochs", "batch", "lr", "decay", "warmup", "query"),
    [
        (recipes.imagenet_lt(), 400, 128, 0.02, 5e-4, 10, "rand"),
        (recipes.imagenet_lt(network="resnext50"), 400, 128, 0.02, 5e-4, 10, "rand"),
        (recipes.imagenet_lt(network="resnext101"), 400, 128, 0.03, 5e-4, 10, "stacked-rand"),
        (recipes.imagenet_lt(network="resnext101", setting="equal"), 400, 128, 0.02, 5e-4, 10, "rand"),
        (recipes.imagenet_lt(network="resnext101", setting="paper"), 400, 128, 0.02, 5e-4, 0, "rand"),
        (recipes.inat2018(), 400, 128, 0.02, 1e-4, 10, "rand"),
        (recipes.inat2018(network="resnet152", augment="sim"), 400, 128, 0.02, 1e-4, 10, "sim"),
        (recipes.inat2018(setting="paper"), 400, 128, 0.02, 5e-4, 0, "rand"),
        (recipes.places_lt(), 30, 128, 0.02, 5e-4, 5, "sim"),
        (recipes.places_lt(augment="rand"), 30, 128, 0.02, 5e-4, 5, "rand"),
        (recipes.imagenet(), 400, 256, 0.04, 1e-4, 10, "rand"),
        (recipes.imagenet(network="resnet200"), 400, 256, 0.04, 1e-4, 10, "stacked-rand"),
        (recipes.imagenet(setting="paper", augment="sim"), 400, 128, 0.02, 5e-4, 0, "sim"),
    ],
)
def test_paco_has_its_settings(config, epochs, batch, lr, decay, warmup, query):
    m, o = config.method, config.optim
    assert (m.tau, m.alpha, m.queue, m.projection_dim, m.momentum) == (0.2, 0.05, 8192, 128, 0.999)
    assert (config.train.epochs, config.train.batch_size, o.lr, o.weight_decay) == (epochs, batch, lr, decay)
    assert (o.schedule, o.momentum, o.nesterov, o.warmup_epochs) == ("cosine", 0.9, False, warmup)
    assert (config.model.norm, config.model.ghost) == ("ghost", 32)
    assert (config.views.query.policy, config.views.key.policy) == (query, "sim")
    for view in (config.views.query, config.views.key):
        assert (view.crop, view.crop_scale, view.flip, view.jitter, view.cutout) == (
            "resized",
            (0.08, 1.0),
            True,
            0.4,
            0,
        )
    operations = {"rand": (2, 10.0, 0.5), "stacked-rand": (3, 10.0, 0.0 if config.data.name == "folder" else 0.5)}
    drawn = (config.views.query.rand_ops, config.views.query.rand_magnitude, config.views.query.rand_std)
    assert drawn == operations.get(query, drawn)


def test_the_rate_of_released_paco():
    """The rate is lr (e+1)/10 in epochs 0 to 9, then a cosine, which differs from released code by less than 0.1 %."""
    optim = recipes.imagenet_lt().optim
    rates = [learning_rate(optim, 900 * epoch, 900, 400) for epoch in range(400)]
    assert rates[:11] == pytest.approx([0.002 * (e + 1) for e in range(10)] + [0.02])
    released = [0.01 * (1 + np.cos(np.pi * (e - 9) / 391)) for e in range(10, 400)]
    assert rates[10:] == pytest.approx(released, abs=1e-4)


def test_the_text_s_centers():
    for name in LARGE:
        text, code = (recipes.make(name, setting=setting) for setting in ("paper", "released"))
        assert (text.method.center_tau, text.method.projection_norm, text.model.bias) == (0.2, False, False)
        assert (code.method.center_tau, code.method.projection_norm, code.model.bias) == (1.0, True, True)


def test_places_starts_from_torchvision_s_weights():
    for setting, learns in (("released", "last-block"), ("paper", "all")):
        model = recipes.places_lt(setting=setting).model
        assert (model.name, model.pretrained, model.trainable) == ("resnet152.tv_in1k", True, learns)
    assert not recipes.imagenet_lt().model.pretrained


def test_balanced_data_have_no_rebalance_and_others_have():
    assert not recipes.imagenet().method.rebalance and recipes.imagenet_lt().method.rebalance
    assert recipes.imagenet("ce-supcon").method.weight == 0.05
    assert recipes.inat2018().views.normalize == "inaturalist" and recipes.imagenet_lt().views.normalize == "imagenet"


@pytest.mark.parametrize("name", LARGE)
def test_equal_is_one_budget(name):
    configs = [recipes.make(name, method=m, setting="equal") for m in recipes.METHODS]
    assert len({(c.optim, c.train, c.views, c.model) for c in configs}) == 1
    held_out = {c.method.name for c in configs if c.data != configs[0].data}
    assert held_out == {e.settings_class.name for e in recipes.METHODS.values() if e.data} >= {"tau-norm"}
    assert recipes.equal_budget(name, "ce").recipe == f"{name}/equal"


# Others' settings


@pytest.mark.parametrize(
    ("name", "method", "epochs", "batch", "lr", "decay"),
    [
        ("imagenet-lt", "ce", 90, 512, 0.2, 5e-4),
        ("imagenet-lt", "tau-norm", 90, 512, 0.2, 5e-4),
        ("imagenet-lt", "causal-norm", 90, 512, 0.2, 5e-4),
        ("imagenet-lt", "reslt", 180, 256, 0.1, 5e-4),
        ("imagenet-lt", "mislas", 180, 256, 0.1, 5e-4),
        ("imagenet-lt", "ride-3", 100, 256, 0.1, 2e-4),
        ("inat2018", "lws", 200, 512, 0.2, 1e-4),
        ("inat2018", "bbn", 180, 128, 0.05, 1e-4),
        ("inat2018", "mislas", 200, 256, 0.1, 1e-4),
        ("inat2018", "ride-2", 100, 512, 0.2, 2e-4),
        ("places-lt", "mislas", 90, 256, 0.1, 5e-4),
        ("imagenet-lt", "balanced-softmax", 400, 128, 0.02, 5e-4),  # no code of its own: PaCo's frame
    ],
)
def test_authors_settings(name, method, epochs, batch, lr, decay):
    config = recipes.make(name, method=method)
    assert (config.train.epochs, config.train.batch_size) == (epochs, batch)
    assert (config.optim.lr, config.optim.weight_decay) == (lr, decay)
    own = method != "balanced-softmax"
    assert (config.model.norm, config.views.query.policy) == (("batch", "none") if own else ("ghost", "rand"))


def test_second_stages_and_values_of_other_authors():
    crt, lws = recipes.imagenet_lt("crt").method, recipes.inat2018("lws").method
    assert (crt.linear_epochs, crt.linear_lr, crt.linear_decay) == (10, 0.2, 5e-4)
    assert (lws.linear_epochs, lws.linear_lr, lws.linear_decay) == (5, 0.2, 1e-4)
    assert recipes.inat2018("crt").method.linear_epochs == 30
    assert recipes.imagenet_lt("causal-norm").method.removal == 3.0
    reslt = recipes.imagenet_lt("reslt").method
    assert (reslt.weight, reslt.medium, reslt.few) == (0.99, 0.825, 0.22)
    smooth = [
        (m.mixup, m.smooth_head, m.smooth_tail, m.classifier_lr)
        for m in (recipes.inat2018("mislas").method, recipes.places_lt("mislas").method)
    ]
    assert smooth == [(0.2, 0.3, 0.0, 0.05), (0.2, 0.4, 0.1, 0.05)]
    ride = recipes.imagenet_lt("ride-2").method
    assert (ride.experts, ride.diversity, ride.drw_from, ride.router_lr) == (2, 0.2, 0.8, 0.005)
    assert recipes.imagenet_lt("supcon").method.linear_epochs == 400
    assert recipes.inat2018("bbn", augment="plain").views.query.jitter == 0
    bbn = recipes.inat2018("bbn").optim
    assert [round(180 * m) for m in bbn.milestones] == [119, 159] and bbn.gamma == 0.1


# What is refused


@pytest.mark.parametrize(
    ("args", "kind", "values"),
    [
        (["imagenet-lt", "--network", "resnet152"], "unknown-name", ["'resnet152'", "resnext101", "--model.name"]),
        (["places-lt", "--network", "resnet50"], "unknown-name", ["'resnet50'", "resnet152"]),
        (["imagenet", "--augment", "strong"], "unknown-name", ["'strong'", "rand-rand", "stacked"]),
        (["inat2018", "--setting", "code"], "unknown-name", ["'code'", "released", "paper", "equal"]),
        (["imagenet-lt", "--method", "pacco"], "unknown-name", ["'pacco'", "'paco'"]),
        (["cifar100-lt", "--network", "resnet50"], "unsupported", ["cifar100-lt", "--network", "--model.name"]),
        (["digits-lt", "--augment", "rand"], "unsupported", ["digits-lt", "--augment", "--views.query"]),
        (["imagenet-lt"], "invalid-value", ["--data.root"]),
        (["imagenet"], "invalid-value", ["--data.root"]),
        (["imagenet-lt", "--data.root", "."], "missing-file", ["ImageNet_LT_train.txt", "--data.train_list"]),
        (["places-lt", "--data.root", "."], "missing-file", ["Places_LT_train.txt"]),
        (["inat2018", "--data.root", "."], "missing-file", ["iNaturalist18_train.txt", "train2018.json"]),
    ],
)
def test_wrong_choices_are_one_line(args, kind, values, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(capsys, ["train", *args, "--train.device", "cpu"], kind, *values)
    assert not list(tmp_path.iterdir())


def test_an_unknown_recipe_is_not_described():
    with raises("unknown-name", "'imagenet-lt'"):
        recipes.make("imagenetlt")
    assert main(["recipes", "imagenetlt"]) == 2


# Networks


@pytest.mark.parametrize(
    ("network", "count"),
    [
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("resnet200", 64_673_832),
        ("resnext50", 25_028_904),
        ("resnext101", 44_177_704),
    ],
)
def test_networks_are_the_published_ones(network, count):
    """Parameters with 1,000 classes are those of He et al. and Xie et al.; torchvision has the same numbers."""
    with torch.device("meta"):
        net = timm.create_model(recipes.imagenet_scale.NETWORKS[network], num_classes=1000)
        assert net(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert sum(p.numel() for p in net.parameters()) == count


def stepped(config: Config) -> methods.Method:
    """Return a method after one step of the first stage on small images."""
    torch.manual_seed(0)
    method = methods.make(replace(config, data=replace(config.data, image_size=32)), np.array([8, 4, 2]))
    method.set_stage(method.stages[0])
    method.train()
    x, y = torch.randn(2, 4, 3, 32, 32), torch.tensor([0, 0, 1, 2])
    stage = method.stage
    batch = Batch(
        x[0],
        x[1] if stage.two_views else None,
        y,
        Mixed(y, torch.tensor(0.5)) if stage.mixup else None,
        Batch(x[1], None, y) if stage.partner else None,
        extra=tuple(x[1] for _ in stage.extra_views),
    )
    loss = method.loss(batch)["loss"]
    loss.backward()
    assert loss.isfinite()
    return method


@pytest.mark.parametrize(("network", "width"), [("resnet50", 1536), ("resnext50", 1536)])
def test_ride_s_experts_stand_on_the_paper_s_networks(network, width):
    method = stepped(recipes.imagenet_lt("ride-2", setting="equal", network=network))
    assert method.heads.weight.shape == (2, 3, width)
    assert all(p.grad is not None for p in method.net.trunk.parameters())
    with torch.no_grad():
        assert method.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    "name", ["paco", "tau-norm", "lws", "mislas", "bbn", "reslt", "oltr", "causal-norm", "supcon", "gpaco"]
)
def test_others_stand_on_them_too(name):
    config = recipes.imagenet_lt(name, setting="equal")
    queue = {"queue": 16} if hasattr(config.method, "queue") else {}
    stepped(replace(config, model=replace(config.model, name="resnet26"), method=replace(config.method, **queue)))


# A miniature of ImageNet-LT


@pytest.fixture
def imagenet_root(tmp_path):
    return write_imagenet(tmp_path)


def write_imagenet(root: Path) -> Path:
    """Write crops of photographs in the published layout: two classes of six and three images, and the lists."""
    rng = np.random.default_rng(0)
    for split, counts in (("train", (6, 3)), ("val", (2, 2))):
        lines = []
        for label, (wnid, n) in enumerate(zip(("n01440764", "n01443537"), counts, strict=True)):
            (root / split / wnid).mkdir(parents=True)
            for i in range(n):
                file = f"{split}/{wnid}/{wnid}_{i}.JPEG"
                noise = rng.integers(0, 255, (40, 52, 3), np.uint8)
                Image.fromarray(noise).save(root / file, "JPEG")
                lines.append(f"{file} {label}\n")
        (root / f"ImageNet_LT_{'train' if split == 'train' else 'test'}.txt").write_text("".join(lines))
    return root


SMALL = ["--data.image_size", "32", "--model.name", "resnet8_cifar", "--model.norm", "batch", "--method.queue", "16"]
FAST = ["--train.epochs", "1", "--train.batch_size", "4", "--train.device", "cpu", "--log.progress", "plain"]


@pytest.mark.parametrize("augment", ["rand", "stacked"])
def test_a_miniature_trains(imagenet_root, augment, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = ["train", "imagenet-lt", "--augment", augment, "--data.root", str(imagenet_root), *SMALL, *FAST]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "115,846 training" in shown and "50,000 evaluation" in shown
    run = tmp_path / f"runs/imagenet-lt-paco-1-{augment}/seed0"
    assert json.loads((run / "metrics.json").read_text())["class_names"] == ["n01440764", "n01443537"]
    config = json.loads((run / "config.json").read_text())
    assert config["views"]["query"]["policy"] == {"rand": "rand", "stacked": "stacked-rand"}[augment]
    assert config["model"]["name"] == "resnet8_cifar" and config["data"]["name"] == "imagenet-lt"


def test_full_imagenet_is_a_folder(imagenet_root):
    """The evaluation set is val/; the lists are ignored."""
    found = [inspect(replace(recipes.make(name).data, root=imagenet_root)) for name in ("imagenet", "imagenet-lt")]
    assert [(f.counts, f.test_counts, f.unreadable) for f in found] == [([6, 3], [2, 2], [])] * 2


def test_rows_are_shown(capsys):
    for name, recipe in LARGE.items():
        assert main(["recipes", name]) == 0
        shown = capsys.readouterr().out
        assert all(f"{printed.top1:.1f}" in shown for printed in recipe.rows.values())


def page_lines(name: str) -> list[str]:
    """Return the expected lines of docs/large.md, one for each method, augmentation and setting."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row, printed in LARGE[name].rows.items():
        lines.setdefault((row.method, row.augment, row.setting), []).append(f"{row.network} {printed.top1:.1f}")
    found = []
    for (method, augment, setting), figures in lines.items():
        network = figures[-1].split()[0]
        train = made(name, PublishedRow(method, network, augment, setting)).train
        length = f"{train.epochs} × {train.batch_size}" if setting else "quoted"
        found.append(f"| `{PublishedRow(method, '', augment, setting).flags()}` | {length} | {', '.join(figures)} |")
    return found


def test_the_page_has_every_row():
    page = (Path(__file__).parents[1] / "docs/large.md").read_text()
    written = [line for line in page.splitlines() if line.startswith("| `--method")]
    assert written == [line for name in LARGE for line in page_lines(name)]
