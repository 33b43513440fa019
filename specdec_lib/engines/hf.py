"""transformers' own `generate` as an engine: plain, assisted by a model, or by prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from ..generation_settings import neutral
from ..models.pair import is_encoder_decoder
from ..models.session import device_of
from ..sampling import SamplingParams
from .base import Engine, Reply, synchronise


class TransformersEngine(Engine):
    """One text after the other; of sampled texts of one prompt, without a draft, all in one batch.

    The model's own generation settings play no part: what a run asks for is all that shapes its text.

    Args:
        model: a transformers model, decoder or encoder-decoder.
        assistant: a smaller one, for `assistant_model`.
        gamma: tokens that the assistant, or the lookup, proposes a round; None with neither.
        lookup: the longest n-gram that transformers' prompt lookup looks up; None without it.
        threshold: `assistant_confidence_threshold`, below which the assistant stops; None keeps the library's default.
        name: as it stands in tables.
        options: what else `generate` takes, such as `assistant_ensemble_weight` or both tokenizers.
    """

    def __init__(
        self,
        model: Any,
        assistant: Any = None,
        gamma: int | None = None,
        lookup: int | None = None,
        threshold: float | None = 0.0,
        name: str = "",
        **options: Any,
    ):
        self.model, self.assistant, self.gamma, self.lookup = model, assistant, gamma, lookup
        self.threshold, self.options = threshold, options
        self.name = name or ("transformers plain" if gamma is None else "transformers assisted")

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        params: SamplingParams,
        seed: int = 0,
        ends: Sequence[int] = (),
    ) -> list[Reply]:
        device = device_of(self.model)
        same = len({tuple(ids) for ids in prompts}) == 1
        own_seed = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with quiet(), neutral(self.model, self.assistant), own_seed, self._assisting():
            for model in filter(None, [self.model, self.assistant]):  # asked for no end, generate takes the model's
                model.generation_config.eos_token_id = list(ends) or None
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            if self.gamma is None and same and len(prompts) > 1 and not params.greedy:
                return self._replies(prompts[0], new_tokens, params, ends, len(prompts))
            return [self._replies(ids, new_tokens, params, ends)[0] for ids in prompts]

    def _replies(
        self, ids: Sequence[int], new_tokens: int, params: SamplingParams, ends: Sequence[int], count: int = 1
    ) -> list[Reply]:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=not params.greedy, pad_token_id=0)
        config.eos_token_id = list(ends) or None
        if not params.greedy:  # 0 keeps all tokens, the default is 50
            config.temperature, config.top_k, config.top_p = params.temperature, params.top_k or 0, params.top_p or 1.0
            config.min_p = params.min_p
        if count > 1:
            config.num_return_sequences = count
        helper: dict[str, Any] = dict(self.options)
        if self.lookup is not None:
            config.prompt_lookup_num_tokens, config.max_matching_ngram_size = self.gamma, self.lookup
        elif self.assistant is not None:
            helper["assistant_model"] = self.assistant
        if params.processors:
            helper["logits_processor"] = list(params.processors)
        two = is_encoder_decoder(self.model)
        device = device_of(self.model)
        prompt = torch.tensor([list(ids[:-1] if two else ids)], device=device)  # the last one is the start marker
        watch = FirstToken()
        streamer = {"streamer": watch} if count == 1 else {}
        with torch.inference_mode():
            synchronise(device)
            start = perf_counter()
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config, **streamer, **helper
            )
            synchronise(device)
            seconds = (perf_counter() - start) / count
        first = watch.times[1] - start if len(watch.times) > 1 else float("nan")
        return [Reply(upto(row, ends), seconds, first) for row in out[:, 1 if two else len(ids) :].tolist()]

    @contextmanager
    def _assisting(self) -> Iterator[None]:
        """While it is open, the assistant proposes `gamma` tokens: transformers reads that from the assistant alone."""
        config = getattr(self.assistant, "generation_config", None)
        if config is None or self.gamma is None:
            yield
            return
        wanted: dict[str, Any] = {"num_assistant_tokens": self.gamma, "num_assistant_tokens_schedule": "constant"}
        if self.threshold is not None:
            wanted["assistant_confidence_threshold"] = self.threshold
        kept = {name: getattr(config, name, None) for name in wanted}
        config.update(**wanted)
        try:
            yield
        finally:
            config.update(**kept)


class FirstToken:
    """A transformers streamer that looks at the clock: it is given the prompt, then each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None: ...


def upto(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first end, which is kept: rows of a batch that ended are padded.

    >>> upto([5, 0, 9, 9], [0])
    [5, 0]
    """
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


@contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of how its own assisted generation calls its own `generate`."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
