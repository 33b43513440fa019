"""The rule: how many draft tokens are kept, and the distribution of the token that follows.

A verifier is two functions of the probabilities and the draft.  They know no model and draw nothing, so the same code
runs in the decoder (torch), in simulations (numpy) and in proofs (fractions), and is shown in the notebooks.

Shapes, for a draft of `g` tokens over a vocabulary of `V`:

* `p` `[g + 1, V]`: the target's distribution at each draft position and after the last one;
* `q` `[g, V]`: the distribution that each draft token was truly drawn from;
* `x`: the `g` draft tokens, a sequence of ints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..distributions import Array
from ..errors import SpecdecError
from . import block, greedy, token


@dataclass(frozen=True)
class Verifier:
    """A rule, by its two functions.

    Attributes:
        name: the name that users write.
        accepted: `(p, q, x) -> [P(n = 0), ..., P(n = g)]`, which sum to 1: a list of numbers, or a tensor like p.
        correction: `(p, q, x, n) -> [V]`, the distribution of the token after `n` accepted ones.
        lossless: whether the output distribution is the target's.
        source: the publication that states the rule.
        greedy_from_target_probs: whether the rule decodes at temperature 0 from the target's distribution
            at temperature 1.
        needs_bonus_draft_probs: whether the token after a whole draft depends on the draft's distribution there,
            so that `q` has `g + 1` rows.
        point_mass: whether both results are point masses and depend only on the order of `p`'s entries.  The decoder
            then passes logits, and takes the maximum instead of a draw.
        on_device: whether both functions take tensors for `x` and `n` and never read a value, so that the host does not
            wait for the device.  Other rules are given a list and a number.
    """

    name: str
    accepted: Callable[[Array, Array, Sequence[int]], Any]
    correction: Callable[[Array, Array, Sequence[int], Any], Array]
    lossless: bool
    source: str
    greedy_from_target_probs: bool = field(default=False, kw_only=True)
    needs_bonus_draft_probs: bool = field(default=False, kw_only=True)
    point_mass: bool = field(default=False, kw_only=True)
    on_device: bool = field(default=False, kw_only=True)


LEVIATHAN = "Leviathan et al., arXiv 2211.17192"
VERIFIERS = {
    v.name: v
    for v in [
        Verifier("token", token.accepted, token.correction, True, f"{LEVIATHAN}, Algorithm 1", on_device=True),
        Verifier("block", block.accepted, block.correction, True, "Sun et al., arXiv 2403.10444", on_device=True),
        Verifier(
            "greedy",
            greedy.accepted,
            greedy.correction,
            True,
            f"{LEVIATHAN}, section 2.2",
            point_mass=True,
            on_device=True,
        ),
    ]
}


def get_verifier(name: str | Verifier) -> Verifier:
    """The verifier called `name`; a `Verifier` is returned as it is.

    >>> get_verifier("token").lossless
    True
    """
    if isinstance(name, Verifier):
        return name
    if not isinstance(name, str) or name not in VERIFIERS:
        raise SpecdecError(f"unknown verifier {name!r}: use one of {', '.join(VERIFIERS)}")
    return VERIFIERS[name]
