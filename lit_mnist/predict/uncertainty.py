"""Marks uncertain predictions of a user's images.

An image gets a note if

- it shows no ink: then nothing is predicted;
- the predicted class has a probability below 70 %;
- it is less similar to the training images of the predicted class than 99 % of the training images are.

The last rule detects images that belong to no class, for which a network often predicts a high probability.
docs/run-folder.md states the share of digits, letters and other images that get a note.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lit_mnist.data.dataset import Split

NO_INK = "no ink"
_MIN_PROBABILITY = 0.7
_UNLIKE = 0.01  # share of the training images that count as unlike their class
_HELD_OUT = 12  # 1 of 12 training images is compared with the others
_MAX_COMPARED = 60_000
_ROWS = 1000  # rows compared at once, which limits the memory


def note_uncertainty(
    images: torch.Tensor, predicted: torch.Tensor, probability: torch.Tensor, training: Split
) -> list[str]:
    """Returns for each image why its prediction is uncertain, `NO_INK`, or an empty string.

    Args:
        images: The network's input, uint8 [N, 28, 28], all 0 if there is no ink.
        predicted: The predicted classes, int64 [N].
        probability: The softmax probability of each predicted class, float [N].
        training: The training images of the data set.
    """
    # A subset of a very large training set. Its held-out images show how similar the images of a class are.
    step = -(-len(training) // _MAX_COMPARED)
    known, labels = training.images[::step], training.labels[::step]
    held = torch.arange(len(known)) % _HELD_OUT == 0
    similarity, held_similarity = torch.zeros(len(images)), []
    for number in labels.unique().tolist():
        others = _compute_features(known[(labels == number) & ~held])
        if len(others):
            held_similarity.append(_nearest_similarity(_compute_features(known[(labels == number) & held]), others))
            rows = predicted == number
            similarity[rows] = _nearest_similarity(_compute_features(images[rows]), others)
    compared = torch.cat(held_similarity) if held_similarity else torch.zeros(0)
    # A training set with too few images to compare marks none.
    unlike = similarity < (compared.quantile(_UNLIKE) if len(compared) else 0.0)
    notes = []
    for image, share, is_unlike in zip(images, probability.tolist(), unlike.tolist(), strict=True):
        reasons = [f"probability below {_MIN_PROBABILITY:.0%}"] if share < _MIN_PROBABILITY else []
        reasons += ["unlike the training images"] if is_unlike else []
        notes.append(NO_INK if not image.any() else f"uncertain: {', '.join(reasons)}" if reasons else "")
    return notes


def _compute_features(images: torch.Tensor) -> torch.Tensor:
    """Returns the mean brightness of overlapping squares of 4 x 4 pixels as vectors of length 1, [N, squares]."""
    return F.normalize(F.avg_pool2d(images[:, None].float(), 4, stride=2, padding=1).flatten(1), dim=1)


def _nearest_similarity(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns the largest cosine similarity of each row to the others, [N]."""
    return torch.cat([(part @ others.T).amax(dim=1) for part in rows.split(_ROWS)])
