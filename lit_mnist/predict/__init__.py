"""Predictions of the test set or of a user's images."""

from __future__ import annotations

import torch

# Indices, int64 [batch]; predicted classes, int64 [batch]; and their probabilities, float32 [batch].
Prediction = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
