# SPDX-License-Identifier: Apache-2.0
"""Masked prediction in place, or one position before the mask.

In masked next-token prediction (arXiv 2410.24159, config.mask_shift = 1) the
position before a mask predicts the masked token. Then the logits returned at a
mask are those of the position before it; at other tokens they are the
position's own. A mask in the first position has logits 0, and its label does
not count. Pad rows on the right, or padding predicts their first token.
"""

import torch
from torch.nn import functional as F


def next_labels(labels):
  """Moves labels `[B, T]` to the positions before them; -100 comes last."""
  return F.pad(labels[:, 1:], (0, 1), value=-100)


def at_masks(logits, input_ids, mask_token_id):
  """Replaces the logits `[B, T, V]` at masks by those one position before."""
  masked = (input_ids == mask_token_id)[..., None]
  return torch.where(masked, F.pad(logits[:, :-1], (0, 0, 1, 0)), logits)
