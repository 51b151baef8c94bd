"""Example code for model cards, from an image file to a class name. Only the safetensors format needs longtail."""

from longtail.image_formats import IMAGE_FORMATS
from longtail.inference.deployed import INPUT
from longtail.inference.preprocessing import Preprocessing

PREPARED = '''\
def prepared(path):
    """Return an image file as input of the network, uint8 (3, {size}, {size})."""
    image = Image.open(path, formats={formats})
{decoded}
{cut}'''
SQUARE = """\
    image.draft(None, ({twice}, {twice}))  # decode a large JPEG at reduced size
    image = ImageOps.exif_transpose(image).convert("RGB")
    image = ImageOps.fit(image, ({size}, {size}), Image.Resampling.BILINEAR)"""
WHOLE = """\
    share = min({side} / max(image.size), 1)
    image.draft(None, [max(int(share * n), 1) for n in image.size])  # decode a large JPEG at reduced size
    image = ImageOps.exif_transpose(image).convert("RGB")
    image.thumbnail(({side}, {side}), Image.Resampling.BILINEAR, reducing_gap=None)"""
AS_IT_IS = """\
    return np.array(image).transpose(2, 0, 1)"""
CUT = '''\
    side = max(round({crop:g} * min(image.size)), 1)
    pixels = np.array(image, np.float32).transpose(2, 0, 1)
    pixels = resampling(image.height, side) @ pixels @ resampling(image.width, side).T
    return pixels.round().astype(np.uint8)


def resampling(length, side):
    """Return the matrix that resizes the central `side` pixels of a line to {size}: bilinear, antialiased, in floats."""
    pixel, scale = np.arange(length, dtype=np.float32) - (length - side) // 2 + 0.5, np.float32(side / {size})
    away = abs(pixel - (np.arange({size}, dtype=np.float32)[:, None] + 0.5) * scale)
    weight = np.maximum(1 - away / max(scale, 1), 0) * (0 < pixel) * (pixel < side)
    return weight / weight.sum(1, keepdims=True)'''

ONNX = """\
import json
import numpy as np
import onnxruntime
from PIL import Image, ImageOps


{prepared}


session = onnxruntime.InferenceSession("{file}")
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
logits, probabilities = session.run(None, {{"{input}": prepared("photo.jpg")[None]}})
print(names[probabilities[0].argmax()], probabilities[0].max())"""
TORCH = """\
import json
import numpy as np
import torch
from PIL import Image, ImageOps


{prepared}


extra = {{"longtail.json": ""}}
network = torch.export.load("{file}", extra_files=extra).module()
names = json.loads(extra["longtail.json"])["class_names"]
with torch.no_grad():
    logits, probabilities = network(torch.from_numpy(prepared("photo.jpg")[None]))
print(names[probabilities[0].argmax()], float(probabilities[0].max()))"""
SAFETENSORS = """\
import longtail

model = longtail.load("{file}")
prediction = model("photo.jpg")  # or a PIL image, an array or a tensor
print(prediction.name, prediction.probability, prediction.top(5))"""
CODE = {"onnx": ONNX, "torch": TORCH, "safetensors": SAFETENSORS}


def usage_code(to: str, file: str, preprocessing: Preprocessing) -> str:
    """Return example code for an exported file.

    Args:
        to: The format.
        file: Name of the file.
        preprocessing: The preprocessing of the network.
    """
    return CODE[to].format(file=file, input=INPUT, prepared=preparation_code(preprocessing))


def preparation_code(preprocessing: Preprocessing) -> str:
    """Return the code of a function that preprocesses an image file with Pillow and NumPy."""
    size, side, crop = preprocessing.views.size, preprocessing.side, preprocessing.views.config.test_crop
    decoded = WHOLE.format(side=side) if side else SQUARE.format(size=size, twice=2 * size)
    cut = CUT.format(size=size, crop=crop) if side or crop < 1 else AS_IT_IS
    formats = "[" + ", ".join(f'"{name}"' for name in IMAGE_FORMATS) + "]"
    return PREPARED.format(size=size, formats=formats, decoded=decoded, cut=cut)
