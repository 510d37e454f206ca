"""OffloadAdamW under Lightning's Trainer. Skipped where torch or Lightning is not installed."""

import warnings

import pytest

import ferry_offload as ferry

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
from ferry_offload.torch import OffloadAdamW  # noqa: E402


class Regression(lightning.LightningModule):
    def __init__(self, made):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        self.made = made

    def training_step(self, batch, _):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        optimizer = self.made(self.layers.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def trained(made, **options):
    model = Regression(made)
    batches = torch.randn(24, 8, 16, generator=torch.Generator().manual_seed(2))
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, **options)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    for optimizer in trainer.optimizers:
        getattr(optimizer, "close", lambda: None)()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("passes", [1, 3])
def test_a_training_is_torchs(passes):
    mine = trained(lambda p: OffloadAdamW(p, lr=1e-2, max_norm=0.1, accumulation_steps=passes), accumulate_grad_batches=passes)
    reference = trained(lambda p: torch.optim.AdamW(p, lr=1e-2), accumulate_grad_batches=passes, gradient_clip_val=0.1)
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_its_clipping_is_refused():
    with pytest.raises(ferry.UsageError, match="max_norm"):
        trained(lambda p: OffloadAdamW(p, lr=1e-2), gradient_clip_val=0.1)


@pytest.mark.filterwarnings("ignore")
def test_its_clipping_counts_where_gradients_stay():
    mine = trained(lambda p: OffloadAdamW(p, lr=1e-2, overlap=False), gradient_clip_val=0.1)
    reference = trained(lambda p: torch.optim.AdamW(p, lr=1e-2), gradient_clip_val=0.1)
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)
