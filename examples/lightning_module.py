"""PaCo as a LightningModule. Network, loss and key network are submodules, so Lightning stores and moves all of them.

pip install lightning
python examples/lightning_module.py        # handwritten digits; the rarest one has 3 training images
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from longtail import PaCoLoss, metrics, recipes
from longtail.data import load
from longtail.models.backbones import make_trunk
from longtail.nn import MomentumNetwork
from longtail.views import Views

EPOCHS, BATCH, LR = 30, 64, 0.1


class LitPaCo(lightning.LightningModule):
    def __init__(self, net: nn.Module, width: int, class_counts: Tensor) -> None:
        super().__init__()
        self.net = net
        self.criterion = PaCoLoss(width, class_counts, alpha="auto", batch=BATCH, tau=0.1, queue=256, projection_dim=32)
        self.key = MomentumNetwork(self.query_network(), momentum=0.99)
        self.views, self.rng = Views(recipes.digits_lt().views, size=8), torch.Generator().manual_seed(0)

    def query_network(self) -> nn.Sequential:
        return nn.Sequential(self.net, self.criterion.G)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, y = batch
        view, other_view = self.views.query(images, self.rng), self.views.key(images, self.rng)
        terms = self.criterion.terms(self.net(view), self.key(other_view), y)
        self.log_dict(terms)
        return terms["loss"]

    def on_train_batch_end(self, *_) -> None:
        self.key.follow(self.query_network())

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]  # the key network has none
        optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def forward(self, images: Tensor) -> Tensor:
        return self.criterion.classify(self.net(self.views.plain(images)))


def as_dataset(source) -> TensorDataset:
    return TensorDataset(torch.from_numpy(source.images).permute(0, 3, 1, 2), torch.from_numpy(source.labels))


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    data = load(recipes.digits_lt(imbalance=40).data)
    net = make_trunk("resnet8_cifar", image_size=8)
    module = LitPaCo(net, net.width, torch.from_numpy(data.train.counts))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(as_dataset(data.train), BATCH, shuffle=True, drop_last=True))
    print(f"alpha {module.criterion.alpha}, P_sup {trainer.callback_metrics['P_sup']:.2f}")

    images, labels = as_dataset(data.test).tensors
    with torch.no_grad():
        logits = module.eval()(images)
    results = metrics.evaluate_predictions(logits, labels, data.train.counts, data.train.class_names)
    print(f"accuracy: all {results['top1']:.1f}, head {results['many']:.1f}, tail {results['few']:.1f}")


if __name__ == "__main__":
    main()
