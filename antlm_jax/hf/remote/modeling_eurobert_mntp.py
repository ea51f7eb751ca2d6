# SPDX-License-Identifier: Apache-2.0
"""EuroBERT that predicts a masked token one position before it.

That is masked next-token prediction (arXiv 2410.24159). All else is as in
transformers, whose classes these are under another model type: its own would
open the folder as well, and give a mask the scores of the token after it.
"""

import torch
from torch.nn import functional as F
from transformers import (
  EuroBertConfig,
  EuroBertForMaskedLM,
  EuroBertForSequenceClassification,
  EuroBertForTokenClassification,
  EuroBertModel,
)
from transformers.utils import can_return_tuple


class EuroBertMntpConfig(EuroBertConfig):
  """The shape of a EuroBERT."""

  model_type = "eurobert_mntp"


class EuroBertMntpModel(EuroBertModel):
  """The encoder."""

  config_class = EuroBertMntpConfig


class EuroBertMntpForMaskedLM(EuroBertForMaskedLM):
  """Predicts masked tokens."""

  config_class = EuroBertMntpConfig

  @can_return_tuple
  def forward(self, input_ids, attention_mask=None, labels=None, **options):
    """Predicts the token at every mask, and elsewhere the next token.

    The logits at a mask are those of the position before it, and elsewhere the
    position's own. At a row's first token a mask has none: its logits are 0,
    and no label there is counted. A padded row is best padded on the right, or
    its first token is predicted from padding.

    Args:
      input_ids: `[B, T]`.
      attention_mask: As EuroBERT's.
      labels: Which token each is, `[B, T]`; -100 where it is not asked for.
      **options: As EuroBERT's, `inputs_embeds` aside.

    Returns:
      Logits `[B, T, V]`, and with labels the loss, their mean.
    """
    if labels is not None:  # each beside the logits that predict it
      labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    output = super().forward(
      input_ids, attention_mask, labels=labels, **options, return_dict=True
    )
    masked = (input_ids == self.config.mask_token_id)[..., None]
    before = F.pad(output.logits[:, :-1], (0, 0, 1, 0))
    output.logits = torch.where(masked, before, output.logits)
    return output


class EuroBertMntpForSequenceClassification(EuroBertForSequenceClassification):
  """Classifies texts."""

  config_class = EuroBertMntpConfig


class EuroBertMntpForTokenClassification(EuroBertForTokenClassification):
  """Classifies every token."""

  config_class = EuroBertMntpConfig


# So that save_pretrained writes this code beside the weights.
EuroBertMntpConfig.register_for_auto_class()
EuroBertMntpModel.register_for_auto_class("AutoModel")
for _task in (
  EuroBertMntpForMaskedLM,
  EuroBertMntpForSequenceClassification,
  EuroBertMntpForTokenClassification,
):
  _task.register_for_auto_class(
    _task.__name__.replace("EuroBertMntp", "AutoModel")
  )
