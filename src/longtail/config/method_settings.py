"""The settings of each method. The methods themselves are in `longtail.methods`, their losses in `longtail.losses`.

The docstring of a field is the help text of its flag. A class that defines `name` is registered in `METHODS`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from longtail import files
from longtail.config.section import Section, ge, gt, increasing, interval, require
from longtail.errors import UserError

METHODS: dict[str, type["MethodConfig"]] = {}
"""Settings classes by the name of the method in JSON."""

MAX_QUEUE = 2**22
MAX_WIDTH = 2**16
MAX_QUEUE_VALUES = 2**30  # 4 GiB in float32

# Base classes


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Section):
    """Base class of the settings of all methods."""

    section: ClassVar[str] = "method"
    name: ClassVar[str] = ""
    """Name in JSON."""
    title: ClassVar[str] = ""
    """Name in tables and reports."""
    second_stage_epochs_field: ClassVar[str] = ""
    """Name of the field with the number of epochs of the second stage, for methods that have one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            METHODS[cls.name] = cls

    @property
    def label(self) -> str:
        """The label of the method in tables and reports, with the settings that define a variant."""
        return self.title

    @property
    def second_epochs(self) -> int:
        """The number of epochs of the second stage, or 0 if there is none."""
        return getattr(self, self.second_stage_epochs_field) if self.second_stage_epochs_field else 0

    @classmethod
    def resolve_type(cls, tree: dict[str, Any]) -> type[Section]:
        """Return the settings class that has the stored name.

        Names that a user gives are resolved by `longtail.recipes`, which suggests similar names.
        """
        name = tree.pop("name", None)
        if not isinstance(name, str) or name not in METHODS:
            raise UserError(
                f"the method {str(name)!r} of this run is not known: in Python, import the file that defines it, "
                "then read the run (for example with longtail.table)",
                kind="unknown-name",
            )
        return METHODS[name]

    def tag(self) -> dict[str, Any]:
        return {"name": self.name}


@dataclass(frozen=True, kw_only=True)
class DeferredSettings(MethodConfig):
    """Settings of deferred re-weighting (DRW, Cao et al., 2019): class weights that are used late in the training
    only."""

    drw_from: Annotated[float, interval(0, 1, example="0.8")] = 1.0
    """Fraction of the training after which classes are weighted; 0: from the start, 1: never."""
    drw_beta: Annotated[float, interval(0, 1, "[)", "0.9999")] = 0.9999
    """A class with n images has the weight (1 - beta) / (1 - beta^n), normalized to a mean of 1."""


@dataclass(frozen=True, kw_only=True)
class ChunkedSettings(MethodConfig):
    """Settings of losses that can be computed in chunks, without the matrix of all pairs."""

    chunk: Annotated[int, ge(0, "10000")] = 0
    """Number of classes and samples per chunk of the loss computation; 0: no chunks for up to 67 million pairs of an
    anchor and a class or sample, otherwise chunks of 4 million pairs. The value of the loss does not depend on it."""


@dataclass(frozen=True, kw_only=True)
class LinearStageSettings(MethodConfig):
    """Settings of a second stage that freezes the backbone and trains the head."""

    second_stage_epochs_field: ClassVar[str] = "linear_epochs"

    linear_epochs: Annotated[int, ge(1)] = 10
    """Number of epochs of the second stage."""
    linear_lr: Annotated[float, gt(0)] = 0.1
    """Learning rate of the second stage."""
    linear_milestones: Annotated[
        tuple[float, ...], increasing(interval(0, 1, "()"), "increasing fractions between 0 and 1", "0.33 0.67")
    ] = ()
    """Times at which the learning rate of the second stage is divided by 10, as fractions of that stage; empty: cosine
    schedule to zero."""
    linear_decay: Annotated[float, ge(0, "5e-4")] = 5e-4
    """Weight decay of the second stage."""


