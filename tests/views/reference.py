"""References for operations on batches: public functions of torchvision and PIL, applied image by image."""

import math
from typing import TypeVar

import torchvision.transforms.functional as TF
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode

from longtail.views.ops import Op

ImageT = TypeVar("ImageT", Image.Image, Tensor)


def apply_by_torchvision(image: ImageT, op: Op, value: float, fill: int) -> ImageT:
    """Apply an operation to a PIL image or a uint8 tensor, with nearest-neighbor resampling.

    Args:
        image: The image.
        op: The operation; all but SOLARIZE_ADD, which torchvision does not have.
        value: Its argument as `longtail.views.ops` defines it: a slope, a shift in pixels, degrees, a factor, bits or a level.
        fill: Gray level of the pixels that nothing covers.
    """
    nearest, background = InterpolationMode.NEAREST, [float(fill)] * 3
    match op:
        case Op.IDENTITY:
            return image
        case Op.SHEAR_X | Op.SHEAR_Y:
            angle = math.degrees(math.atan(value))
            shear = [angle, 0.0] if op == Op.SHEAR_X else [0.0, angle]
            return TF.affine(image, 0.0, [0, 0], 1.0, shear, nearest, background, center=[0, 0])
        case Op.TRANSLATE_X | Op.TRANSLATE_Y:
            shift = [int(value), 0] if op == Op.TRANSLATE_X else [0, int(value)]
            return TF.affine(image, 0.0, shift, 1.0, [0.0, 0.0], nearest, background)
        case Op.ROTATE:
            return TF.rotate(image, value, nearest, fill=background)
        case Op.BRIGHTNESS:
            return TF.adjust_brightness(image, value)
        case Op.COLOR:
            return TF.adjust_saturation(image, value)
        case Op.CONTRAST:
            return TF.adjust_contrast(image, value)
        case Op.SHARPNESS:
            return TF.adjust_sharpness(image, value)
        case Op.POSTERIZE:
            return TF.posterize(image, int(value))
        case Op.SOLARIZE:
            return TF.solarize(image, value)
        case Op.AUTOCONTRAST:
            return TF.autocontrast(image)
        case Op.EQUALIZE:
            return TF.equalize(image)
        case Op.INVERT:
            return TF.invert(image)
    raise ValueError(f"no reference for {op!r}")


def move_by_pil(image: Image.Image, op: Op, value: float, fill: int) -> Image.Image:
    """Shear, shift or rotate a PIL image with bilinear resampling; the arguments are those of `apply_by_torchvision`."""
    background = (fill,) * 3
    if op == Op.ROTATE:
        return image.rotate(value, Image.Resampling.BILINEAR, fillcolor=background)
    # The matrices map output pixels to input pixels.
    matrix = {
        Op.SHEAR_X: (1, value, 0, 0, 1, 0),
        Op.SHEAR_Y: (1, 0, 0, value, 1, 0),
        Op.TRANSLATE_X: (1, 0, -value, 0, 1, 0),
        Op.TRANSLATE_Y: (1, 0, 0, 0, 1, -value),
    }[op]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=background)
