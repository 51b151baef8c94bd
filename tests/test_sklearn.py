"""Tests of the estimators with the interface of scikit-learn."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from longtail import sklearn as estimators
from longtail.engine.fit_head import fit_head
from tests.raises import raises

FAST = {"epochs": 20}
KINDS = [kind for kind in vars(estimators).values() if isinstance(kind, type) and hasattr(kind, "method")]
WEIGHTED = [kind for kind in KINDS if issubclass(kind, estimators.WeightedClassifier)]


def make(kind, **values):
    """Return an estimator with a short training and a seed."""
    model = kind(random_state=0, **values)
    return model.set_params(**{k: v for k, v in FAST.items() if k in model.get_params() and k not in values})


@parametrize_with_checks([make(estimators.BalancedSoftmaxClassifier), make(estimators.NearestClassMeanClassifier)])
def test_scikit_learn_check(estimator, check):
    check(estimator)


@pytest.mark.long
@parametrize_with_checks([make(kind) for kind in KINDS] + [make(estimators.NearestClassMeanClassifier, distance="l2")])
def test_scikit_learn_check_of_all(estimator, check):
    check(estimator)


def make_set(counts=(60, 20, 8), width=10, seed=0):
    """Return features around a center for each class, and the names of the classes as labels."""
    rng = np.random.default_rng(seed)
    centers_CF = 2 * np.random.default_rng(100).normal(size=(len(counts), width))
    names_N = np.repeat(["ash", "birch", "cedar"][: len(counts)], counts)
    return np.repeat(centers_CF, counts, 0) + rng.normal(size=(sum(counts), width)), names_N


@pytest.mark.parametrize("kind", KINDS)
def test_learns_and_can_be_copied(kind):
    X, y = make_set()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    model = make(kind).fit(X, y)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    assert model.score(*make_set((20, 20, 20), seed=1)) > 0.9
    assert model.coef_.shape == (3, 10) and model.intercept_.shape == (3,) and model.coef_.dtype == np.float64
    assert all(not isinstance(value, torch.Tensor | torch.nn.Module) for value in vars(model).values())
    stages = 0 if kind is estimators.NearestClassMeanClassifier else 2 if kind is estimators.LWSClassifier else 1
    assert model.n_iter_ == len(model.loss_curve_) == 20 * stages
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(clone(model).fit(X, y).coef_, model.coef_)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    np.testing.assert_allclose(model.train_prior_, np.array([60, 20, 8]) / 88)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_method(kind, monkeypatch):
    """Compare with the network that fit_head returns, for three classes and for two."""
    kept = []
    monkeypatch.setattr(estimators, "fit_head", lambda *args, **kw: kept.append(fit_head(*args, **kw)) or kept[-1])
    for counts in ((20, 10, 5), (20, 5)):
        X, y = make_set(counts)
        model = make(kind, **({} if kind is estimators.NearestClassMeanClassifier else {"epochs": 2})).fit(X, y)
        with torch.no_grad():
            logits = kept[-1](torch.tensor(X)).numpy()
        expected = logits if len(counts) == 3 else logits[:, 1] - logits[:, 0]
        np.testing.assert_allclose(model.decision_function(X), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("counts", [(60, 20, 8), (60, 8)])
@pytest.mark.parametrize("kind", [estimators.BalancedSoftmaxClassifier, estimators.CrossEntropyClassifier])
def test_class_prior_shifts_the_logits(kind, counts):
    X, y = make_set(counts)
    model = make(kind).fit(X, y)
    p_NC, q_C = model.predict_proba(X), np.array(counts) / sum(counts)
    is_balanced = kind is estimators.BalancedSoftmaxClassifier
    assumed_C = np.full(len(counts), 1 / len(counts)) if is_balanced else q_C
    np.testing.assert_allclose(model.method_prior_, assumed_C, rtol=1e-6)
    wanted = np.arange(1.0, 1 + len(counts))
    for prior, share_C in (("uniform", np.ones(len(counts))), ("train", q_C), (wanted, wanted), (list(wanted), wanted)):
        expected_NC = p_NC * share_C / model.method_prior_
        found_NC = model.set_params(class_prior=prior).predict_proba(X)
        np.testing.assert_allclose(found_NC, expected_NC / expected_NC.sum(1, keepdims=True), rtol=1e-6)
    never = model.set_params(class_prior=[0.0, *[1.0] * (len(counts) - 1)])
    assert set(never.predict(X)) == set(model.classes_[1:]) and never.predict_proba(X)[:, 0].max() == 0


def test_a_very_large_class_prior_is_scaled():
    X, y = make_set()
    model = make(estimators.NearestClassMeanClassifier).fit(X, y)
    found_NC = model.set_params(class_prior=np.full(3, 1e308)).predict_proba(X)
    assert np.array_equal(found_NC, model.set_params(class_prior="uniform").predict_proba(X))


@pytest.mark.parametrize("prior", ["even", [1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [np.nan, 1.0, 1.0]])
def test_a_wrong_class_prior_is_an_error(prior):
    X, y = make_set()
    model = make(estimators.NearestClassMeanClassifier, class_prior=prior).fit(X, y)
    with pytest.raises(ValueError, match="class_prior"):
        model.predict(X)


@pytest.mark.parametrize(
    ("kind", "scale", "settings"),
    [
        (estimators.NearestClassMeanClassifier, 1e200, {"distance": "l2"}),
        (estimators.NearestClassMeanClassifier, 1e308, {}),
        (estimators.TauNormClassifier, 1.0, {"power": 1e9}),
    ],
)
def test_weights_that_are_not_finite_are_an_error(kind, scale, settings):
    X, y = make_set()
    with pytest.raises(ValueError, match="not finite"):
        make(kind, **settings).fit(X / np.abs(X).max() * scale, y)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_a_class_whose_weights_are_zero_is_never_predicted(kind):
    X, y = make_set()
    model = make(kind).fit(X, y, sample_weight=(y != "birch").astype(float))
    assert list(model.classes_) == ["ash", "birch", "cedar"]
    for prior in (None, "uniform", "train", [1, 1, 1]):
        assert set(model.set_params(class_prior=prior).predict(X)) == {"ash", "cedar"}
        assert np.isfinite(model.decision_function(X)).all()
    with pytest.raises(ValueError, match="class"):
        make(kind).fit(X, y, sample_weight=(y == "ash").astype(float))
    with pytest.raises(ValueError, match="sample_weight"):
        make(kind).fit(X, y, sample_weight=-np.ones(len(y)))


def test_methods_without_weights_do_not_accept_them():
    X, y = make_set()
    for kind in set(KINDS) - set(WEIGHTED):
        with pytest.raises(TypeError):
            make(kind).fit(X, y, sample_weight=np.ones(len(y)))


def test_precision_is_that_of_the_features():
    X, y = make_set()
    assert make(estimators.PaCoClassifier, epochs=1).fit(X.astype(np.float32), y).coef_.dtype == np.float32
    assert make(estimators.PaCoClassifier, epochs=1).fit(X.astype(int), y).coef_.dtype == np.float64


def test_views():
    X, y = make_set()
    views = np.stack([X + 0.1, X - 0.1], 1)
    for kind in (estimators.BalancedSoftmaxClassifier, estimators.PaCoClassifier):
        one, other = make(kind, epochs=2).fit(X, y), make(kind, epochs=2).fit(X, y, views=views)
        assert not np.array_equal(one.coef_, other.coef_)
        # cross-validation divides the views like the samples
        search = GridSearchCV(make(kind, epochs=5), {"batch_size": [32]}, cv=2, error_score="raise")
        assert search.fit(X, y, views=views).best_score_ > 0.5
    for wrong in (X, views[:5], views[:, :, :3]):
        with pytest.raises(ValueError, match=r"views|inconsistent"):
            make(estimators.PaCoClassifier).fit(X, y, views=wrong)


def test_pipeline_and_grid_search():
    X, y = make_set()
    search = GridSearchCV(
        make_pipeline(StandardScaler(), make(estimators.PaCoClassifier, epochs=10)),
        {"pacoclassifier__alpha": ["auto", 0.05], "pacoclassifier__queue_size": [0, None]},
        cv=2,
        scoring="balanced_accuracy",
        error_score="raise",
    )
    assert search.fit(X, y).best_score_ > 0.8
    assert len(search.cv_results_["params"]) == 4


def test_settings_reach_the_method():
    X, y = make_set((20, 10))
    assert 0 < make(estimators.PaCoClassifier, epochs=1).fit(X, y).settings_["alpha"] < 1
    assert make(estimators.PaCoClassifier, epochs=1, alpha=0.1).fit(X, y).settings_ == {}
    with raises("invalid-value", -1):
        make(estimators.PaCoClassifier, temperature=-1).fit(X, y)
    with raises("invalid-value", 0):
        make(estimators.CrossEntropyClassifier, epochs=0).fit(X, y)


def test_verbose_prints_a_line_for_each_epoch(capsys):
    X, y = make_set((20, 10))
    make(estimators.CrossEntropyClassifier, epochs=3, verbose=1).fit(X, y)
    assert len(capsys.readouterr().out.splitlines()) == 3
