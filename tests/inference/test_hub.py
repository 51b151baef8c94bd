"""Folders for the Hugging Face hub: timm and longtail load them, and a real client uploads them to a local server."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import ModelCard

import longtail
from longtail.cli import main
from longtail.inference import hub
from longtail.views.ops import normalize, to_float
from tests.inference.made import finished_run, folder_config, photographs
from tests.raises import fails, raises

SIZES = {"resnet18": 32, "test_vit": 96, "test_efficientnet": 64, "test_convnext": 64}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return photographs(tmp_path_factory.mktemp("photographs"), n=(12, 6, 4))


def make_run(folder: Path, photos: Path, network: str, method: str = "ce", size: int = 32, **data) -> Path:
    config = folder_config(photos, method, image_size=size, **data)
    return finished_run(folder / "seed0", replace(config, model=replace(config.model, name=network)))


@pytest.mark.parametrize("network", SIZES)
def test_timm_reproduces_the_logits_of_the_folder(network, photos, tmp_path):
    size = SIZES[network]
    run = make_run(tmp_path / "run", photos, network, "balanced-softmax", size)
    exported = longtail.export(run, "hub", tmp_path / "out")
    assert exported.path == tmp_path / "out" and {path.name for path in exported.path.iterdir()} == {*hub.FILES}
    model = timm.create_model(f"local-dir:{exported.path}", pretrained=True).eval()
    cfg = model.pretrained_cfg
    assert tuple(cfg["input_size"]) == (3, size, size) and cfg["num_classes"] == 3
    assert cfg["label_names"] == ["cat", "dog", "eel"]
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, size, size, 3), np.uint8))
    mean, std = (torch.tensor(cfg[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        logits = model(normalize(to_float(images.permute(0, 3, 1, 2)), mean, std))
    wanted = np.stack([guess.logits for guess in longtail.load(run)(list(images.numpy()))])
    np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("network", "method"), [("resnet18", "ce"), ("resnet18", "ldam-drw"), ("resnet8_cifar", "ce")])
def test_every_folder_loads_with_longtail(network, method, photos, tmp_path, capsys):
    """Cosine classifiers and the CIFAR ResNets are not models of timm."""
    run = make_run(tmp_path / "run", photos, network, method, val_fraction=0.2)
    path = longtail.export(run, "hub", prior={"cat": 1, "dog": 2, "eel": 0}).path
    assert path == run / "export/hub"
    assert ("architecture" in json.loads((path / "config.json").read_text())) == (
        network == "resnet18" and method == "ce"
    )
    original = longtail.load(run, prior={"cat": 1, "dog": 2, "eel": 0})
    loaded = longtail.load(path)
    assert (original.temperature is not None) and loaded.temperature == original.temperature
    photo = next(photos.rglob("*.jpg"))
    np.testing.assert_allclose(loaded(photo).probabilities, original(photo).probabilities, atol=1e-6)
    assert loaded(photo).probabilities[2] == 0
    again = longtail.export(path, "hub", tmp_path / "again").path  # an exported folder can be exported again
    np.testing.assert_allclose(longtail.load(again)(photo).logits, original(photo).logits, atol=1e-5)
    assert main(["predict", str(path), str(photo), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["predictions"][0]
    assert found["probability"] == pytest.approx(original(photo).probability, abs=1e-6)


def test_low_rank_updates_are_merged(photos, tmp_path):
    pytest.importorskip("peft")
    config = folder_config(photos, "ce", image_size=32)
    config = replace(config, model=replace(config.model, name="resnet18", trainable="lora", rank=2))
    run = finished_run(tmp_path / "run/seed0", config)
    path = longtail.export(run, "hub", tmp_path / "out").path
    assert timm.create_model(f"local-dir:{path}", pretrained=True).get_classifier().out_features == 3
    photo = next(photos.rglob("*.jpg"))
    np.testing.assert_allclose(
        longtail.load(path)(photo).logits, longtail.load(run)(photo).logits, rtol=1e-4, atol=1e-4
    )


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), photos, "resnet18")


def test_the_hub_reads_the_metadata_of_the_card(run, tmp_path):
    card = ModelCard.load(longtail.export(run, "hub", tmp_path / "out").card)
    assert card.data.library_name == "timm" and card.data.pipeline_tag == "image-classification"
    assert {"timm", "long-tailed"} <= set(card.data.tags)
    stored = json.loads((run / "metrics.json").read_text())
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["accuracy, all images"] == pytest.approx(stored["top1"] / 100, abs=1e-4) and len(found) == 2
    config = json.loads((run / "config.json").read_text())
    assert {result.dataset_name for result in card.data.eval_results} == {Path(config["data"]["root"]).name}


def test_the_code_of_the_card_uses_timm_alone(run, photos, tmp_path, monkeypatch, capsys):
    exported = longtail.export(run, "hub", tmp_path / "out", prior={"cat": 3, "dog": 1, "eel": 0})
    photo = next(photos.rglob("*.jpg"))
    (tmp_path / "photo.jpg").write_bytes(photo.read_bytes())
    (block,) = re.findall(r"```python\n(.*?)```", exported.card.read_text(), re.S)
    assert "longtail." not in block
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(block, found)
    wanted = longtail.load(exported.path)(photo)
    np.testing.assert_allclose(found["probabilities"][0], wanted.probabilities, atol=1e-3)
    assert capsys.readouterr().out.split()[0] == wanted.name


def test_a_folder_with_other_files_is_not_replaced(run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    fails(capsys, ["export", str(run), "--to", "hub", "-o", str(tmp_path)], "exists", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "link").symlink_to(tmp_path)
    with raises("exists", "link"):
        longtail.export(run, "hub", tmp_path / "link")
    first = longtail.export(run, "hub", tmp_path / "out").path
    (first / "README.md").write_text("old")
    longtail.export(run, "hub", first)
    assert (first / "README.md").read_text() != "old"


@pytest.mark.parametrize("kind", ["no name", "network of others", "folder with the name of a file"])
def test_folders_other_than_earlier_exports_are_not_replaced(run, tmp_path, monkeypatch, kind):
    out = tmp_path / "out"
    (out / "README.md").mkdir(parents=True)
    mine = out / "README.md/mine.txt"
    if kind == "network of others":
        (out / "README.md").rmdir()
        mine = out / "model.safetensors"
        safetensors.torch.save_file({"weight": torch.zeros(2)}, mine)
        (out / "README.md").write_text("a model of others")
    elif kind == "no name":
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        out = Path()
    mine.touch()
    with raises("exists"):
        longtail.export(run, "hub", out)
    assert mine.exists()


def test_a_damaged_folder_is_an_error(run, photos, tmp_path, capsys):
    path = longtail.export(run, "hub", tmp_path / "out").path
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(
        content.replace(b'"timm_classifier\\": \\"fc', b'"timm_classifier\\": \\"xx')
    )
    fails(capsys, ["predict", str(path), str(next(photos.rglob("*.jpg")))], "damaged-file", path)


# Upload

REPO = "someone/birds"


class Hub(BaseHTTPRequestHandler):
    """The requests that the client makes to create a repository and to commit small files to it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: HubServer = self.server  # type: ignore[assignment]
        server.tokens.add(self.headers["Authorization"])
        if server.is_closed:
            return self.answer({"error": "no"}, 403)
        if self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            return self.answer({"url": f"{server.url}/{REPO}", "name": REPO})
        if self.path.startswith(f"/api/models/{REPO}/preupload/"):
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for file in files
            ]
            return self.answer({"files": modes})
        if self.path.startswith(f"/api/models/{REPO}/commit/"):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self.answer({"commitUrl": f"{server.url}/{REPO}/commit/0", "commitOid": "0" * 40})
        return self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": REPO, "sha": "0" * 40, "siblings": []})

    def answer(self, tree: dict, status: int = 200) -> None:
        content = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Do not print requests."""


class HubServer(ThreadingHTTPServer):
    """Start a hub on the loopback interface, which records what is sent to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.is_closed = False


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def export_to(server: HubServer, run: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process, because the client reads its settings when it is imported."""
    args = [sys.executable, "-m", "longtail", "export", str(run), "--to", "hub", "-o", str(out), "--repo", REPO]
    usual = {"HF_ENDPOINT": server.url, "HF_HOME": str(out.parent / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return subprocess.run(args, env=kept | usual | env, capture_output=True, text=True, timeout=120)


def test_the_folder_is_uploaded(run, tmp_path, server):
    done = export_to(server, run, tmp_path / "out", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert f"{server.url}/{REPO}" in done.stdout and "hf_secret" not in done.stdout + done.stderr
    assert server.tokens == {"Bearer hf_secret"} and "private" in str(server.created[0])
    assert server.files == {name: (tmp_path / "out" / name).read_bytes() for name in hub.FILES}


@pytest.mark.parametrize(("env", "code"), [({}, 2), ({"HF_TOKEN": "hf_secret"}, 1)])
def test_the_folder_remains_if_it_cannot_be_uploaded(run, tmp_path, server, env, code):
    """There is no token, or the hub refuses it."""
    server.is_closed = True
    done = export_to(server, run, tmp_path / "out", **env)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*hub.FILES} and not server.files
    assert longtail.load(tmp_path / "out").class_names == ("cat", "dog", "eel")


def test_a_repository_needs_the_format_of_the_hub(run, capsys, tmp_path):
    fails(capsys, ["export", str(run), "--repo", REPO, "-o", str(tmp_path / "x.onnx")], "conflict", "--to hub")
    assert not list(tmp_path.iterdir())
