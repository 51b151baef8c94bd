"""The configuration of a run: frozen dataclasses, one per section; every field is a flag (`--optim.lr 0.1`).

Nothing here imports torch or numpy, so that `--help` is instant. Values are checked where they enter: a Config that
exists is valid.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from longtail.errors import UserError, unknown

T = TypeVar("T")


def _require(good: bool, flag: str, value: object, rule: str) -> None:
    if not good:
        raise UserError(f"--{flag} {value}: it must be {rule}")


class Section:
    """Every value of a section is brought to its type when it enters, wherever it comes from; `section` names its flags."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(typing.cast(Any, self)):
            where = f"{self.section}.{f.name}".lstrip(".")
            object.__setattr__(self, f.name, _coerce(hints[f.name], getattr(self, f.name), where))


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    section: ClassVar[str] = "data"

    name: Literal["cifar10", "cifar100", "digits", "folder"] = "cifar100"
    """The data set; `folder` is an image folder, train/CLASS/*.jpg with val/CLASS/*.jpg beside it or without."""
    root: Path | None = None
    """Where the archives lie, or the image folder itself (archives: else $LONGTAIL_DATA, else ./data)."""
    imbalance: float = 1.0
    """Largest over smallest class of the long-tailed draw; 1 keeps the data as they are."""
    profile: Literal["exponential", "step"] = "exponential"
    """How the counts fall from head to tail; `step`: the rarer half of the classes has the tail's count."""
    image_size: int = 32
    """Side in pixels that the network sees (images of a folder are resized and centre-cropped to it)."""
    val_fraction: float = 0.0
    """Share of the training images held out for validation, per class: at most a fifth, never a class's last two."""
    download: bool = True
    """Let torchvision fetch a missing archive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "at least 1 (it is the largest class over the smallest): try --data.imbalance 100"
        _require(self.imbalance >= 1, "data.imbalance", self.imbalance, rule)
        _require(self.image_size >= 4, "data.image_size", self.image_size, "at least 4 pixels")
        rule = "between 0 and 0.2 (no class gives more than a fifth): try 0.1"
        _require(0 <= self.val_fraction <= 0.2, "data.val_fraction", self.val_fraction, rule)


@dataclass(frozen=True, kw_only=True)
class ViewConfig(Section):
    section: ClassVar[str] = "views.*"

    crop: Literal["none", "pad", "resized"] = "pad"
    """`pad`: zero-pad by 4 pixels (an eighth of the side) and cut; `resized`: RandomResizedCrop."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of a resized crop, as a share of the image."""
    flip: bool = True
    """Mirror left and right, with probability one half."""
    policy: Literal["none", "sim", "rand", "stacked-rand", "auto"] = "none"
    """SimAugment, RandAugment, both (stacked), or the CIFAR AutoAugment policy."""
    rand_ops: int = 2
    """RandAugment: operations per image."""
    rand_magnitude: float = 10.0
    """RandAugment: magnitude, 10 is the strongest."""
    rand_std: float = 0.5
    """RandAugment: standard deviation of the magnitude."""
    fill: int = 128
    """Grey level of what a shear, shift or rotation uncovers."""
    cutout: int = 0
    """Side in pixels of the square that Cutout blanks; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.crop_scale
        _require(0 < low <= high <= 1, "views.*.crop_scale", self.crop_scale, "two shares 0 < low <= high <= 1")
        _require(self.rand_ops >= 0, "views.*.rand_ops", self.rand_ops, "0 or more")
        _require(0 <= self.rand_magnitude <= 10, "views.*.rand_magnitude", self.rand_magnitude, "between 0 and 10")
        _require(self.rand_std >= 0, "views.*.rand_std", self.rand_std, "0 or more")
        _require(0 <= self.fill <= 255, "views.*.fill", self.fill, "a grey level from 0 to 255")
        _require(self.cutout >= 0, "views.*.cutout", self.cutout, "0 (none) or a side in pixels")


@dataclass(frozen=True, kw_only=True)
class ViewsConfig(Section):
    section: ClassVar[str] = "views"

    query: ViewConfig = field(default_factory=ViewConfig)
    """The view that the query network and the class centres see."""
    key: ViewConfig = field(default_factory=ViewConfig)
    """The view that the momentum (key) network sees; unused by methods without one."""
    normalise: Literal["cifar10", "cifar100", "imagenet", "half"] = "cifar10"
    """Whose mean and standard deviation; `half`: 0.5 each. Released CIFAR-100 code uses those of CIFAR-10."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    section: ClassVar[str] = "model"

    name: str = "resnet32_cifar"
    """Any timm name, or resnet{8,20,32,44,56}_cifar (16/32/64 wide) and resnet{18,50}_cifar (3x3 stem)."""
    pretrained: bool = False
    """Start from timm's weights for this name (downloaded)."""
    bias: bool = True
    """A bias in the classifier: released PaCo has one, the paper's centres have none."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Section):
    """What every method has: a name in JSON and on the command line, and a label in tables."""

    section: ClassVar[str] = "method"
    name: ClassVar[str] = ""
    title: ClassVar[str] = ""

    @property
    def label(self) -> str:
        return self.title


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(MethodConfig):
    name: ClassVar[str] = "ce"
    title: ClassVar[str] = "Cross-entropy"


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmax(MethodConfig):
    name: ClassVar[str] = "balanced-softmax"
    title: ClassVar[str] = "Balanced Softmax"


@dataclass(frozen=True, kw_only=True)
class MomentumContrast(MethodConfig):
    """The MoCo frame that SupCon and PaCo share."""

    tau: float = 0.2
    """Temperature of the sample logits."""
    queue: int = 8192
    """Length of the labelled queue of past keys."""
    momentum: float = 0.999
    """The key network keeps this share of itself at each step."""
    projection_dim: int = 128
    """Output width of the projection G."""
    projection_hidden: int = 0
    """Hidden width of G; 0: the trunk's feature width."""
    projection_norm: bool = True
    """Batch norm inside G, as released; MoCo v2's G, which the paper names, has none."""
    key_norm: Literal["batch", "ema"] = "batch"
    """Batch norm of the key network: statistics of its own batch, as released, or the query's running averages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.tau > 0, "method.tau", self.tau, "above 0: try 0.05 to 0.2")
        _require(self.queue >= 0, "method.queue", self.queue, "0 or more")
        _require(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1: try 0.999")
        _require(self.projection_dim >= 1, "method.projection_dim", self.projection_dim, "at least 1")
        _require(self.projection_hidden >= 0, "method.projection_hidden", self.projection_hidden, "0 or more")


@dataclass(frozen=True, kw_only=True)
class SupCon(MomentumContrast):
    name: ClassVar[str] = "supcon"
    title: ClassVar[str] = "SupCon"

    linear_epochs: int = 100
    """Epochs of the second stage: a linear classifier on the frozen trunk."""
    linear_lr: float = 0.1
    """Learning rate of the second stage (cosine to zero)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.linear_epochs >= 1, "method.linear_epochs", self.linear_epochs, "at least 1")
        _require(self.linear_lr > 0, "method.linear_lr", self.linear_lr, "above 0")


