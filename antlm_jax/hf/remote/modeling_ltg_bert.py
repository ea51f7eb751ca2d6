# SPDX-License-Identifier: Apache-2.0
"""LTG-BERT (arXiv 2303.09859) and GPT-BERT (arXiv 2410.24159) in PyTorch.

Positions are relative. Each attention score adds terms of the query and of the
key for the bucket of their distance (DeBERTa, arXiv 2006.03654). Only the mask
decides which keys a token sees, so the same weights are causal
(`LtgBertForCausalLM`) or bidirectional (`LtgBertForMaskedLM`). There is no
cache of keys and values, so generation encodes the whole row for each token.

Shapes: rows B, tokens T, heads N, head width H, hidden width D = N H, buckets
of distances C, vocabulary V.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import (
  BaseModelOutput,
  CausalLMOutput,
  MaskedLMOutput,
  SequenceClassifierOutput,
  TokenClassifierOutput,
)

from .configuration_ltg_bert import LtgBertConfig
from .masked_prediction import at_masks, find_masks, next_labels

# -------------------------------------------------------------------- layers


def _layer_norm(config, width, affine=False):
  eps = config.layer_norm_eps
  return nn.LayerNorm(width, eps=eps, elementwise_affine=affine)


class LtgBertAttention(nn.Module):
  """Attention with relative position terms, and a norm before and after it.

  It uses scaled_dot_product_attention, with the position terms as a bias,
  unless you ask for the weights or for `attn_implementation="eager"`.
  """

  def __init__(self, config):
    super().__init__()
    self.config = config
    width = config.hidden_size
    self.scale = (3 * config.head_width) ** -0.5  # a score has three terms
    self.norm = _layer_norm(config, width)
    self.q_proj = nn.Linear(width, width)
    self.k_proj = nn.Linear(width, width)
    self.v_proj = nn.Linear(width, width)
    if config.attention_gate:
      self.g_proj = nn.Linear(width, width)
    self.o_proj = nn.Linear(width, width)
    gated = config.attention_gate
    self.out_norm = _layer_norm(config, width, affine=not gated)
    self.dropout = nn.Dropout(config.hidden_dropout_prob)

  def forward(self, x, relative, buckets, mask, with_weights):
    """Attends.

    Args:
      x: Hidden states `[B, T, D]`.
      relative: Embeddings of the buckets, `[C, D]`.
      buckets: Bucket of the distance from each query to each key, `[T, T]`.
      mask: Term added to the scores, `[B or 1, 1, T, T]`.
      with_weights: Whether to return the attention weights.

    Returns:
      The sublayer's output, and the attention weights `[B, N, T, T]` or None.
    """
    x = self.norm(x)
    q, k, v = (
      self._heads(projection(x))
      for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    bias = mask + self.scale * self._position_terms(q, k, relative, buckets)
    rate = self.config.attention_probs_dropout_prob if self.training else 0.0
    if self.config._attn_implementation == "sdpa" and not with_weights:
      weights = None
      y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, dropout_p=rate, scale=self.scale
      )
    else:
      scores = self.scale * (q @ k.mT) + bias
      weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
      weights = F.dropout(weights, rate)
      y = weights @ v
    y = y.transpose(1, 2).flatten(2)
    if self.config.attention_gate:
      y = self.o_proj(self.out_norm(y * F.gelu(self.g_proj(x))))
    else:
      y = self.out_norm(self.o_proj(y))
    return self.dropout(y), weights if with_weights else None

  def _heads(self, x):
    """Reshapes `[..., T, D]` to `[..., N, T, H]`."""
    return x.unflatten(-1, (-1, self.config.head_width)).transpose(-2, -3)

  def _position_terms(self, q, k, relative, buckets):
    """Returns the terms that distances add to the scores, `[B, N, T, T]`."""
    # Tokens and positions share the projections.
    relative = self.dropout(relative)
    of_query = q @ self._heads(self.k_proj(relative)).mT
    of_key = k @ self._heads(self.q_proj(relative)).mT
    shape = (*q.shape[:2], *buckets.shape)
    of_query = of_query.gather(-1, buckets.expand(shape))
    return of_query + of_key.gather(-1, buckets.mT.expand(shape)).mT


class LtgBertMLP(nn.Module):
  """Gated MLP with a norm before each product."""

  def __init__(self, config, index):
    super().__init__()
    width, inner = config.hidden_size, config.intermediate_size
    self.norm = _layer_norm(config, width)
    self.gate_proj = nn.Linear(width, inner, bias=False)
    self.up_proj = nn.Linear(width, inner, bias=False)
    self.inner_norm = _layer_norm(config, inner)
    self.down_proj = nn.Linear(inner, width, bias=False)
    self.dropout = nn.Dropout(config.hidden_dropout_prob)
    for linear in (self.gate_proj, self.up_proj, self.down_proj):
      linear.init_scale = (0.5 / (1 + index)) ** 0.5  # smaller in deep layers

  def forward(self, x):
    x = self.norm(x)
    y = self.up_proj(x) * F.gelu(self.gate_proj(x), approximate="tanh")
    return self.dropout(self.down_proj(self.inner_norm(y)))


class LtgBertLayer(nn.Module):
  """Attention and the MLP, each added to its input."""

  def __init__(self, config, index):
    super().__init__()
    self.self_attn = LtgBertAttention(config)
    self.mlp = LtgBertMLP(config, index)

  def forward(
    self, x, relative, buckets, mask, with_weights, depth=None, *earlier
  ):
    """Runs the layer. Gradient checkpointing needs flat inputs and outputs.

    Args:
      x: Input `[B, T, D]`.
      relative: See `LtgBertAttention.forward`, like the next three.
      buckets: Buckets of distances.
      mask: Term added to the scores.
      with_weights: Whether to return the attention weights.
      depth: Weights of earlier outputs in each sublayer's output, `[2n + 1]`,
        or None to pass on only the last output.
      *earlier: The n - 1 outputs of the embeddings and of earlier sublayers.

    Returns:
      The next layer's input, the attention weights or None, and the outputs of
      both sublayers.
    """
    y, weights = self.self_attn(x, relative, buckets, mask, with_weights)
    x = first = x + y
    if depth is not None:
      x = _weighted(depth[: len(earlier) + 1], (*earlier, first))
    x = second = x + self.mlp(x)
    if depth is not None:
      x = _weighted(depth[len(earlier) + 1 :], (*earlier, first, second))
    return x, weights, first, second


def _weighted(weights, outputs):
  return sum(w * y for w, y in zip(weights, outputs, strict=True))


class LtgBertHead(nn.Module):
  """Output layer, which uses the input embeddings."""

  def __init__(self, config):
    super().__init__()
    width = config.hidden_size
    self.norm = _layer_norm(config, width)
    self.dense = nn.Linear(width, width)
    self.out_norm = _layer_norm(config, width)
    self.dropout = nn.Dropout(config.hidden_dropout_prob)
    self.bias = nn.Parameter(torch.zeros(config.vocab_size))

  def forward(self, hidden, embeddings):
    """Returns scores `[..., V]` for states `[..., D]`, embeddings `[V, D]`."""
    x = self.out_norm(F.gelu(self.dense(self.norm(hidden))))
    return F.linear(self.dropout(x), embeddings, self.bias)


# ------------------------------------------------------------------- encoder


class LtgBertPreTrainedModel(PreTrainedModel):
  """Base class: initial weights and outputs."""

  config_class = LtgBertConfig
  base_model_prefix = "model"
  _supports_sdpa = True
  supports_gradient_checkpointing = True
  # Losses are means over a batch, so a trainer must not rescale them.
  accepts_loss_kwargs = False

  def _init_weights(self, module):
    """Draws weights from a normal distribution, truncated at 2 deviations."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
      std = self.config.initializer_range * getattr(module, "init_scale", 1.0)
      nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
    elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
      nn.init.ones_(module.weight)
    if isinstance(getattr(module, "bias", None), nn.Parameter):
      nn.init.zeros_(module.bias)
    if isinstance(getattr(module, "depth_weights", None), nn.Parameter):
      # Initially, each sublayer reads only the preceding output.
      sublayers = 2 * self.config.num_hidden_layers
      rows = [torch.eye(n)[-1] for n in range(2, sublayers + 2)]
      with torch.no_grad():
        module.depth_weights.copy_(torch.cat(rows))

  def get_output_embeddings(self):
    """Returns None, because the head uses the input embeddings."""
    return None

  def _run(self, kind, input_ids, attention_mask, options, score):
    """Encodes tokens, and applies a function to the hidden states.

    Args:
      kind: Class of the output.
      input_ids: `[B, T]`.
      attention_mask: See `LtgBertModel.forward`.
      options: Further arguments of `LtgBertModel.forward`.
      score: Function from hidden states `[B, T, D]` to logits and the loss.

    Returns:
      The output, or a tuple without `return_dict`.
    """
    return_dict = options.pop("return_dict", None)
    encoded = self.model(input_ids, attention_mask, return_dict=True, **options)
    logits, loss = score(encoded.last_hidden_state)
    output = kind(
      loss=loss,
      logits=logits,
      hidden_states=encoded.hidden_states,
      attentions=encoded.attentions,
    )
    return self._in_form(output, return_dict)

  def _in_form(self, output, return_dict):
    if return_dict is None:
      return_dict = self.config.return_dict
    return output if return_dict else output.to_tuple()