@dataclass(frozen=True, kw_only=True)
class ViewsSettings(MethodConfig):
    """Settings of methods that can use several query views of each image in a step."""

    views: Annotated[int, interval(1, 8, example="2")] = 1
    """Number of views of each image per step. The cost of a step is proportional to it."""


@dataclass(frozen=True, kw_only=True)
class ConsistencySettings(ViewsSettings):
    """Settings of methods that compare the predictions for the views of an image with each other."""

    consistency: Annotated[float, ge(0, "0.5")] = 0.0
    """With several views: weight of the mean KL divergence between the predicted probabilities of the views of an image.
    They are those of training, with the class frequencies of the training images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "0 if there is one view: add --method.views 2"
        require(self.views > 1 or not self.consistency, "method.consistency", self.consistency, rule)

    @property
    def label(self) -> str:
        return f"{super().label}, {self.views} views" if self.views > 1 else super().label


# One network and a loss on the logits


@dataclass(frozen=True, kw_only=True)
class CrossEntropySettings(ChunkedSettings):
    name: ClassVar[str] = "ce"
    title: ClassVar[str] = "Cross-entropy"


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmaxSettings(ConsistencySettings, ChunkedSettings):
    """Ren et al., 2020."""

    name: ClassVar[str] = "balanced-softmax"
    title: ClassVar[str] = "Balanced Softmax"


@dataclass(frozen=True, kw_only=True)
class LogitAdjustmentSettings(ChunkedSettings):
    """Menon et al., 2021."""

    name: ClassVar[str] = "logit-adjustment"
    title: ClassVar[str] = "Logit adjustment"

    strength: Annotated[float, ge(0, "1")] = 1.0
    """Factor of log q(y), where q(y) is the class frequency; 1 is equivalent to Balanced Softmax if used in the
    loss."""
    post_hoc: bool = False
    """Train with cross-entropy and subtract strength · log q(y) from the logits afterward, instead of adding it in the
    loss."""

    @property
    def label(self) -> str:
        return f"{self.title}, post hoc" if self.post_hoc else self.title


@dataclass(frozen=True, kw_only=True)
class FocalSettings(DeferredSettings):
    """Lin et al., 2017, on softmax probabilities."""

    name: ClassVar[str] = "focal"
    title: ClassVar[str] = "Focal"

    gamma: Annotated[float, ge(0, "1")] = 1.0
    """Exponent of the focal factor (1 - p)^gamma, where p is the predicted probability of the image's class."""


@dataclass(frozen=True, kw_only=True)
class ClassBalancedFocalSettings(MethodConfig):
    """Cui et al., 2019: sigmoid focal loss, weighted by the effective number of images of each class."""

    name: ClassVar[str] = "cb-focal"
    title: ClassVar[str] = "CB-Focal"

    gamma: Annotated[float, ge(0, "1")] = 1.0
    """Exponent of the focal factor."""
    beta: Annotated[float, interval(0, 1, "[)", "0.9999")] = 0.9999
    """A class with n images has the weight (1 - beta) / (1 - beta^n), normalized to a mean of 1."""


@dataclass(frozen=True, kw_only=True)
class LDAMSettings(DeferredSettings):
    """Cao et al., 2019: cosine classifier with larger margins for rarer classes."""

    name: ClassVar[str] = "ldam"
    title: ClassVar[str] = "LDAM"

    margin: Annotated[float, ge(0, "0.5")] = 0.5
    """Margin of the rarest class; the margin of a class with n images is proportional to n^(-1/4)."""
    scale: Annotated[float, gt(0, "30")] = 30.0
    """Factor of the cosines in the logits."""

    @property
    def label(self) -> str:
        return f"{self.title} + DRW" if self.drw_from < 1 else self.title


# Two stages: first the backbone, then the classifier


@dataclass(frozen=True, kw_only=True)
class CRTSettings(LinearStageSettings):
    """Kang et al., 2020: classifier re-training."""

    name: ClassVar[str] = "crt"
    title: ClassVar[str] = "cRT"