@dataclass(frozen=True, kw_only=True)
class PaCo(MomentumContrast):
    name: ClassVar[str] = "paco"
    title: ClassVar[str] = "PaCo"

    alpha: float = 0.05
    """Weight of a positive sample, where the class's own centre has weight 1."""
    centre_tau: float = 1.0
    """Temperature of the centre logits: 1 as released, `tau` as the text has it."""
    rebalance: bool = True
    """Multiply the centres by class frequency (Eq. 8); without, Eq. 4."""

    @property
    def label(self) -> str:
        return self.title if self.rebalance else f"{self.title}, no rebalance"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.alpha < 1, "method.alpha", self.alpha, "in [0, 1): try 0.01 to 0.05")
        _require(self.centre_tau > 0, "method.centre_tau", self.centre_tau, "above 0")


METHODS: dict[str, type[MethodConfig]] = {m.name: m for m in (CrossEntropy, BalancedSoftmax, SupCon, PaCo)}


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    section: ClassVar[str] = "optim"

    lr: float = 0.1
    """Peak learning rate of SGD."""
    momentum: float = 0.9
    """SGD's momentum."""
    nesterov: bool = False
    """Nesterov's form of it."""
    weight_decay: float = 5e-4
    """L2 penalty, on every parameter (batch norm and biases too, as released code does)."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """What follows the warm-up."""
    milestones: tuple[float, ...] = ()
    """Schedule `step`: where the rate is multiplied by gamma: shares of the training (0.8), or epochs (160)."""
    gamma: float = 0.1
    """Schedule `step`: the factor."""
    warmup_epochs: float = 0.0
    """Length of the linear warm-up."""
    warmup_start: float = 0.0
    """Where the warm-up starts, as a share of lr."""
    warmup_by: Literal["step", "epoch", "epoch-overshoot"] = "step"
    """Rise at each step, or at each epoch as (e+1)/n; released PaCo overshoots: its epoch n runs at (n+1)/n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.lr > 0, "optim.lr", self.lr, "above 0: try 0.1")
        _require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "in [0, 1): try 0.9")
        rule = "off when momentum is 0: add --optim.momentum 0.9"
        _require(not (self.nesterov and self.momentum == 0), "optim.nesterov", self.nesterov, rule)
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more: try 5e-4")
        _require(self.warmup_epochs >= 0, "optim.warmup_epochs", self.warmup_epochs, "0 or more")
        _require(self.gamma > 0, "optim.gamma", self.gamma, "above 0: try 0.1")
        _require(0 <= self.warmup_start <= 1, "optim.warmup_start", self.warmup_start, "between 0 and 1")
        rising = list(self.milestones) == sorted(set(self.milestones)) and all(m > 0 for m in self.milestones)
        _require(rising, "optim.milestones", self.milestones, "rising shares or epochs above 0: try 0.8 0.9")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    section: ClassVar[str] = "train"

    epochs: int = 200
    """Passes over the training images (of the first stage, where a method has two)."""
    batch_size: int = 128
    """Images per forward pass."""
    accumulate: int = 1
    """Batches whose gradients are averaged into one step (an epoch's remainder is left out)."""
    seeds: tuple[int, ...] = (0,)
    """One run per seed, each in OUT/seedN."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on CUDA, fp32 on the CPU; fp32 on CUDA is exact and repeatable (no TF32), and slower."""
    channels_last: bool = True
    """Memory format of images and weights."""
    step: Literal["auto", "eager", "captured", "compiled", "fused"] = "auto"
    """`eager`: plain torch; `captured`: on CUDA the step is one graph; `compiled`: its networks go through torch.compile as
    well; `fused`: what our own kernels know (CIFAR ResNets, small views; bf16) runs by them; `auto`: fused, else compiled where
    the run is long enough to repay it, else captured."""
    together: int = 4
    """On CUDA, seeds trained side by side in one process, as branches of one captured step."""
    checkpoint_every: int = 10
    """Epochs between checkpoints (Ctrl-C and SIGTERM save at once)."""
    validate_every: int = 10
    """Epochs between evaluations on the validation split, where there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(1 <= self.together <= 8, "train.together", self.together, "between 1 and 8")
        for name in ("epochs", "batch_size", "accumulate", "checkpoint_every", "validate_every"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        distinct = len(set(self.seeds)) == len(self.seeds) > 0 and all(0 <= s < 2**31 for s in self.seeds)
        _require(distinct, "train.seeds", self.seeds, "distinct whole numbers from 0: try --train.seeds 0 1 2")


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    section: ClassVar[str] = "log"

    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    """`auto`: a bar on a terminal, plain lines when piped."""


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    recipe: str = "custom"
    """Which recipe it came from, and its setting: for the record only."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the images come from."""
    views: ViewsConfig = field(default_factory=ViewsConfig)
    """What the networks see of them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The trunk."""
    method: MethodConfig = field(default_factory=CrossEntropy)
    """What is learnt, and how."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser and schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, batch, device."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        late = [m for m in self.optim.milestones if m >= max(self.train.epochs, 1)]
        if self.optim.schedule == "step" and late:
            advice = f"training ends at epoch {self.train.epochs}: give shares of it, such as 0.8 0.9"
            raise UserError(f"--optim.milestones {late[0]:g} is never reached, {advice}")
        if self.train.batch_size == 1 and getattr(self.method, "projection_norm", False):
            raise UserError(
                "--train.batch_size 1: batch norm in G needs two images: try 2, or --method.no_projection_norm"
            )

    def identity(self) -> dict[str, Any]:
        """What makes two runs repetitions of one another: everything but seeds, place, display and speed."""
        tree = to_dict(self)
        del tree["recipe"], tree["log"], tree["data"]["root"], tree["data"]["download"]
        for key in ("seeds", "device", "step", "together", "checkpoint_every", "validate_every"):
            del tree["train"][key]
        if not isinstance(self.method, MomentumContrast):
            del tree["views"]["key"]
        return {"method": tree.pop("method")} | tree  # first, as what a reader looks for first


def to_dict(section: Any) -> dict[str, Any]:
    """A (nested) section as plain JSON values; a method carries its name."""
    tree: dict[str, Any] = {"name": section.name} if isinstance(section, MethodConfig) else {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        tree[f.name] = value
    return tree


def from_dict(kind: type[T], tree: Any, where: str = "") -> T:
    """The inverse of `to_dict`; unknown keys and values of the wrong type are UserErrors that name the place."""
    if not isinstance(tree, dict):
        raise UserError(f"{where or 'the configuration'} must be an object, got {tree!r}")
    tree = dict(tree)
    if issubclass(kind, MethodConfig):
        name = tree.pop("name", None)
        if not isinstance(name, str) or name not in METHODS:
            raise unknown("method", name, METHODS)
        kind = typing.cast(type[T], METHODS[name])
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in tree:
        if key not in names:
            raise unknown("configuration key", f"{where}{key}", (where + n for n in names))
    return kind(**tree)


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that the field has, or a UserError; numbers are finite and of a size that a computer can use."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    expected = getattr(hint, "__name__", str(hint))
    if dataclasses.is_dataclass(hint):
        kind = typing.cast(type, hint)
        return value if isinstance(value, kind) else from_dict(kind, value, where + ".")
    if origin is Literal:
        if value in args:
            return value
        expected = " or ".join(map(repr, args))
    elif origin in (typing.Union, types.UnionType):
        return None if value is None else _coerce(args[0], value, where)
    elif origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis and isinstance(value, list | tuple) else list(args)
        if isinstance(value, list | tuple) and len(kinds) == len(value):
            return tuple(_coerce(k, v, where) for k, v in zip(kinds, value, strict=True))
        expected = f"a list of {args[0].__name__}"
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint in (int, float) and type(value) in (int, float):
        if abs(value) < 2**31 and value == hint(value):
            return hint(value)
        expected = f"a {'whole' if hint is int else 'finite'} number below {2**31:,}"
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise UserError(f"--{where} {value!r}: it must be {expected}")


def differences(there: Any, here: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two configurations (as dicts) differ: 'section.field' -> the two values."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return {} if there == here else {where: (there, here)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in there | here:
        found |= differences(there.get(key), here.get(key), f"{where}.{key}".lstrip("."))
    return found
