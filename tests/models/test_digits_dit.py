"""The committed checkpoint is what its log says, and it draws digits."""

import json

import torch

from jagg_fx.demo.task import DigitsTask
from jagg_fx.models.digits_dit import CHECKPOINT, DigitsDiT, digits, load_digits_dit
from jagg_fx.models.samplers import Euler, rollout, schedule


def test_the_checkpoint_is_small_and_its_log_shows_a_falling_loss() -> None:
    assert CHECKPOINT.stat().st_size < 3_000_000
    log = json.loads(CHECKPOINT.with_suffix(".log.json").read_text())
    losses = [entry["loss"] for entry in log["loss"]]
    assert len(losses) >= 20
    assert losses[-1] < 0.6 * losses[0]


def test_its_flow_matching_loss_is_that_of_the_log() -> None:
    log = json.loads(CHECKPOINT.with_suffix(".log.json").read_text())
    model, (images, labels) = load_digits_dit(), digits()
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(len(images), generator=generator).sigmoid()
    noise = torch.randn(images.shape, generator=generator)
    z = (1 - t.view(-1, 1, 1, 1)) * images + t.view(-1, 1, 1, 1) * noise
    with torch.no_grad():
        loss = float((model(z, t, labels) - (noise - images)).square().mean())
    assert abs(loss - log["loss"][-1]["loss"]) < 0.05


def test_it_draws_digits_that_a_classifier_reads() -> None:
    labels = torch.arange(10).repeat(20)
    noise = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    samples = rollout(load_digits_dit(), Euler(), noise, schedule(10), labels).latents[-1]
    quality = DigitsTask().quality(samples, labels)
    assert quality.accuracy > 0.95


def test_a_fresh_model_predicts_nothing() -> None:
    """adaLN-zero: the head starts at zero."""
    model = DigitsDiT(dim=16, depth=1, heads=2)
    assert not model(torch.randn(2, 1, 8, 8), torch.rand(2), torch.arange(2)).any()