@dataclass(frozen=True, kw_only=True)
class LWSSettings(LinearStageSettings):
    """Kang et al., 2020: learnable weight scaling, one factor per class."""

    name: ClassVar[str] = "lws"
    title: ClassVar[str] = "LWS"

    linear_epochs: Annotated[int, ge(1)] = 5
    """Number of epochs of the second stage."""


@dataclass(frozen=True, kw_only=True)
class TauNormSettings(MethodConfig):
    """Kang et al., 2020: classifier weights divided by a power of their norm."""

    name: ClassVar[str] = "tau-norm"
    title: ClassVar[str] = "tau-norm"

    power: Annotated[float | None, ge(0, "0.5 or 1")] = None
    """Exponent of the norm; if not set, the best of 0, 0.1, …, 2 by class-balanced accuracy on the validation split
    (--data.val_fraction)."""


@dataclass(frozen=True, kw_only=True)
class NCMSettings(MethodConfig):
    """Kang et al., 2020. The classifier has no training steps."""

    name: ClassVar[str] = "ncm"
    title: ClassVar[str] = "Nearest class mean"

    distance: Literal["cosine", "l2"] = "cosine"
    """Distance between a feature and the mean feature of a class's training images."""


@dataclass(frozen=True, kw_only=True)
class LogisticRegressionSettings(MethodConfig):
    """The usual baseline: scikit-learn's class-balanced logistic regression on the standardized features."""

    name: ClassVar[str] = "logistic-regression"
    title: ClassVar[str] = "Logistic regression"

    C: Annotated[float, gt(0, "1")] = 1.0
    """Inverse strength of the L2 regularization, as in scikit-learn."""


@dataclass(frozen=True, kw_only=True)
class MiSLASSettings(LinearStageSettings):
    """Zhong et al., 2021: mixup in the first stage, then label-aware smoothing with shifted batch norm."""

    name: ClassVar[str] = "mislas"
    title: ClassVar[str] = "MiSLAS"

    mixup: Annotated[float, ge(0, "1")] = 1.0
    """Mixup in the first stage: mixing coefficients are drawn from Beta(mixup, mixup); 0: no mixup."""
    smooth_head: Annotated[float, interval(0, 1, "[)")] = 0.4
    """Label smoothing of the largest class."""
    smooth_tail: Annotated[float, interval(0, 1, "[)")] = 0.1
    """Label smoothing of the smallest class."""
    classifier_lr: Annotated[float, ge(0, "0.2")] = 0.2
    """Second stage: learning rate of the classifier, as a fraction of linear_lr, the rate of the per-class scaling
    factors."""


# Networks with branches, experts or a memory


@dataclass(frozen=True, kw_only=True)
class BBNSettings(MethodConfig):
    """Zhou et al., 2020: two branches with different samplers, whose weights change gradually during training."""

    name: ClassVar[str] = "bbn"
    title: ClassVar[str] = "BBN"


@dataclass(frozen=True, kw_only=True)
class CausalNormSettings(MethodConfig):
    """Tang et al., 2020 (De-confound-TDE): normalized multi-head classifier; the mean feature direction is removed at
    test time."""

    name: ClassVar[str] = "causal-norm"
    title: ClassVar[str] = "Causal Norm"

    heads: Annotated[int, ge(1)] = 2
    """Number of parts into which features and classifier weights are split; each part is normalized separately."""
    scale: Annotated[float, gt(0, "16")] = 16.0
    """Factor of the logits, which are the mean over the heads."""
    gamma: Annotated[float, ge(0, "0.03")] = 1 / 32
    """Constant that is added to the norm of the classifier weights."""
    drift: Annotated[float, interval(0, 1, "[)", "0.9")] = 0.9
    """Momentum of the moving average of the features."""
    removal: Annotated[float, ge(0, "1")] = 1.0
    """Fraction of the feature component along the moving average that is removed at test time; 0: nothing, 1: all of
    it. The authors use 1.5 on CIFAR and 3 on ImageNet-LT."""
    twin_block: bool = False
    """Duplicate the last block as in the authors' CIFAR network, which doubles the feature width."""


