"""How transformers' assisted generation and ours are asked the same question, and what the answers are called.

`probes.py` has the questions.  Each is asked on tiny random models of its own, since some damage what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers

from ..decode import Round, generate
from ..errors import SpecdecError, first_line
from ..generation_settings import neutral
from ..models.pair import Pair, fast

HONOURED, IGNORED, REFUSED, BREAKS = WORDS = ("honoured", "silently ignored", "refused", "breaks")

PROMPT = [5, 9, 17, 3, 8, 12, 7]
LENGTH = 24
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?-"


@dataclass(frozen=True)
class Outcome:
    """What happened: one of `WORDS`, and what was seen."""

    word: str
    seen: str


@dataclass(frozen=True)
class Finding:
    """A probe's result.

    Attributes:
        name: what was asked for.
        recorded: transformers' word in release 5.24.0.
        theirs, ours: what the installed releases do.
    """

    name: str
    recorded: str
    theirs: Outcome
    ours: Outcome

    @property
    def still(self) -> bool:
        """Whether transformers does what it did in 5.24.0."""
        return self.theirs.word == self.recorded

    @property
    def verdict(self) -> str:
        return "still so in the installed version" if self.still else f"changed: now {self.theirs.word}"


Side = Callable[[], Outcome]
PROBES: dict[str, tuple[str, Callable[[], tuple[Side, Side]]]] = {}


def probe(name: str, recorded: str) -> Callable[[Callable[[], tuple[Side, Side]]], Callable[[], tuple[Side, Side]]]:
    """Enter a function that returns both sides of a question into `PROBES`."""

    def enter(sides: Callable[[], tuple[Side, Side]]) -> Callable[[], tuple[Side, Side]]:
        PROBES[name] = recorded, sides
        return sides

    return enter


def look(name: str) -> Finding:
    """Run one probe.  An error that names the matter is a refusal, any other is a break."""
    recorded, sides = PROBES[name]
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            theirs, ours = (attempt(side) for side in sides())
    finally:
        transformers.logging.set_verbosity(level)
    return Finding(name, recorded, theirs, ours)


def attempt(side: Side) -> Outcome:
    try:
        return side()
    except (SpecdecError, ValueError, NotImplementedError) as error:
        return Outcome(REFUSED, first_line(error))
    except Exception as error:
        return Outcome(BREAKS, f"{type(error).__name__}: {first_line(error)}")


def honoured(right: bool, seen: str, otherwise: str = BREAKS) -> Outcome:
    return Outcome(HONOURED if right else otherwise, seen)


# -- counting what transformers does not return ------------------------------------------------------------


def traced(model: Any, prompt: list[int], **settings: Any) -> tuple[list[int], list[Round]]:
    """transformers' `generate` with an account of its rounds, as ours keeps it: new tokens and `Round`s.

    A hook on the target sees what each pass is fed, the draft at its end; a streamer is given what each round emits.
    Both are public.  Not for early exit, where the target is its own draft and the hook would see both.

    Args:
        prompt: token ids; one text, as assisted generation takes one at a time.
        settings: for `generate`.
    """
    fed: list[list[int]] = []
    emitted: list[list[int]] = []

    class Watch:
        def put(self, ids: torch.Tensor) -> None:
            emitted.append(ids.flatten().tolist())

        def end(self) -> None: ...

    def note(_: Any, args: tuple, kwargs: dict) -> None:
        fed.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0])[0].tolist())

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        new = written(model, prompt, streamer=Watch(), **settings)
    finally:
        hook.remove()
    rounds = []
    for i, (ids, out) in enumerate(zip(fed, emitted[1:], strict=True)):  # the streamer was given the prompt first
        drafted = ids[len(prompt) if i == 0 else 1 :]
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, out, strict=False)))
        rounds.append(Round(0, drafted, accepted, out, [], [], 0, 0.0, 0.0, 0.0))
    return new, rounds


def written(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    """The new tokens of transformers' `generate`: greedy, `LENGTH` of them, unless told otherwise."""
    ids = torch.tensor([prompt], device=model.device)
    fixed: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}
    with neutral(model):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **fixed | settings)[0, len(prompt) :].tolist()


# -- tiny models -------------------------------------------------------------------------------------------


def tiny(seed: int = 0, vocabulary: int = len(LETTERS), **shape: Any) -> Any:
    """A random Llama of two layers, in float64, where rounding decides nothing."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=1, eos_token_id=None,
        **shape,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).double().eval()


def noisy(seed: int = 0, noise: float = 0.05) -> Any:
    """`tiny(seed)` with noise on its weights: a draft that is right now and then.  It drafts five tokens."""
    return drafting(disturbed(tiny(seed), noise, seed=1), 5)


def disturbed(model: Any, noise: float, seed: int = 0) -> Any:
    """The model with noise on its weights, in place: a draft of any quality for the model that it was."""
    with torch.random.fork_rng([]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return model


def drafting(model: Any, gamma: int) -> Any:
    """The model as an assistant that always proposes `gamma` tokens: transformers reads that from the assistant."""
    model.generation_config.update(
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return model


def letters(also: str = "") -> Any:
    """A tokenizer of single letters: `LETTERS`, then what is asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(LETTERS + also)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def ours_of(draft: Any = None, tokenizer: Any = None, seed: int = 0) -> Pair:
    """`tiny(seed)` with a draft, as ours."""
    return Pair(fast(tiny(seed)), draft, tokenizer)


def text_of(pair: Pair, prompt: list[int] = PROMPT, **settings: Any) -> list[int]:
    """The new tokens of our `generate`, as `written` has them."""
    fixed: dict[str, Any] = {"max_new_tokens": LENGTH, "eos": []}
    return generate(pair, prompt, **fixed | settings).tokens[0]
