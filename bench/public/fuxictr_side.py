"""Models of FuxiCTR's layers, trained by FuxiCTR with the settings that BARS published; run by a Python that has it.

    python bench/public/fuxictr_side.py frappe deepfm        below SHOAL_DATA; prints a line of JSON

FuxiCTR's package has the layers, the losses and the training, but not the models: those below combine its layers as its
`model_zoo` does. The settings are those of the runs that BARS has in its table of Frappe_x1 (github.com/reczoo/BARS,
ranking/ctr/MODEL/MODEL_frappe_x1). DLRM has dot products, as in its paper and in shoal; BARS' best run concatenates the
vectors, which makes it a plain tower.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    CrossNetV2,
    FactorizationMachine,
    FeatureEmbedding,
    InnerProductInteraction,
    LogisticRegression,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from torch import Tensor, nn

COLUMNS = {
    "frappe": ["user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"],
}
TOWER = (400, 400, 400)
SETTINGS: dict[str, dict[str, Any]] = {
    "lr": {"l2": 1e-5},
    "fm": {"l2": 5e-6},
    "wide_deep": {"l2": 0.1, "dropout": 0.6},
    "deepfm": {"l2": 0.05, "dropout": 0.2},
    "dcnv2": {"l2": 0.05, "dropout": 0.4, "cross": 4},
    "dlrm": {"l2": 0.1, "dropout": 0.4},
}
BATCH, RATE, DIM = 4096, 1e-3, 10


class Parts:
    """The rows of a set, on the device of the model."""

    def __init__(self, path: Path, columns: list[str], places: list[np.ndarray] | None, *, shuffle: bool) -> None:
        with lzma.open(path, "rt") as file:
            names = file.readline().strip().split(",")
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        raw = table[:, [names.index(column) for column in columns]]
        # Ids by column: 1 .. n of those that the training part has, 0 of all others.
        self.places = places or [np.unique(raw[:, j]) for j in range(len(columns))]
        ids = np.zeros_like(raw)
        for j, known in enumerate(self.places):
            place = np.minimum(np.searchsorted(known, raw[:, j]), len(known) - 1)
            ids[:, j] = np.where(known[place] == raw[:, j], place + 1, 0)
        self.columns, self.ids = columns, torch.from_numpy(ids)
        self.labels = torch.from_numpy(table[:, names.index("label")]).float()
        self.shuffle = shuffle

    def __len__(self) -> int:
        return -(-len(self.ids) // BATCH)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(len(self.ids)) if self.shuffle else torch.arange(len(self.ids))
        for rows in order.split(BATCH):
            given = {column: self.ids[rows, j] for j, column in enumerate(self.columns)}
            yield {**given, "label": self.labels[rows]}


def feature_map(columns: list[str], sizes: list[int]) -> FeatureMap:
    """Describe the columns."""
    made = FeatureMap("set", ".")
    made.features = OrderedDict(
        (name, {"source": "", "type": "categorical", "vocab_size": size, "index": j})
        for j, (name, size) in enumerate(zip(columns, sizes, strict=True))
    )
    made.labels, made.num_fields, made.default_emb_dim = ["label"], len(columns), DIM
    made.total_features, made.input_length = sum(sizes), len(columns)
    return made


class Network(BaseModel):
    """One of the models, by name."""

    def __init__(self, name: str, features: FeatureMap, settings: dict[str, Any], root: str) -> None:
        its = dict(settings)
        # LR and FM have one regularizer, of all parameters; the others one of the embeddings alone.
        l2 = its.pop("l2")
        super().__init__(
            features,
            model_id=name,
            embedding_regularizer=l2,
            net_regularizer=l2 if name in ("lr", "fm") else None,
            verbose=0,
            model_root=root,
            metrics=["AUC", "logloss"],
        )
        dropout, width = its.pop("dropout", 0.0), len(features.features) * DIM

        def tower(inputs: int, out: int | None = 1) -> MLP_Block:
            return MLP_Block(inputs, list(TOWER), output_dim=out, dropout_rates=dropout, batch_norm=True)

        self.name = name
        if name != "lr":
            self.embedding = FeatureEmbedding(features, DIM)
        if name in ("lr", "wide_deep"):
            self.linear = LogisticRegression(features)
        if name in ("fm", "deepfm"):
            self.machine = FactorizationMachine(features)
        if name in ("wide_deep", "deepfm"):
            self.tower = tower(width)
        if name == "dcnv2":
            self.cross, self.tower = CrossNetV2(width, its["cross"]), tower(width, None)
            self.last = nn.Linear(width + TOWER[-1], 1)
        if name == "dlrm":
            fields = len(features.features)
            self.dots = InnerProductInteraction(fields, output="inner_product")
            self.tower = tower(fields * (fields - 1) // 2)
        self.compile("adam", "binary_crossentropy", RATE)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the probabilities."""
        x = self.get_inputs(inputs)
        name = self.name
        if name == "lr":
            return {"y_pred": self.output_activation(self.linear(x))}
        rows = self.embedding(x)
        flat = rows.flatten(start_dim=1)
        if name == "fm":
            out = self.machine(x, rows)
        elif name == "deepfm":
            out = self.machine(x, rows) + self.tower(flat)
        elif name == "wide_deep":
            out = self.linear(x) + self.tower(flat)
        elif name == "dcnv2":
            out = self.last(torch.cat([self.cross(flat), self.tower(flat)], dim=-1))
        else:
            out = self.tower(self.dots(rows))
        return {"y_pred": self.output_activation(out)}


def train(data: Path, name: str, model: str, seed: int) -> dict[str, Any]:
    """Train one model, and evaluate the best weights."""
    columns = COLUMNS[name]
    parts = Parts(data / "train.csv.xz", columns, None, shuffle=True)
    valid, test = (Parts(data / f"{part}.csv.xz", columns, parts.places, shuffle=False) for part in ("valid", "test"))
    seed_everything(seed)
    with tempfile.TemporaryDirectory() as root:
        Path(root, "set").mkdir()
        features = feature_map(columns, [len(known) + 1 for known in parts.places])
        network = Network(model, features, SETTINGS[model], root)
        wall, cpu = time.perf_counter(), time.process_time()
        network.fit(parts, epochs=100, validation_data=valid)
        spent = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        found = network.evaluate(test)
    return {
        "model": model,
        "auc": float(found["AUC"]),
        "logloss": float(found["logloss"]),
        "passes": network._epoch_index + 1,
        **spent,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=list(COLUMNS))
    parser.add_argument("models", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=2021)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for model in options.models:
        found = train(Path(os.environ["SHOAL_DATA"], options.set), options.set, model, options.seed)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
