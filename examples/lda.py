"""Latent Dirichlet allocation by collapsed Gibbs sampling: counts of topics and words in a table of integers.

    python examples/lda.py                                     # in this process
    shoal launch --servers 2 --workers 2 examples/lda.py       # the documents divided among two workers

The corpus is drawn: words are the fields of a grid, each topic is a row or a column of it, and a document mixes topics
(Griffiths, Steyvers, PNAS 2004). A worker samples the topics of the words of its documents and pushes the changes of
the counts, which add up exactly in any order (AD-LDA: Newman et al., JMLR 2009). The perplexity is that of the second
halves of new documents, with the mixtures that fit the first halves. scikit-learn's variational LDA is measured alike.
"""

import argparse
import os

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import LatentDirichletAllocation

import shoal

SIDE, LENGTH, BATCH, ALPHA, BETA = 5, 80, 500, 0.2, 0.01
WORDS, TOPICS = SIDE * SIDE, 2 * SIDE
TRUE = np.concatenate([np.kron(np.eye(SIDE), np.ones(SIDE)), np.kron(np.ones(SIDE), np.eye(SIDE))]) / SIDE
TOTALS = WORDS  # the key of the row that is the sum of all others


def sample(store: shoal.Store, counts: shoal.Table, words: np.ndarray, sweeps: int, rng: np.random.Generator) -> None:
    """Sample the topics of all words, one word of each document of a batch at a time."""
    topics, mixtures = np.zeros(words.shape, np.int64), np.zeros((len(words), TOPICS), np.int64)
    for sweep in range(sweeps):
        for first in range(0, len(words), BATCH):
            batch, mixture = topics[first : first + BATCH], mixtures[first : first + BATCH]
            keys, at = np.unique(words[first : first + BATCH], return_inverse=True)
            before = counts.pull(np.append(keys, TOTALS))
            now = before.copy()
            for rows, drawn in zip(at.reshape(batch.shape).T, batch.T, strict=True):
                if sweep > 0:  # a word is not counted while its topic is drawn
                    add(now, mixture, rows, drawn, -1)
                odds = (np.maximum(now[rows], 0) + BETA) * (mixture + ALPHA) / (now[-1] + WORDS * BETA)
                odds = np.cumsum(odds, axis=1)
                drawn[:] = (odds < rng.random((len(odds), 1)) * odds[:, -1:]).sum(axis=1)
                add(now, mixture, rows, drawn, 1)
            counts.push(np.append(keys, TOTALS), now - before)
            store.tick()


def add(now: np.ndarray, mixture: np.ndarray, rows: np.ndarray, topics: np.ndarray, n: int) -> None:
    """Add n to the counts of one word of each document."""
    np.add.at(now, (rows, topics), n)
    now[-1] += n * np.bincount(topics, minlength=TOPICS)
    mixture[np.arange(len(topics)), topics] += n


def perplexity(topics: np.ndarray, words: np.ndarray) -> float:
    """Fit the mixtures of documents to their first halves; return the perplexity of the others."""
    first, second = (topics[:, half].transpose(1, 2, 0) for half in np.split(words, 2, axis=1))
    shares = np.ones_like(first)
    for _ in range(100):
        mixtures = ALPHA + (shares / shares.sum(axis=2, keepdims=True)).sum(axis=1, keepdims=True)
        shares = first * mixtures
    return float(np.exp(-np.log((second * mixtures / mixtures.sum(axis=2, keepdims=True)).sum(axis=2)).mean()))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=40, metavar="N", help="over all documents (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2, metavar="N", help="of the corpus and topics (%(default)s)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    corpus = [rng.choice(WORDS, LENGTH, p=mix @ TRUE) for mix in rng.dirichlet(np.full(TOPICS, ALPHA), 2500)]
    words, new = np.split(np.stack(corpus), [2000])
    with shoal.connect() if "SHOAL_SCHEDULER" in os.environ else shoal.local() as store:
        counts = store.table("words", dim=TOPICS, dtype="int64")
        rng = np.random.default_rng([arguments.seed, store.rank])
        sample(store, counts, words[store.rank :: store.num_workers], arguments.sweeps, rng)
        found = counts.pull(np.arange(WORDS)).T + BETA
    if store.rank == 0:
        peer = LatentDirichletAllocation(TOPICS, doc_topic_prior=ALPHA, topic_word_prior=BETA, random_state=1)
        peer.fit(np.stack([np.bincount(document, minlength=WORDS) for document in words]))
        for name, topics in (("truth", TRUE), ("shoal", found), ("scikit-learn", peer.components_)):
            topics = topics / topics.sum(axis=1, keepdims=True) + 1e-12
            distance = np.abs(topics[:, None] - TRUE).sum(axis=2) / 2  # total variation
            near = (distance[linear_sum_assignment(distance)] < 0.1).sum()
            print(f"{name:<13} perplexity {perplexity(topics, new):.2f}, {near} of {TOPICS} topics recovered")


if __name__ == "__main__":
    main()
