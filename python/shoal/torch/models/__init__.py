"""Click models: modules that compute logits from `Inputs`. Each cites its paper.

    LR            logistic regression            a weight for each key
    FM            factorization machine          weights and vectors, all pairs interact
    WideAndDeep   Wide & Deep                    weights and a tower over the vectors
    DeepFM        DeepFM                         FM and a tower that share the vectors
    DCNV2         DCN-V2                         cross layers of full or low rank
    DLRM          DLRM                           products of pairs between two towers
    DIN           Deep Interest Network          attention of an item to sequences
    BST           Behavior Sequence Transformer  attention within sequences that end with an item
    AutoInt       AutoInt                        attention of fields to fields
    FwFM          Field-weighted FM              FM with a weight for each pair of fields
    MaskNet       MaskNet                        blocks that the whole example masks
    FinalMLP      FinalMLP                       two towers and a bilinear form
    MMoE          Mixture of experts             several tasks over shared experts
    PLE           Layered extraction             several tasks over own and shared experts, in layers
    ESMM          Entire space                   clicks, and conversions through both
    TwoTower      Two towers                     vectors of users and of items, for retrieval

    model = DeepFM(make, features, dim=16, hidden=(400, 400, 400));   logits = model(inputs)

``make`` creates the sparse parts (layers.py), so a model does not depend on where its rows are. Dense parts start at
torch's own initial values, drawn from torch's generator: `torch.manual_seed` before making a model fixes them.

Threads: as torch's modules.
"""

from __future__ import annotations

from shoal.torch.model import Model
from shoal.torch.models.autoint import AutoInt
from shoal.torch.models.bst import BST
from shoal.torch.models.dcnv2 import DCNV2
from shoal.torch.models.deepfm import DeepFM
from shoal.torch.models.din import DIN
from shoal.torch.models.dlrm import DLRM
from shoal.torch.models.esmm import ESMM
from shoal.torch.models.final_mlp import FinalMLP
from shoal.torch.models.fm import FM
from shoal.torch.models.fwfm import FwFM
from shoal.torch.models.layers import Deep, Lookup, Maker, Vectors, look_up
from shoal.torch.models.lr import LR
from shoal.torch.models.masknet import MaskNet
from shoal.torch.models.mmoe import MMoE
from shoal.torch.models.ple import PLE
from shoal.torch.models.two_tower import TwoTower
from shoal.torch.models.wide_deep import WideAndDeep

__all__ = [
    "BST",
    "DCNV2",
    "DIN",
    "DLRM",
    "ESMM",
    "FM",
    "LR",
    "MODELS",
    "PLE",
    "AutoInt",
    "Deep",
    "DeepFM",
    "FinalMLP",
    "FwFM",
    "Lookup",
    "MMoE",
    "Maker",
    "MaskNet",
    "TwoTower",
    "Vectors",
    "WideAndDeep",
    "look_up",
]

# By the names of the command line.
MODELS: dict[str, type[Model]] = {
    "lr": LR,
    "fm": FM,
    "wide_deep": WideAndDeep,
    "deepfm": DeepFM,
    "dcnv2": DCNV2,
    "dlrm": DLRM,
    "din": DIN,
    "bst": BST,
    "autoint": AutoInt,
    "fwfm": FwFM,
    "masknet": MaskNet,
    "final_mlp": FinalMLP,
    "mmoe": MMoE,
    "ple": PLE,
    "esmm": ESMM,
    "two_tower": TwoTower,
}
