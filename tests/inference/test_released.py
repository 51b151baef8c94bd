"""Checkpoints in the layout of the released PaCo code: the loaded network computes what the original would."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import nn

import longtail
from longtail import methods
from longtail.errors import UserError
from tests.raises import raises


class Block(nn.Module):
    """A block of the CIFAR ResNet with the names of the released code."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        short = x
        if out.shape != x.shape:
            extra = out.shape[1] - x.shape[1]
            short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra // 2, extra // 2))
        return (out + short).relu()


class Cifar(nn.Module):
    """A CIFAR ResNet with three stages of n blocks."""

    def __init__(self, n: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        for i, width in enumerate((16, 32, 64)):
            ins = max(width // 2, 16) if i else 16
            blocks = [Block(ins if b == 0 else width, width, 2 if i and b == 0 else 1) for b in range(n)]
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(64, out)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))


def checkpoint(path: Path, encoder: nn.Module, width: int, classes: int, arch: str | None, **more) -> nn.Linear:
    """Write a checkpoint with query and key networks, both classifiers and the queue; return the classifier."""
    encoder.fc = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 8))
    linear = nn.Linear(width, classes)
    state = {f"encoder_q.{k}": v for k, v in encoder.state_dict().items()}
    state |= {f"encoder_k.{k}": torch.randn_like(v.float()) for k, v in encoder.state_dict().items()}
    state |= {f"linear.{k}": v for k, v in linear.state_dict().items()}
    state |= {f"linear_k.{k}": torch.zeros_like(v) for k, v in linear.state_dict().items()}
    state |= {"queue": torch.randn(16, 8), "queue_l": torch.zeros(16), "queue_ptr": torch.zeros(1)}
    optimizer = torch.optim.SGD(encoder.parameters(), 0.1, momentum=0.9).state_dict()
    tree = {"epoch": 400, "arch": arch, "optimizer": optimizer, "best_acc": torch.tensor(51.0)}
    torch.save(tree | {"state_dict": {f"module.{k}": v for k, v in state.items()}} | more, path)
    return linear


