"""Initial weights of a classifier: from class means, a logistic regression, or text embeddings.

The logits are about SCALE · cos(x, w_c) for weights from class means and from text, where x are the features. Shapes: N images,
F features, C classes, D width of the embeddings of images and texts.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.errors import UserError, first_line
from longtail.models.heads import CosineHead
from longtail.models.logistic import fit_logistic_regression

if TYPE_CHECKING:
    from longtail.config import ModelConfig

SCALE = 25.0
"""The scale of cosines as logits, which is that of LIFT (Shi et al., 2024)."""
PROMPT = "a photo of a {}."
"""The text of a class."""


def check_head_init(head: nn.Module, model: "ModelConfig") -> None:
    """Raise a UserError unless the classifier of a network can be initialized as `--model.head_init` asks."""
    if model.head_init == "random":
        return
    if not isinstance(head, nn.Linear | CosineHead):
        raise UserError(
            f"--model.head_init {model.head_init}: this method has neither a linear nor a cosine classifier: use "
            "--model.head_init random, or a method such as balanced-softmax, paco or ldam",
            kind="conflict",
        )
    if model.head_init == "text" and not (model.pretrained and is_text_aligned(model.name)):
        raise UserError(
            f"--model.head_init text: {model.name!r} has no text embeddings: use a pretrained image tower of CLIP "
            "(vit_…_clip_… or convnext_….clip_…), such as --model.name vit_base_patch16_clip_224.openai --model.pretrained, or "
            "--model.head_init means",
            kind="conflict",
        )


def is_text_aligned(name: str) -> bool:
    """Return whether a timm model is an image tower whose text tower the package open-clip can load."""
    from longtail.models.weights import find_timm_config  # imports timm

    architecture, _, tag = name.partition(".")
    known = find_timm_config(name)
    has_hub = known is not None and (known.hf_hub_id or "").startswith("timm/")  # these also have the text tower
    return has_hub and ("_clip_" in architecture or tag.startswith("clip_")) and not re.search(r"_ft_in\d", tag)


@torch.no_grad()
def initialize_head(
    head: nn.Module, model: "ModelConfig", features: Callable[[], tuple[Tensor, Tensor]], class_names: Sequence[str]
) -> None:
    """Initialize a linear or cosine classifier in place.

    Args:
        head: The classifier.
        model: The settings of the network, of which `head_init` says how.
        features: Returns the features (N, F) of the training images without augmentation, and their labels.
        class_names: The names of the classes.
    """
    x_NF, y_N = features()
    is_cosine, classes = isinstance(head, CosineHead), len(class_names)
    has_bias = getattr(head, "bias", None) is not None
    bias_C = None
    if model.head_init == "means":
        weight_CF = F.normalize(class_means(x_NF, y_N, classes)) * SCALE / x_NF.norm(dim=1).mean()
    elif model.head_init == "text":
        weight_CF = load_text_weights(model.name, x_NF, class_names)
    else:
        x_NF = F.normalize(x_NF) if is_cosine else x_NF
        weight_CF, bias_C = fit_logistic_regression(x_NF.double(), y_N, classes, has_bias=has_bias)
        bias_C[torch.bincount(y_N, minlength=classes) == 0] = 0.0
    # Only the direction of the weights of a cosine classifier matters; their length sets how fast it changes.
    head.get_parameter("weight").copy_(F.normalize(weight_CF) if is_cosine else weight_CF)
    if has_bias:
        head.get_parameter("bias").copy_(torch.zeros(classes) if bias_C is None else bias_C)


def class_means(x_NF: Tensor, y_N: Tensor, classes: int, weight_N: Tensor | None = None) -> Tensor:
    """Return the mean of the features of each class, or zero for a class without images.

    Args:
        x_NF: The features.
        y_N: The labels.
        classes: The number of classes.
        weight_N: The positive weight of each image; None for equal weights.
    """
    if weight_N is not None:
        weight_N1 = weight_N[:, None]
        total_C1 = class_sums(weight_N1, y_N, classes)
        return class_sums(weight_N1 * x_NF, y_N, classes) / torch.where(total_C1 > 0, total_C1, 1)
    n_C = torch.bincount(y_N, minlength=classes)
    return class_sums(x_NF, y_N, classes) / n_C.clamp(min=1)[:, None]


def class_sums(x_NF: Tensor, y_N: Tensor, classes: int) -> Tensor:
    """Return the sum of the features of each class.

    Features are summed in the order of the images; the order of `index_add_` on CUDA differs from run to run.

    Args:
        x_NF: The features.
        y_N: The labels.
        classes: The number of classes.
    """
    n_C = torch.bincount(y_N, minlength=classes)
    return torch.segment_reduce(x_NF[y_N.argsort(stable=True)], "sum", lengths=n_C, initial=0)


# Text


def load_text_weights(name: str, x_NF: Tensor, class_names: Sequence[str]) -> Tensor:
    """Return weights (C, F) from the text tower that was trained with an image tower of timm.

    Args:
        name: The timm name of the image tower.
        x_NF: The features of the training images.
        class_names: The names of the classes.

    Raises:
        UserError: If the package open-clip is not installed, or the weights cannot be loaded.
    """
    try:
        import open_clip
    except ImportError as error:
        raise UserError(
            f"--model.head_init text needs another package ({error}): pip install open-clip-torch",
            kind="missing-package",
        ) from error
    from longtail.models.weights import find_timm_config

    source = f"hf-hub:{find_timm_config(name).hf_hub_id}"
    try:
        clip, tokenizer = open_clip.create_model(source), open_clip.get_tokenizer(source)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the text tower of {name!r} cannot be loaded ({first_line(error)}): use --model.head_init means",
            kind="download-failed",
        ) from error
    return text_weights(clip.eval(), tokenizer, x_NF, class_names)


@torch.no_grad()
def text_weights(
    clip: Any, tokenizer: Callable[[list[str]], Tensor], x_NF: Tensor, class_names: Sequence[str]
) -> Tensor:
    """Return weights w_c (C, F) so that w_c·x is about SCALE times the cosine of an image and the text of class c.

    The features x are those before the projection P of the image tower: w_c = P^T t_c · SCALE / mean |P x|.

    Args:
        clip: A model of open-clip with both towers.
        tokenizer: Its tokenizer.
        x_NF: The features of the training images.
        class_names: The names of the classes.

    Raises:
        UserError: If the image tower has a projection that is not linear, or other features.
    """
    text_CD = clip.encode_text(
        tokenizer([PROMPT.format(name.replace("_", " ")) for name in class_names]), normalize=True
    )
    text_CD = text_CD.to(x_NF)
    projection_DF = find_projection(clip.visual, text_CD.shape[1]).to(x_NF)
    if projection_DF.shape[1] != x_NF.shape[1]:
        raise UserError(
            f"--model.head_init text: the features have the width {x_NF.shape[1]}, those of open-clip "
            f"{projection_DF.shape[1]}: use --model.head_init means",
            kind="mismatch",
        )
    return text_CD @ projection_DF * SCALE / (x_NF @ projection_DF.T).norm(dim=1).mean()


def find_projection(visual: Any, width: int) -> Tensor:
    """Return the projection (D, F) from the features of an image tower of open-clip to embeddings, or the identity."""
    own = getattr(visual, "proj", None)  # of its own transformers
    if own is not None:
        return own.T
    layers = [m for m in getattr(visual, "head", nn.Identity()).modules() if isinstance(m, nn.Linear)]  # around timm
    if len(layers) > 1 or any(layer.bias is not None for layer in layers):
        raise UserError(
            "--model.head_init text: the projection of this image tower is not linear: use --model.head_init means",
            kind="unsupported",
        )
    return layers[0].weight if layers else torch.eye(width)
