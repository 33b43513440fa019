"""Encoder-decoders: sessions, the loops on a T5 pair, the synthetic task, and the packaged tiny pair."""

import json
from collections import Counter
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import specdec_lib as sd
from specdec_lib import sampling
from specdec_lib.audit.enumeration import runs
from specdec_lib.audit.identity import compare
from specdec_lib.files import sha256
from specdec_lib.models import load_transformers, open_session
from specdec_lib.models.pair import start_marker
from specdec_lib.models.seq2seq import EncoderDecoderSession
from specdec_lib.models.support import check_decoder
from specdec_lib.paths import MANIFEST
from specdec_lib.studies import tiny_t5
from specdec_lib.studies.both_sides import disturbed
from specdec_lib.studies.tiny_t5 import DRAFT, TARGET, Recipe, make_tokenizer
from specdec_lib.studies.translation import Clause, Noun, Sentence, sentences, vocabulary
from specdec_lib.verify.mutants import MUTANTS

SOURCE = torch.tensor([[5, 9, 17, 3, 8, 0]])
OUTPUT = torch.tensor([[12, 7, 25, 6, 11, 14]])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_transformers(tiny_folder("t5"), device="cpu")


def noisy_copy(folder, noise):
    return disturbed(load_transformers(folder, device="cpu"), noise, seed=1)


@pytest.fixture(scope="module")
def pair(tiny_folder, model):
    return sd.Pair(model, noisy_copy(tiny_folder("t5"), 0.05), sd.load_pair(tiny_folder("t5")).tokenizer)


def text_of(model, source=SOURCE, output=OUTPUT):
    return torch.cat([source, torch.tensor([[start_marker(model)]]), output], dim=1)


@torch.inference_mode()
def reference_logits(model, source=SOURCE, output=OUTPUT):
    """One pass over the whole output, without a cache: `[1 + outputs, V]`."""
    start = torch.tensor([[model.config.decoder_start_token_id]])
    return model(input_ids=source, decoder_input_ids=torch.cat([start, output], 1), use_cache=False).logits[0]


def reference_greedy(model, source, n, **settings):
    out = model.generate(torch.tensor([source]), max_new_tokens=n, do_sample=False, **settings)
    return out[0, 1:].tolist()  # less the start token


class Passes:
    """Counts how often a module runs, and keeps how long its inputs were."""

    def __init__(self, module):
        self.lengths = []
        module.register_forward_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs, output):
        self.lengths.append(kwargs["input_ids"].shape[1])


# -- the session ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(6, 7), (3, 6, 7, 9), (7, 8), (9,), ()])
def test_feeding_in_parts_gives_the_logits_of_one_pass(model, cuts):
    session = open_session(model)
    assert isinstance(session, EncoderDecoderSession)
    text = text_of(model)
    expected = reference_logits(model)
    for begin, end in zip((0, *cuts), (*cuts, 13), strict=True):
        last = max(min(end - begin, end - 6), 0)
        logits = session.feed(text[:, begin:end], last=last)
        assert logits.shape == (1, last, model.config.vocab_size)
        torch.testing.assert_close(logits[0], expected[end - 6 - last : max(end - 6, 0)], **CLOSE)
    assert session.length == 13


@pytest.mark.parametrize("length", [12, 10, 7, 6, 4, 0])
def test_rollback_forgets(model, length):
    text = text_of(model)
    session = open_session(model)
    session.feed(torch.cat([text[:, :10], torch.tensor([[1, 2, 3]])], 1), last=0)
    session.rollback(min(length, 10))
    assert session.length == min(length, 10)
    last = 13 - max(session.length, 6)
    logits = session.feed(text[:, session.length :], last=last)[0]
    torch.testing.assert_close(logits, reference_logits(model)[-last:], **CLOSE)


def test_another_source_gives_another_output(model):
    session = open_session(model)
    for source in (SOURCE, SOURCE.flip(1)):
        session.rollback(0)
        logits = session.feed(text_of(model, source), last=7)[0]
        torch.testing.assert_close(logits, reference_logits(model, source), **CLOSE)
    assert (reference_logits(model) - reference_logits(model, SOURCE.flip(1))).abs().max() > 0.1


def test_rows_of_a_batch_do_not_mix(model):
    sources = torch.cat([SOURCE, SOURCE.flip(1)])
    texts = torch.cat([text_of(model, s[None]) for s in sources])
    together = open_session(model, rows=2).feed(texts, last=7)
    for row, source in zip(together, sources, strict=True):
        torch.testing.assert_close(row, reference_logits(model, source[None]), **CLOSE)


