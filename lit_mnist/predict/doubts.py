"""Which predictions of a user's own images are uncertain, by a stated rule.

An image gets a note where

- it shows no ink: then nothing is predicted;
- the predicted class has a probability below 70 %;
- it is less like the training images of the predicted class than 99 of 100 training images are like others of theirs.

The last part finds what is none of the classes: a network tells these apart, and is often sure of anything else, too.
docs/run-folder.md states how many digits, letters and other images the rule marks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lit_mnist.data.digits.idx import Split

NO_INK = "no ink"
_LEAST_PROBABILITY = 0.7
_UNLIKE = 0.01  # of the training images are called unlike their class
_HELD_OUT = 12  # one training image of so many is compared with the others
_MOST_COMPARED = 60_000
_ROWS = 1000  # compared at once, which bounds the memory


def doubts(images: torch.Tensor, predicted: torch.Tensor, probability: torch.Tensor, training: Split) -> list[str]:
    """Returns for each image what makes its prediction uncertain, or that it shows no ink; else an empty text.

    Args:
        images: Images as the network sees them, uint8 [N, 28, 28], all 0 where there is no ink.
        predicted: The predicted classes, int64 [N].
        probability: The softmax probability of each predicted class, float [N].
        training: The data set's training images.
    """
    inked = images.flatten(1).any(dim=1)
    likeness, least = _likeness(images, predicted, training)
    notes = []
    for ink, share, alike in zip(inked.tolist(), probability.tolist(), (likeness >= least).tolist(), strict=True):
        reasons = [] if share >= _LEAST_PROBABILITY else [f"probability below {_LEAST_PROBABILITY:.0%}"]
        reasons += [] if alike else ["unlike the training images"]
        notes.append((f"uncertain: {', '.join(reasons)}" if reasons else "") if ink else NO_INK)
    return notes


def _likeness(images: torch.Tensor, predicted: torch.Tensor, training: Split) -> tuple[torch.Tensor, float]:
    """Returns how like each image is to the nearest training image of its class, [N], and how like it should be."""
    step = -(-len(training) // _MOST_COMPARED)
    known, labels = training.images[::step], training.labels[::step]
    held = torch.arange(len(known)) % _HELD_OUT == 0
    likeness, of_held = torch.zeros(len(images)), []
    for number in labels.unique().tolist():
        others = _features(known[(labels == number) & ~held])
        if len(others):
            of_held.append(_nearest(_features(known[(labels == number) & held]), others))
            rows = predicted == number
            likeness[rows] = _nearest(_features(images[rows]), others)
    return likeness, float(torch.cat(of_held).quantile(_UNLIKE))


def _features(images: torch.Tensor) -> torch.Tensor:
    """Returns the mean brightness of overlapping squares of 4 x 4 pixels as vectors of length 1, [N, squares]."""
    return F.normalize(F.avg_pool2d(images[:, None].float(), 4, stride=2, padding=1).flatten(1), dim=1)


def _nearest(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns each row's cosine with the nearest of the others, [N]."""
    return torch.cat([(part @ others.T).amax(dim=1) for part in rows.split(_ROWS)])
