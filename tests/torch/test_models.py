"""The click models: shapes, and each one's formula against a slow plain twin in float64."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the models are torch modules")

from torch import nn  # noqa: E402

import shoal  # noqa: E402
from click_twins import (  # noqa: E402
    DIM,
    FIELDS,
    SMALL,
    N,
    agrees,
    built,
    described,
    features_of,
    flat_of,
    inputs_of,
    make,
    needed_by,
    outputs_of,
    rows_of,
    settings_of,
    some,
    through,
    wide,
)
from shoal.models.features import Features  # noqa: E402
from shoal.torch.inputs import Inputs, Items  # noqa: E402
from shoal.torch.models import DCNV2, DIN, DLRM, FM, LR, MODELS, AutoInt, DeepFM, FinalMLP, FwFM, MaskNet, WideAndDeep  # noqa: E402

DENSELESS = ("lr", "fm", "fwfm")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


@pytest.mark.combined(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("per_field", [False, True])
@pytest.mark.parametrize("valued", [False, True])
def test_a_model_gives_one_logit_an_example_and_task_and_every_parameter_takes_part(name, per_field, valued):
    model = built(name, per_field=per_field)
    logits = outputs_of(model, inputs_of(name, valued=valued))
    assert {one.shape for one in logits.values()} == {(N,)}
    sum(one.square().sum() for one in logits.values()).backward()
    # Of a tower whose ReLUs are all off the gradient is 0, but it is there.
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_table_for_each_field_if_asked(name):
    made: list[tuple[str, int]] = []

    def noting(table: str, dim: int) -> nn.Module:
        made.append((table, dim))
        return make(table, dim)

    kind = MODELS[name]
    features = features_of(name)
    kind(noting, features, per_field=True, **needed_by(name))
    dims = {"lr": [1], "fm": [1, 16], "wide_deep": [1, 16], "deepfm": [1, 16], "fwfm": [1, 16]}.get(name, [16])
    stem = {1: "linear", 16: "embedding"}
    assert made == [(f"{stem[dim]}-{i}", dim) for dim in dims for i in range(FIELDS)]
    made.clear()
    kind(noting, features, **needed_by(name))
    assert made == [(stem[dim], dim) for dim in dims]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_starts_at_the_same_values_for_the_same_seed(name):
    x = inputs_of(name)
    logits = []
    for _ in range(2):
        torch.manual_seed(11)
        logits.append(torch.stack([*outputs_of(built(name), x).values()]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_the_examples_changes_no_logit(name):
    dense = 0 if name in DENSELESS else 2
    model, x = built(name, dense=dense), inputs_of(name, dense=dense)
    found = outputs_of(model, x)
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    seen = {key: reordered(items, order) for key, items in x.sequences.items()}
    moved = outputs_of(model, x._replace(keys=x.keys[order], dense=x.dense[order] if dense else None, sequences=seen))
    for task, logits in found.items():
        np.testing.assert_allclose(wide(moved[task]), wide(logits[order]), rtol=1e-5, atol=1e-5)


def reordered(items: Items, order: torch.Tensor) -> Items:
    parts = items.keys.tensor_split(items.offsets[1:-1])
    lengths = items.lengths[order]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Items(torch.cat([parts[i] for i in order]), offsets)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DENSELESS])
def test_dense_columns_change_the_logits(name):
    model = built(name, dense=3)
    x = inputs_of(name, dense=3)
    before, after = outputs_of(model, x), outputs_of(model, x._replace(dense=x.dense + 1))
    assert not any(torch.equal(before[task], after[task]) for task in before)


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_gives_no_logits(name):
    seen = {"seen": Items(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))}
    found = outputs_of(built(name), Inputs(torch.zeros(0, FIELDS, dtype=torch.int64), sequences=seen))
    assert {one.shape for one in found.values()} == {(0,)}


@pytest.mark.parametrize("valued", [False, True])
def test_lr_is_a_sum_of_weights(valued):
    x = some(valued=valued)
    model = LR(make, FIELDS)
    nn.init.constant_(model.linear.bias, 0.25)
    agrees(model, x, 0.25 + rows_of(model.weights, x).sum(axis=(1, 2)))


def second_order(rows: np.ndarray) -> np.ndarray:
    """Pair by pair."""
    return np.array([sum(np.dot(a, b) for a, b in itertools.combinations(example, 2)) for example in rows])


@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.parametrize("per_field", [False, True])
def test_fm_adds_the_products_of_all_pairs(valued, per_field):
    x = some(valued=valued)
    model = FM(make, FIELDS, dim=DIM, per_field=per_field)
    nn.init.constant_(model.linear.bias, -0.5)
    first = rows_of(model.weights, x).sum(axis=(1, 2)) - 0.5
    agrees(model, x, first + second_order(rows_of(model.factors, x)))


@pytest.mark.parametrize("dense", [0, 2])
def test_wide_and_deep_adds_a_tower_over_the_vectors(dense):
    x = some(valued=True, dense=dense)
    model = WideAndDeep(make, described(dense), dim=DIM, hidden=SMALL)
    rows = rows_of(model.embedding, x).reshape(N, -1)
    side = rows if x.dense is None else np.hstack([rows, wide(x.dense)])
    deep = through(model.deep, through(model.tower, side))[:, 0]
    agrees(model, x, rows_of(model.weights, x).sum(axis=(1, 2)) + deep)


def test_deepfm_is_a_machine_and_a_tower_over_the_same_vectors():
    x = some(valued=True)
    model = DeepFM(make, FIELDS, dim=DIM, hidden=SMALL)
    rows = rows_of(model.embedding, x)
    deep = through(model.deep, through(model.tower, rows.reshape(N, -1)))[:, 0]
    agrees(model, x, rows_of(model.weights, x).sum(axis=(1, 2)) + second_order(rows) + deep)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_dcn_crosses_the_first_layer_with_every_later_one(rank, structure):
    x = some(valued=True, dense=2)
    model = DCNV2(make, described(2), dim=DIM, hidden=SMALL, cross=2, rank=rank, structure=structure)
    first = np.hstack([rows_of(model.embedding, x).reshape(N, -1), wide(x.dense)])
    crossed = first
    for layer in model.cross.weights:
        matrices = [wide(one.weight) for one in layer.modules() if isinstance(one, nn.Linear)]
        (bias,) = [wide(one.bias) for one in layer.modules() if isinstance(one, nn.Linear) and one.bias is not None]
        matrix = matrices[0] if rank is None else matrices[1] @ matrices[0]
        following = np.empty_like(crossed)
        for example in range(N):
            for i in range(crossed.shape[1]):
                inner = sum(matrix[i, j] * crossed[example, j] for j in range(crossed.shape[1]))
                following[example, i] = first[example, i] * (inner + bias[i]) + crossed[example, i]
        crossed = following
    out = through(model.tower, crossed) if structure == "stacked" else np.hstack([crossed, through(model.tower, first)])
    agrees(model, x, through(model.last, out)[:, 0])


@pytest.mark.parametrize("dense", [0, 3])
def test_dlrm_takes_each_pair_of_vectors_once(dense):
    x = some(dense=dense)
    model = DLRM(make, described(dense), dim=DIM, hidden=SMALL, bottom=(6,))
    rows = rows_of(model.embedding, x)
    bottom = np.zeros((N, 0))
    vectors = rows
    if dense:
        bottom = through(model.bottom, wide(x.dense))
        vectors = np.concatenate([bottom[:, None, :], rows], axis=1)
    products = [[np.dot(example[i], example[j]) for i in range(len(example)) for j in range(i)] for example in vectors]
    agrees(model, x, through(model.last, through(model.tower, np.hstack([bottom, np.array(products)])))[:, 0])


@pytest.mark.parametrize("hidden", [(), SMALL])
def test_autoint_lets_each_field_attend_to_all_in_every_head(hidden):
    x = some(valued=True)
    heads, width = 2, 6
    model = AutoInt(make, FIELDS, dim=DIM, hidden=hidden, layers=2, heads=heads, width=width)
    rows = rows_of(model.embedding, x)
    seen = rows
    for layer in model.attention:
        query, key, value, residual = (
            wide(one.weight) for one in (layer.query, layer.key, layer.value, layer.residual)
        )
        out = np.zeros((N, FIELDS, width))
        for example, m in itertools.product(range(N), range(FIELDS)):
            e = seen[example]
            for h in range(heads):
                part = slice(h * width // heads, (h + 1) * width // heads)
                scores = [np.dot(query[part] @ e[m], key[part] @ e[k]) for k in range(FIELDS)]
                total = sum(math.exp(score) for score in scores)
                for k in range(FIELDS):
                    out[example, m, part] += math.exp(scores[k]) / total * (value[part] @ e[k])
            out[example, m] = np.maximum(out[example, m] + residual @ e[m], 0)
        seen = out
    expected = through(model.last, seen.reshape(N, -1))[:, 0]
    if hidden:
        expected += through(model.deep, through(model.tower, rows.reshape(N, -1)))[:, 0]
    agrees(model, x, expected)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("per_field", [False, True])
def test_din_weighs_each_item_of_the_history_by_the_item_at_hand_and_its_value(per_field, counted):
    x = some(valued=True, history=True)
    counts = np.arange(1, 12) / 2 if counted else np.ones(11)
    if counted:
        weights = torch.from_numpy(counts.astype(np.float32))
        x = x._replace(sequences={"seen": x.sequences["seen"]._replace(weights=weights)})
    features = described(history=True)
    model = DIN(make, features, dim=DIM, hidden=SMALL, attention=(3,), per_field=per_field)
    table = wide(model.embedding.tables[2 if per_field else 0].weight)
    keys, offsets = (one.numpy() for one in x.sequences["seen"][:2])
    interest = np.zeros((N, DIM))
    for example in range(N):
        item = table[x.keys[example, 2].item()] * x.values[example, 2].item()
        for i in range(offsets[example], offsets[example + 1]):
            h = table[keys[i]]
            weight = through(model.interests[0].tower, np.concatenate([h, item, h - item, h * item])[None])[0, 0]
            interest[example] += counts[i] * weight * h
    assert np.count_nonzero(interest.any(axis=1)) == 4  # three examples have no history
    out = np.hstack([interest, rows_of(model.embedding, x).reshape(N, -1)])
    agrees(model, x, through(model.last, through(model.tower, out))[:, 0])


@pytest.mark.parametrize("field_vectors", [False, True])
def test_fwfm_has_a_weight_for_each_pair_of_fields(field_vectors):
    x = some(valued=True)
    model = FwFM(make, FIELDS, dim=DIM, field_vectors=field_vectors)
    nn.init.normal_(model.pairs)
    nn.init.constant_(model.linear.bias, 0.25)
    rows, weights = rows_of(model.embedding, x), wide(model.pairs)
    if field_vectors:
        nn.init.normal_(model.fields)
        first = sum(rows[:, i] @ wide(model.fields)[i] for i in range(FIELDS))
    else:
        first = rows_of(model.weights, x).sum(axis=(1, 2))
    second = [
        sum(weights[i, j] * np.dot(example[i], example[j]) for i, j in itertools.combinations(range(FIELDS), 2))
        for example in rows
    ]
    agrees(model, x, 0.25 + first + second)


def test_fwfm_begins_as_a_factorization_machine():
    x = some(valued=True)
    model = FwFM(make, FIELDS, dim=DIM)
    first = rows_of(model.weights, x).sum(axis=(1, 2))
    agrees(model, x, first + second_order(rows_of(model.embedding, x)))


def normed(x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + eps)


@pytest.mark.parametrize("hidden", [(), SMALL])
@pytest.mark.parametrize("structure", ["parallel", "serial"])
def test_masknet_multiplies_by_masks_of_the_whole_example(structure, hidden):
    x = some(valued=True, dense=2)
    how = {"structure": structure, "blocks": 2, "width": 6, "reduction": 1.5, "hidden": hidden}
    model = MaskNet(make, described(2), dim=DIM, **how)
    for parameter in (
        model.norm.gain,
        model.norm.bias,
        *(one for its in model.blocks for one in its.norm.parameters()),
    ):
        nn.init.normal_(parameter)
    rows, whole = rows_of(model.embedding, x), flat_of(model.embedding, x)
    gain, bias = wide(model.norm.gain), wide(model.norm.bias)
    fields = [[normed(example[i]) * gain[i] + bias[i] for i in range(FIELDS)] for example in rows]
    first = np.hstack([np.array(fields).reshape(N, -1), wide(x.dense)])
    outs, h = [], first
    for block in model.blocks:
        masked = through(block.out, through(block.mask, whole) * h)
        out = [normed(example) * wide(block.norm.weight) + wide(block.norm.bias) for example in masked]
        outs.append(np.maximum(out, 0))
        h = outs[-1] if structure == "serial" else first
    assert model.blocks[1].mask[0].out_features == (9 if structure == "serial" else 33)
    out = h if structure == "serial" else np.hstack(outs)
    agrees(model, x, through(model.last, through(model.tower, out) if hidden else out)[:, 0])


@pytest.mark.parametrize(("gates", "context"), [(True, ()), (True, ("3", "1")), (False, ())])
@pytest.mark.parametrize("heads", [1, 2])
def test_final_mlp_joins_two_towers_over_gated_numbers_in_every_head(gates, context, heads):
    x = some(valued=True, dense=2)
    how = {"hidden": (7, 8), "hidden_2": (6,), "heads": heads, "gates": gates, "gate_hidden": (3,) if context else ()}
    model = FinalMLP(make, described(2), dim=DIM, context=context, **how)
    rows, whole = rows_of(model.embedding, x), flat_of(model.embedding, x)
    inputs = [whole, whole]
    for number, gate in enumerate(model.gates):
        if gate.context is not None:
            nn.init.normal_(gate.context)
            its = np.repeat(wide(gate.context), N, axis=0)
        else:
            assert number == 0
            its = np.hstack([rows[:, 3], rows[:, 1]])
        inputs[number] = whole * 2 / (1 + np.exp(-through(gate.gate, its)))
    first, second = through(model.first, inputs[0]), through(model.second, inputs[1])
    fusion = model.fusion
    expected = through(fusion.first, first)[:, 0] + through(fusion.second, second)[:, 0]
    for h, matrix in enumerate(wide(fusion.between)):
        one, other = np.split(first, heads, axis=1)[h], np.split(second, heads, axis=1)[h]
        expected += [a @ matrix @ b for a, b in zip(one, other, strict=True)]
    agrees(model, x, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("per_field", [False, True])
def test_a_step_of_a_model_is_one_step_of_each_table(name, per_field):
    """DIN looks the item's table up twice: its gradients are summed before the optimizer steps."""
    with shoal.local(threads=1) as store:
        make_tables = shoal.torch.tables(store, shoal.Adagrad(lr=0.1))
        model = MODELS[name](make_tables, features_of(name), **settings_of(name, per_field=per_field))
        x = inputs_of(name, valued=True)
        sum(one.sum() for one in outputs_of(model, x).values()).backward()
        assert {table.stats().step for table in store.tables.values()} == {1}
        keys = set(x.keys.flatten().tolist()) | {key for items in x.sequences.values() for key in items.keys.tolist()}
        if not per_field:
            assert {len(table) for table in store.tables.values()} == {len(keys)}


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: DIN(make, 3), r"DIN reads sequences, and there is none"),
        (lambda: DIN(make, Features(["ad", {"name": "seen", "type": "sequence"}])), r"'seen' shares the rows of no"),
        (lambda: built("din")(some()), r"the inputs have no list or sequence 'seen'"),
        (lambda: AutoInt(make, 3, heads=3, width=32), r"width is 32, which 3 heads cannot share"),
        (lambda: AutoInt(make, described(2), hidden=()), r"2 dense columns enter the tower"),
        (lambda: DeepFM(make, 3, hidden=()), r"hidden is empty"),
        (lambda: MaskNet(make, 3, structure="both"), r"structure is 'both'"),  # type: ignore[arg-type]
        (lambda: MaskNet(make, 3, blocks=0), r"blocks is 0: pass a whole number from 1"),
        (lambda: FinalMLP(make, 3, hidden=(8, 6), heads=4), r"6 and 6 wide, which 4 heads cannot share"),
        (lambda: FinalMLP(make, 3, gates=False, context=("1",)), r"context is of gates, and gates is false"),
        (lambda: FinalMLP(make, 3, context_2=("x",)), r"'x' is none of the fields with one key"),
        (lambda: FwFM(make, described(2)), r"FwFM has no dense part"),
        (lambda: DCNV2(make, 3, structure="both"), r"structure is 'both'"),  # type: ignore[arg-type]
        (lambda: DCNV2(make, 3, cross=-1), r"cross is -1: pass a whole number from 0 to 1024"),
        (lambda: DCNV2(make, 3, cross=10**30), r"cross is 10{30}: pass at most 1024"),
        (lambda: DeepFM(make, 3, hidden=[8, 0]), r"a width in hidden is 0: pass a whole number from 1"),
        (lambda: DeepFM(make, 3, hidden=[10**12]), r"a width in hidden is 10{12}: pass at most"),
        (lambda: DeepFM(make, 3, dropout=math.nan), r"dropout is nan: pass a number from 0, below 1"),
        (lambda: DeepFM(make, 3, embedding_dropout=-0.5), r"embedding_dropout is -0.5"),
        (lambda: MaskNet(make, 3, reduction=math.inf), r"reduction is inf: pass a number above 0"),
        (lambda: DeepFM(make, 3, activation=3), r"a tower has no activation 3: there are relu"),  # type: ignore[arg-type]
        (
            lambda: LR(make, 3)(Inputs(torch.ones(2, 4, dtype=torch.int64))),
            r"the keys are \(2, 4\), and the model has 3",
        ),
        (lambda: built("deepfm", dense=2)(some()), r"the dense numbers are None, and the model has 2 columns"),
    ],
)
def test_what_cannot_be_built_is_told(make_it: Callable[[], object], says: str):
    with pytest.raises(ValueError, match=says):
        make_it()


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: DeepFM(shoal, 3), r"make is a module: pass what makes tables, shoal.torch.tables\(store\)"),
        (lambda: DeepFM(make, 3, hidden=400), r"hidden is 400: pass a list of widths"),  # type: ignore[arg-type]
        (lambda: DLRM(make, described(2), bottom="64"), r"bottom is '64': pass a list of widths"),  # type: ignore[arg-type]
        (lambda: DCNV2(make, 3, experts=math.nan), r"experts is nan"),  # type: ignore[arg-type]
        (lambda: DeepFM(make, 3, dropout="0.5"), r"dropout is '0.5': pass a number"),  # type: ignore[arg-type]
        (lambda: LR(make, 3)(torch.ones(2, 3, dtype=torch.int64)), r"x is a Tensor: pass Inputs"),
    ],
)
def test_what_is_of_another_type_is_told(make_it: Callable[[], object], says: str):
    with pytest.raises(TypeError, match=says):
        make_it()
