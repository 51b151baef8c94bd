"""Views of images: batched augmentation on the device, with separate random parameters for each sample."""

from longtail.views.view import Views, make_view

__all__ = ["Views", "make_view"]
