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


def find_masks(model, input_ids, inputs_embeds):
  """Returns which tokens are masks, bool `[B, T]`.

  Vectors are masks if they equal the mask's vector.
  """
  mask = model.config.mask_token_id
  if input_ids is not None:
    return input_ids == mask
  mask = torch.tensor(mask, device=inputs_embeds.device)
  return (inputs_embeds == model.get_input_embeddings()(mask)).all(-1)


def at_masks(logits, masks):
  """Replaces logits `[B, T, V]` at masks `[B, T]` with those one before."""
  before = F.pad(logits[:, :-1], (0, 0, 1, 0))
  return torch.where(masks[..., None], before, logits)
