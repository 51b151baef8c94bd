"""PaCo in a plain torch loop: network, optimizer and augmentation are yours, the loss brings what else it needs.

python examples/plain_loop.py        # handwritten digits, of which the rarest has 3 training images
"""

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from longtail import PaCoLoss, metrics, recipes
from longtail.data import load
from longtail.nn import MomentumNetwork

EPOCHS, BATCH, LR = 30, 64, 0.1


def convolution(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def network() -> nn.Sequential:
    """From images of 8 pixels to 64 features; any network will do that ends in a vector an image."""
    small = nn.Sequential(convolution(3, 16), convolution(16, 16), nn.MaxPool2d(2))
    return nn.Sequential(small, convolution(16, 64), convolution(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def as_tensors(source) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2)
    return images / 127.5 - 1, torch.from_numpy(source.labels)


def main() -> None:
    torch.manual_seed(0)
    data = load(recipes.digits_lt(imbalance=40).data)
    (images, labels), (test_images, test_labels) = as_tensors(data.train), as_tensors(data.test)
    crop = v2.RandomResizedCrop(8, scale=(0.6, 1.0), ratio=(1.0, 1.0))

    net = network()
    criterion = PaCoLoss(64, data.train.counts, alpha=0.05, tau=0.1, queue=256, projection_dim=32)
    query = nn.Sequential(net, criterion.G)
    key = MomentumNetwork(query, momentum=0.99)

    learning = [*net.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(learning, lr=LR, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH)[:-1]:  # the rest of an epoch is left out
            one, other = (torch.stack([crop(image) for image in images[batch]]) for _ in range(2))
            terms = criterion.terms(net(one), key(other), labels[batch])
            terms["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            key.follow(query)
        schedule.step()
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {terms['loss']:.3f}, P_sup {terms['P_sup']:.2f}")

    net.eval()
    with torch.no_grad():
        logits = criterion.classify(net(test_images))
    found = metrics.evaluate_predictions(logits, test_labels, data.train.counts, data.train.class_names)
    print(f"accuracy: all {found['top1']:.1f}, head {found['many']:.1f}, tail {found['few']:.1f}")


if __name__ == "__main__":
    main()
