"""The runtime analysis: what a draft gains, what it costs, and the terms that the theorem leaves out.

Letters of Leviathan, Kalman, Matias (arXiv 2211.17192v2): `alpha` is the acceptance rate, `gamma` the number of
draft tokens a round.  The unit of time is *one target pass over one position*; so the cost coefficient `c` is the
time of one draft pass, `v(n)` the time of a target pass over `n` positions, and prefill counts target passes too.
Whatever the decoder adds to a pass (sampling, the rule, book-keeping) belongs to the pass that is timed.

Two families:

* *plain* functions take numbers or arrays `alpha`, `gamma`, `cost_coefficient`, and broadcast them;
* *extended* functions take `alphas` `[..., gamma]`, the acceptance at draft position `i` given that the `i - 1`
  tokens before it were accepted; leading axes are a batch (of texts, say) and broadcast with the other arguments.

Derived in `notebooks/04_cost_versus_acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .acceptance_rate import pooled_alpha, survival
from .errors import SpecdecError
