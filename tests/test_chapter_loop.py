"""The decoder of chapter 02 stands in its notebook alone.  Its cells are read from there and run on small models.

* Greedy text: that of plain decoding, for draft lengths 1 to 4 and two architectures.
* Sampling: every outcome of every draw is followed, so the distribution of the text is computed, not estimated.
* Both fail on planted faults.
"""

import inspect
from pathlib import Path

import nbformat
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_lib.audit.adapters import tabular
from specdec_lib.audit.memoize_forward import MemoizedForward
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import distance, target_law
from specdec_lib.studies.handwritten import audit_loop, in_turns, same_texts, shares
from tests.tiny import tiny_model

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "02_write_the_decoder.ipynb"
PROMPT = [5, 9, 17, 3, 8]
WORDS = [2, 1, 2, 0]
FAULTS = {
    "replaced from p": ("draw((p[i] - q[i]).clamp(min=0))", "draw(p[i])"),
    "rows of the wrong positions": ("[-gamma - 1 :]", "[-gamma - 2 : -1]"),
    "bonus token from the last row but one": ("draw(p[-1])", "draw(p[-2])"),
    "target never rolled back": ("        forget(target_cache, len(text) - 1)\n", ""),
    "target rolled back too little": ("forget(target_cache, len(text) - 1)", "forget(target_cache, len(text))"),
}
GREEDY_SEES = ("rows of the wrong positions", "target never rolled back", "target rolled back too little")


def cells():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    return "\n\n\n".join(cell.source for cell in notebook.cells if "the-loop" in cell.metadata.get("tags", []))


def loop(target, fault=None):
    """The names that the notebook's loop defines; a fault replaces one text by another, which must be there once."""
    source = cells()
    if fault is not None:
        old, new = FAULTS[fault]
        assert source.count(old) == 1
        source = source.replace(old, new)
    names = {"torch": torch, "inspect": inspect, "target": target}
    exec(source, names)
    return names


def three_words(seed):
    """A Llama over three tokens, in float64, with distributions that depend on the whole text."""
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=3, initializer_range=0.6, tie_word_embeddings=False, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).double().eval()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def small():
    return three_words(1), three_words(2)


def enumerated(names, run):
    """The probability of each thing that `run()` may return, when `draw` and `coin` take every way that they can.

    A path is a list of choices.  Each run follows one; where it ends, the other ways of its last open choice are next.
    """
    law, waiting = {}, [[]]
    while waiting:
        path, taken, weight = waiting.pop(), [], 1.0

        def choose(probs, path=path, taken=taken):
            nonlocal weight
            ways = [i for i, chance in enumerate(probs) if chance > 0]
            if len(taken) == len(path):
                waiting.extend([*taken, way] for way in ways[1:])
                path.append(ways[0])
            taken.append(path[len(taken)])
            weight *= probs[taken[-1]]
            return taken[-1]

        names["draw"] = lambda weights: choose((weights / weights.sum()).tolist())
        names["coin"] = lambda chance: bool(choose([1 - min(1.0, float(chance)), min(1.0, float(chance))]))
        result = tuple(run())
        law[result] = law.get(result, 0) + weight
    return law


def exact_law(target, draft, gamma, length, fault=None, end=None):
    names = loop(target, fault)
    quick = MemoizedForward(target), MemoizedForward(draft)
    return enumerated(names, lambda: names["decode"](*quick, WORDS, length, gamma, 1.0, end)[0])


def test_the_loop_has_at_most_forty_lines_and_its_cells_are_tagged():
    lines = [line for line in cells().splitlines() if line.strip()]
    assert len(lines) - 1 <= 40, "the import of DynamicCache does not count"
    assert lines[0].startswith("from transformers import")


def greedy(target, draft, gamma, fault=None, end=0):
    with torch.random.fork_rng():
        return loop(target, fault)["decode"](target, draft, PROMPT, 24, gamma, 0.0, end)[0]


def plain(target, end=0):
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + 24 and ids[-1] != end:
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_greedy_text_is_that_of_plain_decoding(kind, gamma):
    target, draft = (tiny_model(kind, range(46), seed, {}).double() for seed in (0, 1))
    assert greedy(target, draft, gamma) == plain(target)
    assert greedy(target, target, gamma) == plain(target)  # every draft token is kept
    word = plain(target, end=None)[5]
    assert greedy(target, draft, gamma, end=word) == plain(target, end=word)


