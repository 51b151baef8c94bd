"""Balanced accuracy of classifiers on stored features, by stratified cross-validation.

    python benchmarks/heads.py FEATURES.npz [--classifiers paco balanced-softmax …] [--epochs 60] [--folds 5] [--out FILE]

FEATURES.npz has the arrays `features` (images, width) and `labels`, and optionally `views` (images, views, width) with the
features of augmented views. The classifiers of `longtail.sklearn` are compared with LogisticRegression of scikit-learn with
balanced class weights, which uses the plain features. All use the same folds. A class with fewer images than folds is in the
test part of some folds only.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Row, describe_machine, save
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from longtail import sklearn as estimators

BASELINE = "logistic regression"
CLASSIFIERS = {
    kind.method: kind for kind in vars(estimators).values() if isinstance(kind, type) and hasattr(kind, "method")
}


def make_classifier(name: str, epochs: int) -> Any:
    """Return the classifier with a name."""
    if name == BASELINE:
        return make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
    model = CLASSIFIERS[name](random_state=0)
    return model.set_params(epochs=epochs) if "epochs" in model.get_params() else model


def cross_validate(model: Any, data: dict[str, Any], folds: int) -> Row:
    """Return the balanced accuracy of each fold in percent, their mean with standard error, and the seconds of all fits.

    Args:
        model: The classifier.
        data: The arrays of the file.
        folds: The number of folds.
    """
    X, y, views = data["features"], data["labels"], data.get("views")
    scores, seconds = [], 0.0
    for train, test in StratifiedKFold(folds, shuffle=True, random_state=0).split(X, y):
        extra = {} if views is None or not hasattr(model, "method") else {"views": views[train]}
        start = time.perf_counter()
        fitted = clone(model).fit(X[train], y[train], **extra)
        seconds += time.perf_counter() - start
        scores.append(100 * balanced_accuracy_score(y[test], fitted.predict(X[test])))
    error = np.std(scores, ddof=1) / folds**0.5
    return {"accuracy": np.mean(scores), "standard_error": error, "seconds": seconds, "folds": scores}


def main() -> None:
    """Compare the classifiers, print the table, and store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("features", type=Path)
    parser.add_argument("--classifiers", nargs="+", default=list(CLASSIFIERS), choices=list(CLASSIFIERS))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with np.load(options.features) as stored:
        data = dict(stored)
    warnings.filterwarnings("ignore", "The least populated class", UserWarning)
    rows: list[Row] = []
    for name in [BASELINE, *options.classifiers]:
        found = cross_validate(make_classifier(name, options.epochs), data, options.folds)
        rows.append({"classifier": name} | found)
        print(f"{name}: {found['accuracy']:.1f} ± {found['standard_error']:.1f}, {found['seconds']:.1f} s", flush=True)
    if options.out:
        save(options.out, describe_machine(torch.device("cpu")) | {"epochs": options.epochs, "rows": rows})


if __name__ == "__main__":
    main()