class LtgBertModel(LtgBertPreTrainedModel):
  """Encoder that maps tokens to hidden states."""

  def __init__(self, config):
    super().__init__(config)
    width, layers = config.hidden_size, config.num_hidden_layers
    self.embed_tokens = nn.Embedding(config.vocab_size, width)
    self.embedding_norm = _layer_norm(config, width)
    buckets = len(config.distance_edges) + 1
    self.relative_embedding = nn.Embedding(buckets, width)
    self.relative_norm = _layer_norm(config, width, affine=True)
    self.dropout = nn.Dropout(config.hidden_dropout_prob)
    self.layers = nn.ModuleList(LtgBertLayer(config, i) for i in range(layers))
    if config.depth_weights:
      # Each sublayer has a weight for each of the n earlier outputs.
      count = sum(range(2, 2 * layers + 2))
      self.depth_weights = nn.Parameter(torch.zeros(count))
    self.gradient_checkpointing = False  # set by the base class
    self.post_init()

  def get_input_embeddings(self):
    return self.embed_tokens

  def set_input_embeddings(self, value):
    self.embed_tokens = value

  def forward(
    self,
    input_ids=None,
    attention_mask=None,
    is_causal=None,
    output_attentions=None,
    output_hidden_states=None,
    return_dict=None,
    inputs_embeds=None,
  ):
    """Encodes tokens.

    Args:
      input_ids: Token ids `[B, T]`.
      attention_mask: 1 for a token and 0 for padding, on either side, `[B, T]`.
        Or the keys that each query sees, including causality, `[B, 1, T, T]`:
        1 for a visible key or, if floating, a term added to the scores.
      is_causal: Whether later tokens are hidden; default config.is_decoder.
      output_attentions: Whether to return each layer's attention weights.
      output_hidden_states: Whether to return the embeddings and each layer's
        output.
      return_dict: Whether to return an object instead of a tuple.
      inputs_embeds: Vectors of the tokens instead of their ids, `[B, T, D]`.

    Returns:
      Hidden states `[B, T, D]`. The last norm is in the heads.

    Raises:
      ValueError: There are both ids and vectors, or neither.
    """
    if (input_ids is None) == (inputs_embeds is None):
      raise ValueError("give either input_ids or inputs_embeds")
    config = self.config
    if is_causal is None:
      is_causal = config.is_decoder
    if output_attentions is None:
      output_attentions = config.output_attentions
    if output_hidden_states is None:
      output_hidden_states = config.output_hidden_states
    if inputs_embeds is None:
      inputs_embeds = self.embed_tokens(input_ids)
    x = self.dropout(self.embedding_norm(inputs_embeds))
    # The bucket of a distance is the number of edges up to it, `[T, T]`.
    edges = torch.tensor(config.distance_edges, device=x.device)
    at = torch.arange(x.shape[1], device=x.device)
    buckets = torch.bucketize(at[:, None] - at, edges, right=True)
    attention_inputs = (
      self.relative_norm(self.relative_embedding.weight),
      buckets,
      _additive_mask(attention_mask, x, is_causal),
      output_attentions,
    )
    states, attentions, earlier = [x], [], (x,)
    for layer in self.layers:
      inputs = x, *attention_inputs
      if config.depth_weights:
        inputs = *inputs, self._depth(len(earlier) + 1), *earlier
      x, weights, *outputs = self._run_layer(layer, inputs)
      states.append(x)
      attentions.append(weights)
      earlier = *earlier, *outputs
    output = BaseModelOutput(
      last_hidden_state=x,
      hidden_states=tuple(states) if output_hidden_states else None,
      attentions=tuple(attentions) if output_attentions else None,
    )
    return self._in_form(output, return_dict)

  def _run_layer(self, layer, inputs):
    if self.gradient_checkpointing and self.training:
      return self._gradient_checkpointing_func(layer.__call__, *inputs)
    return layer(*inputs)

  def _depth(self, n):
    """Returns a layer's weights of n and then n + 1 outputs, `[2n + 1]`."""
    begin = n * (n - 1) // 2 - 1  # earlier sublayers have 2, 3, ..., n - 1
    return self.depth_weights[begin : begin + 2 * n + 1]


