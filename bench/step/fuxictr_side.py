"""The same model of FuxiCTR's layers in FuxiCTR's training step: PYTHON -m step.fuxictr_side fuxictr MODEL THREADS.

The step is `BaseModel.train_step`: dense Adam over all rows, gradients clipped by norm. Sequences and lists are padded,
as its data loaders do. Embeddings are not regularized.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    CrossNetV2,
    DIN_Attention,
    FactorizationMachine,
    FeatureEmbeddingDict,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn

from step.data import ATTENTION, DIM, FIELDS, HIDDEN, LISTS, LONGEST, SEQUENCES, Example, each, place
from step.serve import begin, serve


def feature_map(model: str) -> FeatureMap:
    """Describe the fields; ids are 1 and above, 0 is padding."""
    size = each(model) + 1
    features = {f"f{j}": {"source": "", "type": "categorical", "vocab_size": size} for j in range(FIELDS[model])}
    for name in (*SEQUENCES, *LISTS) if model == "din" else ():
        its = {"source": "", "type": "sequence", "vocab_size": size, "padding_idx": 0, "max_len": LONGEST[name]}
        shared = {"share_embedding": "f0"} if name in SEQUENCES else {}
        pooled = {"feature_encoder": "layers.MaskedAveragePooling()"} if name in LISTS else {}
        features[name] = {**its, **shared, **pooled}
    made = FeatureMap("set", ".")
    made.features, made.labels = OrderedDict(features), ["label"]
    made.num_fields, made.default_emb_dim = len(features), DIM
    return made


class Network(BaseModel):
    """DeepFM, DCNv2 or DIN."""

    def __init__(self, model: str, features: FeatureMap, root: str) -> None:
        super().__init__(features, model_id=model, verbose=0, model_root=root, metrics=["AUC"])
        self.name, self._max_gradient_norm = model, 10.0
        self.embedding = FeatureEmbeddingDict(features, DIM)
        width = len(features.features) * DIM
        if model == "deepfm":
            self.machine = FactorizationMachine(features)
            self.tower = MLP_Block(width, list(HIDDEN), output_dim=1)
        elif model == "dcnv2":
            self.cross, self.tower = CrossNetV2(width, 3), MLP_Block(width, list(HIDDEN))
            self.last = nn.Linear(width + HIDDEN[-1], 1)
        else:
            self.interests = nn.ModuleList(DIN_Attention(DIM, list(ATTENTION)) for _ in SEQUENCES)
            self.tower = MLP_Block(width, list(HIDDEN), output_dim=1)
        self.compile("adam", "binary_crossentropy", 1e-3)
        self.reset_parameters()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the probabilities."""
        x = self.get_inputs(inputs)
        rows = self.embedding(x)
        for name, interest in zip(SEQUENCES, getattr(self, "interests", ()), strict=False):
            rows[name] = interest(rows["f0"], rows[name], x[name] != 0)
        if self.name == "deepfm":
            stacked = self.embedding.dict2tensor(rows)
            out = self.machine(x, stacked) + self.tower(stacked.flatten(start_dim=1))
        else:
            flat = self.embedding.dict2tensor(rows, flatten_emb=True)
            deep = self.tower(flat)
            out = self.last(torch.cat([self.cross(flat), deep], dim=-1)) if self.name == "dcnv2" else deep
        return {"y_pred": self.output_activation(out)}


def main() -> None:
    """Run the side."""
    _, model = begin()
    size = each(model)

    def prepare(one: Example) -> dict[str, Tensor]:
        given = {f"f{j}": one.ids[:, j] - j * size + 1 for j in range(FIELDS[model])}
        for name, (keys, offsets) in one.items.items():
            lengths = np.diff(offsets)
            mask = np.arange(LONGEST[name]) < lengths[:, None]
            padded = np.zeros(mask.shape, np.int64)
            padded[mask] = keys - place(model, name) * size + 1
            given[name] = padded
        return {
            **{name: torch.from_numpy(found) for name, found in given.items()},
            "label": torch.from_numpy(one.labels),
        }

    with tempfile.TemporaryDirectory() as root:
        network = Network(model, feature_map(model), root)
        network.train()
        serve(model, prepare, lambda given: float(network.train_step(given).detach()))


if __name__ == "__main__":
    main()
