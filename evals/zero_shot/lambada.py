"""LAMBADA: the last word of a text, given the text before it.

  antlm eval score --task=lambada --checkpoint=RUN --data=lambada.jsonl \\
    --mode=causal

Each record is a text (arXiv 1606.06031), or each line with --documents=line.
The model predicts the part after its last space, or of records with a `prompt`
and an `answer` the answer. As in lm-eval's lambada_openai, a word is right if
each of its tokens is the likeliest after all tokens before it. The perplexity
is per word. A text longer than the context loses its beginning.

The masked modes also predict the tokens of the word one after the other: the
predicted token and those after it are masked (arXiv 2305.10588). So the model
sees their number, and figures do not compare with those of --mode=causal.
"""

import itertools

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import texts
from antlm_jax.evals.zero_shot.command import TASKS, Outcome
from antlm_jax.inference import framing, scoring
from antlm_jax.inference.scoring import Text

_PARTS = {"prompt": "", "answer": ""}  # columns of a record in two parts


def read(asked) -> list[tuple[str, str]]:
  """Reads contexts and their words."""
  rows = readers.records(asked.data, _PARTS)
  try:
    first = [*itertools.islice(rows, 1)]
  except UserError:  # they are whole texts
    first, rows = [], ()
  rows = itertools.islice(itertools.chain(first, rows), asked.limit or None)
  found = [tuple(str(part or "").strip() for part in row) for _, row in rows]
  if not found:
    found = [text.rpartition(" ")[::2] for text in texts.read(asked)]
  for number, (context, word) in enumerate(found, start=1):
    if not context.strip() or not word.strip():
      raise UserError(
        f"{asked.data}, text {number}: no two words in {word!r:.60}"
      )
  return found


def score(loaded, items, asked) -> Outcome:
  """Scores the words after their contexts."""
  wanted = scoring.passes(loaded, asked.mode)
  masked = any(p.masked for p in wanted)
  longest, parts = loaded.model.config.max_seq_len, []
  encoded = scoring.encode(loaded, items, scoring.Format(), wanted)
  for text, (_, word) in zip(encoded, items, strict=True):
    over = max(0, *(p.reads(text) - longest for p in wanted))
    text = Text(text.tokens[over:], text.start - over, text.stop - over)
    if text.start < 1:
      raise UserError(f"the word {word!r:.60} leaves no room for a context")
    parts.append([] if masked else [text])
    # One text for each token, with the tokens after it masked.
    for at in range(text.start, text.stop) if masked else ():
      tokens = text.tokens.copy()
      tokens[at + 1 : text.stop] = framing.mask_id(loaded)
      parts[-1].append(Text(tokens, at, at + 1))
  logprobs, likeliest, _ = texts.score(loaded, parts, wanted, asked)
  right = likeliest == [text.targets for text in encoded]
  summary = {
    "texts": len(items),
    "accuracy": float(right.mean()),
    "word_perplexity": texts.perplexity(-logprobs.mean()),
  }
  rows = zip(items, logprobs.tolist(), right.tolist(), strict=True)
  lines = [
    {"context": context, "word": word, "logprob": nats, "correct": hit}
    for (context, word), nats, hit in rows
  ]
  return Outcome(summary, lines)


TASKS["lambada"] = texts.Task(
  about=__doc__,
  read=read,
  score=score,
  figure="accuracy",
  table={
    "texts": "{texts:,}",
    "accuracy": "{accuracy:.2%}",
    "word perplexity": "{word_perplexity:,.6g}",
  },
)
