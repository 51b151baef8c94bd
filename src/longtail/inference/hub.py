"""Export of a network as a folder in the layout of the Hugging Face hub, and its upload.

The folder has the weights (model.safetensors), their description (config.json) and a model card (README.md). A timm model with
a linear classifier is stored with timm's names of weights, so that timm loads it; `longtail.load` loads all of them.
"""

import json
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from safetensors.torch import save
from torch import nn

from longtail import run_folder
from longtail.errors import RunError, UserError, error_text
from longtail.inference.formats import ExportModule, Runner, eager, safetensors_weights
from longtail.inference.loading import (
    METADATA_KEY,
    TIMM_CLASSIFIER,
    is_exported_folder,
    load_exported,
    rename_to_timm,
)
from longtail.inference.model import Model
from longtail.metrics import SHOT_GROUPS
from longtail.models.backbones import image_size_options
from longtail.reporting.result_rows import dataset_name
from longtail.views.view import STATISTICS

CONFIG, CARD = "config.json", "README.md"
FILES = (run_folder.MODEL, CONFIG, CARD)
"""The files of an exported folder."""


def make_timm_model(network: ExportModule, name: str, image_size: int) -> tuple[nn.Module, str] | None:
    """Return the network as a model of timm, with the name of its classifier; None if timm has no such model.

    Args:
        network: The network, prepared for export.
        name: Name of the backbone.
        image_size: Height and width of the images in pixels.
    """
    head = network.network.net.head
    if not timm.is_model(name) or not timm.model_entrypoint(name).__module__.startswith("timm."):
        return None
    if type(head) is not nn.Linear:
        return None
    options: Any = image_size_options(name, image_size)
    model: Any = timm.create_model(name, num_classes=head.out_features, **options).eval()
    classifier = model.get_classifier()
    where = next((key for key, module in model.named_modules() if module is classifier), "")
    weights = network.network.net.state_dict()
    shapes = {rename_to_timm(key, where): value.shape for key, value in weights.items()}
    if shapes != {key: value.shape for key, value in model.state_dict().items()}:
        return None
    model.load_state_dict({rename_to_timm(key, where): value for key, value in weights.items()})
    return model, where


