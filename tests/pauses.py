"""Plugin that scales down the time for which a failing bucket is tried again.

The environment variable ANTLM_TEST_TRIES has the seconds of antlm's tries.
"""

import asyncio
import os
import types
from collections.abc import Callable

import gcsfs.retry

from antlm_jax.runtime import buckets

TRIES = "ANTLM_TEST_TRIES"


def shorten(set_value: Callable, tries: float) -> None:
  """Has gcsfs try again at once, and antlm for `tries` seconds.

  `set_value` sets an attribute: of an object, by its name, to a value.
  """

  async def sleep(seconds: float) -> None:
    await asyncio.sleep(0)

  set_value(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=sleep))
  set_value(buckets, "TRIES", tries)
  set_value(buckets, "_PAUSES", (0.01, 0.5))


if TRIES in os.environ:
  shorten(setattr, float(os.environ[TRIES]))
