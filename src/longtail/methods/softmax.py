"""Cross-entropy and Balanced Softmax: one network, one view, one loss on its logits."""

from torch import Tensor

from longtail.losses import balanced_softmax_loss, cross_entropy_loss
from longtail.methods.base import Method, accuracy


class CrossEntropy(Method):
    def after_trunk(self, x_BF: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        logits_BC = self.classify(x_BF)
        return {"loss": self.objective(logits_BC, y_B), "accuracy": accuracy(logits_BC, y_B)}

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        return cross_entropy_loss(logits_BC, y_B)


class BalancedSoftmax(CrossEntropy):
    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        return balanced_softmax_loss(logits_BC, y_B, self.log_prior_C)