def write_hub(network: ExportModule, facts: dict[str, Any], path: Path) -> None:
    """Write the weights and their description into a folder. The model card is added later, because it has measurements."""
    size, timm_model = network.size, make_timm_model(network, facts["network"], network.size)
    tree: dict[str, Any] = {"library_name": "longtail"}
    weights = safetensors_weights(network)
    if timm_model:
        model, where = timm_model
        facts = facts | {TIMM_CLASSIFIER: where}
        weights = {rename_to_timm(key, where): value for key, value in weights.items()}
        tree = describe_for_timm(model, where, facts, size)
    shift = network.shift_C.clamp(min=torch.finfo(torch.float32).min).tolist()  # -inf is not valid in JSON
    tree["longtail"] = {
        key: facts[key] for key in ("longtail", "method", "class_names", "temperature", "logits_stand_for")
    }
    tree["longtail"] |= {"preprocessing": facts["preprocessing"], "logit_shift": shift}
    (path / run_folder.MODEL).write_bytes(save(weights, metadata={METADATA_KEY: json.dumps(facts)}))
    (path / CONFIG).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def describe_for_timm(model: Any, classifier: str, facts: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the entries of config.json that timm reads.

    Args:
        model: The model.
        classifier: The name of its classifier.
        facts: The description of the network.
        size: Height and width of the images in pixels.
    """
    mean, std = STATISTICS[facts["config"]["views"]["normalize"]]
    options = image_size_options(facts["network"], size)
    tree = {
        "architecture": facts["network"].split(".")[0],
        "num_classes": len(facts["class_names"]),
        "num_features": model.num_features,
        "label_names": facts["class_names"],
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "fixed_input_size": bool(options),
            "interpolation": facts["config"]["views"]["interpolation"],
            "crop_pct": facts["config"]["views"]["test_crop"],
            "crop_mode": "center",
            "mean": list(mean),
            "std": list(std),
            "num_classes": len(facts["class_names"]),
            "pool_size": None,
            "first_conv": model.pretrained_cfg.get("first_conv"),
            "classifier": classifier,
            "custom_load": False,
        },
    }
    return tree | ({"model_args": options} if options else {})


def is_for_timm(path: Path) -> bool:
    """Return whether timm can load an exported folder."""
    return "architecture" in json.loads((path / CONFIG).read_text(encoding="utf-8"))


def run_hub(path: Path) -> Runner:
    """Return a function that runs an exported folder. If timm can load it, timm computes the logits."""
    network = ExportModule(load_exported(path / run_folder.MODEL, torch.device("cpu")))
    if is_for_timm(path):
        replacement: Any = TimmNetwork(timm.create_model(f"local-dir:{path}", pretrained=True).eval())
        network.network = replacement
    return eager(network)


class TimmNetwork(nn.Module):
    """A model of timm in place of the network of an `ExportModule`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the images themselves: `classify` computes everything."""
        return x

    def classify(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images."""
        return self.model(x)


def make_front_matter(model: Model, for_timm: bool) -> str:
    """Return the metadata at the top of a model card, in YAML, as the hub reads it.

    Args:
        model: The model.
        for_timm: Whether timm can load the folder.
    """
    library = "timm" if for_timm else "longtail"
    tree: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": sorted({"image-classification", "long-tailed", "longtail", library}),
    }
    if model.origin and (model.origin / run_folder.METRICS).is_file():
        record = run_folder.read(model.origin)
        named = {"top1": "accuracy, all images"}
        named |= {name: f"accuracy, {name} ({group.description})" for name, group in SHOT_GROUPS.items()}
        metrics = [
            {"type": "accuracy", "name": name, "value": round(record.metrics[key] / 100, 4)}
            for key, name in named.items()
            if record.metrics.get(key) is not None
        ]
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"type": record.config.data.name, "name": dataset_name(record), "split": "test"},
            "metrics": metrics,
        }
        tree["model-index"] = [{"name": f"{model.config.method.label}, {model.config.model.name}", "results": [result]}]
    return f"---\n{yaml.safe_dump(tree, sort_keys=False, allow_unicode=False)}---\n\n"


def check_replaceable(path: Path) -> None:
    """Raise a UserError unless there is nothing at a path, an empty folder, or an earlier export, which may be replaced."""
    if not path.name:
        raise UserError(f"--out {path} has no name: name a new folder", kind="exists")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"--out {path} is not a folder: choose another path", kind="exists")
    if path.is_dir():
        others = {entry.name for entry in path.iterdir() if entry.name not in FILES or not entry.is_file()}
        is_empty = not any(path.iterdir())
        if others or not (is_empty or is_exported_folder(path)):
            raise UserError(f"--out {path} has other files: choose a new folder", kind="exists")


def upload(folder: Path, repo: str) -> str:
    """Upload an exported folder to the Hugging Face hub, and return its address. A new repository is private.

    Args:
        folder: The folder.
        repo: The repository, USER/NAME.

    Raises:
        UserError: There is no token.
        RunError: The upload failed. The folder is complete, so that it can be repeated.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    if not huggingface_hub.get_token():
        raise UserError(
            f"{folder} was written but not uploaded, because there is no token: run `hf auth login` or set HF_TOKEN",
            kind="missing-token",
        )
    try:
        api = huggingface_hub.HfApi()
        name = api.create_repo(repo, private=True, exist_ok=True).repo_id
        api.upload_folder(
            folder_path=folder, repo_id=name, allow_patterns=[*FILES], commit_message="Upload a network from longtail"
        )
        return f"{api.endpoint}/{name}"
    except HFValidationError as error:
        raise UserError(f"--repo {repo}: use the form USER/NAME", kind="invalid-value") from error
    except Exception as error:  # many types, depending on the HTTP client
        raise RunError(
            f"{folder} was written but not uploaded ({error_text(error).splitlines()[0]}): check the internet "
            "connection and the token, then run the command again",
            kind="upload-failed",
        ) from error