def test_a_source_has_no_logits(model):
    with pytest.raises(ValueError, match="only 0 of those fed follow the source"):
        open_session(model).feed(SOURCE, last=1)
    with pytest.raises(ValueError, match="no source was fed"):
        open_session(model).feed(text_of(model)[:, 6:], last=1)
    session = open_session(model)
    session.feed(SOURCE, last=0)
    with pytest.raises(ValueError, match="holds 6 tokens"):
        session.rollback(7)


def test_what_the_session_relies_on_in_transformers(model):
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded = model.get_encoder()(input_ids=SOURCE)
    keyword = open_session(model)._keyword
    model(encoder_outputs=encoded, decoder_input_ids=OUTPUT, use_cache=True, **{keyword: cache})
    cache.crop(-4)
    assert cache.get_seq_length() == 2
    assert cache.cross_attention_cache.get_seq_length() == 6


# -- the loops -----------------------------------------------------------------------------------------


def test_each_encoder_runs_once_for_each_prompt(tiny_folder):
    target, draft = load_transformers(tiny_folder("t5"), device="cpu"), noisy_copy(tiny_folder("t5"), 0.05)
    for model in (target, draft):
        check_decoder(model)  # asks the model a few passes
    counts = [Passes(m.get_encoder()) for m in (target, draft)]
    out = sd.generate(sd.Pair(target, draft), [[5, 9, 17], [8, 3]], gamma=3, max_new_tokens=20, eos=[])
    assert out.stats.rounds > 4 and out.stats.rejected > 0
    assert [c.lengths for c in counts] == [[3, 2], [3, 2]]


def test_greedy_equals_plain_and_transformers(pair):
    accepted = rejected = 0
    for start, gamma in product(range(3), (1, 3, 8)):
        source = [start + 3, 9, 17, 3 + start, 0]
        plain = sd.generate_plain(pair, source, max_new_tokens=24).tokens[0]
        assert plain == reference_greedy(pair.target, source, 24)
        out = sd.generate(pair, source, gamma=gamma, max_new_tokens=24)
        difference = compare(pair.target, pair.encode(source), plain, out.tokens[0])
        assert difference is None or difference.tie
        accepted, rejected = accepted + out.stats.kept, rejected + out.stats.rejected
    assert accepted > 0 and rejected > 0  # both branches of the rule were taken


@pytest.fixture(scope="module")
def three_tokens(tiny_folder):
    """A T5 pair of three tokens, so that all texts can be enumerated."""
    flat = {"vocab_size": 3, "eos_token_id": 2, "initializer_factor": 1.0}  # no text is nearly certain
    folders = [tiny_folder("t5", seed=s, **flat) for s in (5, 2)]
    return sd.Pair(*(load_transformers(folder, device="cpu") for folder in folders))


def enumerated(pair, source, monkeypatch, **settings):
    """The exact law of what `generate` writes: the real loop and sessions, every draw replaced by all its outcomes."""

    def once(rng):
        path = rng._path

        def choose(law, *_):
            weights = torch.as_tensor(law, dtype=torch.float64)
            return path.choose((weights / weights.sum()).tolist())

        monkeypatch.setattr(sampling, "draw", choose)
        return tuple(sd.generate(pair, source, temperature=1.0, eos=[], **settings).tokens[0])

    law = Counter()
    for probability, text in runs(once):
        law[text] += probability
    return law


def law_of_target(model, source, length):
    """From the stock model's forward passes alone."""
    law = {}
    for text in product(range(3), repeat=length):
        p = reference_logits(model, torch.tensor([source]), torch.tensor([text])).double().softmax(-1)
        law[text] = float(np.prod([float(p[i, token]) for i, token in enumerate(text)]))
    return law


def variation(a, b):
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2


@pytest.mark.parametrize(("gamma", "source"), [(1, [1, 2]), (2, [2, 1, 1])])
def test_the_law_of_the_output_is_the_targets(three_tokens, monkeypatch, gamma, source):
    law = enumerated(three_tokens, source, monkeypatch, gamma=gamma, max_new_tokens=3)
    right = law_of_target(three_tokens.target, source, 3)
    draft = law_of_target(three_tokens.draft, source, 3)
    assert sum(right.values()) == pytest.approx(1) and max(right.values()) < 0.6
    assert variation(right, draft) > 0.05  # otherwise nothing is shown
    assert variation(law, right) < 1e-5


def test_a_wrong_rule_has_another_law(three_tokens, monkeypatch):
    wrong = MUTANTS["resampled from p"].rule
    law = enumerated(three_tokens, [1, 2], monkeypatch, gamma=1, max_new_tokens=2, verifier=wrong)
    assert variation(law, law_of_target(three_tokens.target, [1, 2], 2)) > 1e-3


