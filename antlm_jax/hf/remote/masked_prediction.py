# SPDX-License-Identifier: Apache-2.0
"""Masked prediction in place, or one position before the mask.

In masked next-token prediction (arXiv 2410.24159, config.mask_shift = 1), the
position before a mask predicts the masked token. Then the model returns the
logits of the position before at a mask, and their own logits at other tokens.
A mask in the first position has logits 0, and its label does not count. Pad
rows on the right, because padding on the left would predict their first token.
"""

import torch
from torch.nn import functional as F


def next_labels(labels):
  """Moves labels `[B, T]` to the positions before them, and appends -100."""
  return F.pad(labels[:, 1:], (0, 1), value=-100)


def at_masks(logits, input_ids, mask_token_id):
  """Replaces logits `[B, T, V]` at masks with those one position before."""
  masked = (input_ids == mask_token_id)[..., None]
  return torch.where(masked, F.pad(logits[:, :-1], (0, 0, 1, 0)), logits)
