"""Classifiers for embeddings of any kind (images, text, audio, tabular data) with the interface of scikit-learn.

    from longtail.sklearn import PaCoClassifier
    model = PaCoClassifier(random_state=0).fit(X_train, y_train)
    model.predict_proba(X_test)

Each class trains a method of `longtail.methods` with `fit_head`, the function that `longtail train` uses for stored features. A
fitted classifier has numpy arrays only. SupCon has no class here: it trains a backbone, and on fixed features only its second
stage has an effect, which is cross-entropy.
"""

from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from longtail.engine.fit_head import fit_head, head_config
from longtail.methods import Method
from longtail.models.heads import CosineHead, ScaledHead

Array = npt.NDArray[Any]
ClassPrior = Literal["uniform", "train"] | npt.ArrayLike | None

NEVER = -1e30
"""The logit of a class that is never predicted. Differences of such logits are finite in float32."""


class FeatureClassifier(ClassifierMixin, BaseEstimator):
    """The base class of the classifiers. A subclass names its method, and the settings of the method among its parameters.

    Parameters that all classifiers have:
        epochs: The number of epochs.
        learning_rate: The learning rate. Features are scaled, so that it does not depend on them.
        weight_decay: The weight decay.
        batch_size: The batch size.
        class_prior: The class frequencies to expect in `predict`, `predict_proba` and `decision_function`: "uniform", "train"
            for those of the training data, or a weight for each of `classes_`. None stands for those that the method
            assumes: uniform ones, except for cross-entropy and LDAM. It can be changed after `fit`, by `set_params`.
        random_state: The seed of the initial weights and of the order of samples and views.
        device: The torch device of the training.
        verbose: Whether a line is printed for each epoch.

    Attributes:
        classes_: The classes.
        coef_: The weights (n_classes, n_features), or (1, n_features) for two classes.
        intercept_: The biases, one for each row of `coef_`.
        train_prior_: The class frequencies of the training data, with sample weights.
        method_prior_: The class frequencies that the logits assume.
        loss_curve_: The mean loss of each epoch.
        n_iter_: The number of epochs.
        settings_: The values of settings that were "auto".
    """

    method: ClassVar[str]
    settings: ClassVar[dict[str, str]] = {}
    """Maps names of constructor parameters to names of the method's settings."""

    def __init__(
        self,
        *,
        epochs: int = 60,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        batch_size: int = 64,
        class_prior: ClassPrior = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.class_prior = class_prior
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, views: Any = None) -> Self:
        """Train on features.

        Args:
            X: The features (n_samples, n_features). float32 features are trained in float32, all
                others in float64.
            y: The labels.
            views: The features of augmented versions of the same samples, (n_samples, n_views, n_features).
        """
        return self._fit(X, y, None, views)

    def _fit(self, X: Any, y: Any, sample_weight: Any, views: Any) -> Self:
        """Train on features; `fit` of the subclasses describes the arguments.

        Args:
            X: The features.
            y: The labels.
            sample_weight: The weights of the samples, or None.
            views: Augmented versions, or None.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, y_N = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        views_NVF = X[:, None] if views is None else np.concatenate([X[:, None], _check_views(views, X)], 1)
        weight_N = None
        if sample_weight is not None:
            weight_N = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
            kept_N = weight_N > 0  # so that a batch has no sample without effect
            views_NVF, y_N, weight_N = views_NVF[kept_N], y_N[kept_N], weight_N[kept_N]
        if len(np.unique(y_N)) < 2:
            raise ValueError(f"{type(self).__name__} needs samples of at least 2 classes, got 1 class")
        self.loss_curve_: list[float] = []
        method = self._train(views_NVF, y_N, weight_N)
        self.n_iter_ = len(self.loss_curve_)
        self.settings_ = method.resolved_settings()
        total_C = np.bincount(y_N, weight_N, len(self.classes_))
        self.train_prior_, self.method_prior_ = total_C / total_C.sum(), method.prior().numpy()
        self.coef_, self.intercept_ = _read_linear(method.net.head, X.dtype)
        if not (np.isfinite(self.coef_).all() and np.isfinite(self.intercept_).all()):
            raise ValueError(f"the weights of {type(self).__name__} are not finite: scale the features")
        self.intercept_ = np.maximum(self.intercept_, NEVER)
        self.intercept_[total_C == 0] = NEVER
        if len(self.classes_) == 2:
            self.coef_, self.intercept_ = self.coef_[1:] - self.coef_[:1], self.intercept_[1:] - self.intercept_[:1]
        return self

    def _train(self, views_NVF: Array, y_N: Array, weight_N: Array | None) -> Method:
        """Return the trained method.

        Args:
            views_NVF: The features of the views of each sample.
            y_N: The labels, from 0.
            weight_N: The positive weights of the samples, or None.
        """
        names = ("epochs", "learning_rate", "weight_decay", "batch_size")
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        values |= {setting: getattr(self, name) for name, setting in self.settings.items()}
        config = head_config(self.method, len(y_N), **{k: v for k, v in values.items() if v is not None})
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))

        def as_tensor(x: Array) -> torch.Tensor:
            return torch.tensor(x, device=self.device)

        weights = None if weight_N is None else as_tensor(weight_N)
        features = as_tensor(np.swapaxes(views_NVF, 0, 1))
        labels = as_tensor(y_N)
        classes = len(self.classes_)
        return fit_head(features, labels, config, classes, seed, log_epoch=self._log_epoch, weight_N=weights).cpu()

    def _log_epoch(self, row: dict[str, Any]) -> None:
        self.loss_curve_.append(row["loss"])
        if self.verbose:
            print(f"{row['stage']}: epoch {row['epoch'] + 1} of {row['epochs']}, loss {row['loss']:.4f}")

    def decision_function(self, X: Any) -> Array:
        """Return the logits, (n_samples, n_classes); for two classes the difference of both, (n_samples,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        logits = self._transform(X) @ self.coef_.T + self.intercept_ + self._prior_shift()
        return logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each sample."""
        logits = self.decision_function(X)
        return self.classes_[(logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(1)]

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (n_samples, n_classes)."""
        logits = self.decision_function(X)
        if logits.ndim == 1:
            logits = np.stack([np.zeros_like(logits), logits], 1)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def _transform(self, X: Array) -> Array:
        """Return the features that the weights are multiplied with."""
        return X

    def _prior_shift(self) -> Array:
        """Return what `class_prior` adds to the logits of each class, or to their difference for two classes."""
        prior = self.class_prior
        if prior is None:
            return np.zeros_like(self.intercept_)
        if isinstance(prior, str):
            if prior not in ("uniform", "train"):
                raise ValueError(f"class_prior={prior!r}: use 'uniform', 'train', or a weight for each class")
            share_C = self.train_prior_ if prior == "train" else np.ones(len(self.classes_))
        else:
            share_C = check_array(prior, ensure_2d=False, dtype=np.float64, input_name="class_prior")
            if share_C.shape != self.classes_.shape or share_C.min() < 0 or not share_C.any():
                raise ValueError(
                    f"class_prior must have a weight of at least 0 for each of the {len(self.classes_)} classes, "
                    "and one above 0"
                )
        share_C = share_C / share_C.max()  # so that their sum is finite
        known_C = (share_C > 0) & (self.method_prior_ > 0)
        ratio_C = np.divide(share_C / share_C.sum(), self.method_prior_, out=np.ones_like(share_C), where=known_C)
        shift_C = np.where(share_C > 0, np.log(ratio_C), NEVER).astype(self.intercept_.dtype)
        return shift_C[1:] - shift_C[:1] if len(shift_C) == 2 else shift_C


class WeightedClassifier(FeatureClassifier):
    """The base class of the classifiers whose samples can have weights."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None, views: Any = None) -> Self:  # type: ignore[override]
        """Train on features.

        Args:
            X: The features (n_samples, n_features). float32 features are trained in float32, all
                others in float64.
            y: The labels.
            sample_weight: The weights of the samples in the loss and in the class frequencies; None for equal weights.
            views: The features of augmented versions of the same samples, (n_samples, n_views, n_features).
        """
        return self._fit(X, y, sample_weight, views)


def _check_views(views: Any, X: Array) -> Array:
    """Return the views in the precision of X; raise ValueError if they do not fit."""
    views = check_array(views, allow_nd=True, dtype=X.dtype, input_name="views")
    check_consistent_length(X, views)
    if views.ndim != 3 or views.shape[2] != X.shape[1]:
        raise ValueError(f"views must have the shape ({len(X)}, n_views, {X.shape[1]}), got {views.shape}")
    return views


@torch.no_grad()
def _read_linear(head: nn.Module, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Return weights and biases of a head; those of a cosine classifier are for features of length 1."""
    if isinstance(head, CosineHead):
        weight = head.scale * F.normalize(head.weight)
        return weight.numpy().astype(dtype), np.zeros(len(weight), dtype)
    assert isinstance(head, nn.Linear)
    scale_C = head.scale_C if isinstance(head, ScaledHead) else torch.ones_like(head.bias)
    weight, bias = scale_C[:, None] * head.weight, scale_C * head.bias
    return weight.numpy().astype(dtype), bias.numpy().astype(dtype)


class CrossEntropyClassifier(WeightedClassifier):
    """Cross-entropy, that is, logistic regression by SGD. It assumes the class frequencies of the training data."""

    method = "ce"


class BalancedSoftmaxClassifier(WeightedClassifier):
    """Balanced Softmax (Ren et al., 2020): the loss accounts for the class frequencies."""

    method = "balanced-softmax"


class LogitAdjustedClassifier(WeightedClassifier):
    """Logit adjustment (Menon et al., 2021).

    Args:
        strength: The factor of the log class frequencies; 1 is Balanced Softmax if it is used in the loss.
        post_hoc: Whether the classifier is trained by cross-entropy and adjusted afterward.
    """

    method = "logit-adjustment"
    settings: ClassVar[dict[str, str]] = {"strength": "strength", "post_hoc": "post_hoc"}

    def __init__(
        self,
        *,
        strength: float = 1.0,
        post_hoc: bool = False,
        epochs: int = 60,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        batch_size: int = 64,
        class_prior: ClassPrior = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        super().__init__(
            epochs=epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            class_prior=class_prior,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.strength = strength
        self.post_hoc = post_hoc


class LDAMClassifier(WeightedClassifier):
    """LDAM (Cao et al., 2019): a cosine classifier with larger margins for rare classes.

    Args:
        margin: The margin of the rarest class.
        scale: The factor of the cosines in the logits.
        drw_from: The fraction of the training after which classes are weighted; 1 for never.
    """

    method = "ldam-drw"
    settings: ClassVar[dict[str, str]] = {"margin": "margin", "scale": "scale", "drw_from": "drw_from"}

    def __init__(
        self,
        *,
        margin: float = 0.5,
        scale: float = 30.0,
        drw_from: float = 0.8,
        epochs: int = 60,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        batch_size: int = 64,
        class_prior: ClassPrior = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        super().__init__(
            epochs=epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            class_prior=class_prior,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.margin = margin
        self.scale = scale
        self.drw_from = drw_from

    def _transform(self, X: Array) -> Array:
        """Return the features with length 1."""
        return X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)


class PaCoClassifier(FeatureClassifier):
    """Parametric contrastive learning (Cui et al., 2021): class centers, and contrast with a queue of samples.

    Args:
        alpha: The weight of a positive sample; "auto" computes it from the theory of the paper.
        temperature: The temperature of the samples.
        queue_size: The length of the queue; None for the number of training samples, at most 1,024.
        projection_dim: The width of the projection.
        rebalance: Whether the loss accounts for the class frequencies.
    """

    method = "paco"
    settings: ClassVar[dict[str, str]] = {
        "alpha": "alpha",
        "temperature": "tau",
        "queue_size": "queue",
        "projection_dim": "projection_dim",
        "rebalance": "rebalance",
    }

    def __init__(
        self,
        *,
        alpha: float | Literal["auto"] = "auto",
        temperature: float = 0.1,
        queue_size: int | None = None,
        projection_dim: int = 128,
        rebalance: bool = True,
        epochs: int = 60,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        batch_size: int = 64,
        class_prior: ClassPrior = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        super().__init__(
            epochs=epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            class_prior=class_prior,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.alpha = alpha
        self.temperature = temperature
        self.queue_size = queue_size
        self.projection_dim = projection_dim
        self.rebalance = rebalance


class TauNormClassifier(WeightedClassifier):
    """Tau-normalization (Kang et al., 2020): cross-entropy, then weights divided by a power of their norm.

    Args:
        power: The power. Select it by cross-validation.
    """

    method = "tau-norm"
    settings: ClassVar[dict[str, str]] = {"power": "power"}

    def __init__(
        self,
        *,
        power: float = 1.0,
        epochs: int = 60,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        batch_size: int = 64,
        class_prior: ClassPrior = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        super().__init__(
            epochs=epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            class_prior=class_prior,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.power = power


class CRTClassifier(FeatureClassifier):
    """A linear classifier trained with class-balanced sampling: the second stage of cRT (Kang et al., 2020)."""

    method = "crt"


class LWSClassifier(FeatureClassifier):
    """Learnable weight scaling (Kang et al., 2020): cross-entropy, then a factor for each class by balanced sampling."""

    method = "lws"


class NearestClassMeanClassifier(WeightedClassifier):
    """The nearest class mean, which needs no training.

    Args:
        distance: The distance, "cosine" or "l2".
    """

    method = "ncm"
    settings: ClassVar[dict[str, str]] = {"distance": "distance"}

    def __init__(
        self,
        *,
        distance: Literal["cosine", "l2"] = "cosine",
        class_prior: ClassPrior = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        self.distance = distance
        self.class_prior = class_prior
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