def shaken(net: nn.Module, images: torch.Tensor) -> nn.Module:
    """Return the network with running averages that are not those of initialization."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    net.train()
    with torch.no_grad():
        net.features(images) if isinstance(net, Cifar) else net(images)
    return net.eval()


def test_the_cifar_network(tmp_path):
    rng = np.random.default_rng(0)
    arrays = rng.integers(0, 256, (5, 32, 32, 3), np.uint8)
    mean, std = torch.tensor([(0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)])[..., None, None]
    x = (torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255 - mean) / std
    net = shaken(Cifar(5, 32), x)
    linear = checkpoint(tmp_path / "moco_ckpt.pth.tar", net, 64, 100, "resnet32")
    model = longtail.load(tmp_path / "moco_ckpt.pth.tar")
    with torch.no_grad():
        wanted = linear(net.features(x))
    np.testing.assert_allclose([p.logits for p in model(arrays)], wanted, rtol=1e-4, atol=1e-4)
    assert model.image_size == 32 and model.counts is None and model.class_names[:2] == ("0", "1")
    assert model.temperature is None and any("not calibrated" in note for note in model.notes())
    assert sum(p.numel() for p in model.method.parameters()) == 470_004


def test_a_torchvision_network_by_its_name_with_class_names(tmp_path):
    """Large images are evaluated on the central 224 of 256 pixels."""
    rng = np.random.default_rng(0)
    photograph = Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).resize((384, 256))
    short = torchvision.transforms.Compose(
        [torchvision.transforms.CenterCrop(224), torchvision.transforms.PILToTensor()]
    )(photograph)
    mean, std = torch.tensor([(0.485, 0.456, 0.406), (0.229, 0.224, 0.225)])[..., None, None]
    x = (short[None] / 255 - mean) / std
    net = shaken(torchvision.models.resnet18(num_classes=8), x)
    linear = checkpoint(tmp_path / "x.pth", net, 512, 12, None)
    with raises("invalid-value", tmp_path / "x.pth", "model='resnet50'"):
        longtail.load(tmp_path / "x.pth")
    names = [f"bird {i}" for i in range(12)]
    model = longtail.load(tmp_path / "x.pth", model="resnet18", class_names=names)
    net.fc = nn.Identity()
    with torch.no_grad():
        wanted = linear(net(x))
    np.testing.assert_allclose(model(photograph).logits, wanted[0], rtol=1e-3, atol=1e-3)
    assert model.class_names == tuple(names) and model.image_size == 224
    with raises("mismatch", "12 classes", "2 class_names"):
        longtail.load(tmp_path / "x.pth", model="resnet18", class_names=["a", "b"])
    with raises("mismatch", "resnet34"):
        longtail.load(tmp_path / "x.pth", model="resnet34")
    assert longtail.load(tmp_path / "x.pth", model="resnet18", prior="uniform").prior.name == "uniform"


class Hostile:
    def __reduce__(self):
        return os.system, ("touch broken",)


def test_no_code_is_executed_and_other_files_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hostile.pth.tar").write_bytes(pickle.dumps({"state_dict": Hostile()}, protocol=2))
    torch.save({"state_dict": {}, "extra": Hostile()}, "hostile.pth")
    torch.save({"state_dict": {"x": torch.zeros(1)}}, "other.pth")
    torch.save([1, 2], "list.pth")
    Path("text.pth").write_text("hello")
    for name, *values in (
        ("hostile.pth.tar",),
        ("hostile.pth",),
        ("text.pth",),
        ("other.pth", "encoder_q"),
        ("list.pth", "state_dict"),
    ):
        with raises("damaged-file", name, *values):
            longtail.load(name)
    assert not Path("broken").exists()


LAYER = "encoder_q.layer1.0.conv1.weight"
ODD_STATES = {
    "numbers as names": {0: torch.ones(3), 2**40: torch.ones(3)},
    "classifier alone": {"linear.weight": torch.ones(3, 64)},
    "no dimension": {LAYER: torch.ones(1), "linear.weight": torch.ones(())},
    "one dimension": {LAYER: torch.ones(1), "linear.weight": torch.ones(3)},
    "no class": {LAYER: torch.ones(1), "linear.weight": torch.ones(0, 64)},
    "no tensors": {LAYER: "x", "linear.weight": [1, 2]},
    "complex": {LAYER: torch.ones(1), "linear.weight": torch.ones(3, 64, dtype=torch.complex64)},
    "integers": {LAYER: torch.ones(1), "linear.weight": torch.ones(3, 64, dtype=torch.int64)},
    "expanded": {LAYER: torch.ones(1), "linear.weight": torch.ones(1, 64).expand(10_000, 64), "x": torch.ones(10**6)},
    "narrow": {LAYER: torch.ones(1), "linear.weight": torch.ones(1000, 1)},
}


@pytest.mark.parametrize("name", ODD_STATES)
def test_unusual_state_dicts_are_refused(tmp_path, name, monkeypatch):
    """The network is not created before the width of the stored classifier was checked."""
    made, make = [], methods.make
    monkeypatch.setattr(
        methods, "make", lambda config, counts, **options: made.append(len(counts)) or make(config, counts, **options)
    )
    for tree in (
        {"arch": "resnet20", "state_dict": ODD_STATES[name]},
        {"arch": "resnet20", **{str(k): v for k, v in ODD_STATES[name].items()}},
    ):
        torch.save(tree, tmp_path / "x.pth")
        with pytest.raises(UserError):
            longtail.load(tmp_path / "x.pth", "cpu")
    assert max(made, default=0) <= 3


@pytest.mark.parametrize(
    "arch", [None, 3, ["resnet20"], "no such network", "hf-hub:somebody/something", "local-dir:/tmp", "resnet20\0"]
)
def test_odd_names_of_networks_are_refused(tmp_path, arch):
    torch.save(
        {"arch": arch, "state_dict": ODD_STATES["narrow"] | {"linear.weight": torch.ones(3, 64)}}, tmp_path / "x.pth"
    )
    with pytest.raises(UserError):
        longtail.load(tmp_path / "x.pth", "cpu")
