"""RIDE (Wang et al., 2021): diverse experts on a shared stem, and a router that uses only as many as an image needs.

Shapes: B images, E experts, F features of an expert, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import ldam_loss, ldam_margins
from longtail.methods.base import Stage, accuracy
from longtail.methods.decouple import second_stage
from longtail.methods.softmax import DeferredReweighting
from longtail.models.heads import Classifier
from longtail.models.split_resnets import Experts

ROUTER_LOGITS = 30
"""The number of largest logits that are input to the router."""
ROUTER_FEATURES = 16
"""The width to which features are projected for the router."""
POSITIVE_WEIGHT = 100.0
"""The weight of images that need another expert in the router's loss."""
TEMPERATURE_SLOPE = 0.05
"""How much the temperatures of the divergence depend on class frequency."""


class ExpertHead(nn.Module):
    """A cosine classifier for each expert, and for each but the last a router that decides whether another expert is needed."""

    def __init__(self, width: int, classes: int, experts: int, scale: float) -> None:
        super().__init__()
        each = width // experts
        self.experts, self.scale = experts, scale
        self.weight = nn.Parameter(
            torch.stack([nn.init.kaiming_normal_(torch.empty(classes, each)) for _ in range(experts)])
        )
        self.seen = nn.ModuleList(nn.Linear(each, ROUTER_FEATURES) for _ in range(experts - 1))
        self.needed = nn.ModuleList(
            nn.Linear(ROUTER_FEATURES + min(ROUTER_LOGITS, classes), 1) for _ in range(experts - 1)
        )
        self.is_routing = False

    def logits(self, x_BF: Tensor, expert: int) -> Tensor:
        """Return the logits of an expert from its features."""
        return self.scale * F.linear(F.normalize(x_BF), F.normalize(self.weight[expert], dim=1))

    def run_experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (B, E, F) and the logits (B, E, C) of all experts."""
        x_BEF = x.unflatten(1, (self.experts, -1))
        return x_BEF, torch.stack([self.logits(x_BEF[:, e], e) for e in range(self.experts)], 1)

    def router_logit(self, x_BF: Tensor, mean_BC: Tensor, expert: int) -> Tensor:
        """Return the router's logit for another expert after this one.

        Args:
            x_BF: The features of this expert.
            mean_BC: The mean logits of the experts up to this one.
            expert: The index of this expert.
        """
        seen_BS = self.seen[expert](F.normalize(x_BF))
        top_BT = mean_BC.topk(min(ROUTER_LOGITS, mean_BC.shape[1]), 1)[0]
        return self.needed[expert](torch.cat([top_BT, seen_BS.relu()], 1))[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean logits of the experts that are used."""
        x_BEF, logits_BEC = self.run_experts(x)
        return self.route(x_BEF, logits_BEC)[0] if self.is_routing else logits_BEC.mean(1)

    def route(self, x_BEF: Tensor, logits_BEC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean logits (B, C) of the experts that the router uses, and their number for each image (B,)."""
        means_BEC = mean_logits_so_far(logits_BEC)
        asked_B = torch.ones(x_BEF.shape[0], dtype=torch.int64, device=x_BEF.device)
        for e in range(self.experts - 1):
            more_B = (asked_B == e + 1) & (self.router_logit(x_BEF[:, e], means_BEC[:, e], e) > 0)
            asked_B = asked_B + more_B
        rows_B = torch.arange(x_BEF.shape[0], device=x_BEF.device)
        return means_BEC[rows_B, asked_B - 1], asked_B


def mean_logits_so_far(logits_BEC: Tensor) -> Tensor:
    """Return the mean logits of the first expert, of the first two, and so on."""
    return logits_BEC.cumsum(1) / torch.arange(1, logits_BEC.shape[1] + 1, device=logits_BEC.device)[:, None]


class RIDE(DeferredReweighting, settings="ride"):
    """Stage 1: LDAM for each expert, minus its divergence from the mean of all. Stage 2: the router only."""

    config: cfg.RIDESettings
    can_weight_images = False
    margin_C: Tensor
    temperature_C: Tensor
    late_temperature_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        c = self.config
        self.register_buffer("margin_C", ldam_margins(counts_C, c.margin), persistent=False)
        flat_C = len(counts_C) * counts_C.double() / counts_C.sum() * TEMPERATURE_SLOPE + 1 - TEMPERATURE_SLOPE
        self.register_buffer("late_temperature_C", (c.temperature * flat_C / flat_C.max()).float(), persistent=False)
        self.register_buffer("temperature_C", torch.full((len(counts_C),), c.temperature), persistent=False)

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        if not self.config.second_epochs:
            return (self.first_stage(config),)
        router = second_stage(config, "router", "router_lr", sampler="balanced", frozen=True)
        return self.first_stage(config), router

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.RIDESettings)
        return Experts(net, config.model.name, config.method.experts, config.method.width)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.RIDESettings)
        return ExpertHead(width, classes, config.method.experts, config.method.scale)

    @property
    def heads(self) -> ExpertHead:
        """The classifiers of the experts."""
        assert isinstance(self.net.head, ExpertHead)
        return self.net.head

    def set_stage(self, stage: Stage) -> None:
        super().set_stage(stage)
        self.heads.is_routing = stage.frozen
        for name, parameter in self.heads.named_parameters():
            parameter.requires_grad_((name != "weight") == stage.frozen)

    def on_epoch_start(self, epoch: int, epochs: int) -> None:
        super().on_epoch_start(epoch, epochs)
        if self.is_late(epoch, epochs):
            self.temperature_C.copy_(self.late_temperature_C)
        else:
            self.temperature_C.fill_(self.config.temperature)

    def loss_from_features(  # type: ignore[override]
        self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor
    ) -> dict[str, Tensor]:
        x_BEF, logits_BEC = self.heads.run_experts(x_BF)
        if self.stage.frozen:
            return self.router_terms(x_BEF, logits_BEC, y_B)
        scale, loss, divergence = self.config.scale, logits_BEC.new_zeros(()), self.divergence(logits_BEC)
        for logits_BC in logits_BEC.unbind(1):
            loss = loss + ldam_loss(logits_BC / scale, y_B, self.margin_C, scale, self.weight_C)
        return {
            "loss": loss - self.config.diversity * divergence,
            "accuracy": accuracy(logits_BEC.mean(1), y_B),
            "divergence": divergence,
        }

    def divergence(self, logits_BEC: Tensor) -> Tensor:
        """Return the sum over experts of T² · KL(mean of all || expert), without a gradient through the mean."""
        T_C = self.temperature_C
        mean_BC = (logits_BEC.detach().mean(1) / T_C).softmax(1)
        log_p_BEC = (logits_BEC / T_C).log_softmax(2)
        per_image = F.kl_div(log_p_BEC, mean_BC[:, None].expand_as(log_p_BEC), reduction="none").sum((1, 2))
        return T_C.mean() ** 2 * per_image.mean()

    def router_terms(self, x_BEF: Tensor, logits_BEC: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return the loss of the router. Another expert is needed if the mean is wrong and a later expert is right."""
        means_BEC, right_BE = mean_logits_so_far(logits_BEC), logits_BEC.argmax(2) == y_B[:, None]
        loss, positive = logits_BEC.new_zeros(()), logits_BEC.new_full((), POSITIVE_WEIGHT)
        for e in range(self.heads.experts - 1):
            needed_B = (means_BEC[:, e].argmax(1) != y_B) & right_BE[:, e + 1 :].any(1)
            wants_B = self.heads.router_logit(x_BEF[:, e], means_BEC[:, e], e)
            loss = loss + F.binary_cross_entropy_with_logits(wants_B, needed_B.float(), pos_weight=positive)
        logits_BC, asked_B = self.heads.route(x_BEF, logits_BEC)
        return {"loss": loss, "accuracy": accuracy(logits_BC, y_B), "experts_asked": asked_B.float().mean()}

    @property
    def classifier_stage(self) -> Stage:
        """The first stage: the stage of the router does not train the classifiers."""
        return self.stages[0]

    def extra_metrics(self, x_BF: Tensor) -> dict[str, float]:
        if not self.heads.is_routing:
            return {"experts_asked": float(self.config.experts)}
        return {"experts_asked": float(self.heads.route(*self.heads.run_experts(x_BF))[1].float().mean())}

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images. Each expert computes only the images that need it."""
        if not self.heads.is_routing or self.training:
            return super().forward(x)
        shared, head = self.net.trunk(x, "shared"), self.heads
        out_BC = sums_BC = torch.empty(0)
        left = torch.arange(len(x), device=x.device)
        for e in range(head.experts):
            x_BF = self.net.trunk(shared, e)
            logits_BC = head.logits(x_BF, e)
            sums_BC = logits_BC if e == 0 else sums_BC + logits_BC
            mean_BC = sums_BC / (e + 1)
            out_BC = mean_BC if e == 0 else out_BC.index_copy(0, left, mean_BC)
            if e == head.experts - 1:
                break
            more = (head.router_logit(x_BF, mean_BC, e) > 0).nonzero()[:, 0]
            if not len(more):
                break
            shared, sums_BC, left = shared[more], sums_BC[more], left[more]
        return out_BC
