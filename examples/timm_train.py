"""PaCo in a loop with the data, optimizer and scheduler of timm, as in its train.py. New lines are marked with (+).

python examples/timm_train.py        # handwritten digits; the rarest one has 3 training images
"""

import tempfile
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, random_seed
from torch import nn

from longtail import PaCoLoss, metrics, recipes
from longtail.data import load
from longtail.nn import MomentumNetwork

EPOCHS, BATCH, SIZE, LR = 30, 64, 8, 0.1


def write_digits(root: Path) -> None:
    data = load(recipes.digits_lt(imbalance=40).data)
    for split, source in {"train": data.train, "val": data.test}.items():
        for i, (image, label) in enumerate(zip(source.images, source.labels, strict=True)):
            (root / split / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(root / split / str(label) / f"{i}.png")


def fit(root: Path) -> None:
    random_seed(0)
    train, val = (create_dataset("", root, split) for split in ("train", "validation"))
    common = {"input_size": (3, SIZE, SIZE), "batch_size": BATCH, "use_prefetcher": False, "num_workers": 0}
    loader = create_loader(train, is_training=True, scale=(0.6, 1.0), hflip=0.0, color_jitter=None, **common)
    view = train.transform
    train.transform = lambda image: (view(image), view(image))  # (+) two views of each image
    counts = torch.bincount(torch.tensor([label for _, label in train.reader.samples]))  # (+)

    net = timm.create_model("resnet8_cifar", num_classes=0)  # registered by longtail.nn; any timm network works
    criterion = PaCoLoss(net.num_features, counts, tau=0.1, queue=256)  # (+)
    query = nn.Sequential(net, criterion.G)  # (+)
    key = MomentumNetwork(query, momentum=0.99)  # (+)
    model = nn.ModuleList([net, criterion])
    optimizer = create_optimizer_v2(model, "momentum", lr=LR, weight_decay=5e-4)
    scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=EPOCHS, warmup_epochs=2)
    for epoch in range(epochs):
        losses = AverageMeter()
        for (view_1, view_2), y in loader:
            loss = criterion(net(view_1), key(view_2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            key.follow(query)  # (+)
            losses.update(loss.item(), len(y))
        scheduler.step(epoch + 1)
    print(f"epoch {epochs}: loss {losses.avg:.3f}")

    net.reset_classifier(len(counts))  # (+) the centers become the classifier of an ordinary timm network
    net.get_classifier().load_state_dict(criterion.centers.state_dict())
    with torch.no_grad():
        net.eval()
        outputs = [(net(images), y) for images, y in create_loader(val, crop_pct=1.0, **common)]
    logits, y = (torch.cat(part) for part in zip(*outputs, strict=True))
    results = metrics.evaluate_predictions(logits, y, counts, list(train.reader.class_to_idx))
    print(f"accuracy: all {results['top1']:.1f}, head {results['many']:.1f}, tail {results['few']:.1f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        fit(Path(folder))


if __name__ == "__main__":
    main()