@dataclass(frozen=True, kw_only=True)
class ResLTSettings(MethodConfig):
    """Cui et al., 2022: three light branches: for all classes, for all except the frequent ones, and for the rare
    ones."""

    name: ClassVar[str] = "reslt"
    title: ClassVar[str] = "ResLT"

    weight: Annotated[float, interval(0, 1)] = 0.995
    """Weight of the branches' own losses; the loss of their sum has the remaining weight, 1 - weight."""
    medium: float = 0.65
    """Fraction of the classes, starting with the rarest, that the second branch is trained on."""
    few: float = 0.30
    """Fraction of the classes, starting with the rarest, that the third branch is trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "a fraction of the classes, greater than 0 and at most --method.medium"
        require(0 < self.few <= self.medium <= 1, "method.few", self.few, rule)


@dataclass(frozen=True, kw_only=True)
class OLTRSettings(MethodConfig):
    """Liu et al., 2019: modulated attention, a memory of class centroids and a cosine classifier."""

    name: ClassVar[str] = "oltr"
    title: ClassVar[str] = "OLTR"
    second_stage_epochs_field: ClassVar[str] = "memory_epochs"

    memory_epochs: Annotated[int, ge(1)] = 30
    """Number of epochs of the second stage, which trains attention, memory and classifier with class-balanced
    sampling."""
    memory_lr: Annotated[float, gt(0, "0.1")] = 0.1
    """Learning rate of the second stage (cosine schedule to zero)."""
    trunk_lr: Annotated[float, ge(0, "0.1")] = 0.1
    """Second stage: learning rate of the backbone, as a fraction of memory_lr; 0: do not change its weights."""
    scale: Annotated[float, gt(0, "16")] = 16.0
    """Scale of the cosine classifier."""
    weight: Annotated[float, ge(0)] = 0.01
    """Weight of the loss that pulls features toward their class centroid and pushes them away from the others."""
    margin: Annotated[float, ge(0)] = 10.0
    """Squared distance beyond which other centroids do not contribute to that loss."""


@dataclass(frozen=True, kw_only=True)
class RIDESettings(DeferredSettings):
    """Wang et al., 2021: experts on a shared stem, a diversity loss, and a router that uses few experts per image."""

    name: ClassVar[str] = "ride"
    title: ClassVar[str] = "RIDE"
    second_stage_epochs_field: ClassVar[str] = "router_epochs"

    experts: Annotated[int, interval(1, 8, example="3")] = 3
    """Number of experts; each has its own last two stages of the network."""
    width: Annotated[float, interval(0, 1, "(]", "0.75")] = 0.75
    """Width of an expert's layers, as a fraction of the original network's."""
    margin: Annotated[float, ge(0, "0.5")] = 0.5
    """LDAM margin of the rarest class."""
    scale: Annotated[float, gt(0, "30")] = 30.0
    """Scale of the cosine classifiers."""
    diversity: float = 0.45
    """Weight of the diversity term, which increases the KL divergence of each expert from the mean of all experts."""
    temperature: Annotated[float, gt(0, "1")] = 1.0
    """Temperature of the KL divergence."""
    router_epochs: Annotated[int, ge(0)] = 5
    """Number of epochs of the second stage, which trains the router with class-balanced sampling; 0: no router, always
    use all experts."""
    router_lr: Annotated[float, gt(0, "0.01")] = 0.01
    """Learning rate of the second stage (cosine schedule to zero)."""
    drw_from: Annotated[float, interval(0, 1, example="0.8")] = 0.8
    """Fraction of the training after which classes are weighted; 0: from the start, 1: never."""

    @property
    def label(self) -> str:
        return f"{self.title}, {self.experts} expert{'s' * (self.experts > 1)}"

    @property
    def second_epochs(self) -> int:
        """The number of epochs of the second stage; a single expert needs no router."""
        return self.router_epochs if self.experts > 1 else 0


@dataclass(frozen=True, kw_only=True)
class NCLSettings(MethodConfig):
    """Li et al., 2022: networks that are trained together and learn from each other; the first one is deployed."""

    name: ClassVar[str] = "ncl"
    title: ClassVar[str] = "NCL"

    networks: Annotated[int, interval(2, 8, example="3")] = 3
    """Number of networks. Each gets its own view of every image; the cost of a step is proportional to their number."""
    hard: Annotated[int, ge(1, "30")] = 30
    """Number of hard classes of an image: its own class and those with the largest logits. The nested losses use only
    these."""
    weight: Annotated[float, ge(0, "0.6")] = 0.6
    """Weight of the divergences between the predictions of the networks."""

    @property
    def label(self) -> str:
        return f"{self.title}, one of {self.networks} networks"


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(ViewsSettings):
    """Knowledge distillation from finished networks (`longtail distill`). Before teacher and student are compared, the log
    class frequencies of the training images are added to the logits of both."""

    name: ClassVar[str] = "distillation"
    title: ClassVar[str] = "Distilled"

    teachers: tuple[Path, ...] = ()
    """Run folders of the teachers; set by `longtail distill`."""
    teacher_checksums: tuple[str, ...] = ()
    """Checksums of the teachers, which must not change during training; set by `longtail distill`."""
    target: Literal["kd", "standardized", "dkd"] = "kd"
    """Loss that compares teacher and student. `kd`: KL divergence of their probabilities; `standardized`: the same with
    logits that are standardized for each image; `dkd`: decoupled KL divergence, with separate weights for the class of
    the image and the other classes."""
    temperature: Annotated[float, gt(0, "1 to 4")] = 1.0
    """Temperature of the loss that compares teacher and student: their logits are divided by it."""
    weight: Annotated[float, interval(0, 1, example="0.5")] = 0.5
    """Weight of the loss that compares teacher and student. Balanced Softmax on the labels has the remaining weight,
    1 - weight; with 1, labels are not used."""
    dkd_alpha: Annotated[float, ge(0, "1")] = 1.0
    """`dkd`: weight of the class of the image."""
    dkd_beta: Annotated[float, ge(0, "8")] = 8.0
    """`dkd`: weight of the other classes."""
    mixture: Literal["none", "mixup", "cutmix", "both"] = "none"
    """Mix pairs of training images; the teachers predict the mixtures. `both`: mixup or CutMix, chosen at random for each
    batch. The loss on the labels is the mean of the losses of both labels, weighted by the shares of the images."""
    mixture_alpha: Annotated[float, gt(0, "1")] = 1.0
    """The shares of the two images are drawn from Beta(mixture_alpha, mixture_alpha)."""
    contrast: Annotated[float, ge(0, "0.5")] = 0.0
    """Weight of the contrast between the projected features of the student and the features of the teachers, as in GML
    (Suh and Seo, 2023); 0: no contrast."""
    contrast_queue: Annotated[int, ge(0, "4096")] = 4096
    """Number of past features of the teachers in the contrast, in addition to those of the batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        files.check_working_directory(self.teachers)
        object.__setattr__(self, "teachers", tuple(path.absolute() for path in self.teachers))
        is_unique = len(set(self.teachers)) == len(self.teachers)
        require(is_unique, "method.teachers", self.teachers[0] if self.teachers else "", "distinct run folders")
        for flag, value in (("target", self.target == "dkd" and "dkd"), ("contrast", self.contrast)):
            if value and self.mixture != "none":
                raise UserError(
                    f"--method.{flag} {value} needs one label for each image: omit it, or use --method.mixture none",
                    kind="conflict",
                )

    @property
    def label(self) -> str:
        target = {"kd": "", "standardized": ", standardized logits", "dkd": ", DKD"}[self.target]
        teachers = f" by {len(self.teachers)} teachers" if len(self.teachers) > 1 else ""
        return f"{self.title}{teachers}{target}"


