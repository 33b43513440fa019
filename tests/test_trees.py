"""What a tree could give: against the exact room, against the decoder, against a search by hand."""

from fractions import Fraction as F
from itertools import product
from random import Random

import numpy as np
import pytest
import torch

import specdec_lib as sd
from specdec_lib.errors import SpecdecError
from specdec_lib.exact import output_law, random_model, random_pair, target_law
from specdec_lib.models.pair import load_model
from specdec_lib.models.session import open_session
from specdec_lib.studies.trees import (
    along,
    best_tree,
    by_rank,
    chain,
    confident,
    joined,
    kept_as,
    reach,
    reach_of_joins,
    rounds,
    without_replacement,
)
from specdec_lib.verify.multidraft import DRAWS, accepted, recursive

PROMPT = [5, 9, 17, 3]


def exact_weights(target, draft, text, k, draw):
    """`w` of a text in fractions, by enumeration of the children at each of its prefixes."""
    w = np.zeros((len(text), k), dtype=object)
    for i, token in enumerate(text):
        p, q = target.law(text[:i]), draft.law(text[:i])
        for weight, candidates, laws in DRAWS[draw](q, k):
            for j, (x, chance) in enumerate(zip(candidates, accepted(p, laws, candidates), strict=False)):
                w[i, j] += weight * chance * (x == token) / p[token]
    return w


def every_path(k, depth):
    return [path for d in range(1, depth + 1) for path in product(range(k), repeat=d)]


# -- against the exact room ----------------------------------------------------------------------------


@pytest.mark.parametrize(("draw", "k"), [("without_replacement", 1), ("without_replacement", 2), ("point_masses", 2)])
@pytest.mark.parametrize("kind", ["stochastic", "partial"])
def test_rounds_counted_on_the_targets_texts_are_the_rounds_of_decoding(kind, draw, k):
    """The law of total probability over texts; only because the rule is lossless are these the decoder's texts."""
    target, draft = random_pair(kind, 3, 4)
    depth, length = 2, 4
    expected = 0
    for text, weight in target_law(target, length).items():
        w = joined([exact_weights(target, draft, text, k, draw).astype(float)])
        expected += float(weight) * rounds(reach(w, every_path(k, depth))).sum()
    exact = output_law(recursive(k, draw), target, draft, depth, length, cap=True).rounds
    assert expected == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_kept_child_given_those_rejected_before_it_sums_to_the_enumeration(k):
    for seed in range(6):
        p, q = (random_model(4, s, zeros=seed % 2 == 1).law(()) for s in (2 * seed, 2 * seed + 1))
        for token in range(4):
            expected = [F(0)] * k
            for weight, candidates, laws in DRAWS["without_replacement"](q, k):
                for j, (x, chance) in enumerate(zip(candidates, accepted(p, laws, candidates), strict=False)):
                    expected[j] += weight * chance * (x == token)
            found = [F(0)] * k
            before = DRAWS["without_replacement"](q, k - 1) if k > 1 else [(F(1), (), None)]
            for weight, rejected, _ in before:
                for j, chance in enumerate(kept_as(p, q, token, rejected)):
                    found[j] += weight * chance
            assert found == expected


def test_drawn_weights_come_near_the_exact_ones():
    target, draft = random_pair("stochastic", 4, 3)
    text = (1, 2, 0)
    exact = exact_weights(target, draft, text, 3, "without_replacement").astype(float)
    p, q = (np.stack([m.law(text[:i]).astype(float) for i in range(3)]) for m in (target, draft))
    w = without_replacement(p, q, text, 3, Random(0), draws=4000)
    assert w[:, 0] == pytest.approx(exact[:, 0], rel=1e-12)  # nothing is drawn for the first child
    assert abs(w - exact).max() < 0.03 and exact[:, 1:].max() > 0.1


def test_children_run_out_where_the_draft_has_few_tokens():
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.0, 1.0, 0.0]])
    assert without_replacement(p, q, [1], 3, Random(0)).tolist() == [[1.0, 0.0, 0.0]]
    assert without_replacement(p, q, [0], 3, Random(0)).tolist() == [[0.0, 0.0, 0.0]]


# -- against the decoder -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tiny_folder):
    return sd.Pair(*(load_model(tiny_folder("llama", seed), device="cpu") for seed in (0, 1)))