@pytest.mark.parametrize("fault", GREEDY_SEES)
def test_greedy_text_shows_faults_of_the_bookkeeping(fault):
    target, draft = (tiny_model("llama", range(46), seed, {}).double() for seed in (0, 1))
    try:
        written = greedy(target, draft, 3, fault, end=None)
    except (IndexError, RuntimeError):
        return
    assert written != plain(target, end=None)


@pytest.mark.parametrize(("gamma", "length", "end"), [(1, 3, None), (2, 2, None), (3, 2, None), (2, 2, 1)])
def test_the_distribution_of_the_text_is_exactly_the_targets(small, gamma, length, end):
    truth = target_law(tabular(small[0], WORDS, end=end), length)
    assert float(distance(exact_law(*small, gamma, length, end=end), truth)) < 1e-9


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in GREEDY_SEES])
def test_enumeration_shows_faults_of_the_rule(small, fault):
    truth = target_law(tabular(small[0], WORDS), 3)
    assert float(distance(exact_law(*small, 1, 3, fault), truth)) > 0.01


def test_draw_and_coin_have_the_chances_that_enumeration_gives_them(small):
    """5,000 draws; each frequency is within five standard deviations of its chance: level 1e-5, a fault planted."""
    names, n = loop(small[0]), 5_000
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = torch.tensor([names["draw"](weights) for _ in range(n)]).bincount(minlength=4) / n
        heads = sum(names["coin"](0.75) for _ in range(n)) / n
    assert drawn[0] == drawn[2] == 0
    within = 5 * (0.75 * 0.25 / n) ** 0.5
    assert abs(drawn[3] - 0.75) < within and abs(heads - 0.75) < within
    assert abs(drawn[1] - 0.75) > within  # what a draw from the wrong weight would give


def test_audit_loop_passes_the_loop_and_finds_a_fault(small):
    """Level 1e-3; an effect of 0.1 is found with probability 0.99, and the fault is larger than that."""
    fault = "bonus token from the last row but one"
    truth = target_law(tabular(small[0], WORDS), 3)
    assert float(distance(exact_law(*small, 1, 3, fault), truth)) > 0.1
    plan = {"gamma": 1, "length": 3, "top_k": 3, "effect": 0.1, "level": 1e-3, "power": 0.99, "seed": 0}
    right, wrong = (loop(small[0], each)["decode"] for each in (None, fault))
    assert audit_loop(right, *small, WORDS, **plan).exit_status == 0
    assert audit_loop(wrong, *small, WORDS, **plan).exit_status == 1


def test_a_memoized_model_answers_for_what_the_cache_holds(small):
    from transformers import DynamicCache

    model, names = small[0], loop(small[0])
    quick, real = MemoizedForward(model), DynamicCache(config=model.config)
    cache = DynamicCache(config=quick.config)
    for text, keep in [([2, 1, 1], 3), ([2, 1, 1, 0, 0], 4), ([2, 1, 1, 0, 1, 2], 2), ([2, 1, 0], 3)]:
        assert torch.allclose(names["read"](quick, text, cache), names["read"](model, text, real))
        names["forget"](cache, keep)
        names["forget"](real, keep)
    with pytest.raises(SpecdecError, match="no cache"):
        quick(torch.tensor([[1]]))


def test_decoders_in_turns_are_timed_and_compared(small):
    target, draft = small
    names = loop(target)

    def written(ids):
        return names["decode"](target, draft, ids, 4, 2, 0.0)[0]

    found = in_turns({"one": written, "other": lambda ids: [*written(ids)[:-1], 7]}, [WORDS], watch={"target": target})
    assert found["one"].written == 4 and found["one"].calls["target"][0] >= 2
    assert 0 < found["one"].inside["target"][0] < found["one"].seconds[0]
    assert list(shares(found).columns) == ["target", "the rest"]
    found["other"].tokens[0][-1] = (written(WORDS)[-1] + 1) % 3
    assert same_texts(target, [WORDS], found).loc["other"].tolist() == [0, 0, 1]