# Contrastive learning, with or without class centers


@dataclass(frozen=True, kw_only=True)
class ProjectionSettings(MethodConfig):
    """Settings of all contrastive methods: temperature and projection head."""

    tau: Annotated[float, gt(0, "0.05 to 0.2")] = 0.2
    """Temperature of the sample logits."""
    projection_dim: Annotated[int, interval(1, MAX_WIDTH)] = 128
    """Output dimension of the projection head G."""
    projection_hidden: Annotated[int, interval(0, MAX_WIDTH)] = 0
    """Hidden dimension of G; 0: the feature dimension of the backbone."""
    projection_norm: bool = True
    """Use batch norm in G, as in released PaCo; the projection head of MoCo v2, which the paper refers to, has none."""


@dataclass(frozen=True, kw_only=True)
class ContrastSettings(ProjectionSettings):
    """Settings of contrastive methods with a queue."""

    queue: Annotated[int, interval(0, MAX_QUEUE)] = 8192
    """Length of the queue of past keys and their labels."""
    contrast: Literal["local", "global"] = "local"
    """With several processes (torchrun), which samples of the current step are contrasted: those of the same process,
    as in released PaCo, or those of all processes, as in the paper's A(i). The queue contains the keys of all processes
    in both cases."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"at most {MAX_QUEUE_VALUES // self.projection_dim:,} with projection_dim {self.projection_dim}"
        require(self.queue * self.projection_dim <= MAX_QUEUE_VALUES, "method.queue", self.queue, rule)


@dataclass(frozen=True, kw_only=True)
class MomentumContrastSettings(ContrastSettings):
    """Settings of momentum contrast (MoCo), which SupCon, multi-task learning and PaCo share."""

    momentum: Annotated[float, interval(0, 1, example="0.999")] = 0.999
    """Momentum of the key network's moving average."""
    key_norm: Literal["batch", "ema", "shuffled"] = "batch"
    """Batch norm of the key network. `batch`: statistics of its own batch, as in released PaCo; `ema`: running averages
    of the query network; `shuffled`: statistics of batches that are shuffled across processes (torchrun) or across the
    groups of --model.norm ghost, as in MoCo."""