def _additive_mask(attention_mask, x, is_causal):
  """Returns the mask as a term of the scores, `[B or 1, 1, T, T]`.

  `x` `[B, T, D]` has the scores' dtype and device; see `LtgBertModel.forward`.
  """
  lowest = torch.finfo(x.dtype).min
  ready = attention_mask is not None and attention_mask.dim() == 4
  if ready and attention_mask.is_floating_point():
    # With -inf, the softmax of a fully hidden row would be NaN.
    return attention_mask.to(x.dtype).clamp(min=lowest)
  tokens = x.shape[1]
  seen = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=x.device)
  if ready:
    seen = attention_mask.bool()
  elif is_causal:
    seen = seen.tril()
  if attention_mask is not None and not ready:
    seen = seen & attention_mask[:, None, None, :].bool()
    # Let padding see itself, because it must see something.
    seen = seen | torch.eye(tokens, dtype=torch.bool, device=x.device)
  return x.new_zeros(seen.shape).masked_fill(~seen, lowest)


# ---------------------------------------------------------- language modeling


class LtgBertLMModel(LtgBertPreTrainedModel):
  """Base class of both language models: the encoder and its head."""

  def __init__(self, config):
    super().__init__(config)
    self.model = LtgBertModel(config)
    self.lm_head = LtgBertHead(config)
    self.post_init()

  def resize_token_embeddings(self, *args, **options):
    """Changes the size of the vocabulary; new tokens get a bias of 0."""
    embeddings = super().resize_token_embeddings(*args, **options)
    bias = self.lm_head.bias
    added = embeddings.num_embeddings - len(bias)
    self.lm_head.bias = nn.Parameter(F.pad(bias.detach(), (0, added)))
    return embeddings

  def _logits(self, hidden):
    return self.lm_head(hidden, self.model.embed_tokens.weight)