def logits_along(model, text):
    session = open_session(model)
    return session.feed(torch.tensor([PROMPT + text[:-1]]), last=len(text))[0].numpy()


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_a_chain_on_the_greedy_text_takes_the_decoders_rounds(pair, gamma):
    both = [pair.draft, pair.target]  # a draft that is mostly wrong, and one that never is
    for draft in both:
        out = sd.generate(sd.Pair(pair.target, draft), PROMPT, gamma=gamma, max_new_tokens=40, eos=[])
        (text,) = out.tokens
        w = joined([by_rank(logits_along(draft, text), text, k=3)])
        starts = rounds(reach(w, chain(gamma)))
        assert starts.sum() == out.stats.rounds
        ends = np.cumsum([0] + [len(r.emitted) for r in out.trace])
        assert np.flatnonzero(starts).tolist() == ends[:-1].tolist()


def test_texts_are_independent_of_each_other():
    rng = np.random.default_rng(0)
    texts = [rng.random((n, 2)) / 2 for n in (5, 1, 7)]
    tree = every_path(2, 3)
    apart = [rounds(reach(joined([w]), tree)).sum() for w in texts]
    starts = rounds(reach(joined(texts), tree))
    assert starts.sum() == pytest.approx(sum(apart))
    assert starts[[0, 5, 6]] == pytest.approx([1, 1, 1])


# -- trees ---------------------------------------------------------------------------------------------


def test_the_best_tree_is_the_best_of_all_trees():
    """Every tree of three nodes over two children, by hand."""
    w = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1], [0, 0], [1, 0], [0, 0]], float)
    value = lambda tree: sum(along(w, path).mean() for path in tree)  # noqa: E731
    paths = every_path(2, 3)
    trees = [
        tree
        for tree in product(paths, repeat=3)
        if len(set(tree)) == 3 and all(len(path) == 1 or path[:-1] in tree for path in tree)
    ]
    found = best_tree(w, 3)
    assert len(found) == len(set(found)) == 3
    assert value(found) == max(map(value, trees)) > value(chain(3))
    assert max(map(len, best_tree(w, 10, depth=2))) == 2
    assert all(path[:-1] in found for path in found if len(path) > 1)


def test_a_wider_tree_never_keeps_less():
    w = np.random.default_rng(1).random((30, 4)) / 4
    totals = [rounds(reach(w, best_tree(w, nodes))).sum() for nodes in range(1, 12)]
    assert totals == sorted(totals, reverse=True)


def test_no_tree_is_plain_decoding():
    assert rounds(reach(np.ones((5, 2)), [])).tolist() == [1] * 5
    assert best_tree(np.ones((5, 2)), 0) == []
    with pytest.raises(SpecdecError, match="no text"):
        joined([])


def test_the_confident_tree_takes_the_most_probable_nodes(pair):
    """All paths of two tokens, and of three below the best of them, sorted."""

    def log_laws(*paths):
        rows = torch.tensor([PROMPT + list(path) for path in paths])
        return open_session(pair.draft, rows=len(rows)).feed(rows)[:, -1].log_softmax(-1)

    nodes = 4
    first = log_laws(())[0]
    ranked = [(float(s), (i,)) for i, s in enumerate(first)]
    second = log_laws(*[(i,) for i in range(len(first))])
    ranked += [(float(first[i] + s), (i, j)) for i, row in enumerate(second) for j, s in enumerate(row)]
    for score, path in sorted(ranked, reverse=True)[:nodes]:
        if len(path) == 2:
            ranked += [(score + float(s), (*path, j)) for j, s in enumerate(log_laws(path)[0])]
    best = [path for _, path in sorted(ranked, reverse=True)[:nodes]]
    session = open_session(pair.draft)
    for path in best:
        joins, depths = confident(session, PROMPT, [*path, 0, 0], nodes)
        assert depths == np.maximum.accumulate([len(node) for node in best]).tolist()
        assert joins[: len(path)] == [best.index(path[:d]) + 1 for d in range(1, len(path) + 1)]
        assert session.length == len(PROMPT)
    missing = next(i for i in range(46) if (i,) not in best)
    assert confident(session, PROMPT, [missing], nodes)[0] == confident(session, PROMPT, [], nodes)[0] == []


def test_joins_become_what_is_kept():
    joins = [[1, 4], [], [2]]
    assert reach_of_joins(joins, 1).tolist() == [[1.0], [0.0], [0.0]]
    assert reach_of_joins(joins, 4).tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert rounds(reach_of_joins(joins, 0)).sum() == 3