@dataclass(frozen=True, kw_only=True)
class SupConSettings(MomentumContrastSettings, LinearStageSettings):
    """Khosla et al., 2020."""

    name: ClassVar[str] = "supcon"
    title: ClassVar[str] = "SupCon"

    linear_epochs: Annotated[int, ge(1)] = 100
    """Number of epochs of the second stage, which trains a linear classifier on the frozen backbone."""
    linear_lr: Annotated[float, gt(0)] = 1.25
    """Learning rate of the second stage (cosine schedule to zero); the authors use 5 for batch size 512, which is 1.25
    for 128."""
    linear_decay: Annotated[float, ge(0, "5e-4")] = 0.0
    """Weight decay of the second stage."""


@dataclass(frozen=True, kw_only=True)
class MultiTaskSettings(MomentumContrastSettings):
    """The paper's multi-task baseline: a softmax loss plus a weighted SupCon loss."""

    name: ClassVar[str] = "multi-task"
    title: ClassVar[str] = "Multi-task"

    weight: Annotated[float, ge(0, "0.05 to 1")] = 0.05
    """Weight of the SupCon loss; the softmax loss has weight 1."""
    rebalance: bool = False
    """Use Balanced Softmax instead of cross-entropy as the softmax loss."""
    supcon: Literal["plain", "reweighted", "balanced"] = "plain"
    """`plain`: SupCon; `reweighted`: anchors weighted by the effective number of images of their class; `balanced`:
    Balanced Softmax over the samples."""
    beta: Annotated[float, interval(0, 1, "[)", "0.999")] = 0.999
    """`reweighted`: a class with n images has the weight (1 - beta) / (1 - beta^n), normalized to a mean of 1."""

    @property
    def label(self) -> str:
        softmax = "Balanced Softmax" if self.rebalance else "CE"
        variant = {"plain": "", "reweighted": "re-weighted ", "balanced": "balanced "}[self.supcon]
        return f"{softmax} + {variant}SupCon"


