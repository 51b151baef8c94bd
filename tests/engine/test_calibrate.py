"""The temperature against a search over the equation in float64, and on synthetic data whose posterior is known."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from longtail import run_folder
from longtail.engine.evaluate import evaluate
from longtail.engine.predictions import MAX_TEMPERATURE, calibrate
from longtail.engine.train import train
from tests.conftest import tiny
from tests.raises import raises

COUNTS = (300, 100, 30, 6)


def world(seed: int, counts=COUNTS, noise: float = 1.2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw points around a mean per class; the logits are the exact log posterior for the frequencies of `counts`."""
    rng = torch.Generator().manual_seed(seed)
    n, means = torch.tensor(counts), torch.randn(len(counts), 3, generator=rng, dtype=torch.float64)
    y = torch.arange(len(counts)).repeat_interleave(n)
    x = means[y] + noise * torch.randn(len(y), 3, generator=rng, dtype=torch.float64)
    prior = n / n.sum().double()
    return -((x[:, None] - means) ** 2).sum(2) / (2 * noise**2) + prior.log(), y, prior


def slow_nll(z, y, prior, temperature: float) -> float:
    """Return the mean over classes of the mean over their images of -log softmax(z / T - log prior)[y]."""
    by_class: dict[int, list[float]] = {}
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        scores = [v / temperature - math.log(q) for v, q in zip(row, prior.tolist(), strict=True)]
        top = max(scores)
        total = top + math.log(sum(math.exp(s - top) for s in scores))
        by_class.setdefault(label, []).append(total - scores[label])
    return sum(sum(v) / len(v) for v in by_class.values()) / len(by_class)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_it_is_the_least_of_the_equation(scale):
    z, y, prior = world(0, (40, 12, 5, 2))
    found = calibrate(lambda: [scale * z], y, prior)
    here = slow_nll(scale * z, y, prior, found.temperature)
    assert found.calibrated_nll == pytest.approx(here, rel=1e-9)
    assert found.nll == pytest.approx(slow_nll(scale * z, y, prior, 1.0), rel=1e-9)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert slow_nll(scale * z, y, prior, factor * found.temperature) > here
    assert (found.images, found.classes) == (59, 4)


def test_the_true_posterior_of_long_tailed_data_has_temperature_one():
    z, y, prior = world(1, tuple(20 * n for n in COUNTS))
    assert calibrate(lambda: [z], y, prior).temperature == pytest.approx(1, abs=0.06)
    assert calibrate(lambda: [3 * z], y, prior).temperature == pytest.approx(3, abs=0.18)
    alike = torch.full_like(prior, 0.25)
    assert calibrate(lambda: [z - prior.log()], y, alike).temperature == pytest.approx(1, abs=0.06)
    assert abs(calibrate(lambda: [z], y, alike).temperature - 1) > 0.15  # a wrong prior would have a higher loss


def test_rows_may_come_in_parts_and_classes_count_alike():
    z, y, prior = world(2)
    whole = calibrate(lambda: [z], y, prior)
    parts = calibrate(lambda: z.split(7), y, prior)
    assert parts.temperature == pytest.approx(whole.temperature, rel=1e-9)
    doubled = torch.cat([torch.arange(len(y)), torch.where(y == 0)[0]])  # twice the head
    assert calibrate(lambda: [z[doubled]], y[doubled], prior).temperature == pytest.approx(whole.temperature, rel=1e-9)


def test_classes_without_a_validation_image():
    z, y, prior = world(3)
    kept = y < 2
    found = calibrate(lambda: [z[kept]], y[kept], prior)
    assert found.classes == 2 and 1 / MAX_TEMPERATURE < found.temperature < MAX_TEMPERATURE


def test_where_all_is_recognized_with_ease_nothing_changes():
    y = torch.arange(4).repeat(3)
    found = calibrate(lambda: [10 * torch.eye(4)[y]], y, torch.full((4,), 0.25))
    assert found.temperature == 1 and found.calibrated_nll == found.nll


def test_logits_that_mislead_are_made_flat():
    z, y, prior = world(4)
    assert calibrate(lambda: [prior.log() - 3 * (z - prior.log())], y, prior).temperature == MAX_TEMPERATURE


def test_logits_that_are_not_finite_are_refused():
    with raises("non-finite"):
        calibrate(lambda: [torch.full((2, 3), torch.nan)], torch.tensor([0, 1]), torch.full((3,), 1 / 3))


def test_a_run_with_validation_images_stores_it_and_others_do_not(tmp_path):
    config = tiny("balanced-softmax")
    (plain,) = train(config, tmp_path / "plain")
    (held,) = train(replace(config, data=replace(config.data, val_fraction=0.2)), tmp_path / "held")
    assert not (plain / run_folder.CALIBRATION).exists()
    stored = json.loads((held / run_folder.CALIBRATION).read_text())
    assert stored["calibrated_nll"] <= stored["nll"] and stored["images"] > 20 and stored["temperature"] > 0
    (held / run_folder.CALIBRATION).unlink()
    evaluate(held)  # an older run gets it when it is evaluated again
    again = json.loads((held / run_folder.CALIBRATION).read_text())
    np.testing.assert_allclose(list(again.values()), list(stored.values()), rtol=1e-5)
