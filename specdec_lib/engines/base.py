"""One protocol for whoever decodes: an engine writes new tokens after prompts and says how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..decode import Round
from ..sampling import SamplingParams


@dataclass(frozen=True)
class Reply:
    """What an engine wrote after one prompt.

    Attributes:
        tokens: the new ids, an end-of-sequence token included.
        seconds: from the prompt's ids to the last new token.
        first: from the prompt's ids to the first new token, or the first few, where a round gives several; NaN where
            the engine does not tell.
        trace: the rounds; empty for an engine that does not show them.
    """

    tokens: list[int]
    seconds: float
    first: float = float("nan")
    trace: list[Round] = field(default_factory=list)


class Engine:
    """Writes text with one target, plainly or with one draft.

    An engine of your own is one file: a subclass that overrides `run` and sets `name`.

    Attributes:
        name: as it stands in tables.
    """

    name: str

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        params: SamplingParams,
        seed: int = 0,
        ends: Sequence[int] = (),
    ) -> list[Reply]:
        """Decode each prompt.

        Args:
            prompts: token ids of each.
            new_tokens: exactly so many, fewer only where a text ends with one of `ends`.
            params: temperature and truncations; processors where the engine takes them.
            seed: of all draws.  The same seed gives the same texts; the caller's random state is left as it was.
            ends: ids that end a text.

        Returns:
            One `Reply` a prompt, in order.

        Raises:
            SpecdecError: for what the engine cannot do, in one line that says what to do instead.
        """
        raise NotImplementedError


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator; on a CPU nothing is under way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