@dataclass(frozen=True, kw_only=True)
class CenterSettings(ChunkedSettings):
    """Settings of the parametric class centers of PaCo and GPaCo."""

    alpha: Annotated[float | Literal["auto"], interval(0, 1, "[)", "0.01 to 0.05, or auto")] = 0.05
    """Weight of a positive sample; the center of the anchor's class has weight 1. `auto`: computed by the paper's
    theory from class counts, queue length and batch size, so that at the optimum P_sup, the probability of the centers,
    is 0.71 (see `longtail theory`)."""
    center_tau: Annotated[float, gt(0)] = 1.0
    """Temperature of the center logits: 1 in released PaCo, equal to tau in the paper's text."""
    rebalance: bool = True
    """Rebalance the centers with class frequencies (Eq. 8); otherwise Eq. 4."""
    smoothing: Annotated[float, interval(0, 1, "[)", "0.1")] = 0.0
    """Label smoothing of the center targets, as in GPaCo."""

    @property
    def label(self) -> str:
        return self.title if self.rebalance else f"{self.title}, no rebalance"


@dataclass(frozen=True, kw_only=True)
class PaCoSettings(ConsistencySettings, MomentumContrastSettings, CenterSettings):
    """Cui et al., 2021. With several query views, the anchors are all of them, and there is still one key view."""

    name: ClassVar[str] = "paco"
    title: ClassVar[str] = "PaCo"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "a number if there are several views: the theory has one query view and one key view"
        require(self.views == 1 or self.alpha != "auto", "method.alpha", self.alpha, rule)


@dataclass(frozen=True, kw_only=True)
class GPaCoSettings(ContrastSettings, CenterSettings):
    """Cui et al., 2023: no key network; both views are anchors."""

    name: ClassVar[str] = "gpaco"
    title: ClassVar[str] = "GPaCo"

    projection_norm: bool = False
    """Use batch norm in G."""


@dataclass(frozen=True, kw_only=True)
class ThreeViewSettings(ProjectionSettings):
    """Settings of methods that classify the query view and contrast two key views."""

    tau: Annotated[float, gt(0, "0.05 to 0.2")] = 0.1
    """Temperature of the sample logits."""
    projection_hidden: Annotated[int, interval(0, MAX_WIDTH)] = 512
    """Hidden dimension of G; 0: the feature dimension of the backbone."""
    projection_norm: bool = True
    """Use batch norm in G."""
    softmax_weight: Annotated[float, ge(0, "1")] = 1.0
    """Weight of the loss of the classifier, which is Balanced Softmax on the query view."""
    weight: Annotated[float, ge(0, "0.5")] = 1.0
    """Weight of the contrastive loss of the key views."""


@dataclass(frozen=True, kw_only=True)
class BCLSettings(ThreeViewSettings):
    """Zhu et al., 2022: supervised contrast with averages over classes, and centers of all classes as samples."""

    name: ClassVar[str] = "bcl"
    title: ClassVar[str] = "BCL"

    scale: Annotated[float, gt(0, "30")] = 30.0
    """Scale of the cosine classifier."""
    weight: Annotated[float, ge(0, "0.35")] = 0.35
    """Weight of the contrastive loss of the key views. The authors use 1 and 0.35 as weights of the two losses on
    ImageNet-LT, and 2 and 0.6 on CIFAR."""
    contrast: Literal["local", "global"] = "global"
    """With several processes (torchrun), which samples of the current step are contrasted: those of the same process, or
    those of all processes, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class ProCoSettings(ThreeViewSettings):
    """Du et al., 2024: contrast with the estimated feature distribution of each class instead of samples."""

    name: ClassVar[str] = "proco"
    title: ClassVar[str] = "ProCo"
