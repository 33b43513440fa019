"""Our drafters in transformers' own loop: any `Drafter` as `assistant_model`.

transformers' `generate` has no argument for a candidate generator of one's own.  But it gets a draft by calling the
assistant's `generate`, and takes from the result the text with the draft, and the scores that each token was drawn
from.  So a model whose `generate` returns a drafter's tokens and the logarithm of its distributions works as an
assistant, and transformers' own verification keeps the target's distribution.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from .. import validate
from ..errors import SpecdecError
from ..models.pair import is_encoder_decoder, vocabulary_size
from ..sampling import SamplingParams
from .base import Draft, Drafter


class DrafterAssistant(PreTrainedModel, GenerationMixin):
    """`target.generate(..., assistant_model=DrafterAssistant(drafter, target, gamma=5))`.

    If the drafter has no proposal, which is frequent for a lookup, the last token is proposed again: transformers' loop
    needs at least one token, and the target makes that pass anyway.

    Args:
        drafter: any `Drafter` that does not read its target: that would need a session of ours.
        target: the transformers model that will decode; gives the vocabulary and the device.
        gamma: draft tokens a round.
    """

    def __init__(self, drafter: Drafter, target: Any, gamma: int = 5):
        gamma = validate.whole("gamma", gamma, 1)
        if is_encoder_decoder(target):
            raise SpecdecError("transformers gives an assistant like this no source text: use specdec_lib.generate")
        if not isinstance(drafter, Drafter) or drafter.reads_target:
            raise SpecdecError(
                f"a {type(drafter).__name__} cannot draft in transformers' loop: "
                "give a drafter that starts on its own, such as NGramDrafter or ComposedDrafter"
            )
        config = PretrainedConfig()
        config.vocab_size = vocabulary_size(target)
        super().__init__(config)
        self.drafter = drafter
        self.place = torch.nn.Parameter(torch.empty(0, device=target.device), requires_grad=False)
        self.generation_config = GenerationConfig(
            num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        self.session: Any = None
        self.prefix: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise SpecdecError("an assistant of a drafter only drafts: give it to generate as assistant_model")

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **asked: Any) -> GenerateDecoderOnlyOutput:  # type: ignore[override]
        """A draft for transformers: `sequences` `[1, n + g]` and `scores`, g tensors `[1, V]` of log q.

        Args:
            input_ids: the text so far, `[1, n]`.
            max_new_tokens: the most draft tokens.
            asked: `generation_config` says whether to sample; `logits_processor` is the target's own list, temperature
                and truncations included.
        """
        prefix = input_ids[0].tolist()
        if self.session is None or prefix[: len(self.prefix)] != self.prefix:
            self.session = self.drafter.start(self.config.vocab_size)
        self.prefix = prefix
        params = SamplingParams(
            1.0 if asked["generation_config"].do_sample else 0.0, processors=tuple(asked.get("logits_processor") or ())
        )
        random = Random(int(torch.randint(1 << 62, ())))  # follows the caller's torch.manual_seed
        draft = self.session.propose(prefix, max_new_tokens, params, random)
        if not len(draft):
            draft = Draft(prefix[-1:], certain=True)
        like = torch.zeros(len(draft.tokens), self.config.vocab_size, device=self.device)
        scores = draft.probs_like(like).log()
        text: Any = torch.cat([input_ids, draft.on(self.device)[None]], dim=1)
        return GenerateDecoderOnlyOutput(sequences=text, scores=tuple(scores[:, None].float()))
