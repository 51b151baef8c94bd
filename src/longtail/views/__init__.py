"""What the networks see of the images: batched augmentation on the device, one parameter set per sample."""

from longtail.views.view import Views, make_view

__all__ = ["Views", "make_view"]
