"""The demo's task: what is rewarded, and what quality is measured on that no reward ever saw.

The reward is the class log-probability of a small classifier minus 20 times the distance of the mean ink from zero.
The pretrained model draws thin digits (mean ink about -0.4 of [-1, 1]); the reward asks for fatter strokes that still
read as the digit. Ink alone could be won by filling the page, and class probability alone is saturated from the start.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.neural_network import MLPClassifier
from torch import Tensor

from jagg_fx.models.digits_dit import NUM_CLASSES, digits

INK_WEIGHT = 20.0
LOG_PROB_FLOOR = -10.0  # a classifier of 1,797 images means nothing by a smaller log-probability


@dataclass(frozen=True)
class Quality:
    """Held-out quality of samples: accuracy of a classifier and a Frechet distance, neither seen by the reward."""

    accuracy: float
    distance: float


class DigitsTask:
    """Reward and held-out quality. Two classifiers, each trained on its own half of the digits."""

    def __init__(self, seed: int = 0) -> None:
        images, labels = digits()
        order = np.random.default_rng(seed).permutation(len(images))
        half = len(order) // 2
        pixels, targets = _pixels(images), labels.numpy()
        self._judge = _classifier(seed).fit(pixels[order[:half]], targets[order[:half]])
        self._held_out = _classifier(seed + 1).fit(pixels[order[half:]], targets[order[half:]])
        self._real = self._features(pixels)

    def reward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Rewards `[B]` of images `[B, 1, 8, 8]` in [-1, 1] drawn for labels `[B]`."""
        ink = images.clamp(-1, 1).flatten(1).mean(1)
        return self.log_probs(images, labels) - INK_WEIGHT * ink.abs()

    def log_probs(self, images: Tensor, labels: Tensor) -> Tensor:
        """The judging classifier's log-probabilities `[B]` of labels `[B]`, not below a floor."""
        log_probs = self._judge.predict_log_proba(_pixels(images.clamp(-1, 1)))
        chosen = np.maximum(log_probs[np.arange(len(labels)), labels.numpy()], LOG_PROB_FLOOR)
        return torch.as_tensor(chosen, dtype=torch.float32)

    def quality(self, images: Tensor, labels: Tensor) -> Quality:
        """Accuracy of the held-out classifier on samples, and the Frechet distance of its features to real digits."""
        pixels = _pixels(images.clamp(-1, 1))
        accuracy = float((self._held_out.predict(pixels) == labels.numpy()).mean())
        return Quality(accuracy, frechet_distance(self._features(pixels), self._real))

    def look_at(self, images: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Classes `[B]` and features `[B, d]` that the held-out classifier sees in images."""
        pixels = _pixels(images.clamp(-1, 1))
        classes: NDArray[np.int64] = self._held_out.predict(pixels)
        return classes, self._features(pixels)

    def _features(self, pixels: NDArray[np.float64]) -> NDArray[np.float64]:
        hidden: NDArray[np.float64] = pixels @ self._held_out.coefs_[0] + self._held_out.intercepts_[0]
        positive: NDArray[np.float64] = np.maximum(hidden, 0)
        return positive


def prompts(groups: int, group_size: int, generator: torch.Generator) -> Tensor:
    """Labels `[groups * group_size]`: a random class per group, repeated within the group."""
    return torch.randint(NUM_CLASSES, (groups,), generator=generator).repeat_interleave(group_size)


def frechet_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """`|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))` of features `[n, d]` (Heusel et al., arXiv 1706.08500)."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # tr sqrt(A B) is the sum of the square roots of the eigenvalues of A B, which are real and not negative.
    roots = np.sqrt(np.maximum(np.linalg.eigvals(cov_a @ cov_b).real, 0))
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * roots.sum())


def _classifier(seed: int) -> MLPClassifier:
    return MLPClassifier((64,), alpha=1.0, max_iter=2000, tol=1e-3, random_state=seed)


def _pixels(images: Tensor) -> NDArray[np.float64]:
    return images.flatten(1).double().numpy()