class LtgBertForMaskedLM(LtgBertLMModel):
  """Predicts masked tokens with bidirectional attention."""

  def forward(
    self, input_ids=None, attention_mask=None, labels=None, **options
  ):
    """Returns logits `[B, T, V]`, as in `masked_prediction`, and the mean loss.

    Labels are tokens `[B, T]`; -100 does not count. For the other arguments see
    `LtgBertModel.forward`.
    """
    shift = self.config.mask_shift

    def score(hidden):
      logits, loss = self._logits(hidden), None
      if labels is not None:
        loss = _cross_entropy(logits, next_labels(labels) if shift else labels)
      if shift:
        masks = find_masks(self, input_ids, options.get("inputs_embeds"))
        logits = at_masks(logits, masks)
      return logits, loss

    options["is_causal"] = False
    return self._run(MaskedLMOutput, input_ids, attention_mask, options, score)


class LtgBertForCausalLM(LtgBertLMModel, GenerationMixin):
  """Predicts next tokens with causal attention."""

  def forward(
    self,
    input_ids=None,
    attention_mask=None,
    labels=None,
    logits_to_keep=0,
    **options,
  ):
    """Returns logits `[B, T, V]` of next tokens, and the mean loss.

    Labels are the tokens `[B, T]`; -100 does not count. They need the logits of
    all positions, not only the last `logits_to_keep`. For the other arguments
    see `LtgBertModel.forward`.
    """

    def score(hidden):
      logits, loss = self._logits(hidden[:, -logits_to_keep:]), None
      if labels is not None:
        loss = _cross_entropy(logits, next_labels(labels))
      return logits, loss

    options["is_causal"] = True
    return self._run(CausalLMOutput, input_ids, attention_mask, options, score)

  def prepare_inputs_for_generation(
    self, input_ids, attention_mask=None, inputs_embeds=None, **kwargs
  ):
    """Passes the whole row for each token, because there is no cache."""
    passed = ("logits_to_keep", "output_attentions", "output_hidden_states")
    if inputs_embeds is None:
      row = {"input_ids": input_ids}
    else:  # vectors of the prompt, then the generated tokens
      new = self.model.embed_tokens(input_ids)
      row = {"inputs_embeds": torch.cat([inputs_embeds, new], dim=1)}
    return {
      **row,
      "attention_mask": attention_mask,
      **{name: kwargs[name] for name in passed if name in kwargs},
    }


