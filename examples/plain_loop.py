"""PaCo in a plain training loop: the network, optimizer and augmentation are yours, and PaCoLoss has everything else.

python examples/plain_loop.py        # handwritten digits; the rarest one has 3 training images
"""

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from longtail import PaCoLoss, metrics, recipes
from longtail.data import load
from longtail.nn import MomentumNetwork

EPOCHS, BATCH, LR = 30, 64, 0.1


def make_convolution(width_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def make_network() -> nn.Sequential:
    """Return a network from images of 8 pixels to 64 features. Any network works that returns a vector for each image."""
    stem = nn.Sequential(make_convolution(3, 16), make_convolution(16, 16), nn.MaxPool2d(2))
    last = nn.Sequential(make_convolution(16, 64), make_convolution(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, last)


def as_tensors(source) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2)
    return images / 127.5 - 1, torch.from_numpy(source.labels)


def main() -> None:
    torch.manual_seed(0)
    data = load(recipes.digits_lt(imbalance=40).data)
    (images, labels), (test_images, test_labels) = as_tensors(data.train), as_tensors(data.test)
    crop = v2.RandomResizedCrop(8, scale=(0.6, 1.0), ratio=(1.0, 1.0))

    net = make_network()
    # The class counts rebalance the centers (Eq. 8 of the paper).
    criterion = PaCoLoss(64, data.train.counts, alpha=0.05, tau=0.1, queue=256, projection_dim=32)
    query = nn.Sequential(net, criterion.G)  # the network and the projection G
    key = MomentumNetwork(query, momentum=0.99)  # their moving average

    parameters = [*net.parameters(), *criterion.parameters()]  # criterion has the class centers and G
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH)[:-1]:  # without the last, smaller batch
            view, other_view = (torch.stack([crop(image) for image in images[batch]]) for _ in range(2))
            terms = criterion.terms(net(view), key(other_view), labels[batch])  # the keys then enter the queue
            terms["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            key.follow(query)
        scheduler.step()
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {terms['loss']:.3f}, P_sup {terms['P_sup']:.2f}")

    net.eval()
    with torch.no_grad():
        logits = criterion.classify(net(test_images))
    results = metrics.evaluate_predictions(logits, test_labels, data.train.counts, data.train.class_names)
    print(f"accuracy: all {results['top1']:.1f}, head {results['many']:.1f}, tail {results['few']:.1f}")


if __name__ == "__main__":
    main()