def test_other_drafters_take_a_source(pair):
    source = [5, 9, 17, 5, 9, 0]
    plain = sd.generate_plain(pair, source, max_new_tokens=24, eos=[]).tokens
    table = sd.NGramDrafter.fit(plain, order=2)
    lookup = sd.PromptLookupDrafter(max_ngram=1)
    for drafter in (lookup, table, sd.ComposedDrafter([lookup, sd.ModelDrafter(pair.draft)])):
        out = sd.generate(sd.Pair(pair.target, drafter), source, gamma=4, max_new_tokens=24, eos=[])
        assert out.tokens == plain
        assert out.stats.kept > 0
        assert max(max(r.drafted, default=0) for r in out.trace) < 46  # the marker was never proposed
    assert lookup.start(46).propose([5, 7, 46, 9, 5], 3, sd.drafters.SamplingParams(), None).tokens == [7]


# -- prompts and bad input -----------------------------------------------------------------------------


def test_a_prompt_is_a_source_and_the_marker(pair):
    ids = pair.encode("abc")
    assert ids[-2:] == [0, 46]  # the tokenizer's end token, then the marker
    assert pair.encode(ids) == ids == pair.encode([{"role": "user", "content": "abc"}])
    out = sd.generate(pair, ["abc", "what is it?"], max_new_tokens=8, eos=[])
    assert [len(t) for t in out.tokens] == [8, 8] and all(out.texts)
    assert out.tokens[0] == sd.generate(pair, ids, max_new_tokens=8, eos=[]).tokens[0]


def test_bad_input_is_refused(pair, tiny_folder):
    with pytest.raises(sd.SpecdecError, match="token id 46 in the prompt is outside"):
        pair.encode([46, 5])
    with pytest.raises(sd.SpecdecError, match="empty prompt"):
        pair.encode([46])
    with pytest.raises(sd.SpecdecError, match="the target is an encoder-decoder and the draft is not"):
        sd.Pair(pair.target, load_transformers(tiny_folder("llama"), device="cpu"))
    with pytest.raises(sd.SpecdecError, match="the draft is an encoder-decoder and the target is not"):
        sd.Pair(load_transformers(tiny_folder("llama"), device="cpu"), pair.draft)
    with pytest.raises(sd.SpecdecError, match="chat messages need a tokenizer with a chat template"):
        pair.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


# -- the synthetic task --------------------------------------------------------------------------------

WINDOW = Sentence(
    (
        Clause(Noun("woman women", "the", "old"), "", "opens opened open", Noun("window windows", "a", "red"), None,
               "today", True),
        Clause(Noun("dog dogs", "the", ""), "wants to", "buys bought buy", Noun("apple apples", "the", "", 21), None,
               "", False),
    ),
    ("because",),
)  # fmt: skip


class Always:
    """Takes the first or the second of every two alternatives."""

    def __init__(self, first):
        self.first = first

    def random(self):
        return 0.0 if self.first else 0.99


def test_a_translation_by_hand():
    english = "today the old woman opens a red window because the dog wants to buy twenty one apples ."
    assert WINDOW.english == english
    first, second = (WINDOW.german(Always(which)).split(" , ") for which in (True, False))
    assert first == [
        "heute macht die alte Frau ein rotes Fenster auf",
        "weil der Hund ein und zwanzig Äpfel kaufen will .",
    ]
    assert second == [
        "die alte Dame öffnet heute ein rotes Fenster",
        "da der Hund ein und zwanzig Äpfel erwerben will .",
    ]
    first, second = " , ".join(first), " , ".join(second)
    assert WINDOW.is_translation(first) and WINDOW.is_translation(second)
    for right, other in (("rotes", "rote"), (" auf", ""), ("kaufen will", "will kaufen")):
        wrong = first.replace(right, other)
        assert wrong != first and not WINDOW.is_translation(wrong)


def test_drawn_translations_are_translations_in_known_words():
    words, rng = set(vocabulary()), np.random.default_rng(0)
    for sentence in islice(sentences(0), 100):
        german = sentence.german(rng)
        assert sentence.is_translation(german)
        assert {*sentence.english.split(), *german.split()} <= words


def test_held_out_sentences_are_no_training_sentences():
    train, held = ({s.english for s in islice(sentences(3, held_out=h), n)} for h, n in ((False, 2000), (True, 100)))
    assert len(train) > 1900 and not train & held


# -- training and the packaged pair --------------------------------------------------------------------


def test_training_that_is_interrupted_ends_in_the_same_weights(tmp_path):
    recipe, tokenizer = Recipe(1, 1, 16, 2, steps=6, batch=4), make_tokenizer()
    whole, parts = (tiny_t5.build(recipe, len(tokenizer)) for _ in range(2))
    curve = tiny_t5.train(recipe, whole, tokenizer, tmp_path / "whole", lambda entry: None, every=0.0)

    class Interruption(Exception):
        pass

    def stop(entry):
        if entry["step"] == 3:
            raise Interruption

    with pytest.raises(Interruption):
        tiny_t5.train(recipe, parts, tokenizer, tmp_path / "parts", stop, every=0.0)
    fresh = tiny_t5.build(recipe, len(tokenizer))
    assert tiny_t5.train(recipe, fresh, tokenizer, tmp_path / "parts", lambda entry: None, every=0.0) == curve
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], weight, rtol=0, atol=0)