# ------------------------------------------------------------- classification


class LtgBertClassifier(LtgBertPreTrainedModel):
  """Base class of both classifiers: the encoder and a linear layer."""

  def __init__(self, config):
    super().__init__(config)
    self.model = LtgBertModel(config)
    rate = config.classifier_dropout
    rate = config.hidden_dropout_prob if rate is None else rate
    self.dropout = nn.Dropout(rate)
    self.classifier = nn.Linear(config.hidden_size, config.num_labels)
    self.post_init()


class LtgBertForSequenceClassification(LtgBertClassifier):
  """Classifies texts by the first, the last or the mean hidden state."""

  def __init__(self, config):
    super().__init__(config)
    self.dense = nn.Linear(config.hidden_size, config.hidden_size)
    self.post_init()

  def forward(
    self, input_ids=None, attention_mask=None, labels=None, **options
  ):
    """Returns logits `[B, num_labels]` and the mean loss.

    The mask is 1 for a token and 0 for padding, `[B, T]`. Labels are classes
    `[B]`. For a regression, they are numbers `[B]` or `[B, num_labels]`. For
    several labels per text, they are 0 or 1 for each label.
    `LtgBertModel.forward` documents the options.

    Raises:
      ValueError: The mask has another shape.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
      raise ValueError("a text classifier needs a mask of shape [B, T]")

    def score(hidden):
      x = self._pooled(hidden, attention_mask)
      if self.config.classifier_norms:
        x = _plain_norm(F.gelu(self.dense(_plain_norm(x))))
      else:
        x = F.gelu(self.dense(x))
      logits, loss = self.classifier(self.dropout(x)), None
      if labels is not None:
        loss = ForSequenceClassificationLoss(labels, logits, self.config)
      return logits, loss

    kind = SequenceClassifierOutput
    return self._run(kind, input_ids, attention_mask, options, score)

  def _pooled(self, hidden, attention_mask):
    """Returns a vector for each row, `[B, D]`."""
    if attention_mask is None:
      attention_mask = hidden.new_ones(hidden.shape[:2])
    real = (attention_mask != 0).long()
    if self.config.classifier_pooling == "mean":
      total = (hidden * real[..., None]).sum(dim=1)
      return total / real.sum(dim=1, keepdim=True)
    if self.config.classifier_pooling == "first":
      at = real.argmax(dim=1)  # index of the first 1
    else:
      at = real.shape[1] - 1 - real.flip(1).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), at]


class LtgBertForTokenClassification(LtgBertClassifier):
  """Classifies each token by its hidden state."""

  def forward(
    self, input_ids=None, attention_mask=None, labels=None, **options
  ):
    """Returns logits `[B, T, num_labels]` and the mean loss.

    Labels are classes `[B, T]`; -100 does not count. `LtgBertModel.forward`
    documents the other arguments.
    """

    def score(hidden):
      logits = self.classifier(self.dropout(hidden))
      return logits, None if labels is None else _cross_entropy(logits, labels)

    kind = TokenClassifierOutput
    return self._run(kind, input_ids, attention_mask, options, score)


def _plain_norm(x):
  return F.layer_norm(x, x.shape[-1:], eps=1e-5)


def _cross_entropy(logits, labels):
  """Returns the mean over labels that are not -100, in nats, float32 `[]`."""
  return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


# Makes save_pretrained copy this code.
LtgBertModel.register_for_auto_class("AutoModel")
for _task in (
  LtgBertForCausalLM,
  LtgBertForMaskedLM,
  LtgBertForSequenceClassification,
  LtgBertForTokenClassification,
):
  _task.register_for_auto_class(_task.__name__.replace("LtgBert", "AutoModel"))
