"""Rules that change the output on purpose, each with the law that it really samples from.

They are made by a function of their parameter and are verifiers like any other:

| rule | law of the output |
|---|---|
| `lenience(l)` | no token above `p(x) / l`; which law depends on a residual that the paper leaves open |
| `lenience_greedy(l)` | temperature 0; no law, a text of tokens with at least `l` times the largest probability |
| `ensemble(w)` | exactly the mixture `w p + (1 - w) q` |
| `ensemble(w, bonus="target")` | the mixture at drafted positions, `p` at the bonus: depends on where blocks end |
| `typical()` | none that can be named: it depends on what was drafted |

Derived in `notebooks/08_lossy_on_purpose`; `tests/test_verify.py` computes each law in fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..distributions import Array, one_hot, residual
from ..errors import SpecdecError
from . import Verifier, greedy
from .token import at, keep

RESIDUALS = ("p-q", "p-lq")
BONUSES = ("mixture", "target")


def in_order(kept: Callable[[Array, Array, Sequence[int]], list]) -> Callable[[Array, Array, Sequence[int]], list]:
    """The law of the accepted length when token after token is kept with the probabilities `kept(p, q, x)`."""

    def accepted(p: Array, q: Array, x: Sequence[int]) -> list:
        law, reached = [], 1
        for a in kept(p, q, x):
            law.append(reached * (1 - a))
            reached = reached * a
        return [*law, reached]

    return accepted


def lenience(l: Any, residual_of: str = "p-q") -> Verifier:  # noqa: E741
    """Keep a draft token with `min(1, p(x) / (l q(x)))`: Leviathan et al., appendix A.5.

    No token is emitted with probability above `p(x) / l`.  The paper does not say what a rejected token is
    replaced from.  Both readings respect the bound and they are different laws:

    * `"p-q"`: `max(p - q, 0)`, the residual left as it is;
    * `"p-lq"`: `max(p - l q, 0)`, the residual of the comparison that was made.

    Args:
        l: lenience in (0, 1]; 1 is the token rule.
        residual_of: one of `RESIDUALS`.

    >>> import numpy as np
    >>> lenience(0.5).accepted(np.array([[0.25, 0.75]] * 2), np.array([[0.75, 0.25]]), [0])[1].__round__(3)
    0.667
    """
    if not 0 < l <= 1:
        raise SpecdecError(f"lenience must be in (0, 1], got {l}: 1 is the exact rule, smaller is more lenient")
    if residual_of not in RESIDUALS:
        raise SpecdecError(f"unknown residual {residual_of!r} for lenience: use one of {', '.join(RESIDUALS)}")
    scale = l if residual_of == "p-lq" else 1

    def kept(p: Array, q: Array, x: Sequence[int]) -> list:
        return [keep(p_x, l * q_x) for p_x, q_x in zip(at(p, x), at(q, x), strict=True)]

    def correction(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
        return p[n] if n == len(x) else residual(p[n], scale * q[n])

    source = "Leviathan et al., arXiv 2211.17192, appendix A.5"
    return Verifier(f"lenience({l}, {residual_of})", in_order(kept), correction, l == 1, source)


def lenience_greedy(l: Any) -> Verifier:  # noqa: E741
    """At temperature 0, keep a draft token while `p(x) >= l max p`; correct with the target's best token.

    The paper prints `<=`, under which `l = 1` would accept everything; its own table (alpha = 0.75 at `l = 1`)
    needs `>=` (Leviathan et al., appendix A.5).

    >>> import numpy as np
    >>> lenience_greedy(0.5).accepted(np.array([[0.4, 0.6], [0.1, 0.9], [0.5, 0.5]]), None, [0, 0])
    [0, 1, 0]
    """
    if not 0 < l <= 1:
        raise SpecdecError(f"lenience must be in (0, 1], got {l}: 1 is the exact rule, smaller is more lenient")

    def kept(p: Array, q: Array, x: Sequence[int]) -> list:
        return [int(p_x >= l * max(row.tolist())) for p_x, row in zip(at(p, x), p[: len(x)], strict=True)]

    source = "Leviathan et al., arXiv 2211.17192, appendix A.5"
    return Verifier(f"lenience_greedy({l})", in_order(kept), greedy.correction, l == 1, source)


def ensemble(w: Any, bonus: str = "mixture") -> Verifier:
    """Verify against the mixture `v = w p + (1 - w) q`: DIVERSE, arXiv 2604.07622.

    A draft token is kept with `min(1, v(x) / q(x))`, which is `1 - w + w p(x) / q(x)` up to 1; the residual
    `max(v - q, 0)` is `w max(p - q, 0)`, the usual one after normalisation.

    * `bonus="mixture"`: the token after a fully accepted draft comes from `v` as well.  The output law is exactly
      that of the model `v`, at total variation `(1 - w) TV(p, q)` per token.  `q` must have `g + 1` rows: the
      draft is asked for one more law.
    * `bonus="target"`: that token comes from `p`, as `transformers` does with `assistant_ensemble_weight`
      (transformers issue 45865).  The output law is neither p nor v, and changes with gamma.

    Args:
        w: weight of the target in [0, 1]; 1 is the token rule.
        bonus: one of `BONUSES`.

    >>> import numpy as np
    >>> ensemble(0.5).accepted(np.array([[0.25, 0.75]] * 2), np.array([[0.5, 0.5]] * 2), [0])
    [0.25, 0.75]
    """
    if not 0 <= w <= 1:
        raise SpecdecError(f"ensemble weight must be in [0, 1], got {w}: 1 is the target alone, 0 the draft alone")
    if bonus not in BONUSES:
        raise SpecdecError(f"unknown bonus {bonus!r} for ensemble: use one of {', '.join(BONUSES)}")

    def kept(p: Array, q: Array, x: Sequence[int]) -> list:
        return [keep(w * p_x + (1 - w) * q_x, q_x) for p_x, q_x in zip(at(p, x), at(q, x), strict=True)]

    def correction(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
        if n < len(x):
            return residual(p[n], q[n])
        if bonus == "target":
            return p[n]
        if len(q) == len(x):
            raise SpecdecError("ensemble with its bonus from the mixture needs the draft's law after its last token: "
                               "pass q with g + 1 rows, or use bonus='target'")  # fmt: skip
        return w * p[n] + (1 - w) * q[n]

    source = "DIVERSE, arXiv 2604.07622"
    return Verifier(f"ensemble({w}, {bonus})", in_order(kept), correction, w == 1, source)


def threshold(law: Array, epsilon: Any, delta: Any) -> Any:
    """`min(epsilon, delta exp(-H(p)))`, the probability that a token must exceed to be called typical."""
    entropy = -sum(float(x) * math.log(x) for x in law.tolist() if x > 0)
    return min(epsilon, delta * math.exp(-entropy))


def typical(epsilon: Any = 0.09, delta: Any = 0.3) -> Verifier:
    """Keep a draft token while `p(x) > min(epsilon, delta exp(-H(p)))`: Medusa, arXiv 2401.10774.

    The draft's law plays no part and the token that follows is the target's most probable one, as in Medusa's
    `evaluate_posterior` and `generate_candidates` (whose defaults these are).  What is sampled is therefore the
    draft's law cut to the typical tokens, not any law of the target's.

    The entropy is a float; the decision it leads to is yes or no, so exact arithmetic stays exact.

    >>> import numpy as np
    >>> typical().accepted(np.array([[0.9, 0.1], [0.95, 0.05], [0.5, 0.5]]), None, [1, 1])
    [0, 1, 0]
    """

    def kept(p: Array, q: Array, x: Sequence[int]) -> list:
        return [int(p_x > threshold(row, epsilon, delta)) for p_x, row in zip(at(p, x), p[: len(x)], strict=True)]

    def correction(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
        return one_hot(p[n].argmax(-1), p[n])

    return Verifier(f"typical({epsilon}, {delta})", in_order(kept), correction, False, "Medusa, arXiv 2401.10774")