def test_the_recipe_writes_a_pair_that_loads(tmp_path):
    recipes = {"target": Recipe(2, 2, 16, 2, steps=2, batch=4), "draft": Recipe(2, 1, 8, 1, steps=2, batch=4)}
    tiny_t5.main(tmp_path / "t5", recipes, tmp_path / "runs")
    pair = sd.load_pair(tmp_path / "t5" / "target", tmp_path / "t5" / "draft", device="cpu")
    assert len(sd.generate(pair, WINDOW.english, max_new_tokens=5, eos=[]).tokens[0]) == 5
    assert json.loads((tmp_path / "t5" / "draft" / MANIFEST).read_text())["recipe"]["width"] == 8


@pytest.fixture(scope="module")
def packaged():
    return sd.load_pair(TARGET, DRAFT, device="cpu")


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda path: path.name)
def test_the_packaged_pair_is_what_its_manifest_says(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], MANIFEST}
    for name, file in manifest["files"].items():
        assert sha256(folder / name) == file["sha256"]
    assert manifest["recipe"] == vars(tiny_t5.RECIPES[folder.name])
    assert "synthetic" in manifest["task"]


def test_the_packaged_pair_is_small_and_translates(packaged):
    assert sum(p.stat().st_size for p in TARGET.parent.rglob("*") if p.is_file()) < 10e6
    given = list(islice(sentences(7, held_out=True), 12))
    out = sd.generate(packaged, [s.english for s in given], gamma=5)
    right = [s.is_translation(text) for s, text in zip(given, out.texts, strict=True)]
    assert sum(right) >= 6
    assert 0.3 < out.stats.acceptance_rate < 0.99


def test_greedy_identity_on_the_packaged_pair(packaged):
    ties = 0
    for sentence in islice(sentences(8, held_out=True), 6):
        ids = packaged.encode(sentence.english)
        reference = reference_greedy(packaged.target, ids[:-1], 64)
        for gamma in (1, 5):
            tokens = sd.generate(packaged, sentence.english, gamma=gamma, max_new_tokens=64).tokens[0]
            difference = compare(packaged.target, ids, reference, tokens)
            assert difference is None or difference.tie
            ties += difference is not None
    print(f"12 greedy translations, {ties} part at a tie")


# -- the notebook on models and data of the hub's shape ------------------------------------------------


@pytest.mark.large  # a whole notebook with its audit; nbval runs it on the packaged pair, and this file tests its parts
def test_the_notebook_runs_on_folders_and_files_like_the_hubs(tmp_path, tiny_folder):
    """What the `gpu` profile does: another target and draft, and two tasks whose data lie in JSONL files."""
    import papermill

    text = "the quick brown fox jumps over the lazy dog and runs away from it"
    rows = {
        "ende": [{"translation": {"de": "hallo", "en": text[i:]}} for i in range(3)],
        "news": [{"article": text[: 20 + i], "highlights": "a fox", "id": f"{i}"} for i in range(3)],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parameters = {
        "target": str(tiny_folder("t5")),
        "draft": str(tiny_folder("t5", seed=1, d_model=16)),
        "tasks": {
            "EnDe": [str(tmp_path / "ende.jsonl"), "translation.en", "translate english to german "],
            "CNNDM": [str(tmp_path / "news.jsonl"), "article", "summarize "],
        },
        "n_prompts": 2,
        "max_new_tokens": 12,
        "gamma": 2,
        "longest": 3,
    }
    notebook = Path(__file__).resolve().parents[1] / "notebooks" / "15_encoder_decoder.ipynb"
    done = papermill.execute_notebook(
        notebook, tmp_path / "done.ipynb", parameters, kernel_name="python3", progress_bar=False, cwd=tmp_path,
        extra_arguments=["--IPKernelApp.log_level=40"],
    )  # fmt: skip
    said = [output.get("data", {}).get("text/plain", "") for cell in done.cells for output in cell.get("outputs", [])]
    (alpha,) = [text for text in said if "EnDe, T5-XXL" in text]  # the paper's rows, and ours for both tasks
    assert all(f"\n{task} " in alpha for task in ("EnDe", "CNNDM"))
    verdicts = [text for text in said if text.startswith(("holds", "does not hold"))]
    assert len(verdicts) == 6 and sum(text.startswith("holds") for text in verdicts[:2]) == 2
