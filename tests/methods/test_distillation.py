"""Test the method distillation: the logits of teachers for the views of a student, and the loss of the student."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail import methods
from longtail.config import DistillationSettings
from longtail.losses import balanced_softmax_loss, class_contrast_loss, cross_entropy_loss, distillation_loss
from longtail.methods import Batch, Mixed
from longtail.methods.base import log_frequencies
from longtail.methods.distillation import Teacher
from longtail.models.side_stream import SideStream
from tests.conftest import tiny
from tests.raises import raises

COUNTS = torch.tensor([100, 40, 20, 10, 8, 6, 4, 3, 2, 1])
C = len(COUNTS)
LOG_PRIOR = (COUNTS.double() / COUNTS.sum()).log()
ONE, ZERO = torch.ones(3, 1, 1), torch.zeros(3, 1, 1)


def make_teacher(name: str = "balanced-softmax", seed: int = 0, **changes) -> Teacher:
    torch.manual_seed(seed)
    method = methods.make(tiny(name), COUNTS.numpy())
    with torch.no_grad():
        method.net.head.weight.mul_(2)  # clear predictions
    values = {"image_size": 8, "scale": ONE, "shift": ZERO} | changes
    return Teacher(method, log_frequencies(COUNTS), **values)


def make_student(*teachers: Teacher, **settings) -> methods.Method:
    torch.manual_seed(9)
    student = methods.make(replace(tiny("ce"), method=DistillationSettings(**settings)), COUNTS.numpy())
    student.set_teachers(teachers)
    return student


def images(n: int = 6, side: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


# Teachers


@pytest.mark.parametrize(("name", "is_free_of_prior"), [("ce", False), ("balanced-softmax", True)])
def test_logits_are_adjusted_to_the_training_prior(name, is_free_of_prior):
    """Logits of cross-entropy have the prior already; those of Balanced Softmax are free of it."""
    teacher, x = make_teacher(name), images()
    with torch.no_grad():
        z_BC, a_BC = teacher.method(x), teacher(x)
    wanted = z_BC.double() + (LOG_PRIOR if is_free_of_prior else 0)
    torch.testing.assert_close(a_BC.double().softmax(1), wanted.softmax(1), rtol=1e-4, atol=1e-7)


def test_logits_of_logit_adjustment_with_a_strength_are_adjusted():
    config = tiny("logit-adjustment")
    config = replace(config, method=replace(config.method, strength=0.4))
    teacher = Teacher(methods.make(config, COUNTS.numpy()), log_frequencies(COUNTS), 8, ONE, ZERO)
    x = images()
    with torch.no_grad():
        wanted = (teacher.method(x).double() + 0.4 * LOG_PRIOR).softmax(1)  # the loss added 0.4 · log π
        torch.testing.assert_close(teacher(x).double().softmax(1), wanted, rtol=1e-4, atol=1e-7)


def test_views_are_normalized_for_the_teacher():
    mean, std, own_mean, own_std = torch.rand(4, 3, 1, 1) + 0.2
    pixels = torch.rand(4, 3, 8, 8)
    teacher = make_teacher(scale=std / own_std, shift=(mean - own_mean) / own_std)
    plain = make_teacher()
    with torch.no_grad():
        torch.testing.assert_close(
            teacher((pixels - mean) / std), plain((pixels - own_mean) / own_std), rtol=1e-4, atol=1e-4
        )


def test_larger_views_are_reduced():
    teacher, large = make_teacher(), images(side=16)
    small = F.interpolate(large, 8, mode="bilinear", antialias=True)
    with torch.no_grad():
        assert torch.equal(teacher(large), teacher(small))


def test_a_teacher_is_frozen():
    teacher = make_teacher()
    before = {k: v.clone() for k, v in teacher.state_dict().items()}
    student = make_student(teacher)
    student.train()
    student.loss(Batch(images(), None, torch.arange(6)))["loss"].backward()
    assert not teacher.method.training
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())


def test_teachers_are_not_part_of_the_method():
    student = make_student(make_teacher())
    assert student.state_dict().keys() == make_student().state_dict().keys()
    assert len(list(student.parameters())) == len(list(make_student().parameters()))


def test_the_backbones_of_teachers_are_compiled_with_the_student():
    teachers = make_teacher(), make_teacher("ce", seed=1)
    assert make_student(*teachers).compiled_modules() == tuple(t.method.net.trunk.body for t in teachers)


# The student


def gradient_norm(student: methods.Method, a_BC: Tensor, s_BC: Tensor) -> float:
    s_BC = s_BC.clone().requires_grad_()
    student.loss_from_logits(s_BC, a_BC, torch.zeros(len(s_BC), dtype=torch.int64))["loss"].backward()
    return s_BC.grad.norm().item()


@pytest.mark.parametrize("target", ["kd", "standardized", "dkd"])
@pytest.mark.parametrize("teacher", ["ce", "balanced-softmax"])
def test_the_gradient_is_zero_exactly_where_the_posteriors_agree(teacher, target):
    """A student that copies the logits of a teacher trained by cross-entropy would learn the training prior."""
    student, x = make_student(weight=1.0, target=target), images()
    taught = make_teacher(teacher)
    with torch.no_grad():
        z_BC, a_BC = taught.method(x), taught(x)
    free_BC = z_BC - LOG_PRIOR.float() if teacher == "ce" else z_BC
    assert gradient_norm(student, a_BC, free_BC) < 1e-5
    other_BC = z_BC if teacher == "ce" else z_BC - LOG_PRIOR.float()
    assert gradient_norm(student, a_BC, other_BC) > 1e-2


def test_deployed_logits_are_free_of_the_prior():
    torch.testing.assert_close(make_student().prior(), torch.full((C,), 1 / C, dtype=torch.float64), rtol=1e-5, atol=0)


def test_loss_on_one_view():
    teachers = make_teacher(), make_teacher("ce", seed=1)
    student = make_student(*teachers, weight=0.3, temperature=2.0).eval()
    x, y_B = images(), torch.arange(6)
    found = student.loss(Batch(x, None, y_B))
    s_BC = student.net(x)
    with torch.no_grad():
        a_BC = (sum(teacher(x).double().softmax(1) for teacher in teachers) / 2).log()
    taught = distillation_loss(a_BC, s_BC + LOG_PRIOR, y_B, 2.0)
    labels = balanced_softmax_loss(s_BC, y_B, LOG_PRIOR)
    torch.testing.assert_close(found["loss"].double(), 0.3 * taught + 0.7 * labels, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["distillation"].double(), taught, rtol=1e-4, atol=1e-6)


def test_loss_on_several_views_is_the_mean():
    student = make_student(make_teacher(), views=3).eval()
    views, y_B = [images(seed=seed) for seed in range(3)], torch.arange(6)
    found = student.loss(Batch(views[0], None, y_B, extra=tuple(views[1:])))["loss"]
    each = [student.loss(Batch(view, None, y_B))["loss"] for view in views]
    torch.testing.assert_close(found, sum(each) / 3, rtol=1e-4, atol=1e-5)
    assert student.stages[0].extra_views == ("query", "query")


@pytest.mark.parametrize("views", [1, 2])
def test_labels_of_mixtures_have_their_shares(views):
    student = make_student(make_teacher(), mixture="both", weight=0.0).eval()
    x, y_B, other_B, share = images(), torch.arange(6), torch.arange(6).flip(0), torch.tensor(0.3)
    batch = Batch(x, None, y_B, Mixed(other_B, share), extra=(x,) * (views - 1))
    s_BC = student.net(x).double() + LOG_PRIOR
    wanted = 0.3 * cross_entropy_loss(s_BC, y_B) + 0.7 * cross_entropy_loss(s_BC, other_B)
    torch.testing.assert_close(student.loss(batch)["loss"].double(), wanted, rtol=1e-4, atol=1e-5)


def test_without_labels_only_the_teacher_counts():
    student = make_student(make_teacher(), weight=1.0).eval()
    one, other = (student.loss(Batch(images(), None, y_B))["loss"] for y_B in (torch.arange(6), torch.zeros(6).long()))
    assert torch.equal(one, other)


def test_stored_logits_replace_the_teacher():
    teacher = make_teacher()
    student, x, y_B = make_student(teacher).eval(), images(), torch.arange(6)
    wanted = student.loss(Batch(x, None, y_B))["loss"]
    with torch.no_grad():
        stored = (teacher(x),)
    student.set_teachers(())
    torch.testing.assert_close(student.loss(Batch(x, None, y_B, stored=stored))["loss"], wanted)


def test_settings_that_need_one_label_have_no_mixtures():
    for settings in ({"target": "dkd"}, {"contrast": 0.5}):
        with raises("conflict", "mixture"):
            DistillationSettings(mixture="mixup", **settings)


# The contrast with the features of the teachers


def test_the_loss_has_the_contrast_of_the_projected_features():
    """Of two teachers with two views, whose features are concatenated; the queue gets them after the backward pass."""
    teachers = make_teacher(), make_teacher("ce", seed=1)
    student = make_student(*teachers, contrast=0.3, contrast_queue=20, views=2)
    x, other, y_B = images(), images(seed=2), torch.tensor([0, 1, 2, 0, 1, 2])
    batch = Batch(x, None, y_B, extra=(other,))
    student.eval()  # the batch norm does not change
    plain = make_student(*teachers, views=2).eval()
    plain.net.load_state_dict(student.net.state_dict())
    with torch.no_grad():
        keys = torch.cat([F.normalize(t.method.features(torch.cat([x, other]))) for t in teachers], 1) / 2**0.5
        q = student.contrast.P(student.features(torch.cat([x, other])))
        for step in range(2):
            contrast = student.contrast
            k_KD, labels_K = torch.cat([keys, contrast.queue.keys_KD]), torch.cat([y_B, y_B, contrast.queue.labels_K])
            wanted = class_contrast_loss(q, k_KD, labels_K, y_B.repeat(2), LOG_PRIOR, torch.full((C,), 0.1))
            terms = student.loss(batch)
            torch.testing.assert_close(terms["contrast"], wanted)
            torch.testing.assert_close(terms["loss"], plain.loss(batch)["loss"] + 0.3 * wanted)
            assert (contrast.queue.labels_K >= 0).sum() == 12 * step
            student.after_backward(SideStream(torch.device("cpu")))
            assert (contrast.queue.labels_K >= 0).sum() == (12, 20)[step] and not contrast.queue.waiting
    torch.testing.assert_close(contrast.queue.keys_KD.norm(dim=1), torch.ones(20))


def test_the_contrast_trains_the_backbone_the_projection_and_the_temperatures():
    student = make_student(make_teacher(), contrast=1.0, weight=0.0)
    student.train()
    student.loss(Batch(images(), None, torch.arange(6)))["contrast"].backward()
    trained = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {"contrast.P.0.weight", "contrast.log_scale_C"} <= trained
    assert any(name.startswith("net.trunk") for name in trained) and not any(n.startswith("net.head") for n in trained)


def test_prepared_batches_have_the_features_of_the_teachers():
    student, y_B = make_student(make_teacher(), contrast=0.5, views=2), torch.arange(6)
    batch = Batch(images(), None, y_B, extra=(images(seed=2),))
    student.eval()
    one, other = (student.loss(each)["loss"] for each in (batch, student.prepare_batch(batch)))
    assert torch.equal(one, other)


def test_label():
    two = DistillationSettings(teachers=("a", "b"), target="dkd")
    assert two.label != DistillationSettings().label != DistillationSettings(target="standardized").label
    assert "2" in two.label
