"""The word that somebody meant: for errors that name the nearest of the words that there are."""

from __future__ import annotations

from collections.abc import Iterable

# Words of other programs for the same thing.
_SYNONYMS = (
    ("lr", "alpha", "learning_rate", "eta", "step_size"),
    ("epochs", "num_epochs", "n_epochs", "max_iter", "iterations"),
    ("dim", "embedding_dim", "emb_dim", "embedding_size"),
    ("hidden", "hidden_units", "layers", "dnn_hidden_units"),
    ("dropout", "dropout_rate", "net_dropout"),
    ("seed", "random_state"),
    ("label", "target"),
    ("output", "out", "dir", "model_dir", "save"),
    ("data", "train", "input", "train_data"),
    ("valid", "val", "validation", "valid_data"),
    ("categorical", "sparse", "sparse_features"),
    ("numeric", "numerical", "dense_features"),
    ("threads", "n_jobs", "num_threads"),
)


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word that another one stands for: a synonym, its beginning, or one with few other letters.

    Examples
    --------
    >>> nearest("--epoch", ["--epochs", "--output"]), nearest("--prot", ["--port"]), nearest("lr", ["alpha", "l2"])
    ('--epochs', '--port', 'alpha')
    >>> nearest("batch_norm", ["hidden", "dim"]) is nearest("--model", ["--delay"]) is None
    True
    """
    known = {_plain(one): one for one in words}
    plain = _plain(word)
    for group in _SYNONYMS:
        if plain in group:
            for one in group:
                if one in known:
                    return known[one]
    if plain in known:
        return known[plain]
    begun = [one for one in known if len(plain) > 2 and one.startswith(plain)]
    if begun:
        return known[min(begun, key=len)]
    limit = 0 if len(plain) < 3 else 1 if len(plain) < 6 else 2
    distances = {one: _distance(plain, one) for one in known if abs(len(one) - len(plain)) <= limit}
    found = min(distances, key=lambda one: distances[one], default=None)
    return None if found is None or distances[found] > limit else known[found]


def _plain(word: str) -> str:
    return word.lstrip("-").lower().replace("-", "_")


def _distance(a: str, b: str) -> int:
    """Count the letters to insert, remove, replace or exchange with their neighbours."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and other == a[i - 2]:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
